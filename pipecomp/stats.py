"""Counters of traffic and time: plain numbers, kept where the traffic is, added up by whoever reports."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

DIRECTIONS = ("forward", "backward", "evaluation")
WEIGHTS = "weights"  # the group of those that replicas which share out an optimizer's states send each other
_MEANS = ("mean_bits", "relative_error", "store_hit_rate")
_AS_IT_IS = ("rank", "stage", "replica", "in_flight", "store_bytes", "local_steps")


@dataclass(slots=True)
class Direction:
    """One direction of one link, or its evaluation traffic.

    Attributes:
        messages: Packets.
        bytes_raw: The values in the training dtype, padding not counted.
        bytes_sent: Complete packets, headers included.
        values_quantized: Values sent as codes, those of top-k not counted.
        code_bits: The bits of all their codes.
    """

    messages: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    values_quantized: int = 0
    code_bits: int = 0

    def add(self, raw: int, sent: int, quantized: tuple[int, int] = (0, 0)) -> None:
        """Count one packet of so many bytes. quantized: its values that are, and the bits of their codes."""
        self.messages += 1
        self.bytes_raw += raw
        self.bytes_sent += sent
        self.values_quantized += quantized[0]
        self.code_bits += quantized[1]

    def mean_bits(self) -> float | None:
        """Return the bits of a quantized value, on average; None where there is none."""
        return self.code_bits / self.values_quantized if self.values_quantized else None


@dataclass(slots=True)
class LinkStats:
    """One endpoint of one link since it was opened; both endpoints count the same.

    Attributes:
        forward: Activations.
        backward: Their gradients.
        evaluation: Activations of evaluations.
        full_samples: Samples that were sent without reference to a cached activation.
        delta_samples: Samples that were sent as a change of a cached activation, or of cluster centers.
        unstored_samples: First visits, among `full_samples`, that no endpoint keeps because a disk refused writes.
        full_gradients: Samples whose gradient was sent without reference to an earlier one, where some are changes.
        delta_gradients: Samples whose gradient was sent as a change of the last one.
        drift_checks: How often both endpoints compared their cached activations.
        drift_check_bytes: What this endpoint sent for that.
        drifts: How often they differed.
        drift_samples: In how many samples.
        wait_seconds: How long this endpoint waited for packets in training.
        error_sum: Sum of ‖a − m‖ / ‖a‖ over the sampled forward packets: the first micro-batch of each step, known to
            the sender only.
        error_count: Their number.
    """

    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=Direction)
    evaluation: Direction = field(default_factory=Direction)
    full_samples: int = 0
    delta_samples: int = 0
    unstored_samples: int = 0
    full_gradients: int = 0
    delta_gradients: int = 0
    drift_checks: int = 0
    drift_check_bytes: int = 0
    drifts: int = 0
    drift_samples: int = 0
    wait_seconds: float = 0.0
    error_sum: float = 0.0
    error_count: int = 0

    def count_visits(self, samples: int, *, deltas: int, kept: int, gradients: bool) -> None:
        """Count a packet's samples, how many were sent as changes, and how many this endpoint keeps."""
        if gradients:
            self.delta_gradients += deltas
            self.full_gradients += samples - deltas
            return
        self.unstored_samples += samples - kept
        self.delta_samples += deltas
        self.full_samples += samples - deltas

    def as_dict(self) -> dict:
        """Return nested numbers for reports, with mean error and bits, and the share of samples sent as deltas."""
        out = asdict(self)
        for direction in DIRECTIONS:
            out[direction]["mean_bits"] = getattr(self, direction).mean_bits()
        count, total = out.pop("error_count"), out.pop("error_sum")
        out["relative_error"] = total / count if count else None
        samples = self.full_samples + self.delta_samples
        out["store_hit_rate"] = self.delta_samples / samples if samples else None
        return out


@dataclass(slots=True)
class GroupStats:
    """Gradients of one group of ranks, summed over the steps so far, for this rank.

    Attributes:
        calls: Reductions.
        bytes_raw: What a ring all-reduce of n ranks puts on this rank's link, 2 (n − 1) / n of the gradients' bytes.
        bytes_sent: What was put there.
        wait_seconds: Time in the reduction, waiting for the other ranks included.

    Of `WEIGHTS` both are n − 1 parts in n of the weights' bytes, and the time is that of `Seconds.update`.
    """

    calls: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0

    def add(self, raw: int, sent: int, ranks: int, seconds: float) -> None:
        """Count one reduction of `raw` bytes over `ranks` ranks, which travelled as `sent` bytes."""
        self.calls += 1
        self.bytes_raw += ring_bytes(raw, ranks)
        self.bytes_sent += ring_bytes(sent, ranks)
        self.wait_seconds += seconds


