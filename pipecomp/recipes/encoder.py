"""Fine-tuning of encoders as classifiers: the run, tokenizers, pre-trained models, a small DeBERTa."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from pipecomp.data.sources import hub_errors
from pipecomp.distributed import rendezvous
from pipecomp.errors import require
from pipecomp.recipes import classify, run
from pipecomp.recipes.classify import ClassificationSamples, ClassificationTask
from pipecomp.recipes.resume import DATA, data_facts, what_is_trained
from pipecomp.recipes.text import check_dropout, check_tokenizer, train_for_all_ranks

SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
MIN_VOCABULARY = 256 + len(SPECIAL)


def fine_tune(args: argparse.Namespace, task: ClassificationTask) -> None:
    """Run a recipe on this rank: join the others, read, tokenize, load, train.

    Args:
        args: The recipe's arguments.
        task: The classification task.

    Raises:
        PipecompError: On every rank, if one has an error.
    """
    classify.check_arguments(args)
    rendezvous.start_processes(args.seed, args.deepspeed_config)
    ranks = rendezvous.all_ranks()
    with ranks.collective_errors():
        rows, held_out_rows = classify.read(args, task)
    with ranks.collective_errors():
        tokenizer = load_tokenizer(args.tokenizer, [text for row in rows for text in row.texts])
        model, config = classifier(args, tokenizer, task)
        check_length(args, tokenizer, config)

        def samples(of: list[classify.Row]) -> ClassificationSamples:
            return ClassificationSamples(
                tokenizer, of, args.max_tokens, vocabulary=config.vocab_size, types=has_types(config)
            )

        training = samples(rows)
        held_out = None if held_out_rows is None else samples(held_out_rows)
        trained = what_is_trained(args, {DATA: training.digest()}, config)
    ranks.assert_same_on_all_ranks(data_facts(training, held_out))
    run.train(
        args,
        run.Workload(
            model=model,
            training=training,
            trained=trained,
            held_out=held_out,
            tokenizer=tokenizer,
            collate=classify.Padding(tokenizer.pad_token_id),
            compute_metrics=classify.compute_metrics,
            measures=("loss", "accuracy", "matthews"),
        ),
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a lower-case byte-pair tokenizer that puts one or two texts between [CLS] and [SEP].

    Args:
        texts: Training texts. Training is deterministic.
        vocabulary: Largest number of tokens, at least `MIN_VOCABULARY`.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=train_byte_pairs(texts, vocabulary), **SPECIAL)


def train_byte_pairs(texts: Iterable[str], vocabulary: int) -> Any:
    """Train the tokenizer of `train_tokenizer` as a tokenizer of `tokenizers`."""
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
    return made


def load_tokenizer(name: str, texts: list[str]) -> Any:
    """Load a tokenizer, or train one.

    Args:
        name: A folder or a hub name. "train:V" trains one of at most V tokens on rank 0 and broadcasts it; then every
            rank must call this.
        texts: Training texts.

    Raises:
        ConfigError: If there is no such tokenizer, or it has no padding token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name.startswith("train:"):
        made = train_for_all_ranks(name, texts, MIN_VOCABULARY, train_byte_pairs)
        return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    with hub_errors("--tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    check_tokenizer(name, tokenizer)
    require(tokenizer.pad_token_id is not None, "--tokenizer", name, "a tokenizer with a padding token")
    return tokenizer


def small_deberta(
    *, vocabulary: int, pad_token_id: int, positions: int, layers: int = 4, width: int = 128, heads: int = 4
) -> Any:
    """Return the config of a small DeBERTa-v2 without dropout, with the structure of the large ones.

    It has bucketed relative positions only, one projection for contents and positions, and a convolution parallel to
    the first block.

    Args:
        vocabulary: Size of the vocabulary.
        pad_token_id: The tokenizer's padding token.
        positions: Tokens of the longest sample.
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Number of attention heads.
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


def classifier(args: argparse.Namespace, tokenizer: Any, task: ClassificationTask) -> tuple[Any, Any]:
    """Return the model of `--model`, as `pipecomp.initialize` takes it, and its config.

    "tiny" is `small_deberta` with random weights and the tokenizer's vocabulary. A .json file is the config of a model
    with random weights. Other names are from_pretrained folders or hub names, with a new head unless theirs has the
    same number of classes. `--dropout` replaces the model's own.

    Args:
        args: The recipe's arguments.
        tokenizer: For the vocabulary of "tiny".
        task: For the classes.

    Raises:
        ConfigError: If there is no such model, or it does not support `--dropout`.
        SplitError: If the model cannot be split.
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
    check_dropout(args, settings, config)
    if config.problem_type is not None:  # of the task it was trained for
        settings["problem_type"] = "single_label_classification"
    source = pretrained(name, model_class="AutoModelForSequenceClassification", **settings, **names)
    source.config.dtype = torch.float32  # as initialize does for a name; mixed-precision engines cast the weights
    if name.endswith(".json"):
        source = replace(source, weights=None)
    return source, source.config


def check_length(args: argparse.Namespace, tokenizer: Any, config: Any) -> None:
    """Raise ConfigError if samples may be longer than the model's maximum."""
    most = min(int(config.max_position_embeddings), int(tokenizer.model_max_length))
    require(args.max_tokens <= most, "--max-tokens", args.max_tokens, f"at most {most}, the model's maximum")


def has_types(config: Any) -> bool:
    """Return whether the model distinguishes the two texts of a pair by token_type_ids."""
    return int(getattr(config, "type_vocab_size", 0) or 0) > 1
