"""Errors arrive as what they were, and no error ends an engine."""

from __future__ import annotations

import os
import signal
import time
import traceback

import pytest

from distsession import EngineDiedError, RemoteError, RunError, Session

from .test_run import by_value


@pytest.fixture(autouse=True)
def _engines_live_on(session: Session):
    pids = [info.pid for info in session.infos]
    yield
    assert list(session.run(os.getpid).values()) == pids


def test_the_users_own_exception_is_kept_for_each_rank(session: Session) -> None:
    def fail(limit):
        rank = int(os.environ["RANK"])
        raise ValueError(f"rank {rank} of {limit}")

    with pytest.raises(RunError) as caught:
        session.run(fail, 7)
    error = caught.value
    assert [type(e) for e in error.by_rank.values()] == [ValueError, ValueError]
    assert [str(e) for e in error.by_rank.values()] == ["rank 0 of 7", "rank 1 of 7"]
    assert error.first is error.by_rank[0]
    assert "on rank 1" in error.by_rank[1].__notes__[0]
    assert len(error.as_group().exceptions) == 2


def test_results_of_the_other_ranks_are_kept(session: Session) -> None:
    session.execute("x = rank")
    with pytest.raises(RunError) as caught:
        session.run(
            by_value("def f():\n    if rank == 1: raise KeyError('k')\n    return x\n", "f")
        )
    assert dict(caught.value.results) == {0: 0}
    assert list(caught.value.by_rank) == [1]


