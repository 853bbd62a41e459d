"""What ran on the ranks, written as a script, and a check that the script does the same."""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import re
import symtable
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from distsession.engine.script import run_script, set_place
from distsession.errors import DistsessionError, ExportError, ExportWarning
from distsession.export import templates
from distsession.export.calls import call_to_python
from distsession.export.history import Call, Cell, Entry, History
from distsession.export.translate import Plain, indented, to_python
from distsession.kernel.output import Silent
from distsession.kernel.requests import Requests
from distsession.options import SessionOptions
from distsession.protocol.messages import CellRequest
from distsession.ranks import RankInfo, ranks_text

__all__ = ["check_script", "parse_cells", "write_script"]

Selection = Iterable[int | str]
_OF_MODULES = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__annotations__"}
"""Names that each module has."""


class Exported(Protocol):
    """What is needed of the session that is exported."""

    history: History
    options: SessionOptions
    requests: Requests

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def world_size(self) -> int: ...
    @property
    def infos(self) -> tuple[RankInfo, ...]: ...


def write_script(
    session: Exported,
    path: str | os.PathLike[str],
    cells: Selection | None = None,
    *,
    slurm: bool = False,
) -> Path:
    """Write what ran as a script; see :meth:`~distsession.session.Session.export`."""
    target = Path(path)
    if target.suffix != ".py":
        raise ExportError(f"a script's name ends in .py, which {str(path)!r} does not.")
    for file in (target, target.with_suffix(".sbatch"))[: 1 + slurm]:
        _check_free(file)
    text = script_text(session, target.name, cells)
    target.write_text(text, "utf-8")
    if slurm:
        target.with_suffix(".sbatch").write_text(_batch_text(session, target.name), "utf-8")
    return target


def _check_free(path: Path) -> None:
    """Write over nothing but what an earlier export wrote."""
    try:
        begin = path.read_text("utf-8")[:400]
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        begin = ""
    if templates.MARK not in begin:
        raise ExportError(
            f"{path} is there already and was not written by an export: remove it, or give "
            "another name."
        )


def script_text(session: Exported, name: str, cells: Selection | None = None) -> str:
    """The text of the script.

    Raises:
        ExportError: Nothing ran, or something that ran cannot be written.
    """
    history = session.history
    entries = history.entries
    if history.forgotten and cells is None:
        raise ExportError(
            f"too much has run on the ranks: the first {history.forgotten} cells and calls are "
            "forgotten. Name those that the script needs with cells=[...]."
        )
    chosen = entries if cells is None else _choose(entries, list(cells))
    others = [each for each in history.all_entries if not any(each is other for other in chosen)]
    if not chosen:
        raise ExportError("nothing has run on the ranks that could be written.")
    imports: set[str] = set()
    problems: list[str] = []
    sections = []
    for number, entry in enumerate(chosen, 1):
        plain = _section(entry, number)
        problems += [f"{entry.name}: {problem}" for problem in plain.problems]
        if not plain.problems:
            code = _on_ranks(plain.code, entry.ranks, session.world_size)
            sections.append(f"# %% {_heading(entry)}\n{code}".rstrip())
            imports |= plain.imports
    if problems:
        lines = "\n".join(f"  {problem}." for problem in dict.fromkeys(problems))
        raise ExportError(
            f"this cannot be written as part of a script:\n{lines}\n"
            "Run it in another way, or name what the script is to have with cells=[...]."
        )
    left = [entry.name for entry in entries if not any(entry is other for other in chosen)]
    kind = session.infos[0].device.device.partition(":")[0]
    accelerator = "" if kind in ("cpu", "cuda") else kind
    if accelerator:  # the type is one of a module that was preloaded, if torch has it not itself
        imports |= {f"import {module}" for module in session.options.preload}
    head = templates.head(
        name,
        session.world_size,
        backend=session.options.backend,
        on_gpu=kind == "cuda",
        timeout=session.options.timeout,
        seed=session.options.seed,
        seed_per_rank=session.options.seed_per_rank,
        threads=session.options.threads,
        imports=sorted(imports),
        left_out=list(dict.fromkeys(left)),
        accelerator=accelerator,
    )
    text = "\n\n\n".join([head, *sections, templates.TAIL])
    if missing := _missing(text, others):
        lines = "\n".join(f"  {line}" for line in missing)
        warnings.warn(
            f"the script uses names that none of its cells defines:\n{lines}",
            ExportWarning,
            stacklevel=4,
        )
    return text


