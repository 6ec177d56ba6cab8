"""A trainer's engine, made at first use and closed; the folder that a trained model is saved in, and its model card."""

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
from pipecomp.trainer import arguments, checkpoints
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.setup import Optimizers, Pipeline, hide_model, parameter_dtypes, show_model

TRAINING_ARGS_FILE = "training_args.bin"  # Trainer's name


class EngineHolder:
    """The engine of a trainer, one at a time, and the model that it is made of.

    Attributes:
        engine: None while none is open.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizers: Optimizers,
        loss: StepLoss,
        model: Any,
        model_init: Callable[..., Any] | None,
        taken: dict[str, Any],
    ) -> None:
        """taken: values of arguments that were used already."""
        self._pipeline, self._optimizers, self._loss = pipeline, optimizers, loss
        self._given, self._model_init = model, model_init
        self._taken = taken
        self._precision: dict[str, torch.dtype] = {}
        self._trained = self._lost = False  # lost: what was trained of a folder's model, when its engine was closed
        self.engine: TrainingEngine | None = None

    @property
    def model(self) -> Any:
        """This rank's stage, or the given model while no engine is open."""
        return self._given if self.engine is None else self.engine.stage

    def open(
        self, args: Any, processing_class: Any, fire: Callable[[str], None], tokens: Callable[[], int | None]
    ) -> TrainingEngine:
        """Make the engine; every rank must call this.

        Args:
            args: TrainingArguments.
            processing_class: Trainer's.
            fire: Called with an event's name, tells the callbacks.
            tokens: Counts those of a sample, asked where bits are measured; None where that is not known.

        Raises:
            PipecompError: Where the folder's weights would pass for those that were trained.
        """
        from pipecomp.initialization import initialize

        if self._lost:
            raise PipecompError("end() has closed the trained model: evaluate, predict and save_model come before it")
        own = not self._pipeline.settings.gradients.exchanges_in_optimizer
        show_model(self._given)
        self._precision = parameter_dtypes(self._given)
        engine = initialize(
            self._given,
            config=self._pipeline.engine_config,
            cuts=self._pipeline.plan.cuts,
            loss_fn=self._loss,
            optimizer=(self._optimizers.optimizer or arguments.optimizer_maker(args)) if own else None,
            parameter_groups=arguments.parameter_groups(args) if own else None,
            tokens=tokens() if needs_measuring(self._pipeline.settings) else None,
        )
        try:
            _check_made(engine, args)
        except ConfigError:
            engine.close()
            raise
        if arguments.checkpointing(args):
            engine.stage.gradient_checkpointing_enable(arguments.checkpointing(args, "_kwargs"))
        if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
            align_special_tokens(engine.stage, processing_class)
        # With one seed for all ranks, blocks of different stages would draw the same dropout masks.
        torch.manual_seed(args.seed * 65536 + dist.get_rank())
        _watch_optimizer(engine, fire)
        self.engine, self._taken = engine, self._taken | arguments.values(args, arguments.BY_ENGINE)
        return engine

    def hide_given(self) -> None:
        """Let the given model no longer pass for the whole one; called when training begins."""
        self._trained = True
        if self._pipeline.plan.num_stages > 1:
            hide_model(self._given, self._pipeline.plan.cuts, self._precision)

    def close(self) -> None:
        """Close the engine, if one is open."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            self._lost = self._trained and not isinstance(self._given, nn.Module)

    def begin_training(self, args: Any, checkpoint: str | None) -> None:
        """Make a new model where there is a `model_init`, as Trainer does, and put the message stores in order.

        checkpoint: whose cached activations the next engine gets, None to begin with none. Raises ConfigError for an
        argument that was changed and is not read any more.
        """
        if self._model_init is not None and self.engine is not None:
            self.close()
            set_seed(args.seed)
            self._given = make_model(self._model_init)
        named = arguments.AT_FIRST if self.engine is None else (*arguments.AT_FIRST, *arguments.BY_ENGINE)
        arguments.check_unchanged(args, {name: self._taken[name] for name in named})
        if checkpoints.needs_closed_engine(self._pipeline.settings, checkpoint):
            self.close()
        checkpoints.prepare_store(self._pipeline.settings, self.engine, checkpoint)
        self._lost = False  # a training may begin with the folder's weights, or with a checkpoint's


def make_model(model_init: Callable[..., Any]) -> Any:
    """Call Trainer's `model_init`, which may take a trial of a search: there is none. ConfigError if it makes none."""
    parameters = number_of_arguments(model_init)
    require(parameters < 2, "model_init", model_init, "a function of no argument, or of a trial")
    model = model_init(*[None] * parameters)
    require(model is not None, "model_init", None, "a function that returns a model")
    return model


def _check_made(engine: TrainingEngine, args: Any) -> None:
    """Refuse another device than the one that was asked for, and an optimizer with modes.

    Trainer switches modes for evaluation; here weights are also copied, averaged and saved between steps.
    """
    require(
        not args.use_cpu or engine.device.type == "cpu",
        "use_cpu",
        True,
        "False, or DS_ACCELERATOR=cpu in the environment: DeepSpeed was loaded",
    )
    optimizer = engine.basic_optimizer
    modes = [f"{name}()" for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
    require(
        not modes,
        "optimizers[0]",
        type(optimizer).__name__,
        f"one without {' and '.join(modes)}: weights are the same in training and evaluation",
    )


def _watch_optimizer(engine: TrainingEngine, fire: Callable[[str], None]) -> None:
    """Let callbacks see gradients before the update, clipped, and after it."""
    step = engine.optimizer.step

    def watched(_: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(engine.micro_batches - 1):  # micro-batches overlap: none ends before the next begins
            fire("on_substep_end")
        fire("on_pre_optimizer_step")
        result = step(*args, **kwargs)
        fire("on_optimizer_step")
        return result

    # A method: schedulers unwrap it.
    engine.optimizer.step = types.MethodType(watched, engine.optimizer)  # type: ignore[method-assign]


def save_model(engine: TrainingEngine, folder: str, args: Any, processing: Any) -> None:
    """Write model, tokenizer and arguments for from_pretrained; every rank must call this. processing: or None.

    Raises OutputError on every rank if one of them cannot write.
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
    """TrainingArguments as a card asks for them: as many devices as there are replicas, which share the batch."""

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
        config: The model's.
        state: The trainer's.
        data: For training and for evaluation.
        model_class: Its name.
        stages: Of the pipeline.
        replicas: Of the pipeline.
        fields: Those of Trainer.create_model_card.
    """
    model = type(model_class, (), {"config": config})()  # its class tells the task
    trainer = SimpleNamespace(
        args=_Arguments(args, replicas), model=model, state=state, train_dataset=data[0], eval_dataset=data[1]
    )
    summary = TrainingSummary.from_trainer(trainer, **fields)
    summary.hyperparameters |= {"num_devices": stages * replicas, "pipeline_stages": stages}
    (Path(args.output_dir) / "README.md").write_text(summary.to_model_card(), encoding="utf-8")
