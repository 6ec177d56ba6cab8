"""What a recipe tells: JSON lines, TensorBoard curves, and a terminal output for people. One rank does it all."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipecomp.config import Activations, Config
from pipecomp.config.activations import bits_text
from pipecomp.recipes.written import Curves, Lines, Written
from pipecomp.report.progress import LinkMeter, format_progress
from pipecomp.stats import DIRECTIONS, WEIGHTS, BitsMeter, Traffic
from pipecomp.utils.units import format_count, format_size

PLAIN_EVERY_S = 10.0
LINKS_EVERY_S = 2.0  # in a terminal


class Report:
    """The report of a run, opened before training so that a file that cannot be written is known at once.

    It is a context manager.

    Args:
        metrics: A file for JSON lines, overwritten.
        tensorboard: A folder.
        silent: Do nothing at all, on all ranks but one.
        unit: What speed counts.
        period: After what the model is evaluated.
        after: The step that an earlier run has reached and this one goes on from: the lines of `metrics` up to there
            stay, and their losses and bytes are added.
        kept: Where `metrics` has no such lines, those of the run's folder.

    Raises:
        ConfigError: If something cannot be written.
    """

    def __init__(
        self,
        metrics: str | None,
        tensorboard: str | None,
        *,
        silent: bool,
        unit: str = "tokens",
        period: str = "epoch",
        after: int = 0,
        kept: Sequence[dict[str, Any]] = (),
    ) -> None:
        if silent:
            metrics = tensorboard = None
        self._unit, self._period = unit, period
        self._console = Console(highlight=False, soft_wrap=True, quiet=silent, force_terminal=False if silent else None)
        self._progress: Progress | None = None
        self._epoch = 0
        self._epoch_losses: list[float] = []
        self._metrics: Lines | None = None
        self._board: Curves | None = None
        self._before = Traffic({}, {})
        self._bits = BitsMeter()
        if metrics is not None:
            self._metrics = Lines(metrics, after)
            kept = self._metrics.kept or kept
        self._take_up(kept)
        if tensorboard is not None:
            self._board = Curves(tensorboard, after)

    def _take_up(self, records: Sequence[dict[str, Any]]) -> None:
        """Go on after these lines of an earlier run."""
        for record in records:
            if "links" in record:  # in a run's folder an evaluation's line may have none, and a round is an epoch
                self._before = Traffic(record["links"], record["groups"])
            if "eval" not in record:
                self._count(record[self._period if self._period in record else "epoch"], record["loss"])

    def _count(self, epoch: int, loss: float | None) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_losses = epoch, []
        if loss is not None:
            self._epoch_losses.append(loss)

    def start(
        self, args: argparse.Namespace, plan: Any, settings: Config, stages: int, samples: int, held_out: int
    ) -> None:
        """Say what is about to happen."""
        self._steps, self._began = plan.steps, time.perf_counter()
        self._epoch_began = self._last_line = self._began
        self._meter = LinkMeter()
        batch = plan.micro_batch * plan.accumulation * plan.replicas
        parts = f"{format_count(stages, 'stage')}, {format_count(plan.replicas, 'replica')} of the pipeline"
        self._say(f"model     {args.model}: {parts}")
        self._say(f"data      {samples:,} training samples, {held_out:,} held out")
        self._say(
            f"training  {format_count(plan.steps, 'step')} of {batch} samples, {plan.micro_batch} to a micro-batch"
        )
        if stages > 1:
            self._say(f"links     {_in_words(settings)}")
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn(
                    f"{self._period} {{task.fields[epoch]}}  loss {{task.fields[loss]}}  {{task.fields[speed]}} "
                    f"{self._unit}/s  {{task.fields[links]}}"
                ),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=plan.steps, epoch=1, loss="-", speed="-", links="")
            self._progress.start()

    def step(
        self,
        step: int,
        epoch: int,
        *,
        loss: float,
        lr: float,
        per_s: float,
        traffic: Traffic,
        step_s: float = 0.0,
        stats: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Report one optimizer step.

        Args:
            step: From 1.
            epoch: From 1.
            loss: The step's mean.
            lr: The learning rate that it used.
            per_s: Tokens or images per second.
            traffic: Since the start of the run.
            step_s: Seconds of the step, for what the links do in that time.
            stats: `engine.gather_comm_stats()`, for the same: the step's line has "forward_bits" and
                "backward_bits", on average over its quantized values, where there are any.
        """
        self._meter.spent += step_s
        traffic = self._before.plus(traffic)
        self._count(epoch, loss)
        record = {"step": step, self._period: epoch, "loss": loss, "lr": lr, f"{self._unit}_per_s": round(per_s, 1)}
        bits = self._bits.since_last(stats)
        record |= {way: round(mean, 4) for way, mean in bits.items()}
        self._write({**record, "links": traffic.links, "groups": traffic.groups})
        self._curves(step, "train", {"loss": loss, "lr": lr, f"{self._unit}_per_s": per_s, **bits})
        for part in (traffic.links, traffic.groups):
            for name, counts in part.items():
                self._curves(step, f"traffic {name}", counts)
        if self._progress is not None:
            speed = f"{per_s:,.0f}"
            self._progress.update(self._task, completed=step, epoch=epoch, loss=f"{loss:.4f}", speed=speed)
            if time.perf_counter() - self._last_line >= LINKS_EVERY_S:
                self._last_line = time.perf_counter()
                self._progress.update(self._task, links=format_progress(self._meter.since_last(stats)))
        elif step in (1, self._steps) or time.perf_counter() - self._last_line >= PLAIN_EVERY_S:
            self._last_line = time.perf_counter()
            width = len(str(self._steps))
            self._say(
                f"step {step:{width}}/{self._steps}  {self._period} {epoch}  loss {loss:.4f}  lr {lr:.2e}  "
                f"{per_s:,.0f} {self._unit}/s  {format_progress(self._meter.since_last(stats))}".rstrip()
            )

    def epoch(self, step: int, epoch: int, measures: dict[str, float] | None, traffic: Traffic) -> None:
        """Report the end of an epoch or round.

        Args:
            step: The last one.
            epoch: From 1.
            measures: What evaluation found, None without held-out data.
            traffic: Since the start of the run.
        """
        traffic = self._before.plus(traffic)
        seconds, self._epoch_began = time.perf_counter() - self._epoch_began, time.perf_counter()
        losses, self._epoch_losses = self._epoch_losses, []
        told, mean = [], {}
        if losses:  # a run that goes on from the end of an epoch has its losses only in --metrics
            mean = {"train_loss": sum(losses) / len(losses)}
            told.append(f"mean training loss {mean['train_loss']:.4f}")
        if measures is not None:
            record = {"step": step, self._period: epoch, "eval": measures, **mean}
            self._write({**record, "links": traffic.links, "groups": traffic.groups})
            self._curves(step, "eval", measures)
            others = ", ".join(f"{name} {value:.4g}" for name, value in measures.items() if name != "loss")
            told.append(f"held-out loss {measures['loss']:.4f}" + (f" ({others})" if others else ""))
        line = f"{self._period} {epoch} done in {seconds:.0f} s"
        self._say(f"{line}: {', '.join(told)}" if told else line)

    def end(self, traffic: Traffic, saved: str | None, page: str | None = None) -> None:
        """Say what crossed the links, and where results are.

        Args:
            traffic: Since the start of the run.
            saved: The folder of the model, None if it was not saved.
            page: What became of the run's report, None if none was wanted.
        """
        self._stop_progress()
        traffic = self._before.plus(traffic)
        for name, counts in traffic.links.items():
            parts = [
                _saving(direction, counts[f"{direction}_bytes_raw"], counts[f"{direction}_bytes_sent"])
                for direction in DIRECTIONS
                if counts[f"{direction}_bytes_raw"]
            ]
            if parts:  # none where a run went on after its last step
                self._say(f"link {name}: " + "; ".join(parts))
        for name, counts in traffic.groups.items():
            what, how = (name, "gathered") if name == WEIGHTS else (f"gradients, {name}", "reduced")
            self._say(f"{what}: {_saving(how, counts['bytes_raw'], counts['bytes_sent'])}")
        if page is not None:
            self._say(f"report    {page}")
        self._say(f"done in {time.perf_counter() - self._began:.0f} s" + (f"; model saved in {saved}" if saved else ""))

    def interrupted(self, step: int, reason: str, *, saved: bool, resumes: bool) -> None:
        """Say that the run ends after this step, and from where it can go on.

        Args:
            step: The last one.
            reason: Why it ends.
            saved: Whether a checkpoint has this step.
            resumes: Whether the command resumes by itself, or only with another argument.
        """
        self._stop_progress()
        where = "there" if saved else "the checkpoint before, if any, as this step could not be saved"
        how = "" if resumes else " with --resume auto"
        self._say(f"stopped   after step {step}: {reason}; the same command{how} goes on from {where}")

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_progress()
        for written in self._written():
            written.close()
        for refused in self.take_refused():
            self._say(refused)

    def take_refused(self) -> list[str]:
        """Say once what could not be written."""
        found = (written.take_refused() for written in self._written())
        return [refused for refused in found if refused is not None]

    def _written(self) -> list[Written]:
        return [written for written in (self._metrics, self._board) if written is not None]

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def resumed(self, words: str) -> None:
        """Say what this run goes on from, if anything."""
        if words:
            self._say(f"resume    {words}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)
        sys.stdout.flush()

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(record)

    def _curves(self, step: int, group: str, values: Mapping[str, float]) -> None:
        if self._board is not None:
            self._board.add(step, group, values)


def _in_words(settings: Config) -> str:
    activations, clusters = settings.activations, settings.store.clusters
    if activations.method not in Activations.QUANTIZED:
        return "not compressed" if activations.method == "none" else activations.method
    forward, backward = (bits_text(bits) for bits in (activations.forward_bits, activations.backward_bits))
    words = f"{activations.method}, {forward} bits forward, {backward} bits backward"
    if activations.backward_method == "delta":
        words += " as changes"
    if clusters is not None:
        words += f", from {clusters} cluster centers"
    elif activations.method == "aqsgd":
        visit = activations.first_visit
        words += ", first visit " + ("in full" if visit == "full" else f"{visit} bits")
    return words


def _saving(what: str, raw: int, sent: int) -> str:
    if sent >= 0.98 * raw:  # headers make it a little more
        return f"{what} {format_size(sent)}, not compressed"
    return f"{what} {format_size(sent)} for {format_size(raw)}, {raw / sent:.1f} times less"
