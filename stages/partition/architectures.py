"""Table of architectures: paths of blocks, embeddings and head of each. A few lines each; `register` adds more.

Paths are relative to the base model (`transformer` in GPT2LMHeadModel, `model` in LlamaForCausalLM, `bert`, ...).
Modules of the top model outside its base model are the head, and belong to the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.losses import LossFn


def _reads_nothing(config: Any) -> tuple[str, ...]:  # no lambda: a stage can be pickled
    return ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """Computation of the last stage after the blocks.

    Attributes:
        loss: makes the loss function from the config.
        per_token: the head multiplies every token (a vocabulary), which counts for the balance of the stages.
        pools_last_token: the model finds the last real token by `pad_token_id` in input_ids; the last stage, which has
            no input_ids, applies `score` and takes the position from the attention mask.
        reads_first_token: the model computes classes from the first place of a batch, which must not be padding.
        reads: returns, for a config, the paths of modules among the architecture's `before` that the head reads too
            (the word embeddings, as its output matrix); the last stage has a copy of them, tied to the first's.
    """

    loss: Callable[[Any], LossFn]
    per_token: bool = False
    pools_last_token: bool = False
    reads_first_token: bool = False
    reads: Callable[[Any], tuple[str, ...]] = _reads_nothing


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Structure of the models of one `config.model_type`. Paths are relative to the base model.

    Attributes:
        model_type: the config's.
        heads: the model classes that can be cut, by class name.
        default_head: the class for a config that names none.
        blocks: path of the list of blocks.
        before: modules of the first stage alone (except those that a head reads), each with its replacement on later
            stages: a class without arguments; None leaves the place empty.
        after: modules of the last stage alone.
        shared: modules of every stage; their gradients are summed over the stages.
        optional: those of `after` that a checkpoint of the plain encoder lacks, and that are then new, like a head.
        block_returns_tuple: whether a block returns `(hidden_states, ...)` rather than `hidden_states`.
        extra_inputs: inputs that only the embeddings use.
        forward_options: passed to every forward call.
        renamed: the model's names of modules that checkpoints name differently, by the latter.
    """

    model_type: str
    heads: Mapping[str, Head]
    default_head: str
    blocks: str
    before: Mapping[str, type[nn.Module] | None]
    after: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    block_returns_tuple: bool = False
    extra_inputs: tuple[str, ...] = ()
    forward_options: Mapping[str, Any] = field(default_factory=lambda: {"use_cache": False, "return_dict": True})
    renamed: Mapping[str, str] = field(default_factory=dict)


class SkippedBlock(nn.Module):
    """Identity in the place of another stage's block.

    The list of blocks keeps its length, so each own block keeps its index: in its parameters' names, and wherever the
    model's loop uses it (`layer_types[i]`, DeBERTa's convolution after block 0).
    """

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, as a block does."""
        return (hidden_states, None) if self.returns_tuple else hidden_states


class NoPositions(nn.Module):
    """Replaces GPT-2's `wpe` past the first stage, whose output the model adds."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return a scalar whose addition changes nothing."""
        # x + (-0.0) is x for every x, -0.0 included; without dimensions it leaves the dtype of x alone.
        return torch.full((), -0.0, device=position_ids.device)


class PassedEmbeddings(nn.Module):
    """Replaces the `embeddings` module of BERT and similar encoders past the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Identity()  # get_input_embeddings(), which activation checkpointing calls

    def forward(self, *, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        """Return the embeddings unchanged."""
        return inputs_embeds


_REGISTRY: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Add an architecture for `split`, `plan` and `build_stage`, or replace a known one.

    Args:
        architecture: paths of its blocks, embeddings and head.

    Raises:
        SplitError: its default head is not among its heads.

    Example::

        from pipecomp.stages import losses

        register(
            Architecture(
                model_type="gpt_neox",
                heads={"GPTNeoXForCausalLM": Head(loss=losses.causal_lm, per_token=True)},
                default_head="GPTNeoXForCausalLM",
                blocks="layers",
                before={"embed_in": nn.Identity, "emb_dropout": nn.Identity},
                after=("final_layer_norm",),
                renamed={"embed_out": "lm_head"},
            )
        )
    """
    if architecture.default_head not in architecture.heads:
        default, heads = architecture.default_head, sorted(architecture.heads)
        raise SplitError(f"{architecture.model_type}: default_head {default!r} is not among its heads {heads}")
    _REGISTRY[architecture.model_type] = architecture


