"""Try distsession with other versions of Python, torch and Jupyter than those it is made with.

``matrix.py`` tries all legs, ``matrix.py smallest newest`` these two; ``--list`` names them. Each
leg has an environment of its own in ``.venv-matrix``, with nothing of ``.venv``, and runs
``tests/integration/test_compatibility.py`` there, that of torch's newest releases
``test_new_modules.py``, too, or what pytest is told behind ``--``: all integration tests by
``matrix.py newest -- tests/integration -n 2``. It is removed after that, unless ``--keep`` is
given; ``--install`` makes it for a later run and does no more. ``--write`` writes
docs/compatibility.md.

``matrix.py --torch 2.15.0`` makes a leg with another torch than the pinned one, and ``--with
ipykernel==6.29.5`` with another package. All others are those of constraints.txt.

Most releases of torch are on the package index as CUDA builds only. Where there is no GPU they are
installed without CUDA's packages, and ``cuda_stand_ins.py`` builds empty libraries in their place:
no GPU is found, gloo and the CPU are the real release. That takes up to 2 GB while a leg runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/integration/test_compatibility.py"
NEW_MODULES = "tests/integration/test_new_modules.py"
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- written by make matrix -->\n", "<!-- until here -->"
COLUMNS = ("Python", "torch", "ipython", "ipykernel", "ipywidgets", "ipyparallel")
COLUMNS += ("jupyter_client", "traitlets", "numpy")
TEST_PACKAGES = ("pytest", "pytest-timeout", "psutil")
"""What that one module of tests needs. For any others, the extra ``test`` is installed."""
PINNED_TORCH = re.search(r"^torch==(.*)", (ROOT / "constraints.txt").read_text(), re.M)[1]
HAS_GPU = shutil.which("nvidia-smi") is not None


@dataclass(frozen=True)
class Leg:
    """Versions that are tried together.

    Attributes:
        name: In the table, and on the command line.
        python: Such as ``3.12``; if it is not to be had, the leg takes the Python that runs this.
        pins: Packages with versions, as pip takes them.
        rest: Where versions of packages that are not in ``pins`` come from: ``"pinned"`` in
            constraints.txt, the ``"newest"`` there are, or the ``"oldest"`` that pyproject.toml
            allows.
        needs_python: Without its Python the leg says nothing.
        tests: What pytest is told where nothing follows ``--``.
    """

    name: str
    python: str
    pins: str
    rest: str = "pinned"
    needs_python: bool = False
    tests: Sequence[str] = (TESTS,)


_HOSTED = (
    "torch==2.10.0 ipython==7.34.0 ipykernel==6.17.1 ipyparallel==8.8.0 jupyter_client==7.4.9 "
    "traitlets==5.7.1"
)

LEGS = (
    Leg("smallest", "3.11", "", "oldest"),
    Leg("hosted", "3.12", f"{_HOSTED} ipywidgets==7.7.1 numpy==2.0.2", "newest"),
    Leg("newest", "3.13", "torch==2.15.0 numpy", tests=(TESTS, NEW_MODULES)),
    Leg("pinned", "3.11", "torch==2.13.0 numpy"),
    Leg("hosted-widgets-8", "3.12", f"{_HOSTED} ipywidgets==8.1.5 numpy==1.26.4", "newest"),
    Leg(
        "ipykernel-6",
        "3.11",
        "torch==2.9.1 ipython==8.6.* ipykernel==6.29.5 ipywidgets==8.0.* ipyparallel==9.1.* "
        "jupyter_client==8.0.* numpy==1.26.4",
        "newest",
    ),
    Leg(
        "ipython-8",
        "3.12",
        "torch==2.14.1 ipython==8.* ipykernel==7.* ipyparallel==9.1.* numpy==2.*",
        "newest",
    ),
    Leg("ipyparallel-8", "3.11", "torch==2.13.0 ipykernel==7.* ipyparallel==8.8.0", "newest"),
    Leg("python-3.14", "3.14", "torch==2.15.0 numpy", "newest", needs_python=True),
    Leg("today", "3.12", "torch numpy", "newest", tests=(TESTS, NEW_MODULES)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("legs", nargs="*", metavar="LEG", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the legs")
    parser.add_argument("--torch", metavar="VERSION", help="a leg with this torch")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--python", default="", metavar="X.Y", help="of such a leg")
    parser.add_argument(
        "--install", action="store_true", help="only make the environments, and keep them"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    own, tests = _split(sys.argv[1:])
    asked = parser.parse_args(own)
    if asked.list:
        for leg in LEGS:
            print(f"{leg.name}: Python {leg.python}, {leg.pins} ({leg.rest})")
        return 0
    known = {leg.name: leg for leg in LEGS}
    for name in set(asked.legs) - set(known):
        parser.error(f"there is no leg {name!r}, but {', '.join(known)}")
    legs = [known[name] for name in asked.legs] or list(LEGS)
    if asked.torch or asked.others:
        pins = [f"torch=={asked.torch or PINNED_TORCH}", *asked.others]
        legs = [Leg("-".join(pins), asked.python, " ".join(pins))]
    if asked.install:
        for leg in legs:
            ready(leg, with_extra=bool(tests))
        return 0
    outcomes = []
    for leg in legs:
        outcomes.append(Outcome(leg, *try_leg(leg, tests, keep=asked.keep)))
        if asked.write:
            write_row(outcomes[-1])
    for outcome in outcomes:
        print(f"{outcome.leg.name}: {outcome.verdict()}")
    return int(any(outcome.has_failed for outcome in outcomes))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is for this program, and what follows ``--``, which is for pytest."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


# --- environments ---------------------------------------------------------------------------------


def try_leg(leg: Leg, tests: Sequence[str], *, keep: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Set up the environment of a leg, and run the tests there.

    Returns:
        Versions of what was installed, and the outcome of each test; both are empty where the leg's
        Python is not there.
    """
    print(f"--- {leg.name}", flush=True)
    begin = time.monotonic()
    try:
        venv = ready(leg, with_extra=bool(tests))
        if venv is None:
            return {}, {}
        versions = read_versions(venv)
        print(" ".join(f"{name} {version}" for name, version in versions.items()))
        print(f"installed after {time.monotonic() - begin:.0f} s", flush=True)
        return versions, {"install": check_install(venv), **run_tests(venv, tests or leg.tests)}
    finally:
        if not keep:
            shutil.rmtree(folder_of(leg), ignore_errors=True)


