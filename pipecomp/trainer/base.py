"""What a trainer is made of before it trains: arguments, data, callbacks, the engine, and what it saves and logs."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import enable_full_determinism, set_seed, speed_metrics
from transformers.utils import logging as transformers_logging

from pipecomp.cluster.agreement import versions
from pipecomp.config import Config
from pipecomp.errors import ConfigError
from pipecomp.recipes.run import join
from pipecomp.stages import plan
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.loading import resolve
from pipecomp.trainer import alike, arguments
from pipecomp.trainer.feeding import EvalLoader, Samples, StepLoader
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.reports import TrafficMeter


class TrainerBase:
    """Everything of `PipelineTrainer` but training and evaluating; see there for the arguments."""

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
        model_init: Callable[[], Any] | None = None,
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
    ) -> None:
        self.args = cast(Any, args if args is not None else TrainingArguments(output_dir="tmp_trainer"))
        if self.args.use_cpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported, which is below
        join(self.args)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        ranks = alike.all_ranks()
        with ranks.collective_errors():
            arguments.check(self.args)
            if (model is None) == (model_init is None):
                raise ConfigError("model", model, "a model, or a model_init that makes one; not both")
        alike.check_arguments(ranks, self.args, **versions())  # accelerate may have joined the processes, unchecked
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        transformers_logging.set_verbosity(self.args.get_process_log_level())

        self._save_messages = save_messages
        self._model_init = model_init
        self._given_model = model = model if model_init is None else model_init()
        source = resolve(model)
        self._model_class: Any = source.model_class
        self._config = arguments.engine_config(self.args, pipecomp)
        self.settings = Config.from_dict(self._config[arguments.SECTION])
        stages = num_stages if num_stages is not None or cuts is not None else self.world
        self.plan = plan(source, stages, cuts, tie=self.settings.tie)
        if self.world % self.plan.num_stages:
            allowed = f"a divisor of the {self.world} processes of this run"
            raise ConfigError("num_stages", self.plan.num_stages, allowed)
        self.replicas = self.world // self.plan.num_stages
        zero = self._config.get("zero_optimization", {})
        if zero.get("stage") == 1:  # by default a buffer of 5e8 values, whatever the model
            zero.setdefault("reduce_bucket_size", min(500_000_000, max(self.plan.parameters)))
        config = copy.deepcopy(source.config)
        config.architectures = [head_name(architecture_of(config), source.model_class)]
        self._card_config = source.config
        self._loss = StepLoss(config, self.args.label_smoothing_factor, compute_loss_func)

        self.processing_class = processing_class
        pads = processing_class is not None and isinstance(processing_class, PreTrainedTokenizerBase)
        default = DataCollatorWithPadding(processing_class) if pads else default_data_collator
        self.data_collator: Any = data_collator if data_collator is not None else default
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        if str(self.args.eval_strategy.value) != "no" and eval_dataset is None:
            raise ConfigError("eval_dataset", None, f"a dataset with eval_strategy {self.args.eval_strategy.value!r}")

        self._make_optimizer, self._make_scheduler = optimizers
        if optimizer_cls_and_kwargs is not None:
            if self._make_optimizer is not None:
                raise ConfigError("optimizer_cls_and_kwargs", optimizer_cls_and_kwargs, "None beside optimizers[0]")
            kind, options = optimizer_cls_and_kwargs
            self._make_optimizer = lambda groups: kind(groups, **options)
        for place, made in enumerate(optimizers):
            if made is not None and not callable(made):
                allowed = "None, or a callable that takes " + ("parameter groups", "the optimizer")[place]
                raise ConfigError(f"optimizers[{place}]", type(made).__name__, allowed)
        if self._make_optimizer is not None and self.settings.gradients.exchanges_in_optimizer:
            method = self.settings.gradients.method
            name = "optimizers[0]" if optimizer_cls_and_kwargs is None else "optimizer_cls_and_kwargs"
            raise ConfigError(name, optimizer_cls_and_kwargs or optimizers[0], f"None: {method!r} is the optimizer")

        self._engine: Any = None
        self._loss_group: Any = None  # averages counts of labels among replicas' last stages
        self._loader: StepLoader | None = None
        self._eval_loaders: dict[tuple[int, int], tuple[Any, EvalLoader]] = {}
        self._meter = TrafficMeter()
        self._tokens_before = 0  # num_input_tokens_seen when this training began
        self.lr_scheduler: Any = None
        reporting = get_reporting_integration_callbacks(self.args.report_to)
        self.callback_handler = CallbackHandler([*DEFAULT_CALLBACKS, *reporting], model, processing_class, None, None)
        for callback in callbacks or []:
            self.add_callback(callback)
        self.add_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        if self.rank == 0:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.control = TrainerControl()
        self.state = self._new_state()
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # -- data

    def _samples(self, data: Any, name: str) -> Samples:
        columns = None
        if self.args.remove_unused_columns:
            taken = inspect.signature(self._model_class.forward).parameters
            columns = [*taken, "label", "label_ids", "labels"]
        return Samples.of(data, self.data_collator, columns, name)

    def num_examples(self, dataloader: Any) -> int:
        """Samples of the dataset that a loader of this trainer reads, as callbacks get them."""
        return len(dataloader.dataset)

    # -- callbacks, state and logs

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback, an instance or a class. Every rank calls it, with what all ranks know."""
        from pipecomp.trainer.ddp_callback import CompressionCallback

        if isinstance(callback, CompressionCallback):
            raise ConfigError("callbacks", "CompressionCallback", "a 'gradients' section in pipecomp= instead")
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it, None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return os.environ["LOCAL_RANK"] == "0"  # TrainingArguments knows it only with a GPU or use_cpu

    def _stateful(self) -> list[Any]:
        return [cb for cb in [*self.callback_handler.callbacks, self.control] if isinstance(cb, ExportableState)]

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._stateful(),
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to `state.log_history` and hand them to the callbacks, as Trainer does; on every rank."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                count = self.state.num_input_tokens_seen - self._tokens_before
                logs.update(speed_metrics("train", start_time, num_tokens=count))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)
