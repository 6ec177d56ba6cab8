"""Compare the figures of README.md and docs/ with the kept runs.

    python -m benchmarks figures

The pages of results/ are made of the kept rows (tests/benchmarks/test_runner.py checks that they match); `figures` has
the sentences of the documents that quote them, with {} for each figure, and where each comes from. Exit status 1 if a
figure is not the page's, rounded as the document rounds it, or if a document no longer has a sentence.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.constant_error import BASE, CONSTANT, KEYS
from benchmarks.runner import RESULTS, ROOT, arguments, read_rows
from pipecomp.errors import DataError

_NUMBER = r"[−+-]?\d[\d,]*(?:\.\d+)?"


class Shown(NamedTuple):
    """A value, and half of the last digit with which a page shows it."""

    value: float
    half: float = 0.0


class Figure(NamedTuple):
    """A sentence of a document, with {} in place of its figures, and their values."""

    document: str
    sentence: str
    values: tuple[Shown, ...]


def number(text: str) -> Shown:
    """Read a number as a page or document writes it."""
    digits = text.replace("−", "-").replace(",", "")
    decimals = len(digits.partition(".")[2])
    return Shown(float(digits), 0.5 * 10.0**-decimals)


@functools.cache
def tables(page: str, folder: Path = RESULTS) -> tuple[tuple[tuple[str, ...], list[str], list[list[str]]], ...]:
    """The tables of a page of results/: the titles above each, its headings, and its rows of cells."""
    titles: list[str] = []
    found: list[tuple[tuple[str, ...], list[str], list[list[str]]]] = []
    lines = (folder / f"{page}.md").read_text(encoding="utf-8").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            titles = [*titles[: level - 1], line.lstrip("# ")]
        if not line.startswith("|") or set(line) <= set("|-"):
            continue
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if before.startswith("|"):
            found[-1][2].append(cells)
        else:
            found.append((tuple(titles), cells, []))
    return tuple(found)


def at(page: str, column: str, *cells: str, section: str = "", part: int = 0) -> Shown:
    """The number of the one row of a page that has all of `cells`.

    Args:
        page: name of a page in results/, without ".md".
        column: heading of the number.
        cells: texts of other cells of the row.
        section: part of a title above the table.
        part: which of several numbers of the cell, such as the deviation behind ±.
    """
    rows = [
        row[headings.index(column)]
        for titles, headings, body in tables(page)
        if column in headings and any(section in title for title in titles)
        for row in body
        if all(row.count(cell) >= cells.count(cell) for cell in cells)
    ]
    if len(rows) != 1:
        raise DataError(f"{page}.md: {len(rows)} rows of {section!r} with {cells} and {column!r}, not one")
    return number(re.findall(_NUMBER, rows[0])[part])


def ratio(a: Shown, b: Shown, percent: bool = False) -> Shown:
    """a / b, or how many percent a is above b."""
    value, half = a.value / b.value, (a.half + b.half * a.value / b.value) / b.value
    return Shown(100 * (value - 1), 100 * half) if percent else Shown(value, half)


def span(values: Iterable[Shown]) -> tuple[Shown, Shown]:
    """The least and the largest."""
    values = list(values)
    return min(values), max(values)


def fraction(shown: Shown) -> Shown:
    """A percentage as a share."""
    return Shown(shown.value / 100, shown.half / 100)


def problems(figure: Figure, text: str) -> list[str]:
    """Compare a sentence's figures with their values; text: of the document, white space as single spaces."""
    pattern = re.escape(" ".join(figure.sentence.split())).replace(r"\{\}", f"({_NUMBER})").replace("…", r"[^)]*")
    match = re.search(pattern, text)
    if match is None:
        return [f"{figure.document}: no sentence {figure.sentence!r}"]
    return [
        f"{figure.document}: {figure.sentence!r} says {said}, the runs {value.value:.6g}"
        for said, value in zip(match.groups(), figure.values, strict=True)
        if abs(abs(number(said).value) - abs(value.value)) > (number(said).half + value.half) * 1.0001
        or (said[0] in "−-") != (value.value < 0 and number(said).value != 0)
    ]


