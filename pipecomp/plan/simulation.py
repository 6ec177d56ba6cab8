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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecomp.errors import require
from pipecomp.schedule import in_flight_counts, train_order
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import FRAME, FRAME_HEADERS, SEGMENT

# -- What carries packets: rate and latency of every link in each direction, and lines that they share.

TCP_SHARE = SEGMENT / FRAME
"""Of a network's nominal rate, what TCP over Ethernet leaves for content: frames of 1,500 bytes, headers off."""
ACKNOWLEDGED = 1 - FRAME_HEADERS / (FRAME + FRAME_HEADERS)
"""What is left of a line's rate while the other direction is busy too, each of whose segments is acknowledged."""


@serializable
@dataclass(frozen=True, kw_only=True)
class Channel:
    """One direction. bits_per_s: of content, headers not counted; `math.inf` for no limit. latency_s: one way."""

    bits_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.bits_per_s > 0, "bits_per_s", self.bits_per_s, "a number above 0")
        require(0 <= self.latency_s < math.inf, "latency_s", self.latency_s, "0 or more")

    def seconds(self, size: float) -> float:
        """Of a packet of `size` bytes that has the line for itself."""
        return 8 * size / self.bits_per_s + self.latency_s


@serializable
@dataclass(frozen=True, kw_only=True)
class LinkNetwork:
    """All links. forward, backward: link k's lines to stage k + 1 and back.

    shared: whether what a stage sends to both its neighbours passes one line, and what it receives from both another
    one, as with one network card for each stage. between: what connects the replicas of a stage; None where only the
    stages' links are known. It is all there is with one stage.
    """

    forward: tuple[Channel, ...]
    backward: tuple[Channel, ...]
    shared: bool = True
    between: Channel | None = None

    def __post_init__(self) -> None:
        require(
            len(self.forward) == len(self.backward),
            "network",
            (len(self.forward), len(self.backward)),
            "as many lines forward as backward",
        )

    @property
    def lines(self) -> tuple[Channel, ...]:
        """All of them, the replicas' too."""
        return (*self.forward, *self.backward, *(() if self.between is None else (self.between,)))

    @property
    def latency_s(self) -> float:
        """The longest of all lines."""
        return max((line.latency_s for line in self.lines), default=0.0)

    @property
    def slowest(self) -> float:
        """Bits per second of the slowest line."""
        return min((line.bits_per_s for line in self.lines), default=math.inf)


def uniform(stages: int, bits_per_s: float, latency_s: float = 0.0, *, shared: bool = True) -> LinkNetwork:
    """Links that are all alike, in both directions, and between replicas. bits_per_s: of content."""
    line = Channel(bits_per_s=bits_per_s, latency_s=latency_s)
    lines = (line,) * (stages - 1)
    return LinkNetwork(forward=lines, backward=lines, shared=shared, between=line)


def chain(stages: int, bits_per_s: Sequence[float], latency_s: float = 0.0) -> LinkNetwork:
    """Links with a rate each, or one for all; ConfigError for another number of them. Replicas have the slowest's."""
    if len(bits_per_s) == 1:
        return uniform(stages, bits_per_s[0], latency_s)
    require(
        len(bits_per_s) == stages - 1, "bandwidth", list(bits_per_s), f"one rate, or {stages - 1} for {stages} stages"
    )
    lines = tuple(Channel(bits_per_s=rate, latency_s=latency_s) for rate in bits_per_s)
    return LinkNetwork(forward=lines, backward=lines, between=min(lines, key=lambda line: line.bits_per_s))


def between_replicas(network: LinkNetwork) -> LinkNetwork:
    """Make the network of a single stage whose replicas these links connect, one with the next."""
    return LinkNetwork(
        forward=(), backward=(), between=Channel(bits_per_s=network.slowest, latency_s=network.latency_s)
    )


def rates(network: LinkNetwork, active: Sequence[tuple[str, int]]) -> list[float]:
    """Bits per second that each of the `active` directions ("forward" or "backward", link) gets at once.

    Where lines are shared, as TCP connections share them about: everyone gets as much as anyone else, except those
    that another line holds back (max-min fairness). A stage's line carries what the fastest of its links does, and the
    acknowledgements of what the stage receives.
    """
    own = [(network.forward if way == "forward" else network.backward)[k].bits_per_s for way, k in active]
    if not network.shared:
        ways = Counter(k for _, k in active)
        return [rate * (ACKNOWLEDGED if ways[k] == 2 else 1.0) for rate, (_, k) in zip(own, active, strict=True)]
    room: dict[tuple[str, int], float] = {}
    passes: list[tuple[tuple[str, int], tuple[str, int]]] = []
    for way, k in active:
        source, target = (k, k + 1) if way == "forward" else (k + 1, k)
        passes.append((("out", source), ("in", target)))
    for index, lanes in enumerate(passes):
        for lane in lanes:
            room[lane] = max(room.get(lane, 0.0), own[index])
    for way, stage in room:
        if ("in" if way == "out" else "out", stage) in room:
            room[way, stage] *= ACKNOWLEDGED
    found = [0.0] * len(active)
    left = set(range(len(active)))
    while left:
        share = {
            lane: room[lane] / users for lane in room if (users := sum(1 for index in left if lane in passes[index]))
        }
        limits = {index: min(own[index], *(share[lane] for lane in passes[index])) for index in left}
        least = min(limits.values())
        for index in [index for index, limit in limits.items() if limit <= least * (1 + 1e-12)]:
            found[index] = least
            left.remove(index)
            for lane in passes[index]:
                room[lane] = max(0.0, room[lane] - least)
    return found


_SENDS = {"send activation": ("forward", 1), "send gradient": ("backward", -1)}
_RECEIVES = {"receive activation": "forward", "receive gradient": "backward"}


@serializable
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
class StepSpec:
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
        return max(1, min(M, (self.in_flight or in_flight_counts(1, K, M))[stage]))


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """What a stage did ("wait" included), or a link ("forward packet", "backward packet"; place: the link)."""

    place: int
    what: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """seconds: of the whole step. waits: by stage, for packets. events: all that happened, in the order it ended."""

    seconds: float
    waits: tuple[float, ...]
    events: tuple[SimulatedEvent, ...] = field(repr=False)


def simulate_step(step: StepSpec, network: LinkNetwork) -> SimulatedStep:
    """Play one step over the network, which has a link between each two neighbours. ConfigError if it has not."""
    require(
        len(network.forward) == len(step.stages) - 1, "network", len(network.forward), f"{len(step.stages) - 1} links"
    )
    return _Player(step, network).run()


class _Player:
    def __init__(self, step: StepSpec, network: LinkNetwork) -> None:
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
        self._events: list[SimulatedEvent] = []

    def run(self) -> SimulatedStep:
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
        return SimulatedStep(seconds=seconds, waits=tuple(self._waits), events=tuple(self._events))

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
                    self._events.append(SimulatedEvent(k, "wait", m, began, self._now))
                    self._waits[k] += self._now - began
                began = self._now
            yield seconds[what]
            self._events.append(SimulatedEvent(k, what, m, began, self._now))
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
        self._events.append(SimulatedEvent(link, f"{way} packet", packet.micro_batch, packet.since, self._now))
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
