"""A transport over torch.distributed's gloo: host memory, TCP, one process group for each pair of neighbours.

gloo's `send` is a rendezvous: nothing moves until the other side has posted its receive. So every end keeps a ring of
receives posted ahead of need, each able to take a whole frame (gloo lets a packet be shorter than its receive). That a
receive is posted is told on the same connection, behind the frames that this end is sending itself: the ring is much
longer than those, or a slow link that carries both ways would stand still until the news of free receives is through.
A packet travels as frames; between packets, frames of no content say that the sender is alive. While packets that
nobody has taken fill the memory that is for them, receives are posted no more, but for one now and then.

    frame: kind u8, 3 bytes zero, content bytes u32, bytes of the whole packet u64, CRC-32 of these u32, content

Without the CRC a changed kind or length would leave a packet unfinished, and its receiver waiting.
"""

from __future__ import annotations

import itertools
import queue
import re
import struct
import threading
import time
import zlib
from collections import deque
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, WireError
from pipecomp.stages.link.delivery import Delivery
from pipecomp.stages.link.transport import Outgoing, Pacer
from pipecomp.tls.frames import ROOM_BYTES
from pipecomp.utils.sockets import has_unsent_bytes, record_sockets, shut_down_sockets

FRAME_BYTES = 1 << 19
_RING = 16  # receives posted ahead
_TAG = 0
_SENDS = 2  # frames handed to gloo and not yet finished
_FIELDS = struct.Struct("<BxxxIQ")
_CRC = struct.Struct("<I")
_RANK = struct.Struct("<i")
_PREFIX_BYTES = _FIELDS.size + _CRC.size
_CONTENT = FRAME_BYTES - _PREFIX_BYTES
_DATA, _ALIVE, _ABORT, _CLOSE = range(1, 5)
_CLOSE_SECONDS = 10.0  # how long an end may take after a failure, and at least without anything that moves
_CUT_S = 1.0  # for gloo to notice that its socket was shut down


