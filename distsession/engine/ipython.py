"""The IPython shell of a rank.

What leans on ipykernel's inside is here, and in ``px_engine.py``. ``tests/integration/
test_ipyparallel.py`` fails when a release changes it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import os
import pdb
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import comm
import ipykernel.comm
from ipykernel.compiler import XCachingCompiler
from ipykernel.kernelbase import Kernel
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from IPython.core import completerlib, oinspect  # noqa: F401  else each shell does so, on each rank
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionInfo
from traitlets import Any as AnyTrait
from traitlets.config import Config

from distsession.engine import cell_source
from distsession.engine.capture import Capture
from distsession.engine.comms import Comms
from distsession.protocol.messages import ClearOutput, Display
from distsession.protocol.places import has_ipython_folder

__all__ = [
    "EngineShell",
    "ShellFront",
    "make_shell",
    "new_namespace",
    "prepare_shell",
    "silent_debugger",
]

log = logging.getLogger(__name__)


class _Publisher(ZMQDisplayPublisher):
    """Displays of our requests go with their output; those of ``%%px`` go ipyparallel's way."""

    capture: Capture | None = None
    rank = 0
    is_px = False
    """Whether a request of ipyparallel's runs."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        if self.is_px or self.capture is None:
            if self.pub_socket is not None:
                super().publish(data, metadata, transient=transient, update=update, **kwargs)
            return
        display_id = str((transient or {}).get("display_id", ""))
        self.capture.show(
            Display(self.rank, self.capture.running, data, metadata or {}, display_id, update)
        )

    def clear_output(self, wait: bool = False) -> None:
        if not self.is_px and self.capture is not None:
            self.capture.show(ClearOutput(self.rank, self.capture.running, wait))
        elif self.pub_socket is not None:
            super().clear_output(wait)


def _is_px() -> bool:
    return bool(EngineShell.initialized() and EngineShell.instance().display_pub.is_px)


class EngineShell(ZMQInteractiveShell):
    """The shell of a rank. It exists before ipyparallel's kernel does, which then adopts it."""

    def ask_exit(self) -> None:
        raise UsageError(
            "exit and quit would end the rank's process: use session.restart() or session.close()."
        )

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **keys: Any) -> None:
        """``%tb`` shows the error of the run before it, in the frames of the user's code alone."""
        if exc_tuple is None and sys.exception() is None:
            if not hasattr(sys, "last_traceback"):
                pdb.pm()  # says why there is none
                return
            keys.setdefault("tb_offset", 0)
        super().showtraceback(exc_tuple, *args, **keys)

    def debugger(self, force: bool = False) -> None:
        """``%debug`` opens the debugger of the rank."""
        if force or self.call_pdb:
            pdb.pm()

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        """What a widget's callback has raised; outside of ``%%px`` nobody waits for a message."""
        if self.display_pub.is_px:
            super()._showtraceback(etype, evalue, stb)
        else:
            sys.stderr.write(self.InteractiveTB.stb2text(stb) + "\n")

    def enable_gui(self, gui: Any = None) -> None:
        if gui not in (None, "inline"):
            raise UsageError(f"there is no {gui} window on a rank: use %matplotlib inline.")


