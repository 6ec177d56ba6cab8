"""A training's mean loss, traffic since the last log, and metrics file for `pipecomp report`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.distributed.collectives import broadcast
from pipecomp.interfaces import TrainingEngine
from pipecomp.report.page import try_write_report
from pipecomp.report.progress import LinkMeter
from pipecomp.stats import WEIGHTS, BitsMeter, Traffic, counted_since

_TRAINING = ("forward", "backward")


class LossMeter:
    """The mean loss of optimizer steps between logs.

    Attributes:
        sum: Sum of the losses since the last log.
        last_logged: The step of that log.
    """

    def __init__(self, step: int) -> None:
        self.sum, self.last_logged, self._logged = 0.0, step, 0.0

    def log(self, step: int) -> float:
        """Return the mean loss since the last log and start a new interval at `step`."""
        mean = self.sum / (step - self.last_logged)
        self._logged += self.sum
        self.sum, self.last_logged = 0.0, step
        return mean

    def total(self) -> float:
        """Return the sum of all losses."""
        return self._logged + self.sum


class TrafficMeter:
    """Differences of the engine's counters between logs."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._bits = BitsMeter()

    def since_last(self, ranks: list[dict[str, Any]]) -> dict[str, float]:
        """Return log values for the interval since the last call.

        Args:
            ranks: `engine.comm_stats()` of all ranks.

        Returns:
            Values by name, without those that do not apply.
            link_compression: bytes of activations and their gradients in the training dtype, divided by bytes sent.
            link_wait_seconds: seconds that a rank waited for packets, mean over ranks.
            forward_bits, backward_bits: mean bits of a quantized value in each direction.
            store_hit_rate: fraction of samples sent as the change of a cached activation.
            grad_compression: like link_compression, for gradients between replicas and of tied weights.
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


_log = logging.getLogger(__name__)


class TrainingRecorder:
    """Record a training for `pipecomp report`.

    Args:
        trainer: The `PipelineTrainer` in its state before the first step.
        length: The length of the training.
        before: All ranks' `comm_stats` so far.
    """

    def __init__(self, trainer: Any, length: Any, before: Sequence[Mapping[str, Any]]) -> None:
        self._trainer, self._length, state = trainer, length, trainer.state
        self._recorder, facts = trainer._start_recorder()
        self._unit = facts["unit"]
        facts |= {**trainer.engine.describe(), "micro_batches": trainer.args.gradient_accumulation_steps}
        self._recorder.start(length.max_steps, **facts)
        self._step: dict[str, Any] | None = None  # written later, because a log may add the ranks' counters
        self._began, self._tokens, self._per_s = 0.0, 0, 0.0
        self._meter, self._group = LinkMeter(), trainer.group
        self._meter.since_last(before)
        self._before, self._first_step = {rank["rank"]: rank for rank in before}, state.global_step

    def begin_step(self) -> None:
        """Start the clock of an optimizer step."""
        self._began = time.perf_counter()

    def end_step(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """Record a completed step. step: from 1."""
        self._flush()
        spent = time.perf_counter() - self._began
        self._meter.spent += spent
        values = {"loss": loss, "lr": lr, "step_s": spent, "per_s": samples / spent}
        epoch = self._length.epoch(step - 1) + 1
        self._step = {"step": step, "seconds": self._recorder.seconds(), "epoch": epoch, **values}

    def counters(self, stats: Sequence[Mapping[str, Any]], tokens: int = 0) -> None:
        """Add all ranks' `comm_stats` to the last step. tokens: of all replicas so far, without padding."""
        taken, self._tokens = tokens - self._tokens, tokens
        if self._step is not None and self._unit == "tokens":  # counted in every step
            self._step["per_s"] = taken / self._step["step_s"]
        self._per_s = self._step["per_s"] if self._step is not None else 0.0
        self._flush(stats)

    def rates(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the links' rates since the last log: MB per second each way, and the longest wait's share of time.

        Every rank returns rank 0's values, which depend on its clock.
        """
        measured = self._meter.since_last(stats)
        names = ("forward_mb_per_s", "backward_mb_per_s", "slowest_wait")
        values: dict[str, float] = {f"link_{name}": measured[name] for name in names if name in measured}
        if self._unit != "samples":
            values[f"{self._unit}_per_second"] = self._per_s
        return broadcast(values, group=self._group)

    def evaluated(
        self, step: int, measures: Mapping[str, float], stats: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Record measures of an evaluation after this step, after `counters`. stats: to record its traffic, too."""
        self._recorder.evaluated(step, measures, None if stats is None else self._counted(stats))

    def interrupted(self) -> None:
        """Record that a signal stopped the training."""
        self._flush()
        self._recorder.interrupted()

    def end(self, engine: TrainingEngine, stats: Sequence[Mapping[str, Any]], *, page: bool) -> str | None:
        """Record the end of the training and write its page, if any. Every rank must call this.

        Returns:
            On rank 0 the page's file, or why there is none.
        """
        last_step = engine.gather_last_step()
        self._flush(stats)
        self._recorder.end(self._counted(stats), last_step)
        if not page or self._recorder.folder is None:
            return None
        written = try_write_report([self._recorder.folder])
        _log.info("report: %s", written)
        return written

    def _flush(self, stats: Sequence[Mapping[str, Any]] | None = None) -> None:
        if self._step is not None:
            counted = None if stats is None else self._counted(stats)
            self._recorder.step(stats=counted, **self._step)
            self._trainer._report_step(self._step, counted or [])
            self._step = None

    def _counted(self, stats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the ranks' counters of this training alone: the engine may have trained before."""
        counted = [counted_since(self._before[rank["rank"]], rank) for rank in stats]
        return [{**rank, "steps": self._first_step + rank["steps"]} for rank in counted]
