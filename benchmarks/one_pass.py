"""Train one pass over data with changes from cluster centers, beside plain quantization.

    python -m benchmarks one_pass [--tasks wikitext versions] [--seeds 3] [--stages 4] [--only NAME ...] [--workers 2]
                                  [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.convergence import BATCH, LEARNING_RATE, MICRO_BATCH, WARM_UP
from benchmarks.page import Row, prose, spread, values
from benchmarks.runner import Runs, arguments, beside, chosen, digest
from benchmarks.training import adamw, in_memory, in_order, sent, train_epochs
from benchmarks.wikitext import HEADS, LENGTH, PRETRAINING, VOCABULARY, WIDTH

SAMPLES, HELD_OUT = 4096, 256
DOCUMENTS, PARAGRAPHS = 64, 4  # of `versions`: documents, sequences of each
CHANGED, LEFT_OUT = 0.04, 0.01  # tokens of a version that are others, or are not there
CLUSTERS = (256, 4096)
BITS = ((2, 4), (3, 6), (4, 8))
TASKS = ("wikitext", "versions")
KEYS = ("task", "method", "stages", "seed")
_TEXT = (SAMPLES, HELD_OUT, DOCUMENTS, PARAGRAPHS, CHANGED, LEFT_OUT)
SETUP = digest([*_TEXT, BATCH, MICRO_BATCH, LEARNING_RATE, WARM_UP, HEADS, LENGTH, PRETRAINING, VOCABULARY, WIDTH])


def methods() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The sections "activations" and "store" of every line, by its name."""
    lines: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"FP32": ({"method": "none"}, {})}
    for forward, backward in BITS:
        bits = {"forward_bits": forward, "backward_bits": backward}
        name = f"fw{forward} bw{backward}"
        lines[f"DirectQ {name}"] = ({"method": "direct", **bits}, {})
        lines[f"DirectQ rotated {name}"] = ({"method": "direct", "rotation": True, **bits}, {})
        if forward < 4:  # DirectQ has one more, for its loss at more bytes
            for clusters in CLUSTERS:
                lines[f"{clusters} clusters {name}"] = ({"method": "aqsgd", **bits}, {"clusters": clusters})
    return lines


def versions(articles: Sequence[Sequence[int]], count: int, seed: int) -> list[list[int]]:
    """Sequences of documents that are sent in again and again, each time with small changes, as arXiv's versions are.

    Args:
        articles: Sequences of tokens, from which documents are made.
        count: How many sequences.
        seed: Seed of the order and the changes.

    Returns:
        `count` sequences of LENGTH tokens. Where a token was left out, all that follow it stand one place earlier.
    """
    draw = random.Random(seed)
    parts = [articles[i * PARAGRAPHS : (i + 1) * PARAGRAPHS] for i in range(DOCUMENTS)]
    documents = [list(itertools.chain.from_iterable(part)) for part in parts]
    known = [token for document in documents for token in document]
    sequences: list[list[int]] = []
    while len(sequences) < count:
        document = draw.choice(documents)
        remaining = (token for token in document if draw.random() >= LEFT_OUT)
        version = [draw.choice(known) if draw.random() < CHANGED else token for token in remaining]
        sequences += [version[at : at + LENGTH] for at in range(0, len(version) - LENGTH + 1, LENGTH)]
    return sequences[:count]


