"""Send queue of a connection to one rank; it outlives the TCP connections that carry it.

It schedules messages over the connection's subflows, and keeps unacknowledged frames to send them again after a cut.
The notes in receive_queue.py explain both.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipecomp.errors import WireError
from pipecomp.tls.frames import (
    CONTENT_BYTES,
    EAGER_BYTES,
    FIRST_LINK_STREAM,
    STRIPE_UNIT,
    FrameHeader,
    FrameKind,
)
from pipecomp.tls.receive_queue import Key, Transfer, window_cost

MAX_UNACKNOWLEDGED_BYTES = 1 << 26  # of all subflows; long messages stay where they are, uncopied
MAX_POSTED = 1 << 16  # receives that a peer may have posted and unmet, and streams that it may have opened


def piece_bytes(total: int, subflows: int) -> int:
    """Return the bytes of a piece of a striped message: all subflows get one, but none longer than a DATA frame's."""
    units = -(-total // (subflows * STRIPE_UNIT))
    return min(CONTENT_BYTES, units * STRIPE_UNIT)


@dataclass(slots=True)
class _MessageQueue:
    """Messages of one stream and tag, in order."""

    messages: deque[Transfer] = field(default_factory=deque)
    posted: deque[int] = field(default_factory=deque)  # lengths of the peer's receives
    sent: int = 0  # bytes of the first message
    number: int | None = None  # of the first message, if it is striped and has begun
    scheduled: bool = False  # True while it takes part in the round-robin


class _SentFrame(NamedTuple):
    """A numbered frame that the peer has not acknowledged. message: ends once all its frames are acknowledged."""

    parts: tuple[bytes, bytes | memoryview]
    message: Transfer | None


@dataclass(slots=True)
class _SendingSubflow:
    """The frames of one subflow.

    acknowledged: frames that the peer has. epoch: number of the current TCP connection. last_sent: the message whose
    frame was taken last, and the frame's bytes of it, which count once it is written. writing: the kernel may not have
    accepted all frames taken. waiting: its thread waits for frames. down: its TCP connection is being replaced.
    """

    acknowledged: int = 0
    unacknowledged: deque[_SentFrame] = field(default_factory=deque)
    unacknowledged_bytes: int = 0
    resend: deque[_SentFrame] = field(default_factory=deque)
    epoch: int = 0
    last_sent: tuple[Transfer, int] | None = None
    woken: bool = False
    writing: bool = False
    waiting: bool = False
    down: bool = False


class SendQueue:
    """Orders the frames to one rank: control frames first, then message queues in turn, one frame each.

    `next_frames` is called on the sending thread of each subflow, the others on any. The transfer of a long message
    ends when the peer has acknowledged all of it, since its memory may be sent again until then. Short messages, which
    are copied, and packets of links, which nobody changes, end when the kernel has accepted them.
    """

    def __init__(self) -> None:
        self._subflows = [_SendingSubflow()]
        self._active = 1  # subflows that carry new pieces
        self._queues: dict[Key, _MessageQueue] = {}
        self._credit: dict[int, int] = {}  # open stream -> bytes that may be sent
        self._schedule: deque[Key] = deque()
        self._control: deque[tuple[FrameKind, tuple[bytes, bytes]]] = deque()
        self._control_bytes = 0
        self._posted = 0
        self._striped = 0  # messages that have begun
        self._unacknowledged_bytes = 0  # of all subflows
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def limit_subflows(self, count: int) -> None:
        """Send no new pieces over other than the first `count` subflows."""
        with self._changed:
            self._active = min(self._active, count)

    def use_subflows(self, count: int) -> None:
        """Send over `count` subflows from now on; nothing of a subflow that ends may be unacknowledged."""
        with self._changed:
            del self._subflows[count:]
            self._subflows += [_SendingSubflow() for _ in range(count - len(self._subflows))]
            self._active = count

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
            self._queue_control(header, content)

    def _queue_control(self, header: FrameHeader, content: bytes = b"") -> None:
        self._control.append((header.kind, (header.pack(), content)))
        self._control_bytes += len(content)
        self._changed.notify_all()

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

    def wake(self, subflow: int = 0) -> None:
        """Make `next_frames` of a subflow return, even with nothing to send."""
        with self._changed:
            self._subflows[subflow].woken = True
            self._changed.notify_all()

    def next_frames(self, epoch: int, wait_s: float, subflow: int = 0) -> list[bytes | memoryview]:
        """Return buffers to send: one frame to be sent again, or all control frames and one frame of a message.

        Empty if nothing is to be sent within `wait_s`, after `wake`, or if the TCP connection `epoch` is over. The call
        also means that the frames of the call before were written.
        """
        flow = self._subflows[subflow]
        if flow.last_sent is not None:
            self._count_through([flow.last_sent])
            flow.last_sent = None
        with self._changed:
            flow.writing = False
            self._changed.notify_all()

            def returns() -> bool:
                has_frames = bool(flow.resend or (subflow == 0 and self._control)) or self._turn(subflow) is not None
                return has_frames or flow.woken or epoch != flow.epoch or self._error is not None

            flow.waiting = True
            self._changed.wait_for(returns, wait_s)
            flow.waiting = flow.woken = False
            parts: list[bytes | memoryview] = []
            if epoch != flow.epoch:
                return parts
            flow.writing = True
            if flow.resend:
                return list(flow.resend.popleft().parts)
            key = self._turn(subflow)
            if key is not None:
                self._begin(key)
            while self._control and subflow == 0:
                kind, frame = self._control.popleft()
                self._control_bytes -= len(frame[1])
                parts += frame
                if kind.numbered:
                    self._keep(flow, _SentFrame(frame, None))
            if key is not None:
                parts += self._next_piece(flow, key)
            return parts

    def _turn(self, subflow: int) -> Key | None:
        """The queue whose turn it is on a subflow; None if it has nothing to send.

        Note: a subflow leaves pieces of striped messages to one that waits as well and has less on its way. Otherwise
        the thread that is awake would send a short message alone, over a TCP connection whose window is small.
        """
        if not self._schedule or self._unacknowledged_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            return None
        if subflow >= self._active:
            return None
        if self._active == 1:
            return self._schedule[0]
        if self._subflows[subflow].down:
            return None
        own = self._subflows[subflow].unacknowledged_bytes
        up = [flow for flow in self._subflows[: self._active] if flow.waiting and not flow.down]
        yields = any(flow.unacknowledged_bytes < own for flow in up)
        for key in self._schedule:
            if not yields if self._is_striped(key) else subflow == 0:
                return key
        return None

    def _is_striped(self, key: Key) -> bool:
        """Return whether the first message of a queue travels over all subflows."""
        queue = self._queues[key]
        if queue.sent > 0 or queue.number is not None:
            return queue.number is not None
        size = len(queue.messages[0].view)
        return self._active > 1 and size > (STRIPE_UNIT if key[0] >= FIRST_LINK_STREAM else EAGER_BYTES)

    def _begin(self, key: Key) -> None:
        """Begin the first message of a queue, unless it has begun."""
        queue = self._queues[key]
        message = queue.messages[0]
        if queue.sent > 0 or queue.number is not None:
            return
        if self._is_striped(key):
            queue.number = self._striped
            self._striped += 1
            self._queue_control(FrameHeader(FrameKind.STRIPED, 0, *key, len(message.view)))
        message.began = time.perf_counter()
        if key[0] in self._credit:
            self._credit[key[0]] -= window_cost(len(message.view))

    def _next_piece(self, flow: _SendingSubflow, key: Key) -> tuple[bytes, bytes | memoryview]:
        """The next frame of the queue whose turn it is, of a message that has begun."""
        self._schedule.remove(key)
        queue = self._queues[key]
        queue.scheduled = False
        message = queue.messages[0]
        size = len(message.view)
        most = CONTENT_BYTES if queue.number is None else piece_bytes(size, self._active)
        piece: bytes | memoryview = message.view[queue.sent : queue.sent + most]
        if size <= EAGER_BYTES and key[0] < FIRST_LINK_STREAM:
            piece = bytes(piece)
        if queue.number is None:
            header = FrameHeader(FrameKind.DATA, len(piece), *key, size)
        else:
            header = FrameHeader(FrameKind.STRIPE, len(piece), queue.number, queue.sent, size)
        queue.sent += len(piece)
        frame = header.pack(), piece
        ends_written = size <= EAGER_BYTES or key[0] >= FIRST_LINK_STREAM
        if ends_written:
            flow.last_sent = message, len(piece)
        self._keep(flow, _SentFrame(frame, None if ends_written else message))
        if queue.sent == size:
            queue.messages.popleft()
            queue.sent, queue.number = 0, None
            if size > EAGER_BYTES and queue.posted and key[0] not in self._credit:
                queue.posted.popleft()
                self._posted -= 1
        self._schedule_if_allowed(key, queue)
        if not queue.messages and not queue.posted:
            del self._queues[key]
        return frame

    def _keep(self, flow: _SendingSubflow, frame: _SentFrame) -> None:
        size = sum(map(len, frame.parts))
        flow.unacknowledged.append(frame)
        flow.unacknowledged_bytes += size
        self._unacknowledged_bytes += size

    def _count_through(self, pieces: Sequence[tuple[Transfer, int]]) -> None:
        """Count pieces of messages that are through; end messages without any more."""
        with self._changed:
            for message, size in pieces:
                message.unsent -= size
        for message, _ in pieces:
            if message.unsent == 0:
                message.finish()

    def _schedule_if_allowed(self, key: Key, queue: _MessageQueue) -> None:
        """Let a queue take part in the round-robin if the peer is ready for its first message."""
        if queue.scheduled or not queue.messages:
            return
        size = len(queue.messages[0].view)
        begun = queue.sent > 0 or queue.number is not None
        if key[0] >= FIRST_LINK_STREAM or key[0] in self._credit:
            if not begun and self._credit.get(key[0], 0) <= 0:
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
    def acknowledged(self) -> int:
        """Frames that the peer has, of all subflows."""
        return sum(flow.acknowledged for flow in self._subflows)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of control frames, and of frames that were sent and are not acknowledged."""
        return self._control_bytes + self._unacknowledged_bytes

    def acknowledge(self, count: int, subflow: int = 0) -> None:
        """Note that the peer has received `count` frames of a subflow in all; WireError if fewer were sent."""
        through = []
        with self._changed:
            flow = self._subflows[subflow]
            sent = flow.acknowledged + len(flow.unacknowledged) - len(flow.resend)
            if not flow.acknowledged <= count <= sent:
                raise WireError(f"an acknowledgement of {count} frames, of {sent}")
            while flow.acknowledged < count:
                frame = flow.unacknowledged.popleft()
                size = sum(map(len, frame.parts))
                flow.unacknowledged_bytes -= size
                self._unacknowledged_bytes -= size
                flow.acknowledged += 1
                if frame.message is not None:
                    through.append((frame.message, len(frame.parts[1])))
            self._changed.notify_all()
        self._count_through(through)

    def pause(self, subflow: int) -> None:
        """Give a subflow no further messages until it is resumed; the others carry them."""
        with self._changed:
            self._subflows[subflow].down = True

    def resume(self, count: int, subflow: int = 0) -> int:
        """Go on over a new TCP connection whose peer has `count` frames; return the connection's epoch."""
        flow = self._subflows[subflow]
        with self._changed:
            flow.resend.clear()  # of the connection before
        self.acknowledge(count, subflow)
        with self._changed:
            flow.resend = deque(flow.unacknowledged)
            flow.epoch += 1
            flow.down = False
            self._changed.notify_all()
            return flow.epoch

    def wait_acknowledged(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until the peer has everything that may be sent; return whether it has."""
        return self._wait(lambda: bool(self._schedule or self._control or self._unacknowledged_bytes), wait_s)

    def wait_written(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until the kernel has accepted all control frames; return whether it has."""
        first = self._subflows[0]
        return self._wait(lambda: bool(self._control or first.writing or first.resend), wait_s)

    def wait_between_writes(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until frames that are being written have counted; return whether they have."""
        return self._wait(lambda: any(flow.writing for flow in self._subflows), wait_s)

    def _wait(self, pending: Callable[[], bool], wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or not pending(), wait_s)

    def fail(self, error: Exception) -> None:
        """End all pending transfers with `error`."""
        with self._changed:
            self._error = self._error or error
            waiting = [message for queue in self._queues.values() for message in queue.messages]
            for flow in self._subflows:
                waiting += [frame.message for frame in flow.unacknowledged if frame.message is not None]
                waiting += [] if flow.last_sent is None else [flow.last_sent[0]]
                flow.unacknowledged.clear()
                flow.resend.clear()
            for frames in (self._queues, self._schedule, self._control):
                frames.clear()
            self._unacknowledged_bytes = 0
            self._changed.notify_all()
        for message in waiting:
            message.finish(error)