def ready(leg: Leg, *, with_extra: bool) -> Path | None:
    """The environment of a leg, which is made unless it is there; None without its Python."""
    interpreter = find_python(leg.python) or ("" if leg.needs_python else sys.executable)
    if not interpreter:
        return None
    venv = folder_of(leg)
    done = venv / f".installed{'-with-extra' if with_extra else ''}"
    if not (done.exists() or (venv / ".installed-with-extra").exists()):
        shutil.rmtree(venv, ignore_errors=True)
        install(leg, interpreter, venv, with_extra=with_extra)
        done.touch()
    return venv


def folder_of(leg: Leg) -> Path:
    return ROOT / ".venv-matrix" / re.sub(r"[^\w.=-]+", "-", leg.name)


def find_python(version: str) -> str:
    """An interpreter of this version, such as ``3.12``: ``PYTHON312`` may name it."""
    candidates = [os.environ.get(f"PYTHON{version.replace('.', '')}"), sys.executable]
    candidates += [shutil.which(f"python{version}"), *_of_pyenv(version)]
    for path in candidates:
        ask = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        if path and _said(path, "-c", ask) == version:
            return path
    return ""


def _of_pyenv(version: str) -> Iterator[str]:
    if shutil.which("pyenv"):
        for name in _said("pyenv", "whence", f"python{version}").split():
            yield f"{_said('pyenv', 'prefix', name)}/bin/python{version}"


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def install(leg: Leg, interpreter: str, venv: Path, *, with_extra: bool) -> None:
    """Make a virtual environment with this project and what the leg says of other packages."""
    subprocess.run([interpreter, "-m", "venv", str(venv)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(project["dependencies"])
    if leg.rest == "oldest":
        needed = [re.sub(r">=([\d.]+).*", r"==\1", text) for text in needed]
    pins = {_name(pin): pin for pin in [*needed, *leg.pins.split()]}
    install_torch(venv, pins.pop("torch"))
    others = project["optional-dependencies"]["test"] if with_extra else TEST_PACKAGES
    others = [*others, *_needs_of_torch(venv)]
    constraints = venv / "constraints.txt"
    constraints.write_text(_constraints(leg) if leg.rest == "pinned" else "")
    _pip(venv, "-c", str(constraints), *pins.values(), *others)
    _pip(venv, "--no-deps", "-e", str(ROOT))


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-")


def _constraints(leg: Leg) -> str:
    """What constraints.txt says, but of packages that the leg gives a version of its own."""
    own = {"torch", *(_name(pin) for pin in leg.pins.split() if "=" in pin)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line[:1] not in ("", "#") and _name(line) not in own)


def _pip(venv: Path, *arguments: str, may_fail: bool = False) -> bool:
    command = [str(venv / "bin/python"), "-m", "pip", "install", "-q", "--no-compile"]
    # The empty file takes the place of constraints that pip may be configured with.
    environ = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    # Of what pip says, all that is no error is about CUDA's packages, which are left out.
    done = subprocess.run(
        [*command, *arguments], env=environ, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode and not may_fail:
        sys.exit(f"{done.stderr}\npip failed in {venv.name}")
    return done.returncode == 0


def install_torch(venv: Path, requirement: str) -> None:
    """With all its packages where there is a GPU; else without CUDA's."""
    if HAS_GPU:
        _pip(venv, requirement)
        return
    exact = re.fullmatch(r"torch==[\d.]+", requirement)
    if exact is None or not _pip(venv, "--no-deps", f"{requirement}+cpu", may_fail=True):
        _pip(venv, "--no-deps", requirement)
    (package,) = venv.glob("lib/python*/site-packages/torch")
    subprocess.run([sys.executable, str(ROOT / ".ci/cuda_stand_ins.py"), str(package)], check=True)


def _needs_of_torch(venv: Path) -> list[str]:
    ask = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    needs = json.loads(_said(str(venv / "bin/python"), "-c", ask))
    cuda = ("nvidia", "cuda", "triton")
    return [need for need in needs if not need.startswith(cuda) and "extra ==" not in need]


def check_install(venv: Path) -> str:
    """Whether pip, asked for what this project needs, leaves alone all that is there."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    report = venv / "install.json"
    # Not torch, whose packages of CUDA are missing on purpose.
    others = [need for need in needs if _name(need) != "torch"]
    _pip(venv, "--dry-run", "--report", str(report), *others)
    changes = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    for change in changes:
        print(f"pip would install {change['name']} {change['version']}")
    return "failed" if changes else "passed"


def read_versions(venv: Path) -> dict[str, str]:
    """Of Python and of the packages in the table; "none" for what is not installed."""
    ask = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name'].lower().replace('-', '_'): d.version for d in"
        " m.distributions()}\n"
        "found['Python'] = platform.python_version()\n"
        "found['torch'] = __import__('torch').__version__\n"
        "print(json.dumps({n: found.get(n, 'none') for n in sys.argv[1:]}))"
    )
    command = [str(venv / "bin/python"), "-W", "ignore", "-c", ask, *COLUMNS]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def run_tests(venv: Path, tests: Sequence[str]) -> dict[str, str]:
    """The outcome of each test: "passed", "failed" or "skipped"."""
    report = venv / "report.xml"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PATH": str(venv / "share/jupyter"),
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    command = [str(venv / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::DeprecationWarning"]
    command += [f"--junitxml={report}", *tests]
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcomes[case.get("name", "")] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
    if code and "failed" not in outcomes.values():
        outcomes["pytest"] = "failed"
    return outcomes


# --- what came out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came out of a leg."""

    leg: Leg
    versions: dict[str, str]
    tests: dict[str, str]

    @property
    def has_failed(self) -> bool:
        return "failed" in self.tests.values()

    def verdict(self) -> str:
        if not self.tests:
            return f"not tried: no Python {self.leg.python} here"
        failed = [name for name, outcome in self.tests.items() if outcome == "failed"]
        if failed:
            return f"fails: {', '.join(name.removeprefix('test_') for name in failed)}"
        return f"all {len(self.tests)} pass"

    def row(self) -> str:
        cells = [self.versions.get(name, "") for name in COLUMNS]
        cells[1] += " ¹" if "+cpu" not in cells[1] and cells[1] and not HAS_GPU else ""
        return f"| {' | '.join([self.leg.name, *cells, self.verdict()])} |\n"


def write_row(outcome: Outcome) -> None:
    """Put what came out of a leg into the page; the rows of other legs stay."""
    if not outcome.tests:
        return
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, tail = rest.partition(END)
    rows = {line.split(" | ")[0].removeprefix("| "): f"{line}\n" for line in table.splitlines()}
    rows[outcome.leg.name] = outcome.row()
    lines = [f"| Leg | {' | '.join(COLUMNS)} | Result |\n", f"|{'---|' * (len(COLUMNS) + 2)}\n"]
    lines += [rows[leg.name] for leg in LEGS if leg.name in rows]
    PAGE.write_text(head + begin + "\n" + "".join(lines) + "\n" + end + tail)


if __name__ == "__main__":
    sys.exit(main())
