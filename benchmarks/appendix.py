"""AQ-SGD's figures 1b, 7 and 9g: changes over training, training from random weights, models of several sizes.

    python -m benchmarks appendix [--parts scratch sizes changes] [--seeds 3] [--only METHOD ...] [--workers 2]
                                  [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

GPT-2 of 8 blocks on WikiText-2 in K = 4 stages as in convergence.py, all stages of a run in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import convergence, direct, page
from benchmarks.boundaries import Coders
from benchmarks.convergence import EPOCHS, Method, quantized
from benchmarks.page import Row, prose, share, spread, values
from benchmarks.rival_rows import Product, Rows
from benchmarks.rivals import Changes, Whole
from benchmarks.runner import Runs, arguments, beside, chosen, digest
from benchmarks.training import in_order, train_epochs
from benchmarks.wikitext import WIDTH
from pipecomp.codecs.codecs import Quantized

STAGES = 4
SCRATCH = {"sequences": 1024, "epochs": 20, "lr": 2e-3, "warm_up": 0.1}  # epochs and share of warm-up: the paper's
WIDTHS = (64, 128, 256)
FIRST = {"first_visit": 8}
CHANNELS = {"scale": "channels", "gain": "unbiased"}
METHODS: dict[str, direct.Setting] = {
    "FP32": {"method": "none"},
    **{f"DirectQ fw2 bw4{form}": setting for form, setting in direct.forms(2, 4).items() if form != ", stochastic"},
    "AQ-SGD fw2 bw4": quantized("aqsgd", 2, 4) | FIRST,
    "AQ-SGD fw2 bw4, channel scales": quantized("aqsgd", 2, 4) | FIRST | CHANNELS,
    "AQ-SGD fw3 bw6": quantized("aqsgd", 3, 6) | FIRST,
}
RECORDED = {"exact changes": None, "AQ-SGD fw4 bw8": 4, "AQ-SGD fw2 bw4": 2}  # forward bits
PARTS = ("scratch", "sizes", "changes")
KEYS = ("part", "width", "method", "seed")
SETUP = digest([convergence.SETUP, STAGES, list(SCRATCH.values())])


class Exact:
    """Rows as they are, in float32."""

    def size(self, rows: int, hidden: int) -> int:
        """Bytes of so many rows."""
        return 4 * rows * hidden

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        return x_TH.float().contiguous().view(torch.uint8).reshape(-1)

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        return payload.view(torch.float32).reshape(rows, hidden).clone()


class Recorded:
    """Rows that keep the norms of what they encode. kept: squared norms, one number for each packet."""

    def __init__(self, rows: Rows, kept: list[float]) -> None:
        self._rows, self._kept = rows, kept

    def size(self, rows: int, hidden: int) -> int:
        """Bytes of so many rows."""
        return self._rows.size(rows, hidden)  # type: ignore[attr-defined, no-any-return]

    def encode(self, x_TH: Tensor) -> Tensor:
        """See Rows."""
        if len(x_TH):
            self._kept.append(float(x_TH.square().sum()) / len(x_TH))
        return self._rows.encode(x_TH)

    def decode(self, payload: Tensor, rows: int, hidden: int) -> Tensor:
        """See Rows."""
        return self._rows.decode(payload, rows, hidden)


def train(part: str, width: int, method: str, seed: int, data: Path, cache: Path) -> Row:
    """One run. Loads what it needs, so that it can be a process of its own."""
    from benchmarks.wikitext import new_model, pretrained_model, wikitext_task

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = wikitext_task(data, cache)
    epochs, lr, more = EPOCHS, convergence.LEARNING_RATE, {}
    firsts: list[float] = []
    changes: list[float] = []
    setting: Any = METHODS.get(method)
    if part == "changes":
        setting = partial(_recorded, RECORDED[method], firsts, changes)
    if part == "scratch":
        model = new_model(seed)
        order = torch.randperm(len(task.pretraining), generator=torch.Generator().manual_seed(seed))
        training = task.pretraining[order[: SCRATCH["sequences"]]]
        task = type(task)(pretraining=task.pretraining, training=training, held_out=task.held_out)
        epochs, lr = int(SCRATCH["epochs"]), SCRATCH["lr"]
        more = {"warm_up": SCRATCH["warm_up"]}
    else:
        model = pretrained_model(task, cache, seed, width=width)[0]
    line = Method(method, {"method": "none"} if callable(setting) else setting)
    rival = setting if callable(setting) else None
    pipeline, evaluate = convergence.prepare(line, model, task, STAGES, seed, epochs, lr=lr, rival=rival, **more)
    began = time.process_time()
    evaluations, trained = train_epochs(pipeline, epochs, evaluate)
    weights = sum(p.numel() for p in model.parameters())
    row = {**dict(zip(KEYS, (part, width, method, seed), strict=True)), **trained, "parameters": weights}
    return {
        **row,
        "eval_loss": evaluations[-1],
        "eval_losses": evaluations,
        "changes": _by_epoch(firsts, changes, epochs) if part == "changes" else [],
        "cpu_seconds": time.process_time() - began,
    }


def _recorded(bits: int | None, firsts: list[float], changes: list[float]) -> Coders:
    """Ends of a link whose changes have these bits, or are exact; a near end records. Gradients are as AQ-SGD's."""
    rows = Exact() if bits is None else Product(Quantized(bits))
    back = Exact() if bits is None else Product(Quantized(2 * bits))
    return Coders(Changes(Recorded(rows, changes), Recorded(Exact(), firsts)), Whole(back))  # type: ignore[arg-type]


