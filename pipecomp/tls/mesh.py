"""The mesh: connections among all ranks of a run. Ranks join at rank 0's port; then each connects to every other.

Rank 0 must listen where the others can reach it. The others listen if they can, which spares them rank 0's relay.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, NoReturn

from pipecomp.errors import ConfigError, KeysError, LinkError, LinkTimeoutError, PeerLostError
from pipecomp.tls import handshake
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import FIRST_LINK_STREAM
from pipecomp.tls.handshake import ConnectRequest, Credentials, IncomingConnection, RankInfo
from pipecomp.tls.listener import ALL_INTERFACES, Address, Listener, resolve
from pipecomp.tls.resumable import Dialer
from pipecomp.tls.routes import DIRECT, PeerListener, Relay, Routes, connect, connect_direct, max_pending, wait_for_keys
from pipecomp.tls.store import KeyValueTable, MeshStore, PendingRequests, address_key, ready_key
from pipecomp.tls.stream import NoAnswerError

_RETRY_S = 0.5
_CONNECT_S = 5.0
_TIMEOUT_S = 120.0
_LAST_S = 30.0  # rank 0 gives the others to close first: on a busy machine they may be late
_READY_S = 180.0
_MAX_LOGGED = 5  # rejected connections
_VISIT_S = 15.0  # age of a visit of a machine that still waits
_MAX_VISITORS = 64


class JoinConfig(NamedTuple):
    """This rank, and the addresses for joining the run.

    address: rank 0's. listen: where this rank listens. By default rank 0 listens at `address`, or at all interfaces if
    its machine resolves `address` to a loopback address only; the others listen at their address towards rank 0, with a
    free port. quiet: True if only rank 0 listens. machine: a name of this machine, for connections within it.
    """

    rank: int
    world: int
    address: Address
    listen: Address | None = None
    quiet: bool = False
    machine: str = ""


class Mesh:
    """This rank's connections to all others; `connect_mesh` makes it.

    Attributes: connections: by rank. routes: by rank, DIRECT or RELAYED. store: torch's, shared by all ranks. book: of
    rank 0, the addresses of the run's machines by place, for machines that wait to take part.
    """

    def __init__(self, config: JoinConfig, credentials: Credentials) -> None:
        self.rank, self.world = config.rank, config.world
        self.connections: dict[int, Connection] = {}
        self.routes: dict[int, str] = {}
        self._config = config
        self._own = RankInfo(credentials, self.rank, self.world, secrets.token_hex(16) if self.rank == 0 else "")
        self._table = KeyValueTable() if self.rank == 0 else None
        self._requests = None if self.rank == 0 else PendingRequests()
        self.store = MeshStore(self.rank, self._table, self._requests)
        self._changed = threading.Condition()
        self._listener: Listener | None = None
        self._relay: Relay | None = None
        self._routes: Routes | None = None
        self._complete = self._closed = False  # all ranks have joined; no further rank is admitted
        self._peer_listeners: list[PeerListener] = []  # of rank 0
        self._rejected = 0
        self.book: dict[str, str] = {}
        self._visits: dict[int, float] = {}  # by lowest certified rank: when it was here last
        self._problem: LinkError | None = None  # of a rank that could not join
        self._streams: dict[int, int] = {}

    def next_stream(self, peer: int) -> int:
        """Return a new link's stream number, equal at both ends if they call in the same order."""
        self._streams[peer] = self._streams.get(peer, 0) + 1
        return FIRST_LINK_STREAM + self._streams[peer]

    def set_timeout(self, timeout_s: float) -> None:
        """Set the silence after which a rank is lost."""
        for connection in self.connections.values():
            connection.timeout_s = timeout_s

    def hurry(self) -> None:
        """Make `close` not wait for connections that are down, because this rank's training has failed."""
        for connection in self.connections.values():
            connection.hurry = True

    def close(self, reason: str = "") -> None:
        """End all connections; rank 0, which serves the store and the relay, closes last.

        Args:
            reason: Reason for the end, sent to the others. If set, nothing is waited for.
        """
        with self._changed:
            self._closed = True
            connections = list(self.connections.values())  # in turn: at the interpreter's end no thread can be started
        deadline = time.monotonic() + (_LAST_S if self.rank == 0 and not reason else 0.0)
        for connection in connections:
            connection.wait_for_end(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.close_gracefully(reason)
        for connection in connections:
            connection.finish()
        for part in (self._routes, self._listener, self._relay):
            if part is not None:
                part.close()

    # -- rank 0

    def _admit_all(self, wait_s: float) -> None:
        """Listen, and wait until all ranks have joined."""
        self._relay = Relay(self._own)
        self._listener = Listener(
            self._config.listen or default_listen(self._config.address, self.world),
            self._authenticate,
            on_rejected=self._log_rejected,
            max_pending=max_pending(self.world),
        )
        with self._changed:
            joined = self._changed.wait_for(lambda: self._problem or len(self.connections) == self.world - 1, wait_s)
            if self._problem is not None:
                raise self._problem
            if not joined:
                missing = min(set(range(1, self.world)) - set(self.connections))
                raise LinkTimeoutError(f"rank {missing} did not join the run within {wait_s:g} s")
            self._complete = True

    def _authenticate(self, sock: socket.socket) -> Callable[[], None]:
        purposes = (handshake.JOIN, handshake.RELAY, handshake.RESUME, handshake.REPORT, handshake.MEMBERS)
        incoming = handshake.receive_request(sock, self._own, purposes)
        rank, to = incoming.rank, incoming.to
        if incoming.purpose in (handshake.RESUME, handshake.REPORT, handshake.MEMBERS):
            return self._resume(incoming)
        if incoming.purpose == handshake.RELAY:
            assert self._relay is not None
            if to not in range(1, self.world) or to == rank:
                self._reject(incoming, f"there is no rank {to} that rank {rank} could be relayed to")
            relay, target = self._relay, self.connections.get(to)
            if target is not None and target.failure is not None:
                self._reject(incoming, f"rank {to} is gone: {target.failure}")
            return lambda: relay.join(incoming)
        with self._changed:
            known = self.connections.get(rank)
            if self._closed or (self._complete and known is not None and known.failure is not None):
                raise EOFError  # this start is over for the rank: it retries, and joins the next one
            if known is not None and known.resumable.is_down:
                known.fail(PeerLostError(f"lost rank {rank}: its process was restarted", rank))
                if self._complete:  # before, the rank may have missed the reply, and nothing depends on it yet
                    self._reject(incoming, "rank 0 still runs from the previous start. Start all ranks together")
            if known is not None and known.failure is None:
                self._reject(incoming, f"rank {rank} has joined already. Give each process its own RANK")

        def admit() -> None:
            handshake.accept(incoming, self._own)
            listener = PeerListener(self._own.credentials, rank)
            self._peer_listeners.append(listener)
            self._add(rank, Dialer(incoming.stream, DIRECT, awaits_peer=True, is_gone=listener.is_gone))

        return admit

    def _resume(self, incoming: IncomingConnection) -> Callable[[], None]:
        """Take a new TCP connection of a rank whose connection was cut, its report why there is none, or a visit."""
        if incoming.purpose == handshake.MEMBERS:
            return partial(self._answer_visit, incoming)
        known = self.connections.get(incoming.rank)
        if incoming.purpose == handshake.REPORT:
            return partial(self._take_report, incoming)
        if known is None:  # this rank is about to add the connection: the other end retries
            raise EOFError
        if known.failure is not None:
            why = f"rank {self.rank} has given up the connection to rank {incoming.rank}: {known.failure}"
            self._reject(incoming, why)
        try:
            known.check_admission(incoming)
        except LinkError as error:
            self._reject(incoming, str(error))
        return lambda: known.admit(incoming, partial(handshake.accept, incoming, self._own))

    def _answer_visit(self, incoming: IncomingConnection) -> None:
        """Note a machine that waits to take part, and answer whether this start has begun without it."""
        certified = self._own.credentials.certified  # empty in the run's first start
        began = self._complete or bool(certified) or incoming.rank >= self.world
        with self._changed:
            if began and (incoming.rank in self._visits or len(self._visits) < _MAX_VISITORS):
                self._visits[incoming.rank] = time.monotonic()
        answer = {"running": began, "book": self.book, "member": incoming.rank in (certified or range(self.world))}
        incoming.stream.send_json({**answer, "revoked": self._own.credentials.revocation_list})
        incoming.stream.close()

    def visitors(self) -> list[int]:
        """Return the lowest certified ranks of the machines that wait to take part, which are none of this start."""
        certified = self._own.credentials.certified or tuple(range(self.world))
        oldest = time.monotonic() - _VISIT_S
        with self._changed:
            self._visits = {rank: at for rank, at in self._visits.items() if at > oldest}
            return [rank for rank in self._visits if rank not in certified]

    def _take_report(self, incoming: IncomingConnection) -> None:
        """End the connection to a rank, or the joining, for the reason that the rank has reported."""
        error = LinkError(f"{incoming.reason} (told by rank {incoming.rank})")
        with self._changed:
            known = self.connections.get(incoming.rank)
            if known is None and not self._complete:
                self._problem = error
                self._changed.notify_all()
        handshake.accept(incoming, self._own)
        if known is not None:
            known.fail(error)

    def _probe_listeners(self) -> None:
        """Check which of the ranks that connected to this one answer at their addresses."""
        for listener in self._peer_listeners:  # rank 0's, which learns the addresses only now
            with contextlib.suppress(ConfigError):  # empty: the rank does not listen
                listener.address = Address.parse(self.store.get(address_key(listener.rank)).decode())
        for listener in self._peer_listeners if self._routes is None else list(self._routes.peer_listeners):
            listener.probe()

    def _reject(self, incoming: IncomingConnection, reason: str) -> NoReturn:
        handshake.reject(incoming.stream, reason)
        raise LinkError(f"rank {incoming.rank} was rejected: {reason}")

    def _log_rejected(self, host: str, error: Exception) -> None:
        if isinstance(error, (OSError, EOFError)):  # a probe of this rank's port
            return
        self._rejected += 1
        if self._rejected <= _MAX_LOGGED:
            more = " (later ones are not logged)" if self._rejected == _MAX_LOGGED else ""
            sys.stderr.write(f"pipecomp: rejected a connection from {host}: {error}{more}\n")  # whole lines

    # -- other ranks

    def _join(self, wait_s: float) -> None:
        """Connect to rank 0, which may not listen yet."""
        address, began = self._config.address, time.monotonic()
        request = ConnectRequest(handshake.JOIN, 0)
        while True:
            try:
                stream, reply = connect(address, self._own, request, wait_s=_CONNECT_S)
                break
            except handshake.LargePacketsError as error:
                error.report()
                raise LinkError(str(error)) from error
            except (OSError, NoAnswerError) as error:  # a tunnel or a proxy may answer before rank 0 listens
                if time.monotonic() - began > wait_s:
                    cause = getattr(error, "strerror", None) or error
                    problem = f"rank {self.rank} did not find rank 0 at {address}: {cause}"
                    raise LinkTimeoutError(f"{problem}. Rank 0's machine must accept connections there") from error
                time.sleep(_RETRY_S)
            except KeysError as error:
                raise KeysError(f"what listens at {address} is not rank 0 of this run: {error}") from error
            except handshake.ConnectionRejectedError as error:
                raise LinkError(f"rank 0 at {address} rejects this rank: {error}") from error
        self._own = self._own._replace(session=reply.session)
        redial = partial(connect_direct, address, self._own, 0, handshake.RESUME)
        self._add(0, Dialer(stream, DIRECT, (redial,)))
        host = str(stream.sock.getsockname()[0])
        listen = None if self._config.quiet else self._config.listen or Address(host, 0)
        self._routes = Routes(self._own, self.store, address, listen, host, self._resume, self._config.machine)

    def _connect_others(self, wait_s: float) -> None:
        """Connect to all ranks but rank 0 in parallel, once all have joined."""
        others = {rank: address_key(rank) for rank in range(1, self.world) if rank != self.rank}
        wait_for_keys(self.store, others, wait_s, "did not join the run")
        routes = self._routes
        assert routes is not None
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                # Added at once: the peer accepts silence only for a part of its timeout.
                for future in [pool.submit(lambda r=rank: self._add(r, routes.find(r))) for rank in others]:  # type: ignore[misc]
                    future.result()

    # -- all ranks

    def _wait_for_all(self) -> None:
        """Wait until all ranks are connected. Rank 0 raises the first connection's failure, and so wakes the others."""
        ready = {rank: ready_key(rank) for rank in range(self.world)}
        problem = "did not connect to all others"
        if self._table is None:
            wait_for_keys(self.store, ready, _READY_S, problem)
            return
        began = time.monotonic()
        while not self._table.wait(list(ready.values()), _RETRY_S):
            for connection in self.connections.values():
                if connection.failure is not None:
                    raise connection.failure
            if time.monotonic() - began > _READY_S:
                missing = min(rank for rank, key in ready.items() if not self._table.has([key]))
                raise LinkTimeoutError(f"rank {missing} {problem} within {_READY_S:g} s")

    def _add(self, rank: int, dialer: Dialer) -> None:
        requests = self._requests if rank == 0 else None
        connection = Connection(
            rank,
            dialer,
            timeout_s=_TIMEOUT_S,
            on_store_request=None if self._table is None else self._table.serve,
            on_store_reply=None if requests is None else requests.complete,
            on_end=(lambda error: None) if requests is None else requests.fail,
        )
        if requests is not None:
            requests.connection = connection
        with self._changed:
            self.connections[rank], self.routes[rank] = connection, dialer.route
            self._changed.notify_all()


def default_listen(address: Address, world: int) -> Address:
    """Return rank 0's default listening address, given the address at which the others reach it.

    A machine often resolves its own name to 127.0.1.1, as Debian does, where no other machine can connect. With several
    ranks it listens at all interfaces then.
    """
    if world == 1 or address.ip is not None or address.host == "localhost":
        return address
    with contextlib.suppress(OSError):  # the listener reports the problem
        if any(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for _, ip in resolve(address)):
            return Address(ALL_INTERFACES, address.port)
    return address


def connect_mesh(config: JoinConfig, credentials: Credentials, *, wait_s: float) -> Mesh:
    """Join the run and connect to all other ranks.

    Args:
        config: This rank and the addresses.
        credentials: This machine's keys.
        wait_s: Limit for ranks that have not started yet.

    Returns:
        The mesh, once all ranks are connected to all others.

    Raises:
        KeysError: The keys do not allow this rank here, or something else listens at rank 0's address.
        LinkError: Rank 0 rejects this rank, or another rank cannot be reached.
        LinkTimeoutError: A rank did not join.
    """
    credentials.check_rank(credentials.identity, config.rank)
    mesh = Mesh(config, credentials)
    try:
        if config.rank == 0:
            mesh._admit_all(wait_s)
        else:
            mesh._join(wait_s)
            mesh._connect_others(wait_s)
        mesh.store.set(ready_key(mesh.rank), "")
        mesh._wait_for_all()
        threading.Thread(target=mesh._probe_listeners, name="pipecomp-probe", daemon=True).start()
    except BaseException as error:
        with contextlib.suppress(Exception):
            mesh.close(f"{type(error).__name__}: {error}".rstrip(": "))
        raise
    return mesh
