"""Receive queue of a connection to one rank; it outlives the TCP connections that carry it.

# Note: back-pressure
Neither end can make the other allocate memory that was not agreed:
- A message of up to EAGER_BYTES may be sent before its receive is posted. Such unexpected messages are bounded together
  (MAX_UNEXPECTED_BYTES).
- A longer message waits at its sender until the receiver has posted a receive of its length (READY), and then goes
  straight into the receiver's buffer.
- An open stream has a sink instead of posted receives. Its sender may send as much as the sink has granted (CREDIT), so
  a slow sink holds the sender back; a single message is limited by the sink's `most_bytes`.
- The sender keeps unacknowledged frames, up to MAX_UNACKNOWLEDGED_BYTES, to send them again after a cut.

# Note: striped messages
With several subflows a long message travels in pieces, each over the subflow that is free. A STRIPED frame on the first
subflow begins it, so that messages begin, take their receives and count against the window in one order, as with one
subflow; a piece that arrives before waits in its TCP connection. Each subflow delivers its frames once and in order, so
that a piece can be lost or doubled only by a peer that breaks the rules. Messages of a sink are delivered in the order
in which they began.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pipecomp.errors import LinkTimeoutError, WireError
from pipecomp.tls.frames import EAGER_BYTES, ROOM_BYTES, STRIPE_UNIT, FrameHeader

MAX_UNEXPECTED_BYTES = 1 << 26  # of all messages that arrived before their receives

_OVERHEAD_BYTES = 256  # memory for a queued message beside its content

Key = tuple[int, int]  # stream and tag


def window_cost(total: int) -> int:
    """Return the bytes of the receive window that a message of `total` bytes takes; both ends count alike."""
    return total + _OVERHEAD_BYTES


class Transfer:
    """A message that is being sent or received. It ends once, with or without an error.

    began, ended: times of time.perf_counter, 0.0 before. unsent: bytes that count as not sent yet.
    """

    def __init__(self, view: memoryview) -> None:
        self.view, self.unsent = view, len(view)
        self.error: Exception | None = None
        self.began = self.ended = 0.0
        self._done = threading.Event()
        self._callback: Callable[[Transfer], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """True if the transfer has ended."""
        return self._done.is_set()

    def finish(self, error: Exception | None = None) -> None:
        """End the transfer; later calls have no effect."""
        with self._lock:
            if self._done.is_set():
                return
            self.error, self.ended = error, time.perf_counter()
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback(self)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback` at the end, on the thread that ends the transfer, or at once if it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callback = callback
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; raise the transfer's error, or LinkTimeoutError after `timeout_s`."""
        if not self._done.wait(timeout_s):
            raise LinkTimeoutError(f"a message of {len(self.view)} bytes was not through after {timeout_s:g} s")
        if self.error is not None:
            raise self.error


class Sink(Protocol):
    """Receiver of an open stream's messages; called on the receiving thread."""

    most_bytes: int  # of a message

    def deliver(self, packet: np.ndarray, began: float) -> None:
        """Handle a message, uint8 [n]. began: arrival of its first byte, of time.perf_counter."""

    def noted(self, note: dict) -> None:
        """Handle a notice that the peer sent on this stream."""

    def failed(self, error: Exception) -> None:
        """Handle the error that ended the connection."""


