"""Results, tables and errors as text and HTML.

Pure functions from data to strings; nothing here knows IPython.
"""

from __future__ import annotations

import itertools
import json
import linecache
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from distsession.display import columns, html
from distsession.display.colors import PLAIN, Colors
from distsession.display.html import Html, element
from distsession.display.nested import is_code_of_error, nested_error, ranks_told, reason_of
from distsession.display.table import Table
from distsession.protocol.cells import is_cell, is_notebook_file
from distsession.protocol.diagnosis import Verdict, describe_operation, device_wait_text
from distsession.protocol.messages import ErrorInfo, FrameInfo, RankReport
from distsession.protocol.rank_state import RankState
from distsession.ranks import RankInfo, ranks_text

__all__ = [
    "MAX_SINGLE_ROWS",
    "Bundle",
    "config_rows",
    "device_rows",
    "devices_html",
    "devices_text",
    "diagnosis_html",
    "diagnosis_table",
    "diagnosis_text",
    "differing_notes",
    "error_line",
    "error_place",
    "fold",
    "fold_bundles",
    "fold_many",
    "fold_text",
    "local_lines",
    "note_of",
    "rank_label",
    "ranks_per_node",
    "remote_traceback",
    "state_and_since",
    "table_text",
    "with_notes",
]

_CONTAINS = "contains "
"""How a note of a group of errors begins that tells one of them."""
MAX_SINGLE_ROWS = 16
"""Up to so many ranks, a live view has a row for each."""
_MOST_WITHIN = 2
_NOTE = "distsession.note"
"""Where the metadata of a bundle has a note."""
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/distsession/engine/|^<frozen ")

Bundle = tuple[dict[str, Any], dict[str, Any]]
K = TypeVar("K", bound=Hashable)


def rank_label(ranks: Sequence[int], note: str = "") -> str:
    """``[rank 2]`` or ``[ranks 0-3]``; with a note in it, if there is one."""
    return f"[{ranks_text(ranks)}{f' ({note})' if note else ''}]"


def fold(shown: Mapping[int, K]) -> list[tuple[tuple[int, ...], K]]:
    """Put ranks that show the same together; in the order of their lowest ranks."""
    groups: dict[K, list[int]] = {}
    for rank in sorted(shown):
        groups.setdefault(shown[rank], []).append(rank)
    return [(tuple(ranks), what) for what, ranks in groups.items()]


def fold_many(shown: Mapping[int, K]) -> list[tuple[tuple[int, ...], K]]:
    """Each rank by itself, or, where those are too many, those together that show the same."""
    if len(shown) <= MAX_SINGLE_ROWS:
        return [((rank,), shown[rank]) for rank in sorted(shown)]
    return fold(shown)


def fold_text(shown: Mapping[int, str], notes: Mapping[int, str] | None = None) -> str:
    """One line (or block) for each group of ranks that show the same.

    Args:
        shown: By rank.
        notes: What is said of a group, by its first rank.
    """
    said, folded = notes or {}, fold(shown)
    if not said:
        labels = [rank_label(ranks) for ranks, _ in folded]
        if lines := columns.labelled(labels, [text for _, text in folded]):
            return "\n".join(lines)
    return "\n".join(_labelled(ranks, text, said.get(ranks[0], "")) for ranks, text in folded)


def _labelled(ranks: Sequence[int], text: str, note: str = "") -> str:
    gap = "\n" if "\n" in text or note else " "
    return f"{rank_label(ranks, note)}{gap}{text}"


def fold_bundles(shown: Mapping[int, Bundle]) -> list[tuple[tuple[int, ...], Bundle]]:
    """Like :func:`fold`, for MIME bundles."""
    keys = {rank: json.dumps(b, sort_keys=True, default=repr) for rank, b in shown.items()}
    return [(ranks, shown[ranks[0]]) for ranks, _ in fold(keys)]


# --- what looks alike and is not ------------------------------------------------------------------


def differing_notes(
    groups: Iterable[Sequence[int]], digest: Callable[[int], str], expression: str
) -> dict[int, str]:
    """What is to be said of ranks that show the same, though their values differ.

    Args:
        groups: Ranks that show the same.
        digest: Gives a hash of a rank's value; an empty one says nothing.
        expression: The variable that it is the value of; empty where there is none.

    Returns:
        A note for each rank of such a group.
    """
    how = f": %distributed --diff {expression}" if expression else ""
    note = f"text equal, values differ{how}"
    apart = [ranks for ranks in groups if len({digest(rank) for rank in ranks} - {""}) > 1]
    return {rank: note for ranks in apart for rank in ranks}


