"""torch's key-value store over a mesh: rank 0 holds it, the others ask it on their connections.

Who may write what follows from the connection that a question comes on: a rank's heartbeat, its word that it has
stopped, where it listens, and what it tells the others at a start are its own.
"""

from __future__ import annotations

import base64
import itertools
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipecomp.errors import PipecompError, WireError
from pipecomp.tls.connection import Connection
from pipecomp.tls.frames import CALL_BYTES, Kind

MOST_BYTES = 1 << 28  # of all keys and values
ENTRY_BYTES = 200  # that Python takes for one, beside its characters
MOST_WAITS = 1 << 14  # keys that a rank waits for, in all of its questions
_OWNED = re.compile(r"pipecomp/(?:alive|stopped|mesh/address|mesh/ready|start/\d+/(?:\d+|parted))/(\d+)$")
_DEFAULT = timedelta(minutes=5)  # as torch's stores wait
_ANSWER_S = 60.0  # for rank 0 to answer what needs no waiting, beside the time in which a lost connection is made anew
_KEY_BYTES = 1 << 12


class RefusedError(ValueError):
    """A question that is one, but asks for too much."""


class Table:
    """What rank 0 holds."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._waits: list[tuple[Connection, int, list[str]]] = []

    def set(self, key: str, value: bytes, writer: int) -> None:
        """RefusedError if `writer` may not write that key, or the store is full."""
        owned = _OWNED.search(key)
        if owned is not None and int(owned[1]) != writer:
            raise RefusedError(f"rank {writer} may not write {key!r}, which is rank {owned[1]}'s")
        _check_length(key)
        with self._changed:
            before = self._values.get(key)
            after = self._bytes + len(value) + (_size(key) if before is None else -len(before))
            if after > MOST_BYTES:
                raise RefusedError(f"the key-value store has {self._bytes} bytes, allowed: {MOST_BYTES}")
            self._bytes = after
            self._values[key] = value
            ready = [wait for wait in self._waits if all(k in self._values for k in wait[2])]
            self._waits = [wait for wait in self._waits if wait not in ready]
            self._changed.notify_all()
        for connection, number, _ in ready:
            _answer(connection, number, True)

    def get(self, keys: list[str]) -> list[bytes]:
        """KeyError if one is missing."""
        with self._changed:
            missing = [key for key in keys if key not in self._values]
            if missing:
                raise KeyError(f"no such key: {missing[0]}")
            return [self._values[key] for key in keys]

    def has(self, keys: list[str]) -> bool:
        """Whether all are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, writer: int) -> int:
        """Add to a number, which begins at 0; returns the sum. RefusedError if there is something else."""
        with self._changed:
            try:
                total = int(self._values.get(key, b"0")) + amount
                text = str(total).encode()
            except ValueError as error:
                raise RefusedError(f"what is at {key!r} is no number, or one of too many digits") from error
            self.set(key, text, writer)
            return total

    def swap(self, key: str, expected: bytes, desired: bytes, writer: int) -> bytes:
        """Set `desired` if the value is `expected`, or missing and `expected` empty; returns what is there then."""
        with self._changed:
            found = self._values.get(key)
            if found == expected or (found is None and not expected):
                self.set(key, desired, writer)
                return desired
            return expected if found is None else found

    def delete(self, key: str, writer: int) -> bool:
        """Whether it was there."""
        with self._changed:
            if key not in self._values:
                return False
            self.set(key, b"", writer)
            del self._values[key]
            self._bytes -= _size(key)
            return True

    def count(self) -> int:
        """How many keys there are."""
        with self._changed:
            return len(self._values)

    def wait(self, keys: list[str], wait_s: float) -> bool:
        """Whether all are there, at once or before `wait_s` seconds are over."""
        with self._changed:
            return self._changed.wait_for(lambda: all(key in self._values for key in keys), wait_s)

    def wait_for(self, connection: Connection, number: int, keys: list[str]) -> None:
        """Answer question `number` when all are there. RefusedError if that rank waits for too much."""
        for key in keys:
            _check_length(key)
        with self._changed:
            if not all(key in self._values for key in keys):
                waiting = sum(len(wait[2]) for wait in self._waits if wait[0] is connection)
                if waiting + len(keys) > MOST_WAITS:
                    raise RefusedError(f"rank {connection.peer} waits for more than {MOST_WAITS} keys")
                self._waits.append((connection, number, keys))
                return
        _answer(connection, number, True)

    def serve(self, connection: Connection, number: int, question: Any) -> None:
        """Answer another rank. WireError for what is no question."""
        rank = connection.peer
        try:
            name, *arguments = question
            if name == "wait":
                self.wait_for(connection, number, _keys(arguments[0]))
                return
            answers: dict[str, Callable[..., Any]] = {
                "set": lambda key, value: self.set(_key(key), _bytes(value), rank),
                "get": lambda keys: _texts(self.get(_keys(keys))),
                "has": lambda keys: self.has(_keys(keys)),
                "add": lambda key, amount: self.add(_key(key), _whole(amount), rank),
                "swap": lambda key, a, b: _text(self.swap(_key(key), _bytes(a), _bytes(b), rank)),
                "delete": lambda key: self.delete(_key(key), rank),
                "count": self.count,
            }
            if name not in answers:
                raise ValueError(f"{name!r}")
            found = answers[name](*arguments)
        except (RefusedError, KeyError) as error:
            _answer(connection, number, {"error": str(error)})
        except (ValueError, TypeError, IndexError) as error:
            raise WireError(f"a question to the key-value store that is none: {error}") from error
        else:
            _answer(connection, number, found)


