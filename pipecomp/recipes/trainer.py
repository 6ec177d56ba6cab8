"""`RecipeTrainer`: a recipe's run on `PipelineTrainer`, from its arguments, model and data to the saved model."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from pipecomp.buffers.admin import forget
from pipecomp.config import Config
from pipecomp.data import ShardedSampler
from pipecomp.distributed import rendezvous
from pipecomp.distributed.consistency import settings_of
from pipecomp.distributed.launch_env import is_first_of_machine
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import ConfigError, OutputError, SplitError
from pipecomp.recipes.report import Report
from pipecomp.recipes.resume import (
    REPLICAS,
    SAMPLES,
    STAGES,
    RunCheckpoints,
    check_no_results,
    loaded_text,
    lock_folder,
    make_folder,
)
from pipecomp.recipes.run import Workload
from pipecomp.recipes.steps import Plan, check_config, complete, make_plan, read_config
from pipecomp.report.recorder import Recorder, default_folder
from pipecomp.stats import Traffic
from pipecomp.trainer import PipelineTrainer
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.checkpoints import ResumePoint, layout, read, remove_after
from pipecomp.trainer.data_loading import SampleSource
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.meters import TrainingRecorder
from pipecomp.trainer.training import TrainingLength


@dataclass(frozen=True, kw_only=True)
class RecipeSetup:
    """The settings of a recipe's run.

    Attributes:
        config: DeepSpeed's configuration, complete.
        settings: Its "pipecomp" section.
        plan: Number and size of steps.
        stages: Pipeline stages.
        compared: The configuration as JSON values by flat keys, which ranks and checkpoints compare.
        checkpoints: The run's checkpoints.
    """

    config: dict[str, Any]
    settings: Config
    plan: Plan
    stages: int
    compared: dict[str, Any]
    checkpoints: RunCheckpoints

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        config: Mapping[str, Any],
        plan: Plan,
        trained: Mapping[str, Any],
        stages: int,
    ) -> RecipeSetup:
        """Complete a configuration and lock the run's folders. Raises ConfigError.

        trained: from `resume.what_is_trained`.
        """
        scheduler = config.get("scheduler", {}).get("params", {})
        auto = [f"scheduler.params.{key}" for key, value in scheduler.items() if value == "auto"]
        whole = complete(dict(config), plan, args.seed)
        settings = Config.from_dict(whole.setdefault("pipecomp", {}))
        compared = settings_of(whole, "pipecomp", settings.shared())
        step = plan.micro_batch * plan.accumulation * plan.replicas  # with another size, steps would cover other epochs
        counts = {SAMPLES: step, REPLICAS: plan.replicas, STAGES: stages}
        checkpoints = RunCheckpoints(args, whole, compared, {**trained, **counts}, auto)
        for argument, folder in (("--checkpoint", args.checkpoint), ("--out", args.out)):
            if folder is not None and dist.get_rank() == 0:
                lock_folder(argument, folder)
        return cls(
            config=whole, settings=settings, plan=plan, stages=stages, compared=compared, checkpoints=checkpoints
        )


class RecipeTrainer(PipelineTrainer):
    """A run of a recipe. Every rank constructs it and calls `run`.

    It trains with the optimizer and schedule of the recipe's DeepSpeed configuration, in steps of equal size that may
    extend from one epoch into the next, and writes the console's lines, --metrics and --tensorboard in every step.

    Args:
        args: From a parser of `run.arguments`.
        work: The recipe's model and data.

    Raises:
        ConfigError: If arguments have no effect, the configuration cannot be saved, a folder cannot be written or is in
            use by another run, or the checkpoint to resume from has other settings.
        PipecompError: On every rank, if ranks have different arguments or data.
    """

    uses_deepspeed_optimizer = True

    def __init__(self, args: argparse.Namespace, work: Workload) -> None:
        self._recipe, self._work, self._wrote = args, work, False
        ranks = rendezvous.all_ranks()
        with ranks.collective_errors():
            self._run = self._set_up()
        ranks.assert_same_on_all_ranks(self._compared_values())
        with ranks.collective_errors():
            self._begin()
        plan = self._run.plan
        with _unchanged_process():
            training_args = self._training_arguments()
        super().__init__(
            work.model,
            training_args,
            work.collate,
            work.training,
            work.held_out,
            compute_metrics=work.compute_metrics,
            callbacks=[_StepControl(lambda: self._run, evaluates=work.held_out is not None)],
            optimizers=(None, work.lr_scheduler if work.schedule is None else partial(work.schedule, plan.steps)),
            pipecomp=self._run.config,
            num_stages=None if work.cuts is not None else self._run.stages,
            cuts=work.cuts,
            report=args.report,
            save_on_signal=self._run.checkpoints.on_signal,
        )
        self.remove_callback(PrinterCallback)

    def _set_up(self) -> RecipeSetup:
        args, work, world = self._recipe, self._work, dist.get_world_size()
        stages = (len(work.cuts) - 1 if work.cuts is not None else args.stages) or world
        rendezvous.check_processes("--stages", stages)
        config = read_config(args.deepspeed_config) if work.config is None else check_config(work.config)
        plan = work.plan
        if plan is None:
            sizes: dict[str, int] = {"samples": len(work.training), "replicas": world // stages}
            plan = make_plan(config, **sizes, epochs=args.epochs, max_steps=args.max_steps)
        return RecipeSetup.of(args, config, plan, work.trained, stages)

    def _compared_values(self) -> dict[str, Any]:
        """Return the JSON values by name that must be equal on all ranks."""
        args = self._recipe
        return {
            **self._run.compared,
            **self._work.trained,
            **{f"{name} of the run's plan": value for name, value in asdict(self._run.plan).items()},
            "--stages": self._run.stages,
            "--save": args.save is not None,
            "--checkpoint": args.checkpoint is not None,
            "--save-every": args.save_every,
            "--save-on-signal": args.save_on_signal,
            "--resume": args.resume,
            "--overwrite": args.overwrite,
            "held-out data": self._work.held_out is not None,
        }

    def _begin(self) -> None:
        """Find the checkpoint to resume from, and open the outputs. A new run drops stored messages."""
        args, rank = self._recipe, dist.get_rank()
        self._found = self._run.checkpoints.find()
        if rank == 0 and not args.overwrite and self._run.checkpoints.found is None:
            check_no_results(args.out, args.save)
        if args.overwrite and self._run.checkpoints.folder is not None:
            remove_after(str(self._run.checkpoints.folder), 0, None)
        after, store = self._run.checkpoints.step, self._run.settings.store
        if self._run.settings.activations.method == "aqsgd" and store.backend == "lmdb" and not after:
            forget(store.path, rank)
        self._folder = args.out or default_folder(args.recipe)
        self._recorder = Recorder(self._folder if rank == 0 else None, after=after, required=args.out is not None)
        _check_trackers(args.report_to if rank == 0 else [])
        self._console = Report(
            args.metrics if rank == 0 else None,
            args.tensorboard if rank == 0 else None,
            silent=not is_first_of_machine(os.environ),
            unit=self._work.unit,
            period=self._work.period,
            after=after,
            kept=self._recorder.kept,
        )
        if args.save and (rank == 0 or self._work.save_parts):
            make_folder("--save", args.save)

    def _training_arguments(self) -> TrainingArguments:
        args, plan = self._recipe, self._run.plan
        made = TrainingArguments(
            output_dir=str(self._folder),
            run_name=args.recipe,
            report_to=args.report_to if dist.get_rank() == 0 and args.report_to else "none",
            per_device_train_batch_size=plan.micro_batch,
            per_device_eval_batch_size=plan.micro_batch,
            gradient_accumulation_steps=plan.accumulation,
            max_steps=plan.steps,
            learning_rate=float(self._run.config.get("optimizer", {}).get("params", {}).get("lr", 0.0)),
            seed=args.seed or 0,
            data_seed=self._run.settings.seed,
            remove_unused_columns=False,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",  # `_StepControl` decides
            save_total_limit=self._run.checkpoints.keep,
            disable_tqdm=True,
            use_cpu=True,
        )
        made.use_cpu = False  # no device for accelerate; the engine chooses its own
        return made

    def run(self) -> None:
        """Train to the last step, evaluate, report and save; then close the engine.

        After SIGTERM or Ctrl-C the run ends after the current step with a checkpoint, if there is a folder for it.

        Raises:
            Interrupted: SystemExit, on every rank, after such a signal.
        """
        args, work = self._recipe, self._work
        engine = self.engine
        if args.trace:
            engine.start_trace()
        with self._console as console:
            held_out = 0 if work.held_out is None else len(work.held_out)
            samples = len(work.training) if work.training_samples is None else work.training_samples
            console.start(args, self._run.plan, self._run.settings, self._run.stages, samples, held_out)
            console.resumed(self._found)
            self._pad_if_packing_is_refused()
            self._warn_of_idle_steps()
            self.train()
        self.end()

    def _pad_if_packing_is_refused(self) -> None:
        """Pad samples if a stage of the model refuses packing that nobody asked for."""
        if self._work.padding is None:
            return
        refusal = None
        try:
            self.engine.stage.check_packing()
        except SplitError as error:
            refusal = str(error)
        refusal = next(filter(None, rendezvous.all_ranks().all_gather_object(refusal)), None)
        if refusal is not None:
            self.data_collator = self._work.padding
            self._console.padded(refusal.removeprefix("packing: "))

    def _warn_of_idle_steps(self) -> None:
        """Warn if training would change no weight."""
        kind = self._run.config.get("scheduler", {}).get("type", "")
        if kind.startswith("Warmup") and self._run.plan.steps <= _IDLE_STEPS:
            text = f"no weight will change: the first {_IDLE_STEPS} steps of {kind} have the rate 0, and the run has no"
            self._console.warn(f"{text} more. Use more data or epochs, a smaller batch, or no scheduler")
        if not any(self.plan.trained):
            self._console.warn("no weight will change: the model has none that is trained")

    # -- what a recipe replaces

    def _make_loss(self, model: Any, own: Callable[..., Any] | None) -> StepLoss:
        return super()._make_loss(model, own) if self._work.loss is None else StepLoss.of_function(self._work.loss)

    def _make_sampler(self, samples: SampleSource, replica: int) -> ShardedSampler:
        if self._work.sampler is not None:
            return self._work.sampler
        plan = self._run.plan
        return ShardedSampler(
            len(samples.data),
            plan.micro_batch,
            replicas=self.replicas,
            replica=replica,
            seed=self._run.settings.seed,
            accumulation=plan.accumulation,
        )

    def _training_length(self, per_epoch: int) -> TrainingLength:
        return TrainingLength.of(self.args, per_epoch, spanning=True)

    def _length_from(self, length: TrainingLength, step: int, number: int) -> TrainingLength:
        self._run = replace(self._run, plan=replace(self._run.plan, begin=(step, number)))
        return super()._length_from(length, step, number)

    def _facts(self, samples: SampleSource, micro_batch: int, name: str) -> dict[str, Any]:
        return {} if self._work.is_compared else super()._facts(samples, micro_batch, name)

    def _prepare_training(self, resume: str | os.PathLike | bool | None) -> ResumePoint | None:
        self._holder.prepare_training(self.args, resumes=False, clear_stores=False)
        found = self._run.checkpoints.found
        return None if found is None else read(found, layout(self.plan, self.replicas), self.group)

    def _load_checkpoint(self, resume_point: ResumePoint) -> ResumePoint:
        resume_point = super()._load_checkpoint(resume_point)
        self._console.resumed(loaded_text(self.engine.resumed))
        return resume_point

    def _write_checkpoint(self, *, count: Callable[[], Any], due: Sequence[str]) -> bool:
        checkpoints = self._run.checkpoints
        if checkpoints.folder is None:
            return True
        if not self._wrote:  # an earlier run's checkpoints of later steps would count as this run's last ones
            remove_after(str(checkpoints.folder), checkpoints.step, self.group)
            self._wrote = True
        return super()._write_checkpoint(count=count, due=due)

    def _checkpoint_folder(self) -> str:
        return str(self._run.checkpoints.folder)

    def _write_model(self, folder: str) -> None:
        """Write no model: --save does at the end."""

    def _run_settings(self) -> dict[str, Any]:
        return self._run.checkpoints.record()

    def _start_recorder(self) -> tuple[Recorder, dict[str, Any]]:
        return self._recorder, {"kind": "recipe", "recipe": self._recipe.recipe, "unit": self._work.unit}

    def _derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self._work.derived(metrics["eval_loss"]).items()}

    def _record_evaluation(self, recording: TrainingRecorder, metrics: dict[str, float]) -> None:
        step, measures = self.state.global_step, {name: metrics[f"eval_{name}"] for name in self._work.measures}
        stats = self.engine.gather_comm_stats()
        recording.evaluated(step, measures, stats)
        self._console.epoch(step, self._run.plan.epoch(step), measures, Traffic.of(stats))

    def _report_step(self, record: Mapping[str, Any], stats: Sequence[Mapping[str, Any]]) -> None:
        values = {name: record[name] for name in ("step", "epoch", "loss", "lr", "per_s", "step_s")}
        traffic = Traffic.of(stats)
        self._console.step(**values, traffic=traffic, stats=stats)
        if self._work.on_step is not None and stats:
            self._work.on_step(stats)
        if self._work.held_out is None and self._run.plan.ends_epoch(record["step"]):
            self._console.epoch(record["step"], record["epoch"], None, traffic)

    def _take_errors(self) -> list[str]:
        return self._console.take_errors()

    def _report_interruption(self, reason: str, *, saved: bool) -> None:
        fire(self, "on_train_end")  # trackers close
        resumes = self._recipe.resume is not None
        self._console.interrupted(self.state.global_step, reason, saved=saved, resumes=resumes)

    def _save_results(self) -> None:
        args, engine = self._recipe, self.engine
        if args.save:
            self._work.save(engine, args.save)
        if args.trace:
            try:
                engine.save_trace(args.trace)
            except OutputError as error:
                say_here(f"--trace: {error}")

    def _report_end(self, page: str | None, stats: Sequence[Mapping[str, Any]]) -> None:
        self._console.end(Traffic.of(stats), self._recipe.save, page)


_IDLE_STEPS = 2  # of DeepSpeed's warm-up, with a minimum of 0


class _StepControl(TrainerCallback):
    """Log every step, evaluate at the end of every epoch, and save when a checkpoint is due."""

    def __init__(self, run: Callable[[], RecipeSetup], *, evaluates: bool) -> None:
        """run: returns the trainer's settings, whose plan changes if a checkpoint has other steps."""
        self._run, self._evaluates = run, evaluates

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step = state.global_step
        plan = self._run().plan
        ends_epoch = plan.ends_epoch(step)
        control.should_log = True
        control.should_evaluate = ends_epoch and self._evaluates
        control.should_save = self._run().checkpoints.is_due(step, ends_epoch=ends_epoch, last=step == plan.steps)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        state.log_history.clear()  # the run's folder has the metrics; a history of every step would grow in memory


def _check_trackers(names: list[str]) -> None:
    """Raise ConfigError if transformers does not have a tracker, or its package is not installed."""
    try:
        for make in get_reporting_integration_callbacks(names):
            make()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError("--report-to", " ".join(names), f"trackers that are installed ({error})") from error


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restore the environment and torch's number of threads afterwards."""
    # Note: TrainingArguments makes accelerate set up CPU training. It sets environment variables of launchers and, if
    # OMP_NUM_THREADS is not set, as many threads for this rank as the machine has cores.
    before, threads = dict(os.environ), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
        torch.set_num_threads(threads)
