"""`PipelineTrainer`: the interface of transformers.Trainer over a pipeline of stages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerControl,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_pt_utils import (
    get_learning_rates,
    log_metrics,
    metrics_format,
    save_metrics,
    save_state,
)
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from transformers.utils import logging as transformers_logging

from pipecomp.data import PackingCollator, dataset_facts
from pipecomp.data.packing import SEQ_LENGTHS
from pipecomp.distributed.collectives import while_others_wait
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import require, writable
from pipecomp.interfaces import TrainingEngine
from pipecomp.report.recorder import Recorder
from pipecomp.stages.partition.loading import with_lora
from pipecomp.trainer import arguments, callbacks, checkpoints, generation, model_io, overrides, setup
from pipecomp.trainer.accelerator import PipelineAccelerator
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.data_loading import (
    EvalLoaders,
    SamplerBatches,
    SampleSource,
    check_seeded_collator,
    data_seed,
    loader_options,
    longest_sample,
    make_sampler,
    packed_documents,
    packs,
    set_epoch,
)
from pipecomp.trainer.evaluation import Evaluation, check_ignored_keys, select_dataset
from pipecomp.trainer.hub import HubRepository
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.meters import TrainingRecorder
from pipecomp.trainer.optimizers import OptimizerFactories, StageOptimizer, check_optim, decaying_parameters
from pipecomp.trainer.training import Training, TrainingLength
from pipecomp.utils.activity import waiting_for_data

_log = transformers_logging.get_logger(__name__)
_trained_in: set[str] = set()  # output folders, by this process


@dataclass
class _Creation:
    """Results of `create_optimizer` and `create_scheduler`. again: makes another optimizer of the same kind."""

    optimizer: Any = None
    lr_scheduler: Any = None
    again: Callable[[list], Any] | None = None


class PipelineTrainer:
    """Train over a pipeline with the arguments, callbacks, logs and checkpoints of transformers.Trainer.

    Every process makes a trainer with the same arguments and data and calls the same methods; a difference raises a
    LinkError that names it. Callbacks run on every process and see its stage as `model`. Their decisions must be equal
    on all processes, as they are if based on metrics, logs and state. Training logs also have link_compression,
    link_wait_seconds, store_hit_rate and grad_compression, see `meters.TrafficMeter`. A resumed training has the same
    losses as an uninterrupted one, unless the store's backend is "memory": checkpoints do not save it, and samples are
    sent as first visits again.

    A step's loss is the mean over its labels, as in Trainer for most models. For GPT-2, Trainer divides by all S labels
    of a sample although S - 1 have a prediction; for models that ignore num_items_in_batch, such as BERT, its loss is
    the sum of the micro-batches' means. With bf16 or fp16 the model is saved in 16 bits, as DeepSpeed holds it; Trainer
    saves float32.

    Args:
        model: A folder or hub name, from which each process reads only its stage; or a Hugging Face model, which stays
            complete in every process's memory as long as the script refers to it. Each process trains its own stage of
            it, so with several stages the script's model is incomplete afterwards, and calling or saving it raises an
            error.
        args: As for Trainer. per_device_train_batch_size is the size of a micro-batch, gradient_accumulation_steps the
            number of micro-batches in an optimizer step of each replica. An argument that a pipeline does not support
            raises a ConfigError. `args.deepspeed` may be a DeepSpeed configuration with a "pipecomp" section.
        data_collator: As for Trainer.
        train_dataset: As for Trainer.
        eval_dataset: As for Trainer.
        processing_class: As for Trainer.
        model_init: As for Trainer; instead of `model`.
        compute_loss_func: As for Trainer, called with (outputs, labels, num_items_in_batch), where `outputs` has only
            logits.
        compute_metrics: As for Trainer; called on rank 0.
        callbacks: As for Trainer.
        optimizers: A new optimizer of the parameters of a model in memory, or a callable that makes one from the
            parameter groups of a stage; and a schedule of that optimizer, or a callable that makes one from it. Each
            stage gets its own. None for the defaults.
        optimizer_cls_and_kwargs: As for Trainer.
        preprocess_logits_for_metrics: As for Trainer.
        pipecomp: The "pipecomp" section as a dict, or a DeepSpeed configuration with it, a dict or a JSON file.
        num_stages: Number of stages; by default one per process.
        cuts: As for `pipecomp.initialize`.
        packing: Put samples one after another into rows instead of padding them, for models that predict tokens. The
            samples of a step, its loss and the cached activations stay those of each sample. Needs "input_ids", and
            `data_collator` makes the batch of one sample at a time; default: "labels", or the tokens themselves.
        max_length: Tokens of a packed row; None for as many as the longest sample of a micro-batch has.
        save_messages: Copy the message store into every checkpoint.
        report: Write report.html into `args.output_dir` after training, see docs/report.md. Its data files are always
            written.
        save_on_signal: After SIGTERM or Ctrl-C end `train` on all ranks after the current step, write a checkpoint to
            `args.output_dir` for resume_from_checkpoint=True, and exit with status 75.
        peft_config: A `peft.LoraConfig`: train a new adapter of the model, with the start that peft draws after
            `set_seed(args.seed)`.
        overwrite: Let a new training start in an `args.output_dir` that has checkpoints or a model of another program's
            training, and delete those checkpoints; otherwise it is an error. Trainings of one program may follow each
            other there.

    Attributes:
        engine: The `pipecomp.PipelineEngine`.
        model: This rank's stage once the engine is made; before that the original model.
        state, control, callback_handler, accelerator: As in Trainer.
        optimizer, lr_scheduler: Of this rank's stage.

    A subclass may override Trainer's methods in `overrides.OVERRIDABLE`: compute_loss runs on the last stage,
    create_optimizer and create_scheduler on every stage, get_train_dataloader on every rank.

    Raises:
        ConfigError: If an argument is wrong, or a subclass overrides another method of Trainer.
        SplitError: If the model cannot be partitioned.
        LinkError: If ranks differ, or cannot reach each other.

    Example:
        A script started by deepspeed or torchrun with one process per stage::

            trainer = PipelineTrainer(model="gpt2", args=args, train_dataset=..., pipecomp={"activations": {...}})
            trainer.train()
            trainer.save_model("trained")
    """

    uses_deepspeed_optimizer = False
    arguments_class = "TrainingArguments"
    sequences_per_sample = 1  # of the model, for each sample of the datasets
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
        packing: bool = False,
        max_length: int | None = None,
        save_messages: bool = True,
        report: bool = True,
        save_on_signal: bool = True,
        peft_config: Any = None,
        overwrite: bool = False,
    ) -> None:
        arguments.check_class(args, self.arguments_class)
        self.args = cast(Any, args if args is not None else TrainingArguments(output_dir="tmp_trainer"))
        self.group = setup.join(self.args, model, model_init, pipecomp)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        with all_ranks().collective_errors():
            model = model if model_init is None else model_io.make_model(model_init)
            if peft_config is not None:
                require(model_init is None, "peft_config", peft_config, "None with model_init, which adds the adapter")
                model = with_lora(model, peft_config, self.args.seed)
        self._pipeline = setup.PipelineSetup.of(
            self.args,
            model,
            pipecomp,
            num_stages,
            cuts,
            complete_config=self.uses_deepspeed_optimizer,
            sequences=self.sequences_per_sample,
            save_messages=save_messages,
        )
        self.settings, self.plan, self.replicas = self._pipeline.settings, self._pipeline.plan, self._pipeline.replicas
        self.flos_per_token = self._pipeline.flos_per_token
        self._loss = self._make_loss(model, compute_loss_func)
        if self._overrides("compute_loss"):
            self._loss.use_method(self._call_compute_loss, self._pipeline.model_class, self._is_loss_scaled)
        if not self.uses_deepspeed_optimizer:
            check_optim(self.args, flat=self._pipeline.flattens_parameters)
        self._optimizers = OptimizerFactories.of(optimizers, optimizer_cls_and_kwargs, model, self.settings)
        self._report, self._save_on_signal, self._overwrite = report, save_on_signal, overwrite

        self.processing_class = processing_class
        pads = processing_class is not None and isinstance(processing_class, PreTrainedTokenizerBase)
        default = DataCollatorWithPadding(processing_class) if pads else default_data_collator
        self.data_collator: Any = data_collator if data_collator is not None else default
        require(packing or max_length is None, "max_length", max_length, "None without packing")
        if packing:
            require(not packs(data_collator), "packing", True, "False with a data_collator that packs")
            self.data_collator = PackingCollator(data_collator, max_length, causal=self._loss.causal)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        require(
            str(self.args.eval_strategy.value) == "no" or eval_dataset is not None,
            "eval_dataset",
            None,
            f"a dataset with eval_strategy {self.args.eval_strategy.value!r}",
        )

        used = arguments.values(self.args, arguments.READ_BY_TRAINER)
        self._holder = model_io.EngineHolder(
            self._pipeline,
            self._optimizers.scheduler,
            self._loss,
            model,
            model_init,
            used,
            deepspeed_optimizer=self.uses_deepspeed_optimizer,
        )
        self._creation: _Creation | None = None  # while optimizer or schedule are made
        self._schedule: Any = None  # of create_optimizer_and_scheduler, until a training uses it
        self._eval_loaders = EvalLoaders()
        self._training: Training | None = None
        self.accelerator = PipelineAccelerator(self)
        if self.rank == 0:
            arguments.report_ignored(self.args)
        self._hub = HubRepository(self.args)
        if self.args.push_to_hub:
            self.init_hf_repo()
        self._start_callbacks(model, callbacks or [])

    def _start_callbacks(self, model: Any, user_callbacks: list[Any]) -> None:
        self.callback_handler = callbacks.default_handler(self.args, model, self.processing_class)
        for callback in [*user_callbacks, callbacks.progress_callback(self.args)]:
            self.add_callback(callback)
        with all_ranks().collective_errors(), writable("output_dir", self.args.output_dir):
            if self.rank == 0:
                Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.control = TrainerControl()
        self.state = callbacks.new_state(self)
        fire(self, "on_init_end")

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        overrides.check_subclass(cls, PipelineTrainer)

    def __setattr__(self, name: str, value: Any) -> None:
        creation = self.__dict__.get("_creation")
        if creation is not None and name in ("optimizer", "lr_scheduler"):
            setattr(creation, name, value)
            return
        overrides.check_attribute(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise overrides.missing_attribute(self, name)

    def _overrides(self, name: str) -> bool:
        """Return whether a subclass or the script has replaced a method."""
        return name in self.__dict__ or getattr(type(self), name) is not getattr(PipelineTrainer, name)

    # -- the engine

    @property
    def engine(self) -> TrainingEngine:
        """The engine, made at first use. All ranks must make the first access together."""
        if self._holder.engine is None:
            maker = StageOptimizer(self.args, self._create_stage_optimizer, self.settings)
            engine = self._holder.open(
                self.args, self.processing_class, partial(fire, self), self._sample_tokens, maker
            )
            engine.stage.__dict__["generate"] = self.generate
            self._loss.stage = engine.stage
            self.callback_handler.model, self.callback_handler.optimizer = engine.stage, engine.optimizer
            return engine
        return self._holder.engine

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

    def _create_stage_optimizer(self) -> tuple[Any, Any]:
        """Return the optimizer of the stage that is being built, and a function for another one of its kind."""
        creation = self._creation = _Creation()
        try:
            if self._overrides("create_optimizer_and_scheduler"):
                self.create_optimizer_and_scheduler(num_training_steps=self._count_steps())
                self._schedule = creation.lr_scheduler
            else:
                made = self.create_optimizer()
                creation.optimizer = made if creation.optimizer is None else creation.optimizer
            return creation.optimizer, creation.again
        finally:
            self._creation = None

    def _create_schedule(self, max_steps: int) -> Any:
        """Return a new schedule for the optimizer of the open engine."""
        if self._overrides("create_optimizer_and_scheduler"):
            schedule, self._schedule = self._schedule, None
            hint = "It makes the optimizer, whose schedule has ended: make a new trainer, or override create_scheduler."
            require(schedule is not None, "create_optimizer_and_scheduler", "a second training", "one training", hint)
            return schedule
        creation = self._creation = _Creation(optimizer=self.engine.basic_optimizer)
        try:
            made = self.create_scheduler(num_training_steps=max_steps)
            return creation.lr_scheduler if made is None else made
        finally:
            self._creation = None

    def _count_steps(self) -> int:
        """Return the optimizer steps of a training from its beginning; 1 without training data."""
        own_loader = self._overrides("get_train_dataloader")
        if self.train_dataset is None and not own_loader:
            return max(1, self.args.max_steps)
        sampler = self._make_sampler(self._training_samples(), 0)
        return self._training_length(sampler.per_epoch).max_steps

    # -- the loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a micro-batch on the last stage, as Trainer does. Only an overriding method calls this.

        Args:
            model: Returns the logits when it is called with the inputs; the pipeline has computed them.
            inputs: Of the micro-batch, with "labels".
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

    def end(self) -> None:
        """Flush the stores and close the connections; otherwise this happens when the program ends.

        The trained weights of a folder's model are lost, so save it before.
        """
        self._holder.close()

    # -- training, evaluation, prediction

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train. Every rank must call this.

        Message stores start empty, or with those of a checkpoint of the same pipeline.

        Args:
            resume_from_checkpoint: A folder, or True for the last undamaged checkpoint in `args.output_dir`. Its
                numbers of stages and replicas may differ, see `PipelineEngine.load_checkpoint`.
            trial: Trainer's argument; must be None.
            ignore_keys_for_eval: Trainer's argument; must be None.

        Returns:
            Steps, mean loss and metrics, as Trainer does.

        Raises:
            ConfigError: If an argument is wrong, or there is no checkpoint.
            DataError: If the dataset is wrong.
            LinkError: On every rank, if ranks have different arguments or data.
            Interrupted: SystemExit, on every rank, after SIGTERM or Ctrl-C; see `save_on_signal`.
        """
        ranks = all_ranks()
        with ranks.collective_errors():
            arguments.check(self.args)  # the script may have changed them
            require(trial is None, "trial", trial, "None: the trainer does not search hyperparameters")
            check_ignored_keys("ignore_keys_for_eval", ignore_keys_for_eval)
            samples = self._training_samples()
            set_epoch(samples.data, 0)  # an earlier training may have set another one, and facts are compared
            facts = self._facts(samples, self.args.per_device_train_batch_size, "train_dataset")
            if samples.loader is not None:
                own = not isinstance(self.data_collator, PackingCollator)
                require(own, "packing", True, "False with get_train_dataloader or _get_train_sampler of a subclass")
                order = self._make_sampler(samples, 0)
                facts["order of the training loader (digest)"] = getattr(order, "digest", "")
        resumes = bool(resume_from_checkpoint) if resume_from_checkpoint in (None, True, False) else "from a folder"
        more = {"resumes": resumes, "save_on_signal": self._save_on_signal, "packing": packs(self.data_collator)}
        setup.check_equal_arguments(ranks, self.args, **facts, **more)
        resume_point = self._prepare_training(resume_from_checkpoint)
        self.engine.data_facts = facts if samples.sample_id is int else {}
        self._allow_packing(samples, self.args.per_device_train_batch_size)
        self._training = Training(
            self,
            samples,
            resume_point,
            loss=self._loss,
            report=self._report,
            save_on_signal=self._save_on_signal,
        )
        self._holder.hide_original()
        self.is_in_train = True
        try:
            output = self._training.run()
        finally:
            self.is_in_train = False
        if self.args.push_to_hub:
            self.push_to_hub()
        return output

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate one or several datasets. Every rank must call this.

        Args:
            eval_dataset: A dataset, a dict of datasets, or a name in the trainer's dict of datasets. None for the
                trainer's own.
            ignore_keys: None or empty: the only output is logits.
            metric_key_prefix: Prefix of the metrics' names.

        Returns:
            The metrics, the same on every rank. `compute_metrics` is called on rank 0.

        Raises:
            ConfigError: If a name is unknown, or there are keys to ignore.
            DataError: If a dataset is wrong.
            LinkError: On every rank, if ranks have different arguments or data.
        """
        check_ignored_keys("ignore_keys", ignore_keys)
        chosen = select_dataset(eval_dataset, self.eval_dataset)
        if isinstance(chosen, dict) and "input_ids" not in chosen:  # a dict with input_ids is one dataset by columns
            out: dict[str, float] = {}
            without = [name for name, data in chosen.items() if data is None]  # None would evaluate all of them again
            require(not without, "eval_dataset", f"None for {without}", "a dataset for each name")
            for name, data in chosen.items():
                out |= self.evaluate(data, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return out
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        metrics = self._run_evaluation(chosen, "eval_dataset", metric_key_prefix, loss_only, arrays=False).metrics or {}
        metrics |= self._derived_metrics(metrics)
        self.log(metrics)
        fire(self, "on_evaluate", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset with or without labels. Every rank must call this.

        Args:
            test_dataset: The dataset.
            ignore_keys: None or empty: the only output is logits.
            metric_key_prefix: Prefix of the metrics' names.

        Returns:
            Logits, labels and metrics of all samples, in the dataset's order, on every rank.

        Raises:
            ConfigError: If there are keys to ignore.
            DataError: If the dataset is wrong.
            LinkError: On every rank, if ranks have different arguments or data.
        """
        check_ignored_keys("ignore_keys", ignore_keys)
        output = self._run_evaluation(
            test_dataset, "test_dataset", metric_key_prefix, self.args.prediction_loss_only, arrays=True
        )
        fire(self, "on_predict", output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _run_evaluation(self, data: Any, name: str, prefix: str, loss_only: bool, *, arrays: bool) -> EvalLoopOutput:
        ranks = all_ranks()
        with ranks.collective_errors():
            method = "get_test_dataloader" if name == "test_dataset" else "get_eval_dataloader"
            if self._overrides(method):
                samples = SampleSource.of_loader(getattr(self, method)(data), method)
            else:
                samples = self._samples(data, name)
            facts = self._facts(samples, self.args.per_device_eval_batch_size, name)
        setup.check_equal_arguments(ranks, self.args, **facts)
        engine = self.engine
        loader = self._eval_loaders.of(
            data,
            samples,
            self.args,
            replicas=self.replicas,
            replica=engine.grid.data_parallel_id,
            sequences=self.sequences_per_sample,
        )
        engine.allow_evaluation(max(loader.largest, self.args.per_device_eval_batch_size * self.sequences_per_sample))
        self._allow_packing(samples, self.args.per_device_eval_batch_size)
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

    def _facts(self, samples: SampleSource, micro_batch: int, name: str) -> dict[str, Any]:
        """Return the facts of a dataset that ranks compare. DataError if stages would make different batches of it."""
        with waiting_for_data(samples.data):
            if self.plan.num_stages > 1:
                check_seeded_collator(samples, micro_batch, data_seed(self.args), name)
            return dataset_facts(samples.data, name)

    def _allow_packing(self, samples: SampleSource, micro_batch: int) -> None:
        """Check that every stage keeps packed samples apart, and allow as many as micro-batches have."""
        if not packs(self.data_collator):
            return
        with all_ranks().collective_errors():
            self.engine.stage.check_packing()
            documents = packed_documents(samples.data)
        if documents is not None:
            self.engine.allow_documents(documents * micro_batch)

    def _sample_tokens(self) -> int | None:
        """Return the tokens of a training sample; None without training data."""
        if self.train_dataset is None:
            return None
        with waiting_for_data(self.train_dataset):
            return longest_sample(self._training_samples(), data_seed(self.args))

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

    # -- loaders for scripts, and for subclasses that replace them

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

    # -- what a subclass that runs a whole program, as recipes do, replaces

    def _make_loss(self, model: Any, own: Callable[..., Any] | None) -> StepLoss:
        """Make the loss of the engine."""
        pipeline = self._pipeline
        return StepLoss.of(pipeline.model_config, pipeline.model_class, model, self.args.label_smoothing_factor, own)

    def _make_sampler(self, samples: SampleSource, replica: int) -> Any:
        """Make the order of the training samples of a replica."""
        data, processing = self.train_dataset, self.processing_class
        return make_sampler(samples, self.args, data, processing, replicas=self.replicas, replica=replica)

    def _training_length(self, per_epoch: int) -> TrainingLength:
        """Return the length of the training. per_epoch: micro-batches of one replica."""
        return TrainingLength.of(self.args, per_epoch)

    def _length_from(self, length: TrainingLength, step: int, number: int) -> TrainingLength:
        """Return the length of a training whose step `step` starts with micro-batch `number`."""
        return length.beginning_at(step, number, self.args)

    def _prepare_training(self, resume: str | os.PathLike | bool | None) -> checkpoints.ResumePoint | None:
        """Find the checkpoint to resume from, and clear the message stores."""
        layout = checkpoints.layout(self.plan, self.replicas)
        resume_point = checkpoints.find(resume, self.args.output_dir, layout, self.group)
        folder = os.path.realpath(self.args.output_dir)
        if resume_point is None and folder not in _trained_in:
            if self._overwrite:
                checkpoints.remove_after(self.args.output_dir, 0, self.group)
            else:
                checkpoints.check_unused(self.args.output_dir, self.group)
        _trained_in.add(folder)
        if resume_point is not None:
            arguments.check_kept(self.args, resume_point.run.get("arguments", {}))
        self._holder.prepare_training(self.args, resumes=resume_point is not None)
        return resume_point

    def _load_checkpoint(self, resume_point: checkpoints.ResumePoint) -> checkpoints.ResumePoint:
        """Load the engine's state; returns the checkpoint with its pending work."""
        checkpoints.load_engine(self.engine, resume_point, self.lr_scheduler)
        return resume_point

    def _write_checkpoint(self, *, count: Callable[[], Any], due: Sequence[str]) -> bool:
        """Write a checkpoint of the last step; returns whether it was written. Arguments as `write_checkpoint`."""
        return checkpoints.write_checkpoint(self, count=count, due=due)

    def _checkpoint_folder(self) -> str:
        """Return the folder of the checkpoints."""
        return str(self.args.output_dir)

    def _write_model(self, folder: str) -> None:
        """Write the model into a checkpoint."""
        self.save_model(folder, _internal_call=True)

    def _run_settings(self) -> dict[str, Any]:
        """Return the settings of the run, which a checkpoint records, as JSON values."""
        return {"arguments": arguments.kept(self.args)}

    def _start_recorder(self) -> tuple[Recorder, dict[str, Any]]:
        """Open the run's folder. Returns its recorder and facts for run.json, with the unit of speed."""
        folder = self.args.output_dir if self.rank == 0 else None
        return Recorder(folder, after=self.state.global_step), {"kind": "trainer", "unit": "samples"}

    def _record_evaluation(self, recording: TrainingRecorder, metrics: dict[str, float]) -> None:
        """Record the metrics of an evaluation during training."""
        if "eval_loss" in metrics:
            recording.evaluated(self.state.global_step, {"loss": metrics["eval_loss"]})

    def _derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return further metrics of an evaluation."""
        return {}

    def _training_metrics(self, tokens: int, real_tokens: int) -> dict[str, float]:
        """Return further values to log; every rank calls this. tokens, real_tokens: of `StepLoader`, all replicas."""
        return {}

    def _report_step(self, record: Mapping[str, Any], stats: Sequence[Mapping[str, Any]]) -> None:
        """Report a recorded step. stats: all ranks' counters; empty if not gathered."""

    def _take_errors(self) -> list[str]:
        """Return errors of outputs without which training continues; every rank prints them."""
        return []

    def _report_interruption(self, reason: str, *, saved: bool) -> None:
        """Report that training stops after this step. saved: with a checkpoint."""
        remedy = "resume_from_checkpoint=True continues" + ("" if saved else " from an earlier checkpoint, if any")
        _log.warning("stopped after step %d: %s; %s", self.state.global_step, reason, remedy)

    def _save_results(self) -> None:
        """Write what the program saves after the last step, before the last counters are gathered."""

    def _report_end(self, page: str | None, stats: Sequence[Mapping[str, Any]]) -> None:
        """Report the end of the training. page: see `TrainingRecorder.end`."""

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

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return os.environ["LOCAL_RANK"] == "0"  # TrainingArguments has it only with a GPU or use_cpu

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
            commit_message: Of the commit.
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

    # -- generation

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Generate text with the current weights. Every rank must call this; `model.generate` does the same.

        Stages keep no cache: each token evaluates its whole prefix again. To generate much, load the saved model.

        Args:
            inputs: Prompts, int64 [B, S], padded on the left.
            options: Of transformers' `generate`: attention_mask, max_new_tokens, do_sample, num_beams, …

        Returns:
            Prompts and new tokens on every rank, int64 [B, S + new].

        Raises:
            ConfigError: If the model does not generate text, or an option returns more than tokens.

        Example:
            >>> tokens = trainer.generate(**tokenizer("Once upon", return_tensors="pt"), max_new_tokens=20)
        """
        return generation.generate(self.engine, self.group, inputs, options)

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