def _answer(connection: Connection, number: int, value: Any) -> None:
    """Whatever becomes of it: who is called here may be another rank than the one that it is for."""
    try:
        connection.call(Kind.ANSWER, number, value)
    except PipecompError as error:
        if connection.failure is None:  # else that rank is gone, and needs no answer
            _answer(connection, number, {"error": str(error)})  # it was too long


def _size(key: str) -> int:
    return len(key) + ENTRY_BYTES


def _check_length(key: str) -> None:
    if len(key) > _KEY_BYTES:
        raise RefusedError(f"a key of the key-value store has {len(key)} characters, allowed: {_KEY_BYTES}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError("a key that is no text")
    return key


def _keys(keys: Any) -> list[str]:
    if not isinstance(keys, list):
        raise TypeError("keys that are no list")
    return [_key(key) for key in keys]


def _whole(amount: Any) -> int:
    if type(amount) is not int:
        raise TypeError("an amount that is no whole number")
    return amount


def _bytes(text: Any) -> bytes:
    return base64.b64decode(_key(text), validate=True)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _texts(values: list[bytes]) -> list[str]:
    """RefusedError, before memory is taken, for more than an answer may have: one value may be asked for very often."""
    size = sum(len(value) * 4 // 3 for value in values)
    if size > CALL_BYTES:
        raise RefusedError(f"values of the key-value store have {size} bytes together, allowed: {CALL_BYTES}")
    return [_text(value) for value in values]


class Questions:
    """Another rank's side: numbered questions on the connection to rank 0, whose answers may come in any order."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[threading.Event, list[Any]]] = {}

    def ask(self, question: list[Any], wait_s: float, late: str = "") -> Any:
        """The answer. DistStoreError if there is none in time, as `late` says, DistNetworkError if rank 0 is gone."""
        assert self.connection is not None, "connected to rank 0"
        number, event = next(self._numbers), threading.Event()
        box: list[Any] = []
        self._waiting[number] = event, box
        try:
            try:
                self.connection.call(Kind.CALL, number, question)
            except PipecompError as error:
                gone = self.connection.failure is not None  # else it is too long
                raise (dist.DistNetworkError if gone else dist.DistStoreError)(str(error)) from error
            if not event.wait(wait_s):
                silent = f"the key-value store did not answer within {wait_s:g} s: {question[0]}"
                raise dist.DistStoreError(late or silent)
        finally:
            del self._waiting[number]
        if not box:
            raise dist.DistNetworkError(str(self.connection.failure))
        if isinstance(box[0], dict):
            raise dist.DistStoreError(str(box[0].get("error")))
        return box[0]

    def answered(self, number: int, value: Any) -> None:
        """An answer from rank 0; one that nobody waits for any more is forgotten."""
        found = self._waiting.get(number)
        if found is not None:
            found[1].append(value)
            found[0].set()

    def ended(self, error: Exception) -> None:
        """Rank 0 is gone: nobody needs to wait."""
        for event, _ in list(self._waiting.values()):
            event.set()


class MeshStore(dist.Store):
    """torch.distributed's store, for `init_process_group` and all that goes by it."""

    def __init__(self, rank: int, table: Table | None, questions: Questions | None) -> None:
        """One of table (on rank 0) and questions."""
        super().__init__()
        self._rank, self._table, self._questions = rank, table, questions
        self._timeout = _DEFAULT

    def clone(self) -> MeshStore:
        """This one: questions of several threads do not wait for each other."""
        return self

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Of `get` and `wait`."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._do(lambda t: t.set(key, data, self._rank), ["set", key, _text(data)], bool)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._do(lambda t: t.get(keys), ["get", keys], lambda texts: [_bytes(text) for text in _keys(texts)])
        if len(found) != len(keys):
            raise dist.DistStoreError(f"rank 0 answered with {len(found)} values for {len(keys)} keys")
        return found

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._do(lambda t: t.has(keys), ["has", keys], bool)

    def add(self, key: str, amount: int) -> int:
        return self._do(lambda t: t.add(key, amount, self._rank), ["add", key, amount], int)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        a, b = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired))
        return self._do(lambda t: t.swap(key, a, b, self._rank), ["swap", key, _text(a), _text(b)], _bytes)

    def delete_key(self, key: str) -> bool:
        return self._do(lambda t: t.delete(key, self._rank), ["delete", key], bool)

    def num_keys(self) -> int:
        return self._do(lambda t: t.count(), ["count"], int)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (what torch calls them where C++ asks)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = (self._timeout if timeout is None else timeout).total_seconds()
        late = f"wait timeout after {wait_s:g} s, keys: {', '.join(keys)}"
        if self._table is None:
            assert self._questions is not None
            self._questions.ask(["wait", keys], wait_s, late)
        elif not self._table.wait(keys, wait_s):
            raise dist.DistStoreError(late)

    def _do(self, here: Callable[[Table], Any], question: list[Any], read: Callable[[Any], Any]) -> Any:
        """Ask rank 0. here: on rank 0 itself; read: what rank 0 has answered."""
        if self._table is None:
            assert self._questions is not None
            connection = self._questions.connection
            wait_s = _ANSWER_S + (connection.timeout_s if connection is not None else 0.0)
            answer = self._questions.ask(question, wait_s)
            try:
                return read(answer)
            except (ValueError, TypeError) as error:
                raise dist.DistStoreError(f"rank 0 gave an answer that is none to {question[0]!r}: {error}") from error
        try:
            return here(self._table)
        except (KeyError, ValueError) as error:
            raise dist.DistStoreError(str(error)) from error
