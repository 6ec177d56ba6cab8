"""Measure message stores and print the table; `--markdown FILE` writes it where results are kept.

python benchmarks/store.py [--samples N] [--epochs N] [--folder PATH] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console

from pipecomp.bench.store import HEADINGS, STEP, Row, bench_store, store_cells, store_table


def markdown(rows: list[Row], command: str) -> str:
    """The table with what it was measured on and what its columns mean."""
    first = rows[0]
    lines = [
        "# Message stores",
        "",
        f"`{command}`, on {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, threads: "
        f"{torch.get_num_threads()}, Python {platform.python_version()}.",
        "",
        f"Messages [{first['tokens']}, H] at z bits, {first['samples']} samples, all overwritten in shuffled order in "
        f"each of {first['epochs']} epochs, {STEP} a step. Medians in microseconds per sample, in the page cache. KB: "
        "the stored value. put: what `put` and `commit` cost the training. write: until the step is packed (quantized, "
        "CRC-32) and committed, in the background where there is a disk. get: read, checked and decoded. ahead: the "
        "same when it was prefetched. memcpy, pwrite, pread: the same bytes, nothing else. ratio: size of the LMDB "
        "file over z·n·H bits. What is above 1: the quantizer's scales (4 bytes a token), headers, LMDB's pages, and "
        "the pages of the last two steps, which no step may use yet.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += [f"| {' | '.join(store_cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    rows = bench_store(samples=options.samples, epochs=options.epochs, folder=options.folder)
    Console().print(store_table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(rows, "python benchmarks/store.py " + " ".join(sys.argv[1:])))


if __name__ == "__main__":
    main()
