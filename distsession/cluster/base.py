"""What a session needs from whatever starts its ranks and carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distsession.cluster.attachment import Adopted
from distsession.cluster.deaths import SilentHost
from distsession.cluster.interrupts import InterruptHold
from distsession.cluster.pending import PendingRequest
from distsession.engine.process import module_command
from distsession.errors import EngineDiedError, OptionsError
from distsession.options import SessionOptions
from distsession.protocol.agent_messages import LogPiece, UsageReply
from distsession.protocol.board import Board
from distsession.protocol.messages import CompletionReply, Mismatch, Request, StackReply
from distsession.protocol.rank_state import AbortReason
from distsession.protocol.serialize import Frames
from distsession.protocol.shared_memory import Progress, Segment
from distsession.ranks import RankInfo

__all__ = [
    "Channel",
    "Launcher",
    "Payload",
    "python_command",
]

Payload = Frames | Mapping[int, Callable[[], Frames]] | Segment
"""What goes with a request: the same frames for all ranks; for each rank its own, made when it is
their turn; or memory that all of them share."""


def python_command(module: str) -> list[str]:
    """The command that runs ``main()`` of one of our modules in a process of its own."""
    return module_command(module)


class Channel(ABC):
    """Carries requests to ranks and their answers back."""

    runs_in_caller = False
    """A request is over when it has been submitted, so nobody can end it before."""

    @abstractmethod
    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: Progress | None = None,
        interrupts: InterruptHold | None = None,
    ) -> PendingRequest:
        """Send a request to some ranks.

        Args:
            ranks: Who gets it.
            make: Makes the request from its number.
            payload: What goes with it.
            progress: Is told how much of the payload has been written.
            interrupts: Held once that is written, before the first rank gets the request.

        Raises:
            SerializationError: The payload does not fit into memory.
        """

    @abstractmethod
    def pending(self) -> list[PendingRequest]:
        """The requests that somebody waits for, oldest first."""

    def is_busy(self, rank: int) -> bool:
        """Whether a rank has requests that it has not answered."""
        return False

    def send_control(self, rank: int, message: Any) -> None:  # noqa: B027
        """Send a rank something that is no request; to one that has ended, nothing."""

    def process_of(self, rank: int) -> int | None:
        """The generation for which a rank's process was started; None if it has ended."""
        return None

    commits_pushes = False
    """Ranks can be told by a word that all of them see at once to set what they have staged."""

    def commit_push(self, number: int, ranks: Sequence[int]) -> bool:
        """Have ranks set the names of a push that all of them have staged, and not wait for it.

        Whatever is sent to them from now on finds the new values.

        Args:
            number: Of its request, which was made ``by_word``.
            ranks: All that have it.

        Returns:
            Whether that is done. If not, they have to be asked.
        """
        return False

    def receive_for(self, pending: PendingRequest, until: float) -> None:  # noqa: B027
        """Take in, on this thread, what comes until something of a request has to be seen.

        It need not do so: what comes is taken in by another thread else.

        Args:
            pending: Was sent by this thread just now, which holds interrupts since.
            until: When to stop at the latest, by ``time.monotonic()``.
        """

    @abstractmethod
    def forget(self, pending: PendingRequest) -> None:
        """Nobody waits for this any more; what still comes of it is background output."""


