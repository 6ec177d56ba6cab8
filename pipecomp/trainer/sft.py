"""`PipelineSFTTrainer`: supervised fine-tuning with TRL's SFTConfig and data formats over a pipeline of stages.

B samples, S tokens, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import set_seed
from trl import SFTConfig, SFTTrainer, clone_chat_template
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)
from trl.data_utils import is_conversational
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from pipecomp.data import IGNORED, MicroBatch
from pipecomp.data.packing import SEQ_LENGTHS
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import ConfigError, require
from pipecomp.trainer import setup, trl_trainer
from pipecomp.trainer.losses import StepLoss
from pipecomp.trainer.trl_trainer import (
    COMMON_FIELDS,
    TRAINING,
    DatasetPreparation,
    Metrics,
    TRLTrainer,
    token_log_probs,
    token_statistics,
)

_FIELDS = {
    **COMMON_FIELDS,
    "loss_type": (("nll", "dft"), "'nll' or 'dft'"),
    "packing_strategy": (("bfd", "bfd_split", "wrapped"), "'bfd', 'bfd_split' or 'wrapped'"),
}
_SKIP = "skip_prepare_dataset"
# Fields that decide what a prepared dataset has.
_DATA_FIELDS = (
    "assistant_only_loss",
    "dataset_text_field",
    "max_length",
    "packing_strategy",
    "seed",
    "shuffle_dataset",
    "truncation_mode",
)


class PipelineSFTTrainer(TRLTrainer):
    """Fine-tune over a pipeline with the arguments, data and results of TRL's SFTTrainer.

    Samples, masks, their order, the start of a new adapter, losses and logged values are TRL's, for one replica. A
    `SFTConfig` has bf16=True by default; the model is then trained in 16 bits, see `PipelineTrainer`.

    Args:
        model: As for SFTTrainer; of a folder or hub name each process reads only its stage, and
            `pipecomp.stages.pretrained(...)` is accepted too.
        args: A `trl.SFTConfig`. A field that a pipeline does not support raises a ConfigError.
        data_collator: As for SFTTrainer; transformers' `DataCollatorWithFlattening` packs.
        train_dataset: As for SFTTrainer, a datasets.Dataset in one of TRL's formats.
        eval_dataset: A dataset, or a dict of several.
        processing_class: As for SFTTrainer.
        compute_loss_func: As for `PipelineTrainer`.
        compute_metrics: As for `PipelineTrainer`.
        callbacks: As for `PipelineTrainer`.
        optimizers: As for `PipelineTrainer`.
        optimizer_cls_and_kwargs: As for `PipelineTrainer`.
        preprocess_logits_for_metrics: As for `PipelineTrainer`.
        quantization_config: A `transformers.BitsAndBytesConfig` for a model given by its name.
        peft_config: A `peft.LoraConfig` for a new adapter.
        formatting_func: As for SFTTrainer.
        pipecomp: As for `PipelineTrainer`.
        num_stages: As for `PipelineTrainer`.
        cuts: As for `PipelineTrainer`.
        save_messages: As for `PipelineTrainer`.
        report: As for `PipelineTrainer`.
        save_on_signal: As for `PipelineTrainer`.
        overwrite: As for `PipelineTrainer`.

    Raises:
        ConfigError: If an argument is wrong.
        DataError: If TRL refuses the data.
        SplitError: If the model cannot be partitioned.
        LinkError: If ranks differ, or cannot reach each other.

    Example:
        A script started by deepspeed or torchrun with one process per stage::

            trainer = PipelineSFTTrainer("Qwen/Qwen3-0.6B", SFTConfig("out", packing=True), train_dataset=data)
            trainer.train()
            trainer.save_model("out/final")
    """

    arguments_class = "SFTConfig"

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable[[list], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], dict] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
        *,
        pipecomp: str | os.PathLike | dict[str, Any] | None = None,
        num_stages: int | None = None,
        cuts: Sequence[int] | None = None,
        save_messages: bool = True,
        report: bool = True,
        save_on_signal: bool = True,
        overwrite: bool = False,
    ) -> None:
        args = trl_trainer.trl_arguments(SFTConfig, args, model, "SFT")
        setup.join(args, model, None, pipecomp)
        with all_ranks().collective_errors():
            set_seed(args.seed)
            model = trl_trainer.load_model(model, args, quantization_config)
            processing_class = trl_trainer.load_processing_class(processing_class, model, args)
            trl_trainer.check_router(args, model.config)
            self._data = data = _SFTData(args, train_dataset, data_collator, formatting_func, processing_class)
            _check(args, data, compute_loss_func)
            _set_tokens(model, processing_class, args, peft_config)
            data.choose_template()
            train_dataset = self._prepared(train_dataset, TRAINING, args)
            eval_dataset = trl_trainer.each_dataset(eval_dataset, "eval_dataset", self._prepared, args)
        super().__init__(
            model,
            args,
            data.collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            pipecomp=pipecomp,
            num_stages=num_stages,
            cuts=cuts,
            save_messages=save_messages,
            report=report,
            save_on_signal=save_on_signal,
            overwrite=overwrite,
            peft_config=peft_config,
        )

    def _prepare(self, data: Any, name: str, args: Any) -> Any:
        packing = args.packing if name == TRAINING or args.eval_packing is None else args.eval_packing
        return self._data.prepare(data, name, packing=packing)

    def _make_loss(self, model: Any, own: Callable[..., Any] | None) -> StepLoss:
        pipeline = self._pipeline
        loss = SFTLoss.of(pipeline.model_config, pipeline.model_class, model, self.args.label_smoothing_factor, own)
        assert isinstance(loss, SFTLoss)
        if self.args.loss_type == "dft":
            loss.use_dynamic_weights()
        self._sft_loss = loss
        return loss

    @property
    def _metrics(self) -> Metrics:
        return self._sft_loss.metrics


class SFTLoss(StepLoss):
    """The loss of a step, with the metrics that TRL logs.

    Attributes:
        metrics: entropy and mean_token_accuracy.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.metrics = Metrics()

    def use_dynamic_weights(self) -> None:
        """Weight each token's loss by its probability: Dynamic Fine-Tuning, https://huggingface.co/papers/2508.05629."""
        self._loss = dft_loss

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss for back-propagation. logits: [B, S, V]. labels: int64 [B, S]."""
        self._note(logits, labels)
        return super().__call__(logits, labels)

    def plain(self, logits: Tensor, labels: Tensor, batch: MicroBatch | None = None) -> Tensor:
        """Return the mean over a micro-batch's labels."""
        self._note(logits, labels)
        return super().plain(logits, labels, batch)

    def _note(self, logits: Tensor, labels: Tensor) -> None:
        found = token_statistics(logits, labels, "entropy", "is_top1")
        count = (labels[:, 1:] != IGNORED).sum().clamp(min=1).to(logits.device)
        self.metrics.add(
            {"entropy": found["entropy"].sum() / count, "mean_token_accuracy": found["is_top1"].sum() / count}
        )


