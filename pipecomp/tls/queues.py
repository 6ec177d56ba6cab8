"""Send and receive queues of a connection to one rank; they outlive the TCP connections that carry it.

# Note: back-pressure
Neither end can make the other allocate memory that was not agreed:
- A message of up to EAGER_BYTES may be sent before its receive is posted. Such unexpected messages are bounded together
  (MAX_UNEXPECTED_BYTES).
- A longer message waits at its sender until the receiver has posted a receive of its length (READY), and then goes
  straight into the receiver's buffer.
- An open stream has a sink instead of posted receives. Its sender may send as much as the sink has granted (CREDIT), so
  a slow sink holds the sender back; a single message is limited by the sink's `most_bytes`.
- The sender keeps unacknowledged frames, up to MAX_UNACKNOWLEDGED_BYTES, to send them again after a cut.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipecomp.errors import LinkTimeoutError, WireError
from pipecomp.tls.frames import CONTENT_BYTES, EAGER_BYTES, FIRST_LINK_STREAM, ROOM_BYTES, FrameHeader, FrameKind

MAX_UNEXPECTED_BYTES = 1 << 26  # of all messages that arrived before their receives
MAX_UNACKNOWLEDGED_BYTES = 1 << 26  # long messages stay where they are, uncopied
MAX_POSTED = 1 << 16  # receives that a peer may have posted and unmet, and streams that it may have opened

_OVERHEAD_BYTES = 256  # memory for a queued message beside its content

Key = tuple[int, int]  # stream and tag


def window_cost(total: int) -> int:
    """Return the bytes of the receive window that a message of `total` bytes takes; both ends count alike."""
    return total + _OVERHEAD_BYTES


class Transfer:
    """A message that is being sent or received. It ends once, with or without an error.

    began, ended: of time.perf_counter, 0.0 before.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
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
    """A message that is arriving. transfer: None if unexpected, or for a sink; `data` holds it then."""

    __slots__ = ("began", "data", "filled", "transfer", "view")

    def __init__(self, total: int, transfer: Transfer | None) -> None:
        self.transfer = transfer
        self.data = np.empty(total, dtype=np.uint8) if transfer is None else None
        self.view = transfer.view if transfer is not None else memoryview(self.data)  # type: ignore[arg-type]
        self.filled = 0
        self.began = time.perf_counter()


class ReceiveQueue:
    """Matches arriving messages with posted receives and sinks; memory is allocated only for messages that are allowed.

    `buffer_for` and `commit` are called on the receiving thread, the others on any.
    """

    def __init__(self) -> None:
        self.sinks: dict[int, Sink] = {}
        self._posted: dict[Key, deque[Transfer]] = {}
        self._unexpected: dict[Key, deque[np.ndarray]] = {}
        self._unexpected_bytes = 0
        self._partial: dict[Key, _PartialMessage] = {}
        self._window: dict[int, int] = {}  # open stream -> bytes that the peer may still send
        self._released: dict[int, int] = {}  # open stream -> bytes taken by the sink and not granted again yet
        self._error: Exception | None = None
        self._lock = threading.Lock()

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
        if partial.transfer is not None:
            partial.transfer.began = partial.began
            partial.transfer.finish()
        elif sink is not None and partial.data is not None:
            sink.deliver(partial.data, partial.began)
        else:
            self._match_unexpected(key)
        return True

    def fail(self, error: Exception) -> None:
        """End all pending transfers with `error`."""
        with self._lock:
            self._error = self._error or error
            waiting = [transfer for posted in self._posted.values() for transfer in posted]
            waiting += [p.transfer for p in self._partial.values() if p.transfer is not None]
            self._posted.clear()
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
            return _PartialMessage(total, None)
        if key not in self._unexpected and key in self._posted:
            size = len(self._posted[key][0].view)
            if size != total:
                raise WireError(f"a message of {total} bytes where one of {size} is expected")
            return _PartialMessage(total, _pop(self._posted, key))
        if total > EAGER_BYTES or self._unexpected_bytes + window_cost(total) > MAX_UNEXPECTED_BYTES:
            limits = f"{EAGER_BYTES}, and {MAX_UNEXPECTED_BYTES} together"
            raise WireError(f"an unexpected message of {total} bytes, allowed: {limits}")
        self._unexpected_bytes += window_cost(total)
        return _PartialMessage(total, None)

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


