"""The page of `pipecomp bench gpu`: results as Markdown, and their comparison with the targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipecomp.bench.gpu_steps import EVERYTHING, MAIN

Row = dict[str, Any]
PAGE = "gpu.md"
MOST_OF_STOCK, LEAST_OF_MEMCPY = 1.05, 0.8
KERNEL = "encode_batch"  # takes the difference, quantizes, packs, moves m
UNSEEN = (
    "torch does not notice waits in `Event.synchronize` or `torch.cuda.synchronize`, nor the driver's with a copy of "
    "pageable memory that is asked not to wait; those of a backward pass it reports at its end, as of its caller."
)


def verdicts(result: Row) -> list[tuple[str, str, bool]]:
    """Return rows of target, result, and whether the target is met; parts that failed have none."""
    out = []
    ratio = of_stock(result["steps"].get("rows", ()), EVERYTHING, 0.0)
    if ratio is not None:
        target = f"a step with everything on ≤ {MOST_OF_STOCK} of stock's"
        out.append((target, f"{ratio:.3f}", ratio <= MOST_OF_STOCK))
    if "error" not in result["kernels"]:
        least = min(row["ratio"] for row in result["kernels"] if row["operation"] == KERNEL)
        out.append((f"{KERNEL} ≥ {LEAST_OF_MEMCPY} of memcpy", f"{least:.2f}", least >= LEAST_OF_MEMCPY))
    if "error" not in result["waits"]:
        ours = sum(count for owner, _, count in main_waits(result["waits"]) if owner == "pipecomp")
        wanted = "no call of pipecomp that torch notices waits for the GPU on the computing thread"
        out.append((wanted, f"{ours} a step", ours == 0))
    return out


def of_stock(rows: Iterable[Row], line: str, r: float) -> float | None:
    """Return a line's step time divided by stock DeepSpeed's over the same link; None if one is missing."""
    ms = {row["line"]: row["ms"] for row in rows if row["r"] == r}
    against = {row["line"]: row["against"] for row in rows}.get(line)
    return ms[line] / ms[against] if line in ms and against in ms else None


def main_waits(result: Row) -> list[Sequence[Any]]:
    """Return (owner, line, count) of the waits of all ranks' computing threads, from `gpu_steps.find_waits`."""
    return [place for places in result.values() for thread, *place in places if thread == MAIN]


def gpu_page(result: Row) -> str:
    """Return the page. result: from `bench_gpu`."""
    lines = [
        "# On a GPU",
        "",
        f"`pipecomp bench gpu` in {result['seconds']:.0f} s on one {result['machine']}.",
        "",
        *_table(("wanted", "found", ""), [(w, f, "yes" if met else "**no**") for w, f, met in verdicts(result)]),
        "## Kernels",
        "",
        *_kernels(result["kernels"]),
        "## Steps",
        "",
        *_steps(result["steps"]),
        "## What waits for the GPU",
        "",
        *_waits(result["waits"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _kernels(result: Any) -> list[str]:
    if "error" in result:
        return [result["error"], ""]
    cells = (
        (
            row["operation"],
            row["bits"] or "",
            f"{1e3 * row['ms']:.0f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['memcpy_gb_per_s']:.0f}",
            f"{row['ratio']:.2f}",
        )
        for row in result
    )
    return [
        f"Float32, {result[0]['shape']}; each beside the device's memcpy of the bytes that it must move, the cache "
        f"emptied before each call. `{KERNEL}` is what links call: the samples of a micro-batch in one launch. "
        "`encode_fewest` chooses its bits too, those named at most.",
        "",
        *_table(("kernel", "bits", "µs", "GB/s", "memcpy GB/s", "of memcpy"), cells),
    ]


def _steps(result: Row) -> list[str]:
    if "rows" not in result:
        return [result["error"], ""]
    rows = result["rows"]
    cells = []
    for row in rows:
        rate = "no limit" if row["bits_per_s"] is None else f"{row['bits_per_s'] / 1e6:.0f} Mbit/s"
        ratio = of_stock(rows, row["line"], row["r"])
        times = [f"{row[key]:.1f}" for key in ("ms", "least", "most")]
        cells.append((f"{row['r']:g}", rate, row["line"], *times, "" if ratio is None else f"{ratio:.3f}"))
    return [
        "GPT-2 with 124 million weights and an output layer of its own, random, 8 micro-batches of one sample of 1,024 "
        "tokens, BF16, two stages whose ranks share the GPU and talk over gloo. r: the time that a micro-batch's "
        "float32 packets take, both ways, over the time that a stage computes on it with the GPU to itself "
        f"({result['compute_ms']:.1f} ms). Links are slowed down by the {rows[0]['links']}. Stock DeepSpeed's packets "
        "go through pinned host memory, since gloo sends nothing else.",
        "",
        *_table(("r", "link", "line", "ms", "least", "most", "of stock"), cells),
        *([f"Not measured: {result['cut']}", ""] if "cut" in result else []),
    ]


def _waits(result: Row) -> list[str]:
    if "error" in result:
        return [result["error"], ""]
    note = f"Calls that waited for the GPU in one step, on the computing thread; {UNSEEN}"
    return [note, "", *_table(("whose", "where", "times"), main_waits(result))]


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
