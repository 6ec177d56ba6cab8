"""Time of averaging gradients by part and method, and the throughput that it leaves: results/allreduce.md, pictures.

    python -m benchmarks breakdown [--seconds S] [--lab RATE ...] [--out FOLDER] [--redraw]

Measured here: every method on three buckets, and the methods of the QSGD-MN paper's Figure 15 on whole gradients of its
two networks, over two processes of this machine. Predicted from that: the same over links of 1 Gbit/s and 100 Mbit/s.
From the model alone: the paper's Figures 11 to 14, see `clusters.py`. --lab measures behind links of these rates too
(as in 100mbit; needs root on Linux). --redraw takes the measurements from allreduce.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.averages import HEADINGS, Row, Variant, bench_allreduce, cells, digits, values_in, variants_of
from benchmarks.breakdown_plot import plot_parts, plot_throughput
from benchmarks.clusters import BITS, GBIT, NAMES, NETWORKS, papers_model, this_projects
from benchmarks.page import table, this_machine
from benchmarks.runner import arguments
from pipecomp.allreduce import Prediction, predict
from pipecomp.utils.files import atomic_write_text

RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
RANKS = 4  # machines in the paper's Figure 15
POWER = (Variant("powersgd", {"rank": 1}), Variant("powersgd", {"rank": 2}))
FIGURE_15 = (
    Variant("qsgd_mn", {"bits": 6}),
    Variant("qsgd_mn_ts", {"bits": (6, 10)}),
    Variant("grandk_mn", {"bits": 6, "k": 10_000}),
    Variant("grandk_mn_ts", {"bits": (6, 10), "k": 10_000}),
    *POWER,
    Variant("global_qsgd", {"levels": "exponential", "bits": 8}),
)
PAPERS_REDUCE_MS = {  # the bars "reduce" of Figure 15, from its published plot
    "ResNet-50": (134.2, 43.5, 79.8, 9.9, 11.1, 26.2, 43.6),
    "VGG-16": (85.2, 25.7, 48.4, 5.9, 6.7, 11.6, 18.9),
}
LAB_METHODS = "none,fp16,global_qsgd,qsgd_mn,qsgd_mn_ts,grandk_mn,qsgd,double_squeeze"
LAB_SIZE = 6_553_600
LAB_LATENCY_S = 2e-4
BUSY = "The machine had other work to do when this was taken: times are longer than they need be, unevenly."
Parts = dict[str, float]


def measure(seconds: float, rates: list[str]) -> dict[str, Any]:
    """All that is measured: rows of `bench_allreduce`."""
    networks = list(NETWORKS.values())
    measurement: dict[str, Any] = {
        "command": " ".join(
            ["python -m benchmarks breakdown --seconds", f"{seconds:g}", *(["--lab", *rates] if rates else [])]
        ),
        "machine": this_machine(),
        "load": [os.getloadavg()[0]],
        "buckets": bench_allreduce(seconds=seconds),
        "networks": bench_allreduce(sizes=networks, variants=FIGURE_15, seconds=seconds),
        # with one rank PowerSGD has nothing to wait for: what it takes then is its arithmetic
        "alone": bench_allreduce(sizes=networks, ranks=(1,), variants=POWER, seconds=seconds),
        "lab": {},
    }
    for rate in rates:
        from pipecomp.netlab import Lab

        with Lab(nodes=2, bandwidth=rate) as lab:
            methods = variants_of(LAB_METHODS)
            rows = bench_allreduce(sizes=[LAB_SIZE], variants=methods, seconds=seconds, run=partial(_in_lab, lab))
            measurement["lab"][rate] = {"bits_per_s": lab.shape.up[0], "rows": rows}
    measurement["load"].append(os.getloadavg()[0])
    return measurement


def _in_lab(lab: Any, world: int, function: Any, *args: Any, timeout_s: float) -> dict[int, Any]:
    return lab.run(function, *args, timeout_s=timeout_s)


def kernels_of(row: Row) -> Parts:
    """Seconds that the parts of a call took here, without waiting."""
    return {part: row[f"{part}_ms"] / 1e3 for part in ("quantize", "reduce", "decode")}


def predicted(row: Row, n: int, bits_per_s: float, alone: Parts | None = None, latency_s: float = 0.0) -> Prediction:
    """The call of a row over n ranks and other links. alone: seconds of kernels that the row does not know."""
    shapes = next(s for s in NETWORKS.values() if values_in(s) == row["d"]) if row["method"] == "powersgd" else None
    kernels = kernels_of(row) if alone is None else alone
    link = {"bandwidth_bit_per_s": bits_per_s, "latency_s": latency_s}
    return predict(row["method"], row["d"], n, kernel_seconds=kernels, shapes=shapes, **link, **row["options"])


def breakdown(measurement: dict[str, Any]) -> dict[str, dict[str, dict[str, Parts]]]:
    """network -> where ("here" and RATES) -> method -> milliseconds of quantize, send, reduce and decode."""
    power = [row for row in measurement["alone"] if row["method"] == "powersgd"]
    alone = {(row["d"], row["label"]): {"quantize": row["total_ms"] / 1e3} for row in power}
    out: dict[str, dict[str, dict[str, Parts]]] = {}
    for network, shapes in NETWORKS.items():
        rows = [row for row in measurement["networks"] if row["d"] == values_in(shapes)]
        places = out.setdefault(network, {"here": {}, **{rate: {} for rate in RATES}})
        for row in rows:
            arithmetic = alone.get((row["d"], row["label"]))
            kernels = kernels_of(row) if arithmetic is None else {"reduce": 0.0, "decode": 0.0, **arithmetic}
            here = {part: 1e3 * s for part, s in kernels.items()}
            places["here"][row["label"]] = here | {"send": max(0.0, row["total_ms"] - sum(here.values()))}
            for name, rate in RATES.items():
                p = predicted(row, RANKS, rate, kernels)
                places[name][row["label"]] = here | {"send": 1e3 * p.wait_s}
    return out


# -- what is written


def bucket_lines(rows: list[Row]) -> list[str]:
    """The tables of `benchmarks/averages.py`."""
    lines = []
    for d in dict.fromkeys(row["d"] for row in rows):
        chosen = [row for row in rows if row["d"] == d]
        lines += [f"### {d:,} values, {chosen[0]['n']} ranks, {chosen[0]['rounds']} rounds", ""]
        lines += table(HEADINGS, [cells(row) for row in chosen])
    return lines


def breakdown_lines(parts: dict[str, dict[str, dict[str, Parts]]]) -> list[str]:
    """Figure 15 as a table."""
    lines = []
    for network, places in parts.items():
        papers = PAPERS_REDUCE_MS[network]
        rows = []
        for i, (label, here) in enumerate(places["here"].items()):
            there = [digits(sum(places[rate][label].values())) for rate in RATES]
            four = [digits(here[part]) for part in ("quantize", "send", "reduce", "decode")]
            rows.append((label, *four, *there, digits(papers[i]) if i < len(papers) else "–"))
        lines += [f"### {network}, {values_in(NETWORKS[network]):,} values", ""]
        lines += table(("method", "quantize", "send", "reduce", "decode", *RATES, "paper, 4 V100"), rows)
    return lines


def throughput_rows(bits_per_s: float, network: str) -> list[tuple[str, ...]]:
    """One of Figures 11 to 14 at 32 nodes."""
    rows = []
    for method, name in NAMES.items():
        for bits in (32,) if method == "none" else BITS:
            case = (network, method, bits, 32, bits_per_s)
            ours = [this_projects(*case, ranks=ranks) for ranks in ("nodes", "gpus")]
            rows.append((name, str(bits), *(f"{v:,.0f}" for v in (papers_model(*case), *ours))))
    return rows


def throughput_lines() -> list[str]:
    """Figures 11 to 14 as tables."""
    lines = []
    for network in NETWORKS:
        for gbit in (1, 10):
            lines += [f"### {network}, {gbit} Gbit/s", ""]
            headings = ("method", "bits", "the paper's model", "one rank a node", "one rank a GPU")
            lines += table(headings, throughput_rows(gbit * GBIT, network))
    return lines


def lab_lines(lab: dict[str, Any]) -> list[str]:
    """Predictions beside measurements behind slow links."""
    lines = []
    for rate, measured in lab.items():
        rows = []
        for row in measured["rows"]:
            if row["torchs_own"] and row["method"] != "none":
                continue
            p = predicted(row, row["n"], measured["bits_per_s"], latency_s=LAB_LATENCY_S)
            times = (row["total_ms"], 1e3 * p.total_s, row["total_ms"] / p.total_s / 1e3, row["speedup"], p.speedup)
            rows.append((row["label"], *(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in times)))
        lines += [f"### {rate}", ""]
        lines += table(("method", "measured ms", "predicted ms", "ratio", "speedup", "predicted speedup"), rows)
    return lines


def markdown(measurement: dict[str, Any], parts: dict[str, dict[str, dict[str, Parts]]]) -> str:
    """The page of results."""
    before, after = measurement["load"]
    text = (Path(__file__).parent / "breakdown_page.md").read_text(encoding="utf-8")
    sections = {
        "COMMAND": [measurement["command"]],
        "MACHINE": [f"{measurement['machine']}, load average {before:.1f} before, {after:.1f} after"],
        "BUSY": [BUSY] if before > 1 else [],
        "BUCKETS": bucket_lines(measurement["buckets"]),
        "LAB": lab_lines(measurement["lab"]) or ["Not measured: `--lab` was not given.", ""],
        "BREAKDOWN": breakdown_lines(parts),
        "THROUGHPUT": throughput_lines(),
    }
    for name, lines in sections.items():
        text = text.replace("{{" + name + "}}", "\n".join(lines).rstrip())
    return text


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    lab = ([], "measure behind links of these rates too")
    given = arguments(argv, __doc__, seconds=(1.0, "for each case"), lab=lab)
    file = given.out / "allreduce.json"
    if not given.redraw:
        atomic_write_text(file, json.dumps(measure(given.seconds, given.lab), indent=1) + "\n")
    measurement = json.loads(file.read_text(encoding="utf-8"))
    parts = breakdown(measurement)
    plot_parts(parts, given.out / "allreduce.png")
    plot_throughput(given.out / "allreduce_throughput.png")
    atomic_write_text(given.out / "allreduce.md", markdown(measurement, parts))