class GlooTransport(Delivery):
    """One end of the connection between two ranks; two threads move its bytes, both let go of the interpreter to wait.

    group: a gloo process group of exactly the two ranks, used by nothing else. timeout_s: silence after which the peer
    counts as lost. pacer: slows down what is sent. sockets: through which the group sends, as far as they are known.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float,
        pacer: Pacer | None = None,
        sockets: frozenset[int] = frozenset(),
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) != 2 or dist.get_rank() not in ranks:
            raise LinkError(f"a transport joins this rank ({dist.get_rank()}) and one other, not ranks {ranks}")
        self._group, self._sockets = group, sockets
        self._to = 1 - ranks.index(dist.get_rank())
        super().__init__(ranks[self._to])
        self._timeout = timedelta(seconds=timeout_s)
        self._outbox: queue.Queue[tuple[int, Outgoing, float]] = queue.Queue()  # kind, content, when it was queued
        self._pacer = pacer
        self._frames = 0  # that were sent
        self._untaken_bytes = 0  # of packets that came
        self._aborted = False
        self._receiver = threading.Thread(target=self._receive, name=f"pipecomp-recv-{self.peer}", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{self.peer}", daemon=True)
        self._receiver.start()
        self._sender.start()

    # -- what links call

    def send(self, packet: Outgoing) -> None:
        """Queue a packet; see Transport."""
        self.check_open()
        self.queued(packet.size)
        self._outbox.put((_DATA, packet, time.monotonic()))

    def recv(self) -> np.ndarray:
        """Wait for the next packet; see Transport."""
        packet = super().recv()
        with self._changed:
            self._untaken_bytes -= packet.size
            self._changed.notify_all()
        return packet

    def sending(self) -> bool:
        """Tell whether a packet waits; see Transport."""
        return self._failure is None and (self._outbox.unfinished_tasks > 0 or has_unsent_bytes(self._sockets))

    def abort(self, lost_rank: int, reason: str) -> None:
        """Tell the peer that a rank is gone; see Transport."""
        self._aborted = True
        if self._sender.is_alive():
            text = reason.encode()[:4096].decode(errors="ignore")  # no part of a character
            note = _RANK.pack(lost_rank) + text.encode()
            self._outbox.put((_ABORT, np.frombuffer(note, dtype=np.uint8), time.monotonic()))
            deadline = time.monotonic() + 2.0
            while self._outbox.unfinished_tasks and self._sender.is_alive() and time.monotonic() < deadline:
                time.sleep(0.005)

    def close(self) -> None:
        """End the connection in order; see Transport."""
        if self._closing:
            return
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._outbox.put((_CLOSE, np.empty(0, dtype=np.uint8), time.monotonic()))
        self._drain()
        self._receiver.join(_CLOSE_SECONDS)
        if self._receiver.is_alive():  # a thread that is inside torch when the interpreter ends aborts the process
            shut_down_sockets(self._sockets)
            self._receiver.join(_CUT_S)

    def _drain(self) -> None:
        """Wait until all that is queued has left, for as long as frames do: a slow link may need minutes."""
        since, before = time.monotonic(), self._frames
        while self._sender.is_alive():
            self._sender.join(0.1)
            hurry = self._aborted or self._failure is not None
            if self._frames != before and not hurry:
                since, before = time.monotonic(), self._frames
            limit_s = _CLOSE_SECONDS if hurry else max(_CLOSE_SECONDS, self._timeout.total_seconds())
            if time.monotonic() - since > limit_s:
                return

    # -- sending thread

    def _send_all(self) -> None:
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        spare = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(_SENDS)]

        def finish_one() -> None:
            work, frame = under_way.popleft()
            work.wait(self._timeout)
            spare.append(frame)
            self._frames += 1

        def post(kind: int, content: np.ndarray, total: int, queued: float) -> None:
            if not spare:
                finish_one()
            frame = spare.pop()
            view = frame.numpy()
            write_prefix(view, kind, content.size, total)
            size = _PREFIX_BYTES + content.size
            view[_PREFIX_BYTES:size] = content
            if self._pacer is not None:
                self._pacer.hold(size, queued)
            under_way.append((self._group.send([frame[:size]], self._to, _TAG), frame))

        refused = False
        try:
            while True:
                try:
                    kind, outgoing, queued = self._outbox.get(timeout=self._timeout.total_seconds() / 4)
                except queue.Empty:
                    post(_ALIVE, np.empty(0, dtype=np.uint8), 0, time.monotonic())
                    while under_way:
                        finish_one()
                    continue
                try:
                    packet, queued = self.found(outgoing, queued)
                except Exception as error:
                    self.failed(error)
                    refused = True
                if refused and kind == _DATA:  # no packet any more, but the end of this connection
                    self._outbox.task_done()
                    continue
                began = time.perf_counter()
                for _ in range(_RING if kind == _CLOSE else 1):  # one for each receive that the peer has posted
                    for at in range(0, max(1, packet.size), _CONTENT):
                        post(kind, packet[at : at + _CONTENT], packet.size, queued)
                while under_way and (self._outbox.empty() or kind != _DATA):
                    finish_one()
                if kind == _DATA:
                    self.moved("send", began, packet.size)
                    self.gone(packet.size)
                self._outbox.task_done()
                if kind == _CLOSE:
                    return
        except RuntimeError as error:
            # What the receiver reads (the peer's own account of what happened) says more than a failed send.
            self._receiver.join(1.0)
            self.failed(self._explain(error))
        except Exception as error:  # nor does a sending one
            self.failed(LinkError(f"sending to rank {self.peer} failed: {type(error).__name__}: {error}"))

    # -- receiving thread

    def _receive(self) -> None:
        posted: deque[tuple[dist.Work, torch.Tensor]] = deque()

        def post(frame: torch.Tensor) -> None:
            posted.append((self._group.recv([frame], self._to, _TAG), frame))

        try:
            for _ in range(_RING):
                post(torch.empty(FRAME_BYTES, dtype=torch.uint8))
            packet, filled, began = np.empty(0, dtype=np.uint8), 0, 0.0
            while True:
                work, frame = posted.popleft()
                work.wait(self._timeout)
                view = frame.numpy()
                kind, size, total = read_prefix(view, self.peer)
                content = view[_PREFIX_BYTES : _PREFIX_BYTES + size]
                if kind == _DATA:
                    if filled == 0:
                        began = time.perf_counter()
                        if total > self.most_bytes:
                            raise WireError(
                                f"rank {self.peer} announces a packet of {total} bytes, allowed: {self.most_bytes}"
                            )
                        packet = np.empty(total, dtype=np.uint8)
                    if total != packet.size or filled + size > total:
                        raise WireError(f"rank {self.peer} sent {filled + size} bytes of a packet of {packet.size}")
                    packet[filled : filled + size] = content
                    filled += size
                    if filled == total:
                        filled = 0
                        with self._changed:
                            self._untaken_bytes += total
                        self.deliver(packet, began)
                elif kind == _ABORT:
                    if size < _RANK.size:
                        raise WireError(f"rank {self.peer} sent a notice of a failure that names no rank")
                    (rank,) = _RANK.unpack_from(content)
                    reason = bytes(content[_RANK.size :]).decode(errors="replace")
                    # Keep receiving: the peer's orderly end needs receives to end in.
                    self.failed(PeerLostError(f"{reason} (told by rank {self.peer})", rank))
                elif kind == _CLOSE:
                    while posted:
                        posted.popleft()[0].wait(self._timeout)
                    raise PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
                elif kind != _ALIVE:
                    raise WireError(f"rank {self.peer} sent a frame of unknown kind {kind}")
                if kind == _DATA:
                    self._wait_until_taken()
                post(frame)
        except (LinkError, WireError) as error:
            self.failed(error)
        except RuntimeError as error:
            self.failed(self._explain(error))
        except Exception as error:  # a receiving thread never ends without a word
            self.failed(LinkError(f"receiving from rank {self.peer} failed: {type(error).__name__}: {error}"))

    def _wait_until_taken(self) -> None:
        """Where a stage runs far ahead of this one, as in evaluation; not so long that it takes this end for silent."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._untaken_bytes < ROOM_BYTES or self._closing or self._failure is not None,
                self._timeout.total_seconds() / 4,
            )

    # -- failures

    def _explain(self, error: RuntimeError) -> LinkError:
        text = re.sub(r"^\[[^]]*\] |\. This is typically.*$", "", str(error).split("\n")[0])
        if "imed out" in text:
            return LinkTimeoutError(
                f"nothing from rank {self.peer} for {self._timeout.total_seconds():g} s: it is stopped, or the link to "
                "it is down"
            )
        return PeerLostError(f"lost rank {self.peer}: its connection was closed ({text})", self.peer)


