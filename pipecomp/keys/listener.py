"""A listening port that strangers may reach: what they can take of it is bounded.

A connection gets a thread when the first byte of a TLS handshake has come, until it has shown who it is. There is a
limit to connections that have not, silent ones among them, beyond which the oldest is closed, and to the time that one
may take. So neither idle connections nor garbage keep those out that belong, or cost more than a moment each.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable

from pipecomp.errors import LinkError
from pipecomp.keys.stream import close

MOST_WAITING = 64
PATIENCE_S = 10.0
_POLL_S = 0.25
_REST_S = 0.01
_BACKLOG = 512
_HANDSHAKE = b"\x16"  # what TLS begins with


class Address:
    """Where to listen or connect, from text: "192.0.2.1:29400", "[2001:db8::1]:29400", "host:29400"."""

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

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Listener:
    """Accept connections at one address, IPv4 or IPv6, until `close`.

    admit: called with every new socket, on a thread of its own; it finds out who that is, then returns what to do next,
    which is called on the same thread when the connection no longer counts as waiting. An exception or None closes it.
    refused: told why somebody was not let in.
    """

    def __init__(
        self,
        address: Address,
        admit: Callable[[socket.socket], Callable[[], None] | None],
        *,
        refused: Callable[[str, Exception], None] = lambda who, error: None,
    ) -> None:
        self._admit, self._refused = admit, refused
        self._waiting: dict[socket.socket, float] = {}  # oldest first; since when
        self._lock = threading.Lock()
        self._ended = threading.Event()
        try:
            where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(where[0], where[1])
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where[4])
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise LinkError(
                f"cannot listen at {address}: {error.strerror or error}. It must be an address of this machine, and "
                "nothing else may use the port"
            ) from error
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="pipecomp-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; connections that were let in stay."""
        self._ended.set()
        self._thread.join()
        self._socket.close()
        self._drop(list(self._waiting))
        self._selector.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(_POLL_S):
                try:
                    if key.data is None:
                        self._take(*self._socket.accept())
                    else:
                        self._hear(*key.data)
                except OSError:  # a connection that is gone again, or no more file descriptors
                    self._ended.wait(_REST_S)
            late = time.monotonic() - PATIENCE_S
            with self._lock:
                excess = itertools.islice(self._waiting, max(0, len(self._waiting) - MOST_WAITING))
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
        if first == _HANDSHAKE:
            threading.Thread(target=self._meet, args=(sock, who), name="pipecomp-meet", daemon=True).start()
            return
        self._drop([sock])
        self._refused(who, LinkError("it does not speak TLS") if first else EOFError())

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
            late = f"it did not say who it is within {PATIENCE_S:g} s, or more than {MOST_WAITING} others came after it"
            self._refused(who, error if waits else LinkError(late))
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
