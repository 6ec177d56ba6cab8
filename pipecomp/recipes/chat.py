"""Samples of chats, prompts and texts, packed, padded or cut into blocks, for `pipecomp train` and chat recipes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch import Tensor

from pipecomp.config import read_json_object
from pipecomp.data import (
    IGNORED,
    BlockSamples,
    DataOptions,
    PackingCollator,
    Segment,
    TrainingData,
    decode_sample,
    find_sources,
    load_data,
    sample_plain,
    sample_terminal,
)
from pipecomp.data import sources as src
from pipecomp.data.chat import ALL, LOSSES
from pipecomp.data.formats import TEXT
from pipecomp.data.loading import FILES, data_format
from pipecomp.errors import require
from pipecomp.recipes import language, lora
from pipecomp.recipes.steps import warmup_decay

JOINED = "joined"  # of --documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of training data to a recipe's; `data_options` reads them."""
    add = parser.add_argument
    add("--column", action="append", metavar="OLD=NEW", help="rename a column of the data; may be repeated")
    add("--loss", choices=LOSSES, help="tokens that are learned (default: assistant for messages, else completion)")
    add("--chat-template", metavar="FILE", help="Jinja file or template (default: the tokenizer's)")
    add("--eval-split", type=float, metavar="SHARE", help="share of the data to hold out, instead of --eval-file")
    packing = "put samples one after another into rows, or pad them (default: pack, if the model can)"
    add("--packing", action=argparse.BooleanOptionalAction, help=packing)


def data_options(args: argparse.Namespace) -> DataOptions:
    """Return the options of the data from a recipe's arguments."""
    return DataOptions(
        columns=args.column or [],
        loss=args.loss,
        chat_template=args.chat_template,
        eval_split=args.eval_split,
        seed=args.seed or 0,
        keys={"max_length": "--block-size", "data": "--train-file", "evaluate": "--eval-file"},
    )


def fine_tune(args: argparse.Namespace) -> None:
    """Run a recipe for chats with LoRA on this rank, from data to the saved adapter.

    New adapters are of all linear layers unless `--lora-targets` names some. Without a scheduler in the configuration
    the rate warms up over a tenth of the steps, from rate / warm-up steps on, and decays to 0.

    Args:
        args: Arguments from a parser with those of `text`, this module and `lora`.

    Raises:
        PipecompError: On every rank, if one has an error.
    """
    lora.check_arguments(args)
    own = "the model's own tokenizer: a folder or a hub name"
    require(not args.tokenizer.startswith("train:"), "--tokenizer", args.tokenizer, own)
    if args.adapter is None and args.lora_targets is None:
        args.lora_targets = [lora.ALL_LINEAR]

    def load(args: argparse.Namespace, tokenizer: Any, size: int, vocabulary: int) -> language.Samples:
        sources, options = args.train_file or [args.dataset], data_options(args)
        evaluate, packing = args.eval_file, args.packing
        loaded = ChatData.load(sources, options, tokenizer, size, vocabulary, evaluate=evaluate, packing=packing)
        if dist.get_rank() == 0:
            loaded.print()
        return loaded.samples()

    has_schedule = "scheduler" in read_json_object("--deepspeed_config", args.deepspeed_config)
    language.fine_tune(
        args,
        lambda args: ([], None),
        documents=False,
        samples=load,
        load=lora.causal_model,
        meanings=lora.meanings,
        schedule=None if has_schedule else warmup_decay,
    )


@dataclass
class ChatData:
    """Loaded data, and the form in which they are trained on.

    Attributes:
        data: The samples and their counts.
        size: Tokens of a block or row.
        packing: Samples are packed: True, False to pad them, None to pack them if the model can.
        tokenizer: For padding, and to show a sample.
    """

    data: TrainingData
    size: int
    packing: bool | None
    tokenizer: Any

    @classmethod
    def load(
        cls,
        sources: Sequence[str | Path],
        options: DataOptions,
        tokenizer: Any,
        size: int,
        vocabulary: int,
        *,
        evaluate: str | Path | None = None,
        packing: bool | None = None,
        joined: bool = False,
    ) -> ChatData:
        """Load data: chats, prompts and documents as samples of their own, one plain text as blocks.

        Args:
            sources: Files, folders or a data set's name.
            options: Options of the data, without lengths.
            tokenizer: The model's tokenizer.
            size: Tokens of a block, and the most of a sample or packed row.
            vocabulary: Size of the model's vocabulary.
            evaluate: Held-out data.
            packing: See the class. With True one plain text is a document too.
            joined: Cut the joined documents of a text into blocks.

        Raises:
            ConfigError: An option does not apply to the data.
            DataError: The data are wrong; the error names file and line.
        """
        kind = data_format(sources, options)
        found = find_sources(sources, options.keys.get("data", "--data"))
        hint = f"{found[0].name} has the format {kind}, whose samples are not joined"
        require(kind == TEXT or not joined, "--documents", JOINED, FILES, hint)
        require(not joined or packing is not True, "--packing", True, f"only without --documents {JOINED}")
        one_text = len(found) == 1 and found[0].kind == src.TEXT and options.documents == FILES
        in_blocks = joined or (one_text and packing is not True)
        options = replace(options, blocks=size) if in_blocks else replace(options, max_length=size)
        data = load_data(list(sources), tokenizer, options, evaluate=evaluate, vocabulary=vocabulary)
        return cls(data, size, packing, tokenizer)

    def samples(self) -> language.Samples:
        """Return the samples, and what makes a micro-batch of them."""
        data = self.data
        if isinstance(data.training, BlockSamples):
            return language.Samples(data.training, data.held_out)
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        pads = partial(pad_samples, pad=next(token for token in known if token is not None))
        if self.packing is False:
            return language.Samples(data.training, data.held_out, pads)
        packs = PackingCollator(max_length=self.size)
        return language.Samples(data.training, data.held_out, packs, pads if self.packing is None else None)

    def first_sample(self) -> list[Segment]:
        """Return the first sample, decoded."""
        return decode_sample(self.tokenizer, self.data.training[0])

    def print(self) -> None:
        """Print what the data are, and the first sample as the model learns it."""
        console, sample = Console(highlight=False, soft_wrap=True), self.first_sample()
        for line in (*self.data.describe(), self._describe_form()):
            console.print(Text(line))
        learned = "" if self.data.loss == ALL else ", what is learned in green, or in ⟦ ⟧"
        console.print(Text(f"First sample{learned}:"))
        console.print(sample_terminal(sample) if console.is_terminal else Text(sample_plain(sample)))

    def _describe_form(self) -> str:
        if isinstance(self.data.training, BlockSamples):
            return f"Text is cut into blocks of {self.size:,} tokens."
        if self.packing is False:
            return "Samples are padded to the longest of a micro-batch."
        form = f"Samples are packed into rows of at most {self.size:,} tokens and do not see each other"
        return f"{form} (--no-packing pads them)."


def pad_samples(samples: list[Mapping[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Collate samples to input_ids, attention_mask and labels, int64 [B, S], padded on the right."""
    fill = {"input_ids": pad, "labels": IGNORED}
    batch = {
        key: torch.nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in fill.items()
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {**batch, "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long()}
