"""`PipelineTrainer`: training, evaluation and prediction with transformers.Trainer's interface over a pipeline.

`train` checks arguments and data; the loop over epochs and steps is `Training.run` in `pipecomp.trainer.training`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput
from transformers.utils import logging as transformers_logging

from pipecomp.data import PackingCollator, dataset_facts
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import require, writable
from pipecomp.interfaces import TrainingEngine
from pipecomp.report.recorder import Recorder
from pipecomp.stages.partition.loading import with_lora
from pipecomp.trainer import arguments, callbacks, checkpoints, model_io, overrides, setup
from pipecomp.trainer.base import OptimizerCreation, PipelineAccelerator, TrainerBase
from pipecomp.trainer.callbacks import fire
from pipecomp.trainer.data_loading import (
    EvalLoaders,
    SampleSource,
    check_seeded_collator,
    data_seed,
    longest_sample,
    packed_documents,
    packs,
    set_epoch,
)
from pipecomp.trainer.evaluation import Evaluation, check_ignored_keys, select_dataset
from pipecomp.trainer.hub import HubRepository
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.meters import TrainingRecorder
from pipecomp.trainer.optimizers import OptimizerFactories, StageOptimizer, check_optim
from pipecomp.trainer.training import Training, TrainingLength
from pipecomp.utils.activity import waiting_for_data

_log = transformers_logging.get_logger(__name__)
_trained_in: set[str] = set()  # output folders, by this process


class PipelineTrainer(TrainerBase):
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
        optimizer, lr_scheduler: Optimizer and schedule of this rank's stage.

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
        self.args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
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
        self.data_collator = data_collator if data_collator is not None else default
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
        self._creation = None
        self._schedule: Any = None  # of create_optimizer_and_scheduler, until a training uses it
        self._eval_loaders = EvalLoaders()
        self._training = None
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

    def _create_stage_optimizer(self) -> tuple[Any, Any]:
        """Return the optimizer of the stage that is being built, and a function for another one of its kind."""
        creation = self._creation = OptimizerCreation()
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
        creation = self._creation = OptimizerCreation(optimizer=self.engine.basic_optimizer)
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

    # -- what a subclass that runs a whole program, as recipes do, replaces

    def _make_loss(self, model: Any, own: Callable[..., Any] | None) -> StepLoss:
        """Make the loss of the engine."""
        pipeline = self._pipeline
        return StepLoss.of(pipeline.model_config, pipeline.model_class, model, self.args.label_smoothing_factor, own)

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
