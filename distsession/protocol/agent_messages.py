"""The messages between kernel and agent: the start and end of ranks, and what a host has."""

from __future__ import annotations

from dataclasses import dataclass, field

from distsession.protocol.messages import Message
from distsession.ranks import HostInfo

__all__ = [
    "AgentFailed",
    "AgentReady",
    "AgentStarted",
    "GpuHolder",
    "GpuMemory",
    "GpuReply",
    "GpuRequest",
    "LogPiece",
    "LogRequest",
    "PreloadReply",
    "PreloadRequest",
    "PrepareAgent",
    "RankExited",
    "RankUsage",
    "StartRanks",
    "StopRanks",
    "StoreEnded",
    "StoreReady",
    "UsageReply",
    "UsageRequest",
]


@dataclass(frozen=True, slots=True)
class PrepareAgent(Message):
    """Import these modules too, then say that you are ready.

    Attributes:
        identify: Say the UUIDs of the GPUs, too.
        has_ranks: It is to fork ranks; else it needs neither torch nor the modules.
    """

    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    identify: bool = False
    has_ranks: bool = True


@dataclass(frozen=True, slots=True)
class PreloadRequest(Message):
    """Import these modules for ranks that are forked later, and send a ``PreloadReply``.

    Attributes:
        number: Of this request. No two kernels of a session give the same.
        modules: None ends a trial that is under way.
        is_trial: Do so in a child that ends thereafter.
    """

    number: int
    modules: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class PreloadReply(Message):
    """How that went.

    Attributes:
        problem: Why it cannot be; empty if all is well.
        known: Those of the modules that the agent had before.
    """

    number: int
    node: int
    problem: str = ""
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartRanks(Message):
    """Fork these ranks.

    Attributes:
        ranks: Ranks to start, all of the agent's node; on the first node there may be none, if only
            the store is needed.
        devices: torch device of every rank of the node, also of those that are not to be started.
        visible: What each of them has for ``CUDA_VISIBLE_DEVICES``; empty: as in ``environ``.
        is_shared: Several ranks are on one GPU.
        check: How collectives are compared (see ``SessionOptions.check``).
        board: The descriptor of the shared memory of ``board``, inherited from the kernel; -1 on
            another host, whose agent makes its own.
        is_board_shared: All nodes have that one, since they are on one host; else each has its own.
        environ: The kernel's environment; the rank's own variables are laid over it. On another
            host it is laid over that of the agent itself, and is only a part.
        is_whole: All ranks of the world are new, so there are no groups to agree on.
        node: Of which node the agent is. All but 0 have a relay.
        node_rank: What users call that node.
        interface: Of the network, for gloo and NCCL; empty where all ranks are on one host.
        nodes: How many there are. Each has a block of ranks, in their order.
        first_rank: Of the node's block.
        host: What the node is called; empty: as its machine.
        store_port: Of torch's TCP store; 0 on the first node, whose agent has it.
        epoch: Of the owner, to whose sockets the ranks connect.
        keep: Seconds for which the ranks stay when their kernel has gone; 0: they end with it.
        keep_idle: The same once all of them are idle; 0: as long.
        keep_output: Bytes of each log file that are kept.
        version: Of the kernel's package, which is the agent's too.
        groups: Whose process groups code gets (see ``SessionOptions.groups``).
    """

    ranks: tuple[int, ...]
    world_size: int
    generation: int
    devices: tuple[str, ...]
    backend: str
    timeout: float | None
    seed: int | None
    seed_per_rank: bool
    threads: int
    check: str
    board: int
    folder: str
    cwd: str
    sys_path: tuple[str, ...]
    environ: dict[str, str] = field(repr=False)
    is_whole: bool = True
    is_board_shared: bool = True
    node: int = 0
    nodes: int = 1
    first_rank: int = 0
    host: str = ""
    store_port: int = 0
    epoch: int = 1
    keep: float = 0.0
    keep_idle: float = 0.0
    keep_output: int = 1 << 30
    version: str = ""
    groups: str = "session"
    visible: tuple[str, ...] = ()
    is_shared: bool = False
    node_rank: int = 0
    interface: str = ""

    @property
    def here(self) -> range:
        """All ranks of the node."""
        return range(self.first_rank, self.first_rank + len(self.devices))