def sequences_of(task: str, tokens: Any, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sequences of the single pass and the held-out ones. tokens: of WikiText-2, see `wikitext_task`."""
    if task == "versions":
        sequences = versions(tokens.training.tolist(), SAMPLES + HELD_OUT, seed)
    else:
        import torch

        order = torch.randperm(len(tokens.pretraining), generator=torch.Generator().manual_seed(seed))
        start = int(PRETRAINING["tokens"]) // LENGTH  # those before have been pre-trained on
        sequences = tokens.pretraining[order[start : start + SAMPLES + HELD_OUT]].tolist()
    return sequences[:SAMPLES], sequences[SAMPLES:]


def train(task: str, method: str, stages: int, seed: int, data: Path, cache: Path) -> Row:
    """One run. Loads what it needs, so that it can be a process of its own."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.wikitext import pretrained_model, wikitext_task

    tokens = wikitext_task(data, cache)
    model, _ = pretrained_model(tokens, cache, seed)
    return {"task": task, **one_pass(model, method, stages, seed, *sequences_of(task, tokens, seed))}


def one_pass(
    model: Any, method: str, stages: int, seed: int, training: list[list[int]], held_out: list[list[int]]
) -> Row:
    """Train on every sequence once."""
    from benchmarks.inprocess import InProcessPipeline
    from pipecomp.data import eval_batches
    from pipecomp.demo.task import Sequences

    activations, store = methods()[method]
    steps = len(training) // BATCH
    config = adamw(
        in_memory(activations, seed, **store),
        samples=(BATCH, MICRO_BATCH),
        lr=LEARNING_RATE,
        steps=(steps, min(WARM_UP, steps // 2)),
    )
    pipeline = InProcessPipeline(model, stages, config, Sequences(training))
    losses: list[float] = []
    began = time.process_time()
    batches = eval_batches(Sequences(held_out), 16)
    before = float(pipeline.eval_batch(batches))
    (after,), trained = train_epochs(pipeline, 1, lambda: float(pipeline.eval_batch(batches)), losses.append)
    links = pipeline.comm_stats().values()
    errors = [link["relative_error"] for link in links if link["relative_error"] is not None]
    pipeline.close()
    return {
        **{"method": method, "stages": stages, "seed": seed, "weights": trained["weights"]},
        **{key: trained[key] for key in trained if "bytes" in key and "after" not in key},
        "train_loss": statistics.mean(losses[-max(1, steps // 4) :]),
        "eval_loss_before": before,
        "eval_loss": after,
        "error": statistics.mean(errors) if errors else None,
        "cpu_seconds": time.process_time() - began,
    }


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rows = in_order(rows, methods(), "task", "-stages", "method", "seed")
    text = f"""
        # One pass: data that never come back

        `python -m benchmarks one_pass`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(values(rows, "cpu_seconds")):.0f} s of it.

        The pre-trained GPT-2 of [convergence.md](convergence.md) trains on {SAMPLES} sequences of {LENGTH} tokens, each
        of them once, in steps of {BATCH} in micro-batches of {MICRO_BATCH}; AdamW, learning rate {LEARNING_RATE:g} with
        {WARM_UP} steps of warm-up and linear decay. With per-sample messages AQ-SGD would send every one of them as a
        first visit. "C clusters" is AQ-SGD with `"store": {{"clusters": C}}`: rows are sent as changes from centers of
        earlier rows (docs/algorithms.md, 1.8), whose numbers are in the bytes.

        wikitext: sequences of WikiText-2's training text that pre-training has not seen. versions: {DOCUMENTS}
        documents of {PARAGRAPHS} such sequences of its validation text, sent in again and again, each time with
        {CHANGED:.0%} of the tokens changed and {LEFT_OUT:.0%} left out, as versions of a paper are.

        Training loss: mean over the last quarter of the pass. ± is the standard deviation over seeds; above FP32: mean
        difference with the same seed. DirectQ at these bytes: what DirectQ would be above FP32 with as many bytes
        forward, on straight lines between its bits. Of the loss that DirectQ adds there, the share that clusters save
        is in brackets. Error: ‖sent − x‖ / ‖x‖, mean over the first micro-batches of all steps.
    """
    lines = prose(text)
    for group in page.grouped(rows, "task", "stages"):
        lines += [f"## {group[0]['task']}, K = {group[0]['stages']}", "", *_table(group)]
    return lines


def _table(rows: list[Row]) -> list[str]:
    base = [row for row in rows if row["method"] == "FP32"]
    direct = sorted(
        (_bits(group[0]), statistics.mean(differences))
        for group in page.grouped(rows, "method")
        if group[0]["method"].startswith("DirectQ fw") and (differences := page.above(group, base, "train_loss"))
    )

    def above(group: list[Row]) -> str:
        return "–" if group[0]["method"] == "FP32" else spread(page.above(group, base, "train_loss"), sign="+")

    def at_equal_bytes(group: list[Row]) -> str:
        differences = page.above(group, base, "train_loss")
        if "clusters" not in group[0]["method"] or not differences:
            return "–"
        other = between(direct, _bits(group[0]))
        return "–" if other is None else f"{other:+.4f} ({1 - statistics.mean(differences) / other:.0%})"

    cells = {
        "method": lambda group: group[0]["method"],
        "seeds": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "above FP32": above,
        "DirectQ at these bytes": at_equal_bytes,
        "held-out loss": lambda group: spread(values(group, "eval_loss")),
        "forward sent": lambda group: sent(group[0], "forward_bytes_{}"),
        "error": lambda group: "–" if group[0]["error"] is None else spread(values(group, "error"), 3),
        "stores MB": lambda group: f"{group[0]['store_bytes'] / 1e6:.1f}",
    }
    return page.columns(cells, page.grouped(rows, "method"))


def _bits(row: Row) -> float:
    return 32 * row["forward_bytes_sent"] / row["forward_bytes_raw"]


def between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Interpolate at x between sorted points; None beyond them."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    stages = ([4], "K")
    tasks = (list(TASKS), "all or some of them", TASKS)
    given = arguments(argv, __doc__, "seeds", "only", "workers", "data", "cache", stages=stages, tasks=tasks)
    missing = [name for name in ("train.txt", "valid.txt") if not (given.data / name).is_file()]
    if missing and not given.redraw:
        print(f"skipped: {given.data} has no {' and no '.join(missing)}; --data names the folder with WikiText-2")
        return
    names = chosen(list(methods()), given.only)
    cases = [
        (task, name, k, seed)
        for seed in range(given.seeds)
        for k in given.stages
        for task in given.tasks
        for name in names
    ]
    Runs(given, "one_pass", SETUP, KEYS, exact=beside("FP32", "task", "stages", "seed")).complete(
        train,
        cases,
        given.data,
        given.cache,
        line=lambda row: f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}  {row['cpu_seconds']:.0f} s",
        page=results,
    )