class _PartialMessage:
    """A message that is arriving.

    transfer: None if unexpected, or for a sink; `data` holds it then. units: of a striped message, those that are here.
    """

    __slots__ = ("began", "data", "filled", "key", "progressed", "transfer", "units", "view")

    def __init__(self, key: Key, total: int, transfer: Transfer | None) -> None:
        self.key, self.transfer = key, transfer
        self.units = bytearray()
        self.data = np.empty(total, dtype=np.uint8) if transfer is None else None
        self.view = transfer.view if transfer is not None else memoryview(self.data)  # type: ignore[arg-type]
        self.filled = 0
        self.began = time.perf_counter()
        self.progressed = time.monotonic()

    @property
    def complete(self) -> bool:
        return self.filled == len(self.view)

    def units_of(self, header: FrameHeader) -> slice:
        """The units that a STRIPE frame fills; WireError unless it fits and none of them is here."""
        total, at, end = len(self.view), header.tag, header.tag + header.size
        units = slice(at // STRIPE_UNIT, -(-end // STRIPE_UNIT))
        whole = at % STRIPE_UNIT == 0 and (end % STRIPE_UNIT == 0 or end == total)
        if header.total != total or not at < end <= total or not whole:
            raise WireError(f"bytes {at} to {end} of {header.total} as a piece of a message of {total}")
        if any(self.units[units]):
            raise WireError(f"bytes {at} to {end} of a message twice")
        return units


class ReceiveQueue:
    """Matches arriving messages with posted receives and sinks; memory is allocated only for messages that are allowed.

    `buffer_for`, `commit` and `begin_striped` are called on the receiving thread of the first subflow, `stripe_buffer`
    and `commit_stripe` on that of each subflow, the others on any.
    """

    def __init__(self) -> None:
        self.sinks: dict[int, Sink] = {}
        self._posted: dict[Key, deque[Transfer]] = {}
        self._unexpected: dict[Key, deque[np.ndarray]] = {}
        self._unexpected_bytes = 0
        self._partial: dict[Key, _PartialMessage] = {}
        self._window: dict[int, int] = {}  # open stream -> bytes that the peer may still send
        self._released: dict[int, int] = {}  # open stream -> bytes taken by the sink and not granted again yet
        self._striped: dict[int, _PartialMessage] = {}  # that are incomplete, by number
        self._begun = 0  # striped messages
        # Of sinks: striped messages that are not delivered yet, and messages behind them.
        self._undelivered: dict[Key, deque[_PartialMessage]] = {}
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._delivering = threading.Lock()

    def receive(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Post a receive of one message of len(view) bytes."""
        transfer, key = Transfer(view), (stream, tag)
        with self._lock:
            self._posted.setdefault(key, deque()).append(transfer)
        self._match_unexpected(key)  # messages that arrived before the connection's end are still delivered
        if self._error is not None and not transfer.done:
            transfer.finish(self._error)
        return transfer

    def open_stream(self, stream: int, sink: Sink) -> int:
        """Deliver all messages of a stream to `sink`; return the credit to grant."""
        with self._lock:
            self.sinks[stream], self._window[stream], self._released[stream] = sink, ROOM_BYTES, 0
        return ROOM_BYTES

    def release(self, stream: int, total: int) -> int:
        """Note that a sink has taken a message; return the credit to grant, 0 until it is worth a frame."""
        with self._lock:
            self._released[stream] += window_cost(total)
            if self._released[stream] < ROOM_BYTES // 4:
                return 0
            credit, self._released[stream] = self._released[stream], 0
            self._window[stream] += credit
            return credit

    def buffer_for(self, header: FrameHeader) -> memoryview:
        """Return the memory for the content of a DATA frame; WireError for a message that is not allowed."""
        key = header.stream, header.tag
        with self._lock:
            partial = self._partial.get(key)
            if partial is None:
                partial = self._partial[key] = self._begin(key, header.total)
        end = partial.filled + header.size
        if len(partial.view) != header.total or end > header.total:
            began = len(partial.view)
            raise WireError(f"{end} bytes of a message of {header.total}, announced as {began} bytes")
        return partial.view[partial.filled : end]

    def commit(self, header: FrameHeader) -> bool:
        """Note that the content of a DATA frame has arrived; return whether its message is complete."""
        key = header.stream, header.tag
        partial = self._partial[key]
        partial.filled += header.size
        if partial.filled < header.total:
            return False
        with self._lock:
            del self._partial[key]
            sink = self.sinks.get(header.stream)
            if partial.data is not None and sink is None:
                self._unexpected.setdefault(key, deque()).append(partial.data)
            before = self._undelivered.get(key)
            if before is not None:
                before.append(partial)
        if before is not None:
            self._deliver(key)
        elif partial.transfer is not None:
            partial.transfer.began = partial.began
            partial.transfer.finish()
        elif sink is not None and partial.data is not None:
            sink.deliver(partial.data, partial.began)
        else:
            self._match_unexpected(key)
        return True

    # -- striped messages

    def begin_striped(self, header: FrameHeader) -> None:
        """Begin a message that arrives in STRIPE frames; WireError for one that is not allowed."""
        key, total = (header.stream, header.tag), header.total
        with self._lock:
            sink = self.sinks.get(header.stream)
            posted = key not in self._unexpected and key in self._posted
            if total <= STRIPE_UNIT or key in self._partial or (sink is None and not posted):
                raise WireError(f"the beginning of a striped message of {total} bytes, which nothing waits for")
            partial = self._begin(key, total)
            partial.units = bytearray(-(-total // STRIPE_UNIT))
            self._striped[self._begun] = partial
            self._begun += 1
            if sink is not None:
                self._undelivered.setdefault(key, deque()).append(partial)
            self._changed.notify_all()

    def stripe_buffer(self, header: FrameHeader, wait_s: float) -> memoryview:
        """Return the memory for the content of a STRIPE frame; waits up to `wait_s` until its message has begun.

        WireError for a piece that is not allowed.
        """
        number = header.stream
        with self._changed:
            begun = self._changed.wait_for(lambda: number < self._begun or self._error is not None, wait_s)
            if self._error is not None:
                raise self._error
            if not begun:
                raise WireError(f"a piece of message {number}, and not its beginning within {wait_s:g} s")
            partial = self._incomplete(number)
            partial.units_of(header)
        return partial.view[header.tag : header.tag + header.size]

    def commit_stripe(self, header: FrameHeader) -> bool:
        """Note that the content of a STRIPE frame has arrived; return whether its message is complete."""
        with self._lock:
            partial = self._incomplete(header.stream)
            units = partial.units_of(header)
            partial.units[units] = b"\1" * (units.stop - units.start)
            partial.filled += header.size
            partial.progressed = time.monotonic()
            if not partial.complete:
                return False
            del self._striped[header.stream]
        if partial.transfer is not None:
            partial.transfer.began = partial.began
            partial.transfer.finish()
        else:
            self._deliver(partial.key)
        return True

    def check_progress(self, limit_s: float) -> None:
        """Raise WireError if no piece of an incomplete striped message has arrived for `limit_s` seconds."""
        if not self._striped:
            return
        with self._lock:
            oldest = min(self._striped.values(), key=lambda partial: partial.progressed, default=None)
        if oldest is not None and time.monotonic() - oldest.progressed > limit_s:
            have, total = oldest.filled, len(oldest.view)
            raise WireError(f"{have} of {total} bytes of a message, and no more for {limit_s:g} s")

    def _incomplete(self, number: int) -> _PartialMessage:
        partial = self._striped.get(number)
        if partial is None:
            raise WireError(f"a piece of message {number}, which is complete")
        return partial

    def _deliver(self, key: Key) -> None:
        """Deliver the complete messages of a sink that no incomplete one is before."""
        sink = self.sinks[key[0]]
        with self._delivering:
            while True:
                with self._lock:
                    messages = self._undelivered.get(key)
                    if messages is None or not messages[0].complete:
                        return
                first = messages[0]
                assert first.data is not None
                sink.deliver(first.data, first.began)
                with self._lock:
                    messages.popleft()
                    if not messages:
                        del self._undelivered[key]

    def fail(self, error: Exception) -> None:
        """End all pending transfers with `error`."""
        with self._lock:
            self._error = self._error or error
            waiting = [transfer for posted in self._posted.values() for transfer in posted]
            arriving = [*self._partial.values(), *self._striped.values()]
            waiting += [p.transfer for p in arriving if p.transfer is not None]
            self._posted.clear()
            self._changed.notify_all()
            sinks = list(self.sinks.values())
        for transfer in waiting:
            transfer.finish(error)
        for sink in sinks:
            with contextlib.suppress(Exception):  # the other sinks must learn of it, too
                sink.failed(error)

    def _begin(self, key: Key, total: int) -> _PartialMessage:
        sink = self.sinks.get(key[0])
        if sink is not None:
            if total > sink.most_bytes:
                raise WireError(f"a packet of {total} bytes, allowed: {sink.most_bytes}")
            if self._window[key[0]] <= 0:  # the last message may exceed the rest of the window
                raise WireError(f"a packet of {total} bytes beyond the receive window of {ROOM_BYTES} bytes")
            self._window[key[0]] -= window_cost(total)
            return _PartialMessage(key, total, None)
        if key not in self._unexpected and key in self._posted:
            size = len(self._posted[key][0].view)
            if size != total:
                raise WireError(f"a message of {total} bytes where one of {size} is expected")
            return _PartialMessage(key, total, _pop(self._posted, key))
        if total > EAGER_BYTES or self._unexpected_bytes + window_cost(total) > MAX_UNEXPECTED_BYTES:
            limits = f"{EAGER_BYTES}, and {MAX_UNEXPECTED_BYTES} together"
            raise WireError(f"an unexpected message of {total} bytes, allowed: {limits}")
        self._unexpected_bytes += window_cost(total)
        return _PartialMessage(key, total, None)

    def _match_unexpected(self, key: Key) -> None:
        """Copy unexpected messages into receives that were posted after them."""
        matches: list[tuple[Transfer, np.ndarray]] = []
        with self._lock:
            while key in self._unexpected and key in self._posted:
                data = _pop(self._unexpected, key)
                self._unexpected_bytes -= window_cost(data.size)
                matches.append((_pop(self._posted, key), data))
        for transfer, data in matches:
            if len(transfer.view) == data.size:
                transfer.view[:] = memoryview(data)
                transfer.finish()
            else:
                expected = len(transfer.view)
                transfer.finish(WireError(f"a message of {data.size} bytes where one of {expected} is expected"))


def _pop(queues: dict[Key, deque[Any]], key: Key) -> Any:
    """Take the first item, and remove the queue if it is empty: tags are not used again."""
    item = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return item
