# Everything runs in a virtual environment in the checkout; nothing else needs to be set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed

# Tests wait more than they compute, so several run at once. One that hangs ends its process, and
# thereby the run.
TEST_PROCESSES ?= 3
HOSTED_TESTS := $(wildcard tests/unit/test_notes.py \
	$(patsubst %,tests/integration/test_%.py,notebook ipyparallel hosted panel widgets debugger))
# In the order of the folders, for the tests of tests/unit, which take no time, come last then.
BESIDE := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo unit standin test matrix test-torch test-hosted tutorials lint notebooks docs release-check bench soak soak-keep soak-hosts clean

demo: $(DEMO)  ## train a classifier on all ranks and show the result
	$(BIN)/python notebooks/demo.py

unit: $(STAMP)  ## run the tests that start no session
	$(BIN)/python -m pytest $(BESIDE) tests/unit

standin: $(STAMP)  ## build the stand-in for NCCL and its device, where that can be done
	$(BIN)/python -m tests.standin --if-possible

test: $(STAMP) standin  ## run the tests
	$(BIN)/python -m pytest $(BESIDE) -m "not notebook and not alone and not tutorial"
	$(BIN)/python -m pytest -m alone

matrix:  ## try other versions of Python, torch and Jupyter, some of them with LEGS="smallest newest"
	$(PYTHON) .ci/matrix.py --write $(LEGS)

test-torch:  ## the integration tests with another torch: make test-torch TORCH=2.15.0
	$(PYTHON) .ci/matrix.py --keep --torch $(TORCH) -- $(or $(TESTS),tests/integration -m "not notebook")

test-hosted:  ## tests with the older packages of hosted notebooks
	$(PYTHON) .ci/matrix.py --keep hosted -- $(or $(TESTS),$(HOSTED_TESTS))

tutorials: $(STAMP)  ## programs after the official tutorials, and those of libraries, in an environment of their own
	.ci/test-tutorials

lint: $(STAMP)  ## style, types, import laws, the JavaScript
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/oxlint --deny-warnings --deny suspicious distsession

notebooks: $(STAMP)  ## execute the notebooks
	$(BIN)/python -m pytest -m notebook

docs: $(STAMP)  ## build the documentation
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

release-check:  ## build the release, and try it in an empty environment
	PYTHON="$(PYTHON)" .ci/release-check

bench: $(STAMP)  ## measure this project beside its peers
	$(BIN)/python -m tests.benchmarks

soak: $(STAMP)  ## faults on a session, also one used all day; kernels killed; many sessions; broken programs; torch's tests
	$(BIN)/python -m tests.integration.chaos --faults 1000
	$(BIN)/python -m tests.integration.chaos --faults 40 --between 500
	$(BIN)/python -m tests.integration.chaos --faults 100 --ranks 32
	$(BIN)/python -m tests.integration.kills --kills 300
	$(BIN)/python -m tests.integration.cycles --cycles 200
	$(BIN)/python -m tests.integration.first_lines
	$(BIN)/python -m tests.torch_suites

soak-keep: $(STAMP)  ## kernels of a kept session killed, or taken from, at a thousand moments
	$(BIN)/python -m tests.integration.keep_kills --kills 1000

soak-hosts: $(STAMP)  ## faults on a session over hosts; needs root, and what tests/integration/host_lab.py does
	$(BIN)/python -m tests.integration.host_chaos --steps 200

# The demo needs the package alone, and that is soon installed.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	.ci/install-torch $(BIN)/python
	.ci/pip_install.py $(BIN)/python -c constraints.txt -e ".[demo]"
	touch $(DEMO)

$(STAMP): $(DEMO)
	.ci/pip_install.py $(BIN)/python -c constraints.txt -e ".[test,browser,notebooks,docs,lint]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-matrix .venv-libraries .venv-release build/standin-* dist docs/_build .mypy_cache .ruff_cache .pytest_cache
