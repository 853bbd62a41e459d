"""Why an agent has not come, and the remedy: from what its launcher's process has written."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from distsession.cluster.host_launchers import Failure
from distsession.host_plan import HostPlan, ssh_target
from distsession.protocol.host_checks import HostProblem
from distsession.protocol.host_link import FAILS, STARTS

__all__ = ["complaints", "explain", "noise"]

LAST_LINES, LINE_MAX = 8, 500


@dataclass(frozen=True)
class _Known:
    """A text that says what is wrong.

    Attributes:
        pattern: Is looked for in the output.
        what: In our words, with the pattern's groups as ``{0}``, or ``{1}``.
        mend: What to do; with ``{python}``, and for ssh ``{host}``, of it ``{destination}`` and
            ``{port}``, and ``{target}``, which is both as ssh takes them.
    """

    pattern: str
    what: str
    mend: str


_SSH = (
    _Known(
        r"Could not resolve hostname \S+?: Temporary failure in name resolution",
        "its name is not found, for no name server has answered",
        "try again; if that does not help, see /etc/resolv.conf here, or give the host an address "
        "in ~/.ssh/config (Host {host}, HostName ...)",
    ),
    _Known(
        r"Could not resolve hostname (\S+?):",
        "no host of this name is known",
        "check the name, or give it an address in ~/.ssh/config (Host {host}, HostName ...)",
    ),
    _Known(
        r"Connection refused",
        "nobody answers ssh there: the connection is refused at port {port}",
        "start sshd there, or name its port: {destination}:PORT",
    ),
    _Known(
        r"Connection timed out|Operation timed out|No route to host|Network is unreachable",
        "ssh does not get there ({0})",
        "look whether the host is up, and whether a firewall drops port {port}",
    ),
    _Known(
        r"Permission denied \(([^)]*)\)",
        "ssh is refused: no key of yours is accepted, and a password cannot be asked for",
        "ssh-copy-id {target}, or name the key in ~/.ssh/config (IdentityFile); one that has a "
        "passphrase has to be in an agent (ssh-add)",
    ),
    _Known(
        r"(?s)Offending \S+ key in (\S+?):\d+.*Host key for (\S+) has changed",
        "its host key is not the one that is known: the host was installed anew, or another one "
        "answers in its place",
        "ask who runs the host. If its key is right, forget the old one with `ssh-keygen -f {0} "
        "-R '{1}'`, run `ssh {target}` once by hand, and compare the key",
    ),
    _Known(
        r"key for \S+ was revoked",
        "its host key is marked as revoked here, as one is that was stolen",
        "ask who runs the host for its new key",
    ),
    _Known(
        r"Host key verification failed",
        "the host's key is not the one that is known for it, or is not known yet",
        "run `ssh {target}` once by hand, and compare the key",
    ),
    _Known(
        r"Bad owner or permissions on|Can't open user config file|Bad configuration option",
        "ssh does not read its configuration",
        "mend the file that is named below",
    ),
)  # fmt: skip

_ANY = (
    _Known(
        r"the keys cannot be read from (\S+): No such file or directory",
        "the folder {0} is not there: it is not shared with this host",
        "name a folder that all hosts share with --folder (default: ~/.distsession)",
    ),
    _Known(
        r"No module named '(distsession[\w.]*)'",
        "distsession is missing there, or another version of it is there ({0} is not)",
        "install the same version as here for the Python that is started there: {python} -m pip "
        "install distsession",
    ),
    _Known(
        r"No module named '(zmq)[\w.]*'",
        "the module {0} is missing there",
        "install it for the Python that is started there: {python} -m pip install pyzmq",
    ),
    _Known(
        r"No module named '(\w+)[\w.]*'",
        "the module {0} is missing there",
        "install it for the Python that is started there: {python} -m pip install {0}",
    ),
    _Known(
        r"(?:No such file or directory|not found|cannot execute|execve\(\))",
        "the Python that is to be started is not there: {python}",
        "install it at the same place as here, or name that host's with --python",
    ),
    _Known(
        r"not enough slots available",
        "MPI has fewer hosts than were asked for",
        "name them: --option 'args=--host gpu1,gpu2 --map-by ppr:1:node'",
    ),
    _Known(
        r"(?i)DUE TO TIME LIMIT",
        "the job's time was over",
        "ask for more: --option time=2:00:00",
    ),
    _Known(
        r"it reaches no address of the kernel's \((.*)\), and the kernel",
        "it reaches no address of this host ({0}), and is not reached from here either",
        "open TCP ports one way, or name another address of this host with --address",
    ),
)  # fmt: skip


def explain(failure: Failure, plan: HostPlan, mend: str = "") -> HostProblem:
    """What has kept an agent from coming.

    Args:
        failure: What has ended, or not come.
        plan: How it was started.
        mend: What to do, if it is known, where nothing that was written says why.
    """
    words = {"host": failure.host, "python": plan.python or sys.executable, "port": "22"}
    if plan.launcher == "ssh" and failure.host:
        target = ssh_target(failure.host)
        words["port"], words["destination"] = str(target.port or 22), target.destination
        words["target"] = target.words
    where = failure.host or _named(failure.output) or plan.launcher
    has_begun = STARTS in failure.output
    known = _ANY if has_begun or plan.launcher != "ssh" else (*_SSH, *_ANY)
    for one in known:
        if found := re.search(one.pattern, failure.output):
            groups = found.groups() or (found[0],)
            return HostProblem(
                where,
                one.what.format(*groups, **words),
                one.mend.format(*groups, **words),
                details=_last(failure.output),
            )
    last = "its last lines are below" if failure.output.strip() else "it has written nothing"
    return HostProblem(
        where,
        failure.how if mend else f"{failure.how}; {last}",
        mend,
        details=_last(failure.output),
    )


def complaints(output: str) -> list[Failure]:
    """What agents have said before they gave up."""
    found = re.findall(rf"{re.escape(FAILS)}(\S+): (.*)", output)
    return [Failure(host, text, f"{FAILS}{host}: {text}") for host, text in found]


def _named(output: str) -> str:
    """The host that says of itself what it lacks."""
    found = re.search(rf"{re.escape(FAILS)}(\S+): ", output)
    return found[1] if found else ""


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip() and line != STARTS]
    return "\n".join(line[-LINE_MAX:] for line in lines[-LAST_LINES:])


def noise(host: str, output: str) -> list[HostProblem]:
    """What a login shell has printed before the agent did."""
    before, begins, _ = output.partition(STARTS)
    lines = [line for line in before.splitlines() if line.strip()]
    if not begins or not lines:
        return []
    return [
        HostProblem(
            host,
            f"its login shell prints {len(lines)} line{'s' * (len(lines) > 1)}: {lines[0]!r}",
            "scp, sftp and rsync fail by that: print only where somebody looks on, in ~/.bashrc "
            "behind `[[ $- == *i* ]] || return`",
            fatal=False,
        )
    ]
