"""How two ranks other than rank 0 find to each other: directly, one way or the other, or relayed by rank 0.

Both go through the same list of attempts, and say in the key-value store how each went.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from pipecomp.errors import KeysError, LinkTimeoutError, PeerLostError, PipecompError
from pipecomp.tls import handshake
from pipecomp.tls.handshake import Answer, Guest, Place, Trust, Wish, welcome
from pipecomp.tls.listener import MOST_WAITING, Address, Listener
from pipecomp.tls.resumable import Way
from pipecomp.tls.stream import SecureStream, close

DIRECT, RELAYED = "direct", "relayed by rank 0"
_DIRECT_S = 3.0  # for a direct connection: behind NAT there is none, and nothing says so
_HELLO_S = 10.0
_ROUTE_S = 60.0  # for an attempt of both
_KEY = "pipecomp/tls/{}"


def connect(
    address: Address, trust: Trust, mine: Place, wish: Wish, *, wait_s: float, answer_s: float | None = None
) -> tuple[SecureStream, Answer]:
    """A connection to a rank that listens, and what it answers.

    wait_s: for it to be there. answer_s: for each of its words; None: as long as a rank takes. All together may take
    `hello.DIAL_S` more.

    OSError if nothing listens; KeysError (NoAnswerError, too) or RefusedError from `greet`.
    """
    sock = socket.create_connection((address.host, address.port), wait_s)
    sock.settimeout(_HELLO_S if answer_s is None else answer_s)
    try:
        stream, who = trust.secure(sock, server=False, within_s=handshake.DIAL_S + (answer_s or 0.0))
        return stream, handshake.greet(stream, who, trust, mine, wish)
    except BaseException:
        close(sock)
        raise


def refuses(address: Address | None) -> bool:
    """Whether nothing listens there, and that is certain."""
    if address is None:
        return False
    try:
        close(socket.create_connection((address.host, address.port), _DIRECT_S))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Door:
    """Where a rank says that it listens, as seen from here.

    Behind tunnels, bridges and NAT its address is nothing, or somebody else's, and that nothing listens there says
    nothing about the rank: it counts only once the rank itself has answered there.
    """

    def __init__(self, trust: Trust, rank: int, address: Address | None) -> None:
        self.rank, self.reached = rank, False
        self._trust, self._address = trust, address

    def knock(self) -> None:
        """See whether that rank answers there, while it is connected."""
        if self._address is None:
            return
        with contextlib.suppress(OSError, PipecompError):
            sock = socket.create_connection((self._address.host, self._address.port), _DIRECT_S)
            try:
                sock.settimeout(_HELLO_S)
                _, who = self._trust.secure(sock, server=False, within_s=handshake.DIAL_S)
                self._trust.check(who)
                self._trust.check_rank(who, self.rank)
                self.reached = True
            finally:
                close(sock)

    def gone(self) -> bool:
        """Whether nothing listens any more where that rank did."""
        return self.reached and refuses(self._address)


def wait_for_keys(store: Any, keys: dict[int, str], wait_s: float, problem: str) -> None:
    """Wait until all ranks have written their keys.

    Args:
        store: The key-value store.
        keys: By the rank that writes them.
        wait_s: For all of them.
        problem: What a rank did not do that has not written its key, after "rank N".

    Raises:
        LinkTimeoutError: Names the first rank whose key is not there in time.
        PeerLostError: Rank 0, which has the store, is gone.
    """
    try:
        store.wait(list(keys.values()), timedelta(seconds=wait_s))
    except dist.DistNetworkError as error:
        raise PeerLostError(str(error), 0) from error
    except dist.DistStoreError as error:
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
            keys = {rank: key for rank, key in keys.items() if not store.check([key])} or keys
        raise LinkTimeoutError(f"rank {min(keys)} {problem} within {wait_s:g} s") from error


def most_waiting(world: int) -> int:
    """How many connections a rank's listener lets wait for a first word: all ranks may come at the same time."""
    return max(MOST_WAITING, 2 * world)


def address_key(rank: int) -> str:
    """Where a rank says in the key-value store where it listens; empty for nowhere."""
    return _KEY.format(f"address/{rank}")


