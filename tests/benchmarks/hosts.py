"""A session on several hosts, which are namespaces of this machine, each with a network.

So nothing takes time on the way, and all hosts share the processors of one machine, also for what
each would do by itself at the same time, such as an import of torch.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import pytest
import torch
import zmq

from distsession import RunError, Session
from distsession.cluster.hosts import Hosts
from distsession.errors import RunInterrupt
from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import ANSWER_TIMEOUT, noop, time_calls
from tests.benchmarks.figures import OURS, Arm, Figure, Row, Target, take_turns
from tests.benchmarks.keep import ATTACH_TARGET, attach_in_a_fresh_process
from tests.benchmarks.moving import MB, touch
from tests.benchmarks.processes import end_tree, program, snapshot
from tests.benchmarks.programs.hangs import WORK, Fault, cell
from tests.benchmarks.starts import import_torch
from tests.integration.host_lab import HostLab, LabHost, host_lab, lacks
from tests.integration.host_sessions import options_of

NAMES = ("gpu1", "gpu2", "gpu3")
RANKS = 2
"""Of each host."""
LINK_S = 0.0002
"""Seconds that a packet takes from or to a host, at least, where links are to take some."""
LINK_MBIT = 1000
"""Megabits a second to a host, where links are to be as fast as networks that users have."""
LINK_BOUND = 1.1
"""So many times what it takes plain TCP, at most, where it is the link that takes the time."""
PUSH_BYTES = 256 * MB
RAW = "raw zmq, CURVE, one hop"
TCP = "plain TCP to all hosts"


def hosts(bench: Bench) -> Iterator[Row]:
    """Starting, calling, sending, stopping, and the end of a host."""
    if text := lacks():
        yield Row("several hosts", OURS, note=f"not measured: {text}")
        return
    with host_lab(NAMES) as lab:
        yield from _start(bench, lab)
        before = snapshot()
        with Session(**options_of(lab, *NAMES)) as session:
            yield from _push(bench, lab, session)
            yield from _call(bench, lab, session)  # after what an agent does once it is idle
            with contextlib.ExitStack() as links:
                for host in lab.hosts:
                    links.enter_context(host.limited(LINK_MBIT))
                yield from _push(bench, lab, session, f", links of {LINK_MBIT} Mbit/s")
            # Last: such links leave the interfaces without what makes sending much cheap.
            with contextlib.ExitStack() as links:
                for host in NAMES:
                    links.enter_context(lab.delayed(host, LINK_S))
                yield from _call(bench, lab, session, f", links of {1e3 * LINK_S} ms")
            yield from _stop(bench, session)
            yield from _end(lab, session)
        bench.sweep(OURS, before)
        yield from _attach(bench, lab)


# --- start ----------------------------------------------------------------------------------------


def _start(bench: Bench, lab: HostLab) -> Iterator[Row]:
    def measure() -> Sequence[float]:
        before = snapshot()
        came: list[float] = []
        wait = Hosts.start

        def start(self: Hosts) -> None:
            wait(self)
            came.append(time.perf_counter())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Hosts, "start", start)
            with Session(**options_of(lab, *NAMES[:2])) as session:
                session.execute("dist.barrier()")
                took = time.perf_counter() - came[0]
        bench.sweep(OURS, before)
        return [took]

    floor, ours = Arm("import torch", import_torch), Arm(OURS, measure)
    take_turns([floor, ours], bench.repeats)
    name = f"from the last host's coming to the first barrier, 2 hosts of {RANKS}"
    yield ours.row(name, "s", floor, target=Target(1.5))


# --- call -----------------------------------------------------------------------------------------


class RawHops:
    """The least that a call to hosts can be: an encrypted connection to each, and a hop there."""

    def __init__(self, bench: Bench, lab: HostLab):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        port = self._socket.bind_to_random_port(f"tcp://{lab.address}")
        self._processes: list[subprocess.Popen[str]] = []
        for host in lab.hosts:
            local = f"ipc://{lab.folder}/raw-{host.name}"
            address = f"tcp://{lab.address}:{port}"
            self._run(host, "raw_hop", address, public.hex(), local, RANKS)
            for number in range(RANKS):
                self._run(host, "raw_worker", local, number)
        self._names = []
        for _ in lab.hosts:
            if not self._socket.poll(1000 * ANSWER_TIMEOUT):
                self.close()
                raise TimeoutError("the raw hops did not come")
            self._names.append(self._socket.recv_multipart()[0])

    def _run(self, host: LabHost, name: str, *arguments: object) -> None:
        self._processes.append(_run_on(host, name, *arguments))

    def call(self) -> list[Any]:
        payload = cloudpickle.dumps((noop, (), {}), protocol=5)
        for name in self._names:
            self._socket.send_multipart([name, payload])
        return [
            pickle.loads(self._socket.recv_multipart()[1]) for _ in range(RANKS * len(self._names))
        ]

    def close(self) -> None:
        for process in self._processes:
            end_tree(process)
        self._context.destroy(0)


def _run_on(host: LabHost, name: str, *arguments: object) -> subprocess.Popen[str]:
    there = ["nsenter", "-t", str(host.pid), "-m", "-u", "-n", "--"]
    return subprocess.Popen([*there, *program(name, *arguments)], text=True)


def _call(bench: Bench, lab: HostLab, session: Session, links: str = "") -> Iterator[Row]:
    each = 100 if bench.quick else 200
    with contextlib.closing(RawHops(bench, lab)) as hops:
        raw = Arm(RAW, lambda: time_calls(hops.call, each))
        ours = Arm(OURS, lambda: time_calls(lambda: session.run(noop), each))
        take_turns([raw, ours], max(bench.repeats, 3))
        name = f"call with no work, {len(NAMES)} hosts of {RANKS}{links}"
        yield raw.row(name, "ms")
        yield ours.row(name, "ms", raw, target=Target(1.5))


# --- sending --------------------------------------------------------------------------------------


def _push(bench: Bench, lab: HostLab, session: Session, links: str = "") -> Iterator[Row]:
    value = torch.ones(PUSH_BYTES // 4)
    data = memoryview(value.numpy()).cast("B")

    def push() -> Sequence[float]:
        began = time.perf_counter()
        session.push(x=value)
        session.run(touch)
        return [time.perf_counter() - began]

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((lab.address, 0)))
        streams = []
        for host in lab.hosts:
            process = _run_on(host, "raw_sink", lab.address, listener.getsockname()[1])
            stack.callback(end_tree, process)
            streams.append(stack.enter_context(listener.accept()[0]))

        def send_one(stream: socket.socket) -> None:
            stream.sendall(len(data).to_bytes(8, "big"))
            stream.sendall(data)
            assert stream.recv(1) == b"k"

        def send() -> Sequence[float]:
            began = time.perf_counter()
            threads = [threading.Thread(target=send_one, args=[stream]) for stream in streams]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [time.perf_counter() - began]

        raw, ours = Arm(TCP, send), Arm(OURS, push)
        take_turns([raw, ours], max(bench.repeats, 3))
        name = f"256 MB to {len(NAMES)} hosts of {RANKS}, and read there{links}"
        yield raw.row(name, "s")
        yield ours.row(name, "s", raw, target=Target(LINK_BOUND) if links else None)


# --- what goes wrong ------------------------------------------------------------------------------


def _stop(bench: Bench, session: Session) -> Iterator[Row]:
    took = []
    for _ in range(max(bench.repeats, 3)):
        fault = Fault(session.interrupt)
        with contextlib.suppress(RunInterrupt):
            session.execute(cell("stop", ""))
        session.execute(WORK)
        took.append(time.monotonic() - fault.at)
    name = f"Stop in a hung collective to one that works, {len(NAMES)} hosts of {RANKS}"
    yield Row(name, OURS, Figure(tuple(took)), "s", target=Target(0.3))


def _end(lab: HostLab, session: Session) -> Iterator[Row]:
    """Last, for the host is gone then."""
    gone = lab[NAMES[-1]]
    fault = Fault(gone.crash)
    code = cell("stop", "").replace("rank == 1", "rank == world_size - 1")
    name = f"the end of a host to an error that names it, {len(NAMES)} hosts of {RANKS}"
    try:
        session.execute(code)
    except RunError as error:
        took = time.monotonic() - fault.at
        if gone.name in str(error):
            yield Row(name, OURS, Figure((took,)), "s", target=Target(2))
        else:
            yield Row(name, OURS, note=f"not named: {str(error)[:100]}", failed=True)


def _attach(bench: Bench, lab: HostLab) -> Iterator[Row]:
    """To ranks that are kept on hosts, in a process that has just imported all it needs."""
    hosts = NAMES[:-1]  # the last one is gone
    before = snapshot()
    Session(**options_of(lab, *hosts), name="bench", keep=600.0).detach()
    took = [attach_in_a_fresh_process("bench") for _ in range(2 * bench.repeats)]
    Session.attach("bench").close()
    bench.sweep(OURS, before)
    name = f"attach after the import, {len(hosts)} hosts of {RANKS}"
    yield Row(name, OURS, Figure(tuple(took)), "ms", target=ATTACH_TARGET)
