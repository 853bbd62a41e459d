"""A rank as an engine of ipyparallel's controller, for ``%px`` and ``session.client``.

What leans on ipyparallel's inside on a rank is here. ``tests/integration/test_ipyparallel.py``
fails when a release changes it. A rank imports this module when it first registers: importing
ipyparallel takes 40 ms, and every start would wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.iostream import OutStream
from ipyparallel.engine import app as engine_app
from ipyparallel.engine.kernel import IPythonParallelKernel
from traitlets.config import Config

from distsession.engine.capture import redirected
from distsession.engine.ipython import EngineShell, silent_debugger
from distsession.protocol.messages import ControllerInfo
from distsession.protocol.signing import no_signing_warning

__all__ = ["register"]

log = logging.getLogger(__name__)
_ipyparallel_log = log.getChild("ipyparallel")
_ipyparallel_log.setLevel(logging.CRITICAL + 1)  # what fails is told to the kernel, by an error
_ipyparallel_log.addHandler(logging.NullHandler())  # its engine takes it that there is one

DESCRIPTORS = 36
"""How many a registration takes (ipyparallel 9.2). Without them zmq ends the whole process."""


class _Kernel(IPythonParallelKernel):
    """ipyparallel's kernel, with its output streams set only while it works."""

    shell_class = EngineShell  # adopts the one that make_shell made
    px_streams: tuple[Any, Any] | None = None
    around: Callable[[], AbstractContextManager[None]]

    def set_parent(self, ident: Any, parent: Any, channel: str = "shell") -> None:
        super().set_parent(ident, parent, channel)
        for stream in self.px_streams or ():
            stream.set_parent(parent)

    @contextlib.contextmanager
    def _px(self) -> Iterator[None]:
        process = os.getpid()
        publisher = self.shell.display_pub
        publisher.is_px = True
        try:
            if self.px_streams is None:
                yield
                return
            with redirected(*self.px_streams):
                try:
                    with type(self).around():
                        yield
                finally:
                    # The client forgets a request once it is idle, with whatever still comes.
                    for stream in self.px_streams:
                        stream.flush()
        finally:
            publisher.is_px = False
            if os.getpid() != process:  # a fork that has come to the end of what it was to run
                os._exit(0)

    async def do_execute(self, *args: Any, **kwargs: Any) -> Any:
        with self._px():
            return await super().do_execute(*args, **kwargs)

    def do_apply(self, *args: Any, **kwargs: Any) -> Any:
        with self._px():
            return super().do_apply(*args, **kwargs)


class _Engine(engine_app.IPEngine):
    """ipyparallel's engine without what it does to a process of its own."""

    out_stream_factory = display_hook_factory = None
    _joined: asyncio.Future[None] | None = None
    """With ipyparallel 8, whether it has registered."""

    def init_signal(self) -> None:
        pass  # signals are the rank's own affair

    def init_crash_handler(self) -> None:
        pass  # exceptions of a rank are reported to the session

    def exit(self, exit_status: int = 0) -> None:
        problem = sys.exception()  # which ipyparallel handles by ending the process
        raise problem or RuntimeError(f"ipyparallel's engine wanted to end with {exit_status}")

    def abort(self) -> None:
        """Registration took too long; the rank itself goes on without ipyparallel."""
        problem = TimeoutError(f"the controller did not answer within {self.timeout:g} s")
        if self._joined is None:
            raise problem
        if not self._joined.done():
            self._joined.set_exception(problem)

    def redirect_output(self, iopub_socket: Any) -> None:
        kernel = self.kernel
        assert isinstance(kernel, _Kernel)
        # watchfd: descriptors 1 and 2 are our log files and stay so.
        kernel.px_streams = tuple(
            OutStream(self.session, iopub_socket, name, watchfd=False)
            for name in ("stdout", "stderr")
        )
        for stream, name in zip(kernel.px_streams or (), ("stdout", "stderr"), strict=True):
            stream.topic = f"engine.{self.id}.{name}".encode("ascii")
        hook = sys.displayhook = ZMQDisplayHook(self.session, iopub_socket)
        hook.topic = f"engine.{self.id}.execute_result".encode("ascii")

    async def join(self) -> None:
        """Register, and serve what ipyparallel's clients send."""
        if inspect.iscoroutinefunction(engine_app.IPEngine.register):
            await self.register()
            return
        # ipyparallel 8 goes on in a callback, and redirects output without a method for that.
        self._joined = asyncio.get_running_loop().create_future()
        self._abort_timeout = self.loop.add_timeout(self.loop.time() + self.timeout, self.abort)
        self.register()
        await self._joined
        self.redirect_output(self.kernel.iopub_socket)

    def complete_registration(self, *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(engine_app.IPEngine.complete_registration):
            return super().complete_registration(*arguments)
        assert self._joined is not None
        try:
            self._complete_registration(*arguments)
        except BaseException as error:
            self._joined.set_exception(error)
        else:
            self._joined.set_result(None)
        return None


def _check_room() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) + DESCRIPTORS > limit:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def register(
    info: ControllerInfo,
    rank: int,
    namespace: dict[str, Any],
    report: Callable[[int], None],
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    """Become an engine of ipyparallel's controller; the engine's id is the rank where it is free.

    Args:
        info: Where the controller is, and its keys.
        rank: The id to ask for. The controller silently gives another if that is taken.
        namespace: The user namespace that ``%%px`` is to share.
        report: Called with the id that the controller gave.
        around: Makes what code of the user runs within.
    """
    _check_room()
    engine_app.Kernel = _Kernel
    _Kernel.around = staticmethod(around)
    config = Config()
    config.ProfileDir.location = info.profile_dir
    config.IPEngine.enable_nanny = False
    config.IPEngine.max_heartbeat_misses = 0  # a controller's end must not end the rank
    config.IPEngine.timeout = 30.0
    engine = _Engine(config=config, user_ns=namespace, id=rank, log=_ipyparallel_log)
    engine.connection_info_env = json.dumps(info.connection)
    own_path, own_cwd = list(sys.path), os.getcwd()
    try:
        with no_signing_warning(), silent_debugger():
            engine.initialize(argv=[])
            await engine.join()
    finally:
        sys.path[:] = own_path
        os.chdir(own_cwd)
    report(engine.id)
