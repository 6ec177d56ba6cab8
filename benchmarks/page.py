"""Parts of the benchmarks' pages: prose, tables, means over seeds, the machine, pictures."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipecomp.utils.files import atomic_write

Row = dict[str, Any]
# Where the rows come from that were kept before rows named their machine.
FIRST_MACHINE = "2 cores (x86_64, no GPU), torch 2.13.0+cpu, transformers 5.23.0, Python 3.11.7"


def this_machine() -> str:
    """The processor and the versions that a row is made with."""
    gpu = "a GPU" if Path("/dev/nvidiactl").exists() else "no GPU"
    versions = f"torch {version('torch')}, transformers {version('transformers')}, Python {platform.python_version()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores ({processor or platform.machine()}, {gpu}), {versions}"


def machine(rows: Iterable[Row]) -> str:
    """The machines that the rows come from."""
    return "; ".join(dict.fromkeys(row.get("machine", FIRST_MACHINE) for row in rows))


def prose(text: str) -> list[str]:
    """Lines of Markdown: each paragraph of `text` on one line, an empty line behind it."""
    paragraphs = (" ".join(line.strip() for line in part.strip().splitlines()) for part in text.split("\n\n"))
    return [line for paragraph in paragraphs if paragraph for line in (paragraph, "")]


def table(headings: Iterable[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table of rows of cells, an empty line behind it."""
    headings = list(headings)
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in rows:
        if len(row) != len(headings):
            raise ValueError(f"got {len(row)} cells, allowed: {len(headings)}, one for each of {headings}: {row}")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return [*lines, ""]


def columns(cells: Mapping[str, Callable[[Any], Any]], items: Iterable[Any]) -> list[str]:
    """A Markdown table with a line for each item; `cells` has what stands below each heading."""
    return table(cells, ([cell(item) for cell in cells.values()] for item in items))


def grouped(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    """The rows with equal values of `keys` together, in the order in which these come first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def values(rows: Iterable[Row], key: str) -> list[float]:
    """Return the rows' values of `key`."""
    return [row[key] for row in rows]


def spread(numbers: Sequence[float], digits: int = 4, sign: str = "") -> str:
    """Mean ± sample standard deviation, of one value the value; "–" of none. sign: "+" shows it always."""
    if not numbers:
        return "–"
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):{sign}.{digits}f}{deviation}"


def above(rows: Iterable[Row], base: Iterable[Row], key: str) -> list[float]:
    """Differences of each row to the row of `base` with the same seed and weights, where there is one."""
    by_start = {(row["seed"], row.get("weights")): row[key] for row in base}
    starts = [(row, (row["seed"], row.get("weights"))) for row in rows]
    return [row[key] - by_start[start] for row, start in starts if start in by_start]


def share(part: float, whole: float) -> str:
    """A part of the whole in percent."""
    return f"{100 * part / whole:.1f} %"


@contextlib.contextmanager
def picture(file: Path, *, across: int = 1, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Yield axes beside each other to draw on; the picture is in `file` at the end. size: inches, of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, across, figsize=size, squeeze=False)
    try:
        yield list(axes[0])
        figure.tight_layout()
        with atomic_write(file, synced=False) as part:
            figure.savefig(part, dpi=110, format="png")
    finally:
        pyplot.close(figure)
