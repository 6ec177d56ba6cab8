"""The connection to one rank: messages, notices and store requests over one or more resumable TLS streams.

# Note: one thread per direction
A sending and a receiving thread serve each subflow. Both release the interpreter while they wait, encrypt or
decrypt, so a long send delays neither what arrives nor the training thread. Two ranks that send long messages to each
other would block for ever if one thread had to finish its send before it reads. Keep-alives come from the sending
thread and go on while the training thread computes for minutes.

# Note: subflows
One TCP connection carries at most its window in a round trip, and slows down after a lost packet; on a long line that
is less than the line's rate. `use_subflows` opens further TCP connections beside the first one. Each is authenticated
like the first, belongs to the connection by a secret that travels over the first one only, numbers and resumes its own
frames, and is resumed like the first after a cut. If one cannot be resumed, the connection fails.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, PipecompError, WireError, foreign_text
from pipecomp.tls.frames import (
    EAGER_BYTES,
    HEADER_BYTES,
    MAX_SUBFLOWS,
    NOTICE_BYTES,
    STORE_BYTES,
    FrameHeader,
    FrameKind,
)
from pipecomp.tls.handshake import FIRST_SUBFLOW, ConnectionRejectedError, IncomingConnection, SubflowId
from pipecomp.tls.receive_queue import ReceiveQueue, Sink, Transfer
from pipecomp.tls.resumable import Dialer, ResumableStream
from pipecomp.tls.send_queue import SendQueue
from pipecomp.tls.stream import SecureStream

_CLOSE_S, _REASON_S, _DRAIN_POLL_S = 10.0, 2.0, 0.1
_REASON_CHARACTERS = 1000
_MAX_UNREAD_BYTES = 1 << 27  # that may wait for a rank which sends further requests to the key-value store
_ACK_FRAMES = 8  # of one message, acknowledged together
_OPEN_RETRY_S, _OPEN_REPLY_S = 0.2, 10.0
_MAX_AGREEMENTS = 2  # SUBFLOWS frames that a peer may be ahead


class _Subflow:
    """One stream of a connection, with its two threads; `start` starts them."""

    def __init__(self, connection: Connection, dialer: Dialer, timeout_s: float, identity: SubflowId) -> None:
        self.number, self._connection = identity.number, connection
        self._send_queue, self._receive_queue = connection._send_queue, connection._receive_queue
        self.acknowledged = 0  # frames of the peer
        self.ack_due = False  # True if enough has arrived since for an acknowledgement of its own
        self.ended = False  # True once the connection goes on without it
        self.resumable = ResumableStream(connection.peer, dialer, self._send_queue, timeout_s, self._on_idle, identity)
        name = f"{connection.peer}-{self.number + 1}" if self.number else str(connection.peer)
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{name}", daemon=True)
        self.receiver = threading.Thread(target=self._receive_all, name=f"pipecomp-recv-{name}", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._sender.start()
        self.receiver.start()

    def join(self, wait_s: float) -> None:
        """Wait for both threads, at most `wait_s` seconds each."""
        for thread in (self._sender, self.receiver):
            if thread.is_alive():
                thread.join(wait_s)

    def end(self) -> None:
        """Close the stream and end both threads; the connection goes on without it."""
        self.ended = self.resumable.closing = True
        self.resumable.fail(PeerLostError("this stream is no longer used", self._connection.peer))
        self._send_queue.wake(self.number)
        self.join(_CLOSE_S)

    # -- the sending thread

    def _send_all(self) -> None:
        sent_at = time.monotonic()
        while self._connection.failure is None and not self.ended:
            stream, epoch = self.resumable.current()
            keep_alive_s = min(1.0, self.resumable.timeout_s / 10)
            try:
                parts = self._send_queue.next_frames(epoch, keep_alive_s, self.number)
                received = self.resumable.received
                idle = not parts and time.monotonic() - sent_at >= keep_alive_s
                if received != self.acknowledged or idle:
                    ack = FrameHeader(FrameKind.ACK, 0, total=received).pack()
                    parts = [ack + parts[0], *parts[1:]] if parts else [ack]
                if parts:
                    stream.send(*parts)
                    self.acknowledged, sent_at = received, time.monotonic()
            except (OSError, EOFError) as error:
                self.resumable.drop(stream, error)
                self.resumable.wait_for_replacement(stream)
            except Exception as error:
                explained = self._connection.explain(error)
                with contextlib.suppress(Exception):  # the peer may not learn the reason
                    header, text = _close_frame(explained)
                    stream.send(header.pack(), text)
                self._connection.fail(explained)

    def _on_idle(self) -> None:
        """Acknowledge the frames that have arrived; called on the receiving thread before it waits."""
        if self.ack_due or self.resumable.received - self.acknowledged >= _ACK_FRAMES:
            self.ack_due = False
            self._send_queue.wake(self.number)
        self._receive_queue.check_progress(self.resumable.timeout_s)

    # -- the receiving thread

    def _receive_all(self) -> None:
        try:
            while self._connection.failure is None and not self.ended:
                stream, _ = self.resumable.current()
                try:
                    self.receive_from(stream)
                except PeerLostError:
                    raise
                except (OSError, EOFError) as error:
                    self.resumable.reconnect(stream, error)
        except Exception as error:
            if not (self.number and self.resumable.closing):
                self._connection.end_by(error)

    def receive_from(self, stream: SecureStream) -> None:
        """Process frames until the stream ends."""
        beginning = memoryview(bytearray(HEADER_BYTES))
        while True:
            stream.receive_into(beginning)
            header = FrameHeader.unpack(beginning)
            if self.number and header.kind not in (FrameKind.STRIPE, FrameKind.ACK):
                raise WireError(f"a frame {header.kind.name} on stream {self.number + 1}, which carries pieces only")
            if header.kind == FrameKind.DATA:
                stream.receive_into(self._receive_queue.buffer_for(header))
                self.resumable.received += 1
                self.ack_due |= self._receive_queue.commit(header)
            elif header.kind == FrameKind.STRIPE:
                stream.receive_into(self._receive_queue.stripe_buffer(header, self.resumable.timeout_s))
                self.resumable.received += 1
                if self._receive_queue.commit_stripe(header):
                    self._connection.acknowledge_all()
            elif header.kind == FrameKind.ACK:
                self._send_queue.acknowledge(header.total, self.number)
            else:
                content = bytearray(header.size)
                stream.receive_into(memoryview(content))
                if header.kind != FrameKind.CLOSE:
                    self.resumable.received += 1
                    self.ack_due = True
                self._connection.process_control(header, content)
            self.resumable.last_frame = time.monotonic()


class Connection:
    """One end of the connection to another rank.

    Args:
        peer: Global rank.
        dialer: The first stream, and how to replace it.
        timeout_s: Silence after which the peer is lost.
        on_store_request: Takes requests to the key-value store, on the receiving thread.
        on_store_reply: Takes replies, on the receiving thread.
        on_end: Called once with the error that ends the connection.
    """

    def __init__(
        self,
        peer: int,
        dialer: Dialer,
        *,
        timeout_s: float,
        on_store_request: Callable[[Connection, int, Any], None] | None = None,
        on_store_reply: Callable[[int, Any], None] | None = None,
        on_end: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.peer = peer
        self.hurry = False  # True if `drain` does not wait for a connection that is down
        self.failure: Exception | None = None
        self._send_queue, self._receive_queue = SendQueue(), ReceiveQueue()
        self._on_store_request, self._on_store_reply, self._on_end = on_store_request, on_store_reply, on_end
        self._lock = threading.Lock()
        self._dialer, self._secret = dialer, ""
        # Peer's counts of subflows, and the secret if it makes that; None at the connection's end.
        self._agreements: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._arrived: dict[int, SecureStream] = {}  # of subflows that are being opened by the peer
        self._expected = 1  # subflows, those that are being opened included
        self._arrival = threading.Condition()
        first = _Subflow(self, dialer, timeout_s, FIRST_SUBFLOW)
        self.subflows = [first]
        first.start()

    @property
    def resumable(self) -> ResumableStream:
        """The stream of the first subflow."""
        return self.subflows[0].resumable

    @property
    def timeout_s(self) -> float:
        """Silence after which the peer is lost; may be set at any time."""
        return self.resumable.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        for subflow in self.subflows:
            subflow.resumable.timeout_s = timeout_s

    # -- messages

    def send(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Queue a message, which must not change until its transfer has ended."""
        return self._send_queue.send(stream, tag, view)

    def receive(self, stream: int, tag: int, view: memoryview) -> Transfer:
        """Post a receive of one message of len(view) bytes."""
        transfer = self._receive_queue.receive(stream, tag, view)
        if len(view) > EAGER_BYTES and not transfer.done:
            self._send_queue.send_control(FrameHeader(FrameKind.READY, 0, stream, tag, len(view)))
        return transfer

    def open_stream(self, stream: int, sink: Sink) -> None:
        """Deliver all messages of a stream to `sink`, up to its receive window; `release` reopens the window."""
        credit = self._receive_queue.open_stream(stream, sink)
        if self.failure is not None:
            sink.failed(self.failure)
        self._send_queue.send_control(FrameHeader(FrameKind.CREDIT, 0, stream, total=credit))

    def release(self, stream: int, size: int) -> None:
        """Note that the sink has taken a message of `size` bytes."""
        if credit := self._receive_queue.release(stream, size):
            self._send_queue.send_control(FrameHeader(FrameKind.CREDIT, 0, stream, total=credit))

    def send_notice(self, stream: int, notice: dict[str, Any]) -> None:
        """Send a notice to the peer's sink of a stream, ahead of all messages."""
        text = json.dumps(notice).encode()
        assert len(text) <= NOTICE_BYTES, "notices are short"
        self._send_queue.send_control(FrameHeader(FrameKind.NOTICE, len(text), stream), text)

    def send_store(self, kind: FrameKind, number: int, value: Any) -> None:
        """Send a request to the key-value store, or a reply; LinkError if it is too long or the peer is lost."""
        text = json.dumps(value).encode()
        if len(text) > STORE_BYTES:
            raise LinkError(f"a value for the key-value store has {len(text)} bytes, allowed: {STORE_BYTES}")
        if kind == FrameKind.STORE_REPLY and (waiting := self._send_queue.waiting_bytes) > _MAX_UNREAD_BYTES:
            self.fail(LinkError(f"rank {self.peer} sends store requests and leaves {waiting} bytes of replies unread"))
        if self.failure is not None:
            raise self.failure
        self._send_queue.send_control(FrameHeader(kind, len(text), tag=number), text)

    # -- subflows

    def use_subflows(self, count: int) -> None:
        """Open or close subflows until there are `count`; the peer must call this with the same number.

        All earlier messages of both ends must have been received.

        Raises:
            LinkError: The peer has another number, or a subflow cannot be opened.
            LinkTimeoutError: The peer does not call this.
        """
        self._send_queue.limit_subflows(count)
        if not self.drain(self._send_queue.wait_acknowledged):
            raise self.failure or LinkTimeoutError(
                f"rank {self.peer} does not take what was sent before the number of streams changes", self.peer
            )
        serves = self.resumable.current()[0].server
        if serves and not self._secret:
            self._secret = secrets.token_hex(16)
        for subflow in self.subflows[count:]:
            subflow.resumable.closing = True
        with self._arrival:
            self._expected = count
        text = json.dumps({"count": count, "secret": self._secret if serves else ""}).encode()
        self._send_queue.send_control(FrameHeader(FrameKind.SUBFLOWS, len(text)), text)
        theirs = self._next_agreement()
        if theirs[0] != count:
            raise LinkError(
                f"rank {self.peer} uses {theirs[0]} streams, this rank {count}. Give all ranks the same "
                "transport.streams"
            )
        self._secret = self._secret if serves else theirs[1]
        while len(self.subflows) > count:
            self.subflows.pop().end()
        missing = [SubflowId(number, self._secret) for number in range(len(self.subflows), count)]
        streams = self._open_all(missing)
        self._send_queue.use_subflows(count)
        for identity, stream in zip(missing, streams, strict=True):
            subflow = _Subflow(self, self._dialer._replace(stream=stream), self.timeout_s, identity)
            self.subflows.append(subflow)
            subflow.start()
        if self.failure is not None:
            for subflow in self.subflows:
                subflow.resumable.fail(self.failure)
            raise self.failure

    def check_admission(self, incoming: IncomingConnection) -> None:
        """Raise LinkError unless the connection has, or expects, the subflow that the peer names."""
        number, secret = incoming.subflow
        fits = not number or (bool(self._secret) and hmac.compare_digest(secret.encode(), self._secret.encode()))
        if number >= self._expected or not fits:
            raise LinkError(f"the connection to rank {self.peer} has no such stream {number + 1}")

    def admit(self, incoming: IncomingConnection, accept: Callable[[int], None]) -> None:
        """Take a TCP connection that the peer made and `check_admission` has passed.

        Args:
            incoming: The peer's connection.
            accept: Called with the number of frames received here; sends it to the peer.
        """
        number = incoming.subflow.number
        known = next((subflow for subflow in self.subflows if subflow.number == number), None)
        if known is not None:
            known.resumable.replace(incoming.stream, incoming.received, accept)
            return
        accept(0)
        with self._arrival:
            before = self._arrived.pop(number, None)
            self._arrived[number] = incoming.stream
            self._arrival.notify_all()
        if before is not None:
            before.close()

    def acknowledge_all(self) -> None:
        """Acknowledge what has arrived on all subflows, because a message is complete."""
        for subflow in list(self.subflows):
            if subflow.resumable.received != subflow.acknowledged:
                self._send_queue.wake(subflow.number)

    def _next_agreement(self) -> tuple[int, str]:
        """Wait for the peer's count of subflows."""
        try:
            theirs = self._agreements.get(timeout=self.timeout_s)
        except queue.Empty:
            raise LinkTimeoutError(
                f"rank {self.peer} did not agree on streams within {self.timeout_s:g} s. Give all ranks the same "
                "transport.streams",
                self.peer,
            ) from None
        if theirs is None:
            assert self.failure is not None
            raise self.failure
        return theirs

    def _open_all(self, identities: list[SubflowId]) -> list[SecureStream]:
        """Open subflows at the same time; if one fails, close all and raise its error."""
        if not identities:
            return []
        with ThreadPoolExecutor(len(identities)) as pool:
            opening = [pool.submit(self._open, identity) for identity in identities]
        errors = [error for future in opening if (error := future.exception()) is not None]
        if errors:
            for future in opening:
                if future.exception() is None:
                    future.result().close()
            raise errors[0]
        return [future.result() for future in opening]

    def _open(self, identity: SubflowId) -> SecureStream:
        """Return the first stream of a subflow: a new one, or one that the peer makes."""
        until = time.monotonic() + self.timeout_s
        last: Exception | None = None
        while self.failure is None and time.monotonic() < until:
            if self._dialer.awaits_peer:
                with self._arrival:
                    self._arrival.wait_for(lambda: identity.number in self._arrived, _OPEN_RETRY_S)
                    if identity.number in self._arrived:
                        return self._arrived.pop(identity.number)
                continue
            try:
                return self._dialer.dials[0](identity, 0, _OPEN_REPLY_S)[0]
            except ConnectionRejectedError as error:
                raise LinkError(f"rank {self.peer} rejects stream {identity.number + 1}: {error}") from error
            except (OSError, EOFError, PipecompError) as error:
                last = error
            time.sleep(_OPEN_RETRY_S)
        if self.failure is not None:
            raise self.failure
        raise LinkError(f"stream {identity.number + 1} to rank {self.peer} could not be opened: {last or 'none came'}")

    # -- the end

    def close(self) -> None:
        """Send all queued frames, then end the connection together with the peer."""
        self.close_gracefully()
        self.finish()

    def wait_for_end(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the peer to end the connection."""
        self.subflows[0].receiver.join(wait_s)

    def close_gracefully(self, reason: str = "") -> None:
        """Perform the first half of `close`: send all queued frames and a CLOSE frame.

        Args:
            reason: Reason for ending; if set, messages in transit are not waited for.
        """
        if reason:
            self._set_closing()
            self._send_reason(reason)
            return
        self.drain(self._send_queue.wait_acknowledged)
        self._set_closing()
        self._send_queue.send_control(FrameHeader(FrameKind.CLOSE, 0))
        self._send_queue.wait_written(_CLOSE_S)

    def finish(self) -> None:
        """Perform the second half of `close`: wait for the peer's CLOSE frame and end both threads."""
        self.wait_for_end(_CLOSE_S)
        self.fail(PeerLostError(f"the connection to rank {self.peer} is closed", self.peer))
        for subflow in self.subflows:
            subflow.join(_CLOSE_S)

    def _set_closing(self) -> None:
        for subflow in self.subflows:
            subflow.resumable.closing = True

    def drain(self, done: Callable[[float], bool]) -> bool:
        """Wait until `done`, for as long as the peer acknowledges anything: a slow link may need minutes.

        Args:
            done: Waits at most so many seconds; returns whether the condition holds.

        Returns:
            True if the condition holds. False if nothing moves for `timeout_s`, except while the connection is down,
            since it is then resumed or fails by itself; with `hurry`, False after a few seconds.
        """
        since, before = time.monotonic(), self._send_queue.acknowledged
        while not done(_DRAIN_POLL_S):
            if self._send_queue.acknowledged != before and not self.hurry:
                since, before = time.monotonic(), self._send_queue.acknowledged
            limit_s = _CLOSE_S if self.hurry else max(_CLOSE_S, self.timeout_s)
            if time.monotonic() - since > limit_s and (self.hurry or not self._is_down()):
                return False
        return True

    def _is_down(self) -> bool:
        return any(subflow.resumable.is_down for subflow in self.subflows)

    def flush(self, wait_s: float) -> bool:
        """Wait until the peer has everything that may be sent; return whether it has within `wait_s`."""
        return self._send_queue.wait_acknowledged(wait_s)

    def fail(self, error: Exception) -> None:
        """End the connection and everything in transit with `error`."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._send_queue.fail(error)
        self._receive_queue.fail(error)
        for subflow in list(self.subflows):
            subflow.resumable.fail(error)
        with self._arrival:
            arrived, self._expected = list(self._arrived.values()), 0
            self._arrived.clear()
            self._arrival.notify_all()
        for stream in arrived:
            stream.close()
        self._agreements.put(None)
        self._on_end(error)

    def end_by(self, error: Exception) -> None:
        """End the connection by an error of a receiving thread, and tell the peer if it may not know."""
        explained = self.explain(error)
        if self.resumable.closing:
            self._send_queue.wait_written(_REASON_S)  # the peer learns that this end closes in order
        elif self.failure is None and not isinstance(explained, (PeerLostError, LinkTimeoutError)):
            self._send_reason(explained)
        self.fail(explained)

    def explain(self, error: Exception) -> Exception:
        """Return the error for users, with the peer's rank."""
        if isinstance(error, WireError):
            return WireError(f"rank {self.peer} sent {error}")
        if isinstance(error, LinkError):
            return error
        if isinstance(error, TimeoutError):
            return LinkTimeoutError(
                f"nothing from rank {self.peer} for {self.timeout_s:g} s: it is stopped, or the link to it is down",
                self.peer,
            )
        if isinstance(error, (OSError, EOFError)):
            cause = str(error) or "it ended"
            return PeerLostError(f"lost rank {self.peer}: its connection was closed ({cause})", self.peer)
        return LinkError(f"the connection to rank {self.peer} failed: {type(error).__name__}: {error}")

    def _send_reason(self, reason: object) -> None:
        """Send the peer the reason for this end's failure, without waiting for a new connection."""
        self._send_queue.send_control(*_close_frame(reason))
        self._send_queue.wait_written(_REASON_S)

    # -- the receiving thread of the first subflow

    def process_control(self, header: FrameHeader, content: bytearray) -> None:
        """Process a frame that is not a piece of a message."""
        if header.kind == FrameKind.CLOSE:
            if not content:
                # The peer may have closed after a message that this end's thread has written and not counted yet.
                self._send_queue.wait_between_writes(_REASON_S)
                raise PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
            reason = foreign_text(_parse(header, content), _REASON_CHARACTERS)
            raise PeerLostError(f"rank {self.peer} gave up the connection to this rank: {reason}", self.peer)
        if header.kind == FrameKind.READY:
            self._send_queue.receive_posted(header.stream, header.tag, header.total)
        elif header.kind == FrameKind.CREDIT:
            self._send_queue.add_credit(header.stream, header.total)
        elif header.kind == FrameKind.STRIPED:
            self._receive_queue.begin_striped(header)
        elif header.kind == FrameKind.SUBFLOWS:
            self._take_agreement(_parse(header, content))
        elif header.kind == FrameKind.NOTICE:
            sink, notice = self._receive_queue.sinks.get(header.stream), _parse(header, content)
            if sink is not None and isinstance(notice, dict):
                sink.noted(notice)
        elif header.kind == FrameKind.STORE_REQUEST and self._on_store_request is not None:
            self._on_store_request(self, header.tag, _parse(header, content))
        elif header.kind == FrameKind.STORE_REPLY and self._on_store_reply is not None:
            self._on_store_reply(header.tag, _parse(header, content))
        else:
            raise WireError(f"a frame {header.kind.name}, which this rank does not take")

    def _take_agreement(self, value: Any) -> None:
        count, secret = (value.get("count"), value.get("secret")) if isinstance(value, dict) else (None, None)
        if type(count) is not int or not 1 <= count <= MAX_SUBFLOWS or not isinstance(secret, str):
            raise WireError(f"a number of streams that is none: {foreign_text(value)}")
        if self._agreements.qsize() >= _MAX_AGREEMENTS:
            raise WireError(f"more than {_MAX_AGREEMENTS} numbers of streams in turn")
        self._agreements.put((count, secret))


def _close_frame(reason: object) -> tuple[FrameHeader, bytes]:
    text = json.dumps(str(reason)[:_REASON_CHARACTERS]).encode()
    return FrameHeader(FrameKind.CLOSE, len(text)), text


def _parse(header: FrameHeader, content: bytearray) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame {header.kind.name} that is not JSON") from error
