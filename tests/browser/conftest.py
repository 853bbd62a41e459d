"""JupyterLab in Chromium.

Where Chromium is missing these tests are skipped, but not where ``DISTSESSION_BROWSER=required``
says that it has to be there, as in CI.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import assert_nothing_left, traces
from tests.warm_agents import WarmProcess

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from playwright.sync_api import Browser, Playwright

    from tests.browser.lab import Lab, Notebook, Tab

IS_REQUIRED = os.environ.get("DISTSESSION_BROWSER") == "required"
if importlib.util.find_spec("playwright") is None and not IS_REQUIRED:
    collect_ignore_glob = ["test_*.py"]

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # it cannot be had in a container; all pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # pages ask no other machine
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a process waits for JupyterLab and its page as well."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(300))


def program() -> str | None:
    """Chromium, by whatever name it is on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def chromium(playwright: Playwright) -> Browser:
    """Chromium without a window."""
    # Its processes come and go as it likes; they are no traces of a session.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_RUN_OF"}
    return playwright.chromium.launch(executable_path=program(), args=list(ARGUMENTS), env=environ)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium, started once for all tests."""
    if program() is None:
        if IS_REQUIRED:
            pytest.fail(f"there is no {' or '.join(NAMES)} on PATH, and it is required")
        pytest.skip("needs Chromium on PATH (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = chromium(playwright)
        yield started
        started.close()


@pytest.fixture(scope="package")
def lab(browser: Any, warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server for all tests."""
    from tests.browser.lab import Lab

    server = Lab(tmp_path_factory.mktemp("lab"), warm)
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _no_leaks(_mark_processes: None, lab: Lab) -> Iterator[None]:
    """A module leaves nothing behind but the server."""
    before = traces()
    yield
    assert_nothing_left(before)


@pytest.fixture(scope="package")
def tab(lab: Lab, browser: Any) -> Iterator[Tab]:
    """The page that all tests open their notebooks in."""
    from tests.browser.lab import Tab

    page = Tab(lab, browser)
    yield page
    page.close()


@pytest.fixture
def open_notebook(
    lab: Lab, tab: Tab, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """Open a notebook, or one of these cells; in the end its page may have had no trouble."""
    from tests.browser.lab import write_notebook

    opened: list[Notebook] = []

    def go(cells: Sequence[str] | NotebookNode, kernel: str = "python3") -> Notebook:
        assert not opened, "a test opens one notebook"
        written = write_notebook(cells, kernel) if isinstance(cells, Sequence) else cells
        name = re.sub(r"\W+", "-", request.node.name).strip("-")
        opened.append(tab.open(written, name, kernel))
        return opened[0]

    yield go
    for notebook in opened:
        failed = getattr(request.node, "failed", False)
        if failed and not notebook.page.is_closed():
            notebook.screenshot(f"failed-{notebook.name}")
        if failed or notebook.was_loaded_again or notebook.page.is_closed():
            tab.close()
        else:
            tab.clear(notebook)
        lab.ask("DELETE", f"api/kernels/{notebook.kernel}")
    assert [trouble for notebook in opened for trouble in notebook.trouble] == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Let fixtures know whether the test failed."""
    report = yield
    if report.failed and call.when == "call":
        item.failed = True  # type: ignore[attr-defined]
    return report
