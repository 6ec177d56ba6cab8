"""Two ranks that cannot reach each other, joined by one that both have connected to; it sees ciphertext only.

Both ask for it under TLS, with their certificates. Then TLS with the relaying rank ends, and the two make a handshake
of their own over the same sockets.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from pipecomp.tls.handshake import Guest, Place, welcome
from pipecomp.tls.stream import close
from pipecomp.tls.verification import Trust

_CHUNK = 1 << 17
_LAST_S = 10.0  # for two ranks to end their connection, when this one has ended its own


class Relay:
    """Joins guests that want to talk to each other."""

    def __init__(self, trust: Trust, mine: Place) -> None:
        self._trust, self._mine = trust, mine
        self._waiting: dict[tuple[int, int], Guest] = {}
        self._lock = threading.Lock()
        self._carried: dict[tuple[int, int], list[socket.socket]] = {}
        self._threads: list[threading.Thread] = []

    def take(self, guest: Guest) -> None:
        """A rank that wants to talk to another one; carries both ways when that one comes too."""
        pair = min(guest.rank, guest.to), max(guest.rank, guest.to)
        with self._lock:
            for sock in self._carried.pop(pair, ()):
                close(sock)  # one of them has lost the connection from before; the other hears it by this
            other = self._waiting.pop(pair, None)
            if other is None or other.rank == guest.rank:  # the first, or the same again
                self._waiting[pair] = guest
                if other is not None:
                    other.stream.close()
                return
        try:
            ends = [(end.stream.sock, self._strip(end)) for end in (other, guest)]
        except BaseException:
            other.stream.close()
            raise
        with self._lock:
            self._carried[pair] = [sock for sock, _ in ends]
        for (sock, early), (to, _) in (ends, ends[::-1]):
            sock.settimeout(None)
            name = f"pipecomp-relay-{pair[0]}-{pair[1]}"
            thread = threading.Thread(target=self._carry, args=(sock, to, early), name=name, daemon=True)
            thread.start()
            with self._lock:
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def close(self) -> None:
        """Carry no more once those that are carried have ended, which they are given some time for."""
        deadline = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            carried = [sock for pair in self._carried.values() for sock in pair]
            waiting = [guest.stream.sock for guest in self._waiting.values()]
        for sock in carried + waiting:
            close(sock)

    def _strip(self, guest: Guest) -> bytes:
        welcome(guest, self._trust, self._mine)
        return guest.stream.strip()

    def _carry(self, source: socket.socket, to: socket.socket, early: bytes) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        with contextlib.suppress(OSError):
            to.sendall(early)
            while count := source.recv_into(buffer):
                to.sendall(buffer[:count])
        for sock in (source, to):
            close(sock)
