"""Work of the tests of PipelineTrainer on every rank, and in one process with transformers.Trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments

from tests.models import gpt2, samples

MICRO_BATCH, SAMPLES = 2, 9  # 5 micro-batches in an epoch, the last of one sample
AQSGD = {"activations": {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}}
EVENTS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_save",
    "on_log",
    "on_prediction_step",
)


class Events(TrainerCallback):
    """The names of all events, with step and epoch, and whether gradients were there to see."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.gradients: dict[str, set[bool]] = {}


def _recorder(name: str) -> Any:
    def event(self: Events, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.seen.append((name, state.global_step, round(float(state.epoch or 0), 6)))
        there = any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        self.gradients.setdefault(name, set()).add(there)

    return event


for _name in EVENTS:
    setattr(Events, _name, _recorder(_name))


def arguments(folder: str, **more: Any) -> TrainingArguments:
    """Small and quiet; sequential samples, so that every trainer takes them alike."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **more,
    }
    return TrainingArguments(output_dir=folder, **settings)


def unequal(count: int = SAMPLES, *, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Sequences of different lengths."""
    return [{key: x[: 5 + 3 * i % 13] for key, x in s.items()} for i, s in enumerate(samples(count, seed=seed))]


def padded(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded right; labels of padding are ignored."""
    longest = max(len(s["input_ids"]) for s in chosen)

    def fill(key: str, value: int) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return torch.stack([pad(s[key], (0, longest - len(s[key])), value=value) for s in chosen])

    mask = [torch.ones(len(s["input_ids"]), dtype=torch.long) for s in chosen]
    return {
        "input_ids": fill("input_ids", 0),
        "labels": fill("labels", -100),
        "attention_mask": torch.stack([torch.nn.functional.pad(m, (0, longest - len(m))) for m in mask]),
    }


LIKE_TRAINER: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "load_best_model_at_end": True,
    "include_num_input_tokens_seen": "non_padding",
}


def like_trainer(kind: Any, folder: str, changed: dict[str, Any], **more: Any) -> Any:
    """Train a GPT-2 on padded sequences with a trainer of `kind`; returns it and its Events."""
    events, model = Events(), gpt2(2, 16)
    model.loss_type = "ForCausalLM"  # Trainer would count first tokens too: it goes by the name of the class
    trainer = kind(
        model,
        arguments(folder, **{**LIKE_TRAINER, **changed}),
        padded,
        unequal(),
        unequal(5, seed=6),
        callbacks=[events],
        **more,
    )
    return trainer, trainer.train(), events


# -- a classifier

VOCABULARY, WORDS = 50, 12


def bert(*, seed: int = 0, dropout: float = 0.1) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=WORDS,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def sentences(count: int, *, seed: int = 0, labels: bool = True) -> list[dict[str, Any]]:
    """Words, a class that the first word says, and a column that no model takes."""
    draw = np.random.default_rng(seed)
    out = []
    for i in range(count):
        words = draw.integers(3, VOCABULARY, size=int(draw.integers(3, WORDS))).tolist()
        out.append({"input_ids": words, "idx": i} | ({"label": words[0] % 3} if labels else {}))
    return out


def classified(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(s["input_ids"]) for s in chosen)
    rows = [s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in chosen]
    batch = {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) > 0).long()}
    assert "idx" not in chosen[0], "columns that the model does not take are removed"
    if "label" in chosen[0]:
        batch["labels"] = torch.tensor([s["label"] for s in chosen])
    return batch


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def digest(engine: Any) -> str:
    """Return a digest of this rank's weights, bit for bit."""
    out = hashlib.sha256()
    for _, p in sorted(engine.stage.named_parameters()):
        out.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def folders(where: str) -> list[str]:
    return sorted(path.name for path in Path(where).glob("checkpoint-*"))


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """A loss of the user's own, as Trainer's compute_loss_func: twice the cross-entropy of the next token."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    total = 2 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    return total / num_items_in_batch