def test_one_error_on_all_ranks_is_one_traceback_with_the_cells_lines(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute("a = 1\n\ndef inner():\n    return a / 0\n\ninner()", label="In[5]")
    text = "\n".join(caught.value._render_traceback_())
    assert str(caught.value).startswith("ZeroDivisionError on ranks 0-1 at In[5] line 6")
    assert text.startswith("ZeroDivisionError on ranks 0-1")
    assert text.count("Cell In[5], line 6") == 1
    assert "Cell In[5], line 4, in inner" in text
    assert "return a / 0" in text
    assert "distsession" not in text  # our own frames explain nothing


def test_a_scripts_traceback_ends_with_the_ranks_and_a_recursion_is_folded(
    session: Session,
) -> None:
    source = "def f(n):\n    return f(n - 1) if n else 1 / 0\n"
    with pytest.raises(RunError) as caught:
        session.execute(f"{source}f(30)", label="In[5]")
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert "  [Previous frame repeated 30 more times]" in lines
    assert lines.count("Cell In[5], line 2, in f") == 1
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_different_errors_get_a_block_each(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute("raise (ValueError if rank else KeyError)('different')")
    text = "\n".join(caught.value._render_traceback_())
    assert text.index("KeyError on rank 0") < text.index("ValueError on rank 1")
    assert "(and on rank 1)" in str(caught.value)


def test_a_cause_is_shown_before_its_effect(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(
            "try:\n    {}['gone']\nexcept KeyError as e:\n    raise RuntimeError('later') from e"
        )
    text = "\n".join(caught.value._render_traceback_())
    assert text.index("KeyError: 'gone'") < text.index("direct cause")
    assert text.index("direct cause") < text.index("RuntimeError: later")


ODD = "class Odd(Exception):\n"


@pytest.mark.parametrize(
    ("code", "ename"),
    [
        ("raise SystemExit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd"),
        ("class Bad(Exception):\n    def __str__(self): raise TypeError\nraise Bad", "Bad"),
        ("class Lone(Exception): pass\nraise Lone(lambda: 0, open('/dev/null'))", "Lone"),
        ("class Two(Exception):\n    def __init__(s, a, b): super().__init__(a)\nraise Two(1, 2)",
         "Two"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("raise ExceptionGroup('many', [ValueError('inner one')])", "ExceptionGroup"),
        (f"{ODD}    def __str__(self): raise KeyboardInterrupt\nraise Odd", "Odd"),
        (f"{ODD}    def __str__(self): raise SystemExit\nraise Odd", "Odd"),
        (f"{ODD}    def __repr__(self): raise SystemExit\nraise ValueError(1, Odd())",
         "ValueError"),
        (f"{ODD}    def __getattr__(self, name): raise ValueError\nraise Odd", "Odd"),
        (f"{ODD}    def __setattr__(self, *args): raise SystemExit\nraise Odd", "Odd"),
        (f"{ODD}    def __reduce__(self): raise SystemExit\nraise Odd", "Odd"),
        (f"{ODD}    __cause__ = property(lambda self: exit())\nraise Odd", "Odd"),
        (f"{ODD}    __notes__ = 5\nraise Odd", "Odd"),
        ("e = ValueError('x'); e.__notes__ = 5\nraise e", "ValueError"),
        ("e = ValueError('x')\nfor _ in range(3000): e = ExceptionGroup('g', [e])\nraise e",
         "ExceptionGroup"),
        ("e = ValueError('x')\nfor _ in range(30): e = ExceptionGroup('g', [e] * 9)\nraise e",
         "ExceptionGroup"),
    ],
)  # fmt: skip
def test_every_kind_of_exception_arrives_and_the_engine_lives(
    session: Session, code: str, ename: str
) -> None:
    with pytest.raises(RunError, match=ename) as caught:
        session.execute(code)
    assert ename in "\n".join(caught.value._render_traceback_())


@pytest.mark.parametrize("method", ["__str__", "__reduce__"])
def test_an_exception_that_sleeps_when_it_is_shown_is_shown_without(
    session: Session, method: str
) -> None:
    code = f"{ODD}    def {method}(self): time.sleep(3600)\nimport time\nkept = 7\nraise Odd(1)"
    began = time.monotonic()
    with pytest.raises(RunError, match="Odd on ranks 0-1 at In") as caught:
        session.execute(code, label="In[3]")
    assert time.monotonic() - began < 30
    told = "\n".join(caught.value._render_traceback_())
    assert "raise Odd(1)" in told
    assert method != "__str__" or "Odd.__str__ takes longer than 3 s" in told
    assert session.pull("kept")[1] == 7


def test_a_class_that_is_not_known_here_becomes_a_remote_error(session: Session) -> None:
    code = (
        "import sys, types\n"
        "module = types.ModuleType('rank_only_errors')\n"
        "exec('class Special(Exception): pass', module.__dict__)\n"
        "sys.modules['rank_only_errors'] = module\n"
        "raise module.Special('of the rank')"
    )
    with pytest.raises(RunError) as caught:
        session.execute(code)
    error = caught.value.first
    assert isinstance(error, RemoteError)
    assert (error.ename, error.evalue) == ("Special", "of the rank")
    assert "raise module.Special" in error.traceback


def test_an_error_of_a_notebooks_function_shows_its_source(session: Session, tmp_path) -> None:
    # the ranks have no source of a function that was defined in the kernel; the kernel has
    import linecache

    source = "def broken(x):\n    y = x + 1\n    return y / 0\n"
    name = "/tmp/ipykernel_1/1.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    with pytest.raises(RunError) as caught:
        session.run(namespace["broken"], 1)
    text = "\n".join(caught.value._render_traceback_())
    assert "line 3, in broken" in text
    assert "return y / 0" in text


class TestDeath:
    """A rank's process that ends."""

    @pytest.fixture(autouse=True)
    def _engines_live_on(self):  # other sessions than the shared one die here
        return

    @pytest.mark.parametrize(
        ("end", "how"),
        [
            (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
            (lambda: os._exit(7), "ended with exit code 7"),
            (lambda: __import__("ctypes").string_at(0), "killed by SIGSEGV"),
        ],
    )
    def test_a_death_ends_the_run_and_says_how(self, start, end, how: str) -> None:
        session = start(2)

        def last_words():
            if os.environ["RANK"] == "1":
                print("my last words", flush=True)
                end()
            return "alive"

        began = time.monotonic()
        with pytest.raises(RunError) as caught:
            session.run(last_words)
        assert time.monotonic() - began < 5
        death = caught.value.by_rank[1]
        assert isinstance(death, EngineDiedError)
        assert how in str(death)
        assert "my last words" in death.log_tail
        assert dict(caught.value.results) == {0: "alive"}

        with pytest.raises(EngineDiedError, match="rank 1"):
            session.run(len, ())
        assert session[0].run(os.getpid)[0] == session.infos[0].pid
        assert "rank 1 is dead" in session.status()

        session[0].execute("kept = 5")
        session.restart([1])
        session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
        assert list(session.evaluate("t.item()").values()) == [2.0, 2.0]
        assert session[0].evaluate("kept")[0] == 5
