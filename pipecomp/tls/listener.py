"""A listening port that strangers may reach: what they can take of it is bounded.

A connection gets a thread when the first byte of a TLS handshake has come, until it has shown who it is. There is a
limit to connections that have not, silent ones among them, beyond which the oldest is closed, and to the time that one
may take. So neither idle connections nor garbage keep those out that belong, or cost more than a moment each.
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

from pipecomp.errors import LinkError
from pipecomp.tls.stream import close

EVERYWHERE = "*"
MOST_WAITING = 64
PATIENCE_S = 10.0
_POLL_S = 0.25
_REST_S = 0.01
_BACKLOG = 512
_HANDSHAKE = b"\x16"  # what TLS begins with


class Address:
    """Where to listen or connect, from text: "192.0.2.1:29400", "[2001:db8::1]:29400", "host:29400".

    Where to listen may also be EVERYWHERE: at all interfaces, over IPv4 and IPv6.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    @classmethod
    def parse(cls, text: str) -> Address:
        """ValueError if it is no host and port."""
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT, as in 192.0.2.1:29400 or [2001:db8::1]:29400")
        return cls(host, int(port))

    @property
    def number(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """What it is if it is no name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def everywhere(self) -> bool:
        """Whether it says all interfaces, which is nowhere to connect to."""
        return self.host == EVERYWHERE or (self.number is not None and self.number.is_unspecified)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Listener:
    """Accept connections at one address, or at all that a name stands for and this machine has, until `close`.

    admit: called with every new socket, on a thread of its own; it finds out who that is, then returns what to do next,
    which is called on the same thread when the connection no longer counts as waiting. An exception or None closes it.
    refused: told why somebody was not let in. most_waiting: connections at a time that have not shown who they are.
    """

    def __init__(
        self,
        address: Address,
        admit: Callable[[socket.socket], Callable[[], None] | None],
        *,
        refused: Callable[[str, Exception], None] = lambda who, error: None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._admit, self._refused, self._most_waiting = admit, refused, most_waiting
        self._waiting: dict[socket.socket, float] = {}  # oldest first; since when
        self._lock = threading.Lock()
        self._ended = threading.Event()
        try:
            self._sockets = _bound(address)
        except OSError as error:
            raise LinkError(
                f"cannot listen at {address}: {error.strerror or error}. It must be an address of this machine, and "
                "nothing else may use the port"
            ) from error
        self._selector = selectors.DefaultSelector()
        for sock in self._sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self.address = Address(address.host, self._sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="pipecomp-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; connections that were let in stay."""
        self._ended.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()
        self._drop(list(self._waiting))
        self._selector.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(_POLL_S):
                try:
                    if key.data is None:
                        self._take(*key.fileobj.accept())  # type: ignore[union-attr]
                    else:
                        self._hear(*key.data)
                except OSError:  # a connection that is gone again, or no more file descriptors
                    self._ended.wait(_REST_S)
            late = time.monotonic() - PATIENCE_S
            with self._lock:
                excess = itertools.islice(self._waiting, max(0, len(self._waiting) - self._most_waiting))
                old = [*excess, *(sock for sock, since in self._waiting.items() if since < late)]
            self._drop(old)

    def _take(self, sock: socket.socket, address: tuple) -> None:
        sock.settimeout(PATIENCE_S)
        with self._lock:
            self._waiting[sock] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, (sock, str(address[0])))

    def _hear(self, sock: socket.socket, who: str) -> None:
        """Let one that has spoken show who it is, if it speaks TLS."""
        self._selector.unregister(sock)
        first = sock.recv(1, socket.MSG_PEEK)
        problem: Exception = LinkError("it does not speak TLS") if first else EOFError()
        if first == _HANDSHAKE:
            try:
                threading.Thread(target=self._meet, args=(sock, who), name="pipecomp-meet", daemon=True).start()
                return
            except RuntimeError as error:  # the system has no more threads, or the interpreter ends
                problem = error
        self._drop([sock])
        self._refused(who, problem)

    def _drop(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with self._lock:
                if self._waiting.pop(sock, None) is None:
                    continue
            with contextlib.suppress(KeyError, ValueError):  # one that has spoken
                self._selector.unregister(sock)
            close(sock)

    def _meet(self, sock: socket.socket, who: str) -> None:
        go_on = None
        try:
            go_on = self._admit(sock)
        except Exception as error:
            with self._lock:
                waits = sock in self._waiting
            late = f"it did not say who it is within {PATIENCE_S:g} s, or more than {self._most_waiting} others came"
            self._refused(who, error if waits else LinkError(f"{late} after it"))
        with self._lock:
            in_time = self._waiting.pop(sock, None) is not None
        if go_on is None or not in_time:
            close(sock)
            return
        try:
            go_on()
        except Exception as error:
            self._refused(who, error)
            close(sock)


def places(address: Address) -> list[tuple[int, str]]:
    """The address families and numbers that a host's name stands for, each once. OSError if it stands for none."""
    if address.host == EVERYWHERE:
        return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(where[0]), str(where[4][0])) for where in found))


def _bound(address: Address) -> list[socket.socket]:
    """Sockets that listen at all of the address's places that this machine has, with one port. OSError for none."""
    found: list[socket.socket] = []
    port, problem = address.port, OSError()
    every = places(address)
    for family, host in every:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a machine without IPv6
            problem = error
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(every) > 1:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            problem = error
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            for other in found:
                other.close()
            raise
        found.append(sock)
        port = sock.getsockname()[1]
    if not found:
        raise problem
    return found
