"""What a freshly forked process has of the finalizers of the one that it comes from."""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import atexit, os, weakref
from distsession.engine.process import (
    KeptBackFinalizers, forget_kept_back_finalizers, pass_over_inherited_finalizers,
)

class Thing:
    pass

def put(text):
    os.write(1, f"{text}\\n".encode())

things = [Thing(), Thing(), Thing()]
weakref.finalize(things[0], put, "of the parent")
quiet = weakref.finalize(things[0], put, "only with its object")
quiet.atexit = False
gone = weakref.finalize(things[0], put, "never")
kept_back = KeptBackFinalizers()
kept_back.keep_back()
gone.detach()
weakref.finalize(things[1], put, "of the parent, made later")
kept_back.keep_back()
"""


def lines_of(program: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, timeout=100, text=True
    )
    assert not run.stderr
    return run.stdout.splitlines()


def test_finalizers_that_are_kept_back_run_when_the_process_that_has_made_them_ends() -> None:
    found = lines_of("kept_back.give_back()")
    assert sorted(found) == ["of the parent", "of the parent, made later"]


def test_a_forked_process_runs_its_own_finalizers_alone() -> None:
    program = """
if os.fork() == 0:
    forget_kept_back_finalizers()
    put(f"looks: {weakref.finalize._registered_with_atexit}")
    weakref.finalize(things[2], put, "its own")
    atexit._run_exitfuncs()
    os._exit(0)
os.wait()
"""
    assert lines_of(program) == ["looks: False", "its own"]


def test_a_forked_process_without_finalizers_of_its_own_looks_at_none_as_it_ends() -> None:
    program = """
if os.fork() == 0:
    weakref.finalize._select_for_exit = classmethod(lambda cls: put("looks") or [])
    forget_kept_back_finalizers()
    atexit._run_exitfuncs()
    os._exit(0)
os.wait()
"""
    assert lines_of(program) == []


def test_its_own_first_finalizer_does_not_have_it_look_at_those_of_its_parent() -> None:
    program = """
if os.fork() == 0:
    forget_kept_back_finalizers()
    weakref.finalize(things[2], put, "only with its object").atexit = False
    pass_over_inherited_finalizers()
    put(f"looks: {weakref.finalize._registered_with_atexit}")
    weakref.finalize(things[2], put, "its own")
    weakref.finalize(things[2], put, "only with its object").atexit = False
    pass_over_inherited_finalizers()
    put(f"looks: {weakref.finalize._registered_with_atexit}")
    atexit._run_exitfuncs()
    os._exit(0)
os.wait()
"""
    assert lines_of(program) == ["looks: False", "looks: True", "its own"]


def test_in_a_forked_process_an_object_that_goes_away_is_finalized_all_the_same() -> None:
    program = """
if os.fork() == 0:
    forget_kept_back_finalizers()
    things.pop(0)
    os._exit(0)
os.wait()
"""
    assert lines_of(program) == ["only with its object", "of the parent"]