@dataclass(slots=True)
class _MessageQueue:
    """Messages of one stream and tag, in order."""

    messages: deque[Transfer] = field(default_factory=deque)
    posted: deque[int] = field(default_factory=deque)  # lengths of the peer's receives
    sent: int = 0  # bytes of the first message
    scheduled: bool = False  # True while it takes part in the round-robin


class _SentFrame(NamedTuple):
    """A numbered frame that the peer has not acknowledged. message: ends with the acknowledgement."""

    parts: tuple[bytes, bytes | memoryview]
    message: Transfer | None


class SendQueue:
    """Orders the frames to one rank: control frames first, then message queues in turn, one frame each.

    `next_frames` is called on the sending thread, the others on any. The transfer of a long message ends when the peer
    has acknowledged all of it, since its memory may be sent again until then. Short messages, which are copied, and
    packets of links, which nobody changes, end when the kernel has accepted them.
    """

    def __init__(self) -> None:
        self.acknowledged = 0  # frames that the peer has
        self._queues: dict[Key, _MessageQueue] = {}
        self._credit: dict[int, int] = {}  # open stream -> bytes that may be sent
        self._schedule: deque[Key] = deque()
        self._control: deque[tuple[FrameKind, tuple[bytes, bytes]]] = deque()
        self._control_bytes = 0
        self._posted = 0
        self._unacknowledged: deque[_SentFrame] = deque()
        self._unacknowledged_bytes = 0
        self._resend: deque[_SentFrame] = deque()
        self._epoch = 0  # number of the current TCP connection
        self._last_sent: Transfer | None = None  # ends when the frames taken last are written
        self._woken = False
        self._writing = False  # True while the kernel may not have accepted all frames taken
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def send(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Queue a message, which must not change until its transfer has ended."""
        transfer = Transfer(view)
        with self._changed:
            error = self._error
            if error is None:
                queue = self._queues.setdefault((stream, tag), _MessageQueue())
                queue.messages.append(transfer)
                self._schedule_if_allowed((stream, tag), queue)
        if error is not None:
            transfer.finish(error)
        return transfer

    def send_control(self, header: FrameHeader, content: bytes = b"") -> None:
        """Queue a frame ahead of all messages."""
        with self._changed:
            self._control.append((header.kind, (header.pack(), content)))
            self._control_bytes += len(content)
            self._changed.notify()

    def receive_posted(self, stream: int, tag: int, total: int) -> None:
        """Note that the peer has posted a receive; WireError beyond MAX_POSTED."""
        with self._changed:
            self._posted += 1
            if self._posted > MAX_POSTED:
                raise WireError(f"more than {MAX_POSTED} receives are posted that nothing was sent for")
            queue = self._queues.setdefault((stream, tag), _MessageQueue())
            queue.posted.append(total)
            self._schedule_if_allowed((stream, tag), queue)

    def add_credit(self, stream: int, credit: int) -> None:
        """Note that the peer's receive window of a stream has grown; WireError beyond MAX_POSTED streams."""
        with self._changed:
            self._credit[stream] = self._credit.get(stream, 0) + credit
            if len(self._credit) > MAX_POSTED:
                raise WireError(f"more than {MAX_POSTED} streams are opened")
            for key, queue in list(self._queues.items()):
                if key[0] == stream:
                    self._schedule_if_allowed(key, queue)

    def wake(self) -> None:
        """Make `next_frames` return, even with nothing to send."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def next_frames(self, epoch: int, wait_s: float) -> list[bytes | memoryview]:
        """Return buffers to send: one frame to be sent again, or all control frames and one frame of a message.

        Empty if nothing is to be sent within `wait_s`, after `wake`, or if the TCP connection `epoch` is over. The call
        also means that the frames of the call before were written.
        """
        if self._last_sent is not None:
            self._last_sent.finish()
            self._last_sent = None
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            may_send = bool(self._resend or self._control) or self._may_send_data()
            if not may_send and self._error is None and not self._woken:
                self._changed.wait(wait_s)
            self._woken = False
            parts: list[bytes | memoryview] = []
            if epoch != self._epoch:
                return parts
            self._writing = True
            if self._resend:
                return list(self._resend.popleft().parts)
            while self._control:
                kind, frame = self._control.popleft()
                self._control_bytes -= len(frame[1])
                parts += frame
                if kind.numbered:
                    self._keep(_SentFrame(frame, None))
            if self._may_send_data():
                parts += self._next_data()
            return parts

    def _may_send_data(self) -> bool:
        return bool(self._schedule) and self._unacknowledged_bytes < MAX_UNACKNOWLEDGED_BYTES

    def _next_data(self) -> tuple[bytes, bytes | memoryview]:
        """The next DATA frame of the queue whose turn it is."""
        key = self._schedule.popleft()
        queue = self._queues[key]
        queue.scheduled = False
        message = queue.messages[0]
        size = len(message.view)
        if queue.sent == 0:
            message.began = time.perf_counter()
            if key[0] in self._credit:
                self._credit[key[0]] -= window_cost(size)
        piece: bytes | memoryview = message.view[queue.sent : queue.sent + CONTENT_BYTES]
        if size <= EAGER_BYTES and key[0] < FIRST_LINK_STREAM:
            piece = bytes(piece)
        queue.sent += len(piece)
        frame = FrameHeader(FrameKind.DATA, len(piece), *key, size).pack(), piece
        acknowledged_message = None
        if queue.sent == size:
            if size <= EAGER_BYTES or key[0] >= FIRST_LINK_STREAM:
                self._last_sent = message
            else:
                acknowledged_message = message
            queue.messages.popleft()
            queue.sent = 0
            if size > EAGER_BYTES and queue.posted and key[0] not in self._credit:
                queue.posted.popleft()
                self._posted -= 1
        self._keep(_SentFrame(frame, acknowledged_message))
        self._schedule_if_allowed(key, queue)
        if not queue.messages and not queue.posted:
            del self._queues[key]
        return frame

    def _keep(self, frame: _SentFrame) -> None:
        self._unacknowledged.append(frame)
        self._unacknowledged_bytes += sum(map(len, frame.parts))

    def _schedule_if_allowed(self, key: Key, queue: _MessageQueue) -> None:
        """Let a queue take part in the round-robin if the peer is ready for its first message."""
        if queue.scheduled or not queue.messages:
            return
        size = len(queue.messages[0].view)
        if key[0] >= FIRST_LINK_STREAM or key[0] in self._credit:
            if queue.sent == 0 and self._credit.get(key[0], 0) <= 0:
                return
        elif size > EAGER_BYTES:
            if not queue.posted:
                return
            if queue.posted[0] != size:
                raise WireError(f"a receive of {queue.posted[0]} bytes is posted for a message of {size}")
        queue.scheduled = True
        self._schedule.append(key)
        self._changed.notify_all()

    # -- acknowledgements, resumption and the end

    @property
    def waiting_bytes(self) -> int:
        """Bytes of control frames, and of frames that were sent and are not acknowledged."""
        return self._control_bytes + self._unacknowledged_bytes

    def acknowledge(self, count: int) -> None:
        """Note that the peer has received `count` frames in all; WireError if fewer were sent."""
        finished = []
        with self._changed:
            sent = self.acknowledged + len(self._unacknowledged) - len(self._resend)
            if not self.acknowledged <= count <= sent:
                raise WireError(f"an acknowledgement of {count} frames, of {sent}")
            while self.acknowledged < count:
                frame = self._unacknowledged.popleft()
                self._unacknowledged_bytes -= sum(map(len, frame.parts))
                self.acknowledged += 1
                if frame.message is not None:
                    finished.append(frame.message)
            self._changed.notify_all()
        for transfer in finished:
            transfer.finish()

    def resume(self, count: int) -> int:
        """Go on over a new TCP connection whose peer has `count` frames; return the connection's epoch."""
        with self._changed:
            self._resend.clear()  # of the connection before
        self.acknowledge(count)
        with self._changed:
            self._resend = deque(self._unacknowledged)
            self._epoch += 1
            self._changed.notify_all()
            return self._epoch

    def wait_acknowledged(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until the peer has everything that may be sent; return whether it has."""
        return self._wait(lambda: bool(self._schedule or self._control or self._unacknowledged), wait_s)

    def wait_written(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until the kernel has accepted all control frames; return whether it has."""
        return self._wait(lambda: bool(self._control or self._writing or self._resend), wait_s)

    def _wait(self, pending: Callable[[], bool], wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or not pending(), wait_s)

    def fail(self, error: Exception) -> None:
        """End all pending transfers with `error`."""
        with self._changed:
            self._error = self._error or error
            waiting = [message for queue in self._queues.values() for message in queue.messages]
            waiting += [frame.message for frame in self._unacknowledged if frame.message is not None]
            waiting += [] if self._last_sent is None else [self._last_sent]
            for frames in (self._unacknowledged, self._resend, self._queues, self._schedule, self._control):
                frames.clear()
            self._changed.notify_all()
        for message in waiting:
            message.finish(error)
