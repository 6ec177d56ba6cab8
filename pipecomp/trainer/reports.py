"""What a training log says: the mean loss, compression, waiting and message stores, all since the last log."""

from __future__ import annotations

from typing import Any

from pipecomp.stats import WEIGHTS, BitsMeter, Traffic

_TRAINING = ("forward", "backward")


class LossMeter:
    """Losses of optimizer steps, from step number `step` on.

    Attributes:
        sum: Of the losses since the last log.
        last_logged: The step of that log.
    """

    def __init__(self, step: int) -> None:
        self.sum, self.last_logged, self._logged = 0.0, step, 0.0

    def log(self, step: int) -> float:
        """Give the mean since the last log; this one is at `step`."""
        mean = self.sum / (step - self.last_logged)
        self._logged += self.sum
        self.sum, self.last_logged = 0.0, step
        return mean

    def total(self) -> float:
        """Sum all losses."""
        return self._logged + self.sum


class TrafficMeter:
    """Differences between what the engine's counters say from one log to the next."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._bits = BitsMeter()

    def since_last(self, ranks: list[dict[str, Any]]) -> dict[str, float]:
        """Return log values of what happened since the last call.

        Args:
            ranks: `engine.comm_stats()` of all ranks.

        Returns:
            Values by name; one that has nothing to tell is left out.
            link_compression: bytes of activations and their gradients in the training dtype, by the bytes sent.
            link_wait_seconds: how long a rank waited for packets, the mean over ranks.
            forward_bits, backward_bits: bits of a quantized value, on average, each way.
            store_hit_rate: the share of samples that crossed a link as a change of a cached activation.
            grad_compression: the same as link_compression, for gradients between replicas and of tied weights.
        """
        now = _totals(ranks)
        change = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
        self._before = now
        out: dict[str, float] = {}
        if change["sent"]:
            out["link_compression"] = change["raw"] / change["sent"]
            out["link_wait_seconds"] = change["wait"] / len(ranks)
        out |= self._bits.since_last(ranks)
        if change["full"] or change["delta"]:
            out["store_hit_rate"] = change["delta"] / (change["full"] + change["delta"])
        if change["group_sent"] and change["group_sent"] != change["group_raw"]:
            out["grad_compression"] = change["group_raw"] / change["group_sent"]
        return out


def _totals(ranks: list[dict[str, Any]]) -> dict[str, float]:
    traffic = Traffic.of(ranks)
    groups = [counts for name, counts in traffic.groups.items() if name != WEIGHTS]
    ends = {(rank["replica"], name): link for rank in ranks for name, link in rank["links"].items()}
    return {
        "raw": float(sum(link[f"{d}_bytes_raw"] for link in traffic.links.values() for d in _TRAINING)),
        "sent": float(sum(link[f"{d}_bytes_sent"] for link in traffic.links.values() for d in _TRAINING)),
        "group_raw": float(sum(group["bytes_raw"] for group in groups)),
        "group_sent": float(sum(group["bytes_sent"] for group in groups)),
        "wait": sum(link["wait_seconds"] for rank in ranks for link in rank["links"].values()),
        "full": float(sum(link["full_samples"] for link in ends.values())),
        "delta": float(sum(link["delta_samples"] for link in ends.values())),
    }
