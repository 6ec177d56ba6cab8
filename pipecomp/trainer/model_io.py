"""A trainer's engine: made at first use, with the checkpoint's messages in its stores, and saved."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, align_special_tokens, set_seed
from transformers.utils import logging as transformers_logging

from pipecomp.errors import ConfigError
from pipecomp.trainer import arguments, checkpoints
from pipecomp.trainer.base import TrainerBase
from pipecomp.trainer.cards import write_card

TRAINING_ARGS_FILE = "training_args.bin"  # Trainer's name

_log = transformers_logging.get_logger(__name__)


class EngineTrainer(TrainerBase):
    """A trainer with an engine that can be saved."""

    # -- the engine

    @property
    def engine(self) -> Any:
        """The engine, made at first use: all ranks must come here together the first time."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    @property
    def model(self) -> Any:
        """This rank's stage once the engine is made; before that the model as it was given."""
        return self._given_model if self._engine is None else self._engine.stage

    @property
    def optimizer(self) -> Any:
        """The engine's, None before it is made."""
        return None if self._engine is None else self._engine.optimizer

    def _new_model(self) -> None:
        """As Trainer does it with model_init: every training begins with a model of its own."""
        if self._model_init is not None and self._engine is not None:
            self._close_engine()
            set_seed(self.args.seed)
            self._given_model = self._model_init()

    def _make_engine(self) -> Any:
        from pipecomp.engine.initialize import initialize

        args, own = self.args, not self.settings.gradients.exchanges_in_optimizer
        engine = initialize(
            self._given_model,
            config=self._config,
            cuts=self.plan.cuts,
            loss_fn=self._loss,
            optimizer=(self._make_optimizer or arguments.optimizer_maker(args)) if own else None,
            parameter_groups=arguments.parameter_groups(args) if own else None,
        )
        if args.use_cpu and engine.device.type != "cpu":
            raise ConfigError("use_cpu", True, "False, or DS_ACCELERATOR=cpu in the environment: DeepSpeed was loaded")
        if args.gradient_checkpointing:
            engine.stage.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        if isinstance(self.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
            align_special_tokens(engine.stage, self.processing_class)
        # Otherwise blocks of different stages would draw the same dropout masks.
        torch.manual_seed(args.seed * 65536 + self.rank)
        self._watch(engine)
        self.callback_handler.model, self.callback_handler.optimizer = engine.stage, engine.optimizer
        self._loss_group = engine.grid.get_data_parallel_group() if self.replicas > 1 else None
        return engine

    def _watch(self, engine: Any) -> None:
        """Let callbacks see gradients before the update, clipped, and after it."""
        step = engine.optimizer.step

        def watched(_: Any, *args: Any, **kwargs: Any) -> Any:
            for _ in range(engine.micro_batches - 1):  # micro-batches overlap: none ends before the next begins
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            result = step(*args, **kwargs)
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
            return result

        engine.optimizer.step = types.MethodType(watched, engine.optimizer)  # a method: schedulers unwrap it

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def end(self) -> None:
        """Finish the stores and end the connections in order; without it that is done when the program ends."""
        self._close_engine()

    def _start_engine(self, checkpoint: str | None) -> None:
        """An engine whose message stores are the checkpoint's, or empty."""
        if self.settings.activations.method != "aqsgd":
            return
        if self.settings.store.backend == "memory":
            if self._engine is not None:
                self._drop_messages()
            if checkpoint is not None:
                _log.warning("messages in memory are not saved: every sample is sent whole once more")
            return
        store = self.settings.store.path
        if checkpoint is not None:
            self._close_engine()
            if not checkpoints.restore_messages(checkpoint, store):
                checkpoints.forget_messages(store)  # what is held is newer than the checkpoint, or of another run
                _log.warning(f"{checkpoint} has no messages of rank {self.rank}: every sample is sent whole once more")
        elif self._engine is None:
            checkpoints.forget_messages(store)
        else:
            self._drop_messages()

    def _drop_messages(self) -> None:
        links = self.engine.links
        for end in links:
            end.store.drop([held.sample for held in end.store.inventory()])
        links.environment.commit()

    # -- what it tells

    def _reports(self) -> list[dict[str, Any]]:
        """`comm_stats` of all ranks; updates the tokens seen. Every rank must call this."""
        loader = self._loader
        tokens = (loader.tokens, loader.real_tokens) if loader is not None and self.engine.is_first_stage() else (0, 0)
        rows: list[Any] = [None] * self.world
        with self.engine.propagate_failure():
            dist.all_gather_object(rows, (self.engine.comm_stats(), tokens), group=self.group)
        if self.args.include_num_input_tokens_seen != "no":
            place = 1 if self.args.include_num_input_tokens_seen == "non_padding" else 0
            self.state.num_input_tokens_seen = self._tokens_before + sum(tokens[place] for _, tokens in rows)
        return [stats for stats, _ in rows]

    # -- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, and the tokenizer, as a folder that from_pretrained reads; every rank must call this.

        output_dir: default `args.output_dir`. The folder is whole on the machine of rank 0. _internal_call: Trainer's,
        which changes nothing here.
        """
        folder = output_dir or self.args.output_dir
        self.engine.save_pretrained(folder)
        if self.rank != 0:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_FILE))

    def create_model_card(self, **fields: Any) -> None:
        """Write a model card, README.md in `args.output_dir`; rank 0 does. fields: Trainer's."""
        if self.rank == 0:
            write_card(
                self.args,
                self._card_config,
                self.state,
                (self.train_dataset, self.eval_dataset),
                model_class=self._model_class.__name__,
                stages=self.plan.num_stages,
                replicas=self.replicas,
                **fields,
            )

    # -- checkpoints

    def _save_checkpoint(self) -> None:
        with self.engine.propagate_failure():
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        args, state = self.args, self.state
        folder = str(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self.rank == 0:
            (Path(folder) / checkpoints.STATE_FILE).unlink(missing_ok=True)  # until everything is there
        self.save_model(folder)
        if state.best_global_step:
            best = str(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if checkpoints.shared(Path(best).is_dir(), self.group):
                state.best_model_checkpoint = best
        if not args.save_only_model:
            checkpoints.save_engine(self.engine, folder, self.lr_scheduler)
            if self._save_messages:
                checkpoints.save_messages(self.engine, folder)
        self._reports()
        if self.rank == 0:
            self._write_state(Path(folder))
        checkpoints.rotate(args.output_dir, args.save_total_limit, state.best_model_checkpoint, self.group)

    def _write_state(self, folder: Path) -> None:
        saved: dict[str, Any] = {}
        for callback in self._stateful():
            saved.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {k: v[0] if len(v) == 1 else v for k, v in saved.items()}  # type: ignore[assignment]
        pipeline = {"cuts": list(self.plan.cuts), "replicas": self.replicas}
        (folder / checkpoints.PIPELINE_FILE).write_text(json.dumps(pipeline) + "\n", encoding="utf-8")
        self.state.save_to_json(str(folder / checkpoints.STATE_FILE))
