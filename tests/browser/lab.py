"""JupyterLab on this machine, and a page of it in Chromium."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, Locator, Page, Route

SCREENSHOTS = Path(__file__).parent / "screenshots"
"""Pictures of the last run. Ignored by git, kept by CI."""

UP = 60.0
"""Seconds that JupyterLab may take to answer."""

SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    # Cells and outputs that are not in view would otherwise not be in the page.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}


class Lab:
    """A JupyterLab server with a home of its own.

    Args:
        folder: Where its notebooks, settings and log go.
    """

    def __init__(self, folder: Path):
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self.log = folder / "lab.log"
        self.token = secrets.token_hex(16)
        settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab"
        for name, values in SETTINGS.items():
            path = settings / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        runtime = folder / "runtime"
        environ = {
            **os.environ,
            "HOME": str(folder),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTER_PLATFORM_DIRS": "0",
            "IPYTHONDIR": str(folder / "ipython"),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                    *("--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={self.token}"),
                    f"--ServerApp.root_dir={self.notebooks}",
                    "--LabApp.news_url=",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    "--LabApp.extension_manager=readonly",
                ],
                cwd=self.notebooks,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.url = self._wait_up(runtime)

    def _wait_up(self, runtime: Path) -> str:
        deadline = time.monotonic() + UP
        while time.monotonic() < deadline and self._process.poll() is None:
            for path in runtime.glob("jpserver-*.json"):
                try:
                    url = str(json.loads(path.read_text())["url"]).rstrip("/")
                    urllib.request.urlopen(f"{url}/api/status?token={self.token}", timeout=5)
                except (ValueError, OSError):
                    continue
                return url
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"JupyterLab did not come up:\n{self.log.read_text()[-4000:]}")

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        """Call the server's REST interface."""
        request = urllib.request.Request(
            f"{self.url}/{path}",
            method=method,
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
            data=None if content is None else json.dumps(content).encode(),
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def close(self) -> None:
        """End the server and its kernels."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@dataclass
class Notebook:
    """A notebook that is open in a page."""

    page: Page
    lab: Lab
    name: str
    kernel: str
    trouble: list[str] = field(default_factory=list)
    """What the page asked of other machines, and errors in its console."""

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-Cell-outputArea")

    def text(self, number: int) -> str:
        """What is to be read in a cell's output."""
        return self.output(number).inner_text()

    def write(self, number: int, code: str) -> None:
        """Put this into a cell in place of what it has."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(code)

    def start(self, number: int) -> None:
        """Run a cell, and do not wait for it."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        self._wait_prompt(number, r"\[[*\d]", 30)

    def run(self, number: int, seconds: float = 60) -> str:
        """Run a cell to its end; gives what it shows."""
        before = self.prompt(number)
        self.start(number)
        self.wait(number, seconds, unlike=before)
        return self.text(number)

    def prompt(self, number: int) -> str:
        return self.cell(number).locator(".jp-InputPrompt").inner_text()

    def wait(self, number: int, seconds: float = 60, unlike: str = "") -> None:
        """Wait until a cell has been run."""
        self._wait_prompt(number, r"\[\d+\]", seconds, unlike)

    def _wait_prompt(self, number: int, pattern: str, seconds: float, unlike: str = "") -> None:
        self.page.wait_for_function(
            """([number, pattern, unlike]) => {
                const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[number];
                const text = cell.querySelector('.jp-InputPrompt').innerText;
                return new RegExp(pattern).test(text) && !(unlike.match(/\\d/) && text === unlike);
            }""",
            arg=[number, pattern, unlike],
            timeout=seconds * 1e3,
        )

    def wait_text(self, number: int, text: str | re.Pattern[str], seconds: float = 30) -> None:
        """Wait until a cell's output has this text."""
        self.output(number).get_by_text(text).first.wait_for(timeout=seconds * 1e3)

    def interrupt(self) -> None:
        """Press Stop in the toolbar."""
        self.page.locator(
            '.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"] jp-button'
        ).click()

    def set_theme(self, name: str) -> None:
        """Change the theme to ``"JupyterLab Light"`` or ``"JupyterLab Dark"``."""
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator(".lm-Menu-item", has_text="Theme").first.hover()
        self.page.locator(".lm-Menu-itemLabel").get_by_text(name, exact=True).click()
        is_light = str("Light" in name).lower()
        self.page.locator(f'body[data-jp-theme-light="{is_light}"]').wait_for(state="attached")

    def screenshot(self, name: str, part: Locator | None = None) -> Path:
        """Keep a picture of the page, or of a part of it."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        (part or self.page).screenshot(path=path)
        return path


def wait_ready(page: Page, seconds: float = 60) -> None:
    """Wait until the notebook has a kernel that is idle."""
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=seconds * 1e3)
    # Before a kernel is attached the indicator says idle, too.
    page.wait_for_function(
        """() => document.querySelector('.jp-KernelName')?.innerText.includes('Python')
            && document.querySelector('.jp-Notebook-ExecutionIndicator')
                ?.dataset.status === 'idle'""",
        timeout=seconds * 1e3,
    )


def write_notebook(cells: Sequence[str]) -> nbformat.NotebookNode:
    """A notebook of these cells, not run."""
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(
        cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernelspec}
    )


def open_page(
    lab: Lab, context: BrowserContext, notebook: nbformat.NotebookNode, name: str
) -> Notebook:
    """Open a notebook, with a fresh kernel. Outputs that it has already are not trusted."""
    nbformat.write(notebook, lab.notebooks / name)
    session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
    kernel = lab.ask("POST", "api/sessions", session)["kernel"]["id"]
    trouble: list[str] = []

    def check(route: Route) -> None:
        if route.request.url.startswith((lab.url, "data:", "blob:")):
            route.continue_()
        else:
            trouble.append(f"asked for {route.request.url}")
            route.abort()

    context.route(re.compile(".*"), check)
    page = context.new_page()
    page.on(
        "console",
        lambda said: trouble.append(f"console: {said.text}") if said.type == "error" else None,
    )
    page.on("pageerror", lambda error: trouble.append(f"page: {error}"))
    page.goto(f"{lab.url}/doc/tree/{name}?token={lab.token}&reset")
    wait_ready(page)
    return Notebook(page, lab, name, kernel, trouble)
