"""A wire between two interfaces on which each packet takes a while: for kernels without netem.

``delay_link.py INTERFACE INTERFACE SECONDS LOSS`` carries what comes to either to the other one,
until it is killed. Of the packets it drops the part ``LOSS``, from 0 to 1.
``delay_link.py INTERFACE`` prepares an interface from which packets go that way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque

__all__ = ["OFFLOADS", "turn_off"]

SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)
"""ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO: what leaves packets unfinished or larger than the link."""
ETH_P_ALL, LARGEST = 3, 1 << 16
BUFFER_BYTES = 8 << 20


def turn_off(interface: str) -> None:
    """Have a packet be on the wire as it will be on its other end."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
            request = struct.pack("16sQ8x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, SIOCETHTOOL, request)


def attach(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    made.bind((interface, ETH_P_ALL))
    return made


def carry(first: str, second: str, delay_s: float, loss: float) -> None:
    for interface in (first, second):
        turn_off(interface)
    ends = attach(first), attach(second)
    ready = selectors.SelectSelector()  # of which a wait may be less than a millisecond
    for end, other in (ends, ends[::-1]):
        ready.register(end, selectors.EVENT_READ, other)
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in ready.select(wait_s):
            try:
                packet, address = key.fileobj.recvfrom(LARGEST)  # type: ignore[union-attr]
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # told once of what was down for a moment
                    raise
                continue
            if address[2] != socket.PACKET_OUTGOING and random.random() >= loss:
                under_way.append((time.monotonic() + delay_s, key.data, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # it is lost, as on any other network
                end.send(packet)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        turn_off(sys.argv[1])
        sys.exit()
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
