"""Notebook cells as plain Python."""

from __future__ import annotations

import ast

import pytest

from distsession.export.translate import indented, to_python


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("x = 1\nx", "x = 1\nx"),
        ("# %%distributed 0-1 --out a\nx = 1", "x = 1"),
        ("%time f(x)", "f(x)"),
        ("y = %time f(x)", "y = f(x)"),
        ("if x:\n    %time y = f(x)\n    z = 2", "if x:\n    y = f(x)\n    z = 2"),
        ("%%time\nx = 1\nf(x)", "x = 1\nf(x)"),
        ("%%capture\nf()", "f()"),
        ("%env A=1", "os.environ['A'] = '1'"),
        ("%env A b c", "os.environ['A'] = 'b c'"),
        ("%cd '/tmp'", "os.chdir(os.path.expanduser('/tmp'))"),
        ("!ls -l", "subprocess.run('ls -l', shell=True, check=False)"),
        (
            "files = !ls",
            "files = subprocess.run('ls', shell=True, capture_output=True, text=True)"
            ".stdout.splitlines()",
        ),
        ("%load_ext autoreload", "pass  # %load_ext autoreload: for notebooks only"),
        ("x?", "pass  # %pinfo x: for notebooks only"),
        ("ä = 'ü'; y = %time ä + 'ö'", "ä = 'ü'; y = %time ä + 'ö'"),
        ("s = '''\n%time no magic\n!neither\n'''", "s = '''\n%time no magic\n!neither\n'''"),
        (
            "from __future__ import annotations\nx = 1",
            "# from __future__ import annotations\nx = 1",
        ),
    ],
)
def test_what_has_a_meaning_in_a_script_is_translated(cell, code):
    plain = to_python(cell)

    if "ä" in cell:  # IPython knows a magic at the beginning of a line only
        assert plain.problems
        return
    assert plain.code == code
    assert plain.problems == []


def test_imports_are_asked_for():
    assert to_python("!ls").imports == {"import subprocess"}
    assert to_python("%cd /").imports == {"import os"}
    assert to_python("display(3)").imports == {"from IPython.display import display"}
    assert to_python("from __future__ import annotations").imports == {
        "from __future__ import annotations"
    }


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("%pip install x", "%pip install x is not translated"),
        ("%timeit f()", "%timeit f() is not translated"),
        ("%%bash\nls", "%%bash is not translated"),
        ("!echo {x}", "!echo {x} is not translated"),
        ("!echo $HOME", "!echo $HOME is not translated"),
        ("%env A={x}", "%env A={x} is not translated"),
        ("%env", "%env is not translated"),
        ("x = %pwd", "%pwd is not translated"),
        ("await f()", "it awaits outside a function"),
        ("get_ipython().ev('x')", "get_ipython"),
        ("x = (", "it is no plain Python"),
        ("%%time\n%pip install x", "%pip install x is not translated"),
    ],
)
def test_what_has_none_is_refused_by_name(cell, problem):
    assert problem in "; ".join(to_python(cell).problems)


def test_an_await_within_a_function_is_fine():
    assert to_python("async def f():\n    await g()").problems == []


def test_strings_of_several_lines_are_not_indented():
    code = 'x = """a\n  b\n"""\nif x:\n    y = f"""c\n{x}\n"""\n# end'

    assert indented(code) == (
        '    x = """a\n  b\n"""\n    if x:\n        y = f"""c\n{x}\n"""\n    # end'
    )
    ast.parse("if True:\n" + indented(code))
