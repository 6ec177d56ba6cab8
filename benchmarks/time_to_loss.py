"""Time trainings over a slow link, first epoch included, until they reach FP32's loss.

    python -m benchmarks time_to_loss [--r 5.8] [--epochs 3 10] [--only NAME ...]
                                      [--data FOLDER] [--cache FOLDER] [--out FOLDER] [--redraw]

A GPT-2 that was pre-trained on WikiText-2's training text is fine-tuned on articles of its validation text over two
stages in two network namespaces (root needed), one thread each. The link's rate is such that the float32 activations
and gradients of a micro-batch, both ways, take r times what a stage computes on it, measured first without a limit.
Stock DeepSpeed trains without a limit, and over the link only its first steps, which time the others. Draws a picture
too. Pages of other links than those with r = 5.8 have r in their name.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.constant_error import CONSTANT
from benchmarks.constant_error import LINES as SETTINGS
from benchmarks.convergence import CHANGES_BACK, quantized
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, beside, chosen, digest, weights_digest
from benchmarks.training import adamw, in_order
from benchmarks.wikitext import PRETRAINING, VOCABULARY
from pipecomp.demo.results import check_same_start, extrapolate
from pipecomp.demo.results import epoch_means as means_over_epochs

STAGES, BATCH, MICRO_BATCH = 2, 16, 1
USUAL_R = 5.8
TRAINING, LENGTH, WIDTH = 256, 128, 256
LEARNING_RATE, WITHIN = 3e-4, 0.005
BITS = {"forward_bits": 3, "backward_bits": 6}
REFERENCE = "DeepSpeed FP32"
WARM_UP, TIMED = 3, 9  # of its steps over the link
CHANNELS = {"scale": "channels", "gain": "unbiased"}
METHODS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    "FP32": {},
    "DirectQ fw3 bw6": {"method": "direct", **BITS},
    "DirectQ fw3 bw6, channel scales": {"method": "direct", **BITS, **CHANNELS},
    "AQ-SGD fw3 bw6, full first visit": {"method": "aqsgd", **BITS},
    "AQ-SGD fw3 bw6, 8-bit first visit": {"method": "aqsgd", **BITS, "first_visit": 8},
    "AQ-SGD fw3 bw6, 4-bit first visit": {"method": "aqsgd", **BITS, "first_visit": 4, "rotation": True},
    "AQ-SGD fw2 bw2, changes back, 8-bit first visit": quantized("aqsgd", 2, 2) | CHANGES_BACK,
    "AQ-SGD fw2 bw2, changes back, 4-bit first visit, channel scales": quantized("aqsgd", 2, 2)
    | CHANGES_BACK
    | {"first_visit": 4, "backward_first_visit": 4, **CHANNELS},
    f"AQ-SGD, {CONSTANT}": SETTINGS[CONSTANT],
    f"AQ-SGD, {CONSTANT}, channel scales": SETTINGS[CONSTANT] | CHANNELS,
}


def train(name: str, epochs: int, rate: int | None, data: Path, cache: Path) -> Row:
    """One training; rate in bit/s."""
    if name != REFERENCE or rate is None:
        return _train(name, epochs, rate, data, cache)
    timed = _train(name, epochs, rate, data, cache, WARM_UP + TIMED)
    row = _train(name, epochs, None, data, cache)
    check_same_start(timed["losses"], row["losses"])
    seconds = extrapolate(timed["seconds"], len(row["losses"]), WARM_UP)
    return {**row, "rate": rate, "seconds": seconds, "measured_steps": WARM_UP + TIMED}


def _train(name: str, epochs: int, rate: int | None, data: Path, cache: Path, steps: int | None = None) -> Row:
    """One training in a lab, or its first `steps`."""
    from pipecomp.netlab import Lab

    with Lab(nodes=STAGES, bandwidth=None if rate is None else f"{rate}bit") as lab:
        with tempfile.TemporaryDirectory() as store:
            ranks = lab.run(one_rank, name, epochs, steps, str(data), str(cache), store, timeout_s=7200)
        sent = sum(node.sent for node in lab.bytes())
    compute = [rank["compute_s"] for rank in ranks.values() if rank["compute_s"]]
    return {
        "method": name,
        "epochs": epochs,
        "rate": rate,
        "bytes": sent,
        "weights": ranks[0]["weights"],
        "losses": ranks[0]["losses"],
        "seconds": ranks[0]["seconds"],
        "compute_s": statistics.fmean(compute) if compute else None,
    }


def one_rank(
    rank: int, world: int, note: Any, name: str, epochs: int, stop: int | None, data: str, cache: str, store: str
) -> dict[str, Any]:
    """Losses and, for each step, the seconds since the first one began."""
    import torch

    torch.set_num_threads(1)
    engine, weights = _engine(name, epochs, Path(data), Path(cache), store)
    losses, seconds = [], []
    began = time.perf_counter()
    for _ in range(stop or epochs * (TRAINING // BATCH)):
        losses.append(float(engine.train_batch()))
        seconds.append(time.perf_counter() - began)
    compute = None
    if hasattr(engine, "comm_stats"):
        spent = engine.comm_stats()["seconds"]
        compute = (spent["forward"] + spent["backward"]) / (len(losses) * (BATCH // MICRO_BATCH))
        engine.close()
    return {"weights": weights, "losses": losses, "seconds": seconds, "compute_s": compute}


def _engine(name: str, epochs: int, data: Path, cache: Path, store: str) -> tuple[Any, str]:
    """The engine, and the digest of the weights that it starts from."""
    import pipecomp
    from benchmarks.wikitext import pretrained_model, wikitext_task
    from pipecomp.bench.training import stock_engine
    from pipecomp.demo.task import Sequences, untie

    task = wikitext_task(data, cache, length=LENGTH, training=TRAINING)
    model, _ = pretrained_model(task, cache, 0, width=WIDTH)
    weights = weights_digest(model)
    untie(model)  # stock DeepSpeed splits it without the tie
    steps, activations = epochs * (TRAINING // BATCH), METHODS[name]
    section: dict[str, Any] = {"tie": False, **({"activations": activations} if activations else {})}
    if activations and activations["method"] == "aqsgd":
        section["store"] = {"path": store}
    shape = {"samples": (BATCH, MICRO_BATCH), "steps": (steps, steps // 8)}
    config = adamw(section, lr=LEARNING_RATE, torch_adam=True, **shape)
    del config["gradient_clipping"]  # each engine's own
    if activations is None:
        del config["pipecomp"]
        engine = stock_engine(model, STAGES, config)
        batches = _batches(task.training)
        one_batch = engine.train_batch
        engine.train_batch = lambda: one_batch(batches)
        return engine, weights
    rows = Sequences(task.training.tolist())
    return pipecomp.initialize(model, num_stages=STAGES, config=config, training_data=rows), weights


def _batches(training: Any) -> Iterator[tuple[Any, Any]]:
    """The product's order of samples, for stock DeepSpeed."""
    import torch

    from pipecomp.data import ShardedSampler

    sampler, number = ShardedSampler(TRAINING, MICRO_BATCH), 0
    while True:
        x = torch.stack([training[i] for i in sampler.batch(number)])
        number += 1
        yield x, x


