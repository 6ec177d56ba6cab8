"""A transport over torch.distributed's gloo: host memory, TCP, one or more process groups for each pair of neighbors.

A packet travels as frames; between packets, empty frames show that the sender is alive.

    frame: kind u8, 3 bytes zero, content bytes u32, bytes of the whole packet u64, CRC-32 of these u32, content

Without the CRC a changed kind or length would leave a packet unfinished and its receiver waiting.

With several streams frames take turns: each group is a TCP connection of its own, and frame i goes to group i mod n.
The receiver takes them in the same order, so that neither numbers nor a place to sort them are needed. A frame STREAMS
changes n for the frames behind it.
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
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, WireError, foreign_text
from pipecomp.stages.link.transport import OutgoingPacket, Pacer, TransportBase
from pipecomp.tls.frames import ROOM_BYTES
from pipecomp.utils.sockets import has_unsent_bytes, record_sockets, shut_down_sockets

# Note: Threads and gloo
# gloo's `send` is a rendezvous: nothing moves until the other side has posted its receive, and two blocking sends
# towards each other deadlock. So the training thread never calls gloo: it puts packets into the send queue and takes
# them from the receive queue. One thread sends and one receives, and no other thread uses the group. Both release the
# interpreter while they wait. An operation of gloo cannot be cancelled: a thread that waits in one ends by the timeout,
# by the peer, or when `close` shuts the socket down. If it still waited when the interpreter ends, torch would abort
# the process.
#
# The receiving thread keeps a ring of receives posted ahead of need, each for a whole frame (gloo accepts a shorter
# message). The notice that a receive is posted travels on the same connection, behind the frames that this end sends
# itself. So each group's ring is much longer than the frames under way: otherwise a slow link that carries both
# directions would stop until the notice is through. While packets that nobody has taken fill their share of memory, the
# thread posts no receive, except one now and then, so that the peer does not take this end for silent.
#
# The sending thread may wait for a packet that a GPU is still computing (`PendingPacket`). An error of either thread
# goes to `failed`, and the next call of the training thread raises it. A failed send waits for the receiving thread's
# error, which may be the peer's own account of what happened.

FRAME_BYTES = 1 << 19
_RING = 16  # receives posted ahead
_TAG = 0
_SENDS = 2  # frames handed to gloo and not yet finished
_FIELDS = struct.Struct("<BxxxIQ")
_CRC = struct.Struct("<I")
_RANK = struct.Struct("<i")
_PREFIX_BYTES = _FIELDS.size + _CRC.size
_CONTENT = FRAME_BYTES - _PREFIX_BYTES
_DATA, _ALIVE, _ABORT, _CLOSE, _STREAMS, _END = range(1, 7)
_CLOSE_SECONDS = 10.0  # limit on closing after a failure, or while nothing moves
_AGREE_S = 10.0  # for this rank to have the groups that the peer sends over
_MAX_AGREEMENTS = 2  # numbers of streams that the peer may be ahead
_CUT_S = 1.0  # for gloo to notice that its socket is shut down


class GlooTransport(TransportBase):
    """One end of the connection between two ranks. See Note: Threads and gloo.

    Args:
        group: A gloo process group of exactly the two ranks, used by nothing else.
        timeout_s: Silence after which the peer counts as lost.
        pacer: Slows down sending.
        sockets: The group's sockets, as far as they are known.
        further: Groups for further streams, with their sockets.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float,
        pacer: Pacer | None = None,
        sockets: frozenset[int] = frozenset(),
        further: Sequence[NeighborGroup] = (),
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) != 2 or dist.get_rank() not in ranks:
            raise LinkError(f"a transport joins this rank ({dist.get_rank()}) and one other, not ranks {ranks}")
        self._neighbor_groups = [NeighborGroup(group, sockets), *further]
        self._to = 1 - ranks.index(dist.get_rank())
        super().__init__(ranks[self._to])
        self._timeout = timedelta(seconds=timeout_s)
        self._outbox: queue.Queue[tuple[int, OutgoingPacket, float]] = queue.Queue()  # kind, content, time of queuing
        self._pacer = pacer
        self._frames_sent = 0
        self._untaken_bytes = 0  # of packets in the receive queue
        self._aborted = False
        self._their_streams: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None at the connection's end
        self._frames_switched = threading.Event()  # the last frame over the number of streams before has left
        self._receiver = threading.Thread(target=self._receive, name=f"pipecomp-recv-{self.peer}", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name=f"pipecomp-send-{self.peer}", daemon=True)
        self._receiver.start()
        self._sender.start()

    # -- called by links

    def send(self, packet: OutgoingPacket) -> None:
        self.check_open()
        self.count_queued(packet.size)
        self._outbox.put((_DATA, packet, time.monotonic()))

    def add_groups(self, further: Sequence[NeighborGroup]) -> None:
        """Take process groups of the same two ranks for further streams."""
        with self._changed:
            self._neighbor_groups += further
            self._changed.notify_all()

    def release_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups beyond the streams in use, which the transport no longer uses."""
        released = [group for group, _ in self._neighbor_groups[self.streams :]]
        del self._neighbor_groups[self.streams :]
        return released

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups, one for each stream."""
        return [group for group, _ in self._neighbor_groups]

    @property
    def _sockets(self) -> frozenset[int]:
        return frozenset().union(*(sockets for _, sockets in self._neighbor_groups))

    def use_streams(self, count: int) -> None:
        """Let frames take turns over the first `count` groups."""
        if count == self.streams:
            return
        assert count <= len(self._neighbor_groups), "a group for each stream"
        self.check_open()
        self._frames_switched.clear()
        self._outbox.put((_STREAMS, np.array([count], dtype=np.uint8), time.monotonic()))
        try:
            theirs = self._their_streams.get(timeout=self._timeout.total_seconds())
        except queue.Empty:
            theirs = -1
        if theirs is None:
            assert self._failure is not None
            raise self._failure
        if theirs < 0:
            raise LinkTimeoutError(f"rank {self.peer} did not agree on streams. It sends nothing", self.peer)
        if theirs != count:
            says = f"rank {self.peer} uses {theirs} streams, this rank {count}"
            raise LinkError(f"{says}. Give all ranks the same transport.streams")
        if not self._frames_switched.wait(self._timeout.total_seconds()):
            raise LinkTimeoutError(f"rank {self.peer} does not take frames", self.peer)
        self.check_open()
        self.streams = count

    def failed(self, error: Exception) -> None:
        super().failed(error)
        self._their_streams.put(None)
        self._frames_switched.set()

    def recv(self) -> np.ndarray:
        packet = super().recv()
        with self._changed:
            self._untaken_bytes -= packet.size
            self._changed.notify_all()
        return packet

    def sending(self) -> bool:
        return self._failure is None and (self._outbox.unfinished_tasks > 0 or has_unsent_bytes(self._sockets))

    def abort(self, lost_rank: int, reason: str) -> None:
        self._aborted = True
        if self._sender.is_alive():
            text = reason.encode()[:4096].decode(errors="ignore")  # cuts between characters
            note = _RANK.pack(lost_rank) + text.encode()
            self._outbox.put((_ABORT, np.frombuffer(note, dtype=np.uint8), time.monotonic()))
            deadline = time.monotonic() + 2.0
            while self._outbox.unfinished_tasks and self._sender.is_alive() and time.monotonic() < deadline:
                time.sleep(0.005)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._outbox.put((_CLOSE, np.empty(0, dtype=np.uint8), time.monotonic()))
        self._drain()
        self._receiver.join(_CLOSE_SECONDS)
        if self._receiver.is_alive():
            shut_down_sockets(self._sockets)
            self._receiver.join(_CUT_S)

    def _drain(self) -> None:
        """Wait until the send queue is empty, as long as frames leave: a slow link may need minutes."""
        since, before = time.monotonic(), self._frames_sent
        while self._sender.is_alive():
            self._sender.join(0.1)
            hurry = self._aborted or self._failure is not None
            if self._frames_sent != before and not hurry:
                since, before = time.monotonic(), self._frames_sent
            limit_s = _CLOSE_SECONDS if hurry else max(_CLOSE_SECONDS, self._timeout.total_seconds())
            if time.monotonic() - since > limit_s:
                return

    # -- sending thread

    def _send_all(self) -> None:
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()  # of all streams, in order
        spare = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(_SENDS)]
        streams, turn = 1, 0

        def finish_one() -> None:
            work, frame = under_way.popleft()
            work.wait(self._timeout)
            spare.append(frame)
            self._frames_sent += 1

        def post(kind: int, content: np.ndarray, total: int, queued: float) -> None:
            nonlocal turn
            if not spare:
                finish_one()
            frame = spare.pop()
            view = frame.numpy()
            write_prefix(view, kind, content.size, total)
            size = _PREFIX_BYTES + content.size
            view[_PREFIX_BYTES:size] = content
            if self._pacer is not None:
                self._pacer.hold(size, queued)
            under_way.append((self._neighbor_groups[turn].group.send([frame[:size]], self._to, _TAG), frame))
            turn = (turn + 1) % streams

        def change_streams(count: int) -> None:
            """Announce another number; the frames _END meet what the peer has posted for the number before."""
            nonlocal streams, turn
            post(_STREAMS, np.array([count], dtype=np.uint8), 1, time.monotonic())
            for _ in range(streams * _RING - 1):
                post(_END, np.empty(0, dtype=np.uint8), 0, time.monotonic())
            while under_way:
                finish_one()
            spare[:] = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(count * _SENDS)]
            streams, turn = count, 0
            self._frames_switched.set()

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
                    packet, queued = self.finish_queued(outgoing, queued)
                except Exception as error:
                    self.failed(error)
                    refused = True
                if kind == _STREAMS:
                    change_streams(int(packet[0]))
                    self._outbox.task_done()
                    continue
                if refused and kind == _DATA:  # after a failed packet only _ABORT and _CLOSE are sent
                    self._outbox.task_done()
                    continue
                began = time.perf_counter()
                for _ in range(
                    streams * _RING if kind == _CLOSE else 1
                ):  # one _CLOSE for each posted receive of the peer
                    for at in range(0, max(1, packet.size), _CONTENT):
                        post(kind, packet[at : at + _CONTENT], packet.size, queued)
                while under_way and (self._outbox.empty() or kind != _DATA):
                    finish_one()
                if kind == _DATA:
                    self.report_transfer("send", began, packet.size)
                    self.count_left(packet.size)
                self._outbox.task_done()
                if kind == _CLOSE:
                    return
        except RuntimeError as error:
            self._receiver.join(1.0)
            self.failed(self._explain(error))
        except Exception as error:
            self.failed(LinkError(f"sending to rank {self.peer} failed: {type(error).__name__}: {error}"))

    # -- receiving thread

    def _receive(self) -> None:
        posted: deque[tuple[dist.Work, torch.Tensor]] = deque()  # in the order of frames
        streams, turn = 1, 0  # turn: stream of the next receive, and of the frame that came last

        def post(frame: torch.Tensor) -> None:
            nonlocal turn
            posted.append((self._neighbor_groups[turn].group.recv([frame], self._to, _TAG), frame))
            turn = (turn + 1) % streams

        def post_rings() -> None:
            for _ in range(streams * _RING):
                post(torch.empty(FRAME_BYTES, dtype=torch.uint8))

        try:
            post_rings()
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
                        raise WireError(
                            f"rank {self.peer} sent {filled + size} bytes of a packet of {total}, announced as "
                            f"{packet.size} bytes"
                        )
                    packet[filled : filled + size] = content
                    filled += size
                    if filled == total:
                        filled = 0
                        with self._changed:
                            self._untaken_bytes += total
                        self.deliver(packet, began)
                elif kind == _ABORT:
                    if size < _RANK.size:
                        raise WireError(f"rank {self.peer} sent a failure notice without a rank")
                    (rank,) = _RANK.unpack_from(content)
                    reason = foreign_text(bytes(content[_RANK.size :]).decode(errors="replace"), 4096)
                    # Keep receiving: the peer's _CLOSE frames need posted receives.
                    self.failed(PeerLostError(f"{reason} (told by rank {self.peer})", rank))
                elif kind == _CLOSE:
                    while posted:
                        posted.popleft()[0].wait(self._timeout)
                    raise PeerLostError(f"rank {self.peer} has ended its run and closed the connection", self.peer)
                elif kind == _STREAMS:
                    streams, turn = self._announced_streams(content), 0
                    while posted:
                        posted.popleft()[0].wait(self._timeout)
                    post_rings()
                    self._their_streams.put(streams)
                    continue
                elif kind != _ALIVE:
                    raise WireError(f"rank {self.peer} sent a frame of unknown kind {kind}")
                if kind == _DATA:
                    self._wait_until_taken()
                post(frame)
        except (LinkError, WireError) as error:
            self.failed(error)
        except RuntimeError as error:
            self.failed(self._explain(error))
        except Exception as error:
            self.failed(LinkError(f"receiving from rank {self.peer} failed: {type(error).__name__}: {error}"))

    def _announced_streams(self, content: np.ndarray) -> int:
        count = int(content[0]) if content.size == 1 else 0
        with self._changed:  # this rank may be about to add its groups
            self._changed.wait_for(
                lambda: count <= len(self._neighbor_groups) or self._closing,
                min(_AGREE_S, self._timeout.total_seconds() / 2),
            )
        most = len(self._neighbor_groups)
        if not 1 <= count <= most or self._their_streams.qsize() >= _MAX_AGREEMENTS:
            remedy = "Give all ranks the same transport.streams"
            raise WireError(f"rank {self.peer} uses {count} streams, this rank has {most}. {remedy}")
        return count

    def _wait_until_taken(self) -> None:
        """Wait if the peer runs far ahead, as in evaluation, but not so long that it takes this end for silent."""
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
                "it is down",
                self.peer,
            )
        return PeerLostError(f"lost rank {self.peer}: its connection was closed ({text})", self.peer)


