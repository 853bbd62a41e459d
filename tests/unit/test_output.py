"""What the ranks put out is kept within bounds, and shown with what is equal folded."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.display.render import MAX_SINGLE_ROWS
from distsession.notebook.lines import Line
from distsession.notebook.output import (
    HEAD_LINES,
    MAX_LINE_CHARS,
    TAIL_LINES,
    RankText,
    Section,
    Transcript,
)
from distsession.notebook.output_html import (
    FIRST_LINES,
    UNFOLDED_LINES,
    LiveRow,
    ansi_html,
    can_embed,
    live_html,
    live_text,
    section_html,
    section_text,
)
from distsession.protocol.messages import Display


def transcript(*pieces: tuple[int, str]) -> Transcript:
    made = Transcript()
    for rank, text in pieces:
        made.write(rank, "stdout", text)
    made.finish()
    return made


def text(made: Transcript, log: str = "") -> str:
    return "\n".join(section_text(section, lambda _: log) for section in made)


def html(section: Section) -> str:
    return section_html(section, lambda rank: f"/logs/{rank}")


def image(rank: int, data: str = "AAAA", kind: str = "image/png") -> Display:
    return Display(rank, 1, {kind: data, "text/plain": "<Figure>"}, {})


def test_ranks_that_wrote_the_same_share_it() -> None:
    made = transcript((0, "a\nb\n"), (2, "a\nb\n"), (1, "other\n"))
    assert text(made) == "[ranks 0,2]\na\nb\n[rank 1] other"


@given(st.text("ab\n", max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_where_the_text_is_cut_into_pieces_makes_no_difference(
    whole: str, here: int, there: int
) -> None:
    made = transcript((0, whole[:here]), (1, whole[:there]), (0, whole[here:]), (1, whole[there:]))
    shown = text(made)
    assert "[rank 0]" not in shown
    lines = whole.removesuffix("\n").split("\n") if whole else []
    assert shown == "" or shown[len("[ranks 0-1]") + 1 :] == "\n".join(lines)


def test_the_same_text_on_another_stream_is_not_the_same() -> None:
    made = Transcript()
    made.write(0, "stdout", "x\n")
    made.write(1, "stderr", "x\n")
    assert text(made) == "[rank 0] x\n[rank 1] x"
    assert html(made.sections[0]).count("--jp-rendermime-error-background") == 1


def test_of_many_lines_the_first_and_the_last_are_kept() -> None:
    made = Transcript()
    for start in range(0, 100_000, 1000):
        made.write(0, "stdout", "".join(f"line {n}\n" for n in range(start, start + 1000)))
    made.finish()
    written = made.sections[0].texts[0]
    assert [line.text for line in written.head] == [f"line {n}" for n in range(HEAD_LINES)]
    assert [line.text for line in written.tail] == [
        f"line {n}" for n in range(100_000 - TAIL_LINES, 100_000)
    ]
    shown = text(made, "/logs/0")
    assert (
        f"... {100_000 - HEAD_LINES - TAIL_LINES:,} lines are left out here; all of them: /logs/0"
        in shown
    )
    assert len(html(made.sections[0])) < 20_000


@given(st.lists(st.integers(1, 250), max_size=6))
def test_no_line_is_shown_twice_or_in_another_order(counts: list[int]) -> None:
    made = Transcript()
    number = 0
    for count in counts:
        made.write(0, "stdout", "".join(f"{number + n}\n" for n in range(count)))
        number += count
    shown = [int(n) for n in re.findall(r"(?m)^\d+$", text(made).replace("[rank 0] ", ""))]
    assert shown == sorted(set(shown))
    assert len(shown) == min(number, HEAD_LINES + TAIL_LINES)


def test_two_ranks_that_differ_only_in_what_is_left_out_are_not_the_same() -> None:
    lines = [f"{n}\n" for n in range(1000)]
    made = transcript((0, "".join(lines)), (1, "".join([*lines[:500], "x\n", *lines[501:]])))
    assert "[rank 1]" in text(made)


def test_a_very_long_line_is_cut() -> None:
    shown = text(transcript((0, "x" * (MAX_LINE_CHARS + 5000) + "\n")))
    assert "... (5,000 more characters)" in shown
    assert len(shown) < MAX_LINE_CHARS + 100


# --- displays -------------------------------------------------------------------------------------


def test_displays_of_all_ranks_stand_side_by_side_between_the_texts() -> None:
    made = Transcript()
    for rank in (0, 1):
        made.write(rank, "stdout", "before\n")
    for rank in (1, 0):
        made.display(image(rank, f"{rank}{rank}{rank}{rank}"))
        made.write(rank, "stdout", "after\n")
    first, second = made.sections
    assert html(first).count("<img ") == 2
    assert html(first).index("before") < html(first).index("0000") < html(first).index("1111")
    assert "after" in html(second)
    assert "<img" not in html(second)


def test_equal_displays_are_folded() -> None:
    made = Transcript()
    for rank in range(3):
        made.display(image(rank, "same" if rank < 2 else "else"))
    shown = html(made.sections[0])
    assert shown.count("<img ") == 2
    assert ">ranks 0-1<" in shown


def test_clearing_takes_away_what_one_rank_has_put_out() -> None:
    made = Transcript()
    for rank in (0, 1):
        made.write(rank, "stdout", "old\n")
        made.display(image(rank))
    made.clear(0, wait=False)
    assert text(made) == "[rank 1] old\n[rank 1] <Figure>"
    made.clear(1, wait=True)
    assert "old" in text(made)
    made.write(1, "stdout", "new\n")
    assert text(made) == "[rank 1] new"


def test_only_what_every_front_end_shows_within_html_is_embedded() -> None:
    assert can_embed(({"text/plain": "x", "text/html": "<b>"}, {}))
    assert can_embed(({"image/png": "x"}, {}))
    assert not can_embed(({"text/plain": "x", "text/latex": "$x$"}, {}))
    assert not can_embed(({"text/html": "x", "application/vnd.jupyter.widget-view+json": {}}, {}))


def test_the_size_that_a_picture_is_to_have_is_kept() -> None:
    made = Transcript()
    made.display(Display(0, 1, {"image/png": "A"}, {"image/png": {"width": 120, "height": '"x'}}))
    assert ' width="120" height="&quot;x"' in html(made.sections[0])


# --- progress bars --------------------------------------------------------------------------------


def bars(*seconds: int) -> Transcript:
    made = Transcript()
    for rank, spent in enumerate(seconds):
        end = f"\rfit: 100%|####| 8/8 [00:0{spent}<00:00, 9it/s]\n"
        made.write(rank, "stderr", f"\rfit:  50%|##  | 4/8 [00:00<00:00, 9it/s]{end}")
    return made


def test_bars_of_few_ranks_are_shown_one_by_one() -> None:
    made = bars(1, 2)
    lines = text(made).splitlines()
    assert lines[0].startswith("[rank 0] fit: 100%|####| 8/8 [00:01<")
    assert lines[1].startswith("[rank 1] fit: 100%|####| 8/8 [00:02<")
    assert len(lines) == 2
    shown = html(made.sections[0])
    assert re.findall(r'aria-label="([^"]*)"', shown) == ["rank 0", "rank 1"]
    assert "ranks 0-1" not in shown


def test_bars_that_stand_below_text_have_its_label_above() -> None:
    made = Transcript()
    for rank in range(2):
        made.write(rank, "stdout", "begin\n")
        made.write(rank, "stderr", f"\rfit:  50%|##  | 4/8 [00:0{rank}<00:00, 9it/s]\n")
    made.finish()
    lines = text(made).splitlines()
    assert lines[:2] == ["[ranks 0-1]", "begin"]
    assert [line[:13] for line in lines[2:]] == ["[rank 0] fit:", "[rank 1] fit:"]


def test_bars_of_many_ranks_are_the_slowest_and_the_fastest() -> None:
    lines = text(bars(3, 2, 7, 1, 5, 4)).splitlines()
    assert lines[0] == "[ranks 0-5]"
    assert lines[1].startswith("[rank 2 (slowest)] fit: 100%|")
    assert lines[2].startswith("[rank 3 (fastest)] fit: 100%|")
    assert len(lines) == 3


def test_a_rank_that_did_not_come_as_far_stands_by_itself() -> None:
    made = bars(1, 1)
    made.write(2, "stderr", "\rfit:  20%|# | 1/8 [\rfit:  50%|##  | 4/8 [00:09<00:00, 9it/s]")
    made.finish()
    assert "[rank 2] fit:  50%|##" in text(made)


def nested(step: int, of: int = 9) -> str:
    """One update of a bar within a bar, as tqdm writes it."""
    outer = f"\router: {100 * step // of:3d}%|##  | {step}/{of} [00:01<00:09, 1it/s]"
    return f"{outer}\n\rinner:  50%|##  | 4/8 [00:00<00:00, 9it/s]\x1b[A"


def test_a_bar_within_a_bar_buries_nothing_that_is_printed_meanwhile() -> None:
    made = Transcript()
    for step in range(10):
        made.write(0, "stderr", nested(step))
        made.write(0, "stdout", "".join(f"step {step} line {n}\n" for n in range(30)))
    made.finish()
    written = made.sections[0].texts[0]
    assert written.count == 300 + 2
    assert [line.text[:17] for line in written.tail][-2:] == [
        "outer: 100%|##  |",
        "inner:  50%|##  |",
    ]
    assert all(line.text.startswith("step") for line in written.head)


def test_ranks_whose_bars_came_equally_far_are_alike_wherever_their_text_is_cut() -> None:
    made = Transcript()
    text = "".join(nested(step) for step in range(10))
    made.write(0, "stderr", text)
    for character in text.replace("00:01", "00:07"):
        made.write(1, "stderr", character)
    made.finish()
    shown = section_text(made.sections[0], str).splitlines()
    outer = [line[:16] for line in shown if "outer" in line]
    assert outer == ["[rank 0] outer: ", "[rank 1] outer: "]  # beside each other, as of one block


def test_bars_that_go_on_stand_below_what_is_displayed_meanwhile() -> None:
    made = Transcript()
    for step in range(10):
        made.write(0, "stderr", nested(step))
        made.display(image(0, str(step) * 4))
    made.finish()
    shown = [text for section in made if (text := section_text(section, str))]
    assert [text.count("outer") for text in shown] == [0] * 10 + [1]
    assert "outer: 100%" in shown[-1]


def test_a_section_that_is_not_finished_shows_its_lines_too() -> None:
    made = Transcript()
    made.write(0, "stdout", "one\ntwo\n")
    assert section_text(made.sections[0], str) == "[rank 0]\none\ntwo"
    made.write(0, "stdout", "three\n")
    assert section_text(made.sections[0], str) == "[rank 0]\none\ntwo\nthree"


def test_it_is_said_how_many_lines_are_missing_in_all() -> None:
    made = transcript((0, "".join(f"line {n}\n" for n in range(25_000))))
    shown = html(made.sections[0])
    assert "24,970 lines between, 24,800 of them only in the log" in shown


def test_where_lines_are_left_out_the_command_that_shows_them_is_named() -> None:
    made = transcript((0, "".join(f"line {n}\n" for n in range(25_000))))
    section = made.sections[0]
    section.again = "%session output In 7"
    said = "left out here; all of them: /logs/0 (%session output In 7 shows them)"
    assert said in section_text(section, lambda _: "/logs/0")
    assert "24,800 of them only in the log (%session output In 7)" in html(section)


def test_of_a_long_value_the_beginning_is_shown() -> None:
    section = Section(is_value=True)
    section.texts[0] = RankText(HEAD_LINES + TAIL_LINES, 0)
    section.texts[0].add([Line(f"item {n}") for n in range(1000)])
    shown = html(section)
    first, _, folded = shown.partition("<details>")
    assert "item 29\n" not in folded
    assert "item 29" in first
    assert "171 more lines" in folded
    assert "item 199" in folded
    assert "800 more lines of this value are not kept" in folded
    assert "item 200" not in shown
    assert "/logs/" not in shown


# --- HTML -----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("a<>&\"'\n\x1b[31m", max_size=20)), max_size=8)
)
def test_what_ranks_print_is_never_html(pieces: list[tuple[int, str]]) -> None:
    for section in transcript(*pieces):
        shown = html(section)
        inside = re.sub(r"</?(div|span|pre|details|summary)\b[^<>]*>", "", shown)
        assert "<" not in inside
        assert ">" not in inside


def test_colours_are_kept_and_other_escapes_dropped() -> None:
    shown = ansi_html("\x1b[1;31mred\x1b[0m \x1b[2K\x1b]0;title\x07plain \x1b[38;5;208mx<")
    assert shown == '<span style="font-weight:bold;color:#d33">red</span> plain x&lt;'
    assert "\x1b" not in text(transcript((0, "\x1b[32mgreen\x1b[0m\x1b[2K\n")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[94mblue", '<span style="color:#37c">blue</span>'),
        ("\x1b[1mb\x1b[22mc", '<span style="font-weight:bold">b</span>c'),
        ("\x1b[31mr\x1b[39md\x1b[m", '<span style="color:#d33">r</span>d'),
        ("\x1b[1m\x1b[32mx\x1b[0my", '<span style="font-weight:bold;color:#293">x</span>y'),
        ("\x1b[31m\x1b[0mx", "x"),
        ("\x1b[4;7munderlined", "underlined"),
        ("\x1b[48;2;1;2;3mx\x1b]8;;http://a\x1b\\link", "xlink"),
        ("\x1b[1;38;5;31mb", '<span style="font-weight:bold">b</span>'),
        ("\"a\" & 'b'", "\"a\" &amp; 'b'"),
    ],
)
def test_each_escape_sequence_has_its_style_or_none(text: str, expected: str) -> None:
    assert ansi_html(text) == expected


def test_colours_go_on_over_lines_of_the_same_stream() -> None:
    made = transcript((0, "\x1b[31mone\ntwo\x1b[0m\n"))
    assert '<span style="color:#d33">one\ntwo</span>' in html(made.sections[0])


def test_of_a_long_block_the_first_lines_and_the_last_are_unfolded() -> None:
    made = transcript((0, "".join(f"line {n}\n" for n in range(UNFOLDED_LINES + 5))))
    shown = html(made.sections[0])
    assert "5 lines between" in shown
    first, _, rest = shown.partition("<details>")
    folded, _, last = rest.partition("</details>")
    assert f"line {FIRST_LINES - 1}<" in first
    assert f"line {FIRST_LINES}\n" in folded
    assert f"line {FIRST_LINES + 4}<" in folded
    assert last.index(f"line {FIRST_LINES + 5}\n") < last.index(f"line {UNFOLDED_LINES + 4}")
    one_less = transcript((0, "".join(f"line {n}\n" for n in range(UNFOLDED_LINES))))
    assert "<details>" not in html(one_less.sections[0])


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_many_blocks_are_folded_away_and_few_are_not(ranks: int) -> None:
    lines = [f"{n}\n" for n in range(10)]
    made = transcript(*((rank, f"I am {rank}\n{''.join(lines)}") for rank in range(ranks)))
    shown = html(made.sections[0])
    assert shown.count("<details>") == (ranks if ranks > 8 else 0)
    assert f"I am {ranks - 1}" in shown


def test_all_blocks_together_have_a_bound() -> None:
    many = "".join(f"{n}\n" for n in range(300))
    made = transcript(*((rank, f"rank {rank}\n{many}") for rank in range(256)))
    assert text(made).count("\n") < 5000


# --- the block of a running cell ------------------------------------------------------------------


def test_the_live_block_has_a_line_for_each_rank() -> None:
    rows = [
        LiveRow(0, "in barrier #2", "3 s", ("<loss> 1",)),
        LiveRow(1, "running In[2] line 4", "3 s"),
    ]
    assert live_text(rows, "wait") == (
        "[rank 0] in barrier #2: <loss> 1\n[rank 1] running In[2] line 4\nwait"
    )
    shown = live_html(rows, "wait")
    assert "&lt;loss&gt; 1" in shown
    assert shown.count("<tr>") == 2


def test_a_bar_in_the_live_block_is_drawn() -> None:
    line = "fit:  45%|####5     | 45/100 [00:01<00:02, 30.0it/s]"
    shown = live_html([LiveRow(0, "running", "1 s", (line,))], "")
    assert '<progress max="100" value="45" aria-label="fit 45 %"' in shown
    assert " 45/100 [00:01&lt;00:02, 30.0it/s]" in shown


@pytest.mark.parametrize(
    ("ranks", "lines"), [(MAX_SINGLE_ROWS, MAX_SINGLE_ROWS), (MAX_SINGLE_ROWS + 1, 1)]
)
def test_few_ranks_have_a_row_each_and_many_share_them(ranks: int, lines: int) -> None:
    rows = [LiveRow(rank, "running", f"{rank} s", ("x",)) for rank in range(ranks)]
    assert live_text(rows, "").count("\n") + 1 == lines
    shown = live_html(rows, "")
    assert shown.count("<tr>") == lines
    assert ">0 s<" in shown  # of the lowest rank, where they share it


def test_an_empty_live_block_is_nothing_and_a_notice_stands_alone() -> None:
    assert (live_html([], ""), live_text([], "")) == ("", "")
    assert "<table" not in live_html([], "still <waiting>")
    assert "still &lt;waiting&gt;" in live_html([], "still <waiting>")


def test_bars_of_one_rank_stand_below_each_other_in_the_live_block() -> None:
    made = Transcript()
    made.write(0, "stderr", nested(3))
    row = LiveRow(0, "running", "1 s", made.live(0))
    assert live_html([row], "").count("<progress") == 2
    assert live_text([row], "").startswith("[rank 0] running: outer:  33%|##  | 3/9 [")


def test_a_long_line_of_the_live_block_is_cut() -> None:
    assert "x" * 200 in live_html([LiveRow(0, "running", "", ("x" * 500,))], "")
    assert "x" * 201 not in live_html([LiveRow(0, "running", "", ("x" * 500,))], "")


def test_ranks_that_do_the_same_share_a_row_where_there_are_many() -> None:
    rows = [LiveRow(rank, "in all_reduce #1" if rank else "running", "1 s") for rank in range(64)]
    assert live_text(rows, "") == "[rank 0] running\n[ranks 1-63] in all_reduce #1"


def test_what_is_live_says_when_it_was_should_nobody_replace_it() -> None:
    rows = [LiveRow(0, "running", "1 s")]
    page = live_html(rows, "", "14:02:07")
    assert "So it was at 14:02:07; nothing has come from the kernel since then." in page
    assert live_html(rows, "") in page
    assert live_html([], "", "14:02:07") == ""
    assert "So it was" not in live_html(rows, "took 3 s")
