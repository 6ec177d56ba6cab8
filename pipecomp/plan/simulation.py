"""A training step, played through event by event: the engine's own order of work, over links of given rates.

A stage does one thing at a time, in the order of `order.train_order`. What it sends leaves at once and travels by
itself; a link carries one packet at a time in each direction, both directions at once; a receive waits for what it
needs and for nothing else.

K stages, M micro-batches, link k between stages k and k + 1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecomp.errors import require
from pipecomp.plan.network import Network, rates
from pipecomp.schedule.in_flight import numbers
from pipecomp.schedule.order import train_order
from pipecomp.utils.serialization import exchanged

_SENDS = {"send activation": ("forward", 1), "send gradient": ("backward", -1)}
_RECEIVES = {"receive activation": "forward", "receive gradient": "backward"}


@exchanged
@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of one stage.

    forward_s, backward_s: the model on one micro-batch. encode_s, decode_s: of one packet of either kind: quantizing,
    checksum, message store. reduce_s, update_s: of the step, after the last backward: averaging gradients over
    replicas, and the optimizer.
    """

    forward_s: float
    backward_s: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is played. forward_bytes, backward_bytes: of one micro-batch's packet on each link, headers included.

    in_flight: forwards that each stage runs ahead of their backwards; None is 1F1B's number. together_s: seconds in
    which all stages wait for each other between the last reduction and the update (norm, tied weights).
    """

    stages: Sequence[StageCosts]
    micro_batches: int
    forward_bytes: Sequence[float]
    backward_bytes: Sequence[float]
    in_flight: Sequence[int] | None = None
    together_s: float = 0.0

    def __post_init__(self) -> None:
        K = len(self.stages)
        require(
            K >= 1 and self.micro_batches >= 1,
            "step",
            (K, self.micro_batches),
            "at least one stage and one micro-batch",
        )
        for name, sizes in (("forward_bytes", self.forward_bytes), ("backward_bytes", self.backward_bytes)):
            require(len(sizes) == K - 1, name, list(sizes), f"{K - 1} numbers, one for each link")
        require(
            self.in_flight is None or len(self.in_flight) == K,
            "in_flight",
            self.in_flight,
            f"{K} numbers, one for each stage",
        )

    def ahead(self, stage: int) -> int:
        """Count the forwards that this stage runs ahead."""
        K, M = len(self.stages), self.micro_batches
        return max(1, min(M, (self.in_flight or numbers(1, K, M))[stage]))


@dataclass(frozen=True, slots=True)
class Event:
    """What a stage did ("wait" included), or a link ("forward packet", "backward packet"; place: the link)."""

    place: int
    what: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """seconds: of the whole step. waits: by stage, for packets. events: all that happened, in the order it ended."""

    seconds: float
    waits: tuple[float, ...]
    events: tuple[Event, ...] = field(repr=False)


def play(step: Step, network: Network) -> Played:
    """Play one step over the network, which has a link between each two neighbours. ConfigError if it has not."""
    require(
        len(network.forward) == len(step.stages) - 1, "network", len(network.forward), f"{len(step.stages) - 1} links"
    )
    return _Player(step, network).run()


class _Player:
    def __init__(self, step: Step, network: Network) -> None:
        K = len(step.stages)
        self._step, self._network = step, network
        self._now = 0.0
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []  # when, number, what happens then
        self._stages = [self._stage(k) for k in range(K)]
        self._sleeping = [False] * K
        self._arrived: set[tuple[str, int, int]] = set()  # way, stage, micro-batch
        self._sending: dict[tuple[str, int], deque[_Packet]] = {}  # way, link: the first one is on the line
        self._bytes_per_s: list[float] = []  # of those, in their order
        self._ends, self._waits = [0.0] * K, [0.0] * K
        self._events: list[Event] = []

    def run(self) -> Played:
        for k in range(len(self._stages)):
            self._go_on(k)
        while self._queue or self._sending:
            heads = [packets[0] for packets in self._sending.values()]
            ends = [self._now + m.left / speed for m, speed in zip(heads, self._bytes_per_s, strict=True)]
            sent_at = min(ends, default=math.inf)
            until = min(sent_at, self._queue[0][0] if self._queue else math.inf)
            for packet, speed in zip(heads, self._bytes_per_s, strict=True):
                packet.left = max(0.0, packet.left - speed * (until - self._now))
            self._now = until
            if sent_at <= until:
                self._sent(list(self._sending)[ends.index(sent_at)])
            else:
                heapq.heappop(self._queue)[2]()
        assert not any(self._sleeping), "the schedule waits for itself"
        stages = self._step.stages
        last = max(end + costs.reduce_s for end, costs in zip(self._ends, stages, strict=True))
        seconds = last + self._step.together_s + max(costs.update_s for costs in stages)
        return Played(seconds=seconds, waits=tuple(self._waits), events=tuple(self._events))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._numbers), action))

    # -- stages

    def _stage(self, k: int) -> Iterator[float | None]:
        """Do the stage's step; yields seconds of work, or None to wait until something arrives."""
        step, costs = self._step, self._step.stages[k]
        seconds = {
            "load": 0.0,
            "forward": costs.forward_s,
            "backward": costs.backward_s,
            **dict.fromkeys(_SENDS, costs.encode_s),
            **dict.fromkeys(_RECEIVES, costs.decode_s),
        }
        for what, m in itertools.chain(*train_order(k, len(step.stages), step.micro_batches, step.ahead(k))):
            began = self._now
            if what in _RECEIVES:
                while (_RECEIVES[what], k, m) not in self._arrived:
                    yield None
                if self._now > began:
                    self._events.append(Event(k, "wait", m, began, self._now))
                    self._waits[k] += self._now - began
                began = self._now
            yield seconds[what]
            self._events.append(Event(k, what, m, began, self._now))
            if what in _SENDS:
                self._post(*_SENDS[what], k, m)
        self._ends[k] = self._now

    def _go_on(self, k: int) -> None:
        self._sleeping[k] = False
        for seconds in self._stages[k]:
            if seconds is None:
                self._sleeping[k] = True
                return
            if seconds > 0:
                self._later(seconds, lambda: self._go_on(k))
                return

    # -- packets

    def _post(self, way: str, direction: int, stage: int, m: int) -> None:
        link = min(stage, stage + direction)
        size = (self._step.forward_bytes if way == "forward" else self._step.backward_bytes)[link]
        packets = self._sending.get((way, link))
        packet = _Packet(m, size, self._now)
        if packets is None:
            self._sending[way, link] = deque([packet])
            self._lines_changed()
        else:
            packets.append(packet)

    def _lines_changed(self) -> None:
        self._bytes_per_s = [rate / 8 for rate in rates(self._network, list(self._sending))]

    def _sent(self, flow: tuple[str, int]) -> None:
        """Let the first packet of a direction have left; the next one is on the line."""
        way, link = flow
        packets = self._sending[flow]
        packet = packets.popleft()
        if packets:
            packets[0].since = self._now
        else:
            del self._sending[flow]
            self._lines_changed()
        lines = self._network.forward if way == "forward" else self._network.backward
        target = link + 1 if way == "forward" else link
        self._later(lines[link].latency_s, lambda: self._arrive(way, link, target, packet))

    def _arrive(self, way: str, link: int, target: int, packet: _Packet) -> None:
        self._events.append(Event(link, f"{way} packet", packet.micro_batch, packet.since, self._now))
        self._arrived.add((way, target, packet.micro_batch))
        if self._sleeping[target]:
            self._go_on(target)


@dataclass(slots=True)
class _Packet:
    """left: bytes not sent yet. since: when the line began with it."""

    micro_batch: int
    left: float
    since: float


# -- costs of a run, by its own counters


def measured_costs(stats: Mapping[str, Any], micro_batches: int) -> StageCosts:
    """Take means over a rank's steps so far. stats: its `comm_stats`; micro_batches: of a step."""
    seconds = stats["seconds"]
    each = stats["steps"] * micro_batches
    packets = max(1, each * len(stats["links"]))  # one each way on every link for every micro-batch
    return StageCosts(
        forward_s=seconds["forward"] / each,
        backward_s=seconds["backward"] / each,
        encode_s=seconds["encode"] / packets,
        decode_s=seconds["decode"] / packets,
    )


def measured_end(stats: Sequence[Mapping[str, Any]]) -> float:
    """Tell the seconds of a step after its last backward, from all ranks' `comm_stats`.

    Reductions and the global norm wait for the slowest stage; the rank that spends least there is the one that the
    others wait for.
    """
    return min((s["seconds"]["reduce"] + s["seconds"]["update"]) / s["steps"] for s in stats)
