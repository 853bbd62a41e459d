"""A session's overview as text and HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from distsession.display.panel import (
    HISTORY_READINGS,
    MAX_SINGLE_ROWS,
    Gauge,
    RankRow,
    Snapshot,
    answer_html,
    config_html,
    ended_rows,
    layout_html,
    rows_html,
    snapshot_html,
    snapshot_text,
    status_html,
)

IDLE = RankRow(0, "alpha", 11, "cpu (a <processor>)", "idle", "idle", "12:00:00")
BUSY = RankRow(
    1,
    "beta & co",
    12,
    "cuda:0 (B)",
    "waiting",
    "waiting in all_reduce at In[3] line 4",
    "12:00:05",
    (Gauge("GPU", "97 %", 0.97), Gauge("GPU memory", "3 of 8 GiB", 3 / 8)),
    (0, 50, 97),
)
DEAD = RankRow(2, "beta & co", 13, "cpu (C)", "dead", "dead (was <killed>)", "")
SNAPSHOT = Snapshot(
    "session 1: running <b>",
    (("backend", "gloo"), ("hosts", "alpha, beta & co")),
    (("ranks", "3", "given"), ("seed", "7", "DISTSESSION_SEED"), ("check", "<off>", "default")),
    (IDLE, BUSY, DEAD),
)


class Elements(HTMLParser):
    """The tags of a page, each closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.labels: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.count[tag] = self.count.get(tag, 0) + 1
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "page",
    [
        snapshot_html(SNAPSHOT),
        rows_html(SNAPSHOT.rows) + config_html(SNAPSHOT) + status_html(SNAPSHOT.status),
    ],
)
def test_everything_is_escaped_and_every_fact_is_there(page: str) -> None:
    assert not {"processor", "killed", "off", "b"} & set(Elements(page).count)
    for fact in (
        "session 1: running &lt;b&gt;",
        "beta &amp; co",
        "cpu (a &lt;processor&gt;)",
        "waiting in all_reduce at In[3] line 4",
        "dead (was &lt;killed&gt;)",
        "12:00:05",
        "97 %",
        "3 of 8 GiB",
        "DISTSESSION_SEED",
        "&lt;off&gt;",
    ):
        assert fact in page


def test_the_text_has_the_same_facts_below_each_other() -> None:
    text = snapshot_text(SNAPSHOT)
    status, facts, options, ranks = text.split("\n\n")
    assert status == SNAPSHOT.status
    assert facts.splitlines()[0].split() == ["backend", "gloo"]
    assert options.splitlines()[2].split() == ["seed", "7", "DISTSESSION_SEED"]
    head, idle, busy, dead = ranks.splitlines()
    assert head.index("state") == idle.index("idle") == busy.index("waiting") == dead.index("dead")
    assert head.index("GPU memory") == busy.index("3 of 8 GiB")


def test_those_who_cannot_see_it_are_told_what_bars_and_lines_show() -> None:
    elements = Elements(rows_html(SNAPSHOT.rows))
    assert "GPU 97 %" in elements.labels
    assert "GPU memory 3 of 8 GiB" in elements.labels
    assert "use of late: now 97 %, at most 97 %" in elements.labels
    assert "Ranks of the session" in elements.labels
    page = rows_html(SNAPSHOT.rows)
    assert page.count('scope="col"') == 9
    assert page.count('scope="row"') == 3


def test_a_bar_and_a_line_stay_within_their_bounds() -> None:
    line = replace(BUSY, gauges=(Gauge("CPU", "230 %", 2.3),), history=(230,) * HISTORY_READINGS)
    page = rows_html([line])
    assert "width:100%" in page
    heights = [float(y) for y in re.findall(r",([\d.]+)[ \"]", page.partition("points=")[2])]
    assert min(heights) >= 0
    assert "<svg" not in rows_html([replace(BUSY, history=(5,))])


def test_lines_of_a_closed_session_say_so() -> None:
    page = rows_html(ended_rows(SNAPSHOT.rows))
    assert page.count("ended") == 3
    assert "97 %" not in page.replace("now 97 %, at most 97 %", "")


def test_what_a_narrow_panel_leaves_out_stands_in_its_configuration() -> None:
    page = config_html(SNAPSHOT)
    for fact in ("beta &amp; co", "12", "cuda:0 (B)"):
        assert f">{fact}</td>" in page
    assert Elements(layout_html()).count == {"style": 1}


def test_an_answer_says_since_when_it_is_true_no_longer() -> None:
    page = answer_html("<p>done", title="Diagnose, 12:00", outdated="12:03")
    assert "<strong>Diagnose, 12:00</strong> The ranks do something else since 12:03." in page
    assert "opacity" in page
    assert "&lt;p&gt;done" in page
    assert "opacity" not in answer_html("x", title="Diagnose, 12:00")


def test_an_answer_is_read_out_and_an_error_at_once() -> None:
    assert 'role="status"' in answer_html("<p>done</p>")
    assert 'role="alert"' in answer_html("<p>failed</p>", is_error=True)


def test_sixty_four_ranks_are_no_burden() -> None:
    lines = [
        replace(BUSY, rank=rank, state=f"running {rank}", history=(50,) * HISTORY_READINGS)
        for rank in range(64)
    ]
    page = rows_html(lines)
    assert Elements(page).count["tr"] == 65
    assert len(page) < 200_000


def cells(page: str) -> list[list[str]]:
    """The texts of a table's rows."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [
        [re.sub("<[^>]*>", "", each) for each in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_many_ranks_that_do_the_same_share_a_row_and_odd_ones_come_first() -> None:
    lines = [
        replace(
            BUSY,
            rank=rank,
            host=f"gpu{rank // 8}",
            pid=100 + rank,
            since=f"12:00:{rank % 9:02}",
            gauges=(
                Gauge("GPU", f"{90 + rank % 8} %", 0.9, 90 + rank % 8),
                Gauge("memory", "1 GiB"),
            ),
            history=(rank, 100),
        )
        for rank in range(64)
    ]
    lines[5] = replace(lines[5], kind="running", state="running In[3] line 7")
    lines[6] = replace(lines[6], history=(), gauges=())
    lines[9:11] = [replace(line, kind="dead", state="dead") for line in lines[9:11]]
    page = rows_html(lines)
    _, dead, odd, rest = cells(page)
    assert dead[:5] == ["9-10", "gpu1", "", "cuda:0", "✕ dead"]
    assert odd[:6] == ["5", "gpu0", "105", "cuda:0", "▶ running In[3] line 7", "12:00:05"]
    assert rest[:4] == ["0-4,6-8,11-63", "8 hosts", "", "cuda:0"]
    assert rest[5:8] == ["12:00:08", "up to 97 %", "1 GiB"]
    assert "use of late: now 100 %" in page


def test_each_of_few_ranks_has_its_row_in_their_order() -> None:
    lines = [replace(BUSY, rank=rank) for rank in range(MAX_SINGLE_ROWS)]
    lines[3] = replace(DEAD, rank=3)
    assert [row[0] for row in cells(rows_html(lines))[1:]] == [str(row.rank) for row in lines]
