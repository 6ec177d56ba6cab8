"""The methods of transformers.Trainer around a training, and what scripts read from accelerate's Accelerator.

`PipelineTrainer` in `pipecomp.trainer.trainer` adds the constructor, the engine, training and evaluation.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import (
    get_learning_rates,
    log_metrics,
    metrics_format,
    save_metrics,
    save_state,
)
from transformers.trainer_utils import speed_metrics

from pipecomp.data.packing import SEQ_LENGTHS
from pipecomp.distributed.collectives import while_others_wait
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.trainer import callbacks, generation, model_io
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.data_loading import SamplerBatches, SampleSource, loader_options, make_sampler, packs
from pipecomp.trainer.evaluation import select_dataset
from pipecomp.trainer.hub import HubRepository
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.optimizers import OptimizerFactories, decaying_parameters
from pipecomp.trainer.setup import PipelineSetup
from pipecomp.trainer.training import Training


@dataclass
class OptimizerCreation:
    """Results of `create_optimizer` and `create_scheduler`. again: makes another optimizer of the same kind."""

    optimizer: Any = None
    lr_scheduler: Any = None
    again: Callable[[list], Any] | None = None


class TrainerBase:
    """The methods and attributes of transformers.Trainer that do not train or evaluate.

    `PipelineTrainer` sets the attributes and makes the engine.
    """

    args: Any
    group: Any
    rank: int
    plan: SplitPlan
    replicas: int
    data_collator: Any
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    callback_handler: CallbackHandler
    control: Any
    state: Any
    _pipeline: PipelineSetup
    _holder: model_io.EngineHolder
    _loss: StepLoss
    _optimizers: OptimizerFactories
    _creation: OptimizerCreation | None  # while optimizer or schedule are made
    _training: Training | None
    _hub: HubRepository

    loss_is_scaled_for_ga: bool | None = None  # of a subclass's compute_loss, as in Trainer
    is_in_train = False
    hp_search_backend = hp_name = None
    is_deepspeed_enabled = True
    is_fsdp_enabled = is_model_parallel = False
    can_return_loss = True
    get_learning_rates = get_learning_rates
    log_metrics = log_metrics
    metrics_format = metrics_format
    save_metrics = save_metrics
    save_state = save_state

    # -- attributes

    @property
    def engine(self) -> TrainingEngine:
        """The engine, made at first use. All ranks must make the first access together."""
        raise NotImplementedError

    @property
    def model(self) -> Any:
        """This rank's stage once the engine is made; before that the original model."""
        return self._holder.model

    @property
    def model_wrapped(self) -> Any:
        """The same as `model`."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """The same as `processing_class`."""
        return self.processing_class

    @property
    def label_names(self) -> list[str]:
        """Names of the columns with labels."""
        return ["labels"]

    @property
    def hub_model_id(self) -> str | None:
        """The id of the model's repository; None before it is created."""
        return self._hub.id

    @property
    def optimizer(self) -> Any:
        """The optimizer of this rank's stage; None before the engine is made."""
        if self._creation is not None:
            return self._creation.optimizer
        return None if self._holder.engine is None else self._holder.engine.basic_optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the last training; None before the first."""
        return self.callback_handler.lr_scheduler if self._creation is None else self._creation.lr_scheduler

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trained values of the whole model."""
        return self._pipeline.trained_values

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the optimizer's group of a parameter, or without one the parameters of all groups.

        Args:
            param: A parameter of this rank's stage.
        """
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next(group for group in groups if any(p is param for p in group["params"]))

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return os.environ["LOCAL_RANK"] == "0"  # TrainingArguments has it only with a GPU or use_cpu

    def _overrides(self, name: str) -> bool:
        """Return whether a subclass or the script has replaced a method."""
        return name in self.__dict__ or getattr(type(self), name) is not getattr(TrainerBase, name)

    # -- optimizer and schedule

    get_optimizer_cls_and_kwargs = staticmethod(Trainer.get_optimizer_cls_and_kwargs)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters with weight decay, as in Trainer."""
        return decaying_parameters(model)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule of this rank's stage; a subclass may set the attributes itself.

        Args:
            num_training_steps: Optimizer steps of the training.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer of this rank's stage, or return the one that there is.

        Args:
            model: The stage; default: `model`.

        Raises:
            ConfigError: If it cannot be made.
        """
        if self._creation is None:  # a script calls it
            return self.engine.basic_optimizer
        if self._creation.optimizer is None:
            stage = self.model if model is None else model
            self._creation.optimizer, self._creation.again = self._optimizers.make_optimizer(
                self.args, stage, self.get_decay_parameter_names(stage), self.get_optimizer_cls_and_kwargs
            )
        return self._creation.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the learning-rate schedule of this rank's optimizer, or return the one that there is.

        Args:
            num_training_steps: Optimizer steps of the training.
            optimizer: The optimizer; default: `optimizer`.
        """
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        if optimizer is None:
            optimizer = self.engine.basic_optimizer if self.optimizer is None else self.optimizer
        made = self._optimizers.make_scheduler(self.args, optimizer, num_training_steps)
        if self._creation is not None:
            self._creation.lr_scheduler = made
        return made

    # -- the loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a micro-batch on the last stage, as Trainer does. Only an overriding method calls this.

        Args:
            model: Returns the logits when it is called with the inputs; the pipeline has computed them.
            inputs: Inputs of the micro-batch, with "labels".
            return_outputs: Return (loss, outputs).
            num_items_in_batch: Number of labels of the step.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self._loss.total_loss(outputs.logits, labels, num_items_in_batch)
        counted = num_items_in_batch is not None and self._takes_items
        if self.args.average_tokens_across_devices and counted and model.training:
            loss = loss * self.replicas
        return (loss, outputs) if return_outputs else loss

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """True if the model's loss uses num_items_in_batch, by Trainer's rule."""
        kind = self._pipeline.model_class
        parameters = inspect.signature(kind.forward).parameters.values()
        return bool(getattr(kind, "accepts_loss_kwargs", any(p.kind is p.VAR_KEYWORD for p in parameters)))

    @property
    def _takes_items(self) -> bool:
        return self.model_accepts_loss_kwargs or self._loss.has_function

    def _is_loss_scaled(self) -> bool:
        """Return whether a subclass's loss is divided by the labels of the whole step, by Trainer's rule."""
        return self._takes_items if self.loss_is_scaled_for_ga is None else self.loss_is_scaled_for_ga

    def _call_compute_loss(self, model: Any, inputs: dict[str, Any], items: Any, **options: Any) -> Any:
        return self.compute_loss(model, inputs, num_items_in_batch=items if self._takes_items else None, **options)

    # -- data, and the loaders that a subclass may replace

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of this replica's micro-batches in the first epoch.

        A subclass may return another DataLoader of a dataset with a length and indices. Every rank calls it, and takes
        its dataset, batches, collator and workers. Random draws of its sampler are the same on all ranks.
        """
        samples, args = self._samples(self.train_dataset, "train_dataset"), self.args
        options = {"collate_fn": samples.collate, **loader_options(args)}
        if self._overrides("_get_train_sampler"):
            sampler = self._get_train_sampler(self.train_dataset)
            size, drop = args.per_device_train_batch_size, args.dataloader_drop_last
            return DataLoader(samples.data, size, sampler=sampler, drop_last=drop, **options)
        _, replica = self._pipeline.ranks.place(self.rank)
        return DataLoader(samples.data, batch_sampler=SamplerBatches(self._make_sampler(samples, replica)), **options)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the training data; None for the order of `train_sampling_strategy`."""
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of an evaluation's micro-batches; a subclass may return another, see `get_train_dataloader`.

        Args:
            eval_dataset: As for `evaluate`.
        """
        return self._evaluation_loader(select_dataset(eval_dataset, self.eval_dataset), "eval_dataset")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return a loader of a prediction's micro-batches; a subclass may return another, see `get_train_dataloader`.

        Args:
            test_dataset: The dataset.
        """
        return self._evaluation_loader(test_dataset, "test_dataset")

    def _evaluation_loader(self, data: Any, name: str) -> DataLoader:
        samples, args = self._samples(data, name), self.args
        options = {"collate_fn": samples.collate, "drop_last": args.dataloader_drop_last, **loader_options(args)}
        return DataLoader(samples.data, args.per_device_eval_batch_size, **options)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in the dataset of one of this trainer's loaders."""
        return len(dataloader.dataset)

    def _training_samples(self) -> SampleSource:
        """Return the training data, or those of a subclass's loader."""
        if self._overrides("get_train_dataloader") or self._overrides("_get_train_sampler"):
            return SampleSource.of_loader(self.get_train_dataloader(), "get_train_dataloader")
        return self._samples(self.train_dataset, "train_dataset")

    def _samples(self, data: Any, name: str) -> SampleSource:
        """Return a dataset with the columns that the model takes. name: for errors."""
        columns = None
        if self.args.remove_unused_columns:
            taken = inspect.signature(self._pipeline.model_class.forward).parameters
            columns = [*list(taken)[1:], "label", "label_ids", "labels"]
            if packs(self.data_collator):
                columns.append(SEQ_LENGTHS)
        return SampleSource.of(data, self.data_collator, columns, name)

    def _make_sampler(self, samples: SampleSource, replica: int) -> Any:
        """Make the order of the training samples of a replica."""
        data, processing = self.train_dataset, self.processing_class
        return make_sampler(samples, self.args, data, processing, replicas=self.replicas, replica=replica)

    # -- callbacks and logs

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback, an instance or a class, on every rank.

        Raises:
            ConfigError: If it is a `CompressionCallback`; the "gradients" section configures compression instead.
        """
        callbacks.check(callback)
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, given as instance or class, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, given as instance or class."""
        self.callback_handler.remove_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to `state.log_history` and pass them to the callbacks, as Trainer does, on every rank.

        Args:
            logs: Values by name; modified.
            start_time: Start of training in seconds since the Unix epoch, for tokens per second.
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
        """Write model and tokenizer as a from_pretrained folder. Every rank must call this.

        Args:
            output_dir: `args.output_dir` by default. The folder is complete on the machine of rank 0.
            _internal_call: Do not push the model to the hub if `args.push_to_hub` is set.
        """
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        model_io.save_model(self.engine, output_dir or self.args.output_dir, self.args, processing)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the model's repository on the hub, on rank 0. A failing hub is reported in one line.

        Args:
            token: Default: `args.hub_token`.
            private: Default: `args.hub_private_repo`.
        """
        if self.rank == 0:
            self._hub.create(token, private)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Write the model to `args.output_dir` and upload that folder without checkpoints. Every rank must call this.

        A failing hub is reported in one line and does not end the run.

        Args:
            commit_message: Message of the commit.
            blocking: Wait for the upload.
            token: Default: `args.hub_token`.
            revision: Default: `args.hub_revision`.
            private: Default: `args.hub_private_repo`.
            card: As for `create_model_card`.

        Returns:
            On rank 0 huggingface_hub's commit, or a future of it without `blocking`; None on other ranks.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        name = (self.args.hub_model_id or Path(self.args.output_dir).absolute().name).split("/")[-1]
        self.create_model_card(**{"model_name": name, **card})

        def upload() -> Any:
            if self.rank != 0:
                return None
            return self._hub.upload(commit_message, token=token, revision=revision, private=private, blocking=blocking)

        return while_others_wait(upload, self.group)

    def create_model_card(self, **fields: Any) -> None:
        """Write a model card, README.md in `args.output_dir`, on rank 0.

        Args:
            fields: As for Trainer.create_model_card.
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

    # -- generation

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Generate text with the current weights. Every rank must call this; `model.generate` does the same.

        Stages keep no cache: each token evaluates its whole prefix again. To generate much, load the saved model.

        Args:
            inputs: Prompts, int64 [B, S], padded on the left.
            options: Options of transformers' `generate`: attention_mask, max_new_tokens, do_sample, num_beams, …

        Returns:
            Prompts and new tokens on every rank, int64 [B, S + new].

        Raises:
            ConfigError: If the model does not generate text, or an option returns more than tokens.

        Example:
            >>> tokens = trainer.generate(**tokenizer("Once upon", return_tensors="pt"), max_new_tokens=20)
        """
        return generation.generate(self.engine, self.group, inputs, options)


class PipelineAccelerator:
    """A trainer's ranks in the terms of accelerate.Accelerator.

    Args:
        trainer: The `PipelineTrainer`.

    Attributes:
        is_main_process, is_local_main_process: True on rank 0, and on the first rank of each machine.
        process_index, local_process_index, num_processes: This rank, its number on its machine, and their number.
        gradient_accumulation_steps: The value of `args`.
        sync_gradients: True: callbacks run between optimizer steps.
    """

    sync_gradients = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.process_index, self.num_processes = trainer.rank, trainer.world
        self.local_process_index = int(os.environ["LOCAL_RANK"])
        self.is_main_process, self.is_local_main_process = trainer.rank == 0, self.local_process_index == 0

    @property
    def device(self) -> torch.device:
        """The device of this rank's stage; before the engine is made, that of TrainingArguments."""
        engine = self._trainer._holder.engine
        device: torch.device = self._trainer.args.device if engine is None else engine.device
        return device

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self._trainer.args.gradient_accumulation_steps)

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Return loaders, models and optimizers as they are: the trainer distributes them."""
        return objects[0] if len(objects) == 1 else objects

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model: a stage is not wrapped."""
        return model

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(self._trainer.group)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*values, **options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"accelerator.{name} does not exist in a pipeline, whose engine loads data, computes and saves: use the "
            "methods of PipelineTrainer"
        )
