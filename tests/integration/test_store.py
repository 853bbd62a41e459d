"""The session's rendezvous store: what works with a TCPStore of torch's works with it."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distsession import RunError, RunInterrupt, Session, errors
from distsession.engine import store, store_server
from tests.until import LIMIT_S, Press, until

SOON = timedelta(milliseconds=150)


def _serve(listener: socket.socket) -> None:
    """Be the server, in a forked process that never goes on into the tests."""
    try:
        store_server.serve(listener, os.getppid())
    finally:
        os._exit(1)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Of a store in a process of its own."""
    short = f"/tmp/ds-store-{os.getpid()}.sock"  # the folder of a test has too long a path
    listener = store_server.bind(short)
    pid = os.fork()
    if pid == 0:
        _serve(listener)
    listener.close()
    yield short
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.unlink(short)


@pytest.fixture
def ours(path: str) -> Iterator[store.Store]:
    yield store.session_store(path)
    store._stores.pop(path)._become_child()


@pytest.fixture
def theirs() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def operations(s: Any, root: Any) -> Iterator[Callable[[], Any]]:
    """Every operation, in an order; what an earlier one did is seen by a later one."""
    limit = timedelta(seconds=60)
    yield lambda: s.set("a", "text")
    yield lambda: s.get("a")
    yield lambda: s.set("bytes", b"\x00\xff\n")
    yield lambda: s.get("bytes")
    yield lambda: s.set("empty", "")
    yield lambda: s.get("empty")
    yield lambda: s.set("kö", "ü")
    yield lambda: s.get("kö")
    yield lambda: s.add("n", 2)
    yield lambda: s.add("n", -5)
    yield lambda: s.get("n")
    yield lambda: s.check(["a", "n"])
    yield lambda: s.check(["a", "nothing"])
    yield lambda: s.check([])
    yield lambda: s.wait(["a", "n"])
    yield lambda: s.wait(["a"], limit)
    yield lambda: s.compare_set("c", "not", "new")
    yield lambda: s.check(["c"])
    yield lambda: s.compare_set("c", "", "first")
    yield lambda: s.compare_set("c", "wrong", "second")
    yield lambda: s.compare_set("c", "first", "second")
    yield lambda: s.get("c")
    yield lambda: s.append("list", "x,")
    yield lambda: s.append("list", "y,")
    yield lambda: s.get("list")
    yield lambda: s.multi_set(["m1", "m2"], ["one", "two"])
    yield lambda: s.multi_get(["m2", "m1"])
    yield lambda: s.num_keys() - root.num_keys()
    yield lambda: s.delete_key("m1")
    yield lambda: s.delete_key("m1")
    yield lambda: s.check(["m1"])
    yield lambda: s.has_extended_api()
    yield lambda: s.timeout
    yield lambda: s.set_timeout(SOON)
    yield lambda: s.timeout
    yield lambda: s.get("nothing")
    yield lambda: s.wait(["a", "nothing"])
    yield lambda: s.multi_get(["a", "nothing"])
    yield lambda: s.wait(["nothing", "either"], timedelta(milliseconds=100))
    yield lambda: s.clone().get("a")
    yield lambda: pickle.dumps(s) and None
    yield lambda: s.set("large", "x" * 5_000_000)
    yield lambda: len(s.get("large"))
    if hasattr(s, "queue_push"):
        yield lambda: s.queue_push("q", "1")
        yield lambda: s.queue_push("q", "2")
        yield lambda: s.queue_len("q")
        yield lambda: s.check(["q"])
        yield lambda: s.wait(["q"])
        yield lambda: s.queue_pop("q")
        yield lambda: s.queue_pop("q", False)
        yield lambda: s.queue_pop("q", False)
        yield lambda: s.queue_pop("q")
        yield lambda: s.queue_len("q")
    if hasattr(s, "list_keys"):
        yield lambda: sorted(s.list_keys())
    if hasattr(s, "barrier"):
        yield lambda: s.barrier("meet", 1)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error).partition("\n")[0] if "timeout" in str(error) else ""


