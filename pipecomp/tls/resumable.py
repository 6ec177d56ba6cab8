"""The TCP connections that carry one connection between two ranks, one after the other.

Where one is lost or silent, another takes its place within the time of silence that is allowed. Who made the first
makes the next; where that does not work, and where nobody could, both go to rank 0's relay. Both sides then say how
many frames they have, and what is missing is sent again.
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
from pipecomp.tls.handshake import RefusedError
from pipecomp.tls.queues import Outbox
from pipecomp.tls.stream import SecureStream

PATIENCE = 1 / 3  # share of the time of silence after which a TCP connection is given up
GONE_S = 8.0  # for which nothing may listen where the other side did, before it counts as lost
_AGAIN_S = 0.5
_AWAIT_S = 5.0  # for the other side to come, before this one goes to the relay
_PARK_S = 10.0
_POLL_S = 0.5
_UNSENT_BYTES = 1 << 18  # that the system may hold back: what is urgent waits behind it
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT of Linux

Dial = Callable[[int], tuple[SecureStream, int]]  # from frames that have come here to a stream, and those there
_log = logging.getLogger("pipecomp")


class Way(NamedTuple):
    """To another rank.

    route: how it goes there. dials: ways to get there again, tried in turn; without the first, the other side is waited
    for. gone: whether nothing listens any more where the other side did, or where the relay did that alone leads there,
    as far as that can be known from here.
    """

    stream: SecureStream
    route: str
    dials: Sequence[Dial] = ()
    waits: bool = False
    gone: Callable[[], bool] = lambda: False


class Line:
    """One end. `renew` is called on the thread that receives, `adopt` on a listener's, the rest on any.

    timeout_s: silence after which the other side counts as lost. drained: called when all that has come is taken.
    heard: when a frame came last. healed: how many TCP connections were replaced; lost_s: for how long there was none,
    together.
    """

    def __init__(self, peer: int, way: Way, outbox: Outbox, timeout_s: float, drained: Callable[[], None]) -> None:
        self.peer, self.timeout_s = peer, timeout_s
        self.received = 0  # numbered frames
        self.heard = time.monotonic()
        self.healed, self.lost_s = 0, 0.0
        self.closing = False
        self._way, self._outbox, self._drained = way, outbox, drained
        self._stream, self._epoch = way.stream, 0
        self._cause: Exception | None = None  # why the present connection was given up
        self._given_up: Exception | None = None  # why there is none any more
        self._parked = False  # whether the thread that receives waits for a new one
        self._changed = threading.Condition()
        self._prepare(way.stream)

    def now(self) -> tuple[SecureStream, int]:
        """The present connection, and how many there were before."""
        with self._changed:
            return self._stream, self._epoch

    @property
    def lost(self) -> bool:
        """Whether there is none at the moment."""
        return self._parked

    def drop(self, stream: SecureStream, cause: Exception) -> None:
        """Something is wrong with this one: the thread that receives does the rest."""
        with self._changed:
            if self._stream is stream and self._cause is None:
                self._cause = cause
        stream.close()

    def wait_for_other(self, stream: SecureStream) -> None:
        """Until there is another one than `stream`, or none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stream is not stream or self._given_up is not None)

    def give_up(self, error: Exception) -> None:
        """Make no connection any more."""
        with self._changed:
            self._given_up = self._given_up or error
            self._changed.notify_all()
        self._stream.close()

    # -- a new one in the place of a lost one

    def adopt(self, stream: SecureStream, count: int, welcome: Callable[[int], None]) -> None:
        """Go on over a connection that the other side made, which has `count` frames of this one's.

        welcome: tells it how many this side has.
        """
        old, _ = self.now()
        old.close()  # this side may not have noticed yet
        with self._changed:
            if not self._changed.wait_for(lambda: self._parked or self._given_up is not None, _PARK_S):
                raise LinkError(f"the connection to rank {self.peer} is not ready for a new one")
            if self._given_up is not None:
                raise self._given_up
            welcome(self.received)
            self._go_on(stream, count)

    def renew(self, stream: SecureStream, error: Exception) -> None:
        """Until there is another connection than `stream`, which ended with `error`.

        Raises what to tell if there is none in time: `error`, or what says more.
        """
        stream.close()
        with self._changed:
            error, self._cause = self._cause or error, None
            if self._stream is stream:
                self._parked = True
            self._changed.notify_all()
        refused_since, last = None, None
        while True:
            if self._wait(stream, 0.0):
                return
            passed = time.monotonic() - self.heard
            if self.closing or passed > self.timeout_s:
                raise _told(error, last, passed)
            refused, last = self._try(stream, last)
            refused_since = (refused_since or time.monotonic()) if refused else None
            if refused_since is not None and time.monotonic() - refused_since > GONE_S:
                if isinstance(error, TimeoutError):  # not for as long as that would say
                    raise OSError("it was silent, and nothing listens there any more") from error
                raise error

    def _try(self, stream: SecureStream, last: Exception | None) -> tuple[bool, Exception | None]:
        """All ways once; whether nobody is there any more, and why it did not work."""
        if self._way.waits:
            left = self.heard + self.timeout_s - time.monotonic()
            if self._wait(stream, min(_AGAIN_S if not self._way.dials else _AWAIT_S, max(0.1, left))):
                return False, None
        refused = self._way.gone()
        for dial in self._way.dials:
            try:
                made, count = dial(self.received)
            except ConnectionRefusedError as error:
                refused, last = True, error
            except RefusedError as error:
                raise PeerLostError(f"lost rank {self.peer}: {error}", self.peer) from error
            except (OSError, EOFError, PipecompError) as error:
                last = error
            else:
                with self._changed:
                    if self._stream is stream and self._given_up is None:
                        self._go_on(made, count)
                    else:
                        made.close()
                return False, None
            if self._wait(stream, _AGAIN_S):
                return False, None
        return refused, last

    def _wait(self, stream: SecureStream, wait_s: float) -> bool:
        """Whether there is another one than `stream`. Raises why there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stream is not stream or self._given_up is not None, wait_s)
            if self._given_up is not None:
                raise self._given_up
            return self._stream is not stream

    def _go_on(self, stream: SecureStream, count: int) -> None:
        """Both threads take the new one; the lock is held."""
        self._prepare(stream)
        self._epoch = self._outbox.renew(count)
        lost_s = time.monotonic() - self._stream.heard
        self._stream, self._parked, self._cause = stream, False, None
        self.healed += 1
        self.lost_s += lost_s
        self._changed.notify_all()
        _log.warning("the connection to rank %d was lost for %.1f s, and is there again", self.peer, lost_s)

    def _prepare(self, stream: SecureStream) -> None:
        stream.sock.settimeout(_POLL_S)
        stream.deadline = math.inf
        stream.on_wait = lambda: self._check_silence(stream)
        stream.before_wait = self._drained
        with contextlib.suppress(OSError):  # a socket pair, or another system
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)

    def _check_silence(self, stream: SecureStream) -> None:
        if time.monotonic() - stream.heard > PATIENCE * self.timeout_s:
            raise TimeoutError


def _told(error: Exception, last: Exception | None, passed: float) -> Exception:
    """`error`, with why there is no new connection."""
    if isinstance(error, TimeoutError) or last is None:
        return error
    return OSError(f"{error or 'it ended'}; no new one in {passed:.0f} s: {last}")
