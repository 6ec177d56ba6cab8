"""torch's key-value store over the mesh: rank 0 holds the table, the others send it requests on their connections.

Write access depends on the connection: only the rank itself may write its heartbeat, its stop notice, its address and
its reports at the start of a run.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipecomp.errors import PipecompError, WireError
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import STORE_BYTES, FrameKind

MAX_BYTES = 1 << 28  # of all keys and values
ENTRY_BYTES = 200  # Python's overhead for an entry
MAX_WAITS = 1 << 14  # keys that one rank waits for, in all of its requests
KEY_PREFIX = "pipecomp/mesh"  # of the mesh's own keys
_OWNED_KEY = re.compile(rf"(?:pipecomp/(?:alive|start/\d+/(?:\d+|parted))|{KEY_PREFIX}/(?:address|ready))/(\d+)$")
_DEFAULT_TIMEOUT = timedelta(minutes=5)  # as in torch's stores
_REPLY_S = 60.0  # for rank 0's reply, beside the time in which a lost connection is resumed
_KEY_CHARACTERS = 1 << 12


def address_key(rank: int) -> str:
    """Return the key under which a rank publishes its listening address, empty if it does not listen."""
    return f"{KEY_PREFIX}/address/{rank}"


def ready_key(rank: int) -> str:
    """Return the key that a rank sets once it is connected to all others."""
    return f"{KEY_PREFIX}/ready/{rank}"


class StoreRequestError(ValueError):
    """A request that is well-formed but not allowed; the rank that sent it gets the reason as its reply."""


class KeyValueTable:
    """Rank 0's table. Writes raise StoreRequestError if rank `writer` may not write the key, or the table is full."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._waits: list[tuple[Connection, int, list[str]]] = []

    def set(self, key: str, value: bytes, writer: int) -> None:
        """Set a key."""
        owner = _OWNED_KEY.search(key)
        if owner is not None and int(owner[1]) != writer:
            raise StoreRequestError(f"rank {writer} may not write {key!r}, which belongs to rank {owner[1]}")
        _check_length(key)
        with self._changed:
            before = self._values.get(key)
            after = self._bytes + len(value) + (_entry_bytes(key) if before is None else -len(before))
            if after > MAX_BYTES:
                raise StoreRequestError(f"the key-value store has {self._bytes} bytes, allowed: {MAX_BYTES}")
            self._bytes = after
            self._values[key] = value
            ready = [wait for wait in self._waits if self.has(wait[2])]
            self._waits = [wait for wait in self._waits if wait not in ready]
            self._changed.notify_all()
        for connection, number, _ in ready:
            _reply(connection, number, True)

    def get(self, keys: list[str]) -> list[bytes]:
        """Return the values; KeyError if a key is missing."""
        with self._changed:
            missing = [key for key in keys if key not in self._values]
            if missing:
                raise KeyError(f"no such key: {missing[0]}")
            return [self._values[key] for key in keys]

    def has(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, writer: int) -> int:
        """Add to an integer, 0 if the key is missing, and return the sum."""
        with self._changed:
            try:
                total = int(self._values.get(key, b"0")) + amount
                text = str(total).encode()
            except ValueError as error:
                raise StoreRequestError(f"the value of {key!r} is not an integer, or has too many digits") from error
            self.set(key, text, writer)
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes, writer: int) -> bytes:
        """Set `desired` if the value is `expected`, or the key is missing and `expected` is empty; return the value."""
        with self._changed:
            value = self._values.get(key)
            if value == expected or (value is None and not expected):
                self.set(key, desired, writer)
                return desired
            return expected if value is None else value

    def delete(self, key: str, writer: int) -> bool:
        """Delete a key; return whether it was set."""
        with self._changed:
            if key not in self._values:
                return False
            self.set(key, b"", writer)
            del self._values[key]
            self._bytes -= _entry_bytes(key)
            return True

    def count(self) -> int:
        """Return the number of keys."""
        with self._changed:
            return len(self._values)

    def wait(self, keys: list[str], wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until all keys are set; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has(keys), wait_s)

    def wait_for(self, connection: Connection, number: int, keys: list[str]) -> None:
        """Reply to request `number` once all keys are set; StoreRequestError if that rank waits for too many."""
        for key in keys:
            _check_length(key)
        with self._changed:
            if not self.has(keys):
                waiting = sum(len(wait[2]) for wait in self._waits if wait[0] is connection)
                if waiting + len(keys) > MAX_WAITS:
                    raise StoreRequestError(f"rank {connection.peer} waits for more than {MAX_WAITS} keys")
                self._waits.append((connection, number, keys))
                return
        _reply(connection, number, True)

    def execute(self, rank: int, name: Any, *arguments: Any) -> Any:
        """Execute a rank's request, except "wait". Values are base64. Raises ValueError or TypeError if malformed."""
        operations: dict[Any, Callable[..., Any]] = {
            "set": lambda key, value: self.set(_typed(key, str), _decode(value), rank),
            "get": lambda keys: self._get_encoded(_keys(keys), rank),
            "has": lambda keys: self.has(_keys(keys)),
            "add": lambda key, amount: self.add(_typed(key, str), _typed(amount, int), rank),
            "swap": lambda key, a, b: _encode(self.compare_set(_typed(key, str), _decode(a), _decode(b), rank)),
            "delete": lambda key: self.delete(_typed(key, str), rank),
            "count": self.count,
        }
        if name not in operations:
            raise ValueError(f"{name!r}")
        return operations[name](*arguments)

    def _get_encoded(self, keys: list[str], rank: int) -> list[str]:
        """Check the size of the reply before memory is allocated: a key may occur many times."""
        values = self.get(keys)
        size = sum(len(value) * 4 // 3 for value in values)
        if rank and size > STORE_BYTES:
            raise StoreRequestError(f"values of the key-value store have {size} bytes together, allowed: {STORE_BYTES}")
        return [_encode(value) for value in values]

    def serve(self, connection: Connection, number: int, request: Any) -> None:
        """Process another rank's request and reply; WireError if it is malformed."""
        try:
            name, *arguments = request
            if name == "wait":
                self.wait_for(connection, number, _keys(arguments[0]))
                return
            result = self.execute(connection.peer, name, *arguments)
        except (StoreRequestError, KeyError) as error:
            result = {"error": str(error)}
        except (ValueError, TypeError, IndexError) as error:
            raise WireError(f"a malformed request to the key-value store: {error}") from error
        _reply(connection, number, result)


def _reply(connection: Connection, number: int, value: Any) -> None:
    """Send a reply without raising: the caller may serve another rank than the one that gets the reply."""
    try:
        connection.send_store(FrameKind.STORE_REPLY, number, value)
    except PipecompError as error:
        if connection.failure is None:  # the reply was too long; otherwise the rank is gone
            _reply(connection, number, {"error": str(error)})


def _entry_bytes(key: str) -> int:
    return len(key) + ENTRY_BYTES


def _check_length(key: str) -> None:
    if len(key) > _KEY_CHARACTERS:
        raise StoreRequestError(f"a key of the key-value store has {len(key)} characters, allowed: {_KEY_CHARACTERS}")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _keys(keys: Any) -> list[str]:
    return [_typed(key, str) for key in _typed(keys, list)]


def _decode(text: Any) -> bytes:
    return base64.b64decode(_typed(text, str), validate=True)


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


class PendingRequests:
    """Requests of this rank to rank 0: numbered, so that replies may come in any order."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}

    def request(self, request: list[Any], wait_s: float, timeout_message: str = "") -> Any:
        """Send a request and wait for its reply.

        Raises:
            dist.DistStoreError: No reply arrives in time, or the reply is an error.
            dist.DistNetworkError: Rank 0 is gone.
        """
        assert self.connection is not None, "connected to rank 0"
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        try:
            self.connection.send_store(FrameKind.STORE_REQUEST, number, request)
            reply = future.result(wait_s)
        except PipecompError as error:
            gone = self.connection.failure is not None  # otherwise the request is too long
            raise (dist.DistNetworkError if gone else dist.DistStoreError)(str(error)) from error
        except TimeoutError as error:
            silent = f"the key-value store did not reply within {wait_s:g} s: {request[0]}"
            raise dist.DistStoreError(timeout_message or silent) from error
        finally:
            del self._waiting[number]
        if isinstance(reply, dict):
            raise dist.DistStoreError(str(reply.get("error")))
        return reply

    def complete(self, number: int, value: Any) -> None:
        """Complete the request that a reply belongs to; ignore other replies."""
        future = self._waiting.get(number)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # a second reply, or the connection has failed meanwhile
                future.set_result(value)

    def fail(self, error: Exception) -> None:
        """End all requests: rank 0 is gone."""
        for future in list(self._waiting.values()):
            with contextlib.suppress(InvalidStateError):  # a reply has come meanwhile
                future.set_exception(dist.DistNetworkError(str(error)))


class MeshStore(dist.Store):
    """torch.distributed's store, for `init_process_group`.

    Args:
        rank: This rank.
        table: On rank 0; None elsewhere.
        requests: On other ranks; None on rank 0.
    """

    def __init__(self, rank: int, table: KeyValueTable | None, requests: PendingRequests | None) -> None:
        super().__init__()
        self._rank, self._table, self._requests = rank, table, requests
        self._timeout = _DEFAULT_TIMEOUT

    def clone(self) -> MeshStore:
        return self  # safe: requests of several threads do not wait for each other

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._run(bool, "set", key, _encode(_to_bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._run(lambda reply: [*map(_decode, _keys(reply))], "get", keys)
        if len(values) != len(keys):
            raise dist.DistStoreError(f"rank 0 replied with {len(values)} values for {len(keys)} keys")
        return values

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._run(bool, "has", keys)

    def add(self, key: str, amount: int) -> int:
        return self._run(int, "add", key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._run(_decode, "swap", key, _encode(_to_bytes(expected)), _encode(_to_bytes(desired)))

    def delete_key(self, key: str) -> bool:
        return self._run(bool, "delete", key)

    def num_keys(self) -> int:
        return self._run(int, "count")

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (names that torch's C++ code calls)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = (self._timeout if timeout is None else timeout).total_seconds()
        message = f"wait timeout after {wait_s:g} s, keys: {', '.join(keys)}"
        if self._table is None:
            assert self._requests is not None
            self._requests.request(["wait", keys], wait_s, message)
        elif not self._table.wait(keys, wait_s):
            raise dist.DistStoreError(message)

    def _run(self, parse: Callable[[Any], Any], *request: Any) -> Any:
        """Execute a request on rank 0, and return the parsed reply."""
        try:
            if self._table is not None:
                return parse(self._table.execute(self._rank, *request))
            assert self._requests is not None
            connection = self._requests.connection
            wait_s = _REPLY_S + (connection.timeout_s if connection is not None else 0.0)
            return parse(self._requests.request(list(request), wait_s))
        except StoreRequestError as error:
            raise dist.DistStoreError(str(error)) from error
        except (KeyError, ValueError, TypeError) as error:
            raise dist.DistStoreError(f"{request[0]!r} of the key-value store failed: {error}") from error


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
