"""Let a CUDA build of torch be imported on a machine that has no CUDA.

torch's newest and oldest releases come from the package index as CUDA builds only. Their libraries
name those of CUDA, which are gigabytes. This compiles, for each that is missing, an empty library
with the same name, the same versions of symbols, and functions that do nothing: the loader is
content, ``torch.cuda.is_available()`` is False, and all that runs on the CPU is the real release.

Use: ``python cuda_stand_ins.py SITE_PACKAGES/torch``. Needs ``gcc``, ``nm`` and ``readelf``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
SPECIAL = {
    "cudaGetDeviceCount": f"int cudaGetDeviceCount(int *n) {{ *n = 0; return {NO_DEVICE}; }}",
    "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
    "cudaPeekAtLastError": "int cudaPeekAtLastError(void) { return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "no CUDA"; }',
}
"""The few functions that are called where there is no GPU, or whose answer is shown."""

LDCONFIG = shutil.which("ldconfig", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "ldconfig"
"""It is not on the ``PATH`` of every user."""

OF_THE_INTERPRETER = re.compile(r"_?Py|_ITM_|__gmon_start__|__cxa_finalize|__tls_get_addr")


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> list[str]:
    """The libraries that this one names."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", library))


def symbols(library: Path, which: str) -> Iterator[tuple[str, str]]:
    """Names of dynamic symbols (``--undefined-only`` or ``--defined-only``), and their versions."""
    for line in output("nm", "-D", "-P", "--with-symbol-versions", which, library).splitlines():
        name, _, version = line.split()[0].partition("@")
        yield name, version.lstrip("@")


def versions(library: Path) -> Iterator[tuple[str, str]]:
    """For each version of symbols that it needs, the library which that is of."""
    file = ""
    for line in output("readelf", "-VW", library).splitlines():
        if match := re.search(r"Version: \d+\s+File: (\S+)", line):
            file = match[1]
        elif file and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            yield match[1], file


def is_on_this_machine(name: str) -> bool:
    return name.startswith("ld-linux") or f"\t{name} " in output(LDCONFIG, "-p")


def of_this_machine(names: set[str]) -> Iterator[Path]:
    """Where the system's own libraries of these names lie."""
    for line in output(LDCONFIG, "-p").splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.split(" ")[0] in names and "x32" not in name:
            yield Path(path)


def source(names: set[str]) -> str:
    """A function for each name. What looks like one of CUDA's own says that there is no device."""
    lines = []
    for name in sorted(names):
        result = NO_DEVICE if re.match(r"cuda[A-Z]", name) else 0
        lines.append(SPECIAL.get(name, f"long {name}(void) {{ return {result}; }}"))
    return "\n".join([*lines, "int distsession_stand_in;", ""])


def script(by_version: dict[str, set[str]]) -> str:
    """The linker's script that gives symbols their versions."""
    return "\n".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};"
        for version, names in by_version.items()
    )


def build(target: Path, wanted: set[tuple[str, str]]) -> None:
    by_version: defaultdict[str, set[str]] = defaultdict(set)
    for name, version in wanted:
        if version:
            by_version[version].add(name)
    with tempfile.TemporaryDirectory() as scratch:
        code, versioned = Path(scratch, "stand_in.c"), Path(scratch, "versions")
        code.write_text(source({name for name, _ in wanted}))
        versioned.write_text(script(by_version))
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(target), str(code)]
        command += [f"-Wl,-soname,{target.name}"]
        command += [f"-Wl,--version-script={versioned}"] if by_version else []
        subprocess.run(command, check=True)


def main(package: Path) -> None:
    folder = package / "lib"
    ours = sorted({*folder.glob("*.so*"), *package.glob("_C*.so")})
    there = {file.name for file in ours}
    names = {name for file in ours for name in needed(file)} - there
    missing = sorted(name for name in names if not is_on_this_machine(name))
    if not missing:
        return
    system = set(of_this_machine(names - set(missing)))
    defined = {n for file in {*ours, *system} for n, _ in symbols(file, "--defined-only")}
    owner = {version: file for library in ours for version, file in versions(library)}
    wanted: dict[str, set[tuple[str, str]]] = {name: set() for name in missing}
    runtime = next((name for name in missing if name.startswith("libcudart")), missing[0])
    for library in ours:
        for name, version in symbols(library, "--undefined-only"):
            if version:
                if owner.get(version) in wanted:
                    wanted[owner[version]].add((name, version))
            elif name not in defined and not OF_THE_INTERPRETER.match(name):
                wanted[runtime].add((name, ""))  # the loader looks for it everywhere
    for name, its in wanted.items():
        build(folder / name, its)
    print(f"stand-ins for {', '.join(missing)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
