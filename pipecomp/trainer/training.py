"""`PipelineTrainer`: transformers.Trainer's way of training, over a pipeline of stages."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Trainer, TrainerControl, get_scheduler
from transformers.trainer_utils import (
    TrainOutput,
    compare_trainer_and_checkpoint_args,
    speed_metrics,
)
from transformers.utils import logging as transformers_logging

from pipecomp.data import ShardedSampler
from pipecomp.errors import ConfigError
from pipecomp.trainer import alike, arguments, checkpoints
from pipecomp.trainer.evaluating import EvaluatingTrainer, check_ignored
from pipecomp.trainer.feeding import LengthSampler, Samples, StepLoader, lengths_of, loader_options

_log = transformers_logging.get_logger(__name__)
_CALLED = {  # methods of Trainer that a subclass may override
    "add_callback",
    "create_model_card",
    "end",
    "evaluate",
    "is_local_process_zero",
    "is_world_process_zero",
    "log",
    "log_metrics",
    "metrics_format",
    "num_examples",
    "pop_callback",
    "predict",
    "remove_callback",
    "save_metrics",
    "save_model",
    "save_state",
    "train",
}


@dataclass(frozen=True, kw_only=True)
class _Length:
    """How long a training is. per_epoch: micro-batches of one replica. updates: optimizer steps in an epoch."""

    per_epoch: int
    accumulation: int
    updates: int
    epochs: int
    max_steps: int

    def micro_batches(self, update: int) -> int:
        """How many micro-batches optimizer step `update` of an epoch takes: the last one what is left."""
        return min(self.accumulation, self.per_epoch - update * self.accumulation)


class PipelineTrainer(EvaluatingTrainer):
    """transformers.Trainer over a pipeline, its arguments, callbacks, logs and checkpoints.

        trainer = PipelineTrainer(model="gpt2", args=args, train_dataset=..., pipecomp={"activations": {...}})
        trainer.train()                               # started by deepspeed or torchrun, one process per stage

    model: a folder or hub name, of which each process reads only its stage, or a Hugging Face model, which stays whole
    in every process's memory as long as the script holds it. args, data_collator, train_dataset, eval_dataset,
    processing_class, model_init, compute_metrics, callbacks, optimizer_cls_and_kwargs, preprocess_logits_for_metrics:
    Trainer's; per_device_train_batch_size is the size of a micro-batch, gradient_accumulation_steps their number in an
    optimizer step of each replica. compute_loss_func(outputs, labels, num_items_in_batch): Trainer's, where `outputs`
    has logits only. What of `args` a pipeline cannot do is a ConfigError that names it. pipecomp: the "pipecomp"
    section as a dict, or a DeepSpeed configuration with it, a dict or a JSON file; args.deepspeed may be that
    configuration too. num_stages: default one per process; cuts: as for `pipecomp.initialize`. optimizers: (None,
    None), or callables that make them: of the parameter groups of a stage, and of that optimizer. save_messages:
    whether a checkpoint copies the message store, as large as it is.

    Every process makes a trainer with the same arguments and data and calls the same methods; what differs is a
    LinkError that names it. Callbacks run on every process and see its stage as `model`; what they decide must be the
    same everywhere, as it is when it comes from metrics, logs and state. Training logs also have link_compression,
    link_wait_seconds, store_hit_rate and grad_compression, see `reports.TrafficMeter`. A training that is resumed from
    a checkpoint goes on with the same losses; messages kept in memory (store.backend "memory") are not saved, and sent
    whole again.

    engine: the `pipecomp.PipelineEngine`. state, control, lr_scheduler: as Trainer's.
    Raises ConfigError, SplitError for the model and DataError for the data; later what the engine raises.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for base in [base for base in cls.__mro__ if base not in PipelineTrainer.__mro__]:
            for name, own in base.__dict__.items():
                given = callable(own) or isinstance(own, (staticmethod, classmethod))
                if given and not name.startswith("__") and hasattr(Trainer, name) and name not in _CALLED:
                    raise ConfigError(f"{base.__name__}.{name}", "a method", "none: this trainer does not call it")

    # -- training

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `args` says; every rank must call this.

        resume_from_checkpoint: a folder, or True for the last one in `args.output_dir`; it may be of other stages or
        replicas, see `PipelineEngine.load_checkpoint`. Starts with empty message stores, or with those of a checkpoint
        of the same pipeline. trial, ignore_keys_for_eval: None; they are Trainer's.
        """
        args, ranks = self.args, alike.all_ranks()
        with ranks.collective_errors():
            arguments.check(args)  # they may have been changed
            if trial is not None:
                raise ConfigError("trial", trial, "None: hyperparameters are not searched here")
            check_ignored("ignore_keys_for_eval", ignore_keys_for_eval)
            samples = self._samples(self.train_dataset, "train_dataset")
            facts = alike.dataset_facts(samples, "train_dataset")
        alike.check_arguments(ranks, args, **facts, resumes=bool(resume_from_checkpoint))
        pipeline = {"cuts": list(self.plan.cuts), "replicas": self.replicas}
        found = checkpoints.find(resume_from_checkpoint, args.output_dir, pipeline, self.group)
        self._new_model()
        self._start_engine(found.folder if found is not None and found.same else None)
        engine = self.engine
        sampler = self._sampler(samples)
        length = self._length(sampler.per_epoch)
        self._loader = StepLoader(samples, sampler, self._data_seed, loader_options(args))
        self._make_schedule(length.max_steps)
        self._start_state(length, found)
        if found is not None:
            checkpoints.load_engine(engine, found, self.lr_scheduler)
        engine.set_loader(self._loader)
        self.callback_handler.train_dataloader = self._loader
        self._began, self._first_step = time.time(), self.state.global_step
        self._tokens_before = self.state.num_input_tokens_seen
        self._loss_sum = self._loss_total = 0.0
        self._last_logged = self.state.global_step
        self._meter.since_last(self._reports())

        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(step_schedule=False)
        done, skip = divmod(self.state.global_step, length.updates)
        for epoch in range(done, length.epochs) if self.state.global_step < length.max_steps else ():
            self._run_epoch(length, epoch, skip if epoch == done and not args.ignore_data_skip else 0)
            if self.control.should_training_stop:
                break
        return self._finish(length)

    def _sampler(self, samples: Samples) -> ShardedSampler:
        args, engine = self.args, self.engine
        options: dict[str, Any] = {
            "replicas": self.replicas,
            "replica": engine.grid.data_parallel_id,
            "seed": self._data_seed,
            "drop_last": args.dataloader_drop_last,
        }
        micro_batch = args.per_device_train_batch_size
        if args.train_sampling_strategy == "group_by_length":
            names = getattr(self.processing_class, "model_input_names", ["input_ids"])
            lengths = lengths_of(self.train_dataset, args.length_column_name, names[0])
            return LengthSampler(lengths, micro_batch * args.gradient_accumulation_steps, micro_batch, **options)
        shuffle = args.train_sampling_strategy == "random"
        return ShardedSampler(len(samples.data), micro_batch, shuffle=shuffle, **options)

    def _length(self, per_epoch: int) -> _Length:
        accumulation = self.args.gradient_accumulation_steps
        updates = -(-per_epoch // accumulation)
        max_steps = self.args.max_steps
        if max_steps > 0:
            epochs = -(-max_steps // updates)
        else:
            epochs = math.ceil(self.args.num_train_epochs)
            max_steps = math.ceil(self.args.num_train_epochs * updates)
        return _Length(
            per_epoch=per_epoch, accumulation=accumulation, updates=updates, epochs=epochs, max_steps=max_steps
        )

    def _make_schedule(self, max_steps: int) -> None:
        args, optimizer = self.args, self.engine.basic_optimizer
        if self._make_scheduler is not None:
            self.lr_scheduler = self._make_scheduler(optimizer)
        else:
            self.lr_scheduler = get_scheduler(
                args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=args.get_warmup_steps(max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            )
        self.callback_handler.lr_scheduler = self.lr_scheduler

    def _start_state(self, length: _Length, found: checkpoints.Found | None) -> None:
        args = self.args
        if found is None:
            self.state = self._new_state()
            self.state.train_batch_size = args.per_device_train_batch_size
            self.state.compute_steps(args, length.max_steps)
        else:
            self.state = found.state
            best = self.state.best_model_checkpoint
            if not checkpoints.shared(best is None or Path(best).is_dir(), self.group):
                _log.warning(f"{best}, the best checkpoint so far, does not exist any more")
                self.state.best_model_checkpoint = None
            compare_trainer_and_checkpoint_args(args, self.state)
            if args.restore_callback_states_from_checkpoint:
                self._restore_callbacks()
        self.state.max_steps, self.state.num_train_epochs = length.max_steps, length.epochs
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()

    def _restore_callbacks(self) -> None:
        """Give callbacks that can be saved the state that the checkpoint has of them."""
        for name, saved in cast(Any, self.state.stateful_callbacks).items():
            states = list(saved) if isinstance(saved, list) else [saved]
            for callback in [cb for cb in self._stateful() if type(cb).__name__ == name]:
                if not states:
                    break
                found = type(callback).from_state(states.pop(0))
                if isinstance(callback, TrainerControl):
                    self.control = found
                else:
                    self.callback_handler.callbacks[self.callback_handler.callbacks.index(callback)] = found

    def _run_epoch(self, length: _Length, epoch: int, first: int) -> None:
        """The optimizer steps of an epoch from number `first` on."""
        args, handler, loader = self.args, self.callback_handler, self._loader
        assert loader is not None
        self.control = handler.on_epoch_begin(args, self.state, self.control)
        loader.seek(epoch * length.per_epoch + first * length.accumulation)
        logs: dict[str, float] = {}
        for update in range(first, length.updates):
            self.control = handler.on_step_begin(args, self.state, self.control)
            logs = self._step(length.micro_batches(update))
            self.state.global_step += 1
            self.state.epoch = epoch + min(1.0, (update + 1) * length.accumulation / length.per_epoch)
            self.control = handler.on_step_end(args, self.state, self.control)
            self._log_evaluate_save(logs)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = handler.on_epoch_end(args, self.state, self.control)
        self._log_evaluate_save(logs)

    def _step(self, micro_batches: int) -> dict[str, float]:
        """One optimizer step; its gradient's norm and learning rate, for the log."""
        engine, loader, args = self.engine, self._loader, self.args
        if engine.micro_batches != micro_batches:
            engine.set_train_batch_size(micro_batches * args.per_device_train_batch_size * self.replicas)
        if loader is not None and (engine.is_first_stage() or engine.is_last_stage()):
            batches = loader.begin_step(micro_batches)
            if engine.is_last_stage():
                labels = [batch.labels for batch in batches if batch.labels is not None]
                group = self._loss_group if args.average_tokens_across_devices else None
                self._loss.weigh(labels, self.replicas, group, engine.device)
        loss = float(engine.train_batch())
        if args.logging_nan_inf_filter and not math.isfinite(loss):  # as Trainer: the mean since the last log
            loss = self._loss_sum / (1 + self.state.global_step - self._last_logged)
        self._loss_sum += loss
        logs = {"learning_rate": float(self._learning_rate())}
        norm = engine.get_global_grad_norm()
        if norm is not None:
            logs["grad_norm"] = float(norm)
        if engine.was_step_applied() and not self._follows_metric:
            self.lr_scheduler.step()
        every = args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return logs

    def _learning_rate(self) -> float:
        """The rate of the step that was just made."""
        if self._follows_metric:
            return float(self.engine.basic_optimizer.param_groups[0]["lr"])
        return float(self.lr_scheduler.get_last_lr()[0])

    def _log_evaluate_save(self, logs: dict[str, float]) -> None:
        state = self.state
        if self.control.should_log and state.global_step > self._last_logged:
            mean = self._loss_sum / (state.global_step - self._last_logged)
            self._loss_total += self._loss_sum
            self._loss_sum, self._last_logged = 0.0, state.global_step
            self.log({"loss": mean, **logs, **self._meter.since_last(self._reports())}, self._began)
        if self.control.should_evaluate:
            new_best = self._new_best(self._evaluate())
            if self.args.save_strategy == "best":
                self.control.should_save = new_best
        if self.control.should_save:
            self._save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _finish(self, length: _Length) -> TrainOutput:
        args, state = self.args, self.state
        steps = state.global_step - self._first_step
        self._loss_total += self._loss_sum
        self._loss_sum = 0.0
        loss = self._loss_total / max(steps, 0.001)
        self._reports()
        share = args.num_train_epochs if args.max_steps <= 0 else None
        total = length.max_steps * length.accumulation * args.per_device_train_batch_size * self.replicas
        samples = len(self.train_dataset) * share if share is not None else total
        metrics = speed_metrics(
            "train", self._began, num_samples=samples * steps / max(length.max_steps, 1), num_steps=steps
        )
        metrics["train_loss"] = loss
        metrics = checkpoints.shared(metrics, self.group)
        self.log(metrics)
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            checkpoints.load_weights(self.engine, best)
        if args.save_total_limit == 1 and best is not None:
            checkpoints.keep_only(args.output_dir, best, self.group)
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        return TrainOutput(state.global_step, loss, metrics)