def text_of(document: str) -> str:
    """Return a document's text, white space as single spaces, its signs beside their numbers."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split()).replace("+ ", "+").replace("− ", "−")


# -- the figures

README, MEASURED, CONFIGURATION = "README.md", "docs/measured.md", "docs/configuration.md"


def _loss(method: str, setting: str, *, dropout: str = "without", task: str = "GPT-2") -> Shown:
    """Training loss above FP32's over 4 stages, in percent."""
    return at("shootout", "above FP32", dropout, "4", method, setting, section=task)


def _both(method: str, *settings: str) -> tuple[Shown, ...]:
    return tuple(_loss(method, setting, dropout=d) for d in ("without", "with") for setting in settings)


def _equal(method: str, *settings: str) -> tuple[Shown, ...]:
    """Bytes and loss of a method's settings, of GPT-2 and of Llama."""
    return tuple(
        shown
        for task in ("GPT-2", "Llama")
        for setting in settings
        for shown in (
            at("shootout", "of FP32's", "without", "4", method, setting, section=task),
            _loss(method, setting, task=task),
        )
    )


def _plan(plan: str) -> tuple[Shown, ...]:
    """Loss above FP32's of a plan over 4 stages, in percent, of each task without and with dropout."""
    return tuple(
        at("constant_error", "above FP32", "× 1", dropout, "4", f"a plan's, {plan}", section=task)
        for task in ("GPT-2", "QNLI", "CoLA")
        for dropout in ("without", "with")
    )


def _constant_error(tasks: Sequence[str], rates: Sequence[float]) -> tuple[Shown, Shown, Shown, Shown]:
    """Constant error beside 3 and 6 bits: least, largest and mean loss above theirs over all cases, share of bytes."""
    keys, cases = [key for key in KEYS if key != "method"], defaultdict(list)
    rows = [row for row in read_rows(RESULTS / "constant_error.jsonl") if row["dropout"] != "half"]
    base = {tuple(row[key] for key in keys): row for row in rows if row["method"] == BASE}
    for row in rows:
        if row["method"] == CONSTANT and row["task"] in tasks and row["rate"] in rates:
            other = base[tuple(row[key] for key in keys)]
            cases[tuple(row[key] for key in keys[:-1])].append(
                (100 * (row["train_loss"] / other["train_loss"] - 1), sum(row["bytes"][-1]) / sum(other["bytes"][-1]))
            )
    losses, shares = ([statistics.mean(pair[i] for pair in case) for case in cases.values()] for i in (0, 1))
    return Shown(min(losses)), Shown(max(losses)), Shown(statistics.mean(losses)), Shown(statistics.mean(shares))


def _held_out(method: str, setting: str, task: str) -> Shown:
    """Held-out loss above FP32's with dropout over 4 stages, in percent."""
    mine = at("shootout", "held-out loss", "with", "4", method, setting, section=task)
    return ratio(mine, at("shootout", "held-out loss", "with", "4", "FP32", section=task), percent=True)


def _scaled(task: str, column: str, method: str, dropout: str) -> Shown:
    return at("scales", column, dropout, "any" if method == "FP32" else "4", method, section=task)


def _lost(bits: str) -> Shown:
    """Accuracy that MiniLM on QNLI with dropout loses."""
    shown = _scaled("QNLI", "beside FP32's", bits, "with")
    return Shown(-shown.value, shown.half)


def _scales(task: str, column: str, without: str, with_dropout: str) -> tuple[Shown, ...]:
    """Bytes, and a number of a line's runs without and of one's with dropout."""
    numbers = (_scaled(task, column, without, "without"), _scaled(task, column, with_dropout, "with"))
    return _scaled(task, "sent", without, "without"), *numbers


def _stages(task: str, method: str) -> tuple[Shown, Shown]:
    """The least and the largest metric of a method over 2, 4 and 6 stages."""
    metric = {"QNLI": "accuracy", "CoLA": "Matthews correlation"}[task]
    return span(at("classification", metric, method, k, section=task) for k in ("2", "4", "6"))


def _paired(what: str, against: str) -> Shown:
    return at("paired", "ratio of step times", what, against)


def _inverse(shown: Shown) -> Shown:
    return ratio(Shown(1.0), shown)


def _one_pass(*methods: str) -> tuple[Shown, ...]:
    return tuple(at("one_pass", "above FP32", method, section="wikitext") for method in methods)