@pytest.mark.parametrize("prefix", ["", "part"])
def test_every_operation_does_what_that_of_a_tcp_store_does(
    ours: store.Store, theirs: dist.Store, prefix: str
) -> None:
    mine = store.StorePart(prefix, ours) if prefix else ours
    other = dist.PrefixStore(prefix, theirs) if prefix else theirs
    pairs = zip(operations(mine, ours), operations(other, theirs), strict=True)
    for number, (left, right) in enumerate(pairs):
        assert outcome(left) == outcome(right), number


def test_cpp_keeps_the_python_part_alive(path: str) -> None:
    inner = dist.PrefixStore("p", store.session_store(path))
    gc.collect()
    inner.set("a", "b")
    assert inner.get("a") == b"b"
    store._stores.pop(path)._become_child()


def test_threads_wait_at_the_same_time(ours: store.Store) -> None:
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(ours.get(f"key{i}"))) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    for i in reversed(range(20)):
        ours.set(f"key{i}", str(i))
    for thread in threads:
        thread.join(10)
    assert sorted(got) == sorted(str(i).encode() for i in range(20))
    assert len(ours._idle) == store.MOST_IDLE


def test_a_wait_for_several_keys_that_come_late_leaves_one_connection(ours: store.Store) -> None:
    ours.set("first", "1")
    timer = threading.Timer(4 * store.UNREPORTED_WAIT_S, ours.set, ("late", "2"))
    timer.start()
    assert ours.multi_get(["first", "late"]) == [b"1", b"2"]
    timer.join()
    assert len(ours._idle) == store.MOST_IDLE


def test_waits_are_ended_from_another_thread_with_the_reason(ours: store.Store) -> None:
    ours.set("a", "b")
    ours.abort_error = lambda: errors.CollectiveError("stopped") if ended else None
    ended: list[int] = []

    def end() -> None:
        ended.append(1)
        ours.end_waits()

    threading.Timer(0.3, end).start()
    with pytest.raises(errors.CollectiveError, match="stopped"):
        ours.wait(["never"])
    with pytest.raises(errors.CollectiveError, match="stopped"):
        ours.wait(["never"])  # it stays given up
    assert ours.get("a") == b"b"  # which is there
    ended.clear()
    assert ours.add("n", 1) == 1


def test_a_forked_child_has_connections_of_its_own(ours: store.Store) -> None:
    ours.set("a", "b")
    held = threading.Thread(target=lambda: ours.get("late"))
    held.start()
    time.sleep(0.1)
    pids = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                ok = ours.get("a") == b"b" and all(ours.add("sum", 1) for _ in range(200))
                ours.set(f"child{number}", str(ok))
                os._exit(0)
            finally:
                os._exit(1)  # never on into the tests
        pids.append(pid)
    for _ in range(200):
        ours.add("sum", 1)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    assert ours.get("sum") == b"1000"
    assert ours.multi_get([f"child{n}" for n in range(4)]) == [b"True"] * 4
    ours.set("late", "")
    held.join(10)
    assert not held.is_alive()


def test_what_earlier_generations_have_left_is_deleted_and_what_later_ones_have_stays(
    ours: store.Store,
) -> None:
    """Who deletes may be late: others may have come to the generation after that."""
    kept = ["generation10/a", "generation9/b", "generation", "generationx/a", "other/generation1/a"]
    for key in [*kept, "generation1/a", "generation8/x/y"]:
        ours.set(key, "")
        ours.queue_push(f"{key}/queue", "") if "/" in key else None
    ours.delete_earlier("generation", 9)
    assert sorted(ours.list_keys()) == sorted(kept)
    assert ours.queue_len("generation10/a/queue") == 1
    assert ours.queue_len("generation1/a/queue") == 0