class Routes:
    """This rank's way to each other rank but 0."""

    def __init__(
        self,
        trust: Trust,
        mine: Place,
        store: Any,
        first: Address,
        listen: Address | None,
        host: str,
        again: Callable[[Guest], Callable[[], None]],
    ) -> None:
        """first: rank 0's address. listen: where this rank may listen; None if nowhere.

        host: the address that leads to rank 0, which others are told where `listen` is all interfaces. again: takes
        ranks that were connected before; returns what to do next.
        """
        self._trust, self._mine, self._store, self._first, self._again = trust, mine, store, first, again
        self.doors: list[Door] = []  # of ranks that made the connections, and could not be asked whether they listen
        self._guests: dict[int, Guest] = {}
        self._came = threading.Condition()
        self._listener: Listener | None = None
        said = ""
        if listen is not None:
            with contextlib.suppress(PipecompError):
                self._listener = Listener(listen, self._admit, most_waiting=most_waiting(mine.world))
                at = self._listener.address
                said = str(Address(host, at.port) if at.everywhere else at)
        store.set(address_key(mine.rank), said)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def find(self, other: int) -> Way:
        """The way to another rank. LinkTimeoutError if there is none."""
        me = self._mine.rank
        low, high = min(me, other), max(me, other)
        at = {rank: self._address(rank) for rank in (low, high)}
        around = partial(self._relayed, other, _HELLO_S)  # the other side comes there again and again
        attempts = [(a, b) for a, b in ((high, low), (low, high)) if at[b] is not None]
        for number, (source, target) in enumerate(attempts):
            key = _KEY.format(f"{low}-{high}/{number}")
            if me == source:
                address = at[target]
                assert address is not None
                try:
                    stream, _ = self._direct(address, Wish(handshake.PEER, target))
                except (OSError, PipecompError):
                    self._store.set(key, "no")
                    continue
                self._store.set(key, "yes")
                return Way(stream, DIRECT, (partial(self._once_more, address, target), around))
            if self._read(key, other, "did not say whether it reaches this rank") == "yes":
                door = Door(self._trust, other, at[other])
                self.doors.append(door)
                return Way(self._guest(other), DIRECT, (around,), waits=True, gone=door.gone)
        return Way(self._relayed(other, _ROUTE_S, 0)[0], RELAYED, (around,), gone=partial(refuses, self._first))

    def _direct(self, address: Address, wish: Wish) -> tuple[SecureStream, int]:
        stream, answer = connect(address, self._trust, self._mine, wish, wait_s=_DIRECT_S)
        return stream, answer.received

    def _once_more(self, address: Address, target: int, received: int) -> tuple[SecureStream, int]:
        return self._direct(address, Wish(handshake.AGAIN, target, received=received))

    def _relayed(self, other: int, wait_s: float, received: int) -> tuple[SecureStream, int]:
        """A stream, and how many frames the other side has; wait_s: for it to come, too."""
        try:
            wish = Wish(handshake.RELAY, 0, other)  # which rank 0 answers when the other side has come
            outer, _ = connect(self._first, self._trust, self._mine, wish, wait_s=_DIRECT_S, answer_s=wait_s)
            try:
                return self._through(outer, other, received)
            except BaseException:
                close(outer.sock)  # or who comes there next would be joined with it
                raise
        except handshake.RefusedError:
            raise
        except (OSError, EOFError, PipecompError) as error:
            raise LinkTimeoutError(
                f"rank {self._mine.rank} cannot reach rank {other}, neither directly nor through rank 0: {error}"
            ) from error

    def _through(self, outer: SecureStream, other: int, received: int) -> tuple[SecureStream, int]:
        """The same over a connection to rank 0, which has joined it with the other side's."""
        early = outer.strip()
        if other > self._mine.rank:
            guest = handshake.receive(outer.sock, self._trust, self._mine, (handshake.PEER,), early)
            if guest.rank != other:
                raise KeysError(f"rank {guest.rank} is at the other end")
            handshake.welcome(guest, self._trust, self._mine, received)
            return guest.stream, guest.received
        inner, who = self._trust.secure(outer.sock, server=False, early=early, within_s=handshake.DIAL_S)
        answer = handshake.greet(inner, who, self._trust, self._mine, Wish(handshake.PEER, other, received=received))
        return inner, answer.received

    def _admit(self, sock: socket.socket) -> Callable[[], None]:
        guest = handshake.receive(sock, self._trust, self._mine, (handshake.PEER, handshake.AGAIN))
        if guest.purpose == handshake.AGAIN:
            return self._again(guest)

        def come() -> None:
            handshake.welcome(guest, self._trust, self._mine)
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
        text = self._read(address_key(rank), rank, "did not say where it listens")
        return Address.parse(text) if text else None

    def _read(self, key: str, rank: int, problem: str) -> str:
        """What `rank` writes. LinkTimeoutError names it."""
        wait_for_keys(self._store, {rank: key}, _ROUTE_S, problem)
        return str(self._store.get(key).decode())


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