def write_prefix(frame: np.ndarray, kind: int, size: int, total: int) -> None:
    """Write the prefix of a frame, uint8 [n], with `size` bytes of a packet of `total` bytes."""
    _FIELDS.pack_into(frame, 0, kind, size, total)
    _CRC.pack_into(frame, _FIELDS.size, zlib.crc32(frame[: _FIELDS.size]))


def read_prefix(frame: np.ndarray, peer: int) -> tuple[int, int, int]:
    """Return kind, content bytes and bytes of the whole packet. Raises WireError for an invalid prefix."""
    kind, size, total = _FIELDS.unpack_from(frame, 0)
    if _CRC.unpack_from(frame, _FIELDS.size)[0] != zlib.crc32(frame[: _FIELDS.size]) or size > _CONTENT:
        raise WireError(f"rank {peer} sent bytes that are no frame, or changed on the way: {bytes(frame[:20]).hex()}")
    return kind, size, total


class NeighborGroup(NamedTuple):
    """A gloo group of two ranks, and this process's sockets of it."""

    group: dist.ProcessGroup
    sockets: frozenset[int]


def neighbour_groups(
    pipelines: list[list[int]], timeout_s: float, streams: Mapping[tuple[int, int], int] | None = None
) -> dict[tuple[int, int], list[NeighborGroup]]:
    """Make gloo groups for every pair of neighboring ranks in every pipeline; all ranks must call it equally.

    Args:
        pipelines: For each replica, the global ranks of its stages in order.
        timeout_s: The groups' timeout.
        streams: Number of groups by pair of ranks, 0 where it is missing; None: one each.

    Returns:
        The groups of this rank, by pair of ranks.
    """
    mine: dict[tuple[int, int], list[NeighborGroup]] = {}
    timeout = timedelta(seconds=timeout_s)
    for ranks in pipelines:
        for pair in itertools.pairwise(ranks):
            for _ in range(1 if streams is None else streams.get(pair, 0)):
                made = record_sockets(partial(dist.new_group, list(pair), backend="gloo", timeout=timeout))
                if dist.get_rank() in pair:
                    mine.setdefault(pair, []).append(NeighborGroup(*made))
    return mine
