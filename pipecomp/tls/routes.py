"""Routes between two ranks other than rank 0: direct in either direction, or relayed by rank 0.

Both ranks go through the same list of attempts and publish each outcome in the key-value store.
"""

from __future__ import annotations

import contextlib
import hmac
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
from pipecomp.tls.handshake import (
    FIRST_SUBFLOW,
    ConnectReply,
    ConnectRequest,
    Credentials,
    IncomingConnection,
    RankInfo,
    SubflowId,
)
from pipecomp.tls.listener import MAX_PENDING, Address, Listener
from pipecomp.tls.resumable import Dialer
from pipecomp.tls.store import KEY_PREFIX, address_key
from pipecomp.tls.stream import NoAnswerError, SecureStream, close_socket
from pipecomp.utils.sockets import connect_with_small_packets, describe_black_hole, unacknowledged_bytes

DIRECT, RELAYED = "direct", "relayed by rank 0"
_DIRECT_S = 3.0  # for a direct TCP connection: NAT drops packets without an answer
_REPLY_S = 10.0
_ROUTE_S = 60.0  # for one attempt at both ends
_RELAY_CHUNK = 1 << 17
_LOOPBACK = "127.0.0.1"
_RELAY_CLOSE_S = 10.0  # for two relayed ranks to end their connection after rank 0 has ended its own


def connect(
    address: Address, own: RankInfo, request: ConnectRequest, *, wait_s: float, reply_s: float | None = None
) -> tuple[SecureStream, ConnectReply]:
    """Connect to a rank that listens.

    Args:
        address: The rank's address.
        own: This rank.
        request: Sent to the rank.
        wait_s: Limit for the TCP connection.
        reply_s: Limit for each message of the rank; None: the usual one. The whole handshake may take
            `handshake.HANDSHAKE_S` longer.

    Returns:
        The stream and the rank's reply.

    Raises:
        OSError: Nothing listens there.
        KeysError: The other end is not the requested rank; NoAnswerError if it hung up or stays silent.
        ConnectionRejectedError: The rank rejects the request.
        LargePacketsError: The rank answers small packets only, before and after an attempt without an answer.
    """
    reply_s = _REPLY_S if reply_s is None else reply_s
    try:
        return _connect_once(socket.create_connection(address, wait_s), own, request, reply_s)
    except _StalledError as stalled:
        if not _answers_small_packets(address, own, request.rank, wait_s, reply_s):
            raise stalled.error from stalled
    try:
        return _connect_once(socket.create_connection(address, wait_s), own, request, reply_s)
    except _StalledError as stalled:
        problem = describe_black_hole(own.rank, request.rank, address.host)
        report = ConnectRequest(handshake.REPORT, request.rank, reason=problem)

        def send_report() -> None:
            with contextlib.suppress(OSError, PipecompError):
                sock = connect_with_small_packets(address, wait_s)
                _connect_once(sock, own, report, reply_s)[0].close()

        raise handshake.LargePacketsError(problem, send_report) from stalled


