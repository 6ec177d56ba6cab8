"""A listening port that is safe to expose to strangers.

# Note: cost of unauthenticated connections
A connection costs one socket until its first byte arrives, and a thread only if that byte begins a TLS handshake. At
most `max_pending` connections may be unauthenticated at a time, silent ones included, and each for at most
PENDING_TIMEOUT_S; beyond the limit the oldest is closed. Idle connections and garbage therefore neither keep members of
the run out nor cost more than a moment each.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pipecomp.errors import ConfigError, LinkError
from pipecomp.tls.stream import close_socket

ALL_INTERFACES = "*"
ADDRESS_FORMAT = "HOST:PORT, such as 192.0.2.1:29400 or [2001:db8::1]:29400"
MAX_PENDING = 64
PENDING_TIMEOUT_S = 10.0
_POLL_S = 0.25
_ERROR_PAUSE_S = 0.01
_BACKLOG = 512
_TLS_HANDSHAKE = b"\x16"  # first byte of a TLS handshake


class Address(NamedTuple):
    """An address to listen at or to connect to: "192.0.2.1:29400", "[2001:db8::1]:29400", "host:29400".

    A listening address may have the host ALL_INTERFACES: all interfaces, over IPv4 and IPv6.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, key: str = "address") -> Address:
        """Parse HOST:PORT; raise ConfigError for `key` if it is malformed."""
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(key, text, ADDRESS_FORMAT)
        return cls(host, int(port))

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address; None for a host name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def is_wildcard(self) -> bool:
        """True if the address means all interfaces; nobody can connect to such an address."""
        return self.host == ALL_INTERFACES or (self.ip is not None and self.ip.is_unspecified)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressInUseError(LinkError):
    """Another process listens at the address."""


class Listener:
    """Accepts connections at one address, or at all addresses of a host name that this machine has, until `close`.

    Args:
        address: Address to listen at.
        authenticate: Called with each new socket, on its own thread. It authenticates the peer and returns a
            continuation, which runs on the same thread once the connection no longer counts as pending. An exception
            or None closes the connection.
        on_rejected: Called with the peer's address and the reason whenever a connection is not admitted.
        max_pending: Unauthenticated connections at a time.
    """

    def __init__(
        self,
        address: Address,
        authenticate: Callable[[socket.socket], Callable[[], None] | None],
        *,
        on_rejected: Callable[[str, Exception], None] = lambda host, error: None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._authenticate, self._on_rejected, self._max_pending = authenticate, on_rejected, max_pending
        self._pending: dict[socket.socket, float] = {}  # -> time of arrival, oldest first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self._sockets = _bind(address)
        except OSError as error:
            cause = error.strerror or error
            kind = AddressInUseError if error.errno == errno.EADDRINUSE else LinkError
            raise kind(f"cannot listen at {address}: {cause}. Use a free port of this machine") from error
        self._selector = selectors.DefaultSelector()
        for sock in self._sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self.address = Address(address.host, self._sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="pipecomp-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; authenticated connections stay."""
        self._closed.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()
        self._drop(list(self._pending))
        self._selector.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_POLL_S):
                try:
                    if key.data is None:
                        self._accept(*key.fileobj.accept())  # type: ignore[union-attr]
                    else:
                        self._start_thread(*key.data)
                except OSError:  # the connection is gone again, or there are no more file descriptors
                    self._closed.wait(_ERROR_PAUSE_S)
            expired = time.monotonic() - PENDING_TIMEOUT_S
            with self._lock:
                excess = itertools.islice(self._pending, max(0, len(self._pending) - self._max_pending))
                old = [*excess, *(sock for sock, since in self._pending.items() if since < expired)]
            self._drop(old)

    def _accept(self, sock: socket.socket, address: tuple) -> None:
        sock.settimeout(PENDING_TIMEOUT_S)
        with self._lock:
            self._pending[sock] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, (sock, str(address[0])))

    def _start_thread(self, sock: socket.socket, host: str) -> None:
        """Authenticate a connection that has sent its first byte, if that byte begins a TLS handshake."""
        self._selector.unregister(sock)
        first = sock.recv(1, socket.MSG_PEEK)
        problem: Exception = LinkError("it does not speak TLS") if first else EOFError()
        if first == _TLS_HANDSHAKE:
            try:
                thread = threading.Thread(target=self._admit, args=(sock, host), name="pipecomp-admit", daemon=True)
                thread.start()
                return
            except RuntimeError as error:  # no more threads, or the interpreter is shutting down
                problem = error
        self._drop([sock])
        self._on_rejected(host, problem)

    def _drop(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with self._lock:
                if self._pending.pop(sock, None) is None:
                    continue
            with contextlib.suppress(KeyError, ValueError):  # already handed to its thread
                self._selector.unregister(sock)
            close_socket(sock)

    def _admit(self, sock: socket.socket, host: str) -> None:
        continuation = None
        try:
            continuation = self._authenticate(sock)
        except Exception as error:
            with self._lock:
                pending = sock in self._pending
            late = f"it did not authenticate within {PENDING_TIMEOUT_S:g} s, or before {self._max_pending} others came"
            self._on_rejected(host, error if pending else LinkError(late))
        with self._lock:
            in_time = self._pending.pop(sock, None) is not None
        if continuation is None or not in_time:
            close_socket(sock)
            return
        try:
            continuation()
        except Exception as error:
            self._on_rejected(host, error)
            close_socket(sock)


def resolve(address: Address) -> list[tuple[int, str]]:
    """Return the address families and IP addresses of a host, each once; OSError if there are none."""
    if address.host == ALL_INTERFACES:
        return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(entry[0]), str(entry[4][0])) for entry in entries))


def _bind(address: Address) -> list[socket.socket]:
    """Listen at all of the address's IPs that this machine has, with one port; OSError if there are none."""
    sockets: list[socket.socket] = []
    port, problem = address.port, OSError()
    ips = resolve(address)
    for family, ip in ips:
        both = family == socket.AF_INET6 and len(ips) == 1  # [::] alone also takes IPv4 connections
        try:
            sock = socket.create_server((ip, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            problem = error
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # another machine's, or no IPv6 here
                continue
            for other in sockets:
                other.close()
            raise
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        raise problem
    return sockets
