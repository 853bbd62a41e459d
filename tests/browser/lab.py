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
from ipykernel import kernelspec
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    FloatRect,
    Locator,
    Page,
    Request,
    TimeoutError,
    ViewportSize,
    expect,
)

from tests.warm_agents import STARTED, WarmAgents

SCREENSHOTS = Path(__file__).parent / "screenshots"
"""Pictures of the last run. Ignored by git, kept by CI."""

UP = 100.0
"""Seconds that JupyterLab may take to answer."""

LIMIT_S = 60.0
"""Tells what comes late on a busy machine from what does not come."""
expect.set_options(timeout=LIMIT_S * 1e3)

PORT_TAKEN = "ZMQError: Address already in use"
"""What the server's log has of a kernel that could not bind one of its ports."""

COLD = "cold"
"""The kernel whose sessions start as users' do."""

VIEWPORT: ViewportSize = {"width": 1300, "height": 1000}

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

SERVER_EXTENSIONS = ("ipyparallel", "jupyter_lsp", "jupyter_server_terminals", "notebook_shim")
EXTENSIONS = (
    "ipyparallel-labextension",
    "@jupyterlab/lsp-extension",
    "@jupyterlab/fileeditor-extension:language-server",
    "@jupyterlab/notebook-extension:language-server",
    "@jupyterlab/terminal-extension",
)
"""What no test needs, of the server and of the page."""


OF_A_CLOSED_NOTEBOOK = "Canceled future for create_subshell_request message"
"""JupyterLab asks the kernel for a thread for its comms, and says this where the notebook is closed
before the answer has come; the next one may be open by then."""


