"""The training run that all recipes share, from checkpoint to saved model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from pipecomp.buffers.admin import forget
from pipecomp.config import Config
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.consistency import settings_of
from pipecomp.distributed.preemption import Interruption, say_here
from pipecomp.errors import OutputError
from pipecomp.interfaces import TrainingEngine
from pipecomp.recipes.report import Report
from pipecomp.recipes.resume import REPLICAS, SAMPLES, STAGES, RunCheckpoints, lock_folder
from pipecomp.recipes.steps import Plan, complete
from pipecomp.recipes.trackers import Trackers
from pipecomp.report.page import try_write_report
from pipecomp.report.progress import LinkMeter
from pipecomp.report.recorder import Recorder, counted, default_folder
from pipecomp.stats import Traffic


class Fit:
    """A run of a recipe. On every rank: construct it, compare its `facts`, then call `begin` and `run`.

    Args:
        args: The recipe's arguments.
        config: DeepSpeed's configuration as read; `self.config` is complete.
        plan: Number and size of steps.
        trained: From `resume.what_is_trained`.
        stages: Pipeline stages.
        unit: The unit of the report's speed.
        period: The interval of evaluations.

    Raises:
        ConfigError: If arguments have no effect, the configuration cannot be saved, or a folder cannot be written or
            is in use by another run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: dict[str, Any],
        plan: Plan,
        trained: Mapping[str, Any],
        *,
        stages: int,
        unit: str = "tokens",
        period: str = "epoch",
    ) -> None:
        self.args, self.plan, self.stages = args, plan, stages
        self.config = complete(config, plan, args.seed)
        self.settings = Config.from_dict(self.config.get("pipecomp", {}))
        self._compared = settings_of(self.config, "pipecomp", self.settings.shared())
        self._trained, self._unit, self._period = trained, unit, period
        step = plan.micro_batch * plan.accumulation * plan.replicas  # with another size, steps would cover other epochs
        counts = {SAMPLES: step, REPLICAS: plan.replicas, STAGES: stages}
        scheduler = config.get("scheduler", {}).get("params", {})
        auto = [f"scheduler.params.{key}" for key, value in scheduler.items() if value == "auto"]
        self._checkpoints = RunCheckpoints(args, self.config, self._compared, {**trained, **counts}, auto)
        for argument, folder in (("--checkpoint", args.checkpoint), ("--run", args.run)):
            if folder is not None and dist.get_rank() == 0:
                lock_folder(argument, folder)
        self._resumed_from = ""

    def facts(self) -> dict[str, Any]:
        """Return the JSON values by name that must be equal on all ranks."""
        args = self.args
        return {
            **self._compared,
            **self._trained,
            **{f"{name} of the run's plan": value for name, value in asdict(self.plan).items()},
            "--stages": self.stages,
            "--save": args.save is not None,
            "--checkpoint": args.checkpoint is not None,
            "--save-every": args.save_every,
            "--save-on-signal": args.save_on_signal,
            "--resume": args.resume,
        }

    def begin(self) -> None:
        """Find the checkpoint to resume from and open the report. A new run drops stored messages.

        Raises:
            ConfigError: If the checkpoint's run has other settings, or the report cannot be written.
        """
        args, rank = self.args, dist.get_rank()
        self._resumed_from = self._checkpoints.find()
        store, method = self.settings.store, self.settings.activations.method
        if method == "aqsgd" and store.backend == "lmdb" and not self._checkpoints.step:
            forget(store.path, rank)
        folder = args.run or default_folder(args.recipe)
        after = self._checkpoints.step
        self._recorder = Recorder(folder if rank == 0 else None, after=after, required=args.run is not None)
        names = args.report_to if rank == 0 else []
        self._trackers = Trackers(names, Path(folder), args.recipe)
        self._report = Report(
            args.metrics,
            args.tensorboard,
            silent=rank != 0,
            unit=self._unit,
            period=self._period,
            after=after,
            kept=self._recorder.kept,
        )

    def run(
        self,
        engine: TrainingEngine,
        *,
        samples: int,
        held_out: int,
        units: Callable[[], float],
        evaluate: Callable[[], dict[str, float] | None],
        save: Callable[[str], None],
    ) -> None:
        """Train to the last step, evaluate, report and save; then close the engine.

        After SIGTERM or Ctrl-C the run ends after the current step with a checkpoint, if there is a folder for it.

        Args:
            engine: The engine with its training data.
            samples: Number of training samples.
            held_out: Number of held-out samples.
            units: Returns the tokens or images of the last step on this rank's replica; called on all ranks, counted on
                first stages.
            evaluate: Returns the numbers of an `eval` line, None without held-out data.
            save: Writes the model to the folder of `--save`.

        Raises:
            Interrupted: SystemExit, on every rank, after such a signal.
        """
        args, plan, checkpoints = self.args, self.plan, self._checkpoints
        if args.trace:
            engine.start_trace()
        self._interruption = Interruption(active=checkpoints.on_signal)
        with self._interruption, self._report as report, self._trackers as trackers:
            report.start(args, plan, self.settings, self.stages, samples, held_out)
            report.resumed(self._resumed_from)
            report.resumed(checkpoints.load(engine))
            facts = {"recipe": args.recipe, "unit": self._unit, **engine.describe()}
            self._recorder.start(plan.steps, kind="recipe", **facts)
            trackers.begin(facts)
            self._meter = LinkMeter()
            if checkpoints.evaluation_due:
                self._epoch(engine, checkpoints.step, evaluate())
            for step in range(checkpoints.step + 1, plan.steps + 1):
                interrupted = self._step(engine, step, units)
                if interrupted and step < plan.steps:
                    self._stop(engine, step, interrupted)
                if plan.ends_epoch(step):
                    self._epoch(engine, step, evaluate())
                checkpoints.save(engine, step, ends_epoch=plan.ends_epoch(step), last=step == plan.steps)
            if args.save:
                save(args.save)
            if args.trace:
                try:
                    engine.save_trace(args.trace)
                except OutputError as error:
                    say_here(f"--trace: {error}")
            stats = self._exchange(engine)[0]
            self._recorder.end(stats, engine.gather_last_step())
            folder = self._recorder.folder if args.report else None
            report.end(Traffic.of(stats), args.save, None if folder is None else try_write_report([folder]))
        engine.close()

    def _step(self, engine: TrainingEngine, step: int, units: Callable[[], float]) -> str | None:
        """Take and report one optimizer step. Returns the reason if the run ends after it."""
        lr, began = float(engine.optimizer.param_groups[0]["lr"]), time.perf_counter()
        loss = float(engine.train_batch())
        if step == self.plan.steps:
            engine.average_replicas()
        step_s = time.perf_counter() - began
        own, epoch = units(), self.plan.epoch(step)
        stats, wanted, taken = self._exchange(engine, own if engine.is_first_stage() else 0.0)
        per_s = taken / step_s
        of_step = {"loss": loss, "lr": lr, "step_s": step_s, "per_s": per_s}
        self._recorder.step(step, stats, epoch=epoch, **of_step)
        self._report.step(step, epoch, **of_step, traffic=Traffic.of(stats), stats=stats)
        self._meter.spent += step_s
        values = {"loss": loss, "learning_rate": lr, f"{self._unit}_per_second": per_s}
        links = {f"link_{name}": v for name, v in self._meter.since_last(stats).items() if name != "slowest_link"}
        self._trackers.log(step, {**values, **links})
        return self._interruption.decide(wanted)

    def _exchange(self, engine: TrainingEngine, units: float = 0.0) -> tuple[list[dict[str, Any]], list[int], float]:
        """Gather all ranks' counters and stop requests, and sum their units. Every rank must call this.

        All ranks report the write errors of any rank.
        """
        with engine.propagate_failure():
            own = counted([engine.comm_stats()])[0]
            by_rank = gathered((own, self._interruption.wanted, units, self._report.take_errors()))
        for rank, (*_, errors) in enumerate(by_rank):
            for error in errors:
                say_here(f"rank {rank}: {error}. The run continues without it")
        stats, wanted, each, _ = zip(*by_rank, strict=True)
        return list(stats), list(wanted), sum(each)

    def _stop(self, engine: TrainingEngine, step: int, reason: str) -> NoReturn:
        """Save and close. All ranks call this together."""
        saved = self._checkpoints.save_now(engine, evaluation_due=self.plan.ends_epoch(step))
        self._recorder.interrupted()
        self._report.interrupted(step, reason, saved=saved, resumes=self.args.resume is not None)
        engine.close()
        raise self._interruption.leave(reason)

    def _epoch(self, engine: TrainingEngine, step: int, measures: dict[str, float] | None) -> None:
        """Report the end of an epoch or round. measures: of its evaluation, or None."""
        stats = engine.gather_comm_stats()
        if measures is not None:
            self._recorder.evaluated(step, measures, stats)
            self._trackers.log(step, {f"eval_{name}": value for name, value in measures.items()})
        self._report.epoch(step, self.plan.epoch(step), measures, Traffic.of(stats))
