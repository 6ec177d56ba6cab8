"""What comes from one rank: messages find the receives that are ready for them; memory is taken only for what fits.

A message goes straight into the buffer of its receive. One that comes earlier must be short (the sender waits with long
ones until it is asked), and all of those together are bounded. Streams that are open have a limit for each message, and
room for those that wait to be taken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Protocol

import numpy as np

from pipecomp.errors import WireError
from pipecomp.tls.frames import EAGER_BYTES, ROOM_BYTES, Header, room_for
from pipecomp.tls.transfer import Transfer

EARLY_BYTES = 1 << 26  # of all messages that came before their receives


class Sink(Protocol):
    """Who takes all messages of an open stream; called on the receiving thread."""

    most_bytes: int  # of a message

    def deliver(self, packet: np.ndarray, began: float) -> None:
        """A message, uint8 [n], whose first byte came at `began` of perf_counter."""
        ...

    def noted(self, note: dict) -> None:
        """What the other side says about the stream."""
        ...

    def failed(self, error: Exception) -> None:
        """Nothing more will come."""
        ...


class _Arriving:
    """A message of which a part is there. transfer: None if it comes before its receive, or for a sink."""

    __slots__ = ("began", "data", "filled", "transfer", "view")

    def __init__(self, total: int, transfer: Transfer | None) -> None:
        self.transfer = transfer
        self.data = np.empty(total, dtype=np.uint8) if transfer is None else None
        self.view = transfer.view if transfer is not None else memoryview(self.data)  # type: ignore[arg-type]
        self.filled = 0
        self.began = time.perf_counter()


class Inbox:
    """place and placed: on the receiving thread. The others: on any."""

    def __init__(self) -> None:
        self.sinks: dict[int, Sink] = {}
        self._ready: dict[tuple[int, int], deque[Transfer]] = {}
        self._early: dict[tuple[int, int], deque[np.ndarray]] = {}
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        self._early_bytes = 0
        self._room: dict[int, int] = {}  # by open stream, bytes that the other side may send
        self._taken: dict[int, int] = {}  # by open stream, bytes that were taken and that it does not know of
        self._ended: Exception | None = None
        self._lock = threading.Lock()

    def receive(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Be ready for one message, which has as many bytes as `view`; the transfer ends when it is there."""
        transfer, key = Transfer(view), (stream, tag)
        with self._lock:
            self._ready.setdefault(key, deque()).append(transfer)
        self._match(key)  # what came before the end is there after it, too
        if self._ended is not None and not transfer.done:
            transfer.finish(self._ended)
        return transfer

    def open(self, stream: int, sink: Sink) -> int:
        """Take all messages of a stream; returns what the other side may send."""
        with self._lock:
            self.sinks[stream], self._room[stream], self._taken[stream] = sink, ROOM_BYTES, 0
        return ROOM_BYTES

    def taken(self, stream: int, total: int) -> int:
        """A message of an open stream waits no more; returns what the other side may send again, which may be 0."""
        with self._lock:
            self._taken[stream] += room_for(total)
            if self._taken[stream] < ROOM_BYTES // 4:
                return 0
            more, self._taken[stream] = self._taken[stream], 0
            self._room[stream] += more
            return more

    def place(self, header: Header) -> memoryview:
        """Where the content of a DATA frame goes. WireError for a message that nobody is ready for."""
        key = header.stream, header.tag
        with self._lock:
            arriving = self._arriving.get(key)
            if arriving is None:
                arriving = self._arriving[key] = self._begin(key, header.total)
        if len(arriving.view) != header.total or arriving.filled + header.size > header.total:
            raise WireError(
                f"{arriving.filled + header.size} bytes of a message of {header.total}, which began as one of "
                f"{len(arriving.view)}"
            )
        return arriving.view[arriving.filled : arriving.filled + header.size]

    def placed(self, header: Header) -> bool:
        """The content is there. Whether the message is, too."""
        key = header.stream, header.tag
        arriving = self._arriving[key]
        arriving.filled += header.size
        if arriving.filled < header.total:
            return False
        with self._lock:
            del self._arriving[key]
            sink = self.sinks.get(header.stream)
            if arriving.data is not None and sink is None:
                self._early.setdefault(key, deque()).append(arriving.data)
        if arriving.transfer is not None:
            arriving.transfer.began = arriving.began
            arriving.transfer.finish()
        elif sink is not None and arriving.data is not None:
            sink.deliver(arriving.data, arriving.began)
        else:
            self._match(key)
        return True

    def end(self, error: Exception) -> None:
        """Nothing comes any more; all that waits ends with `error`."""
        with self._lock:
            self._ended = self._ended or error
            waiting = [transfer for ready in self._ready.values() for transfer in ready]
            waiting += [a.transfer for a in self._arriving.values() if a.transfer is not None]
            self._ready.clear()
            sinks = list(self.sinks.values())
        for transfer in waiting:
            transfer.finish(error)
        for sink in sinks:
            with contextlib.suppress(Exception):  # the others must hear of it, too
                sink.failed(error)

    def _begin(self, key: tuple[int, int], total: int) -> _Arriving:
        sink = self.sinks.get(key[0])
        if sink is not None:
            if total > sink.most_bytes:
                raise WireError(f"a packet of {total} bytes, allowed: {sink.most_bytes}")
            if self._room[key[0]] <= 0:  # one that is longer than all of it may come, too
                raise WireError(f"a packet of {total} bytes beside those that wait; allowed: {ROOM_BYTES} together")
            self._room[key[0]] -= room_for(total)
            return _Arriving(total, None)
        if key not in self._early and key in self._ready:
            size = len(self._ready[key][0].view)
            if size != total:
                raise WireError(f"a message of {total} bytes where one of {size} is expected")
            ready = self._ready[key]
            transfer = ready.popleft()
            if not ready:
                del self._ready[key]
            return _Arriving(total, transfer)
        if total > EAGER_BYTES or self._early_bytes + room_for(total) > EARLY_BYTES:
            raise WireError(
                f"a message of {total} bytes that nobody asked for; allowed: {EAGER_BYTES}, and {EARLY_BYTES} together"
            )
        self._early_bytes += room_for(total)
        return _Arriving(total, None)

    def _match(self, key: tuple[int, int]) -> None:
        """Give messages that came early to receives that are ready now."""
        done: list[tuple[Transfer, np.ndarray]] = []
        with self._lock:
            early, ready = self._early.get(key), self._ready.get(key)
            while early and ready:
                data = early.popleft()
                self._early_bytes -= room_for(data.size)
                done.append((ready.popleft(), data))
            if early is not None and not early:
                del self._early[key]
            if ready is not None and not ready:
                del self._ready[key]
        for transfer, data in done:
            if len(transfer.view) != data.size:
                transfer.finish(
                    WireError(f"a message of {data.size} bytes where one of {len(transfer.view)} is expected")
                )
                continue
            transfer.view[:] = memoryview(data)
            transfer.finish()