def _missing(text: str, others: Sequence[Entry]) -> list[str]:
    """Of each name that a script uses and does not define, who would have defined it."""
    used, stored, has_all = _names_in(text)
    if has_all:  # a module's names, which nobody knows here
        return []
    lines = []
    for name in sorted(used - stored - set(dir(builtins)) - _OF_MODULES):
        where = [entry for entry in others if name in _stored_by(entry)]
        if not where:
            lines.append(f"{name}: nothing that is known of has defined it.")
            continue
        last = where[-1]
        why = "was not chosen" if last.succeeded else "failed, or was stopped"
        lines.append(
            f"{name}: {last.name} has defined it, which {why}: run it again, or export it."
        )
    return lines


def _stored_by(entry: Entry) -> set[str]:
    if not isinstance(entry, Cell):
        return set()
    try:
        return _names_in(to_python(entry.source).code)[1]
    except SyntaxError:
        return set()


def _names_in(text: str) -> tuple[set[str], set[str], bool]:
    """The global names that code reads, those that it sets, and whether there may be more."""
    todo, used, stored, has_all = [symtable.symtable(text, "script", "exec")], set(), set(), False
    for table in todo:  # which grows meanwhile
        todo += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() != "module" and not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                stored.add(symbol.get_name())
    for node in ast.walk(ast.parse(text)):
        has_all = has_all or (isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
    return used, stored, has_all


def _batch_text(session: Exported, name: str) -> str:
    return templates.batch(
        name,
        session.world_size,
        on_gpu=session.infos[0].device.device.startswith("cuda"),
        threads=max(info.device.threads for info in session.infos),
    )


# --- which ----------------------------------------------------------------------------------------


def parse_cells(text: str) -> list[int | str]:
    """``3-5,8,train`` as a selection."""
    chosen: list[int | str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if dash and first.strip().isdigit() and last.strip().isdigit():
            chosen += range(int(first), int(last) + 1)
        else:
            chosen.append(int(part) if part.isdigit() else part)
    return chosen


def _choose(entries: Sequence[Entry], cells: list[int | str]) -> list[Entry]:
    wanted = {f"In[{cell}]" if isinstance(cell, int) else cell for cell in cells}
    chosen = [entry for entry in entries if wanted & _names(entry)]
    known = set[str]().union(*(_names(entry) for entry in chosen))
    missing = [cell for cell in sorted(wanted) if cell not in known]
    if missing:
        there = ", ".join(dict.fromkeys(entry.name for entry in entries)) or "nothing"
        raise ExportError(
            f"{', '.join(missing)} did not run on the ranks, or failed. What ran: {there}."
        )
    return chosen


def _names(entry: Entry) -> set[str]:
    inner = re.fullmatch(r"session\.run\((.*)\)|(In\[\d+\]) \(.*\)", entry.name)
    return {entry.name, inner[1] or inner[2]} if inner else {entry.name}


# --- sections -------------------------------------------------------------------------------------


def _heading(entry: Entry) -> str:
    if isinstance(entry, Cell):
        first = entry.source.partition("\n")[0]
        if first.startswith("# %%distributed") and first.strip() != "# %%distributed":
            return f"{entry.name} ({first[2:].strip()})"
    return entry.name


def _section(entry: Entry, number: int) -> Plain:
    if entry.problem:
        return Plain("", problems=[f"it cannot be written, since {entry.problem}"])
    if isinstance(entry, Cell):
        return to_python(entry.source)
    assert isinstance(entry, Call)
    return call_to_python(entry, number)


def _on_ranks(code: str, ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return code
    which = f"== {ranks[0]}" if len(ranks) == 1 else f"in {tuple(ranks)}"
    body = indented(code)
    if not ast.parse(code).body:
        body += "\n    pass"
    return f"if rank {which}:\n{body}"


# --- the check ------------------------------------------------------------------------------------


def check_script(
    session: Exported,
    start: Callable[..., AbstractContextManager[Any]],
    path: str | os.PathLike[str],
    names: Sequence[str],
    tolerance: float = 0.0,
    hash_seeds: bool = False,
) -> dict[str, float]:
    """Run a script and compare variables; see :meth:`Session.check_export`.

    ``start`` starts the session that runs the script.
    """
    names = [names] if isinstance(names, str) else list(names)
    wrong = [name for name in names if not name.isidentifier()]
    if wrong or not names:
        raise ExportError(f"names of variables are needed, such as ['loss'], not {wrong}.")
    script = os.path.abspath(path)
    if not os.path.isfile(script):
        raise ExportError(f"there is no script {path}: session.export(...) writes one.")
    module = "__import__('distsession.engine.export_check', fromlist=['compare'])"
    with tempfile.TemporaryDirectory(prefix="distsession-") as folder:
        kept = _evaluate(session, f"{module}.save(globals(), {names!r}, {folder!r})")
        missing = [name for name in names if not any(name in there for there in kept.values())]
        if missing:
            raise ExportError(f"no rank of the session has {', '.join(missing)}.")
        options = replace(session.options, ranks=session.world_size, launcher="local")
        if hash_seeds:  # each node has an agent of its own, from which its ranks are forked
            options = replace(options, nodes=session.world_size)
        given = {name: value for name, value in vars(options).items() if value is not None}
        try:
            with _fresh_hash_seeds(hash_seeds), start(output=Silent, **given) as other:
                if hash_seeds:
                    other.run(set_place, _places(session))
                other.run(run_script, script, [str(path)])
                found = _evaluate(other, f"{module}.compare({names!r}, {folder!r})")
        except DistsessionError as error:
            raise ExportError(f"{path} does not run through: {error}") from error
    return _verdict(names, found, tolerance, str(path), session.options.seed is None)


@contextlib.contextmanager
def _fresh_hash_seeds(wanted: bool) -> Iterator[None]:
    """Processes that start within choose a seed for the hashes of strings by themselves."""
    before = os.environ.pop(_HASH_SEED, None) if wanted else None
    try:
        yield
    finally:
        if before is not None:
            os.environ[_HASH_SEED] = before


_HASH_SEED = "PYTHONHASHSEED"
_PLACE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")


def _places(session: Exported) -> dict[int, dict[str, str]]:
    """Where the session's ranks are, for ranks that are to think that they are there."""
    names = f"{{n: __import__('os').environ[n] for n in {_PLACE!r}}}"
    return dict(_evaluate(session, names))


def _evaluate(session: Exported, expression: str) -> Any:
    """The value of an expression on all ranks, which is no part of what ran there."""

    def make(number: int) -> CellRequest:
        return CellRequest(number, expression, f"In[{number}]", fetch=True, expression=True)

    return session.requests.call(session.ranks, make, [])


def _verdict(
    names: Sequence[str], found: Any, tolerance: float, path: str, is_unseeded: bool
) -> dict[str, float]:
    result, problems = {}, []
    for name in names:
        by_rank = {rank: each[name] for rank, each in found.items() if name in each}
        result[name] = max((gap for gap, _ in by_rank.values()), default=0.0)
        texts: dict[str, list[int]] = {}
        for rank, (gap, text) in by_rank.items():
            if gap > tolerance:
                texts.setdefault(text, []).append(rank)
        problems += [f"{name}, {ranks_text(ranks)}: {text}" for text, ranks in texts.items()]
    if problems:
        hint = (
            "\nThe session was started without a seed, so random numbers differ: seed them in a "
            "cell, or start it with seed=0." * is_unseeded
        )
        lines = "\n".join(f"  {problem}." for problem in problems)
        raise ExportError(f"{path} gives other results than the session:\n{lines}{hint}")
    return result