@dataclass(slots=True)
class Seconds:
    """Where this rank's training time went, in seconds, summed over the steps so far.

    By the host's clock. On a GPU `forward`, `backward` and `update` are what asking for their kernels took, and what
    the kernels take beyond that falls to whichever part waits for their results, such as `encode` or `reduce`.

    Attributes:
        forward: Of the model.
        backward: Of the model.
        encode: Quantizing, message store and checksums of what is sent.
        decode: The same of what is received.
        wait: For packets.
        reduce: Gradients of tied weights and of data-parallel groups, waiting for other ranks included.
        update: The optimizer.
    """

    forward: float = 0.0
    backward: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    wait: float = 0.0
    reduce: float = 0.0
    update: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside to `name`."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)


def ring_bytes(size: int, n: int) -> int:
    """Return what a ring all-reduce of `size` bytes over n ranks puts on a rank's links."""
    return 2 * size * (n - 1) // n


def code_bits(ranks: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Add up, by link, the bits of all codes and the values they are of: forward, then back. ranks: as `Traffic.of`."""
    ends = {(rank["replica"], name): link for rank in ranks for name, link in rank["links"].items()}
    found: dict[str, list[int]] = {}
    for (_, name), link in sorted(ends.items()):
        now = [link[way][key] for way in DIRECTIONS[:2] for key in ("code_bits", "values_quantized")]
        found[name] = [a + b for a, b in zip(found.get(name, [0] * 4), now, strict=True)]
    return found


class BitsMeter:
    """Bits of a quantized value on average, over all links, each time since the last one."""

    def __init__(self) -> None:
        self._before = [0] * 4

    def since_last(self, ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Return "forward_bits" and "backward_bits", each where something was quantized. ranks: as `Traffic.of`."""
        now = [sum(counts) for counts in zip(*code_bits(ranks).values(), strict=True)] or [0] * 4
        spent = [a - b for a, b in zip(now, self._before, strict=True)]
        self._before = now
        ways = zip(DIRECTIONS[:2], spent[::2], spent[1::2], strict=True)
        return {f"{way}_bits": bits / values for way, bits, values in ways if values}


def counted_since(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank has counted from one `comm_stats` to a later one; a mean over more than that is None."""
    out: dict[str, Any] = {}
    for key, value in now.items():
        before = then.get(key)
        if key in _AS_IT_IS or before is None:
            out[key] = value
        elif isinstance(value, Mapping):
            out[key] = counted_since(before, value)
        elif isinstance(value, (int, float)) and isinstance(before, (int, float)):
            out[key] = None if key in _MEANS else value - before
        else:
            out[key] = value
    return out


def total_bytes(links: Iterable[dict], direction: str) -> tuple[int, int]:
    """Return (raw, sent) bytes of one direction, over several links' `as_dict`."""
    parts = [link[direction] for link in links]
    return sum(p["bytes_raw"] for p in parts), sum(p["bytes_sent"] for p in parts)


@dataclass(frozen=True)
class Traffic:
    """Bytes since the start of the run, over all replicas and ranks.

    Attributes:
        links: By "k->k+1", for each of `DIRECTIONS`, `<direction>_bytes_raw` (the values in the training dtype) and
            `<direction>_bytes_sent` (complete packets).
        groups: By name, what the reductions of a group of ranks put on the network, `bytes_raw` and `bytes_sent`;
            `WEIGHTS` are gathered.
    """

    links: dict[str, dict[str, int]]
    groups: dict[str, dict[str, int]]

    @classmethod
    def of(cls, ranks: Iterable[Mapping[str, Any]]) -> Traffic:
        """Add up `engine.gather_comm_stats()`. Both endpoints of a link count the same packets, so one is taken."""
        links: dict[str, Counter[str]] = defaultdict(Counter)
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        seen: set[tuple[int, str]] = set()
        kinds = ("bytes_raw", "bytes_sent")
        for rank in ranks:
            for name, link in rank["links"].items():
                if (rank["replica"], name) not in seen:
                    seen.add((rank["replica"], name))
                    links[name].update({f"{d}_{kind}": link[d][kind] for d in DIRECTIONS for kind in kinds})
            for name, group in rank["groups"].items():
                groups[name].update({kind: group[kind] for kind in kinds})
        return cls(_plain(links), _plain(groups))

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both."""
        return Traffic(_sums(self.links, other.links), _sums(self.groups, other.groups))


def _sums(a: dict[str, dict[str, int]], b: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for name, counts in (*a.items(), *b.items()):
        total[name].update(counts)
    return _plain(total)


def _plain(counters: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {name: dict(counters[name]) for name in sorted(counters)}
