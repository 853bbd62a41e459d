"""What the ranks put out arrives whole, in order, and marked with its rank."""

from __future__ import annotations

import time

import psutil
import pytest

from distsession import OptionsError, RunInterrupt, Session
from distsession.kernel.output import Output
from distsession.protocol.messages import ClearOutput, Display, Text
from tests.until import Press

from .conftest import Recorder


def test_prints_arrive_with_their_rank_and_stream(session: Session, output: Recorder) -> None:
    session.execute("import sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)")
    assert output.text(0) == "out 0\n"
    assert output.text(1) == "out 1\n"
    assert output.text(1, "stderr") == "err 1\n"


def test_output_is_complete_when_the_call_returns(session: Session, output: Recorder) -> None:
    for number in range(50):
        output.clear()
        session.execute(f"print('x' * {number * 1000})")
        assert output.text(1) == "x" * number * 1000 + "\n"


def test_output_streams_while_the_cell_runs(session: Session, output: Recorder) -> None:
    future = session.submit(lambda: (print("early", flush=True), time.sleep(1.5)))
    deadline = time.monotonic() + 1.2
    while not output.text(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert output.text(0) == "early\n"
    assert not future.done()
    future.result(10)


def test_what_a_subprocess_wrote_stands_above_what_comes_after_its_end(
    session: Session, output: Recorder
) -> None:
    session[0].execute(
        "import subprocess\n"
        "for n in range(20):\n"
        "    subprocess.run(f'echo err {n} >&2', shell=True)\n"
        "    print('out', n)\n"
    )
    told = "".join(m.text for m in output.messages if isinstance(m, Text))
    assert told.splitlines() == [f"{what} {n}" for n in range(20) for what in ("err", "out")]


def test_subprocesses_and_c_libraries_are_heard(session: Session, output: Recorder) -> None:
    session.execute(
        "import ctypes, os, subprocess\n"
        "print('python', flush=True)\n"
        "subprocess.run(['echo', 'subprocess'])\n"
        "os.write(1, b'descriptor\\n')\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.puts(b'c library')\n"
        "libc.fflush(None)\n"
        "os.write(2, b'error\\n')\n"
        "print('python again')"
    )
    lines = output.text(0).split()
    assert lines == ["python", "subprocess", "descriptor", "c", "library", "python", "again"]
    assert output.text(0, "stderr") == "error\n"


def test_what_torch_warns_of_in_c_is_shown_but_not_what_a_stop_has_caused(
    session: Session, output: Recorder
) -> None:
    with Press(session, session.interrupt), pytest.raises(RunInterrupt):
        session.execute(
            "own = dist.TCPStore('localhost', 0, is_master=True, wait_for_workers=False)\n"
            "own.wait(['what nobody sets'])"
        )
    assert "[W" not in output.text(0, "stderr")  # a stack of C++ for each connection that was shut
    session.execute(
        "ddp = torch.nn.parallel.DistributedDataParallel(\n"
        "    torch.nn.Linear(2, 2), find_unused_parameters=True\n"
        ")\n"
        "for _ in range(2):\n"
        "    ddp(torch.ones(1, 2)).sum().backward()"
    )
    for rank in (0, 1):
        warned = output.text(rank, "stderr")
        assert f"[rank{rank}]:[W" in warned
        assert "find_unused_parameters=True was specified" in warned


def test_c_code_that_holds_the_interpreter_may_print_without_end(
    session: Session, output: Recorder
) -> None:
    # PyDLL keeps the GIL: a pipe that a thread of the same process reads would be full for ever
    session.execute(
        "import ctypes\n"
        "puts = ctypes.PyDLL(None).puts\n"
        "for i in range(30000):\n"
        "    puts(b'x' * 99)\n"
        "ctypes.CDLL(None).fflush(None);",
        timeout=60,
    )
    assert len(output.text(0)) == 30000 * 100


def test_stdout_and_stderr_keep_their_order(session: Session, output: Recorder) -> None:
    session.execute(
        "import sys\nfor i in range(50):\n    print(i, file=sys.stdout if i % 2 else sys.stderr)"
    )
    texts = [m.text for m in output.messages if isinstance(m, Text) and m.rank == 0]
    assert "".join(texts).split() == [str(i) for i in range(50)]


def test_displays_stand_between_the_text_around_them(session: Session, output: Recorder) -> None:
    session.execute(
        "from IPython.display import display, HTML\n"
        "print('before')\ndisplay(HTML(f'<b>{rank}</b>'))\nprint('after')"
    )
    kinds = [
        m.text.strip() if isinstance(m, Text) else m.data["text/html"]
        for m in output.messages
        if m.rank == 1
    ]
    assert [kind for kind in kinds if kind] == ["before", "<b>1</b>", "after"]


def test_a_display_can_be_updated_and_cleared(session: Session, output: Recorder) -> None:
    session.execute(
        "from IPython.display import display, clear_output\n"
        "handle = display('first', display_id=True)\n"
        "handle.update('second')\n"
        "clear_output(wait=True)"
    )
    first, second = output.displays(0)
    assert (first.update, second.update) == (False, True)
    assert first.display_id == second.display_id != ""
    assert [m.wait for m in output.messages if isinstance(m, ClearOutput)] == [True, True]


def test_figures_are_shown_when_the_cell_ends(session: Session, output: Recorder) -> None:
    pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")
    session.execute("import matplotlib.pyplot as plt\nplt.plot([rank, 1]);")
    for rank in (0, 1):
        (figure,) = output.displays(rank)
        assert isinstance(figure, Display)
        assert "image/png" in figure.data


def test_unicode_and_bytes_that_are_none_arrive(session: Session, output: Recorder) -> None:
    session.execute("import os\nprint('\\u00e4\\U0001f525')\nos.write(1, b'\\xff\\xfe\\n');")
    assert output.text(0) == "\u00e4\U0001f525\n\ufffd\ufffd\n"


def test_print_can_write_bytes_to_the_buffer(session: Session, output: Recorder) -> None:
    session.execute("import sys\nsys.stdout.buffer.write(b'raw\\n');")
    assert output.text(1) == "raw\n"


def test_what_a_thread_prints_later_still_arrives(start) -> None:
    recorder = Recorder()
    session = start(1, output=recorder)
    session.execute("import threading\nthreading.Timer(0.3, lambda: print('late')).start()")
    deadline = time.monotonic() + 5
    while "late" not in recorder.text(0) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert recorder.text(0) == "late\n"


class _Counter(Output):
    """Takes text slowly and keeps only its length."""

    def __init__(self, pause: float = 0.0):
        self.characters = {0: 0, 1: 0}
        self._pause = pause

    def __call__(self) -> _Counter:
        return self

    def write(self, message: object) -> None:
        assert isinstance(message, Text)
        self.characters[message.rank] += len(message.text)
        time.sleep(self._pause)

    def show(self, shown: dict[int, object]) -> None:
        raise AssertionError(shown)


@pytest.mark.timeout(300)
def test_a_million_lines_fill_no_memory_and_block_no_other_rank(start) -> None:
    counter = _Counter(pause=0.002)  # a notebook that is slower than the ranks
    session = start(2, output=counter)
    line = "x" * 49
    flood = session[0].submit(
        lambda: [print(line) for _ in range(1_000_000)] and None,
    )
    time.sleep(0.5)
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        assert session[1].run(lambda: "free")[1] == "free"
    assert not flood.done()
    peak = before
    while not flood.done():
        peak = max(peak, psutil.Process().memory_info().rss)
        time.sleep(0.05)
    flood.result()
    assert counter.characters[0] == 50 * 1_000_000
    assert peak - before < 40 * 2**20  # of 50 MB that were printed


def test_an_output_of_another_kind_is_refused_before_anything_starts() -> None:
    with pytest.raises(OptionsError, match="output= gives a list: derive it from"):
        Session(2, output=list)