class Launcher(ABC):
    """Starts ranks, replaces them, and ends them."""

    channel: Channel
    name: str
    notes: tuple[str, ...] = ()
    """Sentences on what the ranks run on, for the user, once they are started."""
    board: Board | None = None
    """What the ranks are doing; None where there is no such memory."""
    shares_board = True
    """All ranks have that memory; else those of each node share one, and relays tell of it here."""

    @abstractmethod
    def start(self) -> tuple[RankInfo, ...]:
        """Start all ranks; returns when the process group is ready on each."""

    def check_restart(self, ranks: Sequence[int] | None) -> None:  # noqa: B027
        """See that some ranks, or all, can be replaced. Nothing has changed if they cannot.

        Raises:
            SessionStateError: Another rank still runs something, or is stopped.
        """

    @abstractmethod
    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        """Put fresh processes in the place of some ranks, or of all, once that is checked."""

    @abstractmethod
    def check_preload(self, names: Sequence[str]) -> tuple[str, ...]:
        """See that ranks can have modules from their start; gives those that are imported already.

        Raises:
            OptionsError: One does not import, or ranks cannot be forked after it.
        """

    @abstractmethod
    def preload(self, options: SessionOptions) -> None:
        """Have ranks that are started from here on have these options' modules.

        Args:
            options: Those of the session, with modules that ``check_preload`` has seen to be good.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything. Harmless when repeated."""

    def host_name(self, node: int) -> str:
        """What a node is called, where the name of its machine does not tell it; else nothing."""
        return ""

    @property
    def job(self) -> str:
        """The id of the job that the ranks are in; empty without one."""
        return ""

    def host_address(self, node: int) -> str:
        """Where other hosts reach a node; empty where all nodes are on this machine."""
        return ""

    def check_moves(self, moves: Mapping[int, str]) -> None:
        """See that other hosts can take the places of some.

        Args:
            moves: The name of the new host for each node.

        Raises:
            OptionsError: There are no other hosts, or the launcher chooses them.
        """
        if moves:
            raise OptionsError(
                "another host can take the place of one where hosts= names them: launcher='ssh', "
                "or 'command'."
            )

    def move_hosts(self, moves: Mapping[int, str]) -> None:  # noqa: B027
        """Have other hosts take the places of some by the next restart; ranks there are lost."""

    # --- a session that is kept -------------------------------------------------------------------

    taken = ""
    """Why this process owns the session no longer; empty while it does."""
    taken_over = ""
    """The same, as the caller of a run is told it: which process took the session, and when."""
    adopted: tuple[Adopted, ...] = ()
    """What a former owner has left, where this process has attached."""

    @property
    def folder(self) -> str:
        """The session's private folder; empty where it has none."""
        return ""

    @property
    def epoch(self) -> int:
        """Which owner of the session this process is, from 1."""
        return 1

    def detach(self) -> None:
        """Let go of the ranks, which go on; they end where they cannot without this process."""
        self.close()

    def adopt_late(self, request: int, ranks: Sequence[int]) -> PendingRequest | None:
        """Wait for a request of a former owner that no rank has told of, if one may that has not
        connected yet.
        """
        return None

    def resume_late(self) -> None:  # noqa: B027
        """Let ranks go on that connect late, after :meth:`adopt_late` for what they may have."""

    # --- the process group; nothing to do where there is only this process ------------------------

    is_broken = False
    """The process group has been given up and is not yet connected anew."""

    def abort(  # noqa: B027
        self,
        reason: AbortReason,
        text: str,
        *,
        interrupt: int = 0,
        refuse: Sequence[int] = (),
        stuck: Sequence[int] = (),
        mismatch: Mismatch | None = None,
        force: bool = False,
    ) -> None:
        """Free all ranks from collectives; see :class:`~distsession.protocol.messages.Abort`."""

    def find_mismatch(self) -> Mismatch | None:
        """An operation that ranks of different nodes have begun, and that does not match."""
        return None

    def refuse(self, requests: Sequence[int]) -> None:  # noqa: B027
        """Have requests that have not begun answered with an error."""

    def leave(self, ranks: Sequence[int], request: int, text: str) -> None:  # noqa: B027
        """Have ranks that nobody waits for end a request, as soon as they hear of it.

        Args:
            ranks: Which.
            request: Its number.
            text: Why.
        """

    @property
    def must_reconnect(self) -> bool:
        """Whether the process group is to be connected anew before the next run."""
        return self.is_broken

    @property
    def lacks_group(self) -> bool:
        """Whether code has destroyed the group on some ranks, and none is in another one."""
        return False

    def reconnect(self, *, may_keep: bool = True) -> str:
        """Connect the process group anew; gives what prevents it, or nothing.

        Args:
            may_keep: Connections that nothing has happened to stay as they are.
        """
        return ""

    def is_reconnecting_by(self, pending: PendingRequest) -> bool:
        """Whether this is the request by which the group is being connected anew."""
        return False

    def cancel_reconnect(self, pending: PendingRequest | None = None) -> bool:
        """Give up connecting the group anew, from another thread.

        Args:
            pending: Only if this is its request.

        Returns:
            Whether it was under way.
        """
        return False

    def log_path(self, rank: int, stream: str) -> Path | None:
        """Where everything is that a rank wrote to ``"stdout"`` or ``"stderr"``, if it is here."""
        return None

    def log_place(self, rank: int, stream: str) -> str:
        """The same for people, with the host if it is another one; empty where there is no log."""
        return str(self.log_path(rank, stream) or "")

    def read_log(self, rank: int, stream: str, begin: int, count: int) -> LogPiece | None:
        """A part of a log that is on another host; None where nobody answers in time.

        Args:
            rank: Whose.
            stream: ``"stdout"`` or ``"stderr"``.
            begin: Where it begins, in bytes.
            count: Bytes that are wanted at most.
        """
        return None

    def waits_for(self) -> str:
        """What a start or a restart that is under way waits for just now."""
        return ""

    def problems(self) -> str:
        """What does not work though the ranks do; empty where all is well."""
        return ""

    # --- processes, of which this machine's system may know nothing -------------------------------

    def is_here(self, node: int) -> bool:
        """Whether a node's processes are on this machine, so its pids can be used."""
        return True

    def process_state(self, rank: int) -> str:
        """The letter of /proc for the process of a rank; empty where that is not known."""
        return ""

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended, and its agent has not waited for it yet."""
        return False

    def processor_time(self, rank: int) -> int:
        """Clock ticks that the main thread of a rank has used; of another host's, in runs."""
        return 0

    def unreported(self, rank: int) -> str:
        """Of a rank that has ended: why nobody says how."""
        return "nobody has said how"

    def silent_hosts(self) -> tuple[SilentHost, ...]:
        """Hosts that do not answer just now, and do not count as gone."""
        return ()

    def note_unreported(self) -> None:  # noqa: B027
        """Take ranks for dead that have ended and whose agent does not say so."""

    def request_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        """Where the main threads of ranks are; without those that do not answer in time."""
        return {}

    def complete(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, CompletionReply]:
        """Complete code, or inspect a name, by what ranks have, also while they are busy."""
        return {}

    def usage(self, timeout: float) -> UsageReply | None:
        """What the ranks use of processors, memory and GPUs; as last known after ``timeout``."""
        return None

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The facts of each rank, as it last told them."""
        return ()

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the processes that hold the session together still run."""

    def must_start_anew(self, ranks: Sequence[int]) -> bool:
        """Whether only a new start of everything brings these ranks back."""
        return not self.is_alive

    @abstractmethod
    def dead_ranks(self) -> dict[int, EngineDiedError]:
        """Ranks whose process has ended and was not replaced."""

    @abstractmethod
    def client(self, timeout: float) -> Any:
        """The connected ``ipyparallel.Client``, once every rank is registered."""
