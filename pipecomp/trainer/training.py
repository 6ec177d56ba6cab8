"""The training loop of `PipelineTrainer`: length, schedule, steps and events."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import TrainOutput, compare_trainer_and_checkpoint_args, speed_metrics
from transformers.utils import logging as transformers_logging

from pipecomp.data import DataPosition, PackedSampler, ShardedSampler
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.distributed.preemption import Interruption, say_here
from pipecomp.errors import require
from pipecomp.interfaces import TrainingEngine
from pipecomp.kernels import ops
from pipecomp.report.recorder import counted
from pipecomp.trainer import callbacks, checkpoints
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.data_loading import SampleSource, StepLoader, data_seed, loader_options, packed_sampler
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.meters import LossMeter, TrafficMeter, TrainingRecorder

# -- length and schedule


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """The length of a training. Steps and epochs are counted from 0.

    Attributes:
        per_epoch: Micro-batches of one replica in an epoch.
        accumulation: Micro-batches of an optimizer step.
        updates: Optimizer steps of an epoch.
        epochs: Epochs, of which the last may be incomplete.
        max_steps: Optimizer steps of the training.
        spanning: Every step has `accumulation` micro-batches and may extend into the next epoch. Otherwise the last
            step of an epoch has the remainder, as in Trainer.
        begin: The step from which this run counts, and its first micro-batch counted from the start of training.
            (0, 0) unless the checkpoint is of a run with other steps.
    """

    per_epoch: int
    accumulation: int
    updates: int
    epochs: int
    max_steps: int
    spanning: bool = False
    begin: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, args: Any, per_epoch: int, *, spanning: bool = False) -> TrainingLength:
        """Compute it as Trainer does. spanning: see the class; then `args.max_steps` is set."""
        accumulation, max_steps = args.gradient_accumulation_steps, args.max_steps
        updates = -(-per_epoch // accumulation)
        if spanning:
            epochs = (max_steps - 1) * accumulation // per_epoch + 1
        elif max_steps > 0:
            epochs = -(-max_steps // updates)
        else:
            epochs = math.ceil(args.num_train_epochs)
            max_steps = math.ceil(args.num_train_epochs * updates)
        return cls(
            per_epoch=per_epoch,
            accumulation=accumulation,
            updates=updates,
            epochs=epochs,
            max_steps=max_steps,
            spanning=spanning,
        )

    def beginning_at(self, step: int, number: int, args: Any) -> TrainingLength:
        """Return the length of a run whose step `step` starts with micro-batch `number`, and which ends with its data.

        `args.max_steps`, if set, ends it as before.
        """
        moved = replace(self, begin=(step, number))
        if args.max_steps > 0:
            return replace(moved, epochs=moved.epoch(max(step, self.max_steps - 1)) + 1)
        whole, more = divmod(args.num_train_epochs, 1)
        end = moved.first_step(int(whole)) if whole > moved.epoch(step) else step
        if more and whole == moved.epoch(step):
            end += max(0, math.ceil((more * self.per_epoch - number % self.per_epoch) / self.accumulation))
        elif more and whole > moved.epoch(step):
            end += math.ceil(more * self.updates)
        return replace(moved, max_steps=end)

    def _place(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, and its first micro-batch counted from the start of that epoch."""
        begin, number = self.begin
        if self.spanning:
            return divmod(number + (step - begin) * self.accumulation, self.per_epoch)
        epoch, place = divmod(number, self.per_epoch)
        left = -(-(self.per_epoch - place) // self.accumulation)  # steps of the epoch
        if step - begin < left:
            return epoch, place + (step - begin) * self.accumulation
        later, step = divmod(step - begin - left, self.updates)
        return epoch + 1 + later, step * self.accumulation

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step starts."""
        return self._place(step)[0]

    def first_step(self, epoch: int) -> int:
        """Return the first step that starts in an epoch."""
        begin, number = self.begin
        first, place = divmod(number, self.per_epoch)
        if self.spanning:
            return begin - (number - epoch * self.per_epoch) // self.accumulation
        if epoch <= first:
            return begin
        return begin - (place - self.per_epoch) // self.accumulation + (epoch - first - 1) * self.updates

    def first_micro_batch(self, step: int) -> int:
        """Return the number of a step's first micro-batch, counted from the start of training."""
        epoch, place = self._place(step)
        return epoch * self.per_epoch + place

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return self.accumulation if self.spanning else min(self.accumulation, self.per_epoch - self._place(step)[1])

    def epochs_after(self, steps: int) -> float:
        """Return the epochs that the first `steps` steps take."""
        if steps == 0:
            return 0.0
        epoch = self.epoch(steps - 1)
        end = self.first_micro_batch(steps - 1) + self.accumulation
        return epoch + min(1.0, (end - epoch * self.per_epoch) / self.per_epoch)

    def has_other_length(self, step: int, epoch: float) -> bool:
        """Return whether a training in which `step` steps took `epoch` epochs has another number of steps per epoch."""
        return abs(epoch - self.epochs_after(step)) > 1 / self.updates


def uses_metric(scheduler: Any) -> bool:
    """Return whether the schedule steps after evaluations, by a metric."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def learning_rate(scheduler: Any, optimizer: Any) -> float:
    """Return the learning rate of the next step. scheduler: None if DeepSpeed has it."""
    if scheduler is None or uses_metric(scheduler):
        return float(optimizer.param_groups[0]["lr"])
    return float(scheduler.get_last_lr()[0])


def best_model_metric(args: Any, metrics: dict[str, float]) -> float:
    """Return the value of `args.metric_for_best_model`. Raises ConfigError if the metrics do not have it."""
    name = str(args.metric_for_best_model)
    key = name if name.startswith("eval_") else f"eval_{name}"
    require(key in metrics, "metric_for_best_model", name, f"one of {', '.join(sorted(metrics))}")
    return metrics[key]


def update_best(args: Any, state: Any, metrics: dict[str, float]) -> bool:
    """Return whether this is the best evaluation so far, and if so record it in `state`."""
    if args.metric_for_best_model is None:
        return False
    value = best_model_metric(args, metrics)
    worst, better = (-math.inf, np.greater) if args.greater_is_better else (math.inf, np.less)
    if not better(value, worst if state.best_metric is None else state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True


# -- steps


_log = transformers_logging.get_logger(__name__)


class Training:
    """One training, with its loader and counters. It uses only public attributes of the trainer.

    Args:
        trainer: The `PipelineTrainer` with arguments, state, callbacks and engine.
        samples: The training data.
        resume_point: The checkpoint to resume from, or None.
        loss: The engine's loss.
        report: Write the page of `pipecomp report` at the end.
        save_on_signal: Stop after the current step with a checkpoint on SIGTERM and SIGINT.

    Attributes:
        tokens_before: `state.num_input_tokens_seen` at the start.
    """

    def __init__(
        self,
        trainer: Any,
        samples: SampleSource,
        resume_point: checkpoints.ResumePoint | None,
        *,
        loss: StepLoss,
        report: bool,
        save_on_signal: bool,
    ) -> None:
        args = trainer.args
        engine: TrainingEngine = trainer.engine
        self._trainer, self._engine, self._loss = trainer, engine, loss
        self._report, self._interruption = report, Interruption(active=save_on_signal)
        self._stop_reason: str | None = None
        # The group of the last stages of all replicas, which sum their numbers of labels.
        average = args.average_tokens_across_devices and trainer.replicas > 1
        self._loss_group = engine.grid.get_data_parallel_group() if average else None
        sampler = trainer._make_sampler(samples, engine.grid.data_parallel_id)
        self._length = length = trainer._training_length(sampler.per_epoch)
        self._sampler = sampler = packed_sampler(
            sampler, trainer.data_collator, trainer.train_dataset, args, spanning=length.spanning
        )
        if resume_point is not None and resume_point.position is not None:
            self._length = length = self._seek(resume_point.position, resume_point.state.global_step)
        pad = getattr(trainer.processing_class, "pad_token_id", None)
        seed = ops.mix_seed(data_seed(args), engine.grid.data_parallel_id)  # replicas mask differently
        options = loader_options(args, samples.loader)
        self._loader = StepLoader(samples, sampler, seed, options, pad, self._loss.model_inputs)
        handler = trainer.callback_handler
        if trainer.uses_deepspeed_optimizer:
            handler.lr_scheduler = None  # DeepSpeed's engine has the configuration's
        else:
            handler.lr_scheduler = trainer._create_schedule(length.max_steps)
        saved_steps = length.max_steps if resume_point is None else resume_point.state.max_steps
        self._start_state(resume_point)
        self._resume_point = None if resume_point is None else trainer._load_checkpoint(resume_point)
        if saved_steps != length.max_steps:
            self._follow_schedule(saved_steps)
        engine.set_loader(self._loader)
        engine.progress.batches_taken = length.first_micro_batch(trainer.state.global_step)
        handler.train_dataloader = self._loader
        self._began, self._first_step = time.time(), trainer.state.global_step
        self.tokens_before, self._flos_before = trainer.state.num_input_tokens_seen, trainer.state.total_flos
        self._losses, self._traffic = LossMeter(trainer.state.global_step), TrafficMeter()
        self._all_tokens = self._real_tokens = 0  # of all replicas, since the training began
        before = self._gather_stats()  # counters of earlier trainings with this engine
        self._traffic.since_last(before)
        self._recording = TrainingRecorder(trainer, length, before)

    def _seek(self, position: DataPosition, step: int) -> TrainingLength:
        """Continue in the data at a checkpoint's position. Returns the length of the training from there."""
        trainer, sampler = self._trainer, self._sampler
        if not isinstance(sampler, (ShardedSampler, PackedSampler)):
            return self._length
        if trainer.args.ignore_data_skip:
            position = replace(position, parts=(replace(position.parts[-1], taken=0),))
        number = sampler.seek(position)
        here, saved = sampler.position(number), position.parts[-1]
        if not here.changed:
            return self._length  # the number of steps tells the position
        length, own = trainer._length_from(self._length, step, number), here.parts[-1]
        if (own.replicas, own.step_samples) != (saved.replicas, saved.step_samples):
            _log.warning(
                f"the checkpoint is of {saved.replicas} replica(s) and {saved.step_samples} samples per step, this run "
                f"has {own.replicas} and {own.step_samples}. Training continues in epoch {position.epoch + 1} with the "
                f"samples that were not taken yet, after {position.samples}, to step {length.max_steps}"
            )
        return length

    def _start_state(self, resume_point: checkpoints.ResumePoint | None) -> None:
        """Set the trainer's state to the checkpoint's, or to a new one."""
        trainer, args = self._trainer, self._trainer.args
        if resume_point is None:
            state = trainer.state = callbacks.new_state(trainer)
            state.train_batch_size = args.per_device_train_batch_size
            state.compute_steps(args, self._length.max_steps)
        else:
            state = trainer.state = resume_point.state
            other = self._length.has_other_length(state.global_step, state.epoch or 0.0) or not resume_point.same
            if resume_point.position is None and other:
                _log.warning(
                    "the checkpoint does not record which samples of its epoch were taken, and it is of other stages, "
                    "replicas or samples per step than this run. Training continues by steps, as with Trainer, to step "
                    f"{self._length.max_steps}: samples of the epoch may come twice or not at all"
                )
            best = state.best_model_checkpoint
            if not broadcast(best is None or Path(best).is_dir(), group=trainer.group):
                _log.warning(f"{best}, the best checkpoint so far, is missing: it is no longer considered")
                state.best_model_checkpoint = None
            compare_trainer_and_checkpoint_args(args, state)
            if args.restore_callback_states_from_checkpoint:
                callbacks.restore(trainer)
        state.max_steps, state.num_train_epochs = self._length.max_steps, self._length.epochs
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()

    def _follow_schedule(self, saved: int) -> None:
        """Set the next step's rate by the schedule of a training whose length has changed. saved: steps before."""
        scheduler = self._trainer.lr_scheduler or self._engine.lr_scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            place = scheduler.last_epoch
            rates = [rate * f(place) for rate, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            scheduler._last_lr = rates
        elif type(scheduler).__module__.startswith("deepspeed."):
            rates = scheduler.get_lr()
        else:
            return
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self._trainer.rank == 0:
            _log.warning(
                f"training continues to step {self._length.max_steps}, to step {saved} when the checkpoint was "
                f"written: the learning rate goes on at {rates[0]:g}, as in a training of the new length"
            )

    def is_stopping(self) -> bool:
        """Return whether training stops after this step because of a signal."""
        over = self._trainer.state.global_step >= self._length.max_steps or self._trainer.control.should_training_stop
        return self._stop_reason is not None and not over

    # -- from the first step to the last

    def run(self) -> TrainOutput:
        """Train. Every rank must call this. Raises Interrupted, a SystemExit, on every rank after a signal."""
        self._engine.use_trainer_state(partial(checkpoints.state_of_rank, self._trainer))
        try:
            with self._interruption:
                return self._run()
        finally:
            self._engine.use_trainer_state(None)

    def _run(self) -> TrainOutput:
        trainer, length = self._trainer, self._length
        fire(trainer, "on_train_begin")
        if trainer.args.eval_on_start:
            trainer.evaluate()
        over = trainer.state.global_step >= length.max_steps
        if self._resume_point is not None and self._resume_point.due:
            self._do_pending_work(self._resume_point)
            over = over or trainer.control.should_training_stop
        done = length.epoch(trainer.state.global_step)
        for epoch in () if over else range(done, length.epochs):
            begins = epoch > done or trainer.args.ignore_data_skip
            self._run_epoch(epoch, length.first_step(epoch) if begins else trainer.state.global_step)
            if trainer.control.should_training_stop:
                break
        return self._finish()

    def _run_epoch(self, epoch: int, first: int) -> None:
        """Take the optimizer steps that start in an epoch, from step `first` on."""
        trainer, length = self._trainer, self._length
        fire(trainer, "on_epoch_begin")
        self._loader.begin_epoch(epoch, length.first_micro_batch(first))
        logs: dict[str, float] = {}
        end = length.first_step(epoch + 1)
        for step in range(first, end):
            fire(trainer, "on_step_begin")
            micro_batches = length.micro_batches(step)
            if micro_batches > 1 and (trainer.control.should_epoch_stop or trainer.control.should_training_stop):
                break  # Trainer checks after the first micro-batch, and takes the step if it is the only one
            logs = self._step(micro_batches, length.first_micro_batch(step))
            if trainer.args.include_num_input_tokens_seen != "no":
                self._gather_stats()  # callbacks may use the number of tokens in any step, as with Trainer
            trainer.state.global_step += 1
            trainer.state.epoch = length.epochs_after(step + 1)
            fire(trainer, "on_step_end")
            self._stop_if_asked(logs, ends_epoch=step + 1 == end or trainer.control.should_epoch_stop)
            self._log_evaluate_save(logs)
            self._engine.end_step()
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        fire(trainer, "on_epoch_end")
        self._log_evaluate_save(logs)

    def _stop_if_asked(self, logs: dict[str, float], *, ends_epoch: bool) -> None:
        """Save, close and exit on all ranks if any received a signal, unless this is the last step.

        There may be no time for an evaluation, so the checkpoint records it, and the end of an epoch, as pending.
        """
        trainer = self._trainer
        if not self._log(logs):
            with self._engine.propagate_failure():
                self._stop_reason = self._interruption.agree(trainer.group)
        if not self.is_stopping():
            return
        assert self._stop_reason is not None
        trainer.control.should_log |= ends_epoch and trainer.args.logging_strategy.value == "epoch"
        self._log(logs)
        due = [checkpoints.EVALUATION] if trainer.control.should_evaluate else []
        saved = self._save([*due, checkpoints.EPOCH_END] if ends_epoch else due)
        self._recording.interrupted()
        trainer._report_interruption(self._stop_reason, saved=saved)
        trainer.end()
        raise self._interruption.leave(self._stop_reason)

    def _do_pending_work(self, resume_point: checkpoints.ResumePoint) -> None:
        """Do the pending work of a checkpoint that was written after a signal.

        The checkpoint is not rewritten, because a kill meanwhile would leave it incomplete. A run that resumes from it
        again repeats the work.
        """
        trainer, state = self._trainer, self._trainer.state
        best = state.best_global_step
        trainer.control.should_evaluate = (
            checkpoints.EVALUATION in resume_point.due and trainer.eval_dataset is not None
        )
        self._evaluate()
        if checkpoints.EPOCH_END in resume_point.due or trainer.control.should_training_stop:
            fire(trainer, "on_epoch_end")
            self._evaluate()
        trainer.control.should_save = False
        if state.best_global_step != best:
            state.best_model_checkpoint = resume_point.folder

    def _step(self, micro_batches: int, first: int) -> dict[str, float]:
        """Take an optimizer step, starting with micro-batch number `first`. Returns gradient norm and learning rate."""
        engine, args, state, scheduler = (
            self._engine,
            self._trainer.args,
            self._trainer.state,
            self._trainer.lr_scheduler,
        )
        if engine.micro_batches != micro_batches:
            engine.set_train_batch_size(micro_batches * engine.micro_batch_size * self._trainer.replicas)
        rate = learning_rate(scheduler, engine.basic_optimizer)
        self._recording.begin_step()
        self._load(micro_batches)
        own = sum(map(self._sampler.size, range(first, first + micro_batches)))
        engine.step_samples = own  # `StepLoss` weights labels of all micro-batches equally
        loss = float(engine.train_batch())
        if state.global_step + 1 >= self._length.max_steps:
            engine.average_replicas()
        logs = {"learning_rate": rate}
        samples = own * self._trainer.replicas
        self._recording.end_step(state.global_step + 1, loss=loss, lr=rate, samples=samples)
        if args.logging_nan_inf_filter and not math.isfinite(loss):  # use the mean since the last log, as Trainer does
            loss = self._losses.sum / (1 + state.global_step - self._losses.last_logged)
        self._losses.sum += loss
        norm = engine.get_global_grad_norm()
        if norm is not None:
            logs["grad_norm"] = float(norm)
        if scheduler is not None and engine.was_step_applied() and not uses_metric(scheduler):
            scheduler.step()
        every = args.torch_empty_cache_steps
        if every is not None and state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return logs

    def _load(self, micro_batches: int) -> None:
        """Load a step's micro-batches on the first and last stage, and set the weights of their losses."""
        engine = self._engine
        if not (engine.is_first_stage() or engine.is_last_stage()):
            return
        with engine.propagate_failure():
            batches = self._loader.begin_step(micro_batches)
            self._loss.set_problem_type(engine.stage.config, batches[0].labels)
            if engine.is_last_stage():
                labels = self._loss.masked_labels(engine.stage, batches)
                self._loss.hold_inputs(batches)
                # In local steps replicas do not wait for each other: each averages over its own labels.
                group = None if engine.begins_local_step() else self._loss_group
                self._loss.set_share(labels, self._trainer.replicas, group, engine.device)

    def _log(self, logs: dict[str, float]) -> bool:
        """Log if the callbacks request it; the ranks then also agree whether to stop. Returns whether it logged."""
        trainer, state = self._trainer, self._trainer.state
        if not trainer.control.should_log or state.global_step <= self._losses.last_logged:
            return False
        own = {"loss": self._losses.log(state.global_step)}
        if "grad_norm" in logs:
            own["grad_norm"] = logs["grad_norm"]
        stats, common = self._gather(own)
        self._recording.counters(stats, self._real_tokens)
        traffic = {**self._traffic.since_last(stats), **self._recording.rates(stats)}
        measured = trainer._training_metrics(self._all_tokens, self._real_tokens)
        trainer.log({"loss": common["loss"], **logs, **common, **measured, **traffic}, self._began)
        return True

    def _log_evaluate_save(self, logs: dict[str, float]) -> None:
        """Log, evaluate and save as the callbacks request."""
        self._log(logs)
        self._evaluate()
        if self._trainer.control.should_save:
            self._save()

    def _evaluate(self) -> None:
        """Evaluate if the callbacks request it, and update everything that depends on metrics."""
        trainer, state = self._trainer, self._trainer.state
        if trainer.control.should_evaluate:
            self._update_counters()  # writes the step's line before the evaluation's
            metrics = trainer.evaluate()
            trainer._record_evaluation(self._recording, metrics)
            if uses_metric(trainer.lr_scheduler):
                trainer.lr_scheduler.step(best_model_metric(trainer.args, metrics))
            new_best = update_best(trainer.args, state, metrics)
            if trainer.args.save_strategy == "best":
                trainer.control.should_save = new_best

    def _finish(self) -> TrainOutput:
        """Log the training's metrics, load the best model if requested, and fire the last events."""
        trainer, args, state, length = self._trainer, self._trainer.args, self._trainer.state, self._length
        steps = state.global_step - self._first_step
        loss = self._losses.total() / max(steps, 0.001)
        if steps:  # also if a callback ended the training early
            self._engine.average_replicas()
        trainer._save_results()
        stats, common = self._gather({"loss": loss})
        loss = common["loss"]
        trainer._report_end(self._recording.end(self._engine, stats, page=self._report), stats)
        if args.max_steps <= 0:
            samples = len(self._loader.dataset) * args.num_train_epochs
        else:
            samples = length.max_steps * length.accumulation * args.per_device_train_batch_size * trainer.replicas
        metrics = speed_metrics(
            "train", self._began, num_samples=samples * steps / max(length.max_steps, 1), num_steps=steps
        )
        metrics |= {"total_flos": state.total_flos, "train_loss": loss}
        metrics = broadcast(metrics, group=trainer.group)
        trainer.log(metrics)
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            checkpoints.load_weights(self._engine, best)
        if args.save_total_limit == 1 and best is not None:
            checkpoints.keep_only(args.output_dir, best, trainer.group)
        fire(trainer, "on_train_end")
        return TrainOutput(state.global_step, loss, metrics)

    # -- collectives

    def _gather_stats(self) -> list[dict[str, Any]]:
        """Gather `comm_stats` of all ranks, and update the state's tokens and FLOPs. Every rank must call this."""
        return self._gather({})[0]

    def _gather(self, values: Mapping[str, float]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Gather `comm_stats` as `_gather_stats` does, and make values equal on all ranks: the mean if they differ.

        Replicas differ in local steps, and in gradient norms if the optimizer exchanges only momentum.
        """
        engine, trainer, loader = self._engine, self._trainer, self._loader
        tokens = (loader.tokens, loader.real_tokens) if engine.is_first_stage() else (0, 0)
        with engine.propagate_failure():
            own_stats = counted([engine.comm_stats()])[0]  # without the last step's micro-batches
            own = (own_stats, tokens, dict(values), self._interruption.wanted, trainer._take_errors())
            rows = gathered(own, trainer.group)
        self._stop_reason = self._interruption.decide([wanted for *_, wanted, _ in rows])
        for rank, (*_, errors) in enumerate(rows):
            for error in errors:
                say_here(f"rank {rank}: {error}. The run continues without it")
        self._real_tokens = sum(tokens[1] for _, tokens, *_ in rows)
        seen = self._all_tokens = sum(tokens[0] for _, tokens, *_ in rows)
        trainer.state.total_flos = self._flos_before + seen * trainer.flos_per_token
        which = trainer.args.include_num_input_tokens_seen
        if which != "no":
            column = 1 if which == "non_padding" else 0
            trainer.state.num_input_tokens_seen = self.tokens_before + sum(tokens[column] for _, tokens, *_ in rows)
        by_rank = [of_rank for _, _, of_rank, *_ in rows]
        common = dict(values)
        if any(of_rank != by_rank[0] for of_rank in by_rank):
            common = {name: sum(of_rank[name] for of_rank in by_rank) / len(by_rank) for name in values}
        return [stats for stats, *_ in rows], common

    def _update_counters(self) -> None:
        """Update the state's number of tokens and the recorded counters, which checkpoints save."""
        self._recording.counters(self._gather_stats(), self._real_tokens)

    def _save(self, due: Sequence[str] = ()) -> bool:
        """Write a checkpoint and fire on_save. Returns False if it could not be written; training then continues.

        due: the work that is pending after this step, see `checkpoints.ResumePoint`.
        """
        with self._engine.propagate_failure():
            saved = self._trainer._write_checkpoint(count=self._update_counters, due=tuple(due))
        if saved:
            fire(self._trainer, "on_save")
        else:
            self._trainer.control.should_save = False  # the next attempt is at the next save, as after a success
        return saved
