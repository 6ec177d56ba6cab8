"""Encoders to fine-tune as classifiers: tokenizers, pre-trained models, a small DeBERTa, and the run of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.errors import ConfigError
from pipecomp.recipes import classify, run
from pipecomp.recipes.classify import Samples, Task
from pipecomp.recipes.resume import DATA, what_is_trained
from pipecomp.recipes.text import hub_errors

SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
MIN_VOCABULARY = 256 + len(SPECIAL)


def fine_tune(args: argparse.Namespace, task: Task) -> None:
    """One rank of a recipe's run: join the others, read, tokenize, load, train. Raises this project's errors."""
    classify.check_arguments(args)
    run.join(args)
    with run.together():
        rows = classify.training_rows(args, task)
        held_out_rows = classify.held_out_rows(args, task)
    with run.together() as same:
        tokenizer = load_tokenizer(args.tokenizer, [text for row in rows for text in row.texts])
        model, config = classifier(args, tokenizer, task)
        check_length(args, tokenizer, config)

        def samples(of: list[classify.Row]) -> Samples:
            return Samples(tokenizer, of, args.max_tokens, vocabulary=config.vocab_size, types=has_types(config))

        training = samples(rows)
        held_out = None if held_out_rows is None else samples(held_out_rows)
        digest = training.digest()
        same("the training data or the tokenizer", digest)
        same("the held-out data", None if held_out is None else held_out.digest())
        trained = what_is_trained(args, {DATA: digest}, config)
    run.train(
        args,
        model=model,
        training=training,
        trained=trained,
        held_out=held_out,
        tokenizer=tokenizer,
        collate=classify.Padding(tokenizer.pad_token_id),
        evaluation=classify.evaluate,
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A tokenizer of byte pairs, lower case, that puts one text or two between [CLS] and [SEP].

    vocabulary: at most so many tokens, at least all bytes and the special ones. The same texts make the same one.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from tokenizers.processors import TemplateProcessing

    pairs = ByteLevelBPETokenizer(lowercase=True, add_prefix_space=True)
    pairs.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    made = Tokenizer.from_str(pairs.to_str())
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, pairs.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return _wrapped(made.to_str())


def _wrapped(tokenizer: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer), **SPECIAL)


def load_tokenizer(name: str, texts: list[str]) -> Any:
    """A tokenizer from a folder or a hub name, or trained on the texts.

    name: "train:V" makes one of at most V tokens on rank 0, the same one for all ranks; all ranks must call this then.
    Raises ConfigError.
    """
    if name.startswith("train:"):
        size = name.removeprefix("train:")
        if not size.isdecimal() or int(size) < MIN_VOCABULARY:
            raise ConfigError("--tokenizer", name, f"'train:V' with V of at least {MIN_VOCABULARY}")
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            made = [train_tokenizer(texts, int(size)).backend_tokenizer.to_str()]
        dist.broadcast_object_list(made, src=0)
        return _wrapped(made[0])
    from transformers import AutoTokenizer

    with hub_errors("--tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        raise ConfigError("--tokenizer", name, "a tokenizer that has a token for padding")
    return tokenizer


def small_deberta(
    *, vocabulary: int, pad_token_id: int, positions: int, layers: int = 4, width: int = 128, heads: int = 4
) -> Any:
    """Config of a DeBERTa-v2 as the large ones are built, small and without dropout.

    positions: the longest sample. Relative positions alone, in buckets; one projection for contents and positions; a
    convolution beside the first block.
    """
    from transformers import DebertaV2Config

    size: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": positions,
        "pooler_hidden_size": width,
    }
    others: dict[str, Any] = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "position_buckets": 32,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "type_vocab_size": 0,
        "pad_token_id": pad_token_id,
        **dict.fromkeys(DROPOUTS, 0.0),
    }
    return DebertaV2Config(**size, **others)


def classifier(args: argparse.Namespace, tokenizer: Any, task: Task) -> tuple[Any, Any]:
    """What `--model` means, as `pipecomp.initialize` takes it, and the model's config.

    "tiny": random weights, `small_deberta` for the tokenizer's vocabulary. A .json file: random weights with that
    config. Anything else: a from_pretrained folder or hub name, with a new head unless it has one for as many classes.
    `--dropout` replaces the model's own. Raises ConfigError, SplitError for a model that cannot be split.
    """
    from transformers import AutoConfig

    from pipecomp.stages import pretrained
    from pipecomp.stages.partition.loading import resolve

    name = args.model
    settings: dict[str, Any] = {} if args.dropout is None else dict.fromkeys(DROPOUTS, args.dropout)
    names = {
        "id2label": dict(enumerate(task.labels)),
        "label2id": {label: number for number, label in enumerate(task.labels)},
    }
    if name == "tiny":
        config = small_deberta(
            vocabulary=len(tokenizer), pad_token_id=tokenizer.pad_token_id, positions=args.max_tokens
        )
        for key, value in {**settings, **names}.items():
            setattr(config, key, value)
        return resolve(config), config
    with hub_errors("--model", name):
        config = AutoConfig.from_pretrained(name)
    unknown = [key for key in settings if not hasattr(config, key)]
    if unknown:
        allowed = f"only with a model that has {unknown[0]}, not {config.model_type}"
        raise ConfigError("--dropout", args.dropout, allowed)
    source = pretrained(name, model_class="AutoModelForSequenceClassification", **settings, **names)
    source.config.dtype = torch.float32  # as initialize does for a name; a mixed-precision engine casts by itself
    if name.endswith(".json"):
        source = replace(source, weights=None)
    return source, source.config


def check_length(args: argparse.Namespace, tokenizer: Any, config: Any) -> None:
    """Raise ConfigError if samples may be longer than the model takes."""
    most = min(int(config.max_position_embeddings), int(tokenizer.model_max_length))
    if args.max_tokens > most:
        raise ConfigError("--max-tokens", args.max_tokens, f"at most {most}, which the model takes")


def has_types(config: Any) -> bool:
    """Whether the model tells the two texts of a pair apart by token_type_ids."""
    return int(getattr(config, "type_vocab_size", 0) or 0) > 1