class ShellFront:
    """Cells with magics and rich display."""

    def __init__(self, shell: EngineShell):
        self._shell = shell

    def transform(self, source: str) -> str:
        return str(self._shell.transform_cell(source))

    def before(self, source: str) -> None:
        cell_source.show_to_line_profiler(source)
        info = ExecutionInfo(source, False, True, True, None)
        self._shell.events.trigger("pre_execute")
        self._shell.events.trigger("pre_run_cell", info)

    def after(self) -> None:
        self._shell.events.trigger("post_execute")

    def render(self, value: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        data, metadata = self._shell.display_formatter.format(value)
        return (data, metadata) if data else None


# --- the shell ------------------------------------------------------------------------------------

IPYTHON_FOLDER = "ipython"
"""Where shells have their folders within that of the session if the user has no place for them."""
SHELL_ENVIRONMENT = ("HOME", "IPYTHONDIR", "XDG_CONFIG_HOME")
"""What decides where a shell has its folders, which it looks up when it is made."""


@dataclass(frozen=True)
class _Prepared:
    """A shell that an agent has made for the ranks it forks.

    Attributes:
        environ: What ``SHELL_ENVIRONMENT`` was then.
        builtins: The names that the shell adds to Python's own.
    """

    shell: EngineShell
    environ: tuple[str | None, ...]
    builtins: dict[str, Any]


_prepared: _Prepared | None = None


def prepare_shell(folder: str) -> None:
    """Make the shell that ranks forked from this process will have.

    To make one takes a rank longer than to connect to all others. This process stays as it was:
    what it imports later finds no shell.

    Args:
        folder: Of the session.
    """
    global _prepared
    path, environ, names = list(sys.path), dict(os.environ), dict(vars(builtins))
    main = sys.modules["__main__"]
    try:
        shell = _new_shell({}, folder)
        added = {name: value for name, value in vars(builtins).items() if name not in names}
        _prepared = _Prepared(shell, _shell_environment(), added)
        comm.get_comm_manager()  # ipykernel's is made when it is first asked for
    except Exception:
        log.exception("no shell could be made before the ranks: each makes its own")
    finally:
        EngineShell.clear_instance()
        sys.modules["__main__"] = main
        sys.path[:] = path
        for name in vars(builtins).keys() - names.keys():
            delattr(builtins, name)
        if os.environ != environ:
            os.environ.clear()
            os.environ.update(environ)


def new_namespace() -> dict[str, Any]:
    """An empty dictionary, or what is that of the shell which :func:`make_shell` will give."""
    prepared = _usable()
    return {} if prepared is None else prepared.shell.user_ns


def make_shell(
    namespace: dict[str, Any], capture: Capture, rank: int, comms: Comms, folder: str
) -> ShellFront:
    """Make the shell whose ``user_ns`` is the rank's namespace.

    Args:
        namespace: From :func:`new_namespace`.
        capture: Gets what is displayed.
        rank: Which.
        comms: Of its widgets.
        folder: Of the session.
    """
    prepared = _usable()
    if prepared is not None and prepared.shell.user_ns is namespace:
        shell = prepared.shell
        _settle(prepared)
    else:
        shell = _new_shell(namespace, folder)
    sys.argv = [""]  # argparse would take the agent's own arguments for the user's
    cell_source.keep_in_linecache()
    publisher = shell.display_pub
    assert isinstance(publisher, _Publisher)
    publisher.capture = capture
    publisher.rank = rank
    _refuse_magics_of_notebook(shell)
    comms.install(_is_px)
    _install_old_comms(shell, comms)
    return ShellFront(shell)


def _refuse_magics_of_notebook(shell: EngineShell) -> None:
    """Let ranks say where ``%session`` and ``%distributed`` belong."""
    for name in ("session", "distributed"):

        def refuse(line: str, cell: str | None = None, name: str = name) -> None:
            percent = "%" if cell is None else "%%"
            raise UsageError(
                f"{percent}{name} is for the notebook, and this code runs on the ranks: put it "
                "into a cell of its own, without %%distributed."
            )

        for kind in ("line", "cell"):
            if name not in shell.magics_manager.magics[kind]:
                shell.register_magic_function(refuse, kind, name)


def _new_shell(namespace: dict[str, Any], folder: str) -> EngineShell:
    config = Config()
    own = None
    if not has_ipython_folder():
        own = os.path.join(folder, IPYTHON_FOLDER)
        os.makedirs(own, mode=0o700, exist_ok=True)
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.display_page = True  # obj? is shown like other output
    # IPython puts its own names (In, Out, exit, ...) into the dictionary it is given.
    shell: EngineShell = EngineShell.instance(
        user_ns=namespace,
        compiler_class=XCachingCompiler,
        config=config,
        ipython_dir=own,
        display_pub_class=_Publisher,
    )
    # Libraries take sys.ps1 for a person who sits at a prompt: Lightning then refuses "ddp".
    for prompt in ("ps1", "ps2", "ps3"):
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    atexit.unregister(shell.atexit_operations)  # a full garbage collection, for a history we lack
    return shell


def _shell_environment() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in SHELL_ENVIRONMENT)


def _usable() -> _Prepared | None:
    """The shell made before the fork, unless one that is made now would have other folders."""
    if _prepared is None or _prepared.environ != _shell_environment():
        return None
    return _prepared


def _settle(prepared: _Prepared) -> None:
    """Let a shell know the process that it has come to, as if it had been made there."""
    shell = prepared.shell
    for each in EngineShell._walk_mro():
        each._instance = shell
    vars(builtins).update(prepared.builtins)
    shell.starting_dir = os.getcwd()
    shell.init_environment()
    shell.init_virtualenv()
    shell.save_sys_module_state()
    shell.init_sys_modules()
    shell.init_io()
    shell.history_manager.reset(new_session=False)  # the folder that _dh begins with


class _OldComm(ipykernel.comm.Comm):
    """What takes the place of ipykernel's: it goes our way, unless ``%%px`` makes it."""

    comms: Comms
    ours: SimpleNamespace
    kernel = AnyTrait()

    def __init__(self, *args: Any, **keys: Any):
        self._is_px = _is_px()
        keys.setdefault("kernel", Kernel.instance() if self._is_px else self.ours)
        super().__init__(*args, **keys)

    def publish_msg(self, kind: str, *args: Any, **keys: Any) -> None:
        if self._is_px:
            super().publish_msg(kind, *args, **keys)
        else:
            self.comms.publish(self.comm_id, kind, *args, **keys)

    def _publish_msg(self, kind: str, *args: Any, **keys: Any) -> None:
        if self._is_px:
            super()._publish_msg(kind, *args, **keys)
        else:
            self.comms.publish(self.comm_id, kind, *args, **keys)


def _install_old_comms(shell: EngineShell, comms: Comms) -> None:
    """Have those be ours, too, that ipywidgets 7 makes without the ``comm`` package.

    So does ipywidgets 8 where ipykernel is older than 6.18. Both look for the manager of comms in
    the shell's kernel, which a rank has for ``%%px`` only.
    """
    ours = SimpleNamespace(comm_manager=comm.get_comm_manager(), shell=None)
    shell.kernel = shell.kernel or ours
    _OldComm.comms, _OldComm.ours = comms, ours
    ipykernel.comm.Comm = _OldComm


@contextlib.contextmanager
def silent_debugger() -> Iterator[None]:
    """Let ipykernel's debugger, which nobody uses here, not warn of Python's frozen modules."""
    name = "PYDEVD_DISABLE_FILE_VALIDATION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
