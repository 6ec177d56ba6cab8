"""A training step over links of several rates, beside stock DeepSpeed: the lines of `steps.py`.

    python -m benchmarks throughput [--rounds 2] [--steps 3] [--settings NAME ...] [--only NAME ...] [--out FOLDER]
                                    [--redraw]

Needs root and a machine that does nothing else: a round takes about 70 minutes on two cores. All lines run in turn,
then again in the next round. Draws a picture too; `simulation.py` compares its predictions with the same runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import (
    COARSE,
    EIGHT,
    LINES,
    MEMORY,
    RATES,
    REPLICAS,
    SIXTEEN,
    TWICE,
    UNTHROTTLED,
    measure,
    summary,
)
from pipecomp.bench.training import STOCK, Model, cpu_multiplies_bf16, message_bytes, rate_for

MODEL = Model()
BY_NAME = {line.name: line for line in LINES}
EVERYWHERE = (STOCK, "FP32", SIXTEEN, COARSE)
SOMEWHERE = ("DirectQ fw3 bw6", EIGHT, "FP32, 1F1B's number in flight", MEMORY, "BF16", "DeepSpeed BF16")
Key = tuple[str, float, str]  # setting, r and line


@dataclass(frozen=True)
class Setting:
    """Lines and the values of r at which they run. delay: one way."""

    stages: int
    lines: dict[str, tuple[float, ...]]
    delay: str | None = None


TWO, REPLICATED, FOUR = "2 stages", "2 stages, 2 replicas", "4 stages"
SETTINGS = {
    TWO: Setting(2, {**dict.fromkeys(EVERYWHERE, RATES), **dict.fromkeys(SOMEWHERE, (UNTHROTTLED, 1.0, 5.8))}),
    "2 stages, 20 ms each way": Setting(2, {SIXTEEN: (5.8,), COARSE: (12.0,)}, "20ms"),
    REPLICATED: Setting(2, dict.fromkeys((TWICE, *REPLICAS.values()), (UNTHROTTLED, 5.8))),
    FOUR: Setting(4, dict.fromkeys(("FP32", STOCK, SIXTEEN), (UNTHROTTLED, 1.0, 5.8))),
}
FINDINGS: list[tuple[str, Key, Key]] = [
    (f"{SIXTEEN}, at {{}}: {{:.2f}} × (aim: 6 at r = 5.8).", (TWO, 5.8, STOCK), (TWO, 5.8, SIXTEEN)),
    (f"{COARSE}, at {{}}: {{:.2f}} × (aim: 10 at r = 12).", (TWO, 12.0, STOCK), (TWO, 12.0, COARSE)),
    (
        "2 × 2 replicas, 4-bit gradients, at {}: {:.2f} × (aim: 8 at r = 5.8).",
        (REPLICATED, 5.8, TWICE),
        (REPLICATED, 5.8, REPLICAS[4]),
    ),
    ("The same with 1-bit gradients, at {}: {:.2f} ×.", (REPLICATED, 5.8, TWICE), (REPLICATED, 5.8, REPLICAS[1])),
    (f"4 stages, {SIXTEEN}, at {{}}: {{:.2f}} ×.", (FOUR, 5.8, STOCK), (FOUR, 5.8, SIXTEEN)),
    ("The schedule by itself, FP32 at {}: {:.2f} ×.", (TWO, 5.8, STOCK), (TWO, 5.8, "FP32")),
    ("Stock DeepSpeed in BF16, at {}: {:.2f} ×.", (TWO, 5.8, STOCK), (TWO, 5.8, "DeepSpeed BF16")),
]


def run(setting: str, r: float, name: str, turn: int, rates: dict[int, dict[float, int]], steps: int) -> Row:
    """One run of one line. rates: bit/s of a link, by stages and r."""
    where = SETTINGS[setting]
    rate = None if r == UNTHROTTLED else rates[where.stages][r]
    row = measure(BY_NAME[name], MODEL, where.stages, steps, rate, where.delay)
    row_values = {"setting": setting, "r": r, "line": name, "turn": turn, "bits_per_s": rate}
    return {**row_values, "bf16_products": cpu_multiplies_bf16(), **row}


def link_rate(rows: list[Row], stages: int, r: float) -> int:
    """bit/s of a link, by what a stage computed in the first run without a limit."""
    free = (x for x in rows if (x["stages"], x["r"], x["line"], x["turn"]) == (stages, UNTHROTTLED, "FP32", 0))
    return rate_for(MODEL, r, next(free)["compute_s"])


def summaries(rows: Sequence[Row]) -> dict[Key, Row]:
    """All rounds of a line together."""
    groups = page.grouped(sorted(rows, key=lambda row: row["turn"]), "setting", "r", "line")
    return {(g[0]["setting"], g[0]["r"], g[0]["line"]): {**summary(g), "rounds": len(g)} for g in groups}


def real_r(row: Row, rows: dict[Key, Row]) -> float:
    """r of a row's link, by what its stages computed on a micro-batch in the median line without a limit.

    Links are set before most lines have run, by a single run, and a machine's speed changes.
    """
    seconds = [
        free["compute_s"] * free["micro_batches"] / 8
        for (setting, r, name), free in rows.items()
        if (setting, r) == (f"{row['stages']} stages", UNTHROTTLED)
        and BY_NAME[name].dtype == "fp32"
        and free["compute_s"]
    ]
    return 8 * message_bytes(MODEL) / (row["bits_per_s"] * statistics.median(seconds))


def findings(rows: dict[Key, Row]) -> list[str]:
    """Each comparison for which both sides were measured."""
    return [
        text.format(_link(rows[one], rows), rows[one]["seconds"] / rows[other]["seconds"])
        for text, one, other in FINDINGS
        if one in rows and other in rows
    ]


def _link(row: Row, rows: dict[Key, Row]) -> str:
    return f"r = {real_r(row, rows):.2g} ({row['bits_per_s'] / 1e6:.1f} Mbit/s)"


def results(rows_in: Sequence[Row], picture: Path) -> list[str]:
    """The page, and its picture beside it."""
    rows = summaries(rows_in)
    emulated = """This processor has no BF16 products: lines in BF16, stock DeepSpeed's too, compute them in float32
        and round (`pipecomp/bench/training.py`)."""
    had = {row.get("bf16_products", False) for row in rows_in}  # the oldest kept runs do not say it, and had none
    text = f"""
        # Training steps over slow links

        `python -m benchmarks throughput`, on {page.machine(rows_in)}.

        GPT-2 of 4 blocks, width 512, 256 tokens, a vocabulary of 512 (so that stages take about equally long); 16
        samples a step in 8 micro-batches, or 16 where the line says so. Each stage is a process with one thread in a
        network namespace of its own; links are shaped by the kernel (`tbf`). r: the time that a micro-batch's float32
        activations and gradients take on the link, over the time a stage computes on it, the median of all lines
        without a limit that compute in float32. s: median step; "MB a step": on all interfaces. Stock DeepSpeed is
        0.19.8's own pipeline engine. {"" if had == {True} else emulated}

        ![steps a second over the link's rate](throughput.png)

        ## How many times faster than stock DeepSpeed FP32 at the same link
    """
    after = """
        Differences of a few percent, and the first two of these with links set anew, are in [paired.md](paired.md),
        where lines take turns step by step: here a line runs alone, and the machine's speed changes by more than that
        from one run to the next.
    """
    _draw(picture, rows)
    lines = [*prose(text), *(f"- {finding}" for finding in findings(rows)), "", *prose(after)]
    for setting in SETTINGS:
        for r in sorted({key[1] for key in rows if key[0] == setting}):
            lines += _section(setting, r, rows)
    return lines


def _section(setting: str, r: float, rows: dict[Key, Row]) -> list[str]:
    """The lines of a setting at one rate."""
    mine = [rows[setting, r, line.name] for line in LINES if (setting, r, line.name) in rows]

    def faster(row: Row, r: float, name: str) -> str:
        base = rows.get((setting, r, name)) or rows.get((setting.split(",")[0], r, name))
        return "" if base is None else f"{base['seconds'] / row['seconds']:.2f}"

    cells = {
        "line": lambda row: row["line"],
        "s": lambda row: f"{row['seconds']:.2f}",
        "least": lambda row: f"{row['least']:.2f}",
        "most": lambda row: f"{row['most']:.2f}",
        "× DeepSpeed FP32": lambda row: faster(row, r, BY_NAME[row["line"]].against),
        "of its own unthrottled": lambda row: faster(row, UNTHROTTLED, row["line"]),
        "MB a step": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "in flight": lambda row: "" if row["in_flight"] is None else row["in_flight"],
    }
    link = (
        "no limit"
        if r == UNTHROTTLED
        else _link(next(row for key, row in rows.items() if key[:2] == (setting, r)), rows)
    )
    return [f"### {setting}, {link}", "", *page.columns(cells, mine)]


def _draw(file: Path, rows: dict[Key, Row]) -> None:
    """Steps a second over the link's rate, of lines that ran at several."""
    names = [line.name for line in LINES if sum((s, n) == (TWO, line.name) for s, _, n in rows) > 2]
    with page.picture(file, size=(8, 5)) as (axis,):
        for name in names:
            points = sorted(
                (row["bits_per_s"] / 1e6, 1 / row["seconds"])
                for (setting, r, line), row in rows.items()
                if (setting, line) == (TWO, name) and r != UNTHROTTLED
            )
            drawn = axis.plot(*zip(*points, strict=True), marker="o", label=name)[0]
            free = rows.get((TWO, UNTHROTTLED, name))
            if free is not None:
                axis.axhline(1 / free["seconds"], color=drawn.get_color(), linewidth=0.5, linestyle=":")
        axis.set(xscale="log", xlabel="Mbit/s each way", ylabel="steps a second", ylim=(0, None))
        axis.set_title("2 stages; dotted: without a limit")
        if names:
            axis.legend(fontsize=8)


def cases(settings: Sequence[str], rounds: int, only: Sequence[str]) -> list[tuple[str, float, str, int]]:
    """(setting, r, line, round): all lines in turn, again and again."""
    return [
        (name, r, line, turn)
        for turn in range(rounds)
        for name in settings
        for r in sorted({r for rates in SETTINGS[name].lines.values() for r in rates})
        for line in chosen(SETTINGS[name].lines, only)
        if r in SETTINGS[name].lines[line]
    ]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        "only",
        rounds=(2, "how often each line runs"),
        steps=(3, "timed steps of a run"),
        settings=(list(SETTINGS), "all or some of them", SETTINGS),
    )
    setup = digest([asdict(MODEL), [asdict(line) for line in LINES]])
    runs = Runs(given, "throughput", setup, ("setting", "r", "line", "turn"))
    report = {
        "line": lambda row: f"{' '.join(f'{s:.2f}' for s in row['steps'])} s",
        "page": lambda rows: results(rows, given.out / "throughput.png"),
    }
    stages = sorted({SETTINGS[name].stages for name in given.settings})
    first = [(f"{K} stages", UNTHROTTLED, "FP32", 0) for K in stages]  # what `link_rate` looks at
    runs.complete(run, first, {}, given.steps, **report)
    rest = cases(given.settings, given.rounds, given.only)
    if runs.missing(rest):
        rates = {K: {r: link_rate(runs.rows, K, r) for _, r, _, _ in rest if r != UNTHROTTLED} for K in stages}
        runs.complete(run, rest, rates, given.steps, **report)
