"""The trainer's engine and its lifetime; saving the model; the model card."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.modelcard import TrainingSummary
from transformers.processing_utils import ProcessorMixin
from transformers.trainer_utils import align_special_tokens, number_of_arguments, set_seed

from pipecomp.checkpoint.writing import CollectiveModelWrite, write_state
from pipecomp.errors import ConfigError, PipecompError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.plan.auto_bits import needs_measuring
from pipecomp.trainer import arguments, checkpoints, stage_options
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.optimizers import StageOptimizer
from pipecomp.trainer.setup import PipelineSetup, disable_model, enable_model, parameter_dtypes

TRAINING_ARGS_FILE = "training_args.bin"  # Trainer's name


class UnloadedModel(str):
    """The name of a model of which no stage is loaded yet, with its `config`."""

    config: Any

    def __new__(cls, name: str | os.PathLike, config: Any) -> UnloadedModel:
        """Name a folder or a model on the hub, with its configuration."""
        made = super().__new__(cls, os.fspath(name))
        made.config = config
        return made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"model.{name}: no stage is loaded yet; trainer.engine, on every rank, loads this one's")


class EngineHolder:
    """The model of a trainer and the engine that is made from it.

    Attributes:
        engine: The open engine, or None.
        stage: This rank's stage while its engine is made, or None.
    """

    def __init__(
        self,
        pipeline: PipelineSetup,
        scheduler: Callable[[Any], Any] | None,
        loss: StepLoss,
        model: Any,
        model_init: Callable[..., Any] | None,
        used: dict[str, Any],
        *,
        deepspeed_optimizer: bool = False,
    ) -> None:
        """used: values of arguments that the trainer has read. scheduler: for an optimizer that DeepSpeed makes."""
        self._deepspeed_optimizer = deepspeed_optimizer
        self._pipeline, self._scheduler, self._loss = pipeline, scheduler, loss
        self._original, self._model_init = model, model_init
        self._used = used
        self._precision: dict[str, torch.dtype] = {}
        self._trained = self._lost = False  # lost: the engine with the trained weights of a folder's model is closed
        self.engine: TrainingEngine | None = None
        self.stage: Any = None
        self._remove_options: Callable[[], None] = lambda: None

    @property
    def model(self) -> Any:
        """This rank's stage, or the original model while no engine is open."""
        if self.engine is not None:
            return self.engine.stage
        if self.stage is not None:
            return self.stage
        unloaded = isinstance(self._original, (str, os.PathLike))
        return UnloadedModel(self._original, self._pipeline.model_config) if unloaded else self._original

    def open(
        self,
        args: Any,
        processing_class: Any,
        fire: Callable[[str], None],
        tokens: Callable[[], int | None],
        optimizer: StageOptimizer,
    ) -> TrainingEngine:
        """Make the engine. Every rank must call this.

        Args:
            args: TrainingArguments.
            processing_class: Trainer's argument.
            fire: Calls the callbacks of an event, given its name.
            tokens: Returns the tokens of a sample, or None if unknown. Called only if bits are measured.
            optimizer: Makes the stage's optimizer; not called if DeepSpeed makes it.

        Raises:
            PipecompError: After `end()` on a trained model, because the folder has untrained weights.
        """
        from pipecomp.initialization import initialize

        if self._lost:
            raise PipecompError("end() has closed the trained model: call evaluate, predict and save_model before it")
        own = not self._pipeline.settings.gradients.exchanges_in_optimizer and not self._deepspeed_optimizer
        enable_model(self._original)
        self._precision = parameter_dtypes(self._original)

        def groups(stage: Any) -> list[dict[str, Any]]:
            self.stage = stage
            return optimizer.groups(stage)

        try:
            engine = initialize(
                self._original,
                config=self._pipeline.engine_config,
                cuts=self._pipeline.plan.cuts,
                loss_fn=self._loss,
                optimizer=optimizer.make if own else None,
                lr_scheduler=self._scheduler if self._deepspeed_optimizer else None,
                parameter_groups=groups if own else None,
                tokens=tokens() if needs_measuring(self._pipeline.settings) else None,
            )
        finally:
            self.stage = None
        try:
            _check_device(engine, args)
            self._remove_options = stage_options.apply(engine.stage, args)
        except ConfigError:
            engine.close()
            raise
        if arguments.checkpointing(args):
            engine.stage.gradient_checkpointing_enable(arguments.checkpointing(args, "_kwargs"))
        if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
            align_special_tokens(engine.stage, processing_class)
        # Note: the seed differs by rank, because with equal seeds all stages would draw the same dropout masks.
        torch.manual_seed(args.seed * 65536 + dist.get_rank())
        _watch_optimizer(engine, fire)
        self.engine, self._used = engine, self._used | arguments.values(args, arguments.READ_BY_ENGINE)
        return engine

    def hide_original(self) -> None:
        """Disable the original model, which is incomplete once training begins."""
        self._trained = True
        if self._pipeline.plan.num_stages > 1:
            disable_model(self._original, self._pipeline.plan.cuts, self._precision)

    def close(self) -> None:
        """Close the engine, if one is open."""
        if self.engine is not None:
            self._remove_options()
            self.engine.stage.__dict__.pop("generate", None)
            self.engine.close()
            self.engine = None
            self._lost = self._trained and not isinstance(self._original, nn.Module)

    def prepare_training(self, args: Any, *, resumes: bool, clear_stores: bool = True) -> None:
        """Call `model_init`, if there is one, for a new model as Trainer does, and clear the message stores.

        resumes: the training resumes from a checkpoint. Raises ConfigError if an argument changed after its last use.
        """
        if self._model_init is not None and self.engine is not None:
            self.close()
            set_seed(args.seed)
            self._original = make_model(self._model_init)
        names = (
            arguments.READ_BY_TRAINER
            if self.engine is None
            else (*arguments.READ_BY_TRAINER, *arguments.READ_BY_ENGINE)
        )
        arguments.check_unchanged(args, {name: self._used[name] for name in names})
        if clear_stores:
            number = self._pipeline.ranks.state_number(dist.get_rank())
            checkpoints.prepare_store(self._pipeline.settings, self.engine, number, resumes=resumes)
        self._lost = False  # a new training starts from the folder's weights or a checkpoint's


