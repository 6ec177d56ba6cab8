"""The connection to one rank: a thread sends what waits, another takes what comes; whatever ends it is told to all."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, WireError
from pipecomp.keys.stream import SecureStream
from pipecomp.mesh.frames import CALL_BYTES, EAGER_BYTES, HEADER_BYTES, NOTE_BYTES, Header, Kind, unpack
from pipecomp.mesh.inbox import Inbox, Sink
from pipecomp.mesh.outbox import Outbox
from pipecomp.mesh.transfer import Transfer

_POLL_S = 0.5
_CLOSE_S = 10.0
_UNSENT_BYTES = 1 << 18  # that the system may hold back: what is urgent waits behind it
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT of Linux


class Connection:
    """One end; both threads let go of the interpreter to wait, encrypt and decrypt.

    peer: global rank. timeout_s: silence after which it counts as lost; may be set at any time. called: takes questions
    to the key-value store; answered: takes answers. Both are called on the receiving thread.
    """

    def __init__(
        self,
        peer: int,
        stream: SecureStream,
        *,
        timeout_s: float,
        called: Callable[[Connection, int, Any], None] | None = None,
        answered: Callable[[int, Any], None] | None = None,
        on_end: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.peer, self.timeout_s = peer, timeout_s
        self.failure: Exception | None = None
        self._stream, self._outbox, self._inbox = stream, Outbox(), Inbox()
        self._called, self._answered, self._on_end = called, answered, on_end
        self._closing = False
        self._lock = threading.Lock()
        sock = stream.sock
        sock.settimeout(_POLL_S)
        stream.on_wait = self._check_silence
        with contextlib.suppress(OSError):  # a socket pair, or another system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{peer}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"pipecomp-recv-{peer}", daemon=True)
        self._sender.start()
        self._receiver.start()

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
        """Take all messages of a stream."""
        self._inbox.sinks[stream] = sink
        if self.failure is not None:
            sink.failed(self.failure)
        self._outbox.notice(Header(Kind.OPEN, 0, stream))

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

    def say_goodbye(self) -> None:
        """The first half of `close`."""
        self._closing = True
        self._outbox.empty(_CLOSE_S)
        self._outbox.notice(Header(Kind.BYE, 0))
        self._outbox.empty(_CLOSE_S)

    def finish(self) -> None:
        """The second half of `close`."""
        self._receiver.join(_CLOSE_S)
        self._end(PeerLostError(f"the connection to rank {self.peer} is closed", self.peer))
        for thread in (self._sender, self._receiver):
            thread.join(_CLOSE_S)

    def flush(self, wait_s: float) -> bool:
        """Whether everything that may leave has been handed to the system within `wait_s` seconds."""
        return self._outbox.empty(wait_s)

    def _end(self, error: Exception) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._outbox.end(error)
        self._inbox.end(error)
        self._stream.close()
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

    def _check_silence(self) -> None:
        if time.monotonic() - self._stream.heard > self.timeout_s:
            raise TimeoutError

    # -- threads

    def _send_all(self) -> None:
        quiet_since = time.monotonic()
        try:
            while self.failure is None:
                parts = self._outbox.take(min(1.0, self.timeout_s / 4))
                if parts:
                    self._stream.send(*parts)
                    self._outbox.sent()
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > self.timeout_s / 4:
                    self._outbox.notice(Header(Kind.ALIVE, 0))
        except Exception as error:
            self._receiver.join(1.0)  # what the peer has said last says more than a failed send
            self._end(self._explain(error))

    def _receive_all(self) -> None:
        beginning = memoryview(bytearray(HEADER_BYTES))
        try:
            while True:
                self._stream.receive_into(beginning)
                header = unpack(beginning)
                if header.kind == Kind.DATA:
                    place = self._inbox.place(header)
                    self._stream.receive_into(place)
                    self._inbox.placed(header)
                elif header.kind == Kind.BYE:
                    raise PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
                else:
                    self._take_notice(header)
        except Exception as error:
            explained = self._explain(error)
            if self._closing:
                self._outbox.empty(1.0)  # so that the other side hears that this one ends in order
            self._end(explained)

    def _take_notice(self, header: Header) -> None:
        content = bytearray(header.size)
        self._stream.receive_into(memoryview(content))
        if header.kind == Kind.ASK:
            self._outbox.asked(header.stream, header.tag, header.total)
        elif header.kind == Kind.OPEN:
            self._outbox.opened(header.stream)
        elif header.kind != Kind.ALIVE:
            try:
                value = json.loads(content.decode())
            except (ValueError, RecursionError) as error:
                raise WireError(f"a frame {header.kind.name} that is no JSON") from error
            self._take_json(header, value)

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
