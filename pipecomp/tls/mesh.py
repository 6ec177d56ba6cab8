"""All ranks of a run, connected: they meet at rank 0's port, and each then has one connection to every other.

Rank 0 must listen where the others can reach it. The others listen if they can, which spares them rank 0's relay.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, PeerLostError
from pipecomp.tls import handshake
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import LINKS
from pipecomp.tls.handshake import Guest, Place, Trust, Wish
from pipecomp.tls.listener import EVERYWHERE, Address, Listener, places
from pipecomp.tls.resumable import Way
from pipecomp.tls.routes import DIRECT, Door, Relay, Routes, address_key, connect, most_waiting, wait_for_keys
from pipecomp.tls.store import MeshStore, Questions, Table
from pipecomp.tls.stream import NoAnswerError, SecureStream

_AGAIN_S = 0.5
_CONNECT_S, _AGAIN_CONNECT_S = 5.0, 3.0
_TIMEOUT_S = 120.0
_LAST_S = 5.0
_READY_S = 180.0
_SAID = 5  # refused connections that are printed
_READY = "pipecomp/tls/ready/{}"


class Meeting(NamedTuple):
    """Where the ranks meet.

    address: rank 0's. listen: where this rank listens: rank 0 by default at `address`, or at all interfaces where its
    machine knows itself by a loopback address only, others at the address that leads to rank 0, with a port of the
    system's. quiet: whether others than rank 0 listen nowhere.
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
        self._place = Place(self.rank, self.world, handshake.new_session() if self.rank == 0 else "")
        self._table = Table() if self.rank == 0 else None
        self._questions = None if self.rank == 0 else Questions()
        self.store = MeshStore(self.rank, self._table, self._questions)
        self._came = threading.Condition()
        self._listener: Listener | None = None
        self._relay: Relay | None = None
        self._routes: Routes | None = None
        self._complete = self._over = False  # whether rank 0 has seen all ranks, and takes none any more
        self._doors: dict[int, Door] = {}
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

    def close(self, reason: str = "") -> None:
        """End all connections in order; rank 0, which serves the store and relays, goes last.

        reason: for the others, why this rank does not go on, which then waits for nobody.
        """
        with self._came:
            self._over = True
            every = list(self.connections.values())  # no threads: at the interpreter's end none can be started
        deadline = time.monotonic() + (_LAST_S if self.rank == 0 and not reason else 0.0)
        for connection in every:
            connection.wait_for_end(max(0.0, deadline - time.monotonic()))
        for connection in every:
            connection.say_goodbye(reason)
        for connection in every:
            connection.finish()
        for part in (self._routes, self._listener, self._relay):
            if part is not None:
                part.close()

    # -- rank 0

    def _receive_all(self, wait_s: float) -> None:
        """Wait until all have come."""
        self._relay = Relay(self._trust, self._place)
        self._listener = Listener(
            self._meeting.listen or default_listen(self._meeting.address, self.world),
            self._admit,
            refused=self._say_refused,
            most_waiting=most_waiting(self.world),
        )
        with self._came:
            if not self._came.wait_for(lambda: len(self.connections) == self.world - 1, wait_s):
                missing = sorted(set(range(1, self.world)) - set(self.connections))
                raise LinkTimeoutError(f"rank {missing[0]} did not come to the start of the run within {wait_s:g} s")
            self._complete = True

    def _admit(self, sock: socket.socket) -> Callable[[], None]:
        guest = handshake.receive(sock, self._trust, self._place, (handshake.JOIN, handshake.RELAY, handshake.AGAIN))
        if guest.purpose == handshake.AGAIN:
            return self._take_again(guest)
        if guest.purpose == handshake.RELAY:
            assert self._relay is not None
            if guest.to not in range(1, self.world) or guest.to == guest.rank:
                self._refuse(guest, f"there is no rank {guest.to} that rank {guest.rank} could be relayed to")
            relay, wanted = self._relay, self.connections.get(guest.to)
            if wanted is not None and wanted.failure is not None:
                self._refuse(guest, f"rank {guest.to} is gone: {wanted.failure}")
            return lambda: relay.take(guest)
        with self._came:
            there = self.connections.get(guest.rank)
            if self._over or (self._complete and there is not None and there.failure is not None):
                raise EOFError  # this start is over for it: it comes again, and waits for the next one
            if there is not None and there.line.lost:
                there.give_up(PeerLostError(f"lost rank {guest.rank}: its process was started anew", guest.rank))
                if self._complete:  # before, it may have missed the answer, and nothing hangs on its first connection
                    self._refuse(guest, f"rank {self.rank} still runs from the start before: start all ranks together")
            if there is not None and there.failure is None:
                self._refuse(guest, f"rank {guest.rank} is there already: give each process a RANK of its own")
        return lambda: self._let_in(guest)

    def _take_again(self, guest: Guest) -> Callable[[], None]:
        """A rank that was connected before, and lost its connection."""
        there = self.connections.get(guest.rank)
        if there is None:  # this rank is still about to take the lost one: the other side comes again
            raise EOFError
        if there.failure is not None:
            self._refuse(guest, f"rank {self.rank} has given up the connection to rank {guest.rank}")
        return lambda: there.line.adopt(
            guest.stream, guest.received, lambda count: handshake.welcome(guest, self._trust, self._place, count)
        )

    def _let_in(self, guest: Guest) -> None:
        handshake.welcome(guest, self._trust, self._place)
        self._connect(guest.rank, Way(guest.stream, DIRECT, waits=True, gone=lambda: self._is_gone(guest.rank)))

    def _is_gone(self, rank: int) -> bool:
        """Whether nothing listens any more where that rank did."""
        door = self._doors.get(rank)
        return door is not None and door.gone()

    def _knock(self) -> None:
        """See which ranks that made their connections answer where they say that they listen."""
        if self._routes is not None:
            doors = list(self._routes.doors)
        else:
            texts = {rank: self.store.get(address_key(rank)).decode() for rank in self.connections}
            doors = []
            for rank, text in texts.items():
                with contextlib.suppress(ValueError):  # empty for nowhere
                    doors.append(Door(self._trust, rank, Address.parse(text)))
            self._doors = {door.rank: door for door in doors}
        for door in doors:
            door.knock()

    def _refuse(self, guest: Guest, reason: str) -> NoReturn:
        handshake.refuse(guest.stream, reason)
        raise LinkError(f"rank {guest.rank} was refused: {reason}")

    def _say_refused(self, who: str, error: Exception) -> None:
        if isinstance(error, (OSError, EOFError)):  # somebody who looks whether this rank listens
            return
        self._refused += 1
        if self._refused <= _SAID:
            more = " (later ones are not printed)" if self._refused == _SAID else ""
            sys.stderr.write(f"pipecomp: refused a connection from {who}: {error}{more}\n")  # whole, beside others'

    # -- other ranks

    def _join(self, wait_s: float) -> None:
        """Connect to rank 0, which may not listen yet."""
        address, began = self._meeting.address, time.monotonic()
        while True:
            try:
                stream, answer = connect(address, self._trust, self._place, Wish(handshake.JOIN, 0), wait_s=_CONNECT_S)
                break
            except (OSError, NoAnswerError) as error:  # also a tunnel or a proxy in front of a rank 0 that comes later
                if time.monotonic() - began > wait_s:
                    why = getattr(error, "strerror", None) or error
                    raise LinkTimeoutError(
                        f"rank {self.rank} did not find rank 0 at {address}: {why}. Rank 0's machine must let that "
                        "port in"
                    ) from error
                time.sleep(_AGAIN_S)
            except KeysError as error:
                raise KeysError(f"what listens at {address} is not rank 0 of this run: {error}") from error
            except handshake.RefusedError as error:
                raise LinkError(f"rank 0 at {address} refuses this rank: {error}") from error
        self._place = self._place._replace(session=answer.session)
        self._connect(0, Way(stream, DIRECT, (self._dial_first,)))
        host = str(stream.sock.getsockname()[0])
        listen = None if self._meeting.quiet else self._meeting.listen or Address(host, 0)
        self._routes = Routes(self._trust, self._place, self.store, address, listen, host, self._take_again)

    def _dial_first(self, received: int) -> tuple[SecureStream, int]:
        wish = Wish(handshake.AGAIN, 0, received=received)
        stream, answer = connect(self._meeting.address, self._trust, self._place, wish, wait_s=_AGAIN_CONNECT_S)
        return stream, answer.received

    def _find_all(self, wait_s: float) -> None:
        """Connect to all other ranks but 0, at the same time, once all have come to rank 0."""
        others = {rank: address_key(rank) for rank in range(1, self.world) if rank != self.rank}
        wait_for_keys(self.store, others, wait_s, "did not come to the start of the run")
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                for found in [pool.submit(self._find, rank) for rank in others]:
                    found.result()

    def _find(self, rank: int) -> None:
        """Connect to another rank; at once, for the other side may be silent for a part of its timeout only."""
        assert self._routes is not None
        self._connect(rank, self._routes.find(rank))

    # -- all

    def _wait_for_all(self) -> None:
        """Until all ranks are connected. Rank 0 raises what has ended one, and so ends the waiting of the others."""
        ready = {rank: _READY.format(rank) for rank in range(self.world)}
        problem = "did not connect to all others"
        if self._table is None:
            wait_for_keys(self.store, ready, _READY_S, problem)
            return
        began = time.monotonic()
        while not self._table.wait(list(ready.values()), _AGAIN_S):
            for connection in self.connections.values():
                if connection.failure is not None:
                    raise connection.failure
            if time.monotonic() - began > _READY_S:
                missing = min(rank for rank, key in ready.items() if not self._table.has([key]))
                raise LinkTimeoutError(f"rank {missing} {problem} within {_READY_S:g} s")

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


def default_listen(address: Address, world: int) -> Address:
    """Where rank 0 listens that is reached at `address`.

    A machine's own name often stands for 127.0.1.1 there, as on Debian, where no other machine comes in: with several
    ranks it listens at all interfaces then.
    """
    if world == 1 or address.number is not None or address.host == "localhost":
        return address
    with contextlib.suppress(OSError):  # the listener says what is wrong with it
        if any(ipaddress.ip_address(host.partition("%")[0]).is_loopback for _, host in places(address)):
            return Address(EVERYWHERE, address.port)
    return address


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
            made._find_all(wait_s)
        made.store.set(_READY.format(made.rank), "")
        made._wait_for_all()
        threading.Thread(target=made._knock, name="pipecomp-knock", daemon=True).start()
    except BaseException as error:
        with contextlib.suppress(Exception):
            made.close(f"{type(error).__name__}: {error}".rstrip(": "))
        raise
    return made
