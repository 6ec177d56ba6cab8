"""Packet delays for kernels without netem, run as a file in the bridge's namespace.

    python delayer.py DELAY_S JITTER_S NODES

Frames from a node's port to the bridge are delayed, in order; frames to the node pass at once. They travel with the
kernel's own metadata (checksums to compute, segments to split), so that none is modified.
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
_MAX_FRAME_BYTES = (1 << 16) + 64
_BUFFER_BYTES = 1 << 25
_BATCH = 64  # frames of one socket before the next one's turn


def _open(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # without a protocol until it is bound
    sock.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, side, _BUFFER_BYTES)
    sock.bind((interface, _ALL))
    sock.setblocking(False)
    return sock


def _receive(sock: socket.socket) -> list[bytes]:
    """Incoming frames, without those that this process sends."""
    frames = []
    for _ in range(_BATCH):
        try:
            frame, address = sock.recvfrom(_MAX_FRAME_BYTES)
        except BlockingIOError:
            break
        if address[2] != _OUTGOING:
            frames.append(frame)
    return frames


def _send(sock: socket.socket, frame: bytes) -> None:
    try:
        sock.send(frame)
    except OSError:  # a full queue or a removed interface loses the frame, as on any link
        return


def main(delay_s: float, jitter_s: float, nodes: int) -> None:
    """Forward frames until this process is killed."""
    ports = [_open(f"port{node}") for node in range(nodes)]
    bridge = [_open(f"mid{node}") for node in range(nodes)]
    opposite = {**dict(zip(ports, bridge, strict=True)), **dict(zip(bridge, ports, strict=True))}
    queues: dict[socket.socket, deque[tuple[float, bytes]]] = {sock: deque() for sock in ports}
    draw = random.Random(0)
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in queues.values() if queue), default=None)
        ready, _, _ = select.select(opposite, [], [], None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for sock in ready:
            for frame in _receive(sock):
                if sock in queues:
                    queue = queues[sock]
                    at = now + delay_s + draw.uniform(-jitter_s, jitter_s)
                    queue.append((max(at, queue[-1][0]) if queue else at, frame))
                else:
                    _send(opposite[sock], frame)
        for sock, queue in queues.items():
            while queue and queue[0][0] <= now:
                _send(opposite[sock], queue.popleft()[1])


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