def with_notes(
    shown: Mapping[int, Bundle], digests: Mapping[int, str], expression: str
) -> dict[int, Bundle]:
    """What ranks show, with a note where it is the same and their values are not."""
    if len({*digests.values()} - {""}) < 2:
        return dict(shown)
    groups = [ranks for ranks, _ in fold_bundles(shown)]
    named = expression or "NAME, once it has one"
    notes = differing_notes(groups, lambda rank: digests.get(rank, ""), named)
    return {
        rank: (data, {**metadata, _NOTE: notes[rank]} if rank in notes else metadata)
        for rank, (data, metadata) in shown.items()
    }


def note_of(bundle: Bundle) -> str:
    """What :func:`with_notes` has noted; empty if nothing."""
    return str(bundle[1].get(_NOTE, ""))


# --- configuration and devices --------------------------------------------------------------------


def _memory(amount: int) -> str:
    return f"{amount / 2**30:.0f} GiB" if amount else "unknown"


def ranks_per_node(infos: Sequence[RankInfo]) -> list[int]:
    """How many ranks each node has; one number where all have as many."""
    counts = {info.node_rank: info.local_world_size for info in infos}
    different = set(counts.values())
    return [counts[node] for node in sorted(counts)] if len(different) > 1 else [*different]


def config_rows(infos: Sequence[RankInfo]) -> list[tuple[str, str]]:
    """What holds for a whole session."""
    first = infos[0]
    hosts: dict[str, list[int]] = {}
    for info in infos:
        hosts.setdefault(info.host, []).append(info.rank)
    models = sorted({f"{info.device.device.split(':')[0]} ({info.device.name})" for info in infos})
    return [
        ("backend", first.backend_text),
        ("world size", str(first.world_size)),
        ("nodes", str(first.nodes)),
        ("ranks per node", ", ".join(map(str, ranks_per_node(infos)))),
        (
            "hosts",
            ", ".join(f"{host} ({ranks_text(ranks)})" for host, ranks in hosts.items())
            if len(hosts) > 1
            else next(iter(hosts)),
        ),
        ("devices", ", ".join(models)),
        ("torch", first.torch_version),
        ("python", first.python_version),
    ]


_DEVICE_HEAD = ("rank", "host", "device", "name", "memory")


def device_rows(infos: Sequence[RankInfo]) -> list[tuple[str, ...]]:
    """Of each rank: its number, host and device, and the device's name and memory."""
    return [
        (
            str(info.rank),
            info.host,
            info.device.device,
            info.device.name,
            _memory(info.device.memory_bytes),
        )
        for info in infos
    ]


def devices_text(infos: Sequence[RankInfo]) -> str:
    """A line for each rank's device."""
    return table_text(_DEVICE_HEAD, device_rows(infos))


def devices_html(infos: Sequence[RankInfo]) -> Html:
    """The same as :func:`devices_text`, for a notebook."""
    return html.table(_DEVICE_HEAD, device_rows(infos))


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, as wide as they need to be."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# --- diagnoses ------------------------------------------------------------------------------------


_DIAGNOSIS_HEAD = ("rank", "state", "since")
RAS_TITLE = "NCCL's own report of your job on this host (RAS)"


def diagnosis_text(
    reports: Mapping[int, RankReport],
    verdict_sentence: str,
    stacks: bool = False,
    culprits: Collection[int] = (),
    hosts: Mapping[int, str] | None = None,
) -> str:
    """The verdict, a line for each rank, and the ranks' stacks if they are wanted.

    Args:
        reports: Of the ranks.
        verdict_sentence: Who waits for whom.
        stacks: Whether they are wanted.
        culprits: Ranks for which others wait; their stacks come first.
        hosts: Of the ranks, where there are several.
    """
    blocks = [verdict_sentence, table_text(*_report_table(reports, hosts or {}))]
    for ranks, frames in _stacks(reports, culprits) if stacks else ():
        text = "\n".join(map(_frame_text, frames)).rstrip()
        label = _stack_label(ranks, culprits)
        blocks.append(f"{label}{chr(10) if chr(10) in text else ' '}{text}")
    return "\n\n".join(blocks)


def diagnosis_html(
    reports: Mapping[int, RankReport],
    verdict_sentence: str,
    stacks: bool = False,
    culprits: Collection[int] = (),
    hosts: Mapping[int, str] | None = None,
) -> Html:
    """The same as :func:`diagnosis_text`, for a notebook; frames of libraries are folded."""
    blocks = [
        element("p", verdict_sentence),
        html.table(*_report_table(reports, hosts or {})),
    ]
    for ranks, frames in _stacks(reports, culprits) if stacks else ():
        label = html.label(f"{ranks_text(ranks)}{_waited_for(ranks, culprits)}", tag="p")
        blocks += [label, *_frames_html(frames)]
    return html.join(blocks)


