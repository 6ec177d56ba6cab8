"""How two ranks other than rank 0 find to each other: directly, one way or the other, or relayed by rank 0.

Both go through the same list of attempts, and say in the key-value store how each went.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipecomp.errors import KeysError, LinkTimeoutError, PipecompError
from pipecomp.keys.listener import Address, Listener
from pipecomp.keys.stream import SecureStream, close
from pipecomp.keys.trust import Trust
from pipecomp.mesh import hello
from pipecomp.mesh.hello import Guest, Place

DIRECT, RELAYED = "direct", "relayed by rank 0"
_DIRECT_S = 3.0  # for a direct connection: behind NAT there is none, and nothing says so
_HELLO_S = 10.0
_ROUTE_S = 60.0  # for an attempt of both
_KEY = "pipecomp/mesh/{}"


def connect(address: Address, trust: Trust, mine: Place, *, wait_s: float, **wanted: Any) -> tuple[SecureStream, str]:
    """A connection to a rank that listens, and its session; wanted: as for `hello.greet`.

    OSError if nothing listens; KeysError or RefusedError from `greet`.
    """
    sock = socket.create_connection((address.host, address.port), wait_s)
    sock.settimeout(_HELLO_S)
    try:
        stream, who = trust.secure(sock, server=False)
        return stream, hello.greet(stream, who, trust, mine, **wanted)
    except BaseException:
        close(sock)
        raise


class Routes:
    """This rank's way to each other rank but 0. listener: its own, None if it cannot have one."""

    def __init__(self, trust: Trust, mine: Place, store: Any, first: Address, listen: Address | None) -> None:
        """first: rank 0's address. listen: where this rank may listen; None if nowhere."""
        self._trust, self._mine, self._store, self._first = trust, mine, store, first
        self._guests: dict[int, Guest] = {}
        self._came = threading.Condition()
        self._listener: Listener | None = None
        said = ""
        if listen is not None:
            with contextlib.suppress(PipecompError):
                self._listener = Listener(listen, self._admit)
                said = str(self._listener.address)
        store.set(_KEY.format(f"address/{mine.rank}"), said)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def find(self, other: int) -> tuple[SecureStream, str]:
        """A stream to another rank, and how it goes there. LinkTimeoutError if there is no way."""
        me = self._mine.rank
        low, high = min(me, other), max(me, other)
        at = {rank: self._address(rank) for rank in (low, high)}
        attempts = [(a, b) for a, b in ((high, low), (low, high)) if at[b] is not None]
        for number, (source, target) in enumerate(attempts):
            key = _KEY.format(f"{low}-{high}/{number}")
            if me == source:
                address = at[target]
                assert address is not None
                try:
                    stream, _ = connect(
                        address, self._trust, self._mine, wait_s=_DIRECT_S, purpose=hello.PEER, rank=target
                    )
                except (OSError, PipecompError):
                    self._store.set(key, "no")
                    continue
                self._store.set(key, "yes")
                return stream, DIRECT
            if self._read(key) == "yes":
                return self._guest(other), DIRECT
        return self._relayed(other), RELAYED

    def _relayed(self, other: int) -> SecureStream:
        wanted = {"purpose": hello.RELAY, "rank": 0, "to": other}
        try:
            outer, _ = connect(self._first, self._trust, self._mine, wait_s=_HELLO_S, **wanted)
            outer.sock.settimeout(_ROUTE_S)
            early = outer.strip()
            if other > self._mine.rank:
                guest = hello.receive(outer.sock, self._trust, self._mine, (hello.PEER,), early)
                if guest.rank != other:
                    raise KeysError(f"rank {guest.rank} is at the other end")
                hello.welcome(guest, self._trust, self._mine)
                return guest.stream
            inner, who = self._trust.secure(outer.sock, server=False, early=early)
            hello.greet(inner, who, self._trust, self._mine, purpose=hello.PEER, rank=other)
        except (OSError, EOFError, PipecompError) as error:
            raise LinkTimeoutError(
                f"rank {self._mine.rank} cannot reach rank {other}, neither directly nor through rank 0: {error}"
            ) from error
        return inner

    def _admit(self, sock: socket.socket) -> Callable[[], None]:
        guest = hello.receive(sock, self._trust, self._mine, (hello.PEER,))

        def come() -> None:
            hello.welcome(guest, self._trust, self._mine)
            with self._came:
                self._guests[guest.rank] = guest
                self._came.notify_all()

        return come

    def _guest(self, rank: int) -> SecureStream:
        with self._came:
            if not self._came.wait_for(lambda: rank in self._guests, _HELLO_S):
                raise LinkTimeoutError(f"rank {rank} did not come, though it said so")
            return self._guests[rank].stream

    def _address(self, rank: int) -> Address | None:
        text = self._read(_KEY.format(f"address/{rank}"))
        return Address.parse(text) if text else None

    def _read(self, key: str) -> str:
        self._store.wait([key], timedelta(seconds=_ROUTE_S))
        return str(self._store.get(key).decode())