def architecture_of(config: Any) -> Architecture:
    """Return the entry for `config.model_type`; SplitError without one, or for a model that cannot be split."""
    model_type = getattr(config, "model_type", None)
    if model_type not in _REGISTRY:
        raise SplitError(
            f"model_type {model_type!r} cannot be split; known: {', '.join(sorted(_REGISTRY))}. For another one call "
            "pipecomp.stages.register(Architecture(model_type=..., ...)), whose documentation has an example"
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = (quantized if isinstance(quantized, dict) else quantized.to_dict()).get("quant_method")
        raise SplitError(
            f"config.quantization_config: got {getattr(method, 'value', method)!r}, allowed: none. Stages have weights "
            "in float32, BF16 or FP16: give the model before quantization"
        )
    if getattr(config, "output_router_logits", False):
        raise SplitError(
            "config.output_router_logits: got True, allowed: False. A pipeline's loss has no term for routers' balance"
        )
    return _REGISTRY[str(model_type)]


def head_name(architecture: Architecture, model_class: type) -> str:
    """Return the name among `architecture.heads` that `model_class` is or derives from."""
    for base in model_class.__mro__:
        if base.__name__ in architecture.heads:
            return base.__name__
    raise SplitError(
        f"{model_class.__name__} cannot be split; for {architecture.model_type} these can: "
        f"{', '.join(sorted(architecture.heads))}"
    )


def default_loss(config: Any) -> LossFn:
    """Return `loss(logits, labels) -> scalar` of the model that `config.architectures` names.

    Causal and masked language models ignore labels of -100; the causal loss shifts the labels itself.
    """
    architecture = architecture_of(config)
    names = getattr(config, "architectures", None) or [architecture.default_head]
    if names[0] not in architecture.heads:
        raise SplitError(f"config.architectures: got {names[0]!r}, allowed: {', '.join(sorted(architecture.heads))}")
    return architecture.heads[names[0]].loss(config)


def _decoder(name: str) -> Architecture:
    """Describe a decoder like Llama: one embedding, rotary positions computed by every stage, a final norm."""
    return Architecture(
        model_type=name.lower(),
        heads={
            f"{name}ForCausalLM": Head(loss=losses.causal_lm, per_token=True),
            f"{name}ForSequenceClassification": Head(loss=losses.classification, pools_last_token=True),
        },
        default_head=f"{name}ForCausalLM",
        blocks="layers",
        before={"embed_tokens": nn.Identity},
        after=("norm",),
    )


def _encoder(name: str) -> Architecture:
    """Describe an encoder like BERT: only the pooler and the head come after the blocks."""
    return Architecture(
        model_type=name.lower(),
        heads={
            f"{name}ForSequenceClassification": Head(loss=losses.classification, reads_first_token=True),
            f"{name}ForMaskedLM": Head(loss=losses.masked_lm, per_token=True),
        },
        default_head=f"{name}ForSequenceClassification",
        blocks="encoder.layer",
        before={"embeddings": PassedEmbeddings},
        after=("pooler",),
        optional=("pooler",),
        extra_inputs=("token_type_ids",),
    )


def _deberta_reads(config: Any) -> tuple[str, ...]:
    """Return the embeddings as the head's matrix; the legacy head has one of its own, tied like BERT's."""
    return () if config.legacy else ("embeddings.word_embeddings",)


register(
    Architecture(
        model_type="gpt2",
        heads={
            "GPT2LMHeadModel": Head(loss=losses.causal_lm, per_token=True),
            "GPT2ForSequenceClassification": Head(loss=losses.classification, pools_last_token=True),
        },
        default_head="GPT2LMHeadModel",
        blocks="h",
        before={"wte": nn.Identity, "wpe": NoPositions, "drop": nn.Identity},
        after=("ln_f",),
        extra_inputs=("token_type_ids",),
    )
)
for name in ("Llama", "Qwen2", "Qwen3", "Mistral"):
    register(_decoder(name))
for name in ("Bert", "Roberta"):
    register(_encoder(name))
register(
    Architecture(
        model_type="deberta-v2",  # DeBERTa-v3 too: other settings, same code
        heads={
            "DebertaV2ForSequenceClassification": Head(loss=losses.deberta_classification, reads_first_token=True),
            "DebertaV2ForMaskedLM": Head(loss=losses.masked_lm, per_token=True, reads=_deberta_reads),
        },
        default_head="DebertaV2ForSequenceClassification",
        blocks="encoder.layer",
        before={"embeddings": PassedEmbeddings, "encoder.conv": None},
        shared=("encoder.rel_embeddings", "encoder.LayerNorm"),
        block_returns_tuple=True,
        extra_inputs=("token_type_ids",),
        forward_options={"return_dict": True},
    )
)
