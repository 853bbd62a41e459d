"""A second notebook looks on at a session, in real kernels."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.until import until

from .test_attach_notebook import Kernels, make, plain

__all__ = ["make"]


def test_a_second_notebook_looks_on_and_may_take_it(make: Callable[[str], Kernels]) -> None:
    kernels = make("looked-at")
    pid = kernels.first.run("import os; os.getpid()").result
    second = kernels.start()
    shown = second.run("%session attach looked-at")
    assert shown.error == ""
    assert re.search(
        rf"process {pid} has owned session looked-at since \d\d:\d\d, and this one only looks on "
        r"\(status, panel, diagnose, output\): %session attach looked-at --take,",
        shown.stdout,
    ), shown
    assert "looked-at: idle" in shown.transcript
    assert f"owned by pid {pid} since" in second.run("%session status").transcript
    assert "gloo" in second.run("%session config").transcript
    assert "idle" in second.run("%session diagnose").transcript
    for line in ("%%distributed\n1", "%distributed x", "%session restart", "%session interrupt"):
        told = second.run(line)
        assert told.ename == "SessionStateError"
        assert "%session attach looked-at --take" in told.error
    request = kernels.first.client.execute(kernels.long)
    kernels.wait_for_begun()
    until(lambda: "came 1" in plain(second.run("%session output")), "text")
    text = plain(second.run("%session output"))
    assert "This is the text so far of In[5]" in text
    until(lambda: "running In[5] line" in second.run("%session status").transcript, "its line")
    followed = second.collect(
        second.client.execute("%session output --follow"), stop_at=["In[5] line"]
    )
    assert followed.error == ""
    assert "came 0" in plain(followed)
    assert "In[5] line" in followed.transcript
    kernels.gate.touch()
    assert kernels.first.collect(request).error == ""
    text = plain(second.run("%session output In 5"))
    assert "went 1" in text
    assert "[rank 0] 10\n[rank 1] 20" in text
    assert "x is 1" in plain(second.run("%session output In 3"))

    assert second.run("%session attach looked-at --take").error == ""
    assert second.run("%distributed x").result == "[rank 0] 1\n[rank 1] 2"
    looks_on = kernels.first.run("%session view looked-at")
    assert "%session attach looked-at --take" in looks_on.transcript
    assert "not looked at any more" in kernels.first.run("%session detach").transcript


def test_who_looks_on_sees_the_end(make: Callable[[str], Kernels]) -> None:
    kernels = make("seen-end")
    second = kernels.start()
    kernels.kernels.remove(second)
    try:
        second.run("%session view seen-end")
        assert "seen-end: idle" in second.run("%session status").transcript
        kernels.first.run("%session close")
        assert "session seen-end has ended" in second.run("%session status").transcript
        assert "session seen-end has ended" in second.run("%%distributed\n1").error
        assert "has ended" in second.run("%session diagnose").error
        assert second.run("%session close").error == ""
        assert "no session is open" in second.run("%distributed 1").error
    finally:
        second.close()
        kernels.first.run("%session start 2 --keep 60s --name seen-end")
