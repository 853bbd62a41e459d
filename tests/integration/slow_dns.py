"""A name server that takes its time: ``python slow_dns.py ADDRESS ANSWER SECONDS``.

It listens at port 53 of an address and answers each question of IPv4 with one address, after so
many seconds. Questions of IPv6 have no answer in it.
"""

from __future__ import annotations

import socket
import sys
import threading

IPV4 = b"\0\1"
HEAD_BYTES, KIND_BYTES, CLASS_BYTES = 12, 2, 2
LINE = b"\xc0\x0c" + IPV4 + b"\0\1" + bytes(4) + b"\0\4"
"""Of an answer: the name that was asked for, its kind and class, how long it is valid, a length."""


def main() -> None:
    address, answer, seconds = sys.argv[1:]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    print("ready", flush=True)

    def reply(question: bytes, whose: tuple[str, int]) -> None:
        end = question.index(b"\0", HEAD_BYTES) + 1 + KIND_BYTES + CLASS_BYTES
        is_known = question[end - KIND_BYTES - CLASS_BYTES :][:KIND_BYTES] == IPV4
        line = LINE + socket.inet_aton(answer) if is_known else b""
        counts = b"\0\1" + bytes([0, is_known]) + bytes(4)
        server.sendto(question[:2] + b"\x81\x80" + counts + question[HEAD_BYTES:end] + line, whose)

    while True:
        question, whose = server.recvfrom(512)
        timer = threading.Timer(float(seconds), reply, (question, whose))
        timer.daemon = True
        timer.start()


if __name__ == "__main__":
    main()
