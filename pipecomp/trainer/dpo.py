"""`PipelineDPOTrainer`: preference optimization with TRL's DPOConfig over a pipeline of stages.

A pair is two sequences of the model, the chosen and the rejected one, each with a sample id of its own: 2 i and 2 i + 1
of pair i. TRL's own code computes the loss and its metrics from the log-probabilities of their tokens. The start
model's log-probabilities, the reference, are computed over the pipeline before the first step.

B pairs, S tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import set_seed
from transformers.trainer_utils import EvalLoopOutput
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import disable_dropout_in_model

from pipecomp.data import IGNORED, MicroBatch, ShardedSampler
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import DataError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.adapters import disabled
from pipecomp.trainer import setup, trl_trainer
from pipecomp.trainer.checkpoints import ResumePoint
from pipecomp.trainer.data_loading import EvalLoader, SampleSource, TrainerSampler, data_seed, loader_options
from pipecomp.trainer.evaluation import Evaluation
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

_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
_WITH_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_FIELDS = {
    **COMMON_FIELDS,
    "padding_free": ((False,), "False: TRL ignores it, too"),
    "sync_ref_model": ((False,), "False: the reference is computed once, before training"),
    "ref_model_mixup_alpha": ((0.6,), "0.6, its default: only sync_ref_model uses it"),
    "ref_model_sync_steps": ((512,), "512, its default: only sync_ref_model uses it"),
    "f_divergence_type": (_DIVERGENCES, ", ".join(_DIVERGENCES)),
    "label_smoothing_factor": ((0,), "0: label_smoothing is DPO's"),
}
_TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


class PipelineDPOTrainer(TRLTrainer):
    """Optimize preferences over a pipeline with the arguments, data and results of TRL's DPOTrainer.

    Pairs, their order, losses and logged values are TRL's, for one replica. The reference is the model at the start of
    training, for a new adapter the model without it. It is always computed beforehand, as TRL does with
    precompute_ref_log_probs=True, in batches of precompute_ref_batch_size. A `DPOConfig` has bf16=True by default; the
    model is then trained in 16 bits, see `PipelineTrainer`.

    Args:
        model: As for `PipelineSFTTrainer`.
        ref_model: Must be None.
        args: A `trl.DPOConfig`. A field that a pipeline does not support raises a ConfigError.
        data_collator: None, or TRL's DataCollatorForPreference.
        train_dataset: As for DPOTrainer, a datasets.Dataset with chosen and rejected answers.
        eval_dataset: A dataset, or a dict of several.
        processing_class: As for DPOTrainer.
        compute_metrics: As for `PipelineTrainer`; its samples are the chosen and the rejected sequence of each pair.
        callbacks: As for `PipelineTrainer`.
        optimizers: As for `PipelineTrainer`.
        quantization_config: As for `PipelineSFTTrainer`.
        peft_config: As for `PipelineSFTTrainer`.
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

            trainer = PipelineDPOTrainer("Qwen/Qwen3-0.6B", args=DPOConfig("out"), train_dataset=data)
            trainer.train()
            trainer.save_model("out/final")
    """

    arguments_class = "DPOConfig"
    sequences_per_sample = 2

    def __init__(
        self,
        model: Any,
        ref_model: None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[Any], dict] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        pipecomp: str | os.PathLike | dict[str, Any] | None = None,
        num_stages: int | None = None,
        cuts: Sequence[int] | None = None,
        save_messages: bool = True,
        report: bool = True,
        save_on_signal: bool = True,
        overwrite: bool = False,
    ) -> None:
        args = trl_trainer.trl_arguments(DPOConfig, args, model, "DPO")
        setup.join(args, model, None, pipecomp)
        with all_ranks().collective_errors():
            hint = "The reference is the model before training, without the new adapter if there is one"
            require(ref_model is None, "ref_model", type(ref_model).__name__, "None", hint)
            _check(args)
            set_seed(args.seed)
            model = trl_trainer.load_model(model, args, quantization_config)
            self._processing = trl_trainer.load_processing_class(processing_class, model, args)
            trl_trainer.check_router(args, model.config)
            if args.disable_dropout and isinstance(model, nn.Module):
                disable_dropout_in_model(model)
            self._preferences = _collator(args, data_collator, trl_trainer.tokenizer_of(self._processing))
            self._starts_at_base, self._trains = peft_config is not None, False
            self._references: dict[int, Tensor] = {}  # by the id of a prepared dataset
            train_dataset = self._prepared(train_dataset, TRAINING, args)
            eval_dataset = trl_trainer.each_dataset(eval_dataset, "eval_dataset", self._prepared, args)
        pad, multiple = self._preferences.pad_token_id, self._preferences.pad_to_multiple_of
        super().__init__(
            model,
            args,
            DataCollatorForLanguageModeling(pad_token_id=pad, pad_to_multiple_of=multiple),
            train_dataset,
            eval_dataset,
            self._processing,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            pipecomp=pipecomp,
            num_stages=num_stages,
            cuts=cuts,
            save_messages=save_messages,
            report=report,
            save_on_signal=save_on_signal,
            overwrite=overwrite,
            peft_config=peft_config,
        )

    @property
    def engine(self) -> TrainingEngine:
        """The engine, made at first use. All ranks must make the first access together."""
        is_new = self._holder.engine is None
        engine = super().engine
        if is_new and self.args.disable_dropout:
            disable_dropout_in_model(engine.stage)
        return engine

    # -- data

    def _prepare(self, data: Any, name: str, args: Any) -> Any:
        trl_trainer.first_sample(data, name)
        if set(_TOKENS) <= set(data.column_names):
            return data
        preparing = _DPOPreparation(trl_trainer.tokenizer_of(self._processing))
        prepared = DatasetPreparation(
            "trl.trainer.dpo_trainer",
            args,
            self._processing,
            (*_TOKENS, *_REFERENCES),
            ("max_length", "truncation_mode"),
        )
        return prepared(data, name, lambda raw: preparing._prepare_dataset(raw, self._processing, args, name))

    def _samples(self, data: Any, name: str) -> SampleSource:
        return SampleSource.of(PairSequences(data, self._preferences), self.data_collator, None, name)

    def _make_sampler(self, samples: SampleSource, replica: int) -> ShardedSampler:
        return self._trl_sampler(samples._replace(data=self.train_dataset), replica, PairSampler)

    # -- reference and loss

    def _make_loss(self, model: Any, own: Callable[..., Any] | None) -> StepLoss:
        pipeline = self._pipeline
        self._log_probs = StepLoss.of(pipeline.model_config, pipeline.model_class, model, 0.0, None)
        loss = DPOLoss.of(pipeline.model_config, pipeline.model_class, model, 0.0, None)
        assert isinstance(loss, DPOLoss)
        loss.configure(self.args)
        self._dpo_loss = loss
        return loss

    @property
    def _metrics(self) -> Metrics:
        return self._dpo_loss.metrics

    def _prepare_training(self, resume: str | os.PathLike | bool | None) -> ResumePoint | None:
        resume_point = super()._prepare_training(resume)
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for data in (self.train_dataset, *evaluated.values()):
            if data is not None:
                self._refer_to(data)
        self._refer_to(self.train_dataset)
        self._trains = True
        return resume_point

    def _run_evaluation(self, data: Any, name: str, *args: Any, **more: Any) -> EvalLoopOutput:
        with all_ranks().collective_errors():
            data = self._prepared(data, name, self.args)
        before = self._dpo_loss.reference
        self._refer_to(data)
        try:
            return super()._run_evaluation(data, name, *args, **more)
        finally:
            self._dpo_loss.refer(before)

    def _refer_to(self, data: Any) -> None:
        """Use the reference of a prepared dataset, and compute it at first; every rank must call this."""
        if id(data) not in self._references:
            self._references[id(data)] = self._reference(data)
        self._dpo_loss.refer(self._references[id(data)])

    def _reference(self, data: Any) -> Tensor:
        """Return the log-probabilities of the dataset's sequences by the start model, float32 [2 × pairs]."""
        if set(_REFERENCES) <= set(data.column_names):
            columns = [np.asarray(data[name], np.float32) for name in _REFERENCES]
            return torch.from_numpy(np.stack(columns, 1).reshape(-1))
        hint = "Its reference needs the start model: give it to the trainer, or evaluate it before training"
        known = self._starts_at_base or not self._trains
        require(known, "eval_dataset", "a new dataset", "one that is known before training", hint)
        engine, args = self.engine, copy.copy(self.args)
        args.eval_do_concat_batches = True
        batch = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        if data is self.train_dataset:
            batch = args.precompute_ref_batch_size or args.per_device_train_batch_size
        engine.allow_evaluation(2 * batch)
        loader = EvalLoader(
            self._samples(data, "data"),
            2 * batch,
            data_seed(args),
            loader_options(args),
            replicas=self.replicas,
            replica=engine.grid.data_parallel_id,
        )

        def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
            return sequence_log_probs(token_log_probs(logits, labels), labels, args.ld_alpha)

        evaluation = Evaluation(
            engine,
            self.group,
            args,
            loss=self._log_probs,
            compute_metrics=None,
            preprocess=log_probs,
            on_step=lambda: None,
        )
        with disabled(engine.stage) if self._starts_at_base else nullcontext():
            found = evaluation.run(loader, "reference", loss_only=False, arrays=True).predictions
        return torch.from_numpy(np.asarray(found, np.float32))