def dft_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy of labels that are not -100, each weighted by the label's probability."""
    log_probs = token_log_probs(logits_BSV, labels_BS)
    return -(log_probs * log_probs.exp().detach()).sum() / (labels_BS[:, 1:] != IGNORED).sum().clamp(min=1)


# -- configuration


def _check(args: Any, data: _SFTData, compute_loss_func: Any) -> None:
    """Raise ConfigError for fields that a pipeline does not support, or that contradict each other."""
    trl_trainer.check_fields(args, _FIELDS)
    if data.flattens:
        hint = "padding_free, and packing with the strategy 'bfd', have TRL's own collator"
        require(data.given_collator is None, "data_collator", data.given_collator, "None", hint)
    if args.padding_free and not args.packing:
        hint = "Without packing, padding_free does not cut samples"
        require(args.max_length is None, "max_length", args.max_length, "None with padding_free", hint)
    packed = args.packing or args.eval_packing
    require(not packed or args.max_length is not None, "max_length", None, "a number of tokens with packing")
    chats = is_conversational(dict(data.first))
    allowed = "True only with messages; use completion_only_loss with prompts and completions"
    require(not args.assistant_only_loss or chats, "assistant_only_loss", True, allowed)
    unknown = sorted(set(args.dataset_kwargs or ()) - {_SKIP})
    require(not unknown, "dataset_kwargs", unknown, f"{_SKIP!r} alone")
    if args.loss_type == "dft":
        require(compute_loss_func is None, "compute_loss_func", compute_loss_func, "None with loss_type 'dft'")
        smoothing = args.label_smoothing_factor
        require(not smoothing, "label_smoothing_factor", smoothing, "0 with loss_type 'dft'")


def _set_tokens(model: Any, processing_class: Any, args: Any, peft_config: Any) -> None:
    """Set the end token and the chat template as TRL does, which changes model and configuration for new tokens."""
    tokenizer = trl_trainer.tokenizer_of(processing_class)
    if args.eos_token is not None:
        known = args.eos_token in tokenizer.get_vocab()
        require(known, "eos_token", args.eos_token, "a token of the tokenizer's vocabulary")
        tokenizer.eos_token = args.eos_token  # the model's configuration follows the tokenizer when the engine is made
    path = args.chat_template_path
    if path is None:
        return
    if os.path.isfile(path) and path.endswith((".jinja", ".j2")):
        processing_class.chat_template = Path(path).read_text(encoding="utf-8")
        return
    resized: Any = model if isinstance(model, nn.Module) else _Unsized(model.config)
    try:
        _, _, added = clone_chat_template(resized, processing_class, path)
    except (OSError, ValueError) as error:
        raise ConfigError("chat_template_path", path, f"a .jinja file, or a tokenizer ({error})") from error
    if added and peft_config is not None:  # so that the new tokens are trained
        tokens = dict(peft_config.trainable_token_indices or {})
        tokens["embed_tokens"] = [*tokens.get("embed_tokens", []), *added]
        peft_config.trainable_token_indices = tokens
        peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or ()), "lm_head"})


