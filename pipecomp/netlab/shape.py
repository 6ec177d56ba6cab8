"""The shape of a lab's links: rates, delays and cuts, parsed strictly from options.

Rates are in bits per second on the wire, headers included, as network equipment counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from pipecomp.errors import ConfigError, require
from pipecomp.utils.units import FRAME, MAX_DELAY_S, parse_rate, parse_time

MAX_CUT_S = 86400.0
MAX_NODES = 64
MAX_LOSS = 0.5
_CUTS = "NODE@TIME, or NODE@TIME+TIME for a limited time, as in 1@30s+5s"

_BURST_S = 0.004  # size of a token bucket: with less, late timers of a busy machine cost rate (7 % of 100 Mbit/s)
_QUEUE_S = 0.1
_MIN_QUEUE = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A node's lost connection, `at_s` seconds after the start of a run and for `for_s` seconds (None: for good)."""

    node: int
    at_s: float
    for_s: float | None


@dataclass(frozen=True, kw_only=True)
class LabShape:
    """All links of a lab.

    Attributes:
        nodes: Number of nodes.
        up, down: Bits per second from and to each node, None for no limit.
        delay_s: One-way delay in seconds.
        jitter_s: Largest deviation from the delay, uniformly distributed; packets keep their order.
        cuts: Lost connections.
        loss: Share of lost packets.
        nat: Whether all nodes except 0 are behind routers of their own.
        wireguard: Whether the nodes are connected through WireGuard.
    """

    nodes: int
    up: tuple[int | None, ...]
    down: tuple[int | None, ...]
    delay_s: float = 0.0
    jitter_s: float = 0.0
    cuts: tuple[Cut, ...] = ()
    loss: float = 0.0
    nat: bool = False
    wireguard: bool = False


class LabOptions(TypedDict, total=False):
    """The options of `Lab`."""

    nodes: int
    bandwidth: str | None
    asymmetric: Sequence[str]
    delay: str | None
    jitter: str | None
    cuts: Sequence[str]
    outages: Sequence[str]
    loss: str | None
    nat: bool
    wireguard: bool


def read_shape(**options: Unpack[LabOptions]) -> LabShape:
    """Parse the options. Raises ConfigError for values that are invalid or could not take effect."""
    nodes = options.get("nodes", 2)
    require(
        not isinstance(nodes, bool) and isinstance(nodes, int) and 2 <= nodes <= MAX_NODES,
        "nodes",
        nodes,
        f"2 to {MAX_NODES}",
    )
    down, up = _rates(nodes, options.get("bandwidth"), options.get("asymmetric", ()))
    delay, jitter, loss = options.get("delay"), options.get("jitter"), options.get("loss")
    delay_s = 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S)
    jitter_s = 0.0 if jitter is None else parse_time("jitter", jitter, MAX_DELAY_S)
    require(jitter_s <= delay_s, "jitter", jitter, "at most the delay")
    cuts = [_cut(text, nodes) for text in options.get("cuts", ())]
    cuts += [cut for text in options.get("outages", ()) for cut in _outage(text, nodes)]
    return LabShape(
        nodes=nodes,
        up=up,
        down=down,
        delay_s=delay_s,
        jitter_s=jitter_s,
        cuts=tuple(cuts),
        loss=0.0 if loss is None else _share(loss),
        nat=options.get("nat", False),
        wireguard=options.get("wireguard", False),
    )


_Rates = tuple[int | None, ...]


def _rates(nodes: int, bandwidth: str | None, asymmetric: Sequence[str]) -> tuple[_Rates, _Rates]:
    """Bits per second down and up of each node."""
    require(bandwidth is None or not asymmetric, "asymmetric", list(asymmetric), "instead of bandwidth")
    if asymmetric:
        require(
            not isinstance(asymmetric, str) and len(asymmetric) in (1, nodes),
            "asymmetric",
            asymmetric,
            f"DOWN/UP once for all nodes, or {nodes} times",
        )
        pairs: list[tuple[int | None, int | None]] = [_pair(text) for text in asymmetric]
    else:
        rate = None if bandwidth is None else parse_rate("bandwidth", bandwidth)
        pairs = [(rate, rate)]
    down, up = zip(*(pairs if len(pairs) == nodes else pairs * nodes), strict=True)
    return down, up


def _pair(text: str) -> tuple[int | None, int | None]:
    down, slash, up = text.partition("/")
    require(slash, "asymmetric", text, "DOWN/UP, as in 100mbit/10mbit")
    return parse_rate("asymmetric", down), parse_rate("asymmetric", up)


def _cut(text: str, nodes: int) -> Cut:
    found = re.fullmatch(r"([0-9]+)@([^+]+)(?:\+(.+))?", text) if isinstance(text, str) else None
    if found is None or int(found[1]) >= nodes:
        raise ConfigError("cut", text, f"{_CUTS}; nodes 0 to {nodes - 1}")
    for_s = None if found[3] is None else parse_time("cut", found[3], MAX_CUT_S)
    return Cut(node=int(found[1]), at_s=parse_time("cut", found[2], MAX_CUT_S), for_s=for_s)


def _outage(text: str, nodes: int) -> list[Cut]:
    length, at, begin = text.partition("@") if isinstance(text, str) else ("", "", "")
    if not at:
        raise ConfigError("outage", text, "TIME@TIME, the duration and the start, as in 60s@300s")
    at_s, for_s = parse_time("outage", begin, MAX_CUT_S), parse_time("outage", length, MAX_CUT_S)
    return [Cut(node=node, at_s=at_s, for_s=for_s) for node in range(nodes)]


def _share(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text) if isinstance(text, str) else None
    if found is None or not 0 < float(found[1]) <= 100 * MAX_LOSS:
        raise ConfigError("loss", text, f"a share in percent, more than 0% and at most {100 * MAX_LOSS:g}%, as in 2%")
    return float(found[1]) / 100


def burst_bytes(rate: int) -> int:
    """Return how many bytes a link may send at once after a pause."""
    return max(2 * FRAME, round(rate / 8 * _BURST_S))


def queue_bytes(rate: int, delay_s: float) -> int:
    """Return how many bytes may wait before a link: enough for one TCP connection to saturate it."""
    return burst_bytes(rate) + max(_MIN_QUEUE, round(rate / 8 * (_QUEUE_S + 2 * delay_s)))