def _check(args: Any) -> None:
    """Raise ConfigError for fields that a pipeline does not support, or that contradict each other."""
    trl_trainer.check_fields(args, _FIELDS)
    losses, smoothing = set(args.loss_type), args.label_smoothing
    require(losses <= set(_LOSSES), "loss_type", args.loss_type, ", ".join(_LOSSES))
    if args.f_divergence_type != "reverse_kl":
        allowed = ", ".join(_WITH_DIVERGENCE)
        require(losses <= set(_WITH_DIVERGENCE), "loss_type", args.loss_type, f"{allowed} with f_divergence_type")
    sorts = losses & {"aot", "aot_unpaired"}
    require(not (args.use_weighting and sorts), "use_weighting", True, "False with 'aot', which sorts samples")
    require("exo_pair" not in losses or smoothing > 0, "label_smoothing", smoothing, "above 0 with 'exo_pair'")
    require("robust" not in losses or 0 <= smoothing < 0.5, "label_smoothing", smoothing, "below 0.5 with 'robust'")
    alpha = args.ld_alpha
    require(alpha is None or 0 <= alpha <= 1, "ld_alpha", alpha, "None, or a number from 0 to 1")
    grouped = args.train_sampling_strategy == "group_by_length"
    require(not grouped, "train_sampling_strategy", "group_by_length", "'random' or 'sequential' for pairs")