class _StalledError(Exception):
    """A connection without an answer, perhaps because a large packet vanishes. error: the error without that guess."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _connect_once(
    sock: socket.socket, own: RankInfo, request: ConnectRequest, reply_s: float
) -> tuple[SecureStream, ConnectReply]:
    """Authenticate over a new TCP connection; _StalledError if a packet may have vanished on the way."""
    sock.settimeout(reply_s)
    secured = False
    try:
        within_s = handshake.HANDSHAKE_S + (reply_s if reply_s > _REPLY_S else 0.0)
        stream, peer = own.credentials.secure(sock, server=False, within_s=within_s)
        secured = True
        return stream, handshake.request_connection(stream, peer, own, request)
    except NoAnswerError as error:
        answers_at_once = request.purpose in (handshake.JOIN, handshake.PEER)
        may_have_vanished = not secured or answers_at_once or unacknowledged_bytes(sock) > 0
        close_socket(sock)
        if may_have_vanished and isinstance(error.__cause__, TimeoutError):
            raise _StalledError(error) from error
        raise
    except BaseException:
        close_socket(sock)
        raise


def _answers_small_packets(address: Address, own: RankInfo, rank: int, wait_s: float, reply_s: float) -> bool:
    """Return whether a rank completes a handshake in packets of at most 576 bytes."""
    try:
        with connect_with_small_packets(address, wait_s) as sock:
            sock.settimeout(reply_s)
            _, peer = own.credentials.secure(sock, server=False, within_s=handshake.HANDSHAKE_S)
            own.credentials.check_peer(peer)
            own.credentials.check_rank(peer, rank)
    except (OSError, PipecompError):
        return False
    return True


def connect_direct(
    address: Address,
    own: RankInfo,
    rank: int,
    purpose: str,
    subflow: SubflowId = FIRST_SUBFLOW,
    received: int = 0,
    reply_s: float | None = None,
) -> tuple[SecureStream, int]:
    """Connect to rank `rank` directly; return the stream and the number of frames that the rank has."""
    request = ConnectRequest(purpose, rank, received=received, subflow=subflow)
    stream, reply = connect(address, own, request, wait_s=_DIRECT_S, reply_s=reply_s)
    return stream, reply.received


def nothing_listens(address: Address) -> bool:
    """Return whether certainly nothing listens at an address."""
    try:
        close_socket(socket.create_connection(address, _DIRECT_S))
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class PeerListener:
    """The address at which a rank listens, as seen from here.

    # Note: why an address must be probed
    Behind tunnels, bridges and NAT a rank's address means nothing here, or belongs to another machine. A refused
    connection then does not mean that the rank is gone. It counts only once the rank itself has answered there.
    """

    def __init__(self, credentials: Credentials, rank: int, address: Address | None = None) -> None:
        self.rank, self.address, self._credentials = rank, address, credentials
        self._answered_at: Address | None = None

    def probe(self) -> None:
        """Check whether the rank answers at its address; called while it is connected."""
        address, self._answered_at = self.address, None
        if address is None:
            return
        with (
            contextlib.suppress(OSError, PipecompError),
            socket.create_connection(address, _DIRECT_S) as sock,
        ):
            sock.settimeout(_REPLY_S)
            _, peer = self._credentials.secure(sock, server=False, within_s=handshake.HANDSHAKE_S)
            self._credentials.check_peer(peer)
            self._credentials.check_rank(peer, self.rank)
            self._answered_at = address

    def is_gone(self) -> bool:
        """Return whether nothing listens any more where the rank did."""
        address = self.address
        return address is not None and self._answered_at == address and nothing_listens(address)


def wait_for_keys(store: Any, keys: dict[int, str], wait_s: float, problem: str) -> None:
    """Wait until all ranks have written their keys.

    Args:
        store: The key-value store.
        keys: Rank -> the key that it writes.
        wait_s: Limit for all of them.
        problem: Failure of a rank whose key is missing; completes "rank N".

    Raises:
        LinkTimeoutError: Names the first rank whose key is missing.
        PeerLostError: Rank 0, which holds the store, is gone.
    """
    try:
        store.wait(list(keys.values()), timedelta(seconds=wait_s))
    except dist.DistNetworkError as error:
        raise PeerLostError(str(error), 0) from error
    except dist.DistStoreError as error:
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
            keys = {rank: key for rank, key in keys.items() if not store.check([key])} or keys
        raise LinkTimeoutError(f"rank {min(keys)} {problem} within {wait_s:g} s") from error


def _machine_key(rank: int) -> str:
    """Return the key under which a rank publishes its machine, and its address for ranks there."""
    return f"{KEY_PREFIX}/machine/{rank}"


def max_pending(world: int) -> int:
    """Return the limit of unauthenticated connections at a rank's listener: all ranks may connect at once."""
    return max(MAX_PENDING, 2 * world)