def _by_epoch(firsts: Sequence[float], changes: Sequence[float], epochs: int) -> list[float]:
    """The root mean square of changes in each epoch after the first, as a share of that of the first visits."""
    each = len(changes) // (epochs - 1)
    parts = [changes[i * each : (i + 1) * each] for i in range(epochs - 1)]
    whole = statistics.mean(firsts)
    return [(statistics.mean(part) / whole) ** 0.5 for part in parts]


def cases(given: Any) -> list[tuple[Any, ...]]:
    """The keys of all runs, those of the first seed first."""
    return [
        (part, width, name, seed)
        for seed in range(given.seeds)
        for part in given.parts
        for width in (WIDTHS if part == "sizes" else (WIDTH,))
        for name in chosen(RECORDED if part == "changes" else METHODS, given.only)
    ]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, [*METHODS, *RECORDED], "width", "method", "seed")
    text = f"""
        # Appendix H of AQ-SGD, and its figure 1b

        `python -m benchmarks appendix`, on {page.machine(rows)}; a run takes one thread.

        GPT-2 with 8 blocks in {STAGES} stages; model, data and settings are those of [convergence.md](convergence.md)
        where nothing else is said. All first visits have 8 bits. Above FP32: mean of the differences to FP32 with the
        same seed, of training loss (mean over the last epoch). ± is the standard deviation over seeds.
    """
    scratch = f"""
        ## From random weights (figure 7)

        {SCRATCH["sequences"]:g} sequences of WikiText-2's training text, {SCRATCH["epochs"]:g} epochs with
        {100 * SCRATCH["warm_up"]:g} % of warm-up, learning rate {SCRATCH["lr"]:g}.
    """
    sizes = """
        ## Sizes of a model (figure 9g)

        One family by the width of its blocks, each pre-trained on the same text; one learning rate for all, where the
        paper has a smaller one for the larger model.
    """
    changes = """
        ## Changes over training (figure 1b)

        The root mean square of a token's change since its sample's last visit, as a share of that of a first visit, in
        epochs 2, 3, … of fine-tuning; mean over links. "Exact changes": without any quantization.
    """
    parts = {"scratch": scratch, "sizes": sizes, "changes": changes}
    lines = [*prose(text)]
    for part, more in parts.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            lines += [*prose(more), *(_changes(own) if part == "changes" else _losses(own))]
    return lines


def _losses(rows: list[Row]) -> list[str]:
    def above(group: list[Row], key: str) -> str:
        base = [row for row in rows if row["method"] == "FP32" and row["width"] == group[0]["width"]]
        differences = page.above(group, base, key)
        if group[0]["method"] == "FP32" or not differences:
            return "–"
        return f"{100 * statistics.mean(differences) / statistics.mean(values(base, key)):+.2f} %"

    def sent(group: list[Row]) -> str:
        ways = ("forward", "backward")
        return share(*(sum(group[0][f"{way}_bytes_{kind}"] for way in ways) for kind in ("sent", "raw")))

    cells = {
        "width": lambda group: group[0]["width"],
        "weights": lambda group: f"{group[0]['parameters'] / 1e6:.2f} M",
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "sent": sent,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": lambda group: above(group, "train_loss"),
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "above FP32's": lambda group: above(group, "eval_loss"),
    }
    return page.columns(cells, page.grouped(rows, "width", "method"))


def _changes(rows: list[Row]) -> list[str]:
    epochs = range(len(rows[0]["changes"]))
    cells = {
        "method": lambda group: group[0]["method"],
        "seeds": len,
        **{f"epoch {e + 2}": lambda group, e=e: spread([row["changes"][e] for row in group], 3) for e in epochs},
    }
    return page.columns(cells, page.grouped(rows, "method"))


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    parts = (list(PARTS), "all or some of them", PARTS)
    given = arguments(argv, __doc__, "seeds", "only", "workers", "data", "cache", parts=parts)
    runs = Runs(given, "appendix", SETUP, KEYS, exact=beside("FP32", "part", "width", "seed"))
    runs.complete(
        train,
        cases(given),
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}  {row['cpu_seconds']:.0f} s",
        page=results,
    )
