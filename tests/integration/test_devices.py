"""Ranks on devices that are no GPUs, of a type that a preloaded module brings."""

from __future__ import annotations

import pytest

from distsession import OptionsError, Session

TOY = {"backend": "toyccl", "preload": ["tests.toy_accelerator"]}


@pytest.fixture(scope="module")
def session():
    with Session(2, **TOY) as session:
        yield session


def test_each_rank_has_a_device_of_its_own(session: Session) -> None:
    assert [info.device.device for info in session.infos] == ["toy:0", "toy:1"]
    assert list(session.evaluate("str(device)").values()) == ["toy:0", "toy:1"]
    assert list(session.evaluate("torch.toy.current_device()").values()) == [0, 1]


def test_what_the_module_tells_of_a_device_is_known(session: Session) -> None:
    first, second = (info.device for info in session.infos)
    assert (first.name, first.memory_bytes) == ("Toy 0", 1 << 30)
    assert (second.name, second.memory_bytes) == ("Toy 1", 2 << 30)
    assert "toy:1" in str(session.devices())


def test_the_helpers_for_ranks_know_the_device(session: Session) -> None:
    told = session.evaluate("str(__import__('distsession.distributed').distributed.device())")
    assert list(told.values()) == ["toy:0", "toy:1"]


def test_a_fresh_process_gets_the_device_again(session: Session) -> None:
    session.restart([1])
    assert list(session.evaluate("torch.toy.current_device()").values()) == [0, 1]


def test_without_a_number_there_is_a_rank_for_each_device() -> None:
    with Session(**TOY) as session:
        assert session.world_size == 3


def test_devices_are_taken_in_their_order() -> None:
    with Session(**TOY, devices=[2, 0]) as session:
        assert [info.device.device for info in session.infos] == ["toy:2", "toy:0"]


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"type toy each, but .* shows 3 .*at most 3 ranks"):
        Session(4, **TOY)


def test_no_device_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DEVICES", "0")
    with pytest.raises(OptionsError, match=r"needs devices of the type toy, and .* shows none"):
        Session(2, **TOY)