def _saved(*methods: str) -> tuple[Shown, ...]:
    return tuple(at("one_pass", "DirectQ at these bytes", m, section="wikitext", part=1) for m in methods)


def _gpt2(method: str) -> Shown:
    """Training loss of compressed gradients above FP32's, in percent."""
    loss = [at("gradients", "training loss", m, "2", section="GPT-2") for m in (method, "FP32")]
    return ratio(*loss, percent=True)


def _local(column: str, *cells: str, task: str = "GPT-2") -> Shown:
    return at("local_steps", column, *cells, section=task)


_AQ3, _AQ2 = "AQ-SGD fw3 bw6, 16 micro-batches", "AQ-SGD fw2 bw4, 16 micro-batches"
_BACK = "AQ-SGD fw2 bw2, 16 micro-batches, changes back"
_FOUR = "fw2 bw2, changes back, first visits 4 bits"
_FASTER, _FIRST = "faster to it", "AQ-SGD fw3 bw6, 8-bit first visit"
_LINE = "AQ-SGD, constant error 0.05/0.1, at most fw3 bw6"
_SLOW = ("global_qsgd, exponential, 8 bits", "double_squeeze, 4 bits", "double_squeeze, 1 bit", "casq, 4 bits")
_BITS = ("fw2 bw4", "fw3 bw6", "fw4 bw8")


def _throughput(link: str, line: str) -> Shown:
    return at("throughput", "s", line, section=link)


