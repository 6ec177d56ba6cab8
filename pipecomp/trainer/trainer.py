"""`PipelineTrainer`: transformers.Trainer's way of training, over a pipeline of stages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics

from pipecomp.data import dataset_facts
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import require, writable
from pipecomp.interfaces import TrainingEngine
from pipecomp.trainer import arguments, callbacks, checkpoints, model_io, setup
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.data_loading import EvalLoaders, Samples, check_draws, data_seed, longest_sample, set_epoch
from pipecomp.trainer.evaluation import Evaluation, check_ignored, dataset_named
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.training import Training


class PipelineTrainer:
    """Train as transformers.Trainer does, with its arguments, callbacks, logs and checkpoints, over a pipeline.

    Every process makes a trainer with the same arguments and data and calls the same methods; what differs is a
    LinkError that names it. Callbacks run on every process and see its stage as `model`; what they decide must be the
    same everywhere, as it is when it comes from metrics, logs and state. Training logs also have link_compression,
    link_wait_seconds, store_hit_rate and grad_compression, see `meters.TrafficMeter`. A training that is resumed from
    a checkpoint goes on with the same losses; cached activations in memory (store.backend "memory") are not saved, and
    those samples are sent as first visits again.

    A step's loss is the mean over its labels. Trainer's is that of most models; of those that do not go by
    num_items_in_batch, as BERT's, it is the sum of the means of micro-batches. With bf16 or fp16 the model is saved in
    16 bits, as DeepSpeed holds it; Trainer saves float32.

    Args:
        model: A folder or hub name, of which each process reads only its stage, or a Hugging Face model, which stays
            complete in every process's memory as long as the script holds it. A process trains its stage of it: with
            several stages the script's model is whole nowhere afterwards, and it is an error to call it or to save it.
        args: Trainer's. per_device_train_batch_size is the size of a micro-batch, gradient_accumulation_steps their
            number in an optimizer step of each replica. What a pipeline cannot do is a ConfigError that names it.
            `args.deepspeed` may be a DeepSpeed configuration with a "pipecomp" section.
        data_collator: Trainer's.
        train_dataset: Trainer's.
        eval_dataset: Trainer's.
        processing_class: Trainer's.
        model_init: Trainer's; in place of `model`.
        compute_loss_func: Trainer's, called with (outputs, labels, num_items_in_batch), where `outputs` has logits
            only.
        compute_metrics: Trainer's; called on rank 0.
        callbacks: Trainer's.
        optimizers: Callables, or None, that make an optimizer of the parameter groups of a stage, and a schedule of
            that optimizer.
        optimizer_cls_and_kwargs: Trainer's.
        preprocess_logits_for_metrics: Trainer's.
        pipecomp: The "pipecomp" section as a dict, or a DeepSpeed configuration with it, a dict or a JSON file.
        num_stages: One per process by default.
        cuts: As for `pipecomp.initialize`.
        save_messages: Whether a checkpoint copies the message store, as large as it is.
        report: Whether `train` ends with report.html in `args.output_dir`, see docs/report.md; the files that it shows
            are written in any case.
        save_on_signal: Whether SIGTERM and Ctrl-C end `train` after the current step on all ranks, with a checkpoint
            in `args.output_dir` that resume_from_checkpoint=True goes on from, and the program with status 75.

    Attributes:
        engine: The `pipecomp.PipelineEngine`.
        model: This rank's stage once the engine is made, before that the model as it was given.
        state, control, callback_handler, optimizer, lr_scheduler: Trainer's.

    Raises:
        ConfigError: For arguments; a subclass that overrides a method of Trainer that is not called here is one too.
        SplitError: For the model.
        LinkError: Where ranks differ, or cannot reach each other.

    Example:
        A script that deepspeed or torchrun starts, one process for each stage::

            trainer = PipelineTrainer(model="gpt2", args=args, train_dataset=..., pipecomp={"activations": {...}})
            trainer.train()
            trainer.save_model("trained")
    """

    log_metrics = log_metrics
    metrics_format = metrics_format
    save_metrics = save_metrics
    save_state = save_state

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], dict] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        pipecomp: str | os.PathLike | dict[str, Any] | None = None,
        num_stages: int | None = None,
        cuts: Sequence[int] | None = None,
        save_messages: bool = True,
        report: bool = True,
        save_on_signal: bool = True,
    ) -> None:
        self.args = cast(Any, args if args is not None else TrainingArguments(output_dir="tmp_trainer"))
        self.group = setup.join(self.args, model, model_init, pipecomp)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        model = model if model_init is None else model_io.make_model(model_init)
        self._pipeline = setup.Pipeline.of(self.args, model, pipecomp, num_stages, cuts)
        self.settings, self.plan, self.replicas = self._pipeline.settings, self._pipeline.plan, self._pipeline.replicas
        self.flos_per_token = self._pipeline.flos_per_token
        self._loss = StepLoss.of(
            self._pipeline.model_config,
            self._pipeline.model_class,
            model,
            self.args.label_smoothing_factor,
            compute_loss_func,
        )
        self._optimizers = setup.Optimizers.of(optimizers, optimizer_cls_and_kwargs, self.settings)
        self._save_messages, self._report, self._save_on_signal = save_messages, report, save_on_signal

        self.processing_class = processing_class
        pads = processing_class is not None and isinstance(processing_class, PreTrainedTokenizerBase)
        default = DataCollatorWithPadding(processing_class) if pads else default_data_collator
        self.data_collator: Any = data_collator if data_collator is not None else default
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        require(
            str(self.args.eval_strategy.value) == "no" or eval_dataset is not None,
            "eval_dataset",
            None,
            f"a dataset with eval_strategy {self.args.eval_strategy.value!r}",
        )

        taken = arguments.values(self.args, arguments.AT_FIRST)
        self._holder = model_io.EngineHolder(self._pipeline, self._optimizers, self._loss, model, model_init, taken)
        self._eval_loaders = EvalLoaders()
        self._training: Training | None = None
        self._start_callbacks(model, callbacks or [])

    def _start_callbacks(self, model: Any, given: list[Any]) -> None:
        self.callback_handler = callbacks.default_handler(self.args, model, self.processing_class)
        for callback in [*given, callbacks.progress_callback(self.args)]:
            self.add_callback(callback)
        with all_ranks().collective_errors(), writable("output_dir", self.args.output_dir):
            if self.rank == 0:
                Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.control = TrainerControl()
        self.state = callbacks.new_state(self)
        fire(self, "on_init_end")

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        arguments.check_subclass(cls, PipelineTrainer)

    def __setattr__(self, name: str, value: Any) -> None:
        arguments.check_attribute(self, name, value)
        super().__setattr__(name, value)

    # -- the engine

    @property
    def engine(self) -> TrainingEngine:
        """The engine, made at first use: all ranks must come here together the first time."""
        if self._holder.engine is None:
            engine = self._holder.open(self.args, self.processing_class, partial(fire, self), self._sample_tokens)
            self.callback_handler.model, self.callback_handler.optimizer = engine.stage, engine.optimizer
            return engine
        return self._holder.engine

    @property
    def model(self) -> Any:
        """This rank's stage once the engine is made; before that the model as it was given."""
        return self._holder.model

    @property
    def optimizer(self) -> Any:
        """The engine's, None before it is made."""
        return None if self._holder.engine is None else self._holder.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """That of the last training, None before."""
        return self.callback_handler.lr_scheduler

    def end(self) -> None:
        """Finish the stores and end the connections in order; without it that is done when the program ends.

        What was trained of a folder's model is gone then: save it before.
        """
        self._holder.close()

    # -- training, evaluation, prediction

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `args` says; every rank must call this.

        It starts with empty message stores, or with those of a checkpoint of the same pipeline.

        Args:
            resume_from_checkpoint: A folder, or True for the last one in `args.output_dir` that is whole. It may be of
                other stages or replicas, see `PipelineEngine.load_checkpoint`.
            trial: None; it is Trainer's.
            ignore_keys_for_eval: None; they are Trainer's.

        Returns:
            Steps, mean loss and metrics, as Trainer does.

        Raises:
            ConfigError: For arguments, or a checkpoint that is not there.
            DataError: For the dataset.
            LinkError: On every rank, where ranks have different arguments or data.
            Interrupted: SystemExit, on every rank, after SIGTERM or Ctrl-C; see `save_on_signal`.
        """
        ranks = all_ranks()
        with ranks.collective_errors():
            arguments.check(self.args)  # they may have been changed
            require(trial is None, "trial", trial, "None: hyperparameters are not searched here")
            check_ignored("ignore_keys_for_eval", ignore_keys_for_eval)
            samples = self._samples(self.train_dataset, "train_dataset")
            set_epoch(samples.data, 0)  # an earlier training may have left it at another, and facts are compared
            facts = self._facts(samples, self.args.per_device_train_batch_size, "train_dataset")
        resumes = bool(resume_from_checkpoint) if resume_from_checkpoint in (None, True, False) else "from a folder"
        setup.check_equal_arguments(ranks, self.args, **facts, resumes=resumes, save_on_signal=self._save_on_signal)
        layout = checkpoints.layout(self.plan, self.replicas)
        found = checkpoints.find(resume_from_checkpoint, self.args.output_dir, layout, self.group)
        self._holder.begin_training(self.args, found.folder if found is not None and found.same else None)
        self.engine.data_facts = facts if samples.sample_id is int else {}
        self._training = Training(
            self,
            samples,
            found,
            loss=self._loss,
            make_scheduler=self._optimizers.scheduler,
            save_messages=self._save_messages,
            report=self._report,
            save_on_signal=self._save_on_signal,
        )
        self._holder.hide_given()
        return self._training.run()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate a dataset, or several one by one; every rank must call this.

        Args:
            eval_dataset: A dataset, a dict of them, or the name of one of several that the trainer was given. None
                for what it was given.
            ignore_keys: None or empty, as there are only logits.
            metric_key_prefix: Of the metrics' names.

        Returns:
            The metrics, the same on every rank. `compute_metrics` is called on rank 0.

        Raises:
            ConfigError: For a name that is not known, or keys to ignore.
            DataError: For a dataset.
            LinkError: On every rank, where ranks have different arguments or data.
        """
        check_ignored("ignore_keys", ignore_keys)
        chosen = dataset_named(eval_dataset, self.eval_dataset)
        if isinstance(chosen, dict) and "input_ids" not in chosen:  # with that it is one dataset, by columns
            out: dict[str, float] = {}
            without = [name for name, data in chosen.items() if data is None]  # that would mean all of them once more
            require(not without, "eval_dataset", f"None for {without}", "a dataset for each name")
            for name, data in chosen.items():
                out |= self.evaluate(data, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return out
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        metrics = self._run_evaluation(chosen, "eval_dataset", metric_key_prefix, loss_only, arrays=False).metrics or {}
        self.log(metrics)
        fire(self, "on_evaluate", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset, with or without labels; every rank must call this.

        Args:
            test_dataset: What to predict.
            ignore_keys: None or empty, as there are only logits.
            metric_key_prefix: Of the metrics' names.

        Returns:
            Logits, labels and metrics of all samples, in the dataset's order, on every rank.

        Raises:
            ConfigError: For keys to ignore.
            DataError: For the dataset.
            LinkError: On every rank, where ranks have different arguments or data.
        """
        check_ignored("ignore_keys", ignore_keys)
        output = self._run_evaluation(
            test_dataset, "test_dataset", metric_key_prefix, self.args.prediction_loss_only, arrays=True
        )
        fire(self, "on_predict", output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _run_evaluation(self, data: Any, name: str, prefix: str, loss_only: bool, *, arrays: bool) -> EvalLoopOutput:
        ranks = all_ranks()
        with ranks.collective_errors():
            samples = self._samples(data, name)
            facts = self._facts(samples, self.args.per_device_eval_batch_size, name)
        setup.check_equal_arguments(ranks, self.args, **facts)
        engine = self.engine
        engine.allow_evaluation(self.args.per_device_eval_batch_size)
        loader = self._eval_loaders.of(
            data, samples, self.args, replicas=self.replicas, replica=engine.grid.data_parallel_id
        )
        self.callback_handler.eval_dataloader = loader
        evaluation = Evaluation(
            engine,
            self.group,
            self.args,
            loss=self._loss,
            compute_metrics=self.compute_metrics,
            preprocess=self.preprocess_logits_for_metrics,
            on_step=partial(fire, self, "on_prediction_step"),
        )
        return evaluation.run(loader, prefix, loss_only=loss_only, arrays=arrays)

    def _facts(self, samples: Samples, micro_batch: int, name: str) -> dict[str, Any]:
        """Return what ranks compare of a dataset. DataError where stages would not make the same of it."""
        if self.plan.num_stages > 1:
            check_draws(samples, micro_batch, data_seed(self.args), name)
        return dataset_facts(samples.data, name)

    def _sample_tokens(self) -> int | None:
        """Count a training sample's tokens, None without data."""
        if self.train_dataset is None:
            return None
        return longest_sample(self._samples(self.train_dataset, "train_dataset"), data_seed(self.args))

    def _samples(self, data: Any, name: str) -> Samples:
        """Make a dataset with the columns that the model takes. name: for errors."""
        columns = None
        if self.args.remove_unused_columns:
            taken = inspect.signature(self._pipeline.model_class.forward).parameters
            columns = [*list(taken)[1:], "label", "label_ids", "labels"]
        return Samples.of(data, self.data_collator, columns, name)

    def num_examples(self, dataloader: Any) -> int:
        """Return how many samples the dataset has that a loader of this trainer reads, as callbacks get them."""
        return len(dataloader.dataset)

    # -- callbacks and logs

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback, an instance or a class. Every rank calls it, with what all ranks know.

        Raises:
            ConfigError: For a `CompressionCallback`: this trainer compresses gradients as its configuration says.
        """
        callbacks.check(callback)
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, an instance or a class, and return it, None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, an instance or a class."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first process of all."""
        return self.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return os.environ["LOCAL_RANK"] == "0"  # TrainingArguments knows it only with a GPU or use_cpu

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to `state.log_history` and hand them to the callbacks, as Trainer does; on every rank.

        Args:
            logs: Values by name; modified.
            start_time: When training began, in seconds since the epoch, for tokens per second.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                before = 0 if self._training is None else self._training.tokens_before
                count = self.state.num_input_tokens_seen - before
                logs.update(speed_metrics("train", start_time, num_tokens=count))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        fire(self, "on_log", logs)

    # -- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, and the tokenizer, as a folder that from_pretrained reads; every rank must call this.

        Args:
            output_dir: `args.output_dir` by default. The folder is complete on the machine of rank 0.
            _internal_call: Trainer's, which changes nothing here.
        """
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        model_io.save_model(self.engine, output_dir or self.args.output_dir, self.args, processing)

    def create_model_card(self, **fields: Any) -> None:
        """Write a model card, README.md in `args.output_dir`; rank 0 does.

        Args:
            fields: Those of Trainer.create_model_card.
        """
        if self.rank == 0:
            model_io.write_card(
                self.args,
                self._pipeline.model_config,
                self.state,
                (self.train_dataset, self.eval_dataset),
                model_class=self._pipeline.model_class.__name__,
                stages=self.plan.num_stages,
                replicas=self.replicas,
                **fields,
            )
