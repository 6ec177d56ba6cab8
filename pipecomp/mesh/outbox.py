"""What waits to be sent to one rank: messages in lanes, which take turns frame by frame, and short notices before all.

A lane has the messages of one stream and tag, in order. A message leaves when the other side is ready for it: has asked
for one of its length (ASK), has opened the stream (OPEN), or at once if it is short.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from pipecomp.errors import WireError
from pipecomp.mesh.frames import CONTENT_BYTES, EAGER_BYTES, LINKS, Header, Kind, pack
from pipecomp.mesh.transfer import Transfer

MOST_ASKED = 1 << 16  # receives that a rank may have ready and unmet: a few bytes each


class _Lane:
    __slots__ = ("asked", "messages", "ready", "sent")

    def __init__(self) -> None:
        self.messages: deque[Transfer] = deque()
        self.asked: deque[int] = deque()  # lengths
        self.sent = 0  # bytes of the first message
        self.ready = False  # among those that take turns


class Outbox:
    """`send` and `notice` may be called on any thread, `take` on one."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._open: set[int] = set()
        self._ready: deque[tuple[int, int]] = deque()
        self._notices: deque[tuple[bytes, bytes]] = deque()
        self._asked = 0
        self._taken = False  # whether a piece of the first lane is being sent
        self._ended: Exception | None = None
        self._changed = threading.Condition()

    def send(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Queue a message, which must not change until its transfer has ended: then the system has it."""
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
            self._notices.append((pack(header), content))
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

    def opened(self, stream: int) -> None:
        """The other side takes all messages of a stream. WireError if it opens streams endlessly."""
        with self._changed:
            self._open.add(stream)
            if len(self._open) > MOST_ASKED:
                raise WireError(f"more than {MOST_ASKED} streams are opened")
            for key, lane in list(self._lanes.items()):
                if key[0] == stream:
                    self._check(key, lane)

    def take(self, wait_s: float) -> list[bytes | memoryview]:
        """What to send next, as buffers: all notices and one frame of a message; [] if there was nothing to send.

        Call `sent` when it is.
        """
        with self._changed:
            if not self._notices and not self._ready and self._ended is None:
                self._changed.wait(wait_s)
            parts: list[bytes | memoryview] = []
            while self._notices:
                parts += self._notices.popleft()
            self._taken = bool(self._ready)
            if self._taken:
                key = self._ready[0]
                lane = self._lanes[key]
                message = lane.messages[0]
                if lane.sent == 0:
                    message.began = time.perf_counter()
                piece = message.view[lane.sent : lane.sent + CONTENT_BYTES]
                lane.sent += len(piece)
                parts += [pack(Header(Kind.DATA, len(piece), *key, len(message.view))), piece]
            return parts

    def sent(self) -> None:
        """What `take` gave was sent: the next lane's turn."""
        finished = None
        with self._changed:
            if self._taken and self._ready:
                key = self._ready.popleft()
                lane = self._lanes[key]
                lane.ready = False
                message = lane.messages[0]
                if lane.sent == len(message.view):
                    finished = lane.messages.popleft()
                    lane.sent = 0
                    if len(message.view) > EAGER_BYTES and lane.asked and key[0] not in self._open:
                        lane.asked.popleft()
                        self._asked -= 1
                self._check(key, lane)
                if not lane.messages and not lane.asked:
                    del self._lanes[key]
            self._changed.notify_all()
        if finished is not None:
            finished.finish()

    def empty(self, wait_s: float) -> bool:
        """Whether everything is sent, at once or before `wait_s` seconds are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended is not None or not (self._ready or self._notices), wait_s)

    def end(self, error: Exception) -> None:
        """Nothing can be sent any more; all that waits ends with `error`."""
        with self._changed:
            self._ended = self._ended or error
            waiting = [message for lane in self._lanes.values() for message in lane.messages]
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
        if (size > EAGER_BYTES or key[0] >= LINKS) and key[0] not in self._open:
            if key[0] >= LINKS or not lane.asked:
                return
            if lane.asked[0] != size:
                raise WireError(f"a receive of {lane.asked[0]} bytes is ready for a message of {size}")
        lane.ready = True
        self._ready.append(key)
        self._changed.notify_all()
