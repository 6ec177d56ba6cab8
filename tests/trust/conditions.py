"""The conditions under which pipelines are compared with unsplit training: factors, rows, models and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.models import MODELS, PAD, TOKENS, attention_of, make_model
from tests.trust.covering import Assignment, pairwise

STEPS, MICRO_BATCH, SAMPLES, LONGEST = 5, 2, 24, 9
CLIP = 0.1  # below the norm of every step's gradient
SGD = {"lr": 0.1, "momentum": 0.9}
# eps well above the rounding noise of a gradient: with torch's 1e-8, Adam makes a full step of the sign of that noise
# where the true gradient is 0, as of the biases of attention keys, and two correct programs differ by such steps.
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-2, "weight_decay": 0.01}
MANY_RANKS = ("gpt2", "deberta-v2")
FIRST_POSITION = ("bert-classes", "roberta-classes", "deberta-v2", "deberta-v3")
SAME_BUT_FOR_A_SETTING = ("gpt2-by-layer", "llama-tied")

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(name for name in MODELS if name not in SAME_BUT_FOR_A_SETTING),
    "stages": (1, 2, 3, 4),
    "padding": ("none", "right", "left"),
    "replicas": (1, 2),
    "micro_batches": (1, 3),
    "clipped": (False, True),
    "tied": (False, True),
    "recomputed": (False, True),
    "zero": (0, 1),
    "optimizer": ("SGD", "AdamW"),
    "decay": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. tied: both embeddings. recomputed: by activation checkpointing. decay: the rate's."""

    model: str
    stages: int
    padding: str
    replicas: int
    micro_batches: int
    clipped: bool
    tied: bool
    recomputed: bool
    zero: int
    optimizer: str
    decay: bool

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.stages * self.replicas

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(self).items())


def allowed(values: Assignment) -> bool:
    """A head for classes has no embedding to tie, and DeBERTa's newer one for words computes with the embedding.

    The encoders' heads for classes read a batch's first position, which left padding fills. Six and eight processes
    only for two models: these rows cost most.
    """
    if "model" not in values:
        return True
    if values.get("stages", 0) > 2 and values.get("replicas") == 2 and values["model"] not in MANY_RANKS:
        return False
    if values["model"] in FIRST_POSITION and values.get("padding") == "left":
        return False
    if "tied" not in values:
        return True
    if values["model"] == "deberta-masked-new":
        return bool(values["tied"])
    return not values["tied"] or MODELS[values["model"]][0].endswith(("LM", "LMHeadModel"))


def all_rows() -> list[Row]:
    """Every pair of values occurs; the first factor, a model, has every value of every other."""
    return [Row(**values) for values in pairwise(FACTORS, allowed)]


_PLAIN = Row(
    model="gpt2",
    stages=2,
    padding="left",
    replicas=1,
    micro_batches=3,
    clipped=False,
    tied=False,
    recomputed=False,
    zero=0,
    optimizer="SGD",
    decay=False,
)
ALL_LABELS = "left, all labels"
KNOWN: dict[Row, str] = {
    dataclasses.replace(_PLAIN, padding=ALL_LABELS): (
        "The unsplit model is trained to predict a sample's first token from the padding before it. Links carry no "
        "padding, so a pipeline leaves that prediction out; in all other rows its label is −100 for both."
    ),
}


# -- models, data, settings


def model_of(row: Row) -> Any:
    """The same weights in every process, and no dropout."""
    more = {"tie_word_embeddings": row.tied} if MODELS[row.model][0].endswith(("LM", "LMHeadModel")) else {}
    if "deberta" not in row.model:
        more["attention"] = attention_of(row.model)
    return make_model(row.model, **more)


def samples(row: Row) -> list[dict[str, Tensor]]:
    """Random tokens and labels; of several lengths where batches are padded."""
    draw = torch.Generator().manual_seed(11)
    found = []
    for i in range(SAMPLES):
        length = LONGEST if row.padding == "none" else LONGEST - i % 5
        ids = torch.randint(3, TOKENS, (length,), generator=draw)
        labels = ids
        if "masked" in row.model:
            labels = ids.masked_fill(torch.rand(length, generator=draw) < 0.5, -100)
            labels[0] = ids[0]
        elif "Classification" in MODELS[row.model][0]:
            labels = torch.tensor(i % MODELS[row.model][2]["num_labels"])
        elif row.padding == "left":
            labels = ids.clone()
            labels[0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def collated(row: Row) -> Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]:
    """Return the function that makes a batch of samples."""

    def pad(x: Tensor, length: int, value: int) -> Tensor:
        more = length - len(x)
        return torch.nn.functional.pad(x, (more, 0) if row.padding.startswith("left") else (0, more), value=value)

    def collate(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(s["input_ids"]) for s in some)
        ids = torch.stack([pad(s["input_ids"], longest, PAD) for s in some])
        labels = [s["labels"] if s["labels"].dim() == 0 else pad(s["labels"], longest, -100) for s in some]
        out = {"input_ids": ids, "labels": torch.stack(labels)}
        if row.padding != "none":
            out["attention_mask"] = torch.stack([pad(torch.ones_like(s["input_ids"]), longest, 0) for s in some])
        if MODELS[row.model][2].get("type_vocab_size") and "roberta" not in row.model:
            out["token_type_ids"] = (torch.arange(longest) % 2).repeat(len(some), 1)
        return out

    return collate


def rate(step: int) -> float:
    """Factor of the learning rate where it decays."""
    return 0.7**step


def schedule(row: Row) -> Callable[[Optimizer], LambdaLR] | None:
    """Return the function that makes torch's scheduler of an optimizer."""
    return (lambda optimizer: LambdaLR(optimizer, rate)) if row.decay else None


def deepspeed_config(row: Row) -> dict[str, Any]:
    """Full precision, nothing compressed."""
    params = SGD if row.optimizer == "SGD" else ADAMW
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": row.micro_batches,
        "gradient_clipping": CLIP if row.clipped else 0.0,
        "optimizer": {"type": row.optimizer, "params": dict(params)},
        "zero_optimization": {"stage": row.zero},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"activation_checkpoint_interval": int(row.recomputed)},
        "steps_per_print": 10**9,
        "pipecomp": {"activations": {"method": "none"}, "gradients": {"method": "none"}},
    }