def link_rate(r: float, data: Path, cache: Path) -> int:
    """bit/s at which what a micro-batch sends takes r times a stage's compute."""
    compute = _train("FP32", 3, None, data, cache, steps=6)["compute_s"]
    return int(8 * 2 * 4 * MICRO_BATCH * LENGTH * WIDTH / (r * compute))


def epoch_means(run: Row) -> list[float]:
    """For every step from the end of the first epoch on: the mean loss of as many steps as an epoch has."""
    return means_over_epochs(run["losses"], len(run["losses"]) // run["epochs"])


def seconds_to(run: Row, loss: float) -> float | None:
    """Seconds until `epoch_means` is at most `loss`; None if it never is."""
    means = epoch_means(run)
    first = len(run["losses"]) - len(means)
    return next((run["seconds"][first + i] for i, mean in enumerate(means) if mean <= loss), None)


def results(rows: list[Row], r: float, picture: Path) -> list[str]:
    """The page, and its picture beside it."""
    rows = in_order(rows, METHODS, "epochs", "method")
    asked = "" if r == USUAL_R else f" --r {r:g}"
    timed = [row["measured_steps"] for row in rows if "measured_steps" in row]
    steps = timed[0] if timed else 0
    derived = (
        f"{REFERENCE} was timed over the link for {steps} steps; the later ones take as long as these after the first "
        f"{WARM_UP}. Its losses are those without a limit, which the first ones over the link equal. "
    )
    text = f"""
        # Time to the loss of FP32 over a slow link

        `python -m benchmarks time_to_loss{asked}`, on {page.machine(rows)}. Link: {rows[0]["rate"] / 1e6:.1f} Mbit/s,
        r = {r:g}.

        Trainings from their first epoch on, without start and evaluation. Loss: the training loss, mean over an epoch's
        steps. Seconds to FP32's loss: until the mean over the last epoch's number of steps is at most {100 * WITHIN:g}
        % above what {REFERENCE} ends with. MB: on the nodes' interfaces. {derived if timed else ""}![loss over
        time]({picture.name})
    """
    groups = {f"{group[0]['epochs']} epochs": group for group in page.grouped(rows, "epochs")}
    return [*prose(text), *sections(groups, REFERENCE, picture, f", r = {r:g}")]


def sections(groups: dict[str, list[Row]], reference: str, picture: Path, link: str = "") -> list[str]:
    """A section for each group of trainings of one length, by its heading; draws losses over time.

    link: behind the headings in the picture.
    """
    with page.picture(picture, across=len(groups), size=(6 * len(groups), 4.5)) as axes:
        for axis, (heading, group) in zip(axes, groups.items(), strict=True):
            for run in group:
                means = epoch_means(run)
                axis.plot([s / 60 for s in run["seconds"][-len(means) :]], means, label=run["method"])
            axis.set(title=f"{heading}{link}", xlabel="minutes", ylabel="training loss", xscale="log")
            axis.legend(fontsize=8)
    return [line for heading, group in groups.items() for line in (f"## {heading}", "", *_table(group, reference))]


def _table(rows: list[Row], reference: str) -> list[str]:
    """Seconds and losses of trainings of one length, beside the reference's."""
    base = next((run for run in rows if run["method"] == reference), None)
    goal = epoch_means(base)[-1] if base else None

    def beside(run: Row) -> tuple[str, ...]:
        """Times faster, final loss above the reference's, seconds to its loss and times faster to it."""
        if base is None or goal is None:
            return ("–",) * 4
        mine, theirs = (seconds_to(one, goal * (1 + WITHIN)) for one in (run, base))
        reached = ("–", "–") if mine is None or theirs is None else (f"{mine:.0f}", f"{theirs / mine:.2f}×")
        faster, loss = base["seconds"][-1] / run["seconds"][-1], epoch_means(run)[-1] / goal - 1
        return f"{faster:.2f}×", f"{100 * loss:+.2f} %", *reached

    cells = {
        "line": lambda run: run["method"],
        "seconds": lambda run: f"{run['seconds'][-1]:.0f}",
        "faster": lambda run: beside(run)[0],
        "final loss": lambda run: f"{epoch_means(run)[-1]:.4f}",
        "above FP32": lambda run: beside(run)[1],
        "seconds to FP32's loss": lambda run: beside(run)[2],
        "faster to it": lambda run: beside(run)[3],
        "MB": lambda run: f"{run['bytes'] / 1e6:.0f}",
    }
    return page.columns(cells, rows)


def kept_rate(runs: Runs, cases: Sequence[tuple[Any, ...]], measure: Callable[[], int]) -> int | None:
    """Return the link's rate of the kept runs, else a new one if a run is missing."""
    return runs.rows[0]["rate"] if runs.rows else measure() if runs.missing(cases) else None


def run_line(row: Row) -> str:
    """Return the line that is printed of a run."""
    return f"{row['seconds'][-1]:.0f} s  loss {row['losses'][-1]:.4f}"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    r = (USUAL_R, "the link: float32 transfer over compute of a micro-batch")
    epochs = ([3, 10], "lengths of training")
    given = arguments(argv, __doc__, "only", "data", "cache", r=r, epochs=epochs)
    setup = digest([BATCH, MICRO_BATCH, TRAINING, LENGTH, WIDTH, LEARNING_RATE, PRETRAINING, VOCABULARY, given.r])
    name = "time_to_loss" if given.r == USUAL_R else f"time_to_loss_r{given.r:g}"
    runs = Runs(given, name, setup, ("method", "epochs"), exact=beside(REFERENCE, "epochs"))
    cases = [(name, epochs) for epochs in given.epochs for name in chosen(METHODS, given.only)]
    runs.complete(
        train,
        cases,
        kept_rate(runs, cases, lambda: link_rate(given.r, given.data, given.cache)),
        given.data,
        given.cache,
        line=run_line,
        page=lambda rows: results(rows, given.r, given.out / f"{name}.png"),
    )
