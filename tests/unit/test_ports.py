"""A port that a test holds."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from tests.ports import held_port


def test_nobody_else_gets_it_and_the_server_that_it_is_for_does() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        assert client.get("key") == b"value"
