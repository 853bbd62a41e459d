#!/usr/bin/env python3
"""Count how large the package is, and how many mechanisms it has: ``.ci/count.py [--json]``.

What is counted is read from the source; nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "distsession"
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
THREADS = {"Thread", "Timer", "ThreadPoolExecutor"}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print an object, not lines")
    figures = counted()
    if parser.parse_args().json:
        print(json.dumps(figures))
    else:
        for name, figure in figures.items():
            print(f"{name:36} {figure}")


def counted() -> dict[str, int | str]:
    """What is counted, by its name."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    calls = Counter(name for tree in trees.values() for name in called(tree))
    classes = [
        (node.end_lineno - node.lineno + 1, methods(node), f"{node.name} in {module(path)}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno
    ]
    lines, most, largest = max(classes)
    imports = {module(path): set(imported(path, tree)) for path, tree in trees.items()}
    rings = circles({name: found & imports.keys() for name, found in imports.items()})
    ring = max(rings, key=lambda found: len(found)) if rings else ["none"]
    return {
        "lines": sum(len(path.read_text().splitlines()) for path in trees),
        "files": len(trees),
        "places that create threads": sum(calls[name] for name in THREADS),
        "locks": sum(calls[name] for name in LOCKS),
        "largest class": f"{largest}, {lines} lines, {most} methods",
        "arrows between packages": len(arrows(imports)),
        "import circles, for types too": len(rings),
        "the largest of them": ", ".join(ring),
        "private accesses in tests": sum(map(private_accesses, (ROOT / "tests").rglob("*.py"))),
    }


def module(path: Path) -> str:
    """The name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def called(tree: ast.AST) -> Iterator[str]:
    """The names of the functions and methods that the code calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a file imports at its top, also for types alone."""
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.If)]
    for node in (each for body in bodies for each in body.body):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def package(name: str) -> str:
    """The part of the package that a module belongs to: ``distsession.kernel``, or itself."""
    return ".".join(name.split(".")[:2])


def arrows(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Which part imports from which other one."""
    folders = {package(name) for name in imports if name.count(".") > 1}
    pairs = {(package(name), package(to)) for name, found in imports.items() for to in found}
    return {(a, b) for a, b in pairs if a != b and {a, b} <= folders}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for to in sorted(graph[name]):
            if to not in number:
                visit(to)
                low[name] = min(low[name], low[to])
            elif to in stack:
                low[name] = min(low[name], number[to])
        if low[name] == number[name]:
            ring = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def private_accesses(path: Path) -> int:
    """How often a test reaches for a private name of something else."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(ast.parse(path.read_text()))
    )


if __name__ == "__main__":
    main()
