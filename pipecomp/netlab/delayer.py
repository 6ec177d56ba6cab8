"""What delays a lab's packets where the kernel cannot, run as a file in the bridge's namespace.

    python delayer.py DELAY_S JITTER_S NODES

It carries each frame that nodes send from their port to the bridge when its time has come; what comes to them it
carries at once. A node's frames keep their order. Frames go with the kernel's own description of them (checksums to be
filled in, segments to be cut), so that none has to be touched.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

_ALL = 3  # ETH_P_ALL
_SOL_PACKET, _VNET_HDR, _OUTGOING = 263, 15, 4  # of Linux's if_packet.h
_MOST_BYTES = (1 << 16) + 64
_BUFFER_BYTES = 1 << 25
_AT_ONCE = 64  # frames of one socket before another's turn


def _open(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # of no protocol until it is bound
    made.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, side, _BUFFER_BYTES)
    made.bind((interface, _ALL))
    made.setblocking(False)
    return made


def _frames(sock: socket.socket) -> list[bytes]:
    """Those that have come; not those that this process sends itself."""
    found = []
    for _ in range(_AT_ONCE):
        try:
            frame, where = sock.recvfrom(_MOST_BYTES)
        except BlockingIOError:
            break
        if where[2] != _OUTGOING:
            found.append(frame)
    return found


def _send(sock: socket.socket, frame: bytes) -> None:
    try:
        sock.send(frame)
    except OSError:  # a queue is full, or the interface is gone: the frame is lost, as on any line
        return


def main(delay_s: float, jitter_s: float, nodes: int) -> None:
    """Carry frames until this process is ended."""
    ports = [_open(f"port{node}") for node in range(nodes)]
    bridge = [_open(f"mid{node}") for node in range(nodes)]
    to = {**dict(zip(ports, bridge, strict=True)), **dict(zip(bridge, ports, strict=True))}
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {sock: deque() for sock in ports}
    draw = random.Random(0)
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        ready, _, _ = select.select(to, [], [], None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for sock in ready:
            for frame in _frames(sock):
                if sock in waiting:
                    queue = waiting[sock]
                    at = now + delay_s + draw.uniform(-jitter_s, jitter_s)
                    queue.append((max(at, queue[-1][0]) if queue else at, frame))
                else:
                    _send(to[sock], frame)
        for sock, queue in waiting.items():
            while queue and queue[0][0] <= now:
                _send(to[sock], queue.popleft()[1])


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