def write_prefix(frame: np.ndarray, kind: int, size: int, total: int) -> None:
    """Begin a frame, uint8 [n], of `size` bytes of a packet of `total` bytes."""
    _FIELDS.pack_into(frame, 0, kind, size, total)
    _CRC.pack_into(frame, _FIELDS.size, zlib.crc32(frame[: _FIELDS.size]))


def read_prefix(frame: np.ndarray, peer: int) -> tuple[int, int, int]:
    """Kind, content bytes and bytes of the whole packet; WireError if they were changed on the way from `peer`."""
    kind, size, total = _FIELDS.unpack_from(frame, 0)
    if _CRC.unpack_from(frame, _FIELDS.size)[0] != zlib.crc32(frame[: _FIELDS.size]) or size > _CONTENT:
        raise WireError(f"rank {peer} sent a frame that was changed on the way, or is none: {bytes(frame[:20]).hex()}")
    return kind, size, total


class Neighbours(NamedTuple):
    """A gloo group of two ranks, and through which of this process's sockets it sends."""

    group: dist.ProcessGroup
    sockets: frozenset[int]


def neighbour_groups(pipelines: list[list[int]], timeout_s: float) -> dict[tuple[int, int], Neighbours]:
    """Make a gloo group for every pair of neighbouring ranks in every pipeline; all ranks must call this alike.

    pipelines: for each replica the global ranks of its stages in order.
    """
    mine, timeout = {}, timedelta(seconds=timeout_s)
    for ranks in pipelines:
        for pair in itertools.pairwise(ranks):
            made = record_sockets(partial(dist.new_group, list(pair), backend="gloo", timeout=timeout))
            if dist.get_rank() in pair:
                mine[pair] = Neighbours(*made)
    return mine
