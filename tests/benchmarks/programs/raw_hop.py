"""The floor of a call to another host: a hop between a CURVE socket and the workers of its host.

Arguments: address and public key of the other end, address for the workers, how many there are.
"""

import ctypes
import signal
import sys

import zmq

PR_SET_PDEATHSIG = 1


def main(address: str, server_key: str, local: str, workers: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    context = zmq.Context()
    inner = context.socket(zmq.ROUTER)
    inner.bind(local)
    names = [inner.recv_multipart()[0] for _ in range(workers)]
    outer = context.socket(zmq.DEALER)
    outer.curve_publickey, outer.curve_secretkey = zmq.curve_keypair()
    outer.curve_serverkey = bytes.fromhex(server_key)
    outer.connect(address)
    outer.send(b"")  # here
    poller = zmq.Poller()
    for socket in (inner, outer):
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket is outer:
                call = outer.recv()
                for name in names:
                    inner.send_multipart([name, call])
            else:
                outer.send(inner.recv_multipart()[1])


main(*sys.argv[1:4], int(sys.argv[4]))
