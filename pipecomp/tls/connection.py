"""The connection to one rank: a thread sends what waits, another takes what comes; whatever ends it is told to all.

It outlives the TCP connections that carry it (`Line`): frames are kept until the other side has said that it has them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, WireError
from pipecomp.tls.frames import CALL_BYTES, EAGER_BYTES, HEADER_BYTES, NOTE_BYTES, Header, Kind, pack, unpack
from pipecomp.tls.queues import Inbox, Outbox, Sink, Transfer
from pipecomp.tls.resumable import Line, Way
from pipecomp.tls.stream import SecureStream

_CLOSE_S, _SAY_S, _LOOK_S = 10.0, 2.0, 0.1
_REASON = 1000  # characters
_UNREAD_BYTES = 1 << 27  # that may wait for a rank which asks the key-value store for more
_ACKNOWLEDGED = 8  # frames of one message that are acknowledged together


class Connection:
    """One end; both threads let go of the interpreter to wait, encrypt and decrypt.

    peer: global rank. way: how to get there, and there again. timeout_s: silence after which it counts as lost. called:
    takes questions to the key-value store; answered: takes answers. Both are called on the receiving thread. hurry: a
    connection that is lost when this one ends is not waited for.
    """

    def __init__(
        self,
        peer: int,
        way: Way,
        *,
        timeout_s: float,
        called: Callable[[Connection, int, Any], None] | None = None,
        answered: Callable[[int, Any], None] | None = None,
        on_end: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.peer, self.hurry = peer, False
        self.failure: Exception | None = None
        self._outbox, self._inbox = Outbox(), Inbox()
        self._told = 0  # frames that were acknowledged
        self._complete = False  # whether what came since is worth an acknowledgement of its own
        self.line = Line(peer, way, self._outbox, timeout_s, self._drained)
        self._called, self._answered, self._on_end = called, answered, on_end
        self._lock = threading.Lock()
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{peer}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"pipecomp-recv-{peer}", daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def timeout_s(self) -> float:
        """Silence after which the peer counts as lost; may be set at any time."""
        return self.line.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.line.timeout_s = timeout_s

    # -- messages

    def send(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Queue a message; see `Outbox.send`."""
        return self._outbox.send(stream, tag, view)

    def receive(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Be ready for a message; see `Inbox.receive`."""
        transfer = self._inbox.receive(stream, tag, view)
        if len(view) > EAGER_BYTES and not transfer.done:
            self._outbox.notice(Header(Kind.ASK, 0, stream, tag, len(view)))
        return transfer

    def open(self, stream: int, sink: Sink) -> None:
        """Take all messages of a stream, as many as there is room for beside those that `taken` was not told of."""
        room = self._inbox.open(stream, sink)
        if self.failure is not None:
            sink.failed(self.failure)
        self._outbox.notice(Header(Kind.OPEN, 0, stream, total=room))

    def taken(self, stream: int, size: int) -> None:
        """A message of so many bytes of an open stream waits no more."""
        if more := self._inbox.taken(stream, size):
            self._outbox.notice(Header(Kind.OPEN, 0, stream, total=more))

    def note(self, stream: int, note: dict[str, Any]) -> None:
        """Tell who uses a stream at the other side something, before all messages."""
        text = json.dumps(note).encode()
        assert len(text) <= NOTE_BYTES, "a note is short"
        self._outbox.notice(Header(Kind.NOTE, len(text), stream), text)

    def call(self, kind: Kind, number: int, value: Any) -> None:
        """Send a question to the key-value store, or an answer. LinkError if it is too long, or the peer is lost."""
        text = json.dumps(value).encode()
        if len(text) > CALL_BYTES:
            raise LinkError(f"a value for the key-value store has {len(text)} bytes, allowed: {CALL_BYTES}")
        if kind == Kind.ANSWER and (waiting := self._outbox.waiting_bytes) > _UNREAD_BYTES:
            self.give_up(LinkError(f"rank {self.peer} asks, and does not take {waiting} bytes of answers"))
        if self.failure is not None:
            raise self.failure
        self._outbox.notice(Header(kind, len(text), tag=number), text)

    # -- the end

    def close(self) -> None:
        """End in order: send what waits, then say so, and wait for the other side to do the same."""
        self.say_goodbye()
        self.finish()

    def wait_for_end(self, wait_s: float) -> None:
        """Until the other side has ended the connection, at most so long."""
        self._receiver.join(wait_s)

    def say_goodbye(self, reason: str = "") -> None:
        """The first half of `close`. reason: why this rank ends, which does not wait for what is on its way then."""
        if not reason:
            self.drain(self._outbox.empty)
        self.line.closing = True
        if reason:
            self._say_why(reason)
        else:
            self._outbox.notice(Header(Kind.BYE, 0))
            self._outbox.handed_over(_CLOSE_S)

    def finish(self) -> None:
        """The second half of `close`."""
        self._receiver.join(_CLOSE_S)
        self.give_up(PeerLostError(f"the connection to rank {self.peer} is closed", self.peer))
        for thread in (self._sender, self._receiver):
            thread.join(_CLOSE_S)

    def drain(self, done: Callable[[float], bool]) -> bool:
        """Wait until it is done, for as long as the other side gets anything: a slow link may need minutes.

        Args:
            done: Waits for at most so many seconds, and says whether it is.

        Returns:
            Whether it is. Not if nothing moves for `timeout_s`, but for a connection that is lost, which is still made
            anew or ends by itself; in a hurry after a few seconds.
        """
        since, before = time.monotonic(), self._outbox.acknowledged
        while not done(_LOOK_S):
            if self._outbox.acknowledged != before and not self.hurry:
                since, before = time.monotonic(), self._outbox.acknowledged
            limit_s = _CLOSE_S if self.hurry else max(_CLOSE_S, self.timeout_s)
            if time.monotonic() - since > limit_s and (self.hurry or not self.line.lost):
                return False
        return True

    def flush(self, wait_s: float) -> bool:
        """Whether the peer has everything that may leave within `wait_s` seconds."""
        return self._outbox.empty(wait_s)

    def give_up(self, error: Exception) -> None:
        """End it, with what is still on its way."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._outbox.end(error)
        self._inbox.end(error)
        self.line.give_up(error)
        self._on_end(error)

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, WireError):
            return WireError(f"rank {self.peer} sent {error}")
        if isinstance(error, LinkError):
            return error
        if isinstance(error, TimeoutError):
            return LinkTimeoutError(
                f"nothing from rank {self.peer} for {self.timeout_s:g} s: it is stopped, or the link to it is down"
            )
        if isinstance(error, (OSError, EOFError)):
            why = str(error) or "it ended"
            return PeerLostError(f"lost rank {self.peer}: its connection was closed ({why})", self.peer)
        return LinkError(f"the connection to rank {self.peer} failed: {type(error).__name__}: {error}")

    # -- the sending thread

    def _send_all(self) -> None:
        sent_at = time.monotonic()
        while self.failure is None:
            stream, epoch = self.line.now()
            beat_s = min(1.0, self.timeout_s / 10)
            try:
                parts = self._outbox.take(epoch, beat_s)
                received = self.line.received
                if received != self._told or (not parts and time.monotonic() - sent_at >= beat_s):
                    first = pack(Header(Kind.HAVE, 0, total=received))  # nothing else to say is a sign of life
                    parts = [first + parts[0], *parts[1:]] if parts else [first]
                if parts:
                    stream.send(*parts)
                    self._told, sent_at = received, time.monotonic()
            except (OSError, EOFError) as error:
                self.line.drop(stream, error)
                self.line.wait_for_other(stream)
            except Exception as error:
                explained = self._explain(error)
                with contextlib.suppress(Exception):  # that the other side hears why is not sure
                    stream.send(*_reason(explained))
                self.give_up(explained)

    def _say_why(self, reason: object) -> None:
        """Tell the other side that this one gives up, which must not wait for a new connection."""
        _, text = _reason(reason)
        self._outbox.notice(Header(Kind.BYE, len(text)), text)
        self._outbox.handed_over(_SAY_S)

    def _drained(self) -> None:
        """On the receiving thread, which has nothing more to do for now."""
        if self._complete or self.line.received - self._told >= _ACKNOWLEDGED:
            self._complete = False
            self._outbox.wake()

    # -- the receiving thread

    def _receive_all(self) -> None:
        beginning = memoryview(bytearray(HEADER_BYTES))
        try:
            while self.failure is None:
                stream, _ = self.line.now()
                try:
                    self._receive_from(stream, beginning)
                except PeerLostError:
                    raise
                except (OSError, EOFError) as error:
                    self.line.renew(stream, error)
        except Exception as error:
            explained = self._explain(error)
            if self.line.closing:
                self._outbox.handed_over(_SAY_S)  # so that the other side hears that this one ends in order
            elif self.failure is None and not isinstance(explained, (PeerLostError, LinkTimeoutError)):
                self._say_why(explained)
            self.give_up(explained)

    def _receive_from(self, stream: SecureStream, beginning: memoryview) -> None:
        """Take frames until the connection ends."""
        while True:
            stream.receive_into(beginning)
            header = unpack(beginning)
            if header.kind == Kind.DATA:
                place = self._inbox.place(header)
                stream.receive_into(place)
                self.line.received += 1
                self._complete |= self._inbox.placed(header)
            elif header.kind == Kind.BYE:
                raise self._farewell(stream, header)
            elif header.kind == Kind.HAVE:
                self._outbox.acknowledge(header.total)
            else:
                self._take_notice(stream, header)
            self.line.heard = time.monotonic()

    def _take_notice(self, stream: SecureStream, header: Header) -> None:
        content = bytearray(header.size)
        stream.receive_into(memoryview(content))
        self.line.received += 1
        self._complete = True
        if header.kind == Kind.ASK:
            self._outbox.asked(header.stream, header.tag, header.total)
        elif header.kind == Kind.OPEN:
            self._outbox.opened(header.stream, header.total)
        else:
            self._take_json(header, _value(header, content))

    def _farewell(self, stream: SecureStream, header: Header) -> Exception:
        content = bytearray(header.size)
        stream.receive_into(memoryview(content))
        if not content:
            return PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
        reason = str(_value(header, content))[:_REASON]
        return PeerLostError(f"rank {self.peer} gave up the connection to this rank: {reason}", self.peer)

    def _take_json(self, header: Header, value: Any) -> None:
        if header.kind == Kind.NOTE:
            sink = self._inbox.sinks.get(header.stream)
            if sink is not None and isinstance(value, dict):
                sink.noted(value)
        elif header.kind == Kind.CALL and self._called is not None:
            self._called(self, header.tag, value)
        elif header.kind == Kind.ANSWER and self._answered is not None:
            self._answered(header.tag, value)
        else:
            raise WireError(f"a frame {header.kind.name} that this rank has not to do with")


def _reason(reason: object) -> tuple[bytes, bytes]:
    """A frame that says why the connection ends."""
    text = json.dumps(str(reason)[:_REASON]).encode()
    return pack(Header(Kind.BYE, len(text))), text


def _value(header: Header, content: bytearray) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame {header.kind.name} that is no JSON") from error
