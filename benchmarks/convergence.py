"""Fine-tune a pre-trained GPT-2 over compressed links, and compare its losses with FP32's.

    python -m benchmarks convergence [--seeds 3] [--stages 4 2] [--only NAME ...] [--workers 2]
                                     [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import direct, page
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.training import adamw, byte_columns, in_memory, in_order, train_epochs
from benchmarks.wikitext import HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY

EPOCHS, BATCH, MICRO_BATCH = 6, 16, 8
LEARNING_RATE, WARM_UP = 5e-4, 24
BITS = ((2, 4), (3, 6), (4, 8))
DROPOUT = 0.1  # Hugging Face's default for GPT-2
DROPPED = {DROPOUT: ", dropout", DROPOUT / 2: ", half of that dropout"}  # what says so in a method's name
CHANGES_BACK = {"first_visit": 8, "backward_method": "delta"}
BACK = ", changes back"  # gradients are sent as changes too
SETUP = digest(
    [EPOCHS, BATCH, MICRO_BATCH, LEARNING_RATE, WARM_UP, HELD_OUT, LENGTH, PRETRAINING, TRAINING, VOCABULARY]
)


@dataclass(frozen=True)
class Method:
    """One line of the table: sections of the configuration, and where it is run."""

    name: str
    activations: dict[str, Any]
    store: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    dropout: float = 0.0
    main: bool = False
    every_k: bool = False
    micro_batch: int = MICRO_BATCH  # samples, of which a packet is
    rival: Any = None  # the ends of links in place of `activations`


def methods() -> list[Method]:
    """All lines, the most important first."""
    lines = [Method("FP32", {"method": "none"}, main=True)]
    for forward, backward in BITS:
        for label, method in (("DirectQ", "direct"), ("AQ-SGD", "aqsgd")):
            name = f"{label} fw{forward} bw{backward}"
            lines.append(Method(name, quantized(method, forward, backward), main=True, every_k=True))
    for name, forward, extra, bits in (
        ("first visit 8 bits, m8", 4, {"first_visit": 8}, 8),
        ("m8", 4, {}, 8),
        ("first visit 8 bits", 4, {"first_visit": 8}, 32),
        ("m8", 2, {}, 8),
        ("first visit 8 bits", 2, {"first_visit": 8}, 32),
        ("m2", 2, {}, 2),
        ("first visit 4 bits", 2, {"first_visit": 4}, 32),
        ("rms scale", 2, {"scale": "rms"}, 32),
        ("groups of 64", 2, {"group_size": 64}, 32),
        ("stochastic", 2, {"rounding": "stochastic"}, 32),
        ("bw8[0.2]", 2, {"backward_bits": 8, "backward_top_k": 0.2}, 32),
        ("bw8[0.2]", 4, {"backward_top_k": 0.2}, 32),
        ("m2", 4, {}, 2),
    ):
        backward = 2 * forward
        base = f"AQ-SGD fw{forward}" if "backward_top_k" in extra else f"AQ-SGD fw{forward} bw{backward},"
        activations = {**quantized("aqsgd", forward, backward), **extra}
        store = {} if bits == 32 else {"bits": bits}
        lines.append(Method(f"{base} {name}", activations, store, every_k="backward_top_k" in extra))
    lines += [
        Method(f"AQ-SGD fw{b} bw{b}, first visit 8 bits{name}", quantized("aqsgd", b, b) | more, every_k=True)
        for b in (2, 3)
        for name, more in (("", {"first_visit": 8}), (BACK, CHANGES_BACK))
    ]
    for forward, backward in BITS:
        for form, setting in direct.forms(forward, backward).items():
            name, rival = f"DirectQ fw{forward} bw{backward}{form}", setting if callable(setting) else None
            section = {"method": "none"} if callable(setting) else setting
            lines += [Method(name, section, every_k=True, rival=rival)] if form else []
    for share, name in DROPPED.items():
        lines.append(Method(f"FP32{name}", {"method": "none"}, dropout=share))
        for forward, backward in BITS:
            for label, method in (("DirectQ", "direct"), ("AQ-SGD", "aqsgd")):
                activations = quantized(method, forward, backward)
                lines.append(Method(f"{label} fw{forward} bw{backward}{name}", activations, dropout=share))
    for b in (2, 3):
        activations = quantized("aqsgd", b, b) | CHANGES_BACK
        name = f"AQ-SGD fw{b} bw{b}, first visit 8 bits{BACK}{DROPPED[DROPOUT]}"
        lines.append(Method(name, activations, dropout=DROPOUT))
    lines.append(Method("BF16", {"method": "none"}, bf16=True))
    lines.append(Method("BF16, AQ-SGD fw4 bw8", quantized("aqsgd", 4, 8), bf16=True))
    return lines


def quantized(method: str, forward: int, backward: int) -> dict[str, Any]:
    """Give the section "activations" with these bits."""
    return {"method": method, "forward_bits": forward, "backward_bits": backward}


def train(name: str, stages: int, seed: int, data: Path, cache: Path) -> Row:
    """One run of a method of the table."""
    method = next(m for m in methods() if m.name == name)
    return fine_tune(method, stages, seed, EPOCHS, data, cache)


def fine_tune(method: Method, stages: int, seed: int, epochs: int, data: Path, cache: Path) -> Row:
    """One run. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)  # of dropout
    from benchmarks.wikitext import pretrained_model, wikitext_task
    from pipecomp.bench.training import products_in_float32

    task = wikitext_task(data, cache)
    model, report = pretrained_model(task, cache, seed)
    set_dropout(model, method.dropout)
    pipeline, evaluate = prepare(method, model, task, stages, seed, epochs, rival=method.rival)
    began = time.process_time()
    with products_in_float32(method.bf16):
        before = evaluate()
        evaluations, trained = train_epochs(pipeline, epochs, evaluate)
    return {
        "method": method.name,
        "stages": stages,
        "seed": seed,
        "eval_loss": evaluations[-1],
        "eval_loss_before": before,
        "eval_losses": evaluations,
        **trained,
        "cpu_seconds": time.process_time() - began,
        **report,
    }


