"""Films a session in JupyterLab, for the top of the README and of the documentation.

``python -m tests.browser.moving_picture docs/pictures/session.gif`` starts four ranks, trains until
one of them hangs, asks the panel who it is, presses Stop, and looks at the variables.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, sync_playwright

from distsession.engine.process import agent_environment
from tests.browser.conftest import chromium
from tests.browser.lab import Lab, Notebook, Tab, write_notebook
from tests.warm_agents import WarmProcess

START = """\
%load_ext distsession
session = %session start 4 --backend gloo"""

TRAIN = """\
%%distributed
import time
from tqdm import tqdm

model = torch.nn.Linear(256, 1)
for step in tqdm(range(100), ncols=60):
    if step == 60 and rank == 2:
        time.sleep(3600)  # its data never come
    loss = model(torch.randn(64, 256)).square().mean()
    time.sleep(0.03)
    dist.all_reduce(loss)"""

LOOK = "%distributed step, model.weight.norm().item()"

SIZE = {"width": 880, "height": 880}
FRAME_MS = 200
LONGEST_MS = 1600
"""Of a frame in which nothing moves, unless it is to be read."""
LIMIT_S = 60.0
COLOURS = 128

_STAGE = """() => {
    const style = document.createElement('style');
    style.textContent = `
        .jp-Notebook-footer, .jp-SideBar, .jp-cell-toolbar, .jp-CellHeader { display: none }
        .cm-cursorLayer { display: none !important }
        * { animation: none !important; transition: none !important }
        #caption { position: fixed; z-index: 99999; height: 46px; color: white;
            background: #263238; font: 20px/46px sans-serif; text-align: center }
        #pointer { position: fixed; z-index: 99999; width: 22px; height: 22px; margin: -11px;
            border-radius: 50%; background: #d81b60; opacity: 0 }`;
    document.head.append(style);
    for (const id of ['caption', 'pointer']) {
        const part = document.createElement('div');
        part.id = id;
        document.body.append(part);
    }
}"""

_AT_THE_BOTTOM = """({x, y, width, height}) =>
    Object.assign(document.getElementById('caption').style,
        {left: `${x}px`, top: `${y + height - 46}px`, width: `${width}px`})"""


@dataclass
class Frame:
    """What is to be seen, and for how long."""

    picture: Image.Image
    ms: int


class Film:
    """Pictures of a page, one after the other.

    Args:
        notebook: The page.
    """

    def __init__(self, notebook: Notebook):
        self._page = notebook.page
        self._frames: list[Frame] = []
        self._page.evaluate(_STAGE)
        panel = self._page.locator(".jp-NotebookPanel").bounding_box()
        assert panel is not None
        self._clip = panel
        self._page.evaluate(_AT_THE_BOTTOM, panel)

    def say(self, text: str) -> None:
        self._page.evaluate("text => document.getElementById('caption').textContent = text", text)

    def until(self, seen: Callable[[], bool]) -> None:
        """Film until this is to be seen."""
        deadline = time.monotonic() + LIMIT_S
        self._shoot(FRAME_MS)
        while not seen():
            if time.monotonic() > deadline:
                raise TimeoutError("what is to be filmed does not come")
            began = time.monotonic()
            self._shoot(FRAME_MS)
            left = FRAME_MS - (time.monotonic() - began) * 1e3
            self._page.wait_for_timeout(max(left, 1))

    def hold(self, seconds: float) -> None:
        """Give time to read it."""
        self._shoot(0)
        self._frames[-1].ms += int(seconds * 1e3)

    def press(self, button: Locator) -> None:
        """Press a button, visibly."""
        box = button.bounding_box()
        assert box is not None
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        show = """({x, y}) => Object.assign(document.getElementById('pointer').style,
            {left: `${x}px`, top: `${y}px`, opacity: .7})"""
        self._page.evaluate(show, place)
        self.hold(0.8)
        button.click()
        self._page.evaluate("() => document.getElementById('pointer').style.opacity = 0")

    def _shoot(self, ms: int) -> None:
        shot = Image.open(io.BytesIO(self._page.screenshot(clip=self._clip))).convert("RGB")
        if self._frames and self._frames[-1].picture.tobytes() == shot.tobytes():
            last = self._frames[-1]
            last.ms = max(last.ms, min(last.ms + ms, LONGEST_MS))
        else:
            self._frames.append(Frame(shot, ms))

    def save(self, path: Path) -> None:
        """Write it, with the same colours in all frames."""
        every = [frame.picture for frame in self._frames]
        width, height = every[0].size
        sample = Image.new("RGB", (width, height * len(every)))
        for number, picture in enumerate(every):
            sample.paste(picture, (0, number * height))
        palette = sample.quantize(COLOURS, dither=Image.Dither.NONE)
        first, *others = [
            picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in every
        ]
        times = [frame.ms for frame in self._frames]
        first.save(path, save_all=True, append_images=others, duration=times, loop=0, optimize=True)


def hangs(panel: str) -> bool:
    """Whether it shows three ranks that wait for the one that sleeps."""
    return "running In[3] line 8" in panel and panel.count("waiting in all_reduce") == 3


def play(notebook: Notebook) -> Film:
    """What is done in the notebook, and filmed."""
    film = Film(notebook)
    panel = notebook.output(1)

    def reads(number: int, text: str) -> Callable[[], bool]:
        return lambda: text in notebook.text(number)

    def has_run(number: int) -> Callable[[], bool]:
        return lambda: any(sign.isdigit() for sign in notebook.prompt(number))

    film.say("Start four ranks, and look at them")
    film.hold(1.0)
    notebook.start(0)
    film.until(has_run(0))
    notebook.start(1)
    film.until(reads(1, "idle"))
    film.hold(1.2)
    film.say("Train on all of them")
    notebook.start(2)
    film.until(lambda: hangs(notebook.text(1)))
    film.say("It hangs. Where?")
    film.hold(1.6)
    film.press(panel.get_by_role("button", name="Diagnose", exact=True))
    film.until(reads(1, "for rank 2, which runs"))
    film.say("Rank 2 is in line 8, and the others wait for it")
    film.hold(3.0)
    film.press(panel.get_by_role("button", name="Stop", exact=True))
    film.until(has_run(2))
    film.say("Stop ends it on all ranks")
    film.until(reads(2, "all variables are kept"))
    film.hold(1.5)
    notebook.start(3)
    film.until(has_run(3))
    film.say("and all variables are still there")
    film.hold(3.5)
    return film


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Notebook]:
    """A notebook in JupyterLab in Chromium."""
    with (
        contextlib.closing(WarmProcess(agent_environment(os.environ))) as warm,
        sync_playwright() as playwright,
        contextlib.closing(chromium(playwright)) as browser,
        contextlib.closing(Lab(folder, warm)) as lab,
        contextlib.closing(Tab(lab, browser)) as tab,
    ):
        cells = [START, "session", TRAIN, LOOK]
        notebook = tab.open(write_notebook(cells), "training", "python3")
        notebook.page.set_viewport_size(SIZE)
        yield notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="where the picture is written")
    path = parser.parse_args().path
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as notebook:
        play(notebook).save(path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
