"""`pipecomp bench store`: message stores compared with plain memory copies and plain file writes.

All times are per sample, with everything in the page cache: a training step rarely waits for the disk itself. The
reference does nothing but move the same bytes.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from pipecomp.buffers import LmdbEnvironment, MemoryEnvironment
from pipecomp.buffers.value import ValueFormat
from pipecomp.errors import require
from pipecomp.utils.tables import COMPACT, table

Row = dict[str, Any]
BACKENDS: dict[str, Callable[..., Any]] = {"lmdb": LmdbEnvironment, "memory": MemoryEnvironment}
STEP = 8  # samples in a micro-batch, and here in a step
TIMES = ("put_ms", "write_ms", "get_ms", "prefetched_get_ms", "copy_ms", "file_write_ms", "file_read_ms")
HEADINGS = ("store", "H", "z", "KB", "put", "write", "get", "ahead", "memcpy", "pwrite", "pread", "ratio")
_LOAD_TIMEOUT_S = 60


def bench_store(
    *,
    hidden: Sequence[int] = (768, 1600),
    bits: Sequence[int] = (2, 4, 8, 16, 32),
    backends: Sequence[str] = ("lmdb", "memory"),
    tokens: int = 128,
    samples: int = 256,
    epochs: int = 3,
    folder: str | os.PathLike[str] | None = None,
) -> list[Row]:
    """Overwrite `samples` cached activations [tokens, hidden] `epochs` times in shuffled order, then read them.

    folder: where the files go, a new folder in it each time (None: the system's place for temporary files).
    Returns one row per hidden size, width and backend, times in milliseconds a sample:
    put_ms: what `put` and `commit` cost the caller. write_ms: until a step is packed and committed, behind the caller.
    get_ms: read and decode. prefetched_get_ms: hand out what was loaded ahead. copy_ms, file_write_ms, file_read_ms:
    the same bytes with memcpy, pwrite and pread. file_ratio: LMDB file over stored values; bits_ratio: over z*n*H bits.
    Raises ConfigError for numbers below 1, and for a folder that nothing can be written to.
    """
    for key, value in (("samples", samples), ("epochs", epochs)):
        require(value >= 1, key, value, "a whole number of at least 1")
    place = os.fspath(folder) if folder is not None else tempfile.gettempdir()
    writable = os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
    require(writable, "folder", place, "a folder that is there and can be written to")
    rows = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="pipecomp-bench-") as top:
        for H in hidden:
            for z in bits:
                plain = _plain(ValueFormat(z).size(tokens, H), samples, Path(top) / "plain")
                for backend in backends:
                    where = Path(top) / f"{backend}-{H}-{z}"
                    rows.append(_measure(backend, where, H, z, tokens, samples, epochs) | plain)
    return rows


def store_cells(row: Row) -> tuple[str, ...]:
    """Write a row under HEADINGS, for people: times in microseconds a sample."""
    ratio = "" if row["bits_ratio"] is None else f"{row['bits_ratio']:.3f}"
    sizes = (row["backend"], str(row["hidden"]), str(row["bits"]), f"{row['value_bytes'] / 1000:.0f}")
    return (*sizes, *(f"{1000 * row[key]:.0f}" for key in TIMES), ratio)


def store_table(rows: Sequence[Row]) -> Table:
    """Tabulate the rows for people."""
    title = "Message stores, microseconds per sample"
    return table(HEADINGS, map(store_cells, rows), left=("store",), title=title, **COMPACT)


def _measure(backend: str, folder: Path, H: int, bits: int, tokens: int, samples: int, epochs: int) -> Row:
    environment = BACKENDS[backend](**({"path": folder} if backend == "lmdb" else {}), bits=bits, prefetch=2)
    store = environment.link("link-0", {})
    rng = random.Random(0)
    source = torch.randn(tokens, H, generator=torch.Generator().manual_seed(0))
    put, write = [], []
    for epoch in range(epochs):
        order = rng.sample(range(samples), samples)
        for ids in _steps(order):
            given = [source.clone() for _ in ids]  # the store owns what it is given
            begin = time.perf_counter()
            for sample, m_nH in zip(ids, given, strict=True):
                store.put(sample, epoch, m_nH)
            environment.commit()
            put.append((time.perf_counter() - begin) / len(ids))
            if backend == "lmdb":
                environment.writer.drain()
            write.append((time.perf_counter() - begin) / len(ids))
    environment.flush()
    get, prefetched = [], []
    order = rng.sample(range(samples), samples)
    for ids in _steps(order):
        begin = time.perf_counter()
        store.get(ids)
        get.append((time.perf_counter() - begin) / len(ids))
    for ids in _steps(order):
        store.prefetch(ids)
        deadline = time.perf_counter() + _LOAD_TIMEOUT_S
        while not store.prefetched() and time.perf_counter() < deadline:
            time.sleep(0.0002)
        begin = time.perf_counter()
        store.get(ids)
        prefetched.append((time.perf_counter() - begin) / len(ids))
    value_bytes = ValueFormat(bits).size(tokens, H)
    size = environment.size_bytes() if backend == "lmdb" else None
    environment.close()
    return {
        "backend": backend,
        "hidden": H,
        "tokens": tokens,
        "bits": bits,
        "samples": samples,
        "epochs": epochs,
        "value_bytes": value_bytes,
        "put_ms": _ms(put),
        "write_ms": _ms(write),
        "get_ms": _ms(get),
        "prefetched_get_ms": _ms(prefetched),
        "file_bytes": size,
        "file_ratio": size / (samples * value_bytes) if size else None,
        "bits_ratio": size / (samples * tokens * H * bits / 8) if size else None,
    }


def _plain(size: int, samples: int, file: Path) -> Row:
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    targets = np.zeros((samples, size), dtype=np.uint8)
    copy, write, read = [], [], []
    with open(file, "w+b", buffering=0) as handle:
        for turn in range(2):  # the first turn allocates pages
            for i in range(samples):
                begin = time.perf_counter()
                np.copyto(targets[i], source)
                middle = time.perf_counter()
                os.pwrite(handle.fileno(), source.data, i * size)
                end = time.perf_counter()
                if turn:
                    copy.append(middle - begin)
                    write.append(end - middle)
        for i in range(samples):
            begin = time.perf_counter()
            os.preadv(handle.fileno(), [targets[i].data], i * size)
            read.append(time.perf_counter() - begin)
    file.unlink()
    return {"copy_ms": _ms(copy), "file_write_ms": _ms(write), "file_read_ms": _ms(read)}


def _steps(order: Sequence[int]) -> list[Sequence[int]]:
    """Cut samples into steps of STEP; the last one has the remainder."""
    return [order[start : start + STEP] for start in range(0, len(order), STEP)]


def _ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)