def prepare(
    method: Method,
    model: Any,
    task: Any,
    stages: int,
    seed: int,
    epochs: int,
    *,
    lr: float = LEARNING_RATE,
    rival: Any = None,
    warm_up: float | None = None,
) -> tuple[Any, Callable[[], float]]:
    """The pipeline that fine-tunes a model on the task, and what evaluates it.

    rival: see `InProcessPipeline`. warm_up: share of the steps, by default WARM_UP of EPOCHS.
    """
    from benchmarks.inprocess import InProcessPipeline
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    training, held_out = Sequences(task.training.tolist()), eval_batches(Sequences(task.held_out.tolist()), 16)
    steps = epochs * (len(training) // BATCH)
    config = adamw(
        in_memory(method.activations, seed, **method.store),
        samples=(BATCH, method.micro_batch),
        lr=lr,
        steps=(steps, WARM_UP * epochs // EPOCHS if warm_up is None else round(warm_up * steps)),
    )
    if method.bf16:
        half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config |= {**half, "zero_optimization": {"stage": 1}}
    pipeline = InProcessPipeline(model, stages, config, training, rival=rival)
    return pipeline, lambda: float(pipeline.eval_batch(held_out))


def set_dropout(model: Any, share: float) -> None:
    """Train on with dropout of embeddings, attention and blocks."""
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, share)
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.p = share


def cases(stages: list[int], seeds: int, only: list[str]) -> list[tuple[str, int, int]]:
    """(method, K, seed) in the order in which they are worth having."""
    names = chosen([m.name for m in methods()], only)
    lines = [m for m in methods() if m.name in names]
    first = [(m.name, stages[0], seed) for seed in range(seeds) for m in lines if m.main]
    rest = [(m, stages[0]) for m in lines if not m.main and not m.bf16]
    rest += [(m, k) for k in stages[1:] for m in lines if m.every_k]  # FP32 is the same, bit for bit, for every K
    rest += [(m, stages[0]) for m in lines if m.bf16]
    return first + [(m.name, k, seed) for seed in range(seeds) for m, k in rest]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, [m.name for m in methods()], "method", "-stages", "seed")
    exact = _of(rows, "FP32")
    text = f"""
        # Convergence with compressed links

        `python -m benchmarks convergence`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        GPT-2 with 8 layers, d = 128, 4 heads, {VOCABULARY} tokens (byte-level BPE) and no dropout, pre-trained once per
        seed on {int(PRETRAINING["tokens"]) // 1000}k tokens of WikiText-2's training text, then fine-tuned {EPOCHS}
        epochs on {TRAINING} sequences of {LENGTH} tokens from articles of its validation text. {HELD_OUT} more
        sequences of these articles are held out; the loss on them before fine-tuning is
        {spread(values(exact, "eval_loss_before"))} (random weights: {math.log(VOCABULARY):.2f}). AdamW, learning rate
        {LEARNING_RATE:g} with {WARM_UP} steps of warm-up and linear decay, {BATCH} samples a step in micro-batches of
        {MICRO_BATCH}, gradients clipped at norm 1. A seed sets initial weights, pre-training data and order; all else
        is the same for all methods. The stages run in one process (`inprocess.py`) with the engine's losses, bit for
        bit (`tests/benchmarks/test_inprocess.py`); after every run the two ends of every link held the same cached
        activations.

        Training loss: mean over the last epoch. ± is the standard deviation over seeds, most of which comes from the
        seed's own pre-training; above FP32 is the mean of the differences to FP32 (to BF16 for BF16 training) with the
        same seed.

        ## The gap that AQ-SGD closes

        (DirectQ − AQ-SGD) / (DirectQ − FP32) of the means over seeds, with the best of DirectQ's forms that ran with
        these bits; in brackets the single seeds.
    """
    more = f"""
        ## All methods

        Sent: bytes of packets, headers and scales included, as a share of the values' bytes in the training dtype;
        forward over all epochs and without the first, in which samples are sent uncompressed. FP32 is the same, bit for
        bit, for every K. Stores: both ends of all links together. Matrix products of BF16 training are computed in
        float32 and rounded (`pipecomp/bench/training.py`). Lines that say "dropout" train with dropout of {DROPOUT:g}
        in embeddings, attention and blocks, the default of Hugging Face's GPT-2, or half of that, and are compared with
        FP32 training that does: a sample's activations then change from visit to visit by their masks too, which is
        what AQ-SGD sends. "Changes back": gradients too are sent as changes since the sample's last visit
        (`"backward_method": "delta"`), a first one with 8 bits. {direct.CLIPPING}
    """
    return [*prose(text), *_gaps(rows), *prose(more), *_table(rows)]


