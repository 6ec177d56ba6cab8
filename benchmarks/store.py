"""Time a message store beside plain copies and file writes.

python -m benchmarks store [--samples N] [--epochs N] [--folder PATH] [--out FOLDER] [--redraw]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, digest
from pipecomp.bench.store import HEADINGS, STEP, bench_store, store_cells

CASES = [(hidden, bits) for hidden in (768, 1600) for bits in (2, 4, 8, 16, 32)]


def measure(hidden: int, bits: int, samples: int, epochs: int, folder: Path) -> Row:
    """Both stores at one width."""
    stores = bench_store(hidden=(hidden,), bits=(bits,), samples=samples, epochs=epochs, folder=folder)
    return {"hidden": hidden, "bits": bits, "stores": stores}


def results(rows: list[Row]) -> list[str]:
    """The page."""
    stores = [store for row in sorted(rows, key=lambda row: (row["hidden"], row["bits"])) for store in row["stores"]]
    text = f"""
        # Message stores

        `python -m benchmarks store`, on {page.machine(rows)}, one thread.

        Cached activations [{stores[0]["tokens"]}, H] at z bits, {stores[0]["samples"]} samples, all overwritten in
        shuffled order in each of {stores[0]["epochs"]} epochs, {STEP} a step. Medians in microseconds per sample, in
        the page cache. KB: the stored value. put: what `put` and `commit` cost the training. write: until the step is
        packed (quantized, CRC-32) and committed, in the background where there is a disk. get: read, checked and
        decoded. ahead: the same when it was prefetched. memcpy, pwrite, pread: the same bytes, nothing else. ratio:
        size of the LMDB file over z·n·H bits. What is above 1: the quantizer's scales (4 bytes a token), headers,
        LMDB's pages, and the pages of the last two steps, which no step may use yet.
    """
    return [*prose(text), *page.table(HEADINGS, map(store_cells, stores))]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    own = {"samples": (256, "in a store"), "epochs": (3, "how often all are overwritten")}
    given = arguments(argv, __doc__, **own, folder=(Path(tempfile.gettempdir()), "on the disk to be measured"))
    Runs(given, "store", digest([given.samples, given.epochs]), ("hidden", "bits")).complete(
        measure,
        CASES,
        given.samples,
        given.epochs,
        given.folder,
        line=lambda row: "  ".join(store_cells(row["stores"][0])),
        page=results,
    )
