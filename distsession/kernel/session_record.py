"""All that a session remembers of what ran: put into its journal, and taken from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distsession.kernel.journal import Journal, read_journal
from distsession.kernel.replay import KEPT_RUNS, OutputHistory, OutputNoted
from distsession.kernel.requests import Requests
from distsession.kernel.runs import LastRun, RunBegan, RunEnded, RunFailed, RunKind, RunsKnown
from distsession.protocol.cells import number_in

__all__ = ["Known", "SessionRecord", "known_outputs", "known_runs"]


class Entries(Protocol):
    """What is needed of the history of what ran."""

    on_change: Any

    def changes(self) -> Iterable[object]: ...
    def restore(self, changes: Iterable[object]) -> None: ...
    def find(self, number: int) -> Any: ...
    def keep(self, entry: Any) -> None: ...
    def lost(self, ranks: Sequence[int], name: str) -> Any: ...


@dataclass
class Known:
    """What a journal tells of runs.

    Attributes:
        began: By their numbers.
        ended: Whether they succeeded; without those that have not ended, as far as is known.
    """

    began: dict[int, RunBegan] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)

    def take(self, record: object) -> None:
        """Take in one record."""
        if isinstance(record, RunBegan):
            self.began[record.request] = record
        elif isinstance(record, RunEnded):
            self.ended[record.request] = record.succeeded


def known_runs(folder: str) -> Known:
    """The runs that a session's journal tells of; also while another process writes it."""
    known = Known()
    for record in read_journal(folder):
        known.take(record)
    return known


def known_outputs(folder: str) -> tuple[OutputHistory, list[RunBegan]]:
    """What the cells of all kernels have put out, and the runs that have not ended.

    Also while another process writes the journal that says so.
    """
    outputs, known, errors = OutputHistory(), Known(), []
    records = read_journal(folder)
    kernels = [each.kernel for each in records if isinstance(each, (RunBegan, RunsKnown))]
    outputs.kernel = max(kernels, default=1)
    for record in records:
        known.take(record)
        if isinstance(record, OutputNoted):
            outputs.restore(record)
        elif isinstance(record, RunFailed):
            errors.append(record)
    for failed in errors:
        outputs.restore_error(failed.request, failed.error)
    return outputs, [run for number, run in known.began.items() if number not in known.ended]


class SessionRecord:
    """Keeps the journal of a session.

    Args:
        requests: Of the session.
        history: What ran, for ``export``.
    """

    def __init__(self, requests: Requests, history: Entries):
        self._requests = requests
        self._history = history
        self._journal: Journal | None = None

    def begin(self, folder: str, epoch: int) -> None:
        """Write a journal from here on, which begins with all that is known."""
        self.end()
        self._journal = journal = Journal(folder, epoch, self._everything)
        self._history.on_change = journal.append
        self._requests.journal = journal

    def end(self) -> None:
        """Write nothing more."""
        self._history.on_change = None
        self._requests.journal = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def restore(self, folder: str, epoch: int) -> Known:
        """Make everything as the owners before have left it; to be called before :meth:`begin`.

        Args:
            folder: Of the session.
            epoch: Which owner this is.

        Returns:
            The runs that they have begun.
        """
        requests, known, records = self._requests, Known(), read_journal(folder)
        before = [each.kernel for each in records if isinstance(each, (RunBegan, RunsKnown))]
        requests.outputs.kernel = requests.names.kernel = max(epoch, max(before, default=0) + 1)
        self._history.restore(records)
        outputs: dict[int, OutputNoted] = {}  # a run may be told of twice, once as part of all
        for record in records:
            if isinstance(record, OutputNoted):
                outputs.pop(record.request, None)
                outputs[record.request] = record
        for noted in list(outputs.values())[-KEPT_RUNS:]:
            requests.outputs.restore(noted)
        for record in records:
            known.take(record)
            self._take(record)
        for number, succeeded in known.ended.items():
            began = known.began.get(number)
            entry = None if began is None else self._history.find(began.entry)
            if succeeded and entry is not None and not entry.succeeded:
                self._history.keep(entry)
        for number, run in known.began.items():
            if number not in known.ended and self._history.find(run.entry) is None:
                lost = self._history.lost(run.ranks, run.title)
                known.began[number] = replace(run, entry=lost.number)
        return known

    def _take(self, record: object) -> None:
        requests = self._requests
        match record:
            case RunBegan(kind=kind):
                requests.names.taken.update(number_in(record.label))
                if kind is not RunKind.EXPRESSION:
                    requests.last_run = LastRun(record.request, record.ranks)
            case RunFailed():
                requests.outputs.restore_error(record.request, record.error)
                if record.rank is not None:
                    requests.failed_rank = record.rank
            case RunsKnown():
                requests.last_run, requests.failed_rank = record.last, record.failed_rank
                requests.names.taken.update(record.cells)

    def _everything(self) -> Iterator[object]:
        """The records of all that is known now."""
        yield from self._history.changes()
        yield from self._requests.outputs.noted()
        yield from self._requests.under_way()
        yield from self._requests.ended()
        yield self._requests.known()