def exact_of(name: str) -> str:
    """The line without compression that a method is compared with."""
    dropped = next((suffix for suffix in DROPPED.values() if name.endswith(suffix)), "")
    return "BF16" if name.startswith("BF16") else f"FP32{dropped}"


def _of(rows: list[Row], method: str, stages: int | None = None) -> list[Row]:
    return [row for row in rows if row["method"] == method and stages in (None, row["stages"])]


def _gaps(rows: list[Row]) -> list[str]:
    """Table of the share of DirectQ's loss above FP32 that AQ-SGD recovers."""
    lines = []
    for stages in sorted({row["stages"] for row in rows}, reverse=True):
        for bits in (f"fw{forward} bw{backward}" for forward, backward in BITS):
            forms = [_of(rows, name, stages) for name in direct.names(f"DirectQ {bits}")]
            cells: list[Any] = []
            for key in ("train_loss", "eval_loss"):
                three = (direct.best(forms, key), _of(rows, f"AQ-SGD {bits}", stages), _of(rows, "FP32"))
                by_seed = [{(row["seed"], row["weights"]): row[key] for row in group} for group in three]
                seeds = sorted(set.intersection(*map(set, by_seed)))
                if seeds:
                    form = three[0][0]["method"].removeprefix(f"DirectQ {bits}").removeprefix(", ") or "largest value"
                    cells += [form, len(seeds), _closed(*([series[seed] for seed in seeds] for series in by_seed))]
            if len(cells) == 6:
                lines.append([bits, stages, *cells])
    headings = ("bits", "K", "best DirectQ", "seeds", "training loss", "best, held out", "seeds", "held-out loss")
    return page.table(headings, lines)


def _closed(direct: Sequence[float], delta: Sequence[float], exact: Sequence[float]) -> str:
    single = ", ".join(f"{(x - y) / (x - z):.2f}" for x, y, z in zip(direct, delta, exact, strict=True))
    return f"{(sum(direct) - sum(delta)) / (sum(direct) - sum(exact)):.3f} ({single})"


def _table(rows: list[Row]) -> list[str]:
    """One line per method and K. Bytes are those of training over all links."""

    def above(group: list[Row]) -> str:
        name = group[0]["method"]
        reference = exact_of(name)
        seeds = values(group, "seed")
        base = [row for row in _of(rows, reference) if row["seed"] in seeds]
        if name == reference or not base:
            return "–"
        difference = statistics.mean(page.above(group, base, "train_loss"))
        return f"{difference:+.4f} ({100 * difference / statistics.mean(values(base, 'train_loss')):+.2f} %)"

    cells = {
        "method": lambda group: group[0]["method"],
        "K": lambda group: "any" if group[0]["method"] == "FP32" else group[0]["stages"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": above,
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        **byte_columns(),
        "stores MB": lambda group: f"{group[0]['store_bytes'] / 1e6:.1f}",
    }
    return page.columns(cells, page.grouped(rows, "method", "stages"))


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    stages = ([4, 2], "K; variants are run for the first only")
    given = arguments(argv, __doc__, "seeds", "only", "workers", "data", "cache", stages=stages)
    keys = ("method", "stages", "seed")

    def exact(row: Row) -> Row:
        return {"method": exact_of(row["method"]), "seed": row["seed"]}

    Runs(given, "convergence", SETUP, keys, exact=exact).complete(
        train,
        cases(given.stages, given.seeds, given.only),
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}  {row['cpu_seconds']:.0f} s",
        page=results,
    )
