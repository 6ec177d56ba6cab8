"""All ranks of a run, connected: they meet at rank 0's port, and each then has one connection to every other.

Rank 0 must listen where the others can reach it. The others listen if they can, which spares them rank 0's relay.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple, NoReturn

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, PeerLostError
from pipecomp.keys.listener import Address, Listener
from pipecomp.keys.stream import SecureStream
from pipecomp.keys.trust import Trust
from pipecomp.mesh import hello
from pipecomp.mesh.connection import Connection
from pipecomp.mesh.frames import LINKS
from pipecomp.mesh.hello import Guest, Place, Wish
from pipecomp.mesh.line import Way
from pipecomp.mesh.relay import Relay
from pipecomp.mesh.routes import DIRECT, Routes, address_key, connect, refuses
from pipecomp.mesh.store import MeshStore, Questions, Table

_AGAIN_S = 0.5
_CONNECT_S, _AGAIN_CONNECT_S = 5.0, 3.0
_TIMEOUT_S = 120.0
_LAST_S = 5.0
_READY_S = 180.0
_SAID = 5  # refused connections that are printed
_READY = "pipecomp/mesh/ready/{}"


class Meeting(NamedTuple):
    """Where the ranks meet.

    address: rank 0's. listen: where this rank listens: rank 0 by default at `address`, others at the address that
    leads to rank 0, with a port of the system's. quiet: whether others than rank 0 listen nowhere.
    """

    rank: int
    world: int
    address: Address
    listen: Address | None = None
    quiet: bool = False


class Mesh:
    """This rank's connections; `meet` makes it.

    connections: by rank. routes: how each goes, "direct" or "relayed by rank 0". store: torch's, of all ranks.
    """

    def __init__(self, meeting: Meeting, trust: Trust) -> None:
        self.rank, self.world = meeting.rank, meeting.world
        self.connections: dict[int, Connection] = {}
        self.routes: dict[int, str] = {}
        self._meeting, self._trust = meeting, trust
        self._place = Place(self.rank, self.world, hello.new_session() if self.rank == 0 else "")
        self._table = Table() if self.rank == 0 else None
        self._questions = None if self.rank == 0 else Questions()
        self.store = MeshStore(self.rank, self._table, self._questions)
        self._came = threading.Condition()
        self._listener: Listener | None = None
        self._relay: Relay | None = None
        self._routes: Routes | None = None
        self._refused = 0
        self._streams: dict[int, int] = {}

    def next_stream(self, peer: int) -> int:
        """A number for a link's stream, the same at both ends if they ask in the same order."""
        self._streams[peer] = self._streams.get(peer, 0) + 1
        return LINKS + self._streams[peer]

    def set_timeout(self, timeout_s: float) -> None:
        """Seconds of silence after which a rank counts as lost."""
        for connection in self.connections.values():
            connection.timeout_s = timeout_s

    def hurry(self) -> None:
        """This rank's training has failed: `close` does not wait for connections that are lost."""
        for connection in self.connections.values():
            connection.hurry = True

    def close(self) -> None:
        """End all connections in order; rank 0, which serves the store and relays, goes last."""
        every = list(self.connections.values())  # no threads: at the interpreter's end none can be started
        deadline = time.monotonic() + (_LAST_S if self.rank == 0 else 0.0)
        for connection in every:
            connection.wait_for_end(max(0.0, deadline - time.monotonic()))
        for connection in every:
            connection.say_goodbye()
        for connection in every:
            connection.finish()
        for part in (self._routes, self._relay, self._listener):
            if part is not None:
                part.close()

    # -- rank 0

    def _receive_all(self, wait_s: float) -> None:
        """Wait until all have come."""
        self._relay = Relay(self._trust, self._place)
        self._listener = Listener(self._meeting.listen or self._meeting.address, self._admit, refused=self._say_refused)
        with self._came:
            if not self._came.wait_for(lambda: len(self.connections) == self.world - 1, wait_s):
                missing = sorted(set(range(1, self.world)) - set(self.connections))
                raise LinkTimeoutError(f"rank {missing[0]} did not come to the start of the run within {wait_s:g} s")

    def _admit(self, sock: socket.socket) -> Callable[[], None]:
        guest = hello.receive(sock, self._trust, self._place, (hello.JOIN, hello.RELAY, hello.AGAIN))
        if guest.purpose == hello.AGAIN:
            return self._take_again(guest)
        if guest.purpose == hello.RELAY:
            assert self._relay is not None
            relay, wanted = self._relay, self.connections.get(guest.to)
            if wanted is not None and wanted.failure is not None:
                self._refuse(guest, f"rank {guest.to} is gone: {wanted.failure}")
            return lambda: relay.take(guest)
        with self._came:
            there = self.connections.get(guest.rank)
            if there is not None and there.line.lost:
                there.give_up(PeerLostError(f"lost rank {guest.rank}: its process was started anew", guest.rank))
                self._refuse(guest, f"rank {self.rank} still runs from the start before: start all ranks together")
            if there is not None and there.failure is None:
                self._refuse(guest, f"rank {guest.rank} is there already: give each process a RANK of its own")
        return lambda: self._let_in(guest)

    def _take_again(self, guest: Guest) -> Callable[[], None]:
        """A rank that was connected before, and lost its connection."""
        there = self.connections.get(guest.rank)
        if there is None or there.failure is not None:
            self._refuse(guest, f"rank {self.rank} has given up the connection to rank {guest.rank}")
        return lambda: there.line.adopt(
            guest.stream, guest.received, lambda count: hello.welcome(guest, self._trust, self._place, count)
        )

    def _let_in(self, guest: Guest) -> None:
        hello.welcome(guest, self._trust, self._place)
        self._connect(guest.rank, Way(guest.stream, DIRECT, waits=True, gone=lambda: self._is_gone(guest.rank)))

    def _is_gone(self, rank: int) -> bool:
        """Whether nothing listens any more where that rank did."""
        key = address_key(rank)
        text = self.store.get(key).decode() if self.store.check([key]) else ""
        return bool(text) and refuses(Address.parse(text))

    def _refuse(self, guest: Guest, reason: str) -> NoReturn:
        hello.refuse(guest.stream, reason)
        raise LinkError(f"rank {guest.rank} was refused: {reason}")

    def _say_refused(self, who: str, error: Exception) -> None:
        self._refused += 1
        if self._refused <= _SAID and not isinstance(error, (OSError, EOFError)):
            more = " (later ones are not printed)" if self._refused == _SAID else ""
            sys.stderr.write(f"pipecomp: refused a connection from {who}: {error}{more}\n")  # whole, beside others'

    # -- other ranks

    def _join(self, wait_s: float) -> None:
        """Connect to rank 0, which may not listen yet."""
        address, began = self._meeting.address, time.monotonic()
        while True:
            try:
                stream, answer = connect(address, self._trust, self._place, Wish(hello.JOIN, 0), wait_s=_CONNECT_S)
                break
            except OSError as error:
                if time.monotonic() - began > wait_s:
                    raise LinkTimeoutError(
                        f"rank {self.rank} did not find rank 0 at {address}: {error.strerror or error}. Rank 0's "
                        "machine must let that port in"
                    ) from error
                time.sleep(_AGAIN_S)
            except KeysError as error:
                raise KeysError(f"what listens at {address} is not rank 0 of this run: {error}") from error
            except hello.RefusedError as error:
                raise LinkError(f"rank 0 at {address} refuses this rank: {error}") from error
        self._place = self._place._replace(session=answer.session)
        self._connect(0, Way(stream, DIRECT, (self._dial_first,)))
        listen = self._own_address(stream)
        self._routes = Routes(self._trust, self._place, self.store, address, listen, self._take_again)

    def _dial_first(self, received: int) -> tuple[SecureStream, int]:
        wish = Wish(hello.AGAIN, 0, received=received)
        stream, answer = connect(self._meeting.address, self._trust, self._place, wish, wait_s=_AGAIN_CONNECT_S)
        return stream, answer.received

    def _own_address(self, stream: SecureStream) -> Address | None:
        if self._meeting.quiet:
            return None
        return self._meeting.listen or Address(str(stream.sock.getsockname()[0]), 0)

    def _find_all(self) -> None:
        """Connect to all other ranks but 0, at the same time."""
        others = [rank for rank in range(1, self.world) if rank != self.rank]
        if others and self._routes is not None:
            with ThreadPoolExecutor(len(others)) as pool:
                for rank, way in zip(others, pool.map(self._routes.find, others), strict=True):
                    self._connect(rank, way)

    # -- all

    def _connect(self, rank: int, way: Way) -> None:
        table, questions = self._table, self._questions if rank == 0 else None
        connection = Connection(
            rank,
            way,
            timeout_s=_TIMEOUT_S,
            called=table.serve if table is not None else None,
            answered=questions.answered if questions is not None else None,
            on_end=questions.ended if questions is not None else lambda error: None,
        )
        if questions is not None:
            questions.connection = connection
        with self._came:
            self.connections[rank], self.routes[rank] = connection, way.route
            self._came.notify_all()


def meet(meeting: Meeting, trust: Trust, *, wait_s: float) -> Mesh:
    """Meet all other ranks and connect to each.

    Args:
        meeting: Where.
        trust: This machine's keys.
        wait_s: For ranks that have not started yet.

    Returns:
        The connections, when all ranks have theirs.

    Raises:
        KeysError: Keys do not allow this rank here, or what listens at rank 0's address is not rank 0.
        LinkError: Rank 0 refuses this rank, or another one cannot be reached.
        LinkTimeoutError: A rank did not come.
    """
    if meeting.rank not in trust.identity.ranks:
        trust.check_rank(trust.identity, meeting.rank)
    made = Mesh(meeting, trust)
    try:
        if meeting.rank == 0:
            made._receive_all(wait_s)
        else:
            made._join(wait_s)
            made._find_all()
        made.store.set(_READY.format(made.rank), "")
        made.store.wait([_READY.format(rank) for rank in range(made.world)], timedelta(seconds=_READY_S))
    except BaseException:
        with contextlib.suppress(Exception):
            made.close()
        raise
    return made
