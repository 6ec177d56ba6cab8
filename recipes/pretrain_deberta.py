"""Pre-train a small DeBERTa-v2 on any text by masked language modelling, for machines without a GPU or a network.

    python recipes/pretrain_deberta.py --train-file wikitext-2/train.txt --save runs/deberta

One process. Of every block of text 15 % of the tokens are to be found again: 80 % of those are masked, 10 % replaced by
another token, 10 % left (BERT, arXiv:1810.04805, section 3.1). The folder holds model and tokenizer, for `--model` and
`--tokenizer` of the DeBERTa recipes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.config import MOST_SEED
from pipecomp.data.sources import read_text
from pipecomp.errors import DataError, require
from pipecomp.recipes import run
from pipecomp.recipes.encoder import MIN_VOCABULARY, small_deberta, train_tokenizer
from pipecomp.recipes.pretraining import pretrain
from pipecomp.recipes.resume import make_folder
from pipecomp.recipes.text import blocks

SHARE, MASKED, REPLACED = 0.15, 0.8, 0.1
IGNORED = -100
MARKS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" <unk> ", " "))
REPORT_EVERY_S = 10.0


class Masking(nn.Module):
    """Calls a masked language model with tokens masked anew each time."""

    def __init__(self, model: nn.Module, *, mask: int, first: int, vocabulary: int, seed: int) -> None:
        """mask: id of the mask. first: ids below it are special, and neither masked nor put in place of others."""
        super().__init__()
        self.model = model
        self._mask, self._first, self._vocabulary = mask, first, vocabulary
        self._draw = torch.Generator().manual_seed(seed)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """input_ids, labels: the same tokens int64 [B, S]."""
        seen_BS, labels_BS = self.masked(labels)
        return self.model(input_ids=seen_BS, labels=labels_BS)

    def masked(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Mask tokens: the input, and the labels, IGNORED where nothing is masked; both int64 [B, S]."""
        chance_BS, kind_BS = torch.rand((2, *ids_BS.shape), generator=self._draw)
        wanted_BS = (chance_BS < SHARE) & (ids_BS >= self._first)
        others_BS = torch.randint(self._first, self._vocabulary, ids_BS.shape, generator=self._draw)
        seen_BS = ids_BS.masked_fill(wanted_BS & (kind_BS < MASKED), self._mask)
        seen_BS = torch.where(wanted_BS & (kind_BS >= 1 - REPLACED), others_BS, seen_BS)
        return seen_BS, ids_BS.masked_fill(~wanted_BS, IGNORED)


def plain_lines(path: str) -> list[str]:
    """Lines of a text file; WikiText's marks for hyphens, points and unknown words taken out, empty lines too."""
    text = read_text(path)
    for mark, meant in MARKS:
        text = text.replace(mark, meant)
    return [line.strip() for line in text.splitlines() if line.strip()]


@torch.no_grad()
def held_out_loss(masking: Masking, rows: list[list[int]], batch: int) -> float:
    """Mean loss of the masked tokens, nats."""
    masking.eval()
    total, found = 0.0, 0
    for start in range(0, len(rows), batch):
        seen_BS, labels_BS = masking.masked(torch.tensor(rows[start : start + batch]))
        count = int((labels_BS != IGNORED).sum())
        if count:
            total += float(masking.model(input_ids=seen_BS, labels=labels_BS).loss) * count
            found += count
    return total / max(1, found)


def main(args: argparse.Namespace) -> None:
    """See the top of the file."""
    require(args.width % args.heads == 0, "--width", args.width, f"a multiple of --heads, {args.heads}")
    from transformers import DebertaV2ForMaskedLM

    lines = list(chain.from_iterable(map(plain_lines, args.train_file)))
    tokenizer = train_tokenizer(lines, args.vocabulary)
    config = small_deberta(
        vocabulary=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        positions=max(256, args.block_size),
        layers=args.layers,
        width=args.width,
        heads=args.heads,
    )
    torch.manual_seed(args.seed)
    model = DebertaV2ForMaskedLM(config)
    special = len(tokenizer.all_special_tokens)  # they were given the lowest ids
    masking = Masking(model, mask=tokenizer.mask_token_id, first=special, vocabulary=len(tokenizer), seed=args.seed)

    def rows(of: list[str]) -> list[list[int]]:
        return blocks(tokenizer, of, args.block_size, vocabulary=len(tokenizer)).tokens_NS.long().tolist()

    training = rows(lines)
    if args.max_blocks is not None:
        training = training[: args.max_blocks]
    if len(training) < args.batch:
        raise DataError(f"{len(training)} samples of {args.block_size} tokens are too few for --batch {args.batch}")
    held_out = [] if args.eval_file is None else rows(plain_lines(args.eval_file))
    make_folder("--save", args.save)  # what is wrong is said before the training, which would be lost
    sizes = f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(training):,} blocks of {args.block_size}"
    print(f"{len(tokenizer):,} tokens in the vocabulary, {sizes}", flush=True)
    began = shown = time.monotonic()

    def on_step(step: int, steps: int, loss: float) -> None:
        nonlocal shown
        if step in (1, steps) or time.monotonic() - shown >= REPORT_EVERY_S:
            shown = time.monotonic()
            print(f"step {step}/{steps}  loss {loss:.4f}  {shown - began:.0f} s", flush=True)

    loss = pretrain(
        masking, training, epochs=args.epochs, batch=args.batch, lr=args.lr, seed=args.seed, on_step=on_step
    )
    report: dict[str, Any] = {
        "train_loss": loss,
        "uniform_loss": math.log(len(tokenizer)),
        "seconds": time.monotonic() - began,
    }
    if args.eval_file is not None:
        report["eval_loss"] = held_out_loss(masking, held_out, args.batch)
    model.save_pretrained(args.save)
    tokenizer.save_pretrained(args.save)
    (Path(args.save) / "pretraining.json").write_text(json.dumps({**vars(args), **report}, indent=1) + "\n")
    print("  ".join(f"{name} {value:.4f}" for name, value in report.items()) + f"; saved in {args.save}")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train-file", nargs="+", required=True, metavar="FILE", help="UTF-8 text")
    add("--eval-file", metavar="FILE", help="held-out text, evaluated at the end")
    add("--save", required=True, metavar="FOLDER", help="where model and tokenizer are written")
    vocabulary = run.at_least(MIN_VOCABULARY)
    add("--vocabulary", type=vocabulary, default=4000, metavar="V", help="tokens, made from the text (4000)")
    add("--layers", type=run.at_least(1), default=4, help="blocks (4)")
    add("--width", type=run.at_least(1), default=128, help="width of the blocks (128)")
    add("--heads", type=run.at_least(1), default=4, help="attention heads (4)")
    add("--block-size", type=run.at_least(1), default=64, metavar="S", help="tokens in a sample (64)")
    add("--batch", type=run.at_least(1), default=32, help="samples in a step (32)")
    add("--epochs", type=run.at_least(1), default=1, help="passes over the text (1)")
    add("--max-blocks", type=run.at_least(1), metavar="N", help="use only the first N samples")
    add("--lr", type=float, default=2e-3, help="highest learning rate (2e-3)")
    add("--seed", type=run.at_least(0, MOST_SEED), default=0, help="of weights, order and masks (0)")
    return parser


if __name__ == "__main__":
    run.run(main, arguments())
