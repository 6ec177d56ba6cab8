"""A listening port that strangers may reach: what they can take of it is bounded.

Every connection gets a thread until it has shown who it is. There is a limit to such connections, beyond which the
oldest is closed, and to the time that one may take. So neither idle connections nor garbage keep those out that belong.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from pipecomp.errors import LinkError
from pipecomp.keys.stream import close

MOST_WAITING = 64
PATIENCE_S = 10.0
_POLL_S = 0.25
_BACKLOG = 512


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
        self._socket.settimeout(_POLL_S)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="pipecomp-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; connections that were let in stay."""
        self._ended.set()
        self._thread.join()
        self._socket.close()
        self._drop(list(self._waiting))

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):  # a time-out, no more file descriptors, a connection that is gone again
                sock, who = self._socket.accept()
                sock.settimeout(PATIENCE_S)
                with self._lock:
                    self._waiting[sock] = time.monotonic()
                threading.Thread(target=self._meet, args=(sock, str(who[0])), name="pipecomp-meet", daemon=True).start()
            late = time.monotonic() - PATIENCE_S
            with self._lock:
                old = [s for s, since in self._waiting.items() if since < late]
                old += [s for s in self._waiting if s not in old][
                    : max(0, len(self._waiting) - len(old) - MOST_WAITING)
                ]
            self._drop(old)

    def _drop(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with self._lock:
                if self._waiting.pop(sock, None) is None:
                    continue
            close(sock)

    def _meet(self, sock: socket.socket, who: str) -> None:
        go_on = None
        try:
            go_on = self._admit(sock)
        except Exception as error:
            self._refused(who, error)
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
