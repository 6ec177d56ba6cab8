"""The connection to one rank: messages, notices and store requests over a resumable TLS stream.

# Note: one thread per direction
A sending and a receiving thread serve each connection. Both release the interpreter while they wait, encrypt or
decrypt, so a long send delays neither what arrives nor the training thread. Two ranks that send long messages to each
other would block for ever if one thread had to finish its send before it reads. Keep-alives come from the sending
thread and go on while the training thread computes for minutes.

# Note: resumption after a cut
A TCP connection that is cut, or silent for SILENCE_SHARE of the connection's timeout, is replaced; the connection fails
only if there is no replacement within the whole timeout. The end that made the first TCP connection makes the next one;
where that does not work, and where neither end can reach the other, both go to rank 0's relay. Each end states how many
frames it has received, and the other sends the rest again. Every TCP connection is authenticated like the first, so a
stranger who cuts one can delay a run but not enter it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, PipecompError, WireError, foreign_text
from pipecomp.tls.frames import EAGER_BYTES, HEADER_BYTES, NOTICE_BYTES, STORE_BYTES, FrameHeader, FrameKind
from pipecomp.tls.handshake import ConnectionRejectedError, LargePacketsError
from pipecomp.tls.queues import ReceiveQueue, SendQueue, Sink, Transfer
from pipecomp.tls.stream import SecureStream

SILENCE_SHARE = 1 / 3  # of the timeout, after which a silent TCP connection is given up
GONE_S = 8.0  # the peer is lost if nothing has listened at its address for so long
_RETRY_S = 0.5
_AWAIT_S = 5.0  # for the peer's new connection, before this end goes to the relay
_HANDOVER_S = 10.0  # for the receiving thread to be ready for a new connection
_POLL_S = 0.5
_REPLY_S = 10.0  # limit of an answer to a dial; shorter if the timeout is
_REPLY_SHARE = 1 / 6  # of the timeout: an attempt, and another one to find out about large packets
_UNSENT_BYTES = 1 << 18  # upper bound of unsent bytes in the kernel, which urgent frames wait behind
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT of Linux
_CLOSE_S, _REASON_S, _DRAIN_POLL_S = 10.0, 2.0, 0.1
_REASON_CHARACTERS = 1000
_MAX_UNREAD_BYTES = 1 << 27  # that may wait for a rank which sends further requests to the key-value store
_ACK_FRAMES = 8  # of one message, acknowledged together

# frames received here, limit in seconds of an answer -> a new stream, frames received there
Dial = Callable[[int, float], tuple[SecureStream, int]]
_log = logging.getLogger("pipecomp")


class Dialer(NamedTuple):
    """A stream to another rank, and the ways to replace it.

    route: DIRECT or RELAYED. dials: ways to make a new connection, tried in turn. awaits_peer: True if the peer makes
    the new connection; this end uses its dials only if the peer does not. is_gone: returns True if the peer certainly
    no longer listens, or the relay if nothing else leads to the peer.
    """

    stream: SecureStream
    route: str
    dials: Sequence[Dial] = ()
    awaits_peer: bool = False
    is_gone: Callable[[], bool] = lambda: False


class ResumableConnection:
    """One end. `reconnect` is called on the receiving thread, `replace` on a listener's thread, the rest on any.

    Args:
        peer: Global rank.
        dialer: The first stream, and how to replace it.
        send_queue: Sends unacknowledged frames again over each new stream.
        timeout_s: Silence after which the peer is lost.
        on_idle: Called when everything that has arrived is processed.

    Attributes: received: numbered frames. last_frame: monotonic time of the last one. reconnects: TCP connections that
    were replaced. downtime_s: time without one, in all.
    """

    def __init__(
        self, peer: int, dialer: Dialer, send_queue: SendQueue, timeout_s: float, on_idle: Callable[[], None]
    ) -> None:
        self.peer, self.timeout_s = peer, timeout_s
        self.received = 0
        self.last_frame = time.monotonic()
        self.reconnects, self.downtime_s = 0, 0.0
        self.closing = False
        self.is_down = False  # True while the receiving thread waits for a new connection
        self._dialer, self._send_queue, self._on_idle = dialer, send_queue, on_idle
        self._stream, self._epoch = dialer.stream, 0
        self._cause: Exception | None = None  # why the current connection was dropped
        self._error: Exception | None = None  # why no further one is made
        self._changed = threading.Condition()
        self._prepare(dialer.stream)

    def current(self) -> tuple[SecureStream, int]:
        """Return the current stream and its epoch, the number of streams before it."""
        with self._changed:
            return self._stream, self._epoch

    def drop(self, stream: SecureStream, cause: Exception) -> None:
        """Give up a stream; the receiving thread replaces it."""
        with self._changed:
            if self._stream is stream and self._cause is None:
                self._cause = cause
        stream.close()

    def wait_for_replacement(self, stream: SecureStream) -> None:
        """Wait until `stream` is replaced, or the connection has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stream is not stream or self._error is not None)

    def fail(self, error: Exception) -> None:
        """Close the current stream and make no further one."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._stream.close()

    # -- replacing a stream

    def replace(self, stream: SecureStream, peer_received: int, accept: Callable[[int], None]) -> None:
        """Continue over a stream that the peer made.

        Args:
            stream: The new stream.
            peer_received: Frames that the peer has.
            accept: Called with the number of frames received here; sends it to the peer.
        """
        old, _ = self.current()
        old.close()  # this end may not have noticed the cut yet
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_down or self._error is not None, _HANDOVER_S):
                raise LinkError(f"the connection to rank {self.peer} is not ready to be replaced")
            if self._error is not None:
                raise self._error
            accept(self.received)
            self._continue_over(stream, peer_received)

    def reconnect(self, stream: SecureStream, error: Exception) -> None:
        """Wait until `stream`, which ended with `error`, is replaced.

        Raises:
            Exception: There is no replacement in time: `error`, or a more specific one.
        """
        stream.close()
        with self._changed:
            error, self._cause = self._cause or error, None
            if self._stream is stream:
                self.is_down = True
            self._changed.notify_all()
        gone_since, last = None, None
        while not self._wait(stream, 0.0):
            passed = time.monotonic() - self.last_frame
            if self.closing or passed > self.timeout_s:
                if isinstance(error, TimeoutError) or last is None:
                    raise error
                raise OSError(f"{error or 'it ended'}; no new connection within {passed:.0f} s: {last}")
            gone, last = self._try_all(stream, last)
            gone_since = (gone_since or time.monotonic()) if gone else None
            if gone_since is not None and time.monotonic() - gone_since > GONE_S:
                if isinstance(error, TimeoutError):  # the timeout, which it would name, has not passed
                    raise OSError("it was silent, and nothing listens there any more") from error
                raise error

    def _try_all(self, stream: SecureStream, last: Exception | None) -> tuple[bool, Exception | None]:
        """Try all dials once; return True if the peer seems gone, and the last error."""
        if self._dialer.awaits_peer:
            left = self.last_frame + self.timeout_s - time.monotonic()
            if self._wait(stream, min(_AWAIT_S if self._dialer.dials else _RETRY_S, max(0.1, left))):
                return False, None
        gone = self._dialer.is_gone()
        reply_s = max(1.0, min(_REPLY_S, _REPLY_SHARE * self.timeout_s))
        blocked: LargePacketsError | None = None
        for dial in self._dialer.dials:
            try:
                new, peer_received = dial(self.received, reply_s)
            except ConnectionRefusedError as error:
                gone, last = True, error
            except ConnectionRejectedError as error:
                raise PeerLostError(f"lost rank {self.peer}: {error}", self.peer) from error
            except LargePacketsError as error:
                blocked = error
            except (OSError, EOFError, PipecompError) as error:
                last = error
            else:
                with self._changed:
                    if self._stream is stream and self._error is None:
                        self._continue_over(new, peer_received)
                    else:
                        new.close()
                return False, None
            if self._wait(stream, _RETRY_S):
                return False, None
        if blocked is not None:  # the relay, if there is one, does not lead to the peer either
            blocked.report()
            raise LinkError(str(blocked)) from blocked
        return gone, last

    def _wait(self, stream: SecureStream, wait_s: float) -> bool:
        """Wait for another stream than `stream`; raise the error if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stream is not stream or self._error is not None, wait_s)
            if self._error is not None:
                raise self._error
            return self._stream is not stream

    def _continue_over(self, stream: SecureStream, peer_received: int) -> None:
        """Switch both threads to the new stream; the caller holds the lock."""
        self._prepare(stream)
        self._epoch = self._send_queue.resume(peer_received)
        down_s = time.monotonic() - self._stream.last_received
        self._stream, self.is_down, self._cause = stream, False, None
        self.reconnects += 1
        self.downtime_s += down_s
        self._changed.notify_all()
        _log.warning("reconnected to rank %d after %.1f s", self.peer, down_s)

    def _prepare(self, stream: SecureStream) -> None:
        def check_silence() -> None:
            if time.monotonic() - stream.last_received > SILENCE_SHARE * self.timeout_s:
                raise TimeoutError

        stream.sock.settimeout(_POLL_S)
        stream.deadline = math.inf
        stream.on_timeout, stream.on_idle = check_silence, self._on_idle
        with contextlib.suppress(OSError):  # a socket pair, or another system
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)


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
        self._acknowledged = 0  # frames of the peer
        self._ack_due = False  # True if enough has arrived since for an acknowledgement of its own
        self.resumable = ResumableConnection(peer, dialer, self._send_queue, timeout_s, self._on_idle)
        self._on_store_request, self._on_store_reply, self._on_end = on_store_request, on_store_reply, on_end
        self._lock = threading.Lock()
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{peer}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"pipecomp-recv-{peer}", daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def timeout_s(self) -> float:
        """Silence after which the peer is lost; may be set at any time."""
        return self.resumable.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.resumable.timeout_s = timeout_s

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

    # -- the end

    def close(self) -> None:
        """Send all queued frames, then end the connection together with the peer."""
        self.close_gracefully()
        self.finish()

    def wait_for_end(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the peer to end the connection."""
        self._receiver.join(wait_s)

    def close_gracefully(self, reason: str = "") -> None:
        """Perform the first half of `close`: send all queued frames and a CLOSE frame.

        Args:
            reason: Reason for ending; if set, messages in transit are not waited for.
        """
        if reason:
            self.resumable.closing = True
            self._send_reason(reason)
            return
        self.drain(self._send_queue.wait_acknowledged)
        self.resumable.closing = True
        self._send_queue.send_control(FrameHeader(FrameKind.CLOSE, 0))
        self._send_queue.wait_written(_CLOSE_S)

    def finish(self) -> None:
        """Perform the second half of `close`: wait for the peer's CLOSE frame and end both threads."""
        self._receiver.join(_CLOSE_S)
        self.fail(PeerLostError(f"the connection to rank {self.peer} is closed", self.peer))
        for thread in (self._sender, self._receiver):
            thread.join(_CLOSE_S)

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
            if time.monotonic() - since > limit_s and (self.hurry or not self.resumable.is_down):
                return False
        return True

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
        self.resumable.fail(error)
        self._on_end(error)

    def _explain(self, error: Exception) -> Exception:
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

    # -- the sending thread

    def _send_all(self) -> None:
        sent_at = time.monotonic()
        while self.failure is None:
            stream, epoch = self.resumable.current()
            keep_alive_s = min(1.0, self.timeout_s / 10)
            try:
                parts = self._send_queue.next_frames(epoch, keep_alive_s)
                received = self.resumable.received
                idle = not parts and time.monotonic() - sent_at >= keep_alive_s
                if received != self._acknowledged or idle:
                    ack = FrameHeader(FrameKind.ACK, 0, total=received).pack()
                    parts = [ack + parts[0], *parts[1:]] if parts else [ack]
                if parts:
                    stream.send(*parts)
                    self._acknowledged, sent_at = received, time.monotonic()
            except (OSError, EOFError) as error:
                self.resumable.drop(stream, error)
                self.resumable.wait_for_replacement(stream)
            except Exception as error:
                explained = self._explain(error)
                with contextlib.suppress(Exception):  # the peer may not learn the reason
                    header, text = _close_frame(explained)
                    stream.send(header.pack(), text)
                self.fail(explained)

    def _send_reason(self, reason: object) -> None:
        """Send the peer the reason for this end's failure, without waiting for a new connection."""
        self._send_queue.send_control(*_close_frame(reason))
        self._send_queue.wait_written(_REASON_S)

    def _on_idle(self) -> None:
        """Acknowledge the frames that have arrived; called on the receiving thread before it waits."""
        if self._ack_due or self.resumable.received - self._acknowledged >= _ACK_FRAMES:
            self._ack_due = False
            self._send_queue.wake()

    # -- the receiving thread

    def _receive_all(self) -> None:
        try:
            while self.failure is None:
                stream, _ = self.resumable.current()
                try:
                    self._receive_from(stream)
                except PeerLostError:
                    raise
                except (OSError, EOFError) as error:
                    self.resumable.reconnect(stream, error)
        except Exception as error:
            explained = self._explain(error)
            if self.resumable.closing:
                self._send_queue.wait_written(_REASON_S)  # the peer learns that this end closes in order
            elif self.failure is None and not isinstance(explained, (PeerLostError, LinkTimeoutError)):
                self._send_reason(explained)
            self.fail(explained)

    def _receive_from(self, stream: SecureStream) -> None:
        """Process frames until the stream ends."""
        beginning = memoryview(bytearray(HEADER_BYTES))
        while True:
            stream.receive_into(beginning)
            header = FrameHeader.unpack(beginning)
            if header.kind == FrameKind.DATA:
                stream.receive_into(self._receive_queue.buffer_for(header))
                self.resumable.received += 1
                self._ack_due |= self._receive_queue.commit(header)
            elif header.kind == FrameKind.ACK:
                self._send_queue.acknowledge(header.total)
            else:
                content = bytearray(header.size)
                stream.receive_into(memoryview(content))
                self._process_control(header, content)
            self.resumable.last_frame = time.monotonic()

    def _process_control(self, header: FrameHeader, content: bytearray) -> None:
        if header.kind == FrameKind.CLOSE:
            if not content:
                raise PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
            reason = foreign_text(_parse(header, content), _REASON_CHARACTERS)
            raise PeerLostError(f"rank {self.peer} gave up the connection to this rank: {reason}", self.peer)
        self.resumable.received += 1
        self._ack_due = True
        if header.kind == FrameKind.READY:
            self._send_queue.receive_posted(header.stream, header.tag, header.total)
        elif header.kind == FrameKind.CREDIT:
            self._send_queue.add_credit(header.stream, header.total)
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


def _close_frame(reason: object) -> tuple[FrameHeader, bytes]:
    text = json.dumps(str(reason)[:_REASON_CHARACTERS]).encode()
    return FrameHeader(FrameKind.CLOSE, len(text)), text


def _parse(header: FrameHeader, content: bytearray) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame {header.kind.name} that is not JSON") from error