class Routes:
    """This rank's routes to all ranks but rank 0.

    Args:
        own: This rank.
        store: The key-value store.
        first: Rank 0's address.
        listen: Address to listen at; None: this rank does not listen.
        host: This machine's address towards rank 0, published if `listen` means all interfaces.
        machine: A name of this machine; "" if unknown. A rank that does not listen still takes connections of ranks on
            its own machine, so that rank 0 does not relay them.
        on_resume: Takes connections and reports of ranks that were connected before, and visits of machines that wait
            to take part; returns the continuation.
    """

    def __init__(
        self,
        own: RankInfo,
        store: Any,
        first: Address,
        listen: Address | None,
        host: str,
        on_resume: Callable[[IncomingConnection], Callable[[], None]],
        machine: str = "",
    ) -> None:
        self._own, self._store, self._first, self._on_resume = own, store, first, on_resume
        self.peer_listeners: list[PeerListener] = []  # of ranks that connected to this one
        self._incoming: dict[int, SecureStream] = {}
        self._arrived = threading.Condition()
        self._listener: Listener | None = None
        published = local = ""
        if listen is not None or machine:
            with contextlib.suppress(PipecompError):
                where = listen or Address(_LOOPBACK, 0)
                self._listener = Listener(where, self._authenticate, max_pending=max_pending(own.world))
                at = self._listener.address
                local = str(Address(_LOOPBACK, at.port) if at.is_wildcard else at)
                if listen is not None:
                    published = str(Address(host, at.port) if at.is_wildcard else at)
        store.set(_machine_key(own.rank), f"{machine} {local}")
        store.set(address_key(own.rank), published)

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def find(self, other: int) -> Dialer:
        """Connect to another rank; LinkTimeoutError if there is no route."""
        low, high = sorted((self._own.rank, other))
        addresses = self._addresses(low, high)

        def relay(subflow: SubflowId, received: int, _: float) -> tuple[SecureStream, int]:
            # Short: the other end tries again and again.
            return self._connect_relayed(other, _REPLY_S, subflow, received)

        for number, (source, target) in enumerate(
            pair for pair in ((high, low), (low, high)) if addresses[pair[1]] is not None
        ):
            key = f"{KEY_PREFIX}/{low}-{high}/{number}"
            if self._own.rank == source:
                address = addresses[target]
                assert address is not None
                try:
                    stream, _ = connect_direct(address, self._own, target, handshake.PEER)
                except (OSError, PipecompError):
                    self._store.set(key, "no")
                    continue
                self._store.set(key, "yes")
                direct = partial(connect_direct, address, self._own, target, handshake.RESUME)
                return Dialer(stream, DIRECT, (direct, relay))
            if self._read(key, other, "did not report whether it reaches this rank") == "yes":
                listener = PeerListener(self._own.credentials, other, addresses[other])
                self.peer_listeners.append(listener)
                stream = self._wait_for_incoming(other)
                return Dialer(stream, DIRECT, (relay,), awaits_peer=True, is_gone=listener.is_gone)
        stream, _ = self._connect_relayed(other, _ROUTE_S)
        return Dialer(stream, RELAYED, (relay,), is_gone=partial(nothing_listens, self._first))

    def _connect_relayed(
        self, other: int, wait_s: float, subflow: SubflowId = FIRST_SUBFLOW, received: int = 0
    ) -> tuple[SecureStream, int]:
        """Connect through rank 0 within `wait_s`; return the stream and the number of frames that the other end has."""
        try:
            at_relay = SubflowId(subflow.number)  # its secret is not rank 0's business
            request = ConnectRequest(handshake.RELAY, 0, other, subflow=at_relay)  # answered once both have connected
            outer, _ = connect(self._first, self._own, request, wait_s=_DIRECT_S, reply_s=wait_s)
            try:
                return self._handshake_inside(outer, other, subflow, received)
            except BaseException:
                close_socket(outer.sock)  # otherwise the next rank that comes there would be joined with it
                raise
        except handshake.ConnectionRejectedError:
            raise
        except (OSError, EOFError, PipecompError) as error:
            raise LinkTimeoutError(
                f"rank {self._own.rank} cannot reach rank {other}, neither directly nor through rank 0: {error}"
            ) from error

    def _handshake_inside(
        self, outer: SecureStream, other: int, subflow: SubflowId, received: int
    ) -> tuple[SecureStream, int]:
        """Authenticate the other end over a connection to rank 0, which has joined it with the other end's."""
        buffered = outer.unwrap()
        if other > self._own.rank:
            incoming = handshake.receive_request(outer.sock, self._own, (handshake.PEER,), buffered)
            if incoming.rank != other:
                raise KeysError(f"rank {incoming.rank} is at the other end")
            number, secret = incoming.subflow
            if number != subflow.number or not hmac.compare_digest(secret.encode(), subflow.secret.encode()):
                raise KeysError(f"another stream of rank {other} is at the other end")
            handshake.accept(incoming, self._own, received)
            return incoming.stream, incoming.received
        within_s = handshake.HANDSHAKE_S
        inner, peer = self._own.credentials.secure(outer.sock, server=False, buffered=buffered, within_s=within_s)
        request = ConnectRequest(handshake.PEER, other, received=received, subflow=subflow)
        reply = handshake.request_connection(inner, peer, self._own, request)
        return inner, reply.received

    def _authenticate(self, sock: socket.socket) -> Callable[[], None]:
        purposes = (handshake.PEER, handshake.RESUME, handshake.REPORT, handshake.MEMBERS)
        incoming = handshake.receive_request(sock, self._own, purposes)
        if incoming.purpose != handshake.PEER:
            return self._on_resume(incoming)

        def admit() -> None:
            handshake.accept(incoming, self._own)
            with self._arrived:
                self._incoming[incoming.rank] = incoming.stream
                self._arrived.notify_all()

        return admit

    def _wait_for_incoming(self, rank: int) -> SecureStream:
        with self._arrived:
            if not self._arrived.wait_for(lambda: rank in self._incoming, _REPLY_S):
                raise LinkTimeoutError(f"rank {rank} reported a connection to this rank, but none arrived")
            return self._incoming[rank]

    def _addresses(self, low: int, high: int) -> dict[int, Address | None]:
        """Return the addresses of two ranks; those of ranks on the same machine are within it."""
        problem = "did not publish its address"
        published = {rank: self._read(address_key(rank), rank, problem) for rank in (low, high)}
        places = {rank: self._read(_machine_key(rank), rank, problem).rpartition(" ") for rank in (low, high)}
        if places[low][0] and places[low][0] == places[high][0]:
            published = {rank: local or published[rank] for rank, (_, _, local) in places.items()}
        return {rank: Address.parse(text) if text else None for rank, text in published.items()}

    def _read(self, key: str, rank: int, problem: str) -> str:
        wait_for_keys(self._store, {rank: key}, _ROUTE_S, problem)
        return str(self._store.get(key).decode())


