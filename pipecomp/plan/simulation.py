"""Event-driven simulation of a training step in the engine's own order, over links of given rates.

A stage does one thing at a time, in the order of `train_order`. Sends do not block it. A link carries one packet at a
time per direction, both directions at once; a receive waits for its packet only.

K stages, M micro-batches, link k between stages k and k + 1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipecomp.errors import require
from pipecomp.schedule import in_flight_counts, train_order
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import FRAME, FRAME_HEADERS, SEGMENT

TCP_SHARE = SEGMENT / FRAME
"""Share of a network's nominal rate that TCP leaves for content: Ethernet frames of 1,500 bytes without headers."""
ACKNOWLEDGED = 1 - FRAME_HEADERS / (FRAME + FRAME_HEADERS)
"""Share of a channel's rate that is left while the other direction is busy, too: it carries acknowledgements."""

# -- the network


@serializable
@dataclass(frozen=True, kw_only=True)
class Channel:
    """One direction of a link.

    Attributes:
        bits_per_s: Bits of content per second, without headers; `math.inf` for no limit.
        latency_s: One-way latency.
    """

    bits_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.bits_per_s > 0, "bits_per_s", self.bits_per_s, "a number above 0")
        require(0 <= self.latency_s < math.inf, "latency_s", self.latency_s, "0 or more")

    def seconds(self, size: float) -> float:
        """Return the seconds of a packet of `size` bytes that has the channel to itself."""
        return 8 * size / self.bits_per_s + self.latency_s


@serializable
@dataclass(frozen=True, kw_only=True)
class LinkNetwork:
    """All links between stages.

    Attributes:
        forward: Channel of each link k to stage k + 1.
        backward: Channel of each link k from stage k + 1.
        shared: True if a stage sends to both its neighbours through one channel and receives from both through another,
            as with one network card per stage.
        between: Channel between the replicas of a stage; None if unknown. With one stage it is all there is.
        spread: Lowest and highest measured rates, as factors of the channels' rates.
    """

    forward: tuple[Channel, ...]
    backward: tuple[Channel, ...]
    shared: bool = True
    between: Channel | None = None
    spread: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        counts = len(self.forward), len(self.backward)
        require(counts[0] == counts[1], "network", counts, "as many channels forward as backward")

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels, the replicas' included."""
        return (*self.forward, *self.backward, *(() if self.between is None else (self.between,)))

    def scaled(self, factor: float) -> LinkNetwork:
        """Return the network with rates multiplied by a factor, and without spread."""

        def faster(channel: Channel) -> Channel:
            return replace(channel, bits_per_s=factor * channel.bits_per_s)

        between = None if self.between is None else faster(self.between)
        forward, backward = (tuple(map(faster, channels)) for channels in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward, between=between, spread=(1.0, 1.0))

    @property
    def latency_s(self) -> float:
        """The longest latency."""
        return max((channel.latency_s for channel in self.channels), default=0.0)

    @property
    def slowest(self) -> float:
        """Bits per second of the slowest channel."""
        return min((channel.bits_per_s for channel in self.channels), default=math.inf)

    @property
    def replica_line(self) -> Channel:
        """The line on which replicas average: the channel between them, or if it is unknown the slowest rate of all."""
        return self.between or Channel(bits_per_s=self.slowest, latency_s=self.latency_s)

    @property
    def stage_line(self) -> Channel:
        """The line on which all stages of a replica exchange: the slowest rate of their links."""
        links = [*self.forward, *self.backward]
        if not links:
            return self.replica_line
        rate = min(channel.bits_per_s for channel in links)
        return Channel(bits_per_s=rate, latency_s=max(channel.latency_s for channel in links))


def uniform(stages: int, bits_per_s: float, latency_s: float = 0.0, *, shared: bool = True) -> LinkNetwork:
    """Make a network of equal channels, also between replicas. bits_per_s: content, without headers."""
    channel = Channel(bits_per_s=bits_per_s, latency_s=latency_s)
    channels = (channel,) * (stages - 1)
    return LinkNetwork(forward=channels, backward=channels, shared=shared, between=channel)


