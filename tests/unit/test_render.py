"""Results, tables and errors as a person sees them."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.display import html, render
from distsession.protocol.messages import ErrorInfo, FrameInfo, Operation, RankReport
from distsession.protocol.rank_state import Ending, Outcome
from distsession.ranks import DeviceInfo, RankInfo

CELL = FrameInfo("In[3]", 2, "<module>", ((1, "x = 0"), (2, "1 / x"), (3, "print(x)")))
ERROR = ErrorInfo("ZeroDivisionError", "division by zero", (CELL,))


@pytest.mark.parametrize(
    ("ranks", "label"), [([2], "[rank 2]"), ([0, 1, 2], "[ranks 0-2]"), ([0, 5], "[ranks 0,5]")]
)
def test_a_label_names_its_ranks(ranks: list[int], label: str) -> None:
    assert render.rank_label(ranks) == label


@given(st.dictionaries(st.integers(0, 20), st.sampled_from("abc")))
def test_folding_loses_no_rank_and_shows_each_thing_once(shown: dict[int, str]) -> None:
    folded = render.fold(shown)
    assert {rank: what for ranks, what in folded for rank in ranks} == shown
    assert len({what for _, what in folded}) == len(folded)
    assert [ranks[0] for ranks, _ in folded] == sorted(ranks[0] for ranks, _ in folded)


def test_ranks_that_show_the_same_are_one_line() -> None:
    shown = {3: "b", 0: "a", 1: "a", 2: "c"}
    assert render.fold_text(shown) == "[ranks 0-1] a\n[rank 2] c\n[rank 3] b"


def test_text_of_several_lines_stands_below_its_label() -> None:
    assert render.fold_text({0: "tensor([1,\n        2])"}) == "[rank 0]\ntensor([1,\n        2])"


def test_bundles_are_folded_by_what_they_hold() -> None:
    png = {"image/png": b"\x89PNG", "text/plain": "<Figure>"}
    shown = {
        0: (dict(png), {}),
        1: (dict(png), {}),
        2: (png, {"image/png": {"width": 5}}),
        3: ({"text/plain": "<Figure>"}, {}),
    }
    folded = render.fold_bundles(shown)
    assert [ranks for ranks, _ in folded] == [(0, 1), (2,), (3,)]
    assert folded[0][1] == (png, {})


# --- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def two(rank_info: Callable[..., RankInfo]) -> list[RankInfo]:
    gpu = DeviceInfo("cuda:0", "NVIDIA <T4>", 16 << 30, 4)
    return [rank_info(0), rank_info(1, host="beta & co", device=gpu)]


def test_the_configuration_says_what_there_is(two: list[RankInfo]) -> None:
    facts = dict(render.config_rows(two))
    assert (facts["backend"], facts["torch"], facts["python"]) == ("gloo", "2.9.0", "3.11.9")
    assert facts["hosts"] == "alpha (rank 0), beta & co (rank 1)"
    assert "cuda (NVIDIA <T4>)" in facts["devices"]


@pytest.mark.parametrize("name", ["nccl", "nccl2", "cpu:gloo,cuda:nccl"])
def test_the_class_behind_nccl_is_named(rank_info: Callable[..., RankInfo], name: str) -> None:
    facts = {"backend": name, "backend_class": "ProcessGroupNCCL2", "nccl": "2.30.7"}
    told = dict(render.config_rows([rank_info(0, **facts)]))["backend"]
    assert told == f"{name} (ProcessGroupNCCL2), NCCL 2.30.7"


def test_each_rank_has_a_line_with_its_device(two: list[RankInfo]) -> None:
    head, *lines = render.devices_text(two).splitlines()
    assert head.split() == ["rank", "host", "device", "name", "memory"]
    assert lines[0].split() == ["0", "alpha", "cpu", "a", "processor", "8", "GiB"]
    assert "16 GiB" in lines[1]


def test_columns_of_a_table_stand_below_each_other(two: list[RankInfo]) -> None:
    head, *lines = render.devices_text(two).splitlines()
    column = head.index("device")
    assert [line[column:].split()[0] for line in lines] == ["cpu", "cuda:0"]
    assert all(line == line.rstrip() for line in lines)


def test_memory_that_nobody_knows_is_not_zero(rank_info: Callable[..., RankInfo]) -> None:
    text = render.devices_text([rank_info(0, device=DeviceInfo("cpu", "a processor"))])
    assert text.endswith("unknown")


def test_tables_of_a_notebook_escape_what_they_show(two: list[RankInfo]) -> None:
    for table in (render.devices_html(two), html.table((), render.config_rows(two))):
        assert "beta &amp; co" in table
        assert "NVIDIA &lt;T4&gt;" in table
        assert "<T4>" not in table
    assert render.devices_html(two).count("<tr>") == 3


# --- diagnoses ------------------------------------------------------------------------------------

REDUCE = Operation(
    "all_reduce", "world", (0, 1), 5, "float32 [4], sum", "In[3] line 4", seconds=12.4
)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (RankReport(0, "idle", 3.21), "0     idle   3.2 s"),
        (RankReport(0, "idle"), "0     idle"),
        (
            RankReport(0, "idle", 75.0, outcome=Outcome(Ending.FINISHED)),
            "0     idle (finished)  75 s",
        ),
        (
            RankReport(0, "idle", outcome=Outcome(Ending.FAILED, "x\nmore", "ValueError")),
            "0     idle (failed: ValueError: x)",
        ),
        (RankReport(0, "running", 0.5, place="In[3] line 7"), "0     running In[3] line 7  0.5 s"),
        (RankReport(0, "running"), "0     running"),
        (
            RankReport(0, "running", 99.0, place="In[3] line 4", operations=(REDUCE,)),
            "0     in all_reduce #5 (float32 [4], sum) at In[3] line 4  12 s",
        ),
        (
            RankReport(
                0,
                "running",
                operations=(
                    replace(REDUCE, sequence=4, is_waiting=False),
                    replace(REDUCE, detail="", place=""),
                ),
            ),
            "0     in all_reduce #5  12 s",
        ),
        (
            RankReport(0, "running", operations=(replace(REDUCE, is_waiting=False),)),
            "0     running",
        ),
        (RankReport(0, "stopped", 2.0, operations=(REDUCE,)), "0     stopped by SIGSTOP  2.0 s"),
        (
            RankReport(0, "dead", outcome=Outcome(Ending.DIED, "killed by SIGKILL")),
            "0     dead (killed by SIGKILL)",
        ),
        (RankReport(0, "dead"), "0     dead"),
        (RankReport(0, "traced"), "0     held by a debugger"),
        (RankReport(0, "silent"), "0     not answering"),
    ],
)
def test_a_rank_of_a_diagnosis_has_a_line(report: RankReport, line: str) -> None:
    head, row = render.diagnosis_text({0: report}, "a verdict.").splitlines()[2:]
    assert head.split() == ["rank", "state", "since"]
    assert row == line


def test_a_diagnosis_begins_with_its_verdict_and_shows_the_ranks_in_order() -> None:
    reports = {2: RankReport(2, "dead"), 0: RankReport(0, "idle"), 1: RankReport(1, "stopped")}
    assert render.diagnosis_text(reports, "rank 2 is the cause.").splitlines() == [
        "rank 2 is the cause.",
        "",
        "rank  state               since",
        "0     idle",
        "1     stopped by SIGSTOP",
        "2     dead",
    ]


@pytest.fixture
def deep() -> dict[int, RankReport]:
    """Ranks 0 and 2 at the same point, rank 1 in a file, rank 3 without a stack."""
    library = FrameInfo("/lib/<net>.py", 8, "forward", ((8, "    return y & 0"),))
    cell = replace(CELL, name="step")
    reports = {rank: RankReport(rank, "running", stack=(CELL, cell)) for rank in (2, 0)}
    return reports | {1: RankReport(1, "running", stack=(library,)), 3: RankReport(3, "dead")}


def test_stacks_are_shown_on_request_and_folded(deep: dict[int, RankReport]) -> None:
    text = render.diagnosis_text(deep, "x.", stacks=True)
    assert text.startswith(render.diagnosis_text(deep, "x.") + "\n\n")
    stacks = text.removeprefix(render.diagnosis_text(deep, "x.") + "\n\n")
    assert stacks.splitlines() == [
        "[ranks 0,2]",
        "Cell In[3], line 2",
        "        1 x = 0",
        "---->   2 1 / x",
        "        3 print(x)",
        "",
        "Cell In[3], line 2, in step",
        "        1 x = 0",
        "---->   2 1 / x",
        "        3 print(x)",
        "",
        "[rank 1]",
        "/lib/<net>.py, line 8, in forward",
        "    return y & 0",
    ]


def test_a_diagnosis_in_a_notebook_says_the_same_and_escapes_it(
    deep: dict[int, RankReport],
) -> None:
    deep[3] = RankReport(3, "dead", outcome=Outcome(Ending.DIED, "<b>"))
    page = render.diagnosis_html(deep, "a < b.", stacks=True)
    page = re.sub(r"(<t[hd]) [^>]*", r"\1", page)
    assert page.startswith("<p>a &lt; b.</p><table><thead><tr><th>rank</th><th>state</th>")
    assert "<tr><td>3</td><td>dead (&lt;b&gt;)</td><td></td></tr>" in page
    page = re.sub(r"<p [^>]*>", "<p>", page)
    assert "<p>ranks 0,2</p><pre>Cell In[3], line 2\n" in page
    assert "<p>rank 1</p><pre>/lib/&lt;net&gt;.py, line 8, in forward\n" in page
    assert "return y &amp; 0</pre>" in page
    assert page.count("<pre>") == 2
    assert "<b>" not in page
    assert "<pre>" not in render.diagnosis_html(deep, "a < b.")


def test_what_python_imports_with_is_no_cell_and_folded_in_a_notebook() -> None:
    frozen = FrameInfo("<frozen importlib._bootstrap>", 1331, "_find_and_load")
    made = FrameInfo("<string>", 1, "<module>")
    reports = {0: RankReport(0, "running", stack=(CELL, frozen, made))}
    text = render.diagnosis_text(reports, "x.", stacks=True)
    assert "\n<frozen importlib._bootstrap>, line 1331, in _find_and_load\n<string>, line 1" in text
    page = render.diagnosis_html(reports, "x.", stacks=True)
    assert "1 frame of libraries" in page


def test_who_is_waited_for_comes_first(deep: dict[int, RankReport]) -> None:
    text = render.diagnosis_text(deep, "x.", stacks=True, culprits={1})
    assert text.index("[rank 1] (others wait for it)\n/lib") < text.index("[ranks 0,2]\nCell In[3]")
    page = render.diagnosis_html(deep, "x.", stacks=True, culprits={1})
    assert page.index(">rank 1 (others wait for it)<") < page.index(">ranks 0,2<")


def test_frames_of_libraries_are_folded_in_a_notebook(deep: dict[int, RankReport]) -> None:
    inside = [
        FrameInfo(f"/env/lib/python3.12/{name}.py", 8, "call") for name in ("site-packages/a", "b")
    ]
    deep = {0: RankReport(0, "running", stack=(CELL, *inside, CELL, inside[0]))}
    page = render.diagnosis_html(deep, "x.", stacks=True)
    parts = re.findall(r"<summary[^>]*>(.*?)</summary>|<pre>(\S+)", page)
    assert parts == [
        ("", "Cell"),
        ("2 frames of libraries", ""),
        ("", "/env/lib/python3.12/site-packages/a.py,"),
        ("", "Cell"),
        ("1 frame of libraries", ""),
        ("", "/env/lib/python3.12/site-packages/a.py,"),
    ]
    assert "in call" in render.diagnosis_text(deep, "x.", stacks=True)


@pytest.mark.parametrize("show", [render.diagnosis_text, render.diagnosis_html])
def test_a_diagnosis_without_ranks_is_its_verdict(show: Callable[..., str]) -> None:
    assert "no rank has reported." in show({}, "no rank has reported.", stacks=True)


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_is_headed_by_its_ranks_where_they_are_the_line_and_the_reason() -> None:
    line = render.error_line((0, 1), ERROR, {0: "alpha, cpu", 1: "alpha, cpu"})
    assert line == ("ZeroDivisionError on ranks 0-1 (alpha, cpu) at In[3] line 2: division by zero")
    assert render.error_line((1,), ErrorInfo("ValueError", "no\nreally"), {1: "beta, cuda:0"}) == (
        "ValueError on rank 1 (beta, cuda:0): no ... really"
    )
    assert render.error_line((1,), ErrorInfo("KeyboardInterrupt", ""), {}) == (
        "KeyboardInterrupt on rank 1"
    )


def test_a_reason_that_is_too_long_is_cut() -> None:
    line = render.error_line((1,), ErrorInfo("ValueError", "x" * 10_000), {})
    assert len(line) < 600
    assert "xxx ... xxx" in line


def test_many_places_are_cut_short() -> None:
    where = {rank: f"host{rank}" for rank in range(6)}
    line = render.error_line(range(6), ErrorInfo("ValueError", ""), where)
    assert line == "ValueError on ranks 0-5 (host0; host1; host2; host3; ...)"


def test_without_a_cell_the_line_of_an_error_is_the_users_innermost() -> None:
    def place(*files: str) -> str:
        frames = tuple(FrameInfo(name, number, "f") for number, name in enumerate(files, 1))
        return render.error_place(ErrorInfo("ValueError", "", frames))

    torch = "/venv/lib/python3.12/site-packages/torch/nn.py"
    assert place("/home/me/train.py", "/home/me/net.py", torch) == "net.py line 2"
    assert place("/tmp/ipykernel_1/2.py", torch) == "notebook cell line 1"
    assert place("In[3]", "/home/me/net.py") == "In[3] line 1"
    assert place("In[4]", "In[3]", torch) == "In[3] line 2"
    assert place(torch, "<string>") == ""


def test_a_syntax_error_is_shown_as_ipython_does_it() -> None:
    where = FrameInfo("In[3]", 2, "<module>", ((2, "    for i in x"), (2, "              ^")))
    error = ErrorInfo("SyntaxError", "expected ':'", syntax=where)
    line = render.error_line((0, 1), error, {})
    assert line == "SyntaxError on ranks 0-1 at In[3] line 2: expected ':'"
    assert render.remote_traceback(error).splitlines() == [
        "  Cell In[3], line 2",
        "    for i in x",
        "              ^",
        "SyntaxError: expected ':'",
    ]
    inner = replace(
        error, frames=(replace(CELL, lineno=1),), syntax=replace(where, filename="a.py")
    )
    assert render.error_place(inner) == "In[3] line 1"
    assert "  File a.py, line 2\n" in render.remote_traceback(inner)


def test_a_frame_of_a_cell_shows_its_lines_and_points_at_one() -> None:
    assert render.remote_traceback(ERROR).splitlines() == [
        "Cell In[3], line 2",
        "        1 x = 0",
        "---->   2 1 / x",
        "        3 print(x)",
        "",
        "ZeroDivisionError: division by zero",
    ]


def test_a_frame_in_a_function_names_it() -> None:
    error = replace(ERROR, frames=(replace(CELL, name="step"),))
    assert "Cell In[3], line 2, in step\n" in render.remote_traceback(error)


def test_a_frame_of_a_file_shows_the_failing_line_alone() -> None:
    frame = FrameInfo("/lib/net.py", 8, "forward", ((7, "    y = 1"), (8, "    return y / 0")))
    text = render.remote_traceback(replace(ERROR, frames=(frame,)))
    assert text.startswith("/lib/net.py, line 8, in forward\n    return y / 0\n")
    assert "y = 1" not in text


def test_a_file_in_the_home_folder_is_written_short() -> None:
    frame = FrameInfo(os.path.join(os.path.expanduser("~"), "net.py"), 1, "f")
    assert "~/net.py, line 1, in f" in render.remote_traceback(replace(ERROR, frames=(frame,)))


@pytest.mark.parametrize("filename", ["In[99]", "/nowhere/net.py"])
def test_a_frame_without_source_is_a_line_of_its_own(filename: str) -> None:
    error = replace(ERROR, frames=(FrameInfo(filename, 7, "f"),))
    lines = [line for line in render.remote_traceback(error).splitlines() if line]
    assert lines[0].endswith(f"{filename}, line 7, in f")
    assert lines[1:] == ["ZeroDivisionError: division by zero"]


def test_a_function_of_the_notebook_shows_the_notebooks_own_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "/tmp/ipykernel_77/1234.py"
    lines = ["def f():\n", "    y = 0\n", "    return 1 / y\n"]
    monkeypatch.setitem(linecache.cache, name, (1, None, lines, name))
    text = render.remote_traceback(replace(ERROR, frames=(FrameInfo(name, 3, "f"),)))
    assert text.startswith("Cell of the notebook, line 3, in f\n")
    assert "---->   3     return 1 / y" in text


def test_a_declared_cause_stands_before_its_error() -> None:
    error = ErrorInfo("RuntimeError", "outer", cause=ERROR, cause_is_explicit=True)
    text = render.remote_traceback(error)
    link = "The above exception was the direct cause of the following exception:"
    assert text.index("division by zero") < text.index(link) < text.index("RuntimeError: outer")


def test_an_error_while_handling_another_says_so() -> None:
    middle = ErrorInfo("KeyError", "'a'", cause=ERROR)
    text = render.remote_traceback(ErrorInfo("RuntimeError", "outer", cause=middle))
    assert text.count("During handling of the above exception, another") == 2
    assert text.index("division") < text.index("KeyError: 'a'") < text.index("RuntimeError: outer")


def test_notes_follow_the_message_and_an_empty_message_has_no_colon() -> None:
    error = ErrorInfo("KeyboardInterrupt", "", notes=("while loading", "again"))
    assert render.remote_traceback(error) == "KeyboardInterrupt\n  while loading\n  again"


def test_what_a_recursion_has_left_out_is_told_below_it() -> None:
    cell = replace(CELL, name="f", cycle=1, again=27)
    text = render.remote_traceback(ErrorInfo("E", "no", (CELL, cell, CELL)))
    assert "      3 print(x)\n  [Previous frame repeated 27 more times]\n\nCell In[3]" in text
    file = FrameInfo("/home/me/a.py", 3, "g", ((3, "f()"),), cycle=2, again=5)
    text = render.remote_traceback(ErrorInfo("E", "no", (file,)))
    assert "    f()\n  [Previous 2 frames repeated 5 more times]\nE: no" in text
