"""Counters of links: plain numbers, kept where the traffic is, added up by whoever reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Direction:
    """One direction of one link, or its evaluation traffic.

    bytes_raw: the values in the training dtype, padding not counted. bytes_sent: whole messages, headers included.
    """

    messages: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0

    def add(self, raw: int, sent: int) -> None:
        """Count one message."""
        self.messages += 1
        self.bytes_raw += raw
        self.bytes_sent += sent


@dataclass(slots=True)
class LinkStats:
    """One end of one link since it was opened; both ends count alike.

    wait_seconds: how long this end waited for messages. relative_error: mean over the sampled forward messages (the
    first micro-batch of each step, known to the sender only) of ‖a − m‖ / ‖a‖. drift_checks: how often both ends
    compared their messages, with drift_check_bytes sent by this one; drifts: how often they differed, in drift_samples.
    unstored_samples: first visits, among `full_samples`, that no end keeps because a disk refused writes.
    """

    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=Direction)
    evaluation: Direction = field(default_factory=Direction)
    full_samples: int = 0
    delta_samples: int = 0
    unstored_samples: int = 0
    drift_checks: int = 0
    drift_check_bytes: int = 0
    drifts: int = 0
    drift_samples: int = 0
    wait_seconds: float = 0.0
    error_sum: float = 0.0
    error_count: int = 0

    def as_dict(self) -> dict:
        """For reports: nested numbers, with the mean error and the share of samples sent as deltas."""
        out = asdict(self)
        count, total = out.pop("error_count"), out.pop("error_sum")
        out["relative_error"] = total / count if count else None
        samples = self.full_samples + self.delta_samples
        out["store_hit_rate"] = self.delta_samples / samples if samples else None
        return out


@dataclass(slots=True)
class GroupStats:
    """Gradients of one group of ranks, summed over the steps so far, for this rank.

    bytes_raw: what a ring all-reduce of n ranks puts on this rank's link, 2 (n − 1) / n of the gradients' bytes.
    bytes_sent: what was put there.
    wait_seconds: time in the reduction, waiting for the other ranks included.
    """

    calls: int = 0
    bytes_raw: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0

    def add(self, raw: int, ranks: int, seconds: float) -> None:
        """Count one reduction of `raw` bytes over `ranks` ranks."""
        ring = 2 * raw * (ranks - 1) // ranks
        self.calls += 1
        self.bytes_raw += ring
        self.bytes_sent += ring
        self.wait_seconds += seconds

    def as_dict(self) -> dict:
        """For reports."""
        return asdict(self)


@dataclass(slots=True)
class Seconds:
    """Where this rank's training time went: seconds by part, summed over the steps so far.

    forward, backward: the model. encode, decode: quantizing, message store, checksums. wait: for messages. reduce:
    gradients of tied weights and of data-parallel groups, waiting for other ranks included. update: the optimizer.
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


def total_bytes(links: Iterable[dict], direction: str) -> tuple[int, int]:
    """(raw, sent) of one direction over several links' `as_dict`."""
    parts = [link[direction] for link in links]
    return sum(p["bytes_raw"] for p in parts), sum(p["bytes_sent"] for p in parts)
