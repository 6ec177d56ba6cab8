"""Table of architectures: paths of blocks, embeddings and head of each. A few lines each; `register` adds more.

Paths are relative to the base model (`transformer` in GPT2LMHeadModel, `model` in LlamaForCausalLM, `bert`, ...).
Modules of the top model outside its base model are the head, and belong to the last stage.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.discovery import discover, head_kind
from pipecomp.stages.partition.losses import LossFn
from pipecomp.stages.partition.quantization import check_method
from pipecomp.stages.partition.structure import Architecture, Head, NoPositions, PassedEmbeddings

_REGISTRY: dict[str, Architecture] = {}
_BUILT_IN: list[Architecture] = []


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


def architecture_of(config: Any, model_class: type | None = None) -> Architecture:
    """Return the entry for `config.model_type`, or the structure found in a small copy of the model.

    model_class: default: the class that the config names. SplitError for a model that cannot be split.
    """
    check_method(config)
    if getattr(config, "output_router_logits", False):
        raise SplitError(
            "config.output_router_logits: got True, allowed: False. A pipeline's loss has no term for routers' balance"
        )
    entry = _REGISTRY.get(str(getattr(config, "model_type", None)))
    if entry is None:
        return discover(config, model_class)
    names = [base.__name__ for base in model_class.__mro__] if model_class else getattr(config, "architectures", None)
    other_head = names and not any(name in entry.heads for name in names) and any(map(head_kind, names))
    return discover(config, model_class) if other_head and is_built_in(entry) else entry


def is_built_in(architecture: Architecture) -> bool:
    """Return whether an entry is one of this module's, whose equality with the unsplit model the tests show."""
    return architecture in _BUILT_IN


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
        draws_outside=False,
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
        draws_outside=False,
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
        draws_outside=False,
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
        draws_outside=False,
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
_BUILT_IN.extend(_REGISTRY.values())