def _collator(args: Any, given: Any, tokenizer: Any) -> DataCollatorForPreference:
    """Return the given collator, or TRL's with the settings of the arguments."""
    allowed = "None, or trl's DataCollatorForPreference"
    hint = "Chosen and rejected sequences are samples of their own here"
    ours = given is None or type(given) is DataCollatorForPreference
    require(ours, "data_collator", type(given).__name__, allowed, hint)
    if given is not None:
        return given
    return DataCollatorForPreference(
        pad_token_id=trl_trainer.choose_pad_token(args, tokenizer),
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        pad_to_multiple_of=args.pad_to_multiple_of,
    )


class _DPOPreparation(DPOTrainer):
    """TRL's preparation of datasets without a model; it reads this attribute."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer


class PairSequences(Dataset):
    """The sequences of pairs: 2 i is the chosen one of pair i, 2 i + 1 the rejected one.

    Args:
        pairs: A dataset with prompt_ids, chosen_ids and rejected_ids.
        collator: Has the largest length, and which end of longer sequences is kept.
    """

    def __init__(self, pairs: Any, collator: DataCollatorForPreference) -> None:
        self._pairs = pairs
        most = collator.max_length
        starts = collator.truncation_mode == "keep_start"
        self._kept = slice(None) if most is None else slice(most) if starts else slice(-most, None)

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        pair = self._pairs[index // 2]
        prompt, answer = pair["prompt_ids"], pair["rejected_ids" if index % 2 else "chosen_ids"]
        ids, labels = [*prompt, *answer], [IGNORED] * len(prompt) + list(answer)
        return {"input_ids": ids[self._kept], "labels": labels[self._kept]}


class PairSampler(TrainerSampler):
    """Both sequences of each pair, in the order of pairs."""

    def size(self, number: int) -> int:
        """Return the number of sequences of micro-batch `number`."""
        return 2 * super().size(number)

    def batch(self, number: int) -> list[int]:
        """Return the sequences of micro-batch `number`."""
        return [2 * pair + which for pair in super().batch(number) for which in (0, 1)]


# -- loss


def sequence_log_probs(log_probs_BS: Tensor, labels_BS: Tensor, ld_alpha: float | None) -> Tensor:
    """Return the log-probability of each answer, [2 B], chosen and rejected ones in turn.

    ld_alpha: weight of tokens beyond the length of the pair's shorter answer; None for 1.
    """
    if ld_alpha is None:
        return log_probs_BS.sum(1)
    mask_BS = (labels_BS[:, 1:] != IGNORED).to(log_probs_BS.device)
    shared_B = mask_BS.sum(1).view(-1, 2).amin(1).repeat_interleave(2)
    tail_BS = mask_BS.cumsum(1) > shared_B[:, None]
    return (log_probs_BS * torch.where(tail_BS, ld_alpha, 1.0)).sum(1)


class _TRLLoss(DPOTrainer):
    """TRL's loss without a model; `DPOTrainer._compute_loss` reads these attributes."""

    def __init__(self, args: Any) -> None:
        self.args, self.beta, self.ld_alpha = args, args.beta, args.ld_alpha
        self.loss_types, self.loss_weights = args.loss_type, args.loss_weights or [1.0] * len(args.loss_type)
        self.f_divergence_type, self.f_alpha_divergence_coef = args.f_divergence_type, args.f_alpha_divergence_coef
        self.label_smoothing, self.use_weighting = args.label_smoothing, args.use_weighting
        self.aux_loss_enabled, self.precompute_ref_logps = False, True
        self._tp_size, self._total_train_tokens = 1, 0
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute(self, outputs: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and the metrics of a micro-batch. inputs: chosen rows first, then rejected ones."""
        mode = "train" if torch.is_grad_enabled() else "eval"
        self.model: Any = SimpleNamespace(training=mode == "train")
        device = outputs.log_probs.device
        self.accelerator = SimpleNamespace(device=device, gather=_same, gather_for_metrics=_same)
        loss = self._compute_loss(lambda **_: outputs, inputs, return_outputs=False)
        metrics = {name: values[-1] for name, values in self._metrics[mode].items() if name != "num_tokens"}
        self._metrics[mode].clear()
        return loss, metrics


def _same(value: Any) -> Any:
    return value


class DPOLoss(StepLoss):
    """TRL's loss of a micro-batch of pairs; a step's loss is the mean over its micro-batches, as TRL's.

    Attributes:
        metrics: rewards, log-probabilities and more, as TRL names them.
        reference: The start model's log-probabilities by sequence; None before `refer`.
    """

    metrics: Metrics
    reference: Tensor | None

    def configure(self, args: Any) -> None:
        """Set the loss of a DPOConfig."""
        self._trl, self.metrics, self.reference = _TRLLoss(args), Metrics(), None
        self._names = ("entropy", "mean_logits", "is_top1", *(["log_sum_sq_probs"] if args.use_weighting else []))
        self._ids: deque[tuple[int, ...]] = deque()  # of micro-batches whose loss is due

    def refer(self, reference: Tensor | None) -> None:
        """Compare with these log-probabilities from now on."""
        self.reference = reference
        self._ids.clear()

    def masked_labels(self, stage: Any, batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the labels, and note the sequences, in the order in which their losses are computed."""
        batches = list(batches)
        self._ids.extend(batch.ids for batch in batches)
        return super().masked_labels(stage, batches)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch's pairs. logits: [2 B, S, V]. labels: int64 [2 B, S]."""
        return self.plain(logits, labels)

    def plain(self, logits: Tensor, labels: Tensor, batch: MicroBatch | None = None) -> Tensor:
        """Return the same for an evaluation."""
        if self.reference is None or not self._ids:
            raise DataError("DPO needs a reference for these sequences: call train, evaluate or predict")
        reference = self.reference[list(self._ids.popleft())].to(logits.device)
        labels = labels.to(logits.device)
        fields = token_statistics(logits, labels, *self._names) | {"log_probs": token_log_probs(logits, labels)}
        outputs = SimpleNamespace(**{name: _by_answer(value) for name, value in fields.items()})
        labels = _by_answer(labels)
        learned = (labels != IGNORED).long()
        chosen, rejected = _by_answer(reference).chunk(2)
        inputs = {"input_ids": labels.clamp(min=0), "completion_mask": learned, "attention_mask": learned}
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        loss, metrics = self._trl.compute(outputs, inputs)
        self.metrics.add(metrics)
        return loss


def _by_answer(rows: Tensor) -> Tensor:
    """Return the chosen rows first, then the rejected ones, which were in turn."""
    return torch.cat([rows[0::2], rows[1::2]])
