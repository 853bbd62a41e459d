"""From the cells of a notebook to plain Python.

IPython's own parser finds magics and ``!``; each is replaced by Python that does the same, or is a
problem that names it. Nothing is dropped in silence.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Plain", "indented", "to_python"]

FOR_NOTEBOOKS = ("autoreload", "config", "load_ext", "pdb", "pinfo", "pinfo2", "reload_ext")
"""Magics that mean something in a notebook only."""
BODY_ONLY = ("time", "capture")
"""Cell magics whose body can stand alone."""


@dataclass
class Plain:
    """A cell as plain Python.

    Attributes:
        code: The source.
        imports: Statements that it needs at the top.
        problems: What cannot be translated.
    """

    code: str
    imports: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def to_python(source: str) -> Plain:
    """Translate one cell."""
    from IPython.core.inputtransformer2 import TransformerManager

    first, _, rest = source.partition("\n")
    if first.startswith("# %%distributed"):  # the magic that ran it
        source = rest
    plain = Plain(TransformerManager().transform_cell(source).strip("\n"))
    tree = _parse(plain)
    if tree is None:
        return plain
    body = _cell_magic(tree, plain)
    if body is not None:
        inner = to_python(body)
        inner.problems = plain.problems + inner.problems
        return inner
    if any(True for _ in _awaits(tree)):
        plain.problems.append(
            "it awaits outside a function: await within one, and call it with asyncio.run(...)"
        )
    _replace_calls(tree, plain)
    tree = _parse(plain)
    if tree is not None:
        _look_for_names(tree, plain)
        _hoist_future(tree, plain)
    return plain


def _parse(plain: Plain) -> ast.Module | None:
    try:
        return ast.parse(plain.code)
    except SyntaxError as error:
        plain.problems.append(f"it is no plain Python: {error.msg} (line {error.lineno})")
        return None


def _awaits(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield child
        yield from _awaits(child)


# --- magics ---------------------------------------------------------------------------------------


def _shell_call(node: ast.AST) -> tuple[str, list[str]] | None:
    """The method of ``get_ipython()`` that is called with texts, and these."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Name(id="get_ipython"), args=[]), attr=method
            ),
            args=args,
        ) if all(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in args):
            return method, [str(a.value) for a in args if isinstance(a, ast.Constant)]
    return None


def _cell_magic(tree: ast.Module, plain: Plain) -> str | None:
    """The body of a cell that begins with a magic; None where it does not."""
    match tree.body:
        case [ast.Expr(value=value)]:
            found = _shell_call(value)
        case _:
            return None
    if found is None or found[0] != "run_cell_magic":
        return None
    name, line, body = found[1]
    if name not in BODY_ONLY or line.strip():
        plain.problems.append(f"%%{name} {line}".rstrip() + " is not translated")
    return body


def _replace_calls(tree: ast.Module, plain: Plain) -> None:
    """Put Python in the place of each call that IPython's parser made of a magic."""
    statements = {id(n.value): n for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    lines = plain.code.encode().split(b"\n")
    calls = [(node, found) for node in ast.walk(tree) if (found := _shell_call(node)) is not None]
    for node, (method, texts) in sorted(calls, key=lambda c: (-c[0].lineno, -c[0].col_offset)):  # type: ignore[attr-defined]
        assert isinstance(node, ast.Call)
        assert node.end_col_offset is not None
        new = _python_for(method, texts, plain, is_statement=id(node) in statements)
        line = lines[node.lineno - 1]
        head, tail = line[: node.col_offset], line[node.end_col_offset :]
        indent = head.decode() if not head.strip() else ""
        new = textwrap.indent(new, indent)[len(indent) :] if "\n" in new else new
        lines[node.lineno - 1] = head + new.encode() + tail
    plain.code = b"\n".join(lines).decode()


def _python_for(method: str, texts: list[str], plain: Plain, *, is_statement: bool) -> str:
    """What does the same as a magic. Where there is nothing, a problem is noted."""
    if method in ("system", "getoutput"):
        return _command(texts[0], plain, keep=method == "getoutput")
    if method != "run_line_magic" or len(texts) != 2:
        plain.problems.append(f"get_ipython().{method}(...) is not translated")
        return "None"
    name, line = texts[0], texts[1].strip()
    shown = f"%{name} {line}".rstrip()
    if name == "time" and line:
        return line
    if name in FOR_NOTEBOOKS and is_statement:
        return f"pass  # {shown}: for notebooks only"
    translate = _LINE_MAGICS.get(name)
    if translate is None or not is_statement or "{" in line or "$" in line:
        plain.problems.append(f"{shown} is not translated")
        return "None"
    new = translate(line, plain)
    if not new:
        plain.problems.append(f"{shown} is not translated")
    return new or "None"


def _command(command: str, plain: Plain, *, keep: bool) -> str:
    if "{" in command or "$" in command:
        plain.problems.append(
            f"!{command} is not translated: IPython may put a variable's value into it. "
            "Use subprocess.run(...)"
        )
        return "None"
    plain.imports.add("import subprocess")
    if keep:
        return (
            f"subprocess.run({command!r}, shell=True, capture_output=True, text=True)"
            ".stdout.splitlines()"
        )
    return f"subprocess.run({command!r}, shell=True, check=False)"


def _env(line: str, plain: Plain) -> str:
    name, sign, value = line.partition("=") if "=" in line else line.partition(" ")
    if not sign:
        return ""
    plain.imports.add("import os")
    return f"os.environ[{name.strip()!r}] = {value.strip()!r}"


def _cd(line: str, plain: Plain) -> str:
    if not line or line.startswith("-"):
        return ""
    plain.imports.add("import os")
    return f"os.chdir(os.path.expanduser({line.strip(chr(34) + chr(39))!r}))"


def _matplotlib(line: str, plain: Plain) -> str:
    plain.imports.add("import matplotlib")
    return f"matplotlib.use('Agg')  # %matplotlib {line}".rstrip()


_LINE_MAGICS: dict[str, Callable[[str, Plain], str]] = {
    "cd": _cd,
    "env": _env,
    "matplotlib": _matplotlib,
    "set_env": _env,
}


# --- plain code -----------------------------------------------------------------------------------


def _look_for_names(tree: ast.Module, plain: Plain) -> None:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "get_ipython" in names:
        plain.problems.append("get_ipython() is there in a notebook only")
    if "display" in names:
        plain.imports.add("from IPython.display import display")


def _hoist_future(tree: ast.Module, plain: Plain) -> None:
    """``from __future__`` has to be at the very top of a script."""
    lines = plain.code.split("\n")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            plain.imports.add(ast.unparse(node))
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = f"# {lines[number - 1]}"
    plain.code = "\n".join(lines)


def indented(code: str, indent: str = "    ") -> str:
    """Indent code, but not what is within its multi-line strings."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
        if (is_text or isinstance(node, ast.JoinedStr)) and isinstance(node, ast.expr):
            inside.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    lines = code.split("\n")
    return "\n".join(
        line if number in inside or not line.strip() else indent + line
        for number, line in enumerate(lines, 1)
    )