def make_model(model_init: Callable[..., Any]) -> Any:
    """Call Trainer's `model_init`, with None for a trial. ConfigError if it returns no model."""
    parameters = number_of_arguments(model_init)
    require(parameters < 2, "model_init", model_init, "a function of no argument, or of a trial")
    model = model_init(*[None] * parameters)
    require(model is not None, "model_init", None, "a function that returns a model")
    return model


def _check_device(engine: TrainingEngine, args: Any) -> None:
    require(
        not args.use_cpu or engine.device.type == "cpu",
        "use_cpu",
        True,
        "False, or set DS_ACCELERATOR=cpu in the environment: DeepSpeed is already loaded",
    )


def _watch_optimizer(engine: TrainingEngine, fire: Callable[[str], None]) -> None:
    """Wrap the optimizer's step to fire Trainer's events. Gradients are clipped when on_pre_optimizer_step fires."""
    step = engine.optimizer.step

    def watched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # as torch's schedulers note it, which do not wrap this function, or they warn
        for _ in range(engine.micro_batches - 1):  # fired together, because micro-batches overlap in time
            fire("on_substep_end")
        fire("on_pre_optimizer_step")
        result = step(*args, **kwargs)
        fire("on_optimizer_step")
        return result

    watched._wrapped_by_lr_sched = hasattr(step, "_wrapped_by_lr_sched")  # type: ignore[attr-defined]  # or it warns
    # A bound method, because schedulers unwrap it.
    engine.optimizer.step = types.MethodType(watched, engine.optimizer)  # type: ignore[method-assign]


def save_model(engine: TrainingEngine, folder: str, args: Any, processing: Any) -> None:
    """Write model, tokenizer and arguments as a from_pretrained folder. Every rank must call this.

    processing: tokenizer or processor, or None. Raises OutputError on every rank if one cannot write.
    """
    engine.save_pretrained(folder)
    attempts = CollectiveModelWrite(folder)
    if dist.get_rank() == 0:
        if processing is not None:
            attempts.attempt(lambda: processing.save_pretrained(folder))
        attempts.attempt(lambda: write_state(args, os.path.join(folder, TRAINING_ARGS_FILE)))
    attempts.raise_problems()


# -- the model card


class _Arguments:
    """TrainingArguments with the number of replicas as world size, which gives the card the total batch size."""

    def __init__(self, args: Any, replicas: int) -> None:
        self._args, self.world_size = args, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def write_card(
    args: Any,
    config: Any,
    state: Any,
    data: tuple[Any, Any],
    *,
    model_class: str,
    stages: int,
    replicas: int,
    **fields: Any,
) -> None:
    """Write README.md into `args.output_dir`.

    Args:
        args: TrainingArguments.
        config: The model's configuration.
        state: The trainer's state.
        data: The datasets for training and evaluation.
        model_class: The name of the model's class.
        stages: Number of pipeline stages.
        replicas: Number of pipeline replicas.
        fields: As for Trainer.create_model_card.
    """
    model = type(model_class, (), {"config": config})()  # the class name determines the card's task
    trainer = SimpleNamespace(
        args=_Arguments(args, replicas), model=model, state=state, train_dataset=data[0], eval_dataset=data[1]
    )
    summary = TrainingSummary.from_trainer(trainer, **fields)
    summary.hyperparameters |= {"num_devices": stages * replicas, "pipeline_stages": stages}
    (Path(args.output_dir) / "README.md").write_text(summary.to_model_card(), encoding="utf-8")