class _Unsized:
    """A model for `clone_chat_template` that is not in memory, so that its embeddings keep their size."""

    def __init__(self, config: Any) -> None:
        self.config, self.vocab_size = config, config.get_text_config().vocab_size

    def can_generate(self) -> bool:
        """Return False: there is no configuration of generation to change."""
        return False

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> None:
        """Raise ConfigError if the embeddings would get another size."""
        allowed = "a .jinja file, a tokenizer with as many tokens as the model has, or a model in memory"
        hint = f"The tokenizer has {new_num_tokens} tokens, the model {self.vocab_size}"
        require(new_num_tokens == self.vocab_size, "chat_template_path", new_num_tokens, allowed, hint)


# -- data


class _SFTPreparation(SFTTrainer):
    """TRL's preparation of datasets without a model; it reads these three attributes."""

    def __init__(self, tokenizer: Any, chat_template: str | None, completion_only_loss: bool) -> None:
        self._tokenizer, self.chat_template, self.completion_only_loss = tokenizer, chat_template, completion_only_loss


class _SFTData:
    """Datasets as SFTTrainer prepares them, and the collator.

    Attributes:
        first: The first sample.
        flattens: Micro-batches are one row.
        given_collator: The user's.
        collator: The user's, or TRL's.
    """

    def __init__(self, args: Any, train: Any, collator: Any, formatting: Any, processing_class: Any) -> None:
        self.first = trl_trainer.first_sample(train, TRAINING)
        self.flattens = args.padding_free or (args.packing and args.packing_strategy in ("bfd", "bfd_split"))
        self.given_collator = self.collator = collator
        self._args, self._formatting, self._processing = args, formatting, processing_class
        self._skips = bool((args.dataset_kwargs or {}).get(_SKIP, False))
        self._completion_only = args.completion_only_loss
        if self._completion_only is None:
            self._completion_only = "prompt" in self.first and "completion" in self.first
        require(
            self._skips or formatting is None or not self._completion_only,
            "completion_only_loss",
            self._completion_only,
            "False with a formatting_func, which makes texts of samples",
        )
        self._template: str | None = None

    def choose_template(self) -> None:
        """Choose the chat template that marks what the assistant says, and make the collator. Raises ConfigError."""
        args, processing = self._args, self._processing
        if self.collator is None:
            pad = trl_trainer.choose_pad_token(args, trl_trainer.tokenizer_of(processing))
            self.collator = DataCollatorForLanguageModeling(
                pad_token_id=pad, padding_free=self.flattens, pad_to_multiple_of=args.pad_to_multiple_of
            )
        if not args.assistant_only_loss:
            return
        allowed = "a processing_class with a chat template that marks the assistant's text with {% generation %}"
        require(processing.chat_template, "assistant_only_loss", True, allowed, "The tokenizer has no chat template")
        try:
            if not has_generation_markers(processing.chat_template):
                self._template = get_training_chat_template(processing)
            trained = is_chat_template_stop_token_trained(processing, chat_template=self._template)
        except Exception as error:  # ValueError, and what a template raises at TRL's probe
            raise ConfigError("assistant_only_loss", True, allowed, f"TRL has no marked version: {error}") from error
        if not trained:
            trl_trainer.warn(
                "the chat template leaves the token that ends the assistant's turn out of the loss: the model may not "
                "learn to stop. Put it before {% endgeneration %}"
            )

    def prepare(self, data: Any, name: str, *, packing: bool) -> Any:
        """Prepare a dataset. Raises ConfigError and DataError."""
        args, processing = self._args, self._processing
        trl_trainer.first_sample(data, name)
        columns = set(data.column_names)
        if self._skips:
            masks = columns & {"completion_mask", "assistant_masks"}
            ours = isinstance(self.collator, DataCollatorForLanguageModeling)
            hint = f"{name} has {sorted(masks)}, which only the preparation turns into labels"
            wrong = ours and masks and "labels" not in columns
            require(not wrong, "dataset_kwargs", args.dataset_kwargs, "None, or a dataset with labels", hint)
            return data
        preparing = _SFTPreparation(trl_trainer.tokenizer_of(processing), self._template, bool(self._completion_only))
        prepared = DatasetPreparation(
            "trl.trainer.sft_trainer",
            args,
            processing,
            ("input_ids", "labels", SEQ_LENGTHS),
            _DATA_FIELDS,
            self._template,
            self._completion_only,
            self._formatting,
        )
        return prepared(
            data,
            name,
            lambda raw: preparing._prepare_dataset(raw, processing, args, packing, self._formatting, name),
            packing,
        )
