"""A recipe's output: JSON lines, TensorBoard curves and terminal output, all written by one rank."""

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
from pipecomp.distributed.preemption import GO_ON_WITHOUT, NEW_CUT
from pipecomp.recipes.written import Curves, Lines, WrittenOutput
from pipecomp.report.progress import LinkMeter, RemainingTime, format_left, format_progress
from pipecomp.stats import DIRECTIONS, WEIGHTS, BitsMeter, Traffic
from pipecomp.utils.units import format_count, format_size

PLAIN_EVERY_S = 10.0
LINKS_EVERY_S = 2.0  # in a terminal


class Report:
    """The report of a run, a context manager. Files are opened before training to find write errors early.

    Args:
        metrics: A file for JSON lines, overwritten.
        tensorboard: A folder.
        silent: Write nothing, on all ranks but one.
        unit: The unit of speed.
        period: The interval of evaluations.
        after: The step that this run resumes from: lines of `metrics` up to there are kept, and their losses and bytes
            are added.
        kept: Lines of the run's folder, used if `metrics` has none.

    Raises:
        ConfigError: If a file cannot be written.
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
        self._continue_after(kept)
        if tensorboard is not None:
            self._board = Curves(tensorboard, after)

    def _continue_after(self, records: Sequence[dict[str, Any]]) -> None:
        """Continue the losses and bytes of an earlier run's lines."""
        for record in records:
            if "links" in record:  # in a run's folder, evaluations may have no links, and rounds are called epochs
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
        """Print the run's settings and start the progress bar."""
        self._steps, self._began = plan.steps, time.perf_counter()
        self._epoch_began = self._last_line = self._began
        self._meter, self._remaining = LinkMeter(), RemainingTime(plan.steps)
        batch = plan.micro_batch * plan.accumulation * plan.replicas
        parts = f"{format_count(stages, 'stage')}, {format_count(plan.replicas, 'replica')} of the pipeline"
        self._print(f"model     {args.model}: {parts}")
        self._print(f"data      {samples:,} training samples, {held_out:,} held out")
        self._print(
            f"training  {format_count(plan.steps, 'step')} of {batch} samples, {plan.micro_batch} to a micro-batch"
        )
        if stages > 1:
            self._print(f"links     {_describe_links(settings)}")
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
            loss: The step's mean loss.
            lr: The step's learning rate.
            per_s: Tokens or images per second.
            traffic: Traffic since the start of the run.
            step_s: Seconds of the step, for the links' rates.
            stats: `engine.gather_comm_stats()`, for the links' rates and, if values are quantized, the mean bits
                "forward_bits" and "backward_bits".
        """
        self._meter.spent += step_s
        left = self._remaining.after(step, time.perf_counter())
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
            parts = [
                f"step {step:{width}}/{self._steps}  {self._period} {epoch}  loss {loss:.4f}  lr {lr:.2e}",
                f"{per_s:,.0f} {self._unit}/s",
                format_progress(self._meter.since_last(stats)),
                format_left(left),
            ]
            self._print("  ".join(part for part in parts if part))

    def epoch(self, step: int, epoch: int, measures: dict[str, float] | None, traffic: Traffic) -> None:
        """Report the end of an epoch or round.

        Args:
            step: The last step.
            epoch: From 1.
            measures: Results of the evaluation, None without held-out data.
            traffic: Traffic since the start of the run.
        """
        traffic = self._before.plus(traffic)
        seconds, self._epoch_began = time.perf_counter() - self._epoch_began, time.perf_counter()
        losses, self._epoch_losses = self._epoch_losses, []
        parts, mean = [], {}
        if losses:  # none if a run resumes at the end of an epoch without --metrics
            mean = {"train_loss": sum(losses) / len(losses)}
            parts.append(f"mean training loss {mean['train_loss']:.4f}")
        if measures is not None:
            record = {"step": step, self._period: epoch, "eval": measures, **mean}
            self._write({**record, "links": traffic.links, "groups": traffic.groups})
            self._curves(step, "eval", measures)
            others = ", ".join(f"{name} {value:.4g}" for name, value in measures.items() if name != "loss")
            parts.append(f"held-out loss {measures['loss']:.4f}" + (f" ({others})" if others else ""))
        line = f"{self._period} {epoch} done in {seconds:.0f} s"
        self._print(f"{line}: {', '.join(parts)}" if parts else line)

    def end(self, traffic: Traffic, saved: str | None, page: str | None = None) -> None:
        """Print the links' traffic and where the results are.

        Args:
            traffic: Traffic since the start of the run.
            saved: The model's folder, None if it was not saved.
            page: File of the run's page or the reason why there is none; None with --no-report.
        """
        self._stop_progress()
        traffic = self._before.plus(traffic)
        for name, counts in traffic.links.items():
            parts = [
                _saving(direction, counts[f"{direction}_bytes_raw"], counts[f"{direction}_bytes_sent"])
                for direction in DIRECTIONS
                if counts[f"{direction}_bytes_raw"]
            ]
            if parts:  # none if a run resumes after its last step
                self._print(f"link {name}: " + "; ".join(parts))
        for name, counts in traffic.groups.items():
            title, verb = (name, "gathered") if name == WEIGHTS else (f"gradients, {name}", "reduced")
            self._print(f"{title}: {_saving(verb, counts['bytes_raw'], counts['bytes_sent'])}")
        if page is not None:
            self._print(f"report    {page}")
        self._print(
            f"done in {time.perf_counter() - self._began:.0f} s" + (f"; model saved in {saved}" if saved else "")
        )

    def interrupted(self, step: int, reason: str, *, saved: bool, resumes: bool) -> None:
        """Print that the run stops after this step, and how to resume.

        Args:
            step: The last step.
            reason: The reason.
            saved: A checkpoint has this step.
            resumes: The same command resumes; otherwise it needs --resume auto.
        """
        self._stop_progress()
        if reason.endswith((NEW_CUT, GO_ON_WITHOUT)):
            self._print(f"stopped   after step {step}: {reason}")
            return
        start = "there" if saved else "the previous checkpoint, if any, because this step could not be saved"
        option = "" if resumes else " with --resume auto"
        self._print(f"stopped   after step {step}: {reason}; the same command{option} resumes from {start}")

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_progress()
        for output in self._outputs():
            output.close()
        for message in self.take_errors():
            self._print(message)
        for output in self._outputs():
            missed = output.describe_missed()
            if missed is not None:
                self._print(missed)

    def take_errors(self) -> list[str]:
        """Return the write errors since the last call."""
        errors = (output.take_error() for output in self._outputs())
        return [error for error in errors if error is not None]

    def _outputs(self) -> list[WrittenOutput]:
        return [output for output in (self._metrics, self._board) if output is not None]

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning   {text}")

    def padded(self, refusal: str) -> None:
        """Print why samples are padded instead of packed."""
        self._print(f"padding   samples are padded, not packed: {refusal}")

    def resumed(self, words: str) -> None:
        """Print the checkpoint that this run resumes from, if any."""
        if words:
            self._print(f"resume    {words}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)
        sys.stdout.flush()

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(record)

    def _curves(self, step: int, group: str, values: Mapping[str, float]) -> None:
        if self._board is not None:
            self._board.add(step, group, values)


def _describe_links(settings: Config) -> str:
    activations, clusters = settings.activations, settings.store.clusters
    if activations.method not in Activations.QUANTIZED:
        return "not compressed" if activations.method == "none" else activations.method
    forward, backward = (bits_text(bits) for bits in (activations.forward_bits, activations.backward_bits))
    text = f"{activations.method}, {forward} bits forward, {backward} bits backward"
    if activations.backward_method == "delta":
        text += " as changes"
    if clusters is not None:
        text += f", from {clusters} cluster centers"
    elif activations.method == "aqsgd":
        visit = activations.first_visit
        text += ", first visit " + ("in full" if visit == "full" else f"{visit} bits")
    scales = activations.describe_scales()
    return f"{text}, {scales}" if scales else text


def _saving(name: str, raw: int, sent: int) -> str:
    if sent >= 0.98 * raw:  # headers make sent bytes slightly more than raw ones
        return f"{name} {format_size(sent)}, not compressed"
    return f"{name} {format_size(sent)} for {format_size(raw)}, {raw / sent:.1f} times less"
