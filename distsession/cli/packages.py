"""Whether the packages that are installed are those that distsession needs."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import distsession
from distsession.cli.finding import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["install_command", "packages"]


@dataclass(frozen=True)
class Trouble:
    """Versions of packages with which something is known to fail.

    Attributes:
        versions: For each of the packages, the versions with which it does.
        what: What fails.
        mend: The requirement that has to be installed instead.
    """

    versions: Mapping[str, str]
    what: str
    mend: str
    fatal: bool


TROUBLES = (
    Trouble({"torch": "<2.8"}, "no session starts with it", "torch>=2.8", fatal=True),
    Trouble(
        {"torch": ">=2.8,<2.9"},
        "FSDP2 (fully_shard) on the CPU, with gloo, does not average gradients in torch itself",
        "torch>=2.9",
        fatal=False,
    ),
    Trouble(
        {"ipyparallel": ">=9.0,<9.0.2", "ipykernel": ">=7"},
        "a cell with %%px never ends",
        "ipyparallel>=9.1",
        fatal=True,
    ),
)


def packages() -> Iterator[Finding]:
    """Compare what is installed with what distsession asks for, and with what is known to fail."""
    old = sys.version_info < (3, 11)
    python = f"{platform.python_version()} ({sys.executable})"
    yield Finding("python", python, "use Python 3.11 or newer" * old, fatal=old)
    if sys.platform != "linux":
        yield Finding(
            "system", platform.system(), "ranks are forked, which is tested on Linux only"
        )
    yield _ourselves()
    try:
        import packaging.requirements  # noqa: F401
    except ImportError:
        mend = f"{install_command('packaging')}, and ask again: without it the others are not known"
        yield Finding("packaging", "not installed", mend, fatal=True)
        return
    ours = _requirements("distsession")
    compared = {_text(requirement): _compare(requirement) for requirement in ours}
    yield from compared.values()
    wrong = [text for text, finding in compared.items() if finding.fatal]
    if len(wrong) > 1:
        yield Finding(
            "these together", f"{len(wrong)} packages", install_command(*wrong), fatal=True
        )
    if _installed("numpy") is None:
        yield Finding(
            "numpy",
            "not installed: torch does without it, but says so at its import, and neither "
            "x.numpy() nor most libraries work",
            install_command("numpy"),
        )
    yield from _troubles()
    yield from _indirect({requirement.name for requirement in ours})


def install_command(*requirements: str) -> str:
    """What installs them for this very Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _ourselves() -> Finding:
    here = distsession.__version__
    installed = _installed("distsession")
    if installed is None:
        mend = f"what it needs is not known then: {install_command('distsession')}"
        return Finding("distsession", f"{here}, which is not installed", mend)
    if installed != here:
        return Finding(
            "distsession",
            f"{here}, but {installed} is installed",
            "what is imported is not what pip knows: install it again, and look for a second copy "
            f"(this one is {distsession.__file__})",
        )
    return Finding("distsession", here)


def _requirements(package: str) -> list[Requirement]:
    """What a package asks for, here and without extras; nothing if it is not installed."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    all_ = [Requirement(text) for text in texts]
    return [each for each in all_ if each.marker is None or each.marker.evaluate({"extra": ""})]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compare(requirement: Requirement) -> Finding:
    if problem := _problem(requirement, "distsession"):
        mend = install_command(_text(requirement))
        return Finding(requirement.name, problem, mend, fatal=True)
    return Finding(requirement.name, str(_installed(requirement.name)))


def _text(requirement: Requirement) -> str:
    """As pip takes it, without its conditions."""
    return f"{requirement.name}{requirement.specifier}"


def _problem(requirement: Requirement, whose: str) -> str:
    """What is wrong with what is installed; empty if it is as it is asked for."""
    version = _installed(requirement.name)
    if version is None:
        return f"not installed, but {whose} needs it"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{version}, but {whose} needs {requirement.specifier}"


def _indirect(packages: Collection[str]) -> Iterator[Finding]:
    """What the packages that distsession needs ask for themselves, and do not get.

    It may be that nothing of it is used, so it is no failure yet.
    """
    from packaging.utils import canonicalize_name

    seen, left = {"distsession", *map(canonicalize_name, packages)}, list(packages)
    while left:
        package = left.pop()
        asked = _requirements(package)
        wrong = {each: text for each in asked if (text := _problem(each, package))}
        if wrong:
            told = "; ".join(f"{each.name}: {text}" for each, text in wrong.items())
            yield Finding(f"for {package}", told, install_command(*map(_text, wrong)))
        for name in {canonicalize_name(each.name) for each in asked} - seen:
            seen.add(name)
            left.append(name)


def _troubles() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    for trouble in TROUBLES:
        versions = {name: _installed(name) for name in trouble.versions}
        if all(
            version is not None and SpecifierSet(bad).contains(version, prereleases=True)
            for version, bad in zip(versions.values(), trouble.versions.values(), strict=True)
        ):
            those = " with ".join(f"{name} {version}" for name, version in versions.items())
            yield Finding(
                "known to fail" if trouble.fatal else "known to be wrong",
                f"{those}: {trouble.what}",
                install_command(trouble.mend),
                trouble.fatal,
            )
