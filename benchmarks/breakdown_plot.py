"""The pictures of results/allreduce.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.clusters import BITS, GBIT, NAMES, NETWORKS, papers_model, this_projects

COLORS = {"quantize": "tab:blue", "send": "lightgray", "reduce": "tab:orange", "decode": "tab:green"}
SHADES = ("tab:blue", "tab:cyan", "tab:green")
NODES = 32


def plot_parts(parts: dict[str, dict[str, dict[str, dict[str, float]]]], file: Path) -> None:
    """Stacked bars: a row for each network, a column for each place (see `breakdown.breakdown`); milliseconds."""
    places = list(next(iter(parts.values())))
    figure, axes = plt.subplots(len(parts), len(places), figsize=(13, 6.4), sharey=True, constrained_layout=True)
    for row, (network, by_place) in zip(axes, parts.items(), strict=True):
        for axis, place in zip(row, places, strict=True):
            _stack(axis, by_place[place])
            where = "measured, 2 ranks on this machine" if place == "here" else f"predicted, 4 ranks at {place}"
            axis.set_title(f"{network}: {where}", fontsize=10)
            axis.set_xlabel("ms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS))
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _stack(axis: Axes, by_label: dict[str, dict[str, float]]) -> None:
    labels = list(by_label)[::-1]
    left = [0.0] * len(labels)
    for part, color in COLORS.items():
        widths = [by_label[label][part] for label in labels]
        axis.barh(labels, widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.grid(axis="x", alpha=0.3)


def plot_throughput(file: Path) -> None:
    """Images a second at 32 nodes: bars with one rank a node, dots with one a GPU, lines of the paper's model."""
    cases = [(network, gbit) for network in NETWORKS for gbit in (1, 10)]
    figure, axes = plt.subplots(2, 2, figsize=(13, 7.5), constrained_layout=True)
    for axis, (network, gbit) in zip(axes.flat, cases, strict=True):
        for i, method in enumerate(NAMES):
            for j, bits in enumerate((32,) if method == "none" else BITS):
                x = i + (0.0 if method == "none" else 0.27 * (j - 1))
                case = (network, method, bits, NODES, gbit * GBIT)
                first = i == 1
                color = "gray" if method == "none" else SHADES[j]
                label = f"{bits} bits" if first else "float32" if i == 0 else None
                axis.bar(x, this_projects(*case, ranks="nodes"), 0.25, color=color, label=label)
                paper, gpus = papers_model(*case), this_projects(*case, ranks="gpus")
                last = first and j == 0
                axis.hlines(paper, x - 0.13, x + 0.13, color="black", label="the paper's model" if last else None)
                axis.plot(x, gpus, "o", color="tab:red", markersize=4, label="one rank a GPU" if last else None)
        axis.set_xticks(range(len(NAMES)), list(NAMES.values()))
        axis.set_title(f"{network}, {gbit} Gbit/s, {NODES} nodes of 4 GPUs", fontsize=10)
        axis.set_ylabel("images a second")
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="upper left")
    figure.savefig(file, dpi=110)
    plt.close(figure)
