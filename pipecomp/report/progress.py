"""Progress figures of a running training: bytes per second, compression, the longest wait at a link, the time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.report.recorder import waits
from pipecomp.stats import BitsMeter, Traffic
from pipecomp.utils.units import format_duration, format_ratio, format_share, format_size

_WAYS = ("forward", "backward")
_PACE = 50  # steps by whose pace the time left is estimated


class LinkMeter:
    """Figures of all links since the previous call.

    Attributes:
        spent: Seconds of training steps since the previous figures; the training loop adds each step's.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._bytes = dict.fromkeys((*_WAYS, "raw"), 0)
        self._waits: dict[str, float] = {}
        self._bits = BitsMeter()

    def since_last(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return figures by name; empty without traffic.

        Args:
            stats: `engine.gather_comm_stats()`.

        Returns:
            "forward_mb_per_s", "backward_mb_per_s": megabytes sent per second of training steps, without evaluations.
            "compression": bytes in the training dtype over bytes sent. "forward_bits", "backward_bits": mean bits of a
            quantized value, if any. "slowest_link", "slowest_wait": the link whose stage waited longest for packets,
            and its share of these seconds.
        """
        spent, self.spent = self.spent, 0.0
        links = Traffic.of(stats).links.values()
        counted = {way: sum(link[f"{way}_bytes_sent"] for link in links) for way in _WAYS}
        counted["raw"] = sum(link[f"{way}_bytes_raw"] for link in links for way in _WAYS)
        moved = {key: count - self._bytes[key] for key, count in counted.items()}
        waited = waits(stats)
        since = {name: seconds - self._waits.get(name, 0.0) for name, seconds in waited.items()}
        bits = self._bits.since_last(stats)
        self._bytes, self._waits = counted, waited
        sent = moved["forward"] + moved["backward"]
        if not sent or spent <= 0:
            return {}
        slowest = max(since, key=lambda name: since[name])
        return {
            **{f"{way}_mb_per_s": moved[way] / spent / 1e6 for way in _WAYS},
            "compression": moved["raw"] / sent,
            **bits,
            "slowest_link": slowest,
            "slowest_wait": min(1.0, since[slowest] / spent),
        }


class RemainingTime:
    """Estimate of the time left, by the pace of the last steps with the evaluations between them.

    Args:
        steps: Steps of the whole training.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=_PACE + 1)

    def after(self, step: int, now: float) -> float | None:
        """Count a step that ended at `now` seconds; return the seconds left, None after the first step of a run."""
        self._ends.append((step, now))
        first, began = self._ends[0]
        return None if step == first else (self._steps - step) * (now - began) / (step - first)


def format_left(seconds: float | None) -> str:
    """Format the time left for a log line; empty if it is unknown or over."""
    return f"{format_duration(seconds)} left" if seconds else ""


def format_progress(figures: Mapping[str, Any]) -> str:
    """Format the figures of `since_last` for a log line; empty without traffic."""
    if not figures:
        return ""
    forward, back = (format_size(1e6 * figures[f"{way}_mb_per_s"]) for way in _WAYS)
    waited = f"link {figures['slowest_link']} waits {format_share(figures['slowest_wait'])}"
    less = "" if figures["compression"] < 1.02 else f"  {format_ratio(figures['compression'])} less"
    return f"{forward}/s forward  {back}/s back{less}  {waited}"