def chain(stages: int, bits_per_s: Sequence[float], latency_s: float = 0.0) -> LinkNetwork:
    """Make a network with one rate per link, or one for all; replicas have the slowest.

    Raises:
        ConfigError: Another number of rates.
    """
    if len(bits_per_s) == 1:
        return uniform(stages, bits_per_s[0], latency_s)
    allowed = f"one rate, or {stages - 1} for {stages} stages"
    require(len(bits_per_s) == stages - 1, "bandwidth", list(bits_per_s), allowed)
    channels = tuple(Channel(bits_per_s=rate, latency_s=latency_s) for rate in bits_per_s)
    return LinkNetwork(forward=channels, backward=channels, between=min(channels, key=lambda c: c.bits_per_s))


def between_replicas(network: LinkNetwork) -> LinkNetwork:
    """Return the network of a single stage whose replicas these links connect, each with the next."""
    channel = Channel(bits_per_s=network.slowest, latency_s=network.latency_s)
    return LinkNetwork(forward=(), backward=(), between=channel, spread=network.spread)


def active_rates(network: LinkNetwork, active: Sequence[tuple[str, int]]) -> list[float]:
    """Return the bits per second of channels that are busy at the same time.

    Shared channels are divided by max-min fairness, about as TCP does: every user gets as much as any other, except
    those that another channel limits. A stage's channel has the rate of the fastest of its links, less the
    acknowledgements of what the stage receives.

    Args:
        network: All links.
        active: Busy channels, as ("forward" or "backward", link).
    """
    own = [(network.forward if direction == "forward" else network.backward)[k].bits_per_s for direction, k in active]
    if not network.shared:
        busy = Counter(k for _, k in active)
        return [rate * (ACKNOWLEDGED if busy[k] == 2 else 1.0) for rate, (_, k) in zip(own, active, strict=True)]
    room: dict[tuple[str, int], float] = {}
    cards: list[tuple[tuple[str, int], tuple[str, int]]] = []  # of each flow: out of its source, into its target
    for (direction, k), rate in zip(active, own, strict=True):
        source, target = (k, k + 1) if direction == "forward" else (k + 1, k)
        cards.append((("out", source), ("in", target)))
        for card in cards[-1]:
            room[card] = max(room.get(card, 0.0), rate)
    for side, stage in room:
        if ("in" if side == "out" else "out", stage) in room:
            room[side, stage] *= ACKNOWLEDGED
    rates = [0.0] * len(active)
    left = set(range(len(active)))
    while left:
        users = Counter(card for index in left for card in cards[index])
        limits = {index: min(own[index], *(room[card] / users[card] for card in cards[index])) for index in left}
        least = min(limits.values())
        for index in [index for index, limit in limits.items() if limit <= least * (1 + 1e-12)]:
            rates[index] = least
            left.remove(index)
            for card in cards[index]:
                room[card] = max(0.0, room[card] - least)
    return rates


# -- a step


