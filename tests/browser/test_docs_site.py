"""The built documentation in Chromium: it needs no network, and its search finds pages."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.pages import ROOT

from .lab import LIMIT_S

pytest.importorskip("furo")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-d", str(folder / "doctrees"), "-b", "html"]
    subprocess.run([*command, "docs", str(folder / "html")], cwd=ROOT, check=True, timeout=200)
    return folder / "html"


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[str]:
    """Serves it as a web server does."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(params=["files", "server"])
def base(request: pytest.FixtureRequest, site: Path) -> str:
    """Where the pages are: in a folder that was unpacked, or behind a server."""
    return site.as_uri() if request.param == "files" else request.getfixturevalue("server")


@pytest.fixture
def page(browser: Browser, base: str) -> Iterator[Page]:
    """A page that asks nobody else."""
    context = browser.new_context()
    context.set_default_timeout(LIMIT_S * 1e3)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert asked
    assert [url for url in asked if not url.startswith((base, "data:", "blob:"))] == []


def test_the_landing_page_leads_to_each_place_to_run_it(page: Page, base: str) -> None:
    page.goto(f"{base}/index.html")
    picture = page.locator("article img").first
    expect(picture).to_be_visible()
    assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth; }")
    captions = page.locator(".sidebar-tree .caption").all_text_contents()
    assert captions == ["Tutorial", "How to", "Reference", "Explanation"]
    links = page.locator("article table").first.locator("a")
    places = [str(link.get_attribute("href")).partition("#") for link in links.all()]
    assert len(places) == 4
    links.first.click()
    for name, _, anchor in places:
        if not page.url.partition("#")[0].endswith(name):
            page.goto(f"{base}/{name}")
        expect(page.locator(f"section#{anchor}" if anchor else "article h1")).to_be_visible()


@pytest.mark.parametrize(
    ("words", "found"),
    [("hang_grace", "hangs.html"), ("torchrun script", "scripts.html"), ("scatter", "moving.html")],
)
def test_a_search_finds_pages(page: Page, base: str, words: str, found: str) -> None:
    page.goto(f"{base}/index.html")
    box = page.locator("input[name=q]").first
    box.fill(words)
    box.press("Enter")

    result = page.locator(f"ul.search a[href*='{found}']").first
    expect(result).to_be_visible()
    result.click()
    expect(page.locator("article h1").first).to_be_visible()
    assert found in page.url