def test_while_a_group_connects_the_addresses_of_its_members_are_brought_once(
    ours: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.multi_set(["part/0/0", "part/0/1"], [b"here", b"there"])
    with ours.addresses_together(2, store.DEFAULT_TIMEOUT):
        ours.wait(["part/0/1"])

        def ask(*_: Any, **__: Any) -> list[bytes]:
            raise AssertionError("the store is asked once more")

        with monkeypatch.context() as asked:
            asked.setattr(ours, "_request", ask)
            asked.setattr(ours, "_await", ask)
            assert ours.check(["part/0/0", "part/0/1"])
            assert ours.get("part/0/0") == b"here"
            with pytest.raises(AssertionError, match="once more"):
                ours.check(["part/0/0", "part/0/2"])
    ours.set("part/0/0", b"elsewhere")
    assert ours.get("part/0/0") == b"elsewhere"


def test_a_store_that_ended_is_never_taken_for_the_one_in_its_place(path: str) -> None:
    listener = store_server.bind(f"{path}.x")
    pid = os.fork()
    if pid == 0:
        _serve(listener)
    listener.close()
    other = store.Store(f"{path}.x")
    other.set("a", "b")
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.rename(path, f"{path}.y")
    os.symlink(f"{path}.y", f"{path}.x.new")
    os.rename(f"{path}.x.new", f"{path}.x")
    try:
        for _ in range(2):
            with pytest.raises(store.StoreEndedError, match="has ended"):
                other.check(["a"])
        other.renew()
        assert not other.check(["a"])
    finally:
        os.unlink(f"{path}.x")
        os.rename(f"{path}.y", path)
        other._become_child()


def test_clients_that_leave_at_any_moment_do_not_end_it(ours: store.Store, path: str) -> None:
    get = store_server.pack(store_server.Op.GET, [b"late"])
    for n in range(300):
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for client in waiting:
            client.connect(path)
            client.sendall(get)
        for client in waiting[: n % 5]:
            client.close()
        ours.set("late", "")  # answers who waits, also who has just left
        ours.delete_key("late")
        for client in waiting:
            client.close()
    assert ours.add("n", 1) == 1


def test_a_store_that_does_not_last_ends_the_start_with_its_reason(
    start: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nfrom distsession.engine import store, store_server\n"
        "store_server.serve = lambda *_: os._exit(3)\nstore.CONNECT_TIMEOUT_S = 1000.0\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(errors.LaunchError, match=r"rendezvous store .*ended") as caught:
        start(2)
    assert "start_timeout" not in str(caught.value)  # which it would be that ended the start


def test_junk_ends_the_connection_that_sent_it_and_nothing_else(
    ours: store.Store, path: str
) -> None:
    ours.set("a", "b")
    for junk in (b"\x01\x00\x00\x00\xff", b"\x02\x00\x00\x00\x01\x05", b"\x00\x00\x00\x00", b"x"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            stranger.sendall(junk)
            time.sleep(0.02)
    with pytest.raises(RuntimeError):
        ours.add("a", 1)  # no number
    ours.renew()
    assert ours.get("a") == b"b"


# --- in a session ---------------------------------------------------------------------------------

STORE = "store = dist.distributed_c10d._get_default_store()\n"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(3, threads=1, hang_grace=0.5) as session:
        session.execute("import time, threading, os, datetime\n" + STORE)
        yield session


def test_user_code_meets_in_the_store(session: Session) -> None:
    session.execute(
        f"{STORE}store.set(f'here{{rank}}', str(rank))\n"
        "store.wait([f'here{r}' for r in range(world_size)])\n"
        "total = store.add('count', 1)\n"
        "mine = dist.PrefixStore('mine', store)\n"
        "mine.set(str(rank), 'x')\n"
        "assert mine.get('0') == b'x'\n"
        "group = dist.new_group([0, 2])\n"
        "probe = torch.ones(1)\n"
        "if rank != 1: dist.all_reduce(probe, group=group)"
    )
    assert session.evaluate("probe.item()").values() is not None
    assert list(session.evaluate("probe.item()").values()) == [2.0, 1.0, 2.0]


def test_stop_names_the_key_and_the_line_and_who_could_set_it(session: Session) -> None:
    waits = lambda: "key 'x' of the store" in repr(session.diagnose())  # noqa: E731
    with (
        Press(session, session.interrupt, lambda: until(waits)),
        pytest.raises(RunInterrupt) as caught,
    ):
        session.execute(
            f"{STORE}if rank == 0:\n    store.get('x')\nelse:\n    time.sleep(60)", label="In[7]"
        )
    text = str(caught.value)
    assert "rank 0 waits for the key 'x' of the store at In[7] line 3" in text
    assert "which no rank has set: ranks 1-2 run In[7] line 5" in text
    assert "connected anew" in text


def test_diagnose_names_the_keys_and_a_later_run_may_set_them(session: Session) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(session.execute, f"{STORE}store.wait(['a', 'b']) if rank == 0 else None")
    pool.shutdown(wait=False)
    until(lambda: "key 'a' of the store" in repr(session.diagnose()))
    session[1].execute(f"{STORE}store.set('a', '')")
    until(lambda: "key 'b' of the store" in repr(session.diagnose()))
    session[1].execute(f"{STORE}store.set('b', '')")
    future.result(LIMIT_S)  # a later run set it: it was not ended


def test_a_key_that_nobody_can_set_any_more_ends_by_itself(session: Session) -> None:
    with pytest.raises(errors.CollectiveHangError) as caught:
        session.execute(f"{STORE}if rank == 0:\n    store.get('x')", label="In[8]")
    assert str(caught.value).startswith(
        "ranks 1-2 did not set the key 'x' of the store at In[8] line 3: they finished their part "
        "without it; rank 0 waits. No wait can help."
    )


BESIDE = {
    "nothing": "",
    "a pool without work": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\npool.submit(int).result()"
    ),
    "the pool of an event loop": (
        "import asyncio\nloop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(loop.run_in_executor(None, int))"
    ),
    "a thread of a library's": "import tqdm\nbar = tqdm.tqdm(range(3))\nnext(iter(bar))",
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_keys_for_which_all_ranks_wait_end_by_themselves(session: Session, beside: str) -> None:
    session.execute(beside)
    with pytest.raises(errors.CollectiveHangError) as caught:
        session.execute(
            f"{STORE}if rank != 1:\n    store.set(f'of {{rank}}', '')\n"
            "store.wait(['of 0', 'of 1', 'of 2'])",
            label="In[8]",
        )
    assert str(caught.value).startswith(
        "ranks 0-2 wait for the key 'of 1' of the store at In[8] line 4. No rank is left that "
        "could set the key."
    )
    assert list(session.evaluate("rank").values()) == [0, 1, 2]


def test_a_key_that_a_thread_sets_is_waited_for(session: Session) -> None:
    session.execute(
        f"{STORE}import threading\n"
        "if rank == 1:\n    threading.Timer(2.5, store.set, ['by a thread', '']).start()\n"
        "if rank == 0:\n    store.get('by a thread')\n"
        "dist.barrier()"
    )


def test_a_key_that_a_thread_of_a_waiting_rank_sets_is_waited_for(session: Session) -> None:
    session.execute(
        f"{STORE}import threading, time\n"
        "def later():\n    time.sleep(2.5)\n    store.set('by a thread of a waiting rank', '')\n"
        "if rank == 1:\n    threading.Thread(target=later).start()\n"
        "store.get('by a thread of a waiting rank')"
    )


def test_a_rank_that_fails_before_it_sets_a_key_comes_first(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(
            f"{STORE}if rank == 1:\n    raise ValueError('boom')\n"
            "if rank == 0:\n    store.get('of 1')\nelse:\n    dist.barrier()"
        )
    assert str(caught.value).startswith("ValueError on rank 1")
    assert list(session.evaluate("rank").values()) == [0, 1, 2]


def test_a_wait_with_a_limit_of_its_own_is_not_cut_off(session: Session) -> None:
    session.execute(
        f"{STORE}late = False\n"
        "if rank == 0:\n"
        "    try:\n"
        "        store.wait(['x'], datetime.timedelta(seconds=2))\n"
        "    except dist.DistStoreError:\n"
        "        late = True"
    )
    assert list(session.evaluate("late").values()) == [True, False, False]


def test_a_key_that_comes_late_is_no_hang(session: Session) -> None:
    session.execute(
        f"{STORE}if rank == 1:\n    time.sleep(2)\n    store.set('late', 'x')\n"
        "got = store.get('late')"
    )
    assert list(session.evaluate("got").values()) == [b"x"] * 3


def test_a_child_of_a_rank_uses_the_store_and_leaves_its_parent_alone(session: Session) -> None:
    session.execute(
        f"{STORE}pid = os.fork()\n"
        "if not pid:\n"
        "    store.set(f'child{rank}', 'x')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "got = store.multi_get([f'child{r}' for r in range(3)])\n"
        "dist.barrier()"
    )
    assert session.evaluate("got")[0] == [b"x"] * 3


# --- comparing, for check="strict" ----------------------------------------------------------------


@pytest.fixture
def compare(ours: store.Store) -> Iterator[Callable[..., concurrent.futures.Future[Any]]]:
    """Has a rank of three bring a value, in a thread."""
    with concurrent.futures.ThreadPoolExecutor(20) as pool:

        def bring(rank: int, value: int, key: str = "k") -> concurrent.futures.Future[Any]:
            return pool.submit(ours.compare, key, rank, 3, value, f"{rank}: {value}", LIMIT_S)

        yield bring


def test_equal_values_are_answered_once_all_have_come(
    compare: Callable[..., concurrent.futures.Future[Any]],
) -> None:
    first = [compare(0, 7), compare(1, 7)]
    assert not concurrent.futures.wait(first, 4 * store_server.OTHERS_S).done
    assert [each.result() for each in [*first, compare(2, 7)]] == [{}] * 3
    again = [compare(rank, 8) for rank in range(3)]
    assert [each.result() for each in again] == [{}] * 3


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is started after this waits as long as it takes."""
    monkeypatch.setattr(store_server, "OTHERS_S", LIMIT_S)


def test_who_differs_is_told_with_those_that_come_a_moment_later(
    patient: None, compare: Callable[..., concurrent.futures.Future[Any]]
) -> None:
    asked = [compare(0, 7), compare(1, 8)]
    time.sleep(0.1)
    asked.append(compare(2, 8))
    everybody = {0: "0: 7", 1: "1: 8", 2: "2: 8"}
    assert [each.result() for each in asked] == [everybody] * 3


def test_who_differs_waits_no_longer_than_a_moment_for_the_rest(
    compare: Callable[..., concurrent.futures.Future[Any]],
) -> None:
    asked = [compare(0, 7), compare(2, 8)]
    assert [each.result() for each in asked] == [{0: "0: 7", 2: "2: 8"}] * 2
    assert compare(1, 7).result() == {0: "0: 7", 1: "1: 7", 2: "2: 8"}
    again = [compare(rank, 8) for rank in range(3)]  # the key is free again
    assert [each.result() for each in again] == [{}] * 3


def test_many_comparisons_that_differ_are_told_beside_each_other(
    compare: Callable[..., concurrent.futures.Future[Any]],
) -> None:
    for turn in range(20):
        keys = [f"{turn}/{number}" for number in range(10)]
        asked = [compare(rank, rank, key) for key in keys for rank in (0, 1)]
        assert [each.result() for each in asked] == [{0: "0: 0", 1: "1: 1"}] * 20
        late = [compare(2, 2, key) for key in keys]
        assert [set(each.result()) for each in late] == [{0, 1, 2}] * 10


def test_who_leaves_before_it_was_told_has_not_come(ours: store.Store) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(TimeoutError):
            ours.compare("k", 0, 2, 7, "0: 7", 0.2)
        asked = [pool.submit(ours.compare, "k", rank, 2, 8, "", LIMIT_S) for rank in (0, 1)]
        assert [each.result() for each in asked] == [{}] * 2
