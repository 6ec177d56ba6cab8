"""What carries packets: rate and latency of every link in each direction, and lines that they share.

K stages, link k between stages k and k + 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipecomp.errors import require
from pipecomp.utils.serialization import exchanged
from pipecomp.utils.units import FRAME, FRAME_HEADERS, SEGMENT

TCP_SHARE = SEGMENT / FRAME
"""Of a network's nominal rate, what TCP over Ethernet leaves for content: frames of 1,500 bytes, headers off."""
ACKNOWLEDGED = 1 - FRAME_HEADERS / (FRAME + FRAME_HEADERS)
"""What is left of a line's rate while the other direction is busy too, each of whose segments is acknowledged."""


@exchanged
@dataclass(frozen=True, kw_only=True)
class Line:
    """One direction. bits_per_s: of content, headers not counted; `math.inf` for no limit. latency_s: one way."""

    bits_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.bits_per_s > 0, "bits_per_s", self.bits_per_s, "a number above 0")
        require(0 <= self.latency_s < math.inf, "latency_s", self.latency_s, "0 or more")

    def seconds(self, size: float) -> float:
        """Of a packet of `size` bytes that has the line for itself."""
        return 8 * size / self.bits_per_s + self.latency_s


@exchanged
@dataclass(frozen=True, kw_only=True)
class Network:
    """All links. forward, backward: link k's lines to stage k + 1 and back.

    shared: whether what a stage sends to both its neighbours passes one line, and what it receives from both another
    one, as with one network card for each stage. between: what connects the replicas of a stage; None where only the
    stages' links are known. It is all there is with one stage.
    """

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    shared: bool = True
    between: Line | None = None

    def __post_init__(self) -> None:
        require(
            len(self.forward) == len(self.backward),
            "network",
            (len(self.forward), len(self.backward)),
            "as many lines forward as backward",
        )

    @property
    def lines(self) -> tuple[Line, ...]:
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


def uniform(stages: int, bits_per_s: float, latency_s: float = 0.0, *, shared: bool = True) -> Network:
    """Links that are all alike, in both directions, and between replicas. bits_per_s: of content."""
    line = Line(bits_per_s=bits_per_s, latency_s=latency_s)
    lines = (line,) * (stages - 1)
    return Network(forward=lines, backward=lines, shared=shared, between=line)


def chain(stages: int, bits_per_s: Sequence[float], latency_s: float = 0.0) -> Network:
    """Links with a rate each, or one for all; ConfigError for another number of them. Replicas have the slowest's."""
    if len(bits_per_s) == 1:
        return uniform(stages, bits_per_s[0], latency_s)
    require(
        len(bits_per_s) == stages - 1, "bandwidth", list(bits_per_s), f"one rate, or {stages - 1} for {stages} stages"
    )
    lines = tuple(Line(bits_per_s=rate, latency_s=latency_s) for rate in bits_per_s)
    return Network(forward=lines, backward=lines, between=min(lines, key=lambda line: line.bits_per_s))


def between_replicas(network: Network) -> Network:
    """Make the network of a single stage whose replicas these links connect, one with the next."""
    return Network(forward=(), backward=(), between=Line(bits_per_s=network.slowest, latency_s=network.latency_s))


def rates(network: Network, active: Sequence[tuple[str, int]]) -> list[float]:
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
