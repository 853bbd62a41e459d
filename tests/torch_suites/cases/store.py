"""Stores that ranks make themselves, and the one of the group: after test_store."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tests.torch_suites.cases.case import Case

__all__ = ["Store"]

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=30)


class Store(Case):
    """What each kind of store does, by one rank and between all of them."""

    def shared(self, name: str = "tcp", **options: object) -> dist.TCPStore:
        """A TCPStore of all ranks: rank 0 has the server, and tells its port by a file."""
        told = self.store(f"port of {name}")
        if self.rank:
            port = int(told.get("port"))
            return dist.TCPStore("localhost", port, is_master=False, timeout=LONG, **options)
        server = dist.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=LONG, **options
        )
        told.set("port", str(server.port))
        return server

    def meet(self, name: str) -> None:
        """All ranks come here before one goes on, so that rank 0's server outlives the others."""
        met = self.store(f"meet at {name}")
        met.add("ranks", 1)
        while met.add("ranks", 0) < self.world_size:
            pass

    @contextmanager
    def each(self) -> Iterator[dict[str, dist.Store]]:
        """A store of each kind, which this rank has alone, or has a prefix of its own in."""
        tcp = self.shared()
        file = dist.FileStore(f"{self.file_name}.alone {self.rank}", 1)
        yield {
            "tcp": dist.PrefixStore(f"rank {self.rank}", tcp),
            "file": file,
            "hash": dist.HashStore(),
            "prefix": dist.PrefixStore("outer", dist.PrefixStore("inner", dist.HashStore())),
        }
        self.meet("each")

    # --- one rank, each kind ------------------------------------------------------------------

    def test_set_and_get(self) -> None:
        with self.each() as stores:
            for store in stores.values():
                for number in range(3):
                    store.set(f"key {number}", f"value {number}")
                store.set("key 0", "another")
                store.set("empty", "")
                store.set("é", b"\x01\x02\xff".decode("latin-1"))
                self.assertEqual(store.get("key 0"), b"another")
                self.assertEqual(store.get("key 2"), b"value 2")
                self.assertEqual(store.get("empty"), b"")
                self.assertEqual(store.get("é").decode(), "\x01\x02\xff")

    def test_add(self) -> None:
        with self.each() as stores:
            for store in stores.values():
                self.assertEqual([store.add("n", n) for n in (1, 2, -5, 0)], [1, 3, -2, -2])
                self.assertEqual(store.get("n"), b"-2")
                store.set("m", "40")
                self.assertEqual(store.add("m", 2), 42)

    def test_compare_set(self) -> None:
        with self.each() as stores:
            for store in stores.values():
                self.assertEqual(store.compare_set("key", "wrong", "new"), b"wrong")
                self.assertFalse(store.check(["key"]))
                self.assertEqual(store.compare_set("key", "", "first"), b"first")
                self.assertEqual(store.compare_set("key", "wrong", "second"), b"first")
                self.assertEqual(store.compare_set("key", "first", "second"), b"second")
                self.assertEqual(store.get("key"), b"second")

    def test_check_and_delete(self) -> None:
        with self.each() as stores:
            for kind, store in stores.items():
                self.assertFalse(store.check(["one"]))
                store.set("one", "1")
                self.assertTrue(store.check(["one"]))
                self.assertFalse(store.check(["one", "two"]))
                self.assertTrue(store.delete_key("one"), kind)
                if kind != "file":  # which says so again
                    self.assertFalse(store.delete_key("one"), kind)
                self.assertFalse(store.check(["one"]))

    def test_how_many_keys(self) -> None:
        for store in (dist.HashStore(), dist.FileStore(f"{self.file_name}.{self.rank}", 1)):
            before = store.num_keys()
            store.set("one", "1")
            store.add("two", 1)
            store.set("one", "2")
            self.assertEqual(store.num_keys(), before + 2)
            store.delete_key("one")
            self.assertEqual(store.num_keys(), before + 1)

    def test_list_keys(self) -> None:
        store = dist.PrefixStore("here", dist.HashStore())
        store.set("one", "1")
        store.set("two", "2")
        self.assertEqual(sorted(store.list_keys()), ["one", "two"])

    def test_append(self) -> None:
        with self.each() as stores:
            for kind in ("tcp", "hash", "prefix"):
                stores[kind].append("text", "po")
                stores[kind].append("text", "tato")
                stores[kind].append("text", "")
                self.assertEqual(stores[kind].get("text"), b"potato")

    def test_several_at_once(self) -> None:
        with self.each() as stores:
            for kind in ("tcp", "hash", "prefix"):
                store = stores[kind]
                self.assertTrue(store.has_extended_api())
                store.multi_set(["one", "two"], ["1", "22"])
                self.assertEqual(store.multi_get(["two", "one"]), [b"22", b"1"])
            self.assertFalse(stores["file"].has_extended_api())

    def test_queues(self) -> None:
        with self.each() as stores:
            for kind in ("tcp", "hash", "prefix"):
                store = stores[kind]
                self.assertEqual(store.queue_len("queue"), 0)
                store.queue_push("queue", "one")
                store.queue_push("queue", "two")
                self.assertEqual(store.queue_len("queue"), 2)
                self.assertEqual(store.queue_pop("queue"), b"one")
                self.assertEqual(store.queue_pop("queue", False), b"two")
                with self.assertRaises(dist.QueueEmptyError):
                    store.queue_pop("queue", False)
                self.assertEqual(store.queue_len("queue"), 0)

    def test_a_queue_that_nobody_fills(self) -> None:
        with self.each() as stores:
            for kind in ("tcp", "hash"):
                stores[kind].set_timeout(SHORT)
                with self.assertRaises(dist.DistStoreError):
                    stores[kind].queue_pop("queue")

    def test_time_outs(self) -> None:
        with self.each() as stores:
            for kind, store in stores.items():
                self.assertIsInstance(store.timeout, timedelta)
                store.set_timeout(SHORT)
                self.assertEqual(store.timeout, SHORT, kind)
                error = RuntimeError if kind == "file" else dist.DistStoreError
                with self.assertRaisesRegex(error, "[Tt]imeout|timed out"):
                    store.get("never")
                with self.assertRaisesRegex(error, "[Tt]imeout|timed out"):
                    store.wait(["never"], SHORT)
                store.set("once", "1")
                with self.assertRaises(error):
                    store.wait(["once", "never"], SHORT)
                store.wait(["once"], SHORT)
                self.assertEqual(store.get("once"), b"1")

    def test_errors_are_runtime_errors(self) -> None:
        store = dist.HashStore()
        with self.assertRaises(RuntimeError) as raised:
            store.wait(["never"], SHORT)
        self.assertIsInstance(raised.exception, dist.DistStoreError)
        self.assertIsInstance(raised.exception, dist.DistError)
        self.assertTrue(issubclass(dist.QueueEmptyError, dist.DistStoreError))

    def test_a_thread_wakes_another(self) -> None:
        with self.each() as stores:
            for kind in ("hash", "tcp"):
                store = stores[kind].clone()
                thread = threading.Timer(0.2, store.set, ("late", "now"))
                thread.start()
                stores[kind].wait(["late"], LONG)
                self.assertEqual(stores[kind].get("late"), b"now")
                thread.join()

    def test_large_values(self) -> None:
        with self.each() as stores:
            value = "x" * 2**20
            for kind, store in stores.items():
                store.set("large", value)
                self.assertEqual(store.get("large"), value.encode(), kind)

    # --- prefixes -----------------------------------------------------------------------------

    def test_prefixes_keep_keys_apart(self) -> None:
        base = dist.HashStore()
        one, two = dist.PrefixStore("one", base), dist.PrefixStore("two", base)
        one.set("key", "1")
        self.assertFalse(two.check(["key"]))
        two.set("key", "2")
        self.assertEqual((one.get("key"), two.get("key")), (b"1", b"2"))
        self.assertEqual(base.get("one/key"), b"1")
        one.add("n", 3)
        self.assertEqual(base.add("one/n", 0), 3)

    def test_what_is_under_a_prefix(self) -> None:
        base = dist.HashStore()
        outer = dist.PrefixStore("outer", dist.PrefixStore("inner", base))
        self.assertIsInstance(outer.underlying_store, dist.PrefixStore)
        self.assertIsInstance(outer._underlying_non_prefix_store, dist.HashStore)
        outer.set("key", "1")
        self.assertEqual(base.get("inner/outer/key"), b"1")

    def test_a_prefix_needs_a_store(self) -> None:
        with self.assertRaises((ValueError, TypeError)):
            dist.PrefixStore("prefix", None)

    # --- between ranks ------------------------------------------------------------------------

    def test_each_rank_sees_what_the_others_set(self) -> None:
        for store in (self.shared(), self.store("file")):
            store.set(f"rank {self.rank}", str(self.rank))
            store.wait([f"rank {rank}" for rank in self.ranks], LONG)
            got = [store.get(f"rank {rank}") for rank in self.ranks]
            self.assertEqual(got, [str(rank).encode() for rank in self.ranks])
            self.meet(type(store).__name__)

    def test_all_ranks_add(self) -> None:
        for store in (self.shared(), self.store("file")):
            seen = [store.add("n", 1) for _ in range(20)]
            self.assertEqual(seen, sorted(set(seen)))
            self.meet(type(store).__name__)
            self.assertEqual(store.add("n", 0), 20 * self.world_size)
            self.meet(f"{type(store).__name__}, again")

    def test_one_rank_wins(self) -> None:
        store = self.shared()
        mine = f"rank {self.rank}"
        winner = store.compare_set("winner", "", mine).decode()
        store.set(mine, winner)
        self.assertEqual({store.get(f"rank {rank}").decode() for rank in self.ranks}, {winner})
        self.meet("end")

    def test_a_queue_between_ranks(self) -> None:
        store = self.shared()
        if self.rank:
            store.queue_push("work", str(self.rank))
            self.assertEqual(store.queue_pop(f"for {self.rank}"), b"done")
        else:
            got = {int(store.queue_pop("work")) for _ in self.ranks[1:]}
            self.assertEqual(got, set(self.ranks[1:]))
            for rank in self.ranks[1:]:
                store.queue_push(f"for {rank}", "done")
        self.meet("end")

    def test_workers_are_waited_for(self) -> None:
        told = self.store("told")
        if self.rank == 0:
            first = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            told.set("port", str(first.port))
        port = int(told.get("port"))
        client = dist.TCPStore(
            "localhost", port, world_size=self.world_size, is_master=False, timeout=LONG
        )
        self.assertEqual(client.port, port)
        self.assertEqual(client.host, "localhost")
        self.meet("end")

    def test_a_server_of_several_stores(self) -> None:
        if self.rank:
            return
        one = dist.TCPStore("localhost", 0, 1, True, multi_tenant=True)
        two = dist.TCPStore("localhost", one.port, 1, True, multi_tenant=True)
        two.set("key", "1")
        self.assertEqual(one.get("key"), b"1")

    def test_a_port_that_is_taken(self) -> None:
        server = self.shared()
        with self.assertRaisesRegex(RuntimeError, "EADDRINUSE|address already in use|in use"):
            dist.TCPStore("localhost", server.port, 1, True)
        self.meet("end")

    def test_nobody_listens(self) -> None:
        server = self.shared()
        port = server.port
        self.meet("port")
        del server
        self.meet("gone")
        with self.assertRaises(RuntimeError):
            dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=1))

    def test_a_server_that_goes_away(self) -> None:
        server = self.shared()
        server.set(f"rank {self.rank}", "")
        server.wait([f"rank {rank}" for rank in self.ranks], LONG)
        self.meet("connected")
        if self.rank == 0:
            del server
            self.meet("gone")
            return
        self.meet("gone")
        with self.assertRaises(dist.DistNetworkError):
            for number in range(100):
                server.set(f"key {number}", "value")
                server.get(f"key {number}")

    def test_a_copy_of_a_store(self) -> None:
        store = self.shared()
        copy = store.clone()
        copy.set(f"rank {self.rank}", "1")
        self.assertEqual(store.get(f"rank {self.rank}"), b"1")
        with self.assertRaises(TypeError):
            pickle.dumps(store)
        self.meet("end")

    def test_a_barrier_of_a_store(self) -> None:
        store = self.shared()
        from torch.distributed.elastic.utils.store import barrier

        barrier(store, self.world_size, "barrier", barrier_timeout=30)
        store.set(f"rank {self.rank}", "")
        barrier(store, self.world_size, "again", barrier_timeout=30)
        self.assertTrue(store.check([f"rank {rank}" for rank in self.ranks]))
        self.meet("end")

    # --- a store of one's own -----------------------------------------------------------------

    def test_a_store_in_python(self) -> None:
        store = _Own()
        prefixed = dist.PrefixStore("prefix", store)
        prefixed.set("key", "1")
        self.assertEqual(store.values, {"prefix/key": b"1"})
        self.assertEqual(prefixed.get("key"), b"1")
        self.assertEqual(prefixed.add("n", 2), 2)
        self.assertEqual(prefixed.add("n", 2), 4)

    # --- the one of a group -------------------------------------------------------------------

    def test_a_group_on_a_store_of_ones_own(self) -> None:
        import torch

        store = self.shared()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), self.world_size)
        default = dist.distributed_c10d._get_default_store()
        default.set(f"rank {self.rank}", str(self.rank))
        default.wait([f"rank {rank}" for rank in self.ranks], LONG)
        self.assertEqual(default.add("n", 1) > 0, True)
        dist.barrier()
        self.assertEqual(default.add("n", 0), self.world_size)
        dist.barrier()
        dist.destroy_process_group()
        self.meet("end")


class _Own(dist.Store):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        return total
