"""Meters and records of a training: mean loss, traffic since the last log, and the folder for `pipecomp report`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.distributed.collectives import broadcast
from pipecomp.interfaces import TrainingEngine
from pipecomp.report.page import try_write_report
from pipecomp.report.progress import LinkMeter
from pipecomp.report.recorder import Recorder
from pipecomp.stats import WEIGHTS, BitsMeter, Traffic, counted_since

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


_log = logging.getLogger(__name__)


class TrainingRecorder:
    """Write what happens in a training.

    Args:
        trainer: The `PipelineTrainer`, in the state in which training begins.
        steps: At which step training ends.
        before: All ranks' `comm_stats` so far.
    """

    def __init__(self, trainer: Any, steps: int, before: Sequence[Mapping[str, Any]]) -> None:
        args, state = trainer.args, trainer.state
        self._recorder = Recorder(args.output_dir if trainer.rank == 0 else None, after=state.global_step)
        facts = {**trainer.engine.describe(), "micro_batches": args.gradient_accumulation_steps}
        self._recorder.start(steps, kind="trainer", unit="samples", **facts)
        self._step: dict[str, Any] | None = None  # not written yet: a log may add the ranks' counters
        self._began = 0.0
        self._meter, self._group = LinkMeter(), trainer.group
        self._meter.since_last(before)
        self._before, self._first_step = {rank["rank"]: rank for rank in before}, state.global_step

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._began = time.perf_counter()

    def end_step(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """Tell of a step that has ended. step: from 1."""
        self._flush()
        spent = time.perf_counter() - self._began
        self._meter.spent += spent
        told = {"loss": loss, "lr": lr, "step_s": spent, "per_s": samples / spent}
        self._step = {"step": step, "seconds": self._recorder.seconds(), **told}  # it may be written after the next one

    def counters(self, stats: Sequence[Mapping[str, Any]]) -> None:
        """Add all ranks' `comm_stats` to the step that has just ended."""
        self._flush(stats)

    def rates(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return what a log says of the links since the last one: MB a second each way, and the longest wait's share.

        They are rank 0's, whose clock they are by, on every rank.
        """
        found = self._meter.since_last(stats)
        names = ("forward_mb_per_s", "backward_mb_per_s", "slowest_wait")
        told: dict[str, float] = broadcast(
            {f"link_{name}": found[name] for name in names if name in found}, group=self._group
        )
        return told

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell what `evaluate` returned after this step, whose counters are there already."""
        if "eval_loss" in metrics:
            self._recorder.evaluated(step, {"loss": metrics["eval_loss"]})

    def interrupted(self) -> None:
        """Write that the training was asked to stop, and may go on."""
        self._flush()
        self._recorder.interrupted()

    def end(self, engine: TrainingEngine, stats: Sequence[Mapping[str, Any]], *, page: bool) -> None:
        """Write the end of the training, and its page; every rank must call this."""
        last_step = engine.gather_last_step()
        self._flush(stats)
        self._recorder.end(self._counted(stats), last_step)
        if page and self._recorder.folder is not None:
            _log.info("report: %s", try_write_report([self._recorder.folder]))

    def _flush(self, stats: Sequence[Mapping[str, Any]] | None = None) -> None:
        if self._step is not None:
            self._recorder.step(stats=None if stats is None else self._counted(stats), **self._step)
            self._step = None

    def _counted(self, stats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What ranks have counted in this training: the engine may have trained before."""
        counted = [counted_since(self._before[rank["rank"]], rank) for rank in stats]
        return [{**rank, "steps": self._first_step + rank["steps"]} for rank in counted]