@serializable
@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of one stage.

    Attributes:
        forward_s: The model's forward on one micro-batch.
        backward_s: The model's backward on one micro-batch.
        encode_s: Encoding one packet of either kind: quantizing, checksum, message store.
        decode_s: Decoding one packet.
        reduce_s: Averaging gradients over replicas, once per step after the last backward.
        update_s: The optimizer, once per step.
    """

    forward_s: float
    backward_s: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0


@serializable
@dataclass(frozen=True, kw_only=True)
class SharedCores:
    """Processes that compute on the same cores.

    Attributes:
        members: Their ranks, or in a step their stages.
        at_once: Number of them that the cores let compute at full speed at the same time.
    """

    members: tuple[int, ...]
    at_once: float

    @property
    def crowding(self) -> float:
        """Factor on the seconds of work that all of them do at the same time."""
        return max(1.0, len(self.members) / self.at_once)


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """A step to simulate.

    Attributes:
        stages: Costs of each stage.
        micro_batches: Micro-batches per step.
        forward_bytes: Bytes of a micro-batch's activation packet on each link, headers included.
        backward_bytes: The same for gradients.
        in_flight: Forwards that each stage runs ahead of their backwards; None for 1F1B's numbers.
        lowest: First stage that trains anything; those before it have no backwards, see `SplitPlan.lowest_trained`.
        together_s: Seconds in which all stages wait for each other between the last reduction and the update (norm,
            tied weights).
        shared_cores: Stages that compute on the same cores; a stage occurs once at most.
    """

    stages: Sequence[StageCosts]
    micro_batches: int
    forward_bytes: Sequence[float]
    backward_bytes: Sequence[float]
    in_flight: Sequence[int] | None = None
    lowest: int = 0
    together_s: float = 0.0
    shared_cores: tuple[SharedCores, ...] = ()

    def __post_init__(self) -> None:
        K, M = len(self.stages), self.micro_batches
        require(K >= 1 and M >= 1, "step", (K, M), "at least one stage and one micro-batch")
        for name, sizes in (("forward_bytes", self.forward_bytes), ("backward_bytes", self.backward_bytes)):
            require(len(sizes) == K - 1, name, list(sizes), f"{K - 1} numbers, one for each link")
        fits = self.in_flight is None or len(self.in_flight) == K
        require(fits, "in_flight", self.in_flight, f"{K} numbers, one for each stage")

    def run_ahead(self, stage: int) -> int:
        """Return the number of forwards that a stage runs ahead."""
        K, M = len(self.stages), self.micro_batches
        return max(1, min(M, (self.in_flight or in_flight_counts(1, K, M, self.lowest))[stage]))


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """Work of a stage ("wait" included), or a packet on a link ("forward packet", "backward packet").

    `place` is the stage or the link; times are in seconds since the step began.
    """

    place: int
    what: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Result of a simulation.

    Attributes:
        seconds: Seconds of the whole step.
        waits: Seconds that each stage waits for packets.
        events: All events, ordered by their end.
    """

    seconds: float
    waits: tuple[float, ...]
    events: tuple[SimulatedEvent, ...] = field(repr=False)


def simulate_step(step: StepSpec, network: LinkNetwork) -> SimulatedStep:
    """Simulate one step over a network. ConfigError if the network has another number of links."""
    links = len(step.stages) - 1
    require(len(network.forward) == links, "network", len(network.forward), f"{links} links")
    return _Simulator(step, network).run()


@dataclass(slots=True)
class _PacketInTransit:
    micro_batch: int
    bytes_left: float
    started: float  # when the channel began with it


_SENDS = {"send activation": ("forward", 1), "send gradient": ("backward", -1)}
_RECEIVES = {"receive activation": "forward", "receive gradient": "backward"}


