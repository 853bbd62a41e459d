"""Takes bytes from a TCP connection: says how many when the other end has sent all."""

import ctypes
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def main(address: str, port: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with socket.create_connection((address, port)) as connection:
        buffer = memoryview(bytearray(1 << 20))
        while True:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            if not left:
                return
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.send(b"k")


main(sys.argv[1], int(sys.argv[2]))
