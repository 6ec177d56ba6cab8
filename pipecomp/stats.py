"""Counters of traffic and time. Each component counts its own traffic; reports add them up."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

DIRECTIONS = ("forward", "backward", "evaluation")
WEIGHTS = "weights"  # group name of the weights that replicas with a partitioned optimizer gather from each other
_MEANS = ("mean_bits", "relative_error", "store_hit_rate")
_NOT_CUMULATIVE = ("rank", "stage", "replica", "in_flight", "streams", "store_bytes", "local_steps")


@dataclass(slots=True)
class Direction:
    """One direction of one link, or its evaluation traffic.

    Attributes:
        messages: Packets.
        bytes_raw: Values in the training dtype, without padding.
        bytes_sent: Complete packets with headers.
        values_quantized: Values sent as codes, without those of top-k.
        code_bits: Bits of these codes.
    """

    messages: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    values_quantized: int = 0
    code_bits: int = 0

    def add(self, raw: int, sent: int, quantized: tuple[int, int] = (0, 0)) -> None:
        """Count one packet of `sent` bytes. quantized: number of its quantized values, and bits of their codes."""
        self.messages += 1
        self.bytes_raw += raw
        self.bytes_sent += sent
        self.values_quantized += quantized[0]
        self.code_bits += quantized[1]

    def mean_bits(self) -> float | None:
        """Return the mean bits of a quantized value; None without quantized values."""
        return self.code_bits / self.values_quantized if self.values_quantized else None


@dataclass(slots=True)
class LinkStats:
    """One endpoint of one link since it was opened; both endpoints count the same.

    Attributes:
        forward: Activations.
        backward: Their gradients.
        evaluation: Activations of evaluations.
        full_samples: Samples sent without reference to a cached activation.
        delta_samples: Samples sent as a change of a cached activation, or of cluster centers.
        unstored_samples: First visits, among `full_samples`, that no endpoint stores because a disk refused writes.
        full_gradients: Samples whose gradient was sent without reference to an earlier one; 0 without gradient deltas.
        delta_gradients: Samples whose gradient was sent as a change of the last one.
        drift_checks: Comparisons of both endpoints' cached activations.
        drift_check_bytes: Bytes sent by this endpoint for them.
        drifts: Comparisons with differences.
        drift_samples: Samples that differed.
        wait_seconds: Time that this endpoint waited for packets in training.
        error_sum: Sum of ‖a − m‖ / ‖a‖ over the sampled forward packets, those of the first micro-batch of each step;
            known to the sender only.
        error_count: Number of sampled packets.
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
        """Count a packet's samples, those sent as deltas, and those that this endpoint stores."""
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
        bytes_raw: Bytes that a ring all-reduce of n ranks sends from this rank, 2 (n − 1) / n of the gradients' bytes.
        bytes_sent: Bytes sent.
        wait_seconds: Time in the reduction, including the wait for other ranks.

    For `WEIGHTS` both are (n − 1) / n of the weights' bytes, and the time is that of `Seconds.update`.
    """

    calls: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0

    def add(self, raw: int, sent: int, ranks: int, seconds: float) -> None:
        """Count one reduction of `raw` bytes over `ranks` ranks, sent as `sent` bytes."""
        self.calls += 1
        self.bytes_raw += ring_bytes(raw, ranks)
        self.bytes_sent += ring_bytes(sent, ranks)
        self.wait_seconds += seconds


@dataclass(slots=True)
class Seconds:
    """This rank's training time by part, in seconds, summed over the steps so far.

    Note:
        Times are of the host's clock. On a GPU, `forward`, `backward` and `update` are the times to launch kernels; the
        remaining time of the kernels is counted where their results are waited for, such as `encode` or `reduce`.

    Attributes:
        forward: Forward of the model.
        backward: Backward of the model.
        encode: Quantization, message store and checksums of sent packets.
        decode: The same for received packets.
        wait: For packets.
        reduce: Gradients of tied weights and of data-parallel groups, including the wait for other ranks.
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
        """Add the time of the body to `name`."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)


def ring_bytes(size: int, n: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of `size` bytes over n ranks."""
    return 2 * size * (n - 1) // n


def code_bits(ranks: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return, by link, the bits and number of all quantized values: forward, then backward. ranks: as `Traffic.of`."""
    ends = {(rank["replica"], name): link for rank in ranks for name, link in rank["links"].items()}
    result: dict[str, list[int]] = {}
    for (_, name), link in sorted(ends.items()):
        now = [link[way][key] for way in DIRECTIONS[:2] for key in ("code_bits", "values_quantized")]
        result[name] = [a + b for a, b in zip(result.get(name, [0] * 4), now, strict=True)]
    return result


class BitsMeter:
    """Mean bits of a quantized value over all links, since the previous call."""

    def __init__(self) -> None:
        self._before = [0] * 4

    def since_last(self, ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Return "forward_bits" and "backward_bits", if anything was quantized. ranks: as `Traffic.of`."""
        now = [sum(counts) for counts in zip(*code_bits(ranks).values(), strict=True)] or [0] * 4
        spent = [a - b for a, b in zip(now, self._before, strict=True)]
        self._before = now
        ways = zip(DIRECTIONS[:2], spent[::2], spent[1::2], strict=True)
        return {f"{way}_bits": bits / values for way, bits, values in ways if values}


def counted_since(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the difference of two `comm_stats` of a rank; means over a longer time are None."""
    out: dict[str, Any] = {}
    for key, value in now.items():
        before = then.get(key)
        if key in _NOT_CUMULATIVE or before is None:
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
        groups: By name, `bytes_raw` and `bytes_sent` of the reductions of a group of ranks, and of the gathered
            `WEIGHTS`.
    """

    links: dict[str, dict[str, int]]
    groups: dict[str, dict[str, int]]

    @classmethod
    def of(cls, ranks: Iterable[Mapping[str, Any]]) -> Traffic:
        """Sum `engine.gather_comm_stats()`. Both endpoints of a link count the same packets, so one is used."""
        links: dict[str, Counter[str]] = defaultdict(Counter)
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        counted: set[tuple[int, str]] = set()
        kinds = ("bytes_raw", "bytes_sent")
        for rank in ranks:
            for name, link in rank["links"].items():
                if (rank["replica"], name) not in counted:
                    counted.add((rank["replica"], name))
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