def figures() -> list[Figure]:
    """All sentences with figures that come from runs."""
    plain = ("fw2 bw4", "fw4 bw8")
    links = (
        ("unlimited | small GPT-2, 2 stages", "2 stages, no limit", _AQ3),
        ("46 Mbit/s | the same", "2 stages, r = 0.93", _AQ2),
        ("7.9 Mbit/s | the same", "2 stages, r = 5.4", _AQ2),
        ("3.8 Mbit/s | the same", "2 stages, r = 11", _AQ2),
        ("8.9 Mbit/s | small GPT-2, 4 stages", "4 stages, r = 5.5", _AQ3),
    )
    readme = [
        Figure(
            README,
            f"{label} | {{}} s | {{}} s | {{}} s |",
            tuple(_throughput(link, line) for line in ("DeepSpeed FP32", "FP32", aqsgd)),
        )
        for label, link, aqsgd in links
    ]
    epochs = ("3 e", "10 e")
    equal = [
        Figure(MEASURED, f"| {label} | {', '.join(['{} %: {} %'] * 3)} | {', '.join(['{} %: {} %'] * 3)} |", values)
        for label, values in (
            ("AQ-SGD, constant error", _equal("AQ-SGD, constant error", "0.1/0.2", "0.05/0.1", "0.025/0.05")),
            ("AQ-SGD, gradients as changes", _equal("AQ-SGD, changes back", "fw2 bw2", "fw3 bw3", "fw4 bw4")),
            ("AQ-SGD", _equal("AQ-SGD", *_BITS)),
            (
                "largest values of changes (top-k)",
                _equal("Top-k of changes", "25 %, bw4", "50 %, bw6", "75 %, bw8"),
            ),
            ("plain quantization, rms scale", _equal("DirectQ, rms scale", *_BITS)),
            ("plain quantization, rotated", _equal("DirectQ, rotated", *_BITS)),
            ("plain quantization, largest value as the scale", _equal("DirectQ", *_BITS)),
            ("TAH-Quant (arXiv:2506.01352)", _equal("TAH-Quant", "fw1/2, bw4", "fw2/3, bw6", "fw3/4, bw8")),
            (
                "skipping tokens that hardly changed (arXiv:2602.10564)",
                _equal("Unchanged tokens skipped", "cosine 0.9, bw4", "cosine 0.95, bw6", "cosine 0.99, bw8"),
            ),
        )
    ]
    return [
        *readme,
        Figure(
            README,
            "on QNLI loses {} of its accuracy, with 3 and 6 bits {} ([more](docs/measured.md)). A small GPT-2's "
            "held-out loss ends {} % above FP32's, {} % without dropout",
            (
                _lost("fw2 bw4, channels, least error"),
                _lost("fw3 bw6, channels, least error"),
                _scaled("GPT-2", "above FP32's", "fw2 bw4, channels, least error", "with"),
                _scaled("GPT-2", "above FP32's", "fw2 bw4, channels, unbiased", "without"),
            ),
        ),
        Figure(
            README,
            "with those of tokens, which GPUs get, {} % and {}",
            (
                _scaled("GPT-2", "above FP32's", "fw2 bw4, max", "with"),
                _lost("fw2 bw4, max"),
            ),
        ),
        Figure(
            README, "{} of the time, step by step", (_paired("AQ-SGD fw3 bw6, no limit", "DeepSpeed FP32, no limit"),)
        ),
        *(
            Figure(document, sentence, tuple(at("time_to_loss", _FASTER, _FIRST, section=e) for e in epochs))
            for document, sentence in (
                (
                    README,
                    "(benchmarks/results/time_to_loss.md) as stock DeepSpeed in 3 epochs, {} times in 10"[:0]
                    + "[{} times as fast](benchmarks/results/time_to_loss.md) as stock DeepSpeed in 3 epochs, {} times",
                ),
                (MEASURED, "{} times as fast as stock DeepSpeed in 3 epochs, {} in 10; plain quantization never"),
            )
        ),
        Figure(
            README,
            "[{} and {} times](benchmarks/results/time_to_loss_r12.md)",
            tuple(at("time_to_loss_r12", _FASTER, _LINE, section=e) for e in epochs),
        ),
        Figure(
            MEASURED,
            "{} and {}; fw2 bw2, changes back {} and {}; constant error {} and {} |",
            tuple(
                at("time_to_loss_r12", _FASTER, line, section=e)
                for line in (
                    "AQ-SGD fw3 bw6, 8-bit first visit",
                    "AQ-SGD fw2 bw2, changes back, 8-bit first visit",
                    _LINE,
                )
                for e in epochs
            ),
        ),
        # -- speed
        Figure(
            MEASURED,
            "| no limit | 3 and 6 | {}× | | | no limit | 2 and 2, changes back | {}× | | | r = 5.8 | 3 and 6 | {}× | "
            "{} | | r = 12 | 2 and 4 | {}× | {} | | r = 18 | 2 and 2, changes back | {}× | {} |",
            (
                _inverse(_paired("AQ-SGD fw3 bw6, no limit", "DeepSpeed FP32, no limit")),
                _inverse(_paired(f"{_BACK}, no limit", "DeepSpeed FP32, no limit")),
                _inverse(_paired(f"{_AQ3}, r = 5.8", "DeepSpeed FP32, r = 5.8")),
                _paired(f"{_AQ3}, r = 5.8", f"{_AQ3}, no limit"),
                _inverse(_paired(f"{_AQ2}, r = 12", "DeepSpeed FP32, r = 12")),
                _paired(f"{_AQ2}, r = 12", f"{_AQ2}, no limit"),
                _inverse(_paired(f"{_BACK}, r = 18", "DeepSpeed FP32, r = 18")),
                _paired(f"{_BACK}, r = 18", f"{_BACK}, no limit"),
            ),
        ),
        Figure(
            MEASURED,
            "| r = 5.5, 4 stages | 3 and 6 | {}× | {} |",
            (
                at("throughput", "× DeepSpeed FP32", _AQ3, section="4 stages, r = 5.5"),
                _inverse(at("throughput", "of its own unthrottled", _AQ3, section="4 stages, r = 5.5")),
            ),
        ),
        Figure(
            MEASURED,
            "| r = 5.4 | 32 and 32: the schedule alone | {}× | {} |",
            (
                at("throughput", "× DeepSpeed FP32", "FP32", section="2 stages, r = 5.4"),
                _inverse(at("throughput", "of its own unthrottled", "FP32", section="2 stages, r = 5.4")),
            ),
        ),
        Figure(
            MEASURED,
            "r = 5.8: {} times (2 bits); r = 12: {}; with a tenth of the rate between replicas {} (1 bit)",
            tuple(
                at(
                    "local_speed",
                    "× stock FP32, 2 replicas",
                    f"{_AQ2}, 2 replicas, {bits} every 16 steps, overlapped",
                    r,
                )
                for bits, r in (("2 bits", "r = 5.8"), ("1 bit", "r = 12"), ("1 bit", "r = 5.8, sites"))
            ),
        ),
        Figure(
            MEASURED,
            "8 bits {}×, `double_squeeze` 4 bits {}×, 1 bit {}×, `casq` 4 bits {}×; without a slow link {}, {}, {}, "
            "{}×",
            tuple(at("slow_allreduce", "times faster", m, section=s) for s in ("100mbit", "127.0.0.1") for m in _SLOW),
        ),
        Figure(
            MEASURED,
            "steps × {} to {} |",
            span(
                at("closed", "over gloo, or of the nominal rate", f"step, {link}", "tls")
                for link in ("r = 5.8", "100mbit", "1gbit", "no limit")
            ),
        ),
        Figure(
            MEASURED,
            "{}, {} and {} % of FP32's bytes for 2, 3 and 4 bits",
            tuple(at("convergence", "after epoch 1", f"AQ-SGD {bits}", "4") for bits in _BITS),
        ),
        # -- loss
        Figure(
            MEASURED,
            "| plain quantization (rms scale, its best here), 2 and 4; 4 and 8 | {} %; {} % | {} %; {} % |",
            _both("DirectQ, rms scale", *plain),
        ),
        Figure(
            MEASURED,
            "| plain quantization (largest value as the scale), 2 and 4; 4 and 8 | {} %; {} % | {} %; {} % |",
            _both("DirectQ", *plain),
        ),
        Figure(MEASURED, "| 2 and 2, changes back | {} % | {} % |", _both("AQ-SGD, changes back", "fw2 bw2")),
        *(Figure(MEASURED, f"| {bits[2]} and {bits[-1]} | {{}} % | {{}} % |", _both("AQ-SGD", bits)) for bits in _BITS),
        Figure(
            CONFIGURATION,
            "held-out loss [{} %](measured.md#loss) above FP32's with {} % of its bytes, with dropout {} %",
            (
                _scaled("GPT-2", "above FP32's", f"{_FOUR}, channels, unbiased", "without"),
                _scaled("GPT-2", "sent", f"{_FOUR}, channels, unbiased", "without"),
                _scaled("GPT-2", "above FP32's", f"{_FOUR}, channels, least error", "with"),
            ),
        ),
        Figure(
            CONFIGURATION,
            "MiniLM on QNLI loses [{}](../benchmarks/results/scales.md) of its accuracy, with 2 and 4 bits {}",
            tuple(_lost(f"{bits}, channels, least error") for bits in ("fw3 bw6", "fw2 bw4")),
        ),
        *(
            Figure(MEASURED, f"| {task}, {bits} | {scale} | {{}} % | {{}} % | {{}} % |", figures)
            for task, with_dropout in (("GPT-2", "least error"), ("Llama with LoRA", "unbiased"))
            for bits, line in (("2 and 4", "fw2 bw4"), ("2 and 2, changes back, first visits 4", _FOUR))
            for scale, of_lines in (
                ("tokens", (f"{line}, max",) * 2),
                ("channels", (f"{line}, channels, unbiased", f"{line}, channels, {with_dropout}")),
            )
            if (line, scale) != (_FOUR, "tokens")
            for figures in (_scales(task.split()[0], "above FP32's", *of_lines),)
        ),
        *(
            Figure(MEASURED, f"| MiniLM on QNLI, {label} | {scale} | {{}} % | {{}} | {{}} |", figures)
            for label, scale, of_lines in (
                ("2 and 4", "tokens", ("fw2 bw4, max",) * 2),
                ("2 and 4", "channels", ("fw2 bw4, channels, unbiased", "fw2 bw4, channels, least error")),
            )
            for figures in (_scales("QNLI", "beside FP32's", *of_lines),)
        ),
        *(
            Figure(MEASURED, f"| {label} |{' {} % (…) |' * 6}", _plan(plan))
            for label, plan in (("links hide 8 bits", "8 bits hidden"), ("slowest links", "slowest links"))
        ),
        Figure(
            MEASURED,
            "QNLI {} to {} (FP32 {}), CoLA {} to {} (Matthews; FP32 {} ± {})",
            (
                *_stages("QNLI", "AQ-SGD fw2 bw4"),
                at("classification", "accuracy", "FP32", section="QNLI"),
                *_stages("CoLA", "AQ-SGD fw2 bw4"),
                at("classification", "Matthews correlation", "FP32", section="CoLA"),
                at("classification", "Matthews correlation", "FP32", section="CoLA", part=1),
            ),
        ),
        Figure(
            MEASURED,
            "plain quantization with max scales {} to {} and at most {}; with 8-bit first visits over 4 stages {}, "
            "rotated plain quantization, its best, {}, over 2 stages {} and {}",
            (
                *_stages("QNLI", "DirectQ fw2 bw4"),
                _stages("CoLA", "DirectQ fw2 bw4")[1],
                *(
                    at("shootout", "accuracy", "without", k, method, "fw2 bw4", section="QNLI")
                    for k in ("4", "2")
                    for method in ("AQ-SGD", "DirectQ, rotated")
                ),
            ),
        ),
        Figure(
            MEASURED,
            "2 and 4 bits: 256 centers {}, 4,096 centers {}, plain {}; 3 and 6 bits: {}, {}, {} (plain",
            (
                *_one_pass("256 clusters fw2 bw4", "4096 clusters fw2 bw4"),
                at("one_pass", "DirectQ at these bytes", "256 clusters fw2 bw4", section="wikitext"),
                *_one_pass("256 clusters fw3 bw6", "4096 clusters fw3 bw6"),
                at("one_pass", "DirectQ at these bytes", "256 clusters fw3 bw6", section="wikitext"),
            ),
        ),
        Figure(
            MEASURED,
            "{} % of the bytes, FP32's accuracy of {}; plain {} |",
            (
                at("split_learning", "forward bytes", "AQ-SGD fw2 bw8[0.2], first visit 8 bits", part=1),
                at("split_learning", "accuracy", "FP32"),
                at("split_learning", "accuracy", "DirectQ fw2 bw8[0.2]"),
            ),
        ),
        *(
            Figure(MEASURED, f"| {task} | {which} | {{}} to {{}} %, mean {{}} % | {{}} |", _constant_error(*cases))
            for task, which, cases in (
                ("GPT-2", "a third, one and three times the usual", (("GPT-2",), (0.3333, 1, 3))),
                ("Llama with LoRA", "the same", (("Llama",), (0.3333, 1, 3))),
            )
        ),
        Figure(
            MEASURED,
            "| MiniLM on QNLI; CoLA | the usual | {} to {} %; {} to {} % | {} |",
            (
                *_constant_error(("QNLI",), (1,))[:2],
                *_constant_error(("CoLA",), (1,))[:2],
                _constant_error(("QNLI", "CoLA"), (1,))[3],
            ),
        ),
        Figure(
            MEASURED,
            "| MiniLM on both | a third; three times | {} to {} %; {} to {} %, chance | {}; {} |",
            tuple(
                _constant_error(("QNLI", "CoLA"), (rate,))[i]
                for i, rate in ((0, 0.3333), (1, 0.3333), (0, 3), (1, 3), (3, 0.3333), (3, 3))
            ),
        ),
        Figure(
            MEASURED,
            "by {} % (GPT-2) and {} % (Llama) with a constant error, {} and {} % with AQ-SGD, {} (rotated) and {} % "
            "(rms scale) with plain quantization, {} and {} % with top-k of changes",
            tuple(
                _held_out(method, setting, task)
                for methods, setting in (
                    (("AQ-SGD, constant error",) * 2, "0.025/0.05"),
                    (("AQ-SGD",) * 2, "fw3 bw6"),
                    (("DirectQ, rotated", "DirectQ, rms scale"), "fw3 bw6"),
                    (("Top-k of changes",) * 2, "50 %, bw6"),
                )
                for method, task in zip(methods, ("GPT-2", "Llama"), strict=True)
            ),
        ),
        *equal,
        # -- replicas
        Figure(
            MEASURED,
            "`double_squeeze` {} % with 4 bits ({} % of the bytes), {} % with 1 bit ({} %); `global_qsgd` 8 "
            "exponential bits {} % ({} %)",
            tuple(
                shown
                for method in ("DoubleSqueeze, 4 bits", "DoubleSqueeze, 1 bit", "Global-QSGD exponential, 8 bits")
                for shown in (_gpt2(method), at("gradients", "sent", method, "2", section="GPT-2"))
            ),
        ),
        Figure(
            MEASURED,
            "`double_squeeze` 4 bits {} %, {} times fewer bytes; `quantized_adam` 4 bits {} %, {} times |",
            tuple(
                shown
                for method in ("AQ-SGD fw3 bw6, double_squeeze 4 bits", "AQ-SGD fw3 bw6, quantized_adam 4 bits")
                for shown in (
                    at("replicas", "above FP32", method),
                    ratio(at("replicas", "interfaces", "FP32"), at("replicas", "interfaces", method)),
                )
            ),
        ),
        Figure(
            MEASURED,
            "float32 and `double_squeeze` 8 bits {} %, 4 bits {} %; `--no-tie` {} %, held out {} % |",
            (
                at("replicas", "above FP32", "one replica, AQ-SGD fw3 bw6"),
                at("replicas", "above FP32", "one replica, AQ-SGD fw3 bw6, double_squeeze 4 bits"),
                at("replicas", "above FP32", "one replica, AQ-SGD fw3 bw6, untied"),
                ratio(
                    at("replicas", "held-out loss", "one replica, AQ-SGD fw3 bw6, untied"),
                    at("replicas", "held-out loss", "one replica, FP32"),
                    percent=True,
                ),
            ),
        ),
        Figure(
            MEASURED,
            "{} times fewer bytes; training loss {} %, held out within {} % (overlapped {} %); 1 bit: {} % held out, "
            "with H = 8 {} % |",
            (
                _local("less", "2 bits", "2", "16"),
                _local("above FP32", "2 bits", "2", "16"),
                Shown(abs(_local("above FP32's", "2 bits", "2", "16").value), 0.005),
                _local("above FP32's", "2 bits, 2 fragments overlapped", "2", "16"),
                _local("above FP32's", "1 bit", "2", "16"),
                _local("above FP32's", "1 bit", "2", "8"),
            ),
        ),
        Figure(
            MEASURED,
            "H = 16 {} % held out; post-local SGD with H = 16 {} and {} % (two, four replicas), DiLoCo's momentum {} "
            "and {} %",
            (
                _local("above FP32's", "FP32", "4", "16"),
                *(
                    _local("above FP32's", line, n, "16")
                    for line in ("FP32, post-local SGD", "FP32, Nesterov 0.7, 0.9")
                    for n in ("2", "4")
                ),
            ),
        ),
        Figure(
            MEASURED,
            "{} ± {} with H = 1, {} with 4, {} with 8 in float32; {} ± {} with 2 bits |",
            tuple(
                at("local_steps", "accuracy", line, "4", h, section="QNLI", part=part)
                for line, h, parts in (
                    ("FP32", "1", (0, 1)),
                    ("FP32", "4", (0,)),
                    ("FP32", "8", (0,)),
                    ("2 bits", "8", (0, 1)),
                )
                for part in parts
            ),
        ),
        Figure(
            MEASURED,
            "{} ± {} ({} ± {}), held-out loss {} %; H = 16: {} |",
            (
                *(
                    at("local_steps", "accuracy", line, "2", h, section="QNLI", part=part)
                    for line, h in (("2 bits", "8"), ("FP32", "1"))
                    for part in (0, 1)
                ),
                _local("above FP32's", "2 bits", "2", "8", task="QNLI"),
                _local("accuracy", "FP32", "2", "16", task="QNLI"),
            ),
        ),
        # -- configuration
        Figure(
            CONFIGURATION,
            "[save](../benchmarks/results/one_pass.md) {} % (2 bits) and {} % (3 bits) of the training loss that "
            "`direct` adds, 4,096 centers {} and {} %",
            _saved("256 clusters fw2 bw4", "256 clusters fw3 bw6", "4096 clusters fw2 bw4", "4096 clusters fw3 bw6"),
        ),
        Figure(
            CONFIGURATION,
            "[sends](../benchmarks/results/gradients.md) {} instead of {} % of float32's bytes",
            tuple(
                at("gradients", "sent", method, "2", section="GPT-2")
                for method in ("DoubleSqueeze, 4 bits, L-GreCo", "DoubleSqueeze, 4 bits")
            ),
        ),
    ]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    arguments(argv, __doc__)
    every = figures()
    wrong = [problem for figure in every for problem in problems(figure, text_of(figure.document))]
    print(f"{sum(len(figure.values) for figure in every)} figures in {len(every)} sentences")
    if wrong:
        raise SystemExit("\n".join(wrong))
