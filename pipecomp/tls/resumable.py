"""A TLS stream to another rank that is replaced after a cut: one subflow of a connection.

# Note: resumption after a cut
A TCP connection that is cut, or silent for SILENCE_SHARE of the connection's timeout, is replaced; the connection fails
only if there is no replacement within the whole timeout. The end that made the first TCP connection makes the next one;
where that does not work, and where neither end can reach the other, both go to rank 0's relay. Each end states how many
frames it has received, and the other sends the rest again. Every TCP connection is authenticated like the first, so a
stranger who cuts one can delay a run but not enter it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipecomp.errors import LinkError, PeerLostError, PipecompError
from pipecomp.tls.handshake import ConnectionRejectedError, LargePacketsError, SubflowId
from pipecomp.tls.send_queue import SendQueue
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

# the subflow, frames received here, limit in seconds of an answer -> a new stream, frames received there
Dial = Callable[[SubflowId, int, float], tuple[SecureStream, int]]
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


class ResumableStream:
    """One end. `reconnect` is called on the receiving thread, `replace` on a listener's thread, the rest on any.

    Args:
        peer: Global rank.
        dialer: The first stream, and how to replace it.
        send_queue: Sends unacknowledged frames again over each new stream.
        timeout_s: Silence after which the peer is lost.
        on_idle: Called when everything that has arrived is processed.
        subflow: Which of the connection's subflows it is.

    Attributes: received: numbered frames. last_frame: monotonic time of the last one. reconnects: TCP connections that
    were replaced. downtime_s: time without one, in all.
    """

    def __init__(
        self,
        peer: int,
        dialer: Dialer,
        send_queue: SendQueue,
        timeout_s: float,
        on_idle: Callable[[], None],
        subflow: SubflowId,
    ) -> None:
        self.peer, self.timeout_s, self.subflow = peer, timeout_s, subflow
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
                self._send_queue.pause(self.subflow.number)
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
                new, peer_received = dial(self.subflow, self.received, reply_s)
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
        self._epoch = self._send_queue.resume(peer_received, self.subflow.number)
        down_s = time.monotonic() - self._stream.last_received
        self._stream, self.is_down, self._cause = stream, False, None
        self.reconnects += 1
        self.downtime_s += down_s
        self._changed.notify_all()
        which = f" (stream {self.subflow.number + 1})" if self.subflow.number else ""
        _log.warning("reconnected to rank %d after %.1f s%s", self.peer, down_s, which)

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