class _Simulator:
    def __init__(self, step: StepSpec, network: LinkNetwork) -> None:
        K = len(step.stages)
        self._step, self._network = step, network
        self._now = 0.0
        self._serial = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []  # time, serial number, action
        self._stages = [self._stage(k) for k in range(K)]
        self._sleeping = [False] * K
        self._arrived: set[tuple[str, int, int]] = set()  # direction, stage, micro-batch
        self._sending: dict[tuple[str, int], deque[_PacketInTransit]] = {}  # direction, link: the first one travels
        self._bytes_per_s: list[float] = []  # of the channels in _sending, in its order
        self._cores = {k: shared for shared in step.shared_cores for k in shared.members}
        self._work: dict[int, float] = {}  # by stage with shared cores: seconds that are left if it computes alone
        self._ends, self._waits = [0.0] * K, [0.0] * K
        self._events: list[SimulatedEvent] = []

    def run(self) -> SimulatedStep:
        for k in range(len(self._stages)):
            self._continue(k)
        while self._queue or self._sending or self._work:
            heads = [packets[0] for packets in self._sending.values()]
            ends = [self._now + p.bytes_left / speed for p, speed in zip(heads, self._bytes_per_s, strict=True)]
            sent_at = min(ends, default=math.inf)
            speeds = {k: self._compute_speed(k) for k in self._work}
            done_at = min((self._now + left / speeds[k] for k, left in self._work.items()), default=math.inf)
            until = min(sent_at, done_at, self._queue[0][0] if self._queue else math.inf)
            for k, speed in speeds.items():
                self._work[k] = max(0.0, self._work[k] - speed * (until - self._now))
            for packet, speed in zip(heads, self._bytes_per_s, strict=True):
                packet.bytes_left = max(0.0, packet.bytes_left - speed * (until - self._now))
            self._now = until
            if sent_at <= until:
                self._sent(list(self._sending)[ends.index(sent_at)])
            elif done_at <= until:
                k = min(self._work, key=lambda k: self._work[k] / speeds[k])
                del self._work[k]
                self._continue(k)
            else:
                heapq.heappop(self._queue)[2]()
        assert not any(self._sleeping), "the schedule waits for itself"
        stages = self._step.stages
        last = max(end + costs.reduce_s for end, costs in zip(self._ends, stages, strict=True))
        crowding = [self._cores[k].crowding if k in self._cores else 1.0 for k in range(len(stages))]
        update_s = max(factor * costs.update_s for factor, costs in zip(crowding, stages, strict=True))
        seconds = last + self._step.together_s + update_s
        return SimulatedStep(seconds=seconds, waits=tuple(self._waits), events=tuple(self._events))

    def _compute_speed(self, k: int) -> float:
        """Return the share of full speed at which a stage computes now."""
        busy = sum(other in self._work for other in self._cores[k].members)
        return min(1.0, self._cores[k].at_once / busy)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._serial), action))

    def _stage(self, k: int) -> Iterator[float | None]:
        """Run a stage's step; yields seconds of work, or None to wait for a packet."""
        step, costs = self._step, self._step.stages[k]
        seconds = {
            "load": 0.0,
            "forward": costs.forward_s,
            "backward": costs.backward_s,
            **dict.fromkeys(_SENDS, costs.encode_s),
            **dict.fromkeys(_RECEIVES, costs.decode_s),
        }
        order = train_order(k, len(step.stages), step.micro_batches, step.run_ahead(k), step.lowest)
        for what, m in itertools.chain(*order):
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
                self._send(*_SENDS[what], k, m)
        self._ends[k] = self._now

    def _continue(self, k: int) -> None:
        self._sleeping[k] = False
        for seconds in self._stages[k]:
            if seconds is None:
                self._sleeping[k] = True
                return
            if seconds > 0 and k in self._cores:
                self._work[k] = seconds
                return
            if seconds > 0:
                self._after(seconds, lambda: self._continue(k))
                return

    def _send(self, direction: str, offset: int, stage: int, m: int) -> None:
        link = min(stage, stage + offset)
        size = (self._step.forward_bytes if direction == "forward" else self._step.backward_bytes)[link]
        packet = _PacketInTransit(m, size, self._now)
        if (direction, link) in self._sending:
            self._sending[direction, link].append(packet)
        else:
            self._sending[direction, link] = deque([packet])
            self._update_rates()

    def _update_rates(self) -> None:
        self._bytes_per_s = [rate / 8 for rate in active_rates(self._network, list(self._sending))]

    def _sent(self, flow: tuple[str, int]) -> None:
        """Take the first packet off a channel, and start the next one."""
        direction, link = flow
        packets = self._sending[flow]
        packet = packets.popleft()
        if packets:
            packets[0].started = self._now
        else:
            del self._sending[flow]
            self._update_rates()
        channels = self._network.forward if direction == "forward" else self._network.backward
        target = link + 1 if direction == "forward" else link
        self._after(channels[link].latency_s, lambda: self._arrive(direction, link, target, packet))

    def _arrive(self, direction: str, link: int, target: int, packet: _PacketInTransit) -> None:
        self._events.append(SimulatedEvent(link, f"{direction} packet", packet.micro_batch, packet.started, self._now))
        self._arrived.add((direction, target, packet.micro_batch))
        if self._sleeping[target]:
            self._continue(target)


# -- costs of a run, from its own counters


def measured_costs(stats: Mapping[str, Any], micro_batches: int) -> StageCosts:
    """Return a rank's mean costs over its steps so far. stats: its `comm_stats`; micro_batches: per step."""
    seconds = stats["seconds"]
    each = stats["steps"] * micro_batches
    packets = max(1, each * len(stats["links"]))  # one per direction, link and micro-batch
    return StageCosts(
        forward_s=seconds["forward"] / each,
        backward_s=seconds["backward"] / each,
        encode_s=seconds["encode"] / packets,
        decode_s=seconds["decode"] / packets,
    )


def measured_end(stats: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a step after its last backward, from all ranks' `comm_stats`.

    Reductions and the global norm wait for the slowest stage: the rank that spends least there is the one that the
    others wait for.
    """
    return min((s["seconds"]["reduce"] + s["seconds"]["update"]) / s["steps"] for s in stats)