class Relay:
    """Rank 0's relay: joins two ranks that cannot reach each other.

    # Note: confidentiality of relayed traffic
    Both ranks ask for the relay under TLS, with their certificates. TLS with rank 0 then ends, and the two ranks
    authenticate each other over the joined sockets. The relay carries ciphertext only; rank 0 cannot take the place of
    either rank, since its certificate does not allow their numbers.
    """

    def __init__(self, own: RankInfo) -> None:
        self._own = own
        self._waiting: dict[tuple[int, int, int], IncomingConnection] = {}  # by ranks and number of the subflow
        self._lock = threading.Lock()
        self._joined: dict[tuple[int, int, int], list[socket.socket]] = {}
        self._threads: list[threading.Thread] = []

    def join(self, incoming: IncomingConnection) -> None:
        """Hold a rank's connection until the other rank connects, then forward bytes both ways."""
        pair = min(incoming.rank, incoming.to), max(incoming.rank, incoming.to), incoming.subflow.number
        with self._lock:
            for sock in self._joined.pop(pair, ()):
                close_socket(sock)  # one rank has lost the connection; closing it informs the other
            other = self._waiting.pop(pair, None)
            if other is None or other.rank == incoming.rank:  # the first one, or the same one again
                self._waiting[pair] = incoming
                if other is not None:
                    other.stream.close()
                return
        ends: list[tuple[socket.socket, bytes]] = []
        try:
            for end in (other, incoming):
                handshake.accept(end, self._own)
                ends.append((end.stream.sock, end.stream.unwrap()))
        except BaseException:
            other.stream.close()
            raise
        with self._lock:
            self._joined[pair] = [sock for sock, _ in ends]
        for (source, buffered), (target, _) in (ends, ends[::-1]):
            source.settimeout(None)
            name = f"pipecomp-relay-{pair[0]}-{pair[1]}"
            thread = threading.Thread(target=_forward, args=(source, target, buffered), name=name, daemon=True)
            thread.start()
            with self._lock:
                self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def close(self) -> None:
        """Close all connections, joined ones after they have ended or some time has passed."""
        deadline = time.monotonic() + _RELAY_CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            sockets = [sock for pair in self._joined.values() for sock in pair]
            sockets += [incoming.stream.sock for incoming in self._waiting.values()]
        for sock in sockets:
            close_socket(sock)


def _forward(source: socket.socket, target: socket.socket, buffered: bytes) -> None:
    buffer = memoryview(bytearray(_RELAY_CHUNK))
    with contextlib.suppress(OSError):
        target.sendall(buffered)
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    for sock in (source, target):
        close_socket(sock)