class Lab:
    """A JupyterLab server with a home of its own.

    Args:
        folder: Where its notebooks, settings and log go.
        warm: What its kernels get their agents from, but for those named ``COLD``.
        without: Extensions of the page that are not loaded.
    """

    def __init__(self, folder: Path, warm: WarmAgents, without: Sequence[str] = ()):
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self.log = folder / "lab.log"
        self.token = secrets.token_hex(16)
        settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab"
        for name, values in SETTINGS.items():
            _write(settings / f"{name}.jupyterlab-settings", values)
        server = {"jpserver_extensions": dict.fromkeys(SERVER_EXTENSIONS, False)}
        _write(folder / "config" / "jupyter_server_config.json", {"ServerApp": server})
        page = {
            "buildCheck": False,  # it runs node whenever a page is loaded
            "disabledExtensions": dict.fromkeys([*EXTENSIONS, *without], True),
        }
        _write(folder / "config" / "labconfig" / "page_config.json", page)
        cold = {**kernelspec.get_kernel_dict(), "env": {STARTED: "1"}}
        _write(folder / "data" / "kernels" / COLD / "kernel.json", cold)
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
            self._process = warm.start_program(
                [
                    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                    *("--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={self.token}"),
                    f"--ServerApp.root_dir={self.notebooks}",
                    "--LabApp.news_url=",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    "--LabApp.extension_manager=readonly",
                    "--LabApp.expose_app_in_browser=True",
                ],
                environ,
                str(self.notebooks),
                log.fileno(),
                log.fileno(),
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

    def address(self, name: str) -> str:
        """Where a notebook is opened, and nothing else that was open in the page."""
        return f"{self.url}/doc/tree/{name}?reset"

    def close(self) -> None:
        """End the server and its kernels."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@dataclass
class Notebook:
    """A notebook that is open in a page."""

    page: Page
    lab: Lab
    name: str
    kernel: str
    trouble: list[str] = field(default_factory=list)
    """What the page asked of other machines, and errors in its console."""
    was_loaded_again: bool = False
    """Then the page may still look for widgets of a kernel that is gone."""

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
        self._wait_prompt(number, r"\[[*\d]", LIMIT_S)

    def run(self, number: int, seconds: float = LIMIT_S) -> str:
        """Run a cell to its end; gives what it shows."""
        before = self.prompt(number)
        self.start(number)
        self.wait(number, seconds, unlike=before)
        return self.text(number)

    def prompt(self, number: int) -> str:
        return self.cell(number).locator(".jp-InputPrompt").inner_text()

    def wait(self, number: int, seconds: float = LIMIT_S, unlike: str = "") -> None:
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

    def wait_text(self, number: int, text: str | re.Pattern[str]) -> None:
        """Wait until an element of a cell's output has this text."""
        self.output(number).get_by_text(text).first.wait_for()

    def expect(self, number: int, text: str | re.Pattern[str]) -> None:
        """Wait until this can be read in a cell's output; the end of it is drawn late."""
        expect(self.output(number)).to_contain_text(text, use_inner_text=True)

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

    def load_again(self) -> None:
        """Load the page again, and do not wait for the kernel."""
        self.was_loaded_again = True
        self.page.goto(self.lab.address(self.name))
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=UP * 1e3)

    def screenshot(self, name: str, part: Locator | None = None) -> Path:
        """Keep a picture of the page, or of a part of it."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        (part or self.page).screenshot(path=path)
        return path


def wait_ready(page: Page, seconds: float = UP) -> None:
    """Wait until the notebook has a kernel that is idle."""
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=seconds * 1e3)
    # Before a kernel is attached the indicator says idle, too.
    page.wait_for_function(
        """() => document.querySelector('.jp-KernelName')?.innerText.includes('Python')
            && document.querySelector('.jp-Notebook-ExecutionIndicator')
                ?.dataset.status === 'idle'""",
        timeout=seconds * 1e3,
    )


def boxes(parts: Locator, count: int) -> list[FloatRect]:
    """Where these are in the page, all at the same moment, once they have been drawn."""
    deadline = time.monotonic() + LIMIT_S
    expect(parts).to_have_count(count)
    while True:
        # A live page may draw them anew at any moment, and then they are nowhere for a while.
        found = parts.evaluate_all(
            """parts => parts.map(part => {
                const { x, y, width, height } = part.getBoundingClientRect();
                return { x, y, width, height };
            })"""
        )
        if len(found) == count and all(box["width"] for box in found):
            return list(found)
        assert time.monotonic() < deadline, f"not drawn: {found}"
        parts.page.wait_for_timeout(50)


def contrast(part: Locator) -> float:
    """The ratio of its colour to what is behind it, as WCAG 2 defines it."""
    while (ratio := part.evaluate(_CONTRAST)) is None:  # it was drawn anew at this moment
        part.page.wait_for_timeout(50)
    return float(ratio)


_CONTRAST = """element => {
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const over = (top, below) => {
        const alpha = top.length > 3 ? top[3] : 1;
        return below.map((value, n) => alpha * top[n] + (1 - alpha) * value);
    };
    if (!element.isConnected) return null;
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(at);
    let back = [255, 255, 255];
    let opacity = 1;
    for (const at of chain) {
        const style = getComputedStyle(at);
        back = over(parse(style.backgroundColor), back);
        opacity *= Number(style.opacity);
    }
    const colour = parse(getComputedStyle(element).color).slice(0, 3);
    const front = over([...colour, opacity], back);
    const light = rgb => {
        const [r, g, b] = rgb.map(v => v / 255).map(
            v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
}"""


def write_notebook(cells: Sequence[str], kernel: str = "python3") -> nbformat.NotebookNode:
    """A notebook of these cells, not run."""
    spec = {"name": kernel, "display_name": "Python 3", "language": "python"}
    return new_notebook(
        cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": spec}
    )


class Tab:
    """JupyterLab in a page, which takes seconds to load; notebooks are opened in it in turn.

    Args:
        lab: Where notebooks and kernels are.
        browser: Where the page is.
    """

    def __init__(self, lab: Lab, browser: Browser):
        self._lab = lab
        self._browser = browser
        self._context: BrowserContext | None = None
        self._trouble: list[str] = []
        self._count = 0

    def open(self, notebook: nbformat.NotebookNode, name: str, kernel: str) -> Notebook:
        """Open a notebook, with a fresh kernel. Outputs that it has already are not trusted.

        Jupyter chooses a kernel's ports before that has bound them. Should another process have one
        of them by then, the kernel (ipykernel 7) neither answers nor ends, and another is started.
        """
        conflicts = self._lab.log.read_text().count(PORT_TAKEN)
        opened = self._open(notebook, name, kernel)
        try:
            wait_ready(opened.page)
            return opened
        except TimeoutError:
            self.close()
            self._lab.ask("DELETE", f"api/kernels/{opened.kernel}")
            if self._lab.log.read_text().count(PORT_TAKEN) == conflicts:
                raise
        opened = self._open(notebook, name, kernel)
        wait_ready(opened.page)
        return opened

    def _open(self, notebook: nbformat.NotebookNode, name: str, kernel: str) -> Notebook:
        self._count += 1
        name = f"{name}-{self._count}.ipynb"
        nbformat.write(notebook, self._lab.notebooks / name)
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernel}}
        running = self._lab.ask("POST", "api/sessions", session)["kernel"]["id"]
        self._trouble = []
        if self._context is None:
            page = self._new_page()
            page.goto(f"{self._lab.address(name)}&token={self._lab.token}")
        else:
            (page,) = self._context.pages
            page.evaluate(
                "path => void jupyterapp.commands.execute('docmanager:open', {path})", name
            )
        return Notebook(page, self._lab, name, running, self._trouble)

    def _new_page(self) -> Page:
        self._context = self._browser.new_context(viewport=VIEWPORT)
        self._context.set_default_timeout(LIMIT_S * 1e3)
        page = self._context.new_page()
        page.on("request", self._see_request)
        page.on("console", self._see_console)
        page.on("pageerror", lambda error: self._see_error(str(error)))
        return page

    def _see_request(self, request: Request) -> None:
        if not request.url.startswith((self._lab.url, "data:", "blob:")):
            self._trouble.append(f"asked for {request.url}")

    def _see_console(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self._trouble.append(f"console: {said.text}")

    def _see_error(self, text: str) -> None:
        if OF_A_CLOSED_NOTEBOOK not in text:
            self._trouble.append(f"page: {text}")

    def clear(self, notebook: Notebook) -> None:
        """Close what is open, without saving it."""
        page = notebook.page
        self._trouble = []  # what closing says is about what it ends
        page.evaluate("for (const w of [...jupyterapp.shell.widgets('main')]) w.dispose()")
        page.set_viewport_size(VIEWPORT)

    def close(self) -> None:
        """Close the page; the next notebook gets a fresh one."""
        if self._context is not None:
            self._context.close()
            self._context = None