def diagnosis_table(
    reports: Mapping[int, RankReport],
    verdict: Verdict,
    stacks: bool = False,
    hosts: Mapping[int, str] | None = None,
    ras: str = "",
) -> Table:
    """The same in both forms; the stacks of ranks that others wait for come first.

    Args:
        reports: Of the ranks.
        verdict: Who waits for whom.
        stacks: Whether they are wanted.
        hosts: Of the ranks, where there are several.
        ras: What NCCL itself says of the job.
    """
    culprits = set(verdict.missing) - set(verdict.waiting) or set(verdict.missing)
    text = diagnosis_text(reports, verdict.sentence, stacks, culprits, hosts)
    page = diagnosis_html(reports, verdict.sentence, stacks, culprits, hosts)
    if ras:
        text = f"{text}\n\n{RAS_TITLE}:\n{ras}"
        page = html.join([page, html.details(RAS_TITLE, element("pre", ras))])
    return Table(text, page)


def _frames_html(frames: Sequence[FrameInfo]) -> Iterator[Html]:
    for is_library, run in itertools.groupby(frames, _is_library):
        texts = [_frame_text(frame) for frame in run]
        block = element("pre", "\n".join(texts).rstrip())
        if not is_library:
            yield block
        else:
            count = "1 frame" if len(texts) == 1 else f"{len(texts)} frames"
            yield html.details(f"{count} of libraries", block)


def _is_library(frame: FrameInfo) -> bool:
    return not _is_cell(frame.filename) and _LIBRARY.search(frame.filename) is not None


def _stack_label(ranks: Sequence[int], culprits: Collection[int]) -> str:
    return f"{rank_label(ranks)}{_waited_for(ranks, culprits)}"


def _waited_for(ranks: Sequence[int], culprits: Collection[int]) -> str:
    it = "it" if len(ranks) == 1 else "them"
    return f" (others wait for {it})" if set(ranks) & set(culprits) else ""


def _report_table(
    reports: Mapping[int, RankReport], hosts: Mapping[int, str]
) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    has_hosts = ["host"] if hosts else []
    rows = [
        (str(rank), *(hosts.get(rank, "") for _ in has_hosts), *state_and_since(reports[rank]))
        for rank in sorted(reports)
    ]
    return (_DIAGNOSIS_HEAD[0], *has_hosts, *_DIAGNOSIS_HEAD[1:]), rows


def state_and_since(report: RankReport) -> tuple[str, str]:
    """What a rank does, and for how long, as text."""
    operation = report.operations[-1] if report.operations else None
    if report.state == RankState.RUNNING:
        if operation is not None and operation.is_waiting:
            return f"in {describe_operation(operation)}", _seconds(operation.seconds)
        if report.is_device_wait:
            return f"waiting for its device {device_wait_text(report)}", _seconds(report.seconds)
        return f"running {report.place}".rstrip(), _seconds(report.seconds)
    return state_text(report), _seconds(report.seconds)


def state_text(report: RankReport) -> str:
    """The state of a rank that does not run, with what is known of it, as text."""
    state = RankState(report.state)
    if state.is_asking:
        return f"{state.label} at {report.place}" if report.place else state.label
    outcome = report.outcome.text if report.outcome is not None else ""
    return f"{state.label} ({outcome})" if outcome else state.label


def _seconds(seconds: float) -> str:
    """How long; nothing where that is not known."""
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds else ""


def _stacks(
    reports: Mapping[int, RankReport], culprits: Collection[int]
) -> list[tuple[tuple[int, ...], tuple[FrameInfo, ...]]]:
    """The stacks that were sent; ranks that are at the same point together, culprits first."""
    shown = {rank: tuple(report.stack) for rank, report in reports.items() if report.stack}
    return sorted(fold(shown), key=lambda group: set(group[0]).isdisjoint(culprits))


# --- errors ---------------------------------------------------------------------------------------


def error_line(ranks: Sequence[int], error: ErrorInfo, where: Mapping[int, str]) -> str:
    """``ValueError on rank 2 (alpha, cpu) at In[3] line 2: no``.

    Where its message tells of an error in another process, that one comes first.
    """
    nested = nested_error(error)
    outer, error = error, nested or error
    told = ranks_told(outer.evalue) if nested is not None else []
    # They are numbered within their group: as here if it has all ranks up to the last.
    is_told = bool(told) and set(told) < set(ranks) == set(range(len(ranks)))
    who = told if is_told else ranks
    places = sorted({where[rank] for rank in who if rank in where})
    on = f" ({'; '.join(places[:4])}{'; ...' if len(places) > 4 else ''})" if places else ""
    line = error_place(error)
    at = f" at {line}" if line else ""
    within = [note.removeprefix(_CONTAINS) for note in error.notes if note.startswith(_CONTAINS)]
    reasons = map(reason_of, [error.evalue, *within[:_MOST_WITHIN]])
    reason = "; ".join(filter(None, reasons))
    text = f"{error.ename} on {ranks_text(who)}{on}{at}{f': {reason}' if reason else ''}"
    from_where = error_place(outer)
    if nested is None or from_where in ("", line):
        return text
    doing = "called" if is_code_of_error(outer) else "raised again"
    doing += f" on {ranks_text(ranks)}" * is_told
    as_what = f" as {outer.ename}" if outer.ename != nested.ename else ""
    return f"{text.rstrip('.')} ({doing} at {from_where}{as_what})"


