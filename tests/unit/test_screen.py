"""Text that moves the cursor becomes the lines that a terminal would show."""

from __future__ import annotations

import io
import itertools
import re
import unicodedata

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from distsession.notebook.lines import Line, Lines
from distsession.notebook.screen import ROWS


def shown(*pieces: str) -> list[str]:
    """All lines, as they are in the end."""
    lines = Lines()
    given = [line for piece in pieces for line in lines.feed(piece)]
    given += lines.finish()
    return [line.text for line in given if not line.is_gone]


def by_pyte(text: str) -> list[str]:
    screen = pyte.Screen(200, 100)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(text)
    return list(screen.display)


def _without_blanks(lines: list[str]) -> list[str]:
    """What is to be seen; a blank line below the cursor is none of ours."""
    plain = [
        unicodedata.normalize("NFC", _ESCAPES.sub("", line)).expandtabs().rstrip() for line in lines
    ]
    return [seen for line in plain if (seen := line.expandtabs().rstrip())]


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]|[\x00-\x08\x0b-\x1f]")
UP_ONE = "\x1b[A"
PIECES = st.sampled_from(
    [
        *("a", "bc", "def", "\u2588", "e\u0301", " ", "\n", "\r", "\x08", "\x1b[31m"),
        *("\x1b[0m", "\x1b[1;38;5;9m", UP_ONE, "\x1b[2A", "\x1b[C", "\x1b[3D", "\x1b[K"),
        *("\x1b[1K", "\x1b[2K", "\x1b[G", "\x1b[4G", "\x1b[F", "\x1b[2P", "\x1b[2X", "\x1b[2@"),
    ]
)


@given(st.lists(PIECES, max_size=25), st.integers(0, 25))
def test_any_text_is_shown_as_a_terminal_emulator_does(pieces: list[str], cut: int) -> None:
    text = "".join(pieces)
    expected = _without_blanks(by_pyte(text))
    assert _without_blanks(shown(text)) == expected
    assert _without_blanks(shown("".join(pieces[:cut]), "".join(pieces[cut:]))) == expected
    assert _without_blanks(shown(*text)) == expected


@given(st.text(st.sampled_from("ab\x1b[]0123456789;?ABCDEFGHJKPXm\x07\n\r\t\x08"), max_size=80))
def test_no_text_is_an_error_and_no_line_moves_the_cursor(text: str) -> None:
    for lines in (shown(text), shown(*text)):
        assert not {"\r", "\n", "\x08"} & set("".join(lines))


def test_a_sequence_that_comes_in_pieces_is_one() -> None:
    text = "\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\ \x1b[31mred\x1b[0m\x08D\n"
    assert shown(*text) == shown(text) == ["link \x1b[31mre\x1b[0mD"]


def nested(epochs: int = 3, steps: int = 4, leave: bool = False, write: str = "") -> str:
    """What tqdm writes for a bar within a bar."""
    file = io.StringIO()
    options = {"file": file, "ncols": 60, "mininterval": 0}
    for epoch in tqdm(range(epochs), desc="epochs", **options):
        for _ in tqdm(range(steps), desc="steps", leave=leave, **options):
            pass
        if write:
            tqdm.write(f"{write} {epoch}", file=file)
    return file.getvalue()


def test_of_a_bar_within_a_bar_the_last_state_is_shown() -> None:
    (line,) = shown(nested())
    assert line.startswith("epochs: 100%|")


def test_bars_that_stay_stand_above_the_one_that_goes_on() -> None:
    lines = shown(nested(leave=True))
    assert [line[:12] for line in lines] == ["steps: 100%|"] * 3 + ["epochs: 100%"]


def test_what_is_written_beside_bars_is_all_there_and_above_them() -> None:
    lines = shown(nested(24, write="loss"))
    assert lines[:-1] == [f"loss {epoch}" for epoch in range(24)]
    assert lines[-1].startswith("epochs: 100%|")


def test_a_bar_at_a_position_has_no_blank_lines_above_it() -> None:
    file = io.StringIO()
    bar = tqdm(range(3), position=3, file=file, mininterval=0, leave=False)
    bar.update(3)
    assert [line[:5] for line in shown(file.getvalue())] == ["100%|"]
    bar.close()
    assert shown(file.getvalue()) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\x1b[31mA  50%\x1b[0m\r\x1b[32mA 100%\x1b[0m\n", ["\x1b[32mA 100%\x1b[0m"]),
        ("\x1b[31mlonger\x1b[0m\rno\n", ["no\x1b[31mnger\x1b[0m"]),
        ("Downloading 10 MB\r\x1b[Kdone\n", ["done"]),
        ("one\ntwo\nthree\x1b[2A\r\x1b[JONE\n", ["ONE"]),
        ("\x1b[?25la\x1b[?25h\nb\n", ["\x1b[?25la\x1b[?25h", "b"]),
        ("\u4e16\u754c\ra\n", ["a \u754c"]),
        ("\u4e16\u754c\x1b[2Dx\n", ["\u4e16x"]),
        ("\u4e16\u754c\x1b[3Dx\n", [" x\u754c"]),
        ("abc\r\u4e16\n", ["\u4e16c"]),
        ("10/10\x08\x08\x0809/10\n", ["1009/10"]),
        ("kept\n\x1b[2J\x1b[Hnext\n", ["kept", "next"]),
    ],
)
def test_sequences_do_what_they_say(text: str, lines: list[str]) -> None:
    assert shown(text) == lines


def test_the_cursor_reaches_only_the_last_lines() -> None:
    text = "".join(f"{n}\n" for n in range(100)) + "\x1b[1000A" + "x"
    expected = [str(n) for n in range(100)]
    expected[100 - (ROWS - 1)] = "x" + expected[100 - (ROWS - 1)][1:]
    assert shown(text) == expected


def test_a_screen_is_left_when_there_is_plain_text_again() -> None:
    lines = Lines()
    lines.feed("a\nb\n\x1b[A")
    assert lines._screen is not None
    lines.feed("B\nnext\n")
    lines.feed("plain\n")
    assert lines._screen is None


def test_bars_in_the_works_are_shown_together() -> None:
    lines = Lines()
    lines.feed("before\n\router:  10%|#  | 1/10 [00:01<00:09, 1it/s]")
    lines.feed("\n\rinner:  50%|## | 5/10 [00:01<00:09, 1it/s]\x1b[A")
    assert [line.split(":")[0] for line in lines.live] == ["outer", "inner"]
    assert lines.has_bar
    lines.feed("\router:  20%|#  | 2/10 [00:01<00:09, 1it/s]")
    assert [line[:11] for line in lines.live] == ["outer:  20%", "inner:  50%"]


@given(st.lists(st.text("ab\n", max_size=30), max_size=5))
def test_each_line_is_given_once(pieces: list[str]) -> None:
    lines = Lines()
    given: list[Line] = list(
        itertools.chain.from_iterable(lines.feed(f"{piece}\x1b[A") for piece in pieces)
    )
    given += lines.finish()
    assert len(given) == len({id(line) for line in given})
