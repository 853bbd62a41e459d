"""Which ranks are on one host."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from distsession.distributed import rank_info, torch_private
from distsession.errors import ProcessGroupError

HOSTS = ["b", "a", "b", "b"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a world, in which the others have said where they are."""
    store = dist.HashStore()
    for rank, host in enumerate(HOSTS):
        store.set(f"distsession/host/{rank}", host)
    monkeypatch.setattr(torch_private, "default_store", lambda: store)
    return store


@pytest.mark.parametrize(
    ("rank", "place"), [(0, (0, 3, 0, 2)), (1, (0, 1, 1, 2)), (2, (1, 3, 0, 2)), (3, (2, 3, 0, 2))]
)
def test_hosts_may_have_different_numbers_of_ranks(
    rank: int, place: tuple[int, ...], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_info.socket, "gethostname", lambda: HOSTS[rank])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    node = rank_info._find_node(rank, len(HOSTS))
    found = (node.local_rank, node.local_world_size, node.node_rank, node.nodes)
    assert found == place


def test_who_does_not_say_it_is_named(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_info, "HOSTS_TIMEOUT_S", timedelta(milliseconds=50).total_seconds())
    with pytest.raises(ProcessGroupError, match=r"ranks \[4\]"):
        rank_info._node_from_hosts(0, 5, "")