def error_place(error: ErrorInfo) -> str:
    """The line of the cell that failed; without a cell, the innermost one that looks like the
    user's own. Empty if there is none.
    """
    cells = [frame for frame in error.frames if is_cell(frame.filename)]
    if cells:  # of a function that was called by no cell the ranks ran, the innermost one
        frame = cells[0] if cells[0].name == "<module>" else cells[-1]
        return f"{frame.filename} line {frame.lineno}"
    syntax = () if error.syntax is None else (error.syntax,)
    if syntax and is_cell(syntax[0].filename):
        return f"{syntax[0].filename} line {syntax[0].lineno}"
    for frame in reversed((*error.frames, *syntax)):
        if is_notebook_file(frame.filename):
            return f"notebook cell line {frame.lineno}"
        if not frame.filename.startswith("<") and not _LIBRARY.search(frame.filename):
            return f"{os.path.basename(frame.filename)} line {frame.lineno}"
    return ""


def remote_traceback(error: ErrorInfo, *, message: bool = True, colors: Colors = PLAIN) -> str:
    """The traceback of one exception and of those before it, oldest first.

    Args:
        error: The exception.
        message: Say in the end what it says itself.
        colors: Of its parts.
    """
    parts = []
    if error.cause is not None:
        link = (
            "The above exception was the direct cause of the following exception:"
            if error.cause_is_explicit
            else "During handling of the above exception, another exception occurred:"
        )
        parts += [remote_traceback(error.cause, colors=colors), "", link, ""]
    parts += [_frame_text(frame, colors) for frame in error.frames]
    if error.syntax is not None:
        parts.append(_syntax_text(error.syntax, colors))
    if message:
        name = colors.name(error.ename)
        parts.append(f"{name}: {error.evalue}" if error.evalue else name)
    parts += [f"  {note}" for note in error.notes]
    return "\n".join(parts)


def _frame_text(frame: FrameInfo, colors: Colors = PLAIN) -> str:
    text = _one_frame_text(frame, colors)
    if not frame.again:
        return text
    what = "frame" if frame.cycle == 1 else f"{frame.cycle} frames"
    told = f"  [Previous {what} repeated {frame.again} more times]"
    return f"{text}{told}\n" if text.endswith("\n") else f"{text}\n{told}"


def _one_frame_text(frame: FrameInfo, colors: Colors) -> str:
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    lines = frame.context or local_lines(frame)
    at = f", line {frame.lineno}"
    if _is_cell(frame.filename):
        head = f"{_cell_name(frame.filename, at, colors)}{inside}"
    else:
        head = f"{colors.place(f'{_short(frame.filename)}{at}')}{inside}"
        lines = [(n, text.strip()) for n, text in lines if n == frame.lineno]
        return "\n".join([head, *(f"    {colors.source(text)}" for _, text in lines)])
    shown = []
    for number, text in lines:
        mark = f"{'---->' if number == frame.lineno else '     '} {number:>3}"
        shown.append(f"{colors.place(mark)} {colors.source(text)}")
    return "\n".join([head, *shown, ""])


def _syntax_text(place: FrameInfo, colors: Colors) -> str:
    """Code that could not be read, as IPython shows it."""
    kind = "Cell" if is_cell(place.filename) else "File"
    at = colors.place(f"{_short(place.filename)}, line {place.lineno}")
    return "\n".join([f"  {kind} {at}", *(text for _, text in place.context)])


def _is_cell(filename: str) -> bool:
    return is_cell(filename) or is_notebook_file(filename)


def _cell_name(filename: str, at: str, colors: Colors) -> str:
    name = "of the notebook" if is_notebook_file(filename) else filename
    return f"Cell {colors.place(f'{name}{at}')}"


def local_lines(frame: FrameInfo) -> Sequence[tuple[int, str]]:
    """Lines of a function that was defined in this kernel; the ranks do not have its source."""
    numbers = range(max(1, frame.lineno - 2), frame.lineno + 3)
    lines = [(n, linecache.getline(frame.filename, n).rstrip()) for n in numbers]
    return lines if any(n == frame.lineno and text for n, text in lines) else ()


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    if path.startswith(home + os.sep):
        return "~" + path[len(home) :]
    return path
