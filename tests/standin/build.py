"""Compile the stand-in, once for all processes and again when its sources change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
UNITS = ("device.cpp", "group.cpp")
FLAGS = (
    "-O1",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    "-DTORCH_EXTENSION_NAME=_standin",
)
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
OLDEST_TORCH = (2, 13)
"""What the sources are written against; c10d's and the devices' interfaces change."""


class CannotBuildError(Exception):
    """Why there is no stand-in here, in a sentence."""


def why_not() -> str | None:
    """What is missing for the stand-in, or None."""
    if reason := too_old():
        return reason
    if not library().exists():
        if shutil.which("g++") is None:
            return "the stand-in needs g++"
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return "the stand-in needs the headers of Python"
    return None


def too_old() -> str | None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        return f"the stand-in needs torch 2.13 or newer, this is {torch.__version__}"
    return None


def library() -> Path:
    """Where what is built from the sources as they are now lies."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(file.read_bytes())
    return folder() / f"_standin-{digest.hexdigest()[:12]}.so"


def folder() -> Path:
    """The cache in the checkout, which git ignores."""
    checkout = SOURCES.parent.parent
    return checkout / "build" / f"standin-{torch.__version__}-{sys.implementation.cache_tag}"


def build() -> Path:
    """Compile the stand-in unless it is there.

    Returns:
        The library.

    Raises:
        CannotBuildError: A compiler, headers or a new enough torch are missing, or it fails.
    """
    target = library()
    if target.exists():
        return target
    if reason := why_not():
        raise CannotBuildError(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The kernel lets go of the lock when its owner ends, however it ends.
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            compile_to(target)
            for old in target.parent.glob("_standin-*.so"):
                if old != target:
                    old.unlink()
    return target


def compile_to(target: Path) -> None:
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include"]
    include.append(Path(sysconfig.get_paths()["include"]))
    flags = [*FLAGS, *(f"-isystem{path}" for path in include)]
    scratch = target.with_suffix(f".{os.getpid()}")
    scratch.mkdir()
    try:
        objects = [scratch / f"{unit}.o" for unit in UNITS]
        finish(
            subprocess.Popen(
                ["g++", *flags, "-c", str(SOURCES / unit), "-o", str(to)],
                stderr=subprocess.PIPE,
                text=True,
            )
            for unit, to in zip(UNITS, objects, strict=True)
        )
        link = ["g++", "-shared", *map(str, objects), "-o", str(scratch / "linked.so")]
        link += [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        link += [f"-l{name}" for name in LIBRARIES]
        finish([subprocess.Popen(link, stderr=subprocess.PIPE, text=True)])
        os.replace(scratch / "linked.so", target)
    finally:
        shutil.rmtree(scratch)


def finish(processes: Iterable[subprocess.Popen[str]]) -> None:
    errors = [(process.communicate()[1], process.returncode) for process in list(processes)]
    for error, code in errors:
        if code:
            raise CannotBuildError(f"the stand-in cannot be compiled:\n{error[-4000:]}")