@dataclass(frozen=True, slots=True)
class StopRanks(Message):
    """End these ranks at once and everything they started."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UsageRequest(Message):
    """Send ``UsageReply``.

    Attributes:
        gpus: UUID of the GPU of each rank that has one.
        node: Whose agent is asked.
    """

    number: int
    gpus: dict[int, str]
    node: int = 0


@dataclass(frozen=True, slots=True)
class RankUsage(Message):
    """What a rank's process, and its GPU, are using.

    Attributes:
        at: When this was read, in seconds by a clock of its host that only goes forward.
        cpu_seconds: Processor time since the process began.
        rss: Bytes of memory that it holds.
        gpu_memory: Bytes in use on its GPU, by whomever; -1 where that is not known.
        gpu_total: Bytes that the GPU has.
        gpu_percent: Share of the time in which the GPU was busy; -1 where that is not known.
    """

    rank: int
    pid: int
    at: float
    cpu_seconds: float
    rss: int
    gpu_memory: int = -1
    gpu_total: int = 0
    gpu_percent: int = -1


@dataclass(frozen=True, slots=True)
class UsageReply(Message):
    """What the ranks of a node use."""

    number: int
    uses: tuple[RankUsage, ...]
    node: int = 0


@dataclass(frozen=True, slots=True)
class LogRequest(Message):
    """Send ``LogPiece``: a part of a log file that only the agent's host has.

    Attributes:
        generation: In which the rank was forked.
        stream: ``"out"`` or ``"err"``.
        begin: Where the part begins, in bytes.
        count: How many bytes of it are wanted at most; none asks for the size.
        node: Whose agent is asked.
    """

    number: int
    rank: int
    generation: int
    stream: str
    begin: int
    count: int
    node: int = 0


@dataclass(frozen=True, slots=True)
class LogPiece(Message):
    """A part of a log file.

    Attributes:
        size: Bytes of the file; 0 if it is gone.
        begin: Where the data begins, behind what was given back to the disk.
        data: Empty where nothing is left from there on.
    """

    number: int
    node: int
    size: int
    begin: int
    data: bytes


@dataclass(frozen=True, slots=True)
class GpuRequest(Message):
    """Send ``GpuReply``.

    Attributes:
        node: Whose agent is asked.
    """

    node: int = 0


@dataclass(frozen=True, slots=True)
class GpuHolder(Message):
    """A process that holds memory of a GPU.

    Attributes:
        pid: As the driver tells it; in a container it may be that of the host.
        user: Whose it is; empty where that is not known.
        nbytes: How much; -1 where that is not known.
    """

    pid: int
    user: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class GpuMemory(Message):
    """The memory of a GPU, or of a slice of one.

    Attributes:
        number: By which nvidia-smi shows the GPU.
        uuid: ``"GPU-..."`` or ``"MIG-..."``.
        name: The model.
        free: Bytes.
        total: Bytes.
        holders: Who has the rest.
    """

    number: int
    uuid: str
    name: str
    free: int
    total: int
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuReply(Message):
    """The memory of all GPUs of a node's host; none where NVML knows of none."""

    node: int
    gpus: tuple[GpuMemory, ...]


@dataclass(frozen=True, slots=True)
class AgentStarted(Message):
    """The first message of an agent: of which node it is."""

    node: int


@dataclass(frozen=True, slots=True)
class AgentReady(Message):
    """The agent has imported torch and can fork."""

    host: HostInfo
    node: int = 0


@dataclass(frozen=True, slots=True)
class StoreReady(Message):
    """The stores, which the agent of the first node has forked, are up; torch's at this port."""

    port: int


@dataclass(frozen=True, slots=True)
class StoreEnded(Message):
    """A store has ended, and the agent has put another in its place where it could.

    Attributes:
        pid: Of its process.
        returncode: As of ``subprocess``.
        is_tcp: It is torch's, which scripts meet at by an address.
        is_replaced: Another one is there.
    """

    pid: int
    returncode: int
    is_tcp: bool
    is_replaced: bool


@dataclass(frozen=True, slots=True)
class AgentFailed(Message):
    """The agent cannot go on (a preload module that does not import); it ends itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class RanksNotStarted(Message):
    """Processes that an agent was to start are not there; the others that it has are.

    Attributes:
        node: Of the agent.
        generation: That they were to be of.
        ranks: Which were to be started and are not; none where it is what all of them need.
        reason: Why, with what to do.
    """

    node: int
    generation: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RankExited(Message):
    """A rank's process has ended.

    Attributes:
        returncode: Exit code, or the negative signal number.
        expected: It was asked to end.
        log_tail: The last lines that it wrote, stderr after stdout.
        oom: Killed by SIGKILL, and its cgroup (or the host, where there is none) counts one more
            out-of-memory kill than before.
        oom_limit: Bytes that its cgroup may have; 0 where that is not known.
        place: The line of user code that it was at, such as ``"In[3] line 4"``; empty if not known.
        runs: The cell or function that ran, where no line is known.
        is_certain: It ended at that line, rather than that it was seen there some time before.
        is_idle: Nothing ran.
        is_terminated: It has ended on SIGTERM.
        stack: Of a crash, the Python stack, innermost line first.
        with_agent: Its agent ends, and has ended it before.
        limit: The limit that it met, with what to do, where it was refused a process or thread.
    """

    rank: int
    generation: int
    pid: int
    returncode: int
    expected: bool
    log_tail: str
    oom: bool = False
    oom_limit: int = 0
    place: str = ""
    runs: str = ""
    is_certain: bool = False
    is_idle: bool = False
    is_terminated: bool = False
    stack: tuple[str, ...] = ()
    with_agent: bool = False
    limit: str = ""
