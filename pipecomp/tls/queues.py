"""A message on its way, for who waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from pipecomp.errors import LinkTimeoutError, WireError
from pipecomp.tls.frames import CONTENT_BYTES, EAGER_BYTES, LINKS, ROOM_BYTES, Header, Kind, pack, room_for


class Transfer:
    """Ends once: in order, or with an error. began, ended: of perf_counter, 0.0 before."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.error: Exception | None = None
        self.began = self.ended = 0.0
        self._done = threading.Event()
        self._callback: Callable[[Transfer], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def finish(self, error: Exception | None = None) -> None:
        """End it; a second time changes nothing."""
        with self._lock:
            if self._done.is_set():
                return
            self.error, self.ended = error, time.perf_counter()
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback(self)

    def then(self, callback: Callable[[Transfer], None]) -> None:
        """Call it when this ends, or now if it has; on the thread that ends it."""
        with self._lock:
            if not self._done.is_set():
                self._callback = callback
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it ends. Raises its error, or LinkTimeoutError after `timeout_s`."""
        if not self._done.wait(timeout_s):
            raise LinkTimeoutError(f"a message of {len(self.view)} bytes was not through after {timeout_s:g} s")
        if self.error is not None:
            raise self.error


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


KEPT_BYTES = 1 << 26  # of messages that were sent and not acknowledged; long ones stay where they are, uncopied
MOST_ASKED = 1 << 16  # receives that a rank may have ready and unmet: a few bytes each


class _Lane:
    __slots__ = ("asked", "messages", "ready", "sent")

    def __init__(self) -> None:
        self.messages: deque[Transfer] = deque()
        self.asked: deque[int] = deque()  # lengths
        self.sent = 0  # bytes of the first message
        self.ready = False  # among those that take turns


class _Kept(NamedTuple):
    """A numbered frame that the other side has not acknowledged. ends: the message that ends when it is."""

    parts: tuple[bytes, bytes | memoryview]
    ends: Transfer | None


class Outbox:
    """`send` and `notice` may be called on any thread, `take` on one.

    A long message's transfer ends when the other side has all of it, for until then its memory may be needed again. A
    short one's, which is copied, and a link's packet, which nobody changes, end when the system has them.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._room: dict[int, int] = {}  # by stream that is open, bytes that may be sent
        self._ready: deque[tuple[int, int]] = deque()
        self._notices: deque[tuple[Kind, tuple[bytes, bytes]]] = deque()
        self._notice_bytes = 0  # of their contents
        self._asked = 0
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._acknowledged = 0  # frames, which the first one that is kept comes after
        self._again: deque[_Kept] = deque()  # to be sent anew
        self._epoch = 0  # how many connections there were before this one
        self._leaving: Transfer | None = None  # of which `take` gave the end
        self._woken = False
        self._out = False  # whether what `take` gave may not have been handed to the system
        self._ended: Exception | None = None
        self._changed = threading.Condition()

    def send(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Queue a message, which must not change until its transfer has ended."""
        transfer = Transfer(view)
        with self._changed:
            ended = self._ended
            if ended is None:
                lane = self._lanes.setdefault((stream, tag), _Lane())
                lane.messages.append(transfer)
                self._check((stream, tag), lane)
        if ended is not None:
            transfer.finish(ended)
        return transfer

    def notice(self, header: Header, content: bytes = b"") -> None:
        """Queue a frame that goes before all messages."""
        with self._changed:
            self._notices.append((header.kind, (pack(header), content)))
            self._notice_bytes += len(content)
            self._changed.notify()

    def asked(self, stream: int, tag: int, total: int) -> None:
        """The other side is ready for a message of so many bytes. WireError if it says so endlessly."""
        with self._changed:
            self._asked += 1
            if self._asked > MOST_ASKED:
                raise WireError(f"more than {MOST_ASKED} receives are announced that nothing was sent for")
            lane = self._lanes.setdefault((stream, tag), _Lane())
            lane.asked.append(total)
            self._check((stream, tag), lane)

    def opened(self, stream: int, more: int) -> None:
        """The other side has room for `more` bytes of a stream's messages. WireError if it opens streams endlessly."""
        with self._changed:
            self._room[stream] = self._room.get(stream, 0) + more
            if len(self._room) > MOST_ASKED:
                raise WireError(f"more than {MOST_ASKED} streams are opened")
            for key, lane in list(self._lanes.items()):
                if key[0] == stream:
                    self._check(key, lane)

    def wake(self) -> None:
        """Let `take` return, whether there is something to send or not."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self, epoch: int, wait_s: float) -> list[bytes | memoryview]:
        """What to send next, as buffers: a frame that is sent anew, or all notices and one frame of a message.

        [] if there was nothing to send, somebody called `wake`, or `epoch` is over.
        """
        if self._leaving is not None:
            self._leaving.finish()
            self._leaving = None
        with self._changed:
            self._out = False
            self._changed.notify_all()
            if not self._may_take() and self._ended is None and not self._woken:
                self._changed.wait(wait_s)
            self._woken = False
            parts: list[bytes | memoryview] = []
            if epoch != self._epoch:
                return parts
            self._out = True
            if self._again:
                return list(self._again.popleft().parts)
            while self._notices:
                kind, frame = self._notices.popleft()
                self._notice_bytes -= len(frame[1])
                parts += frame
                if kind.numbered:
                    self._keep(_Kept(frame, None))
            if self._ready and self._kept_bytes < KEPT_BYTES:
                parts += self._next_piece()
            return parts

    def _may_take(self) -> bool:
        return bool(self._again or self._notices or (self._ready and self._kept_bytes < KEPT_BYTES))

    def _next_piece(self) -> tuple[bytes, bytes | memoryview]:
        """A frame of the lane whose turn it is."""
        key = self._ready.popleft()
        lane = self._lanes[key]
        lane.ready = False
        message = lane.messages[0]
        size = len(message.view)
        if lane.sent == 0:
            message.began = time.perf_counter()
            if key[0] in self._room:
                self._room[key[0]] -= room_for(size)
        piece: bytes | memoryview = message.view[lane.sent : lane.sent + CONTENT_BYTES]
        if size <= EAGER_BYTES and key[0] < LINKS:
            piece = bytes(piece)
        lane.sent += len(piece)
        frame = pack(Header(Kind.DATA, len(piece), *key, size)), piece
        ends = None
        if lane.sent == size:
            if size <= EAGER_BYTES or key[0] >= LINKS:
                self._leaving = message
            else:
                ends = message
            lane.messages.popleft()
            lane.sent = 0
            if size > EAGER_BYTES and lane.asked and key[0] not in self._room:
                lane.asked.popleft()
                self._asked -= 1
        self._keep(_Kept(frame, ends))
        self._check(key, lane)
        if not lane.messages and not lane.asked:
            del self._lanes[key]
        return frame

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_bytes += sum(map(len, kept.parts))

    # -- what the other side has

    @property
    def waiting_bytes(self) -> int:
        """Of notices and of what was sent, as far as the other side has not said that it has them."""
        return self._notice_bytes + self._kept_bytes

    def acknowledge(self, count: int) -> None:
        """It has `count` frames. WireError if there were not so many."""
        finished = []
        with self._changed:
            sent = self._acknowledged + len(self._kept) - len(self._again)
            if not self._acknowledged <= count <= sent:
                raise WireError(f"an acknowledgement of {count} frames, of {sent}")
            while self._acknowledged < count:
                kept = self._kept.popleft()
                self._kept_bytes -= sum(map(len, kept.parts))
                self._acknowledged += 1
                if kept.ends is not None:
                    finished.append(kept.ends)
            self._changed.notify_all()
        for transfer in finished:
            transfer.finish()

    @property
    def acknowledged(self) -> int:
        """How many frames the other side has."""
        return self._acknowledged

    def renew(self, count: int) -> int:
        """A new connection, over which `count` frames need not be sent again; returns its epoch."""
        with self._changed:
            self._again.clear()  # of the connection before
        self.acknowledge(count)
        with self._changed:
            self._again = deque(self._kept)
            self._epoch += 1
            self._changed.notify_all()
            return self._epoch

    def empty(self, wait_s: float) -> bool:
        """Whether the other side has everything, at once or before `wait_s` seconds are over."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended is not None or not (self._ready or self._notices or self._kept), wait_s
            )

    def handed_over(self, wait_s: float) -> bool:
        """Whether the system has all notices, at once or before `wait_s` seconds are over."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended is not None or not (self._notices or self._out or self._again), wait_s
            )

    def end(self, error: Exception) -> None:
        """Nothing can be sent any more; all that waits ends with `error`."""
        with self._changed:
            self._ended = self._ended or error
            waiting = [message for lane in self._lanes.values() for message in lane.messages]
            waiting += [kept.ends for kept in self._kept if kept.ends is not None]
            waiting += [] if self._leaving is None else [self._leaving]
            self._kept.clear()
            self._again.clear()
            self._lanes.clear()
            self._ready.clear()
            self._notices.clear()
            self._changed.notify_all()
        for message in waiting:
            message.finish(error)

    def _check(self, key: tuple[int, int], lane: _Lane) -> None:
        """Let a lane take turns if its first message may leave."""
        if lane.ready or not lane.messages:
            return
        size = len(lane.messages[0].view)
        if key[0] >= LINKS or key[0] in self._room:
            if lane.sent == 0 and self._room.get(key[0], 0) <= 0:
                return
        elif size > EAGER_BYTES:
            if not lane.asked:
                return
            if lane.asked[0] != size:
                raise WireError(f"a receive of {lane.asked[0]} bytes is ready for a message of {size}")
        lane.ready = True
        self._ready.append(key)
        self._changed.notify_all()
