"""Time training steps with a message store that does not fit into memory.

    python -m benchmarks store_beyond_memory [--samples 256] [--cache-mb 64] [--epochs 4] [--rounds 2]
                                             [--folder FOLDER] [--out FOLDER] [--redraw]

The model of `throughput.py` over two stages on 127.0.0.1, AQ-SGD fw3 bw6, activations cached at 32 bits: half a
megabyte a sample at each end. In turn with the memory store, with LMDB, and with LMDB in a control group that leaves
--cache-mb of memory beyond what a rank needs itself, so that most of them come from the disk. Needs root and the
kernel's memory controller. Steps of the first two epochs, in which a rank's own need is found, are not counted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import ROOT, Runs, arguments, digest
from pipecomp.bench.training import Model
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError

MODEL = Model()
UNCOUNTED = 2  # epochs
MEMORY, DISK, SMALL = LINES = ("memory store", "LMDB", "LMDB, larger than memory")


class ControlGroup:
    """A memory control group (version 1 or 2) of this process alone."""

    def __init__(self, name: str) -> None:
        old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self._old = old.is_dir()
        self.folder = (old if self._old else new) / name
        try:
            self.folder.mkdir()
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
            self._file("limit")
        except OSError as error:
            raise ConfigError("control group", str(self.folder), f"one that root can make ({error})") from error
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _file(self, what: str) -> Path:
        names = {"limit": ("memory.limit_in_bytes", "memory.max"), "used": ("memory.usage_in_bytes", "memory.current")}
        file = self.folder / names[what][0 if self._old else 1]
        if not file.exists():
            raise OSError(f"no {file}")
        return file

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self._peak = max(self._peak, self._own()[0])

    def _own(self) -> tuple[int, int]:
        """Bytes that are not page cache, and those that are."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        cache = int(stat["cache" if self._old else "file"])
        return int(self._file("used").read_text()) - cache, cache

    def leave(self, size: int) -> None:
        """From now on no more than `size` bytes beside the most that was not page cache until now."""
        self._done.set()
        self._thread.join()
        self._file("limit").write_text(str(self._peak + size))


def train(rank: int, world: int, note: Any, line: str, samples: int, epochs: int, size: int, folder: str) -> Any:
    """Seconds of each step that counts, and bytes read from disk in each; the control group's folder."""
    import torch

    import pipecomp
    from pipecomp.demo.task import gpt2

    torch.set_num_threads(1)
    group = ControlGroup(f"pipecomp-{os.getppid()}-{rank}") if line == SMALL else None
    model = gpt2(MODEL.vocabulary, MODEL.tokens, layers=MODEL.blocks, width=MODEL.width, heads=MODEL.heads, seed=0)
    tokens = torch.randint(0, MODEL.vocabulary, (samples, MODEL.tokens), generator=torch.Generator().manual_seed(0))
    config = {
        "train_batch_size": MODEL.samples,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        "pipecomp": {
            "tie": False,
            "activations": {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6},
            "store": {"backend": "memory"} if line == MEMORY else {"backend": "lmdb", "path": folder},
        },
    }
    data = [{"input_ids": row, "labels": row} for row in tokens]
    engine = pipecomp.initialize(model, num_stages=world, config=config, training_data=data)
    steps = samples // MODEL.samples
    for _ in range(UNCOUNTED * steps):  # samples go uncompressed, then as changes
        engine.train_batch()
    if group is not None:
        group.leave(size)
    before = _read_bytes()
    seconds = []
    for _ in range(steps * (epochs - UNCOUNTED)):
        began = time.perf_counter()
        engine.train_batch()
        seconds.append(time.perf_counter() - began)
    read = (_read_bytes() - before) / len(seconds)
    engine.close()
    return (seconds, read), None if group is None else str(group.folder)


def _read_bytes() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def run(line: str, turn: int, samples: int, epochs: int, size: int, folder: Path) -> Row:
    """One training with one store; per rank seconds of the steps and bytes read from disk in each."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        ranks = run_ranks(2, train, line, samples, epochs, size, made, timeout_s=3600)
    for _, group in ranks.values():
        if group is not None:
            Path(group).rmdir()
    seconds, read = zip(*(measurement for measurement, _ in ranks.values()), strict=True)
    # a step ends when both ranks are done
    steps = [max(both) for both in zip(*seconds, strict=True)]
    given = {"samples": samples, "cache_bytes": size, "load": os.getloadavg()[1]}
    return {"line": line, "round": turn, "steps": steps, "read_bytes": sum(read), **given}


def results(rows: list[Row]) -> list[str]:
    """The page."""
    first = rows[0]
    text = f"""
        # A message store that is larger than memory

        `python -m benchmarks store_beyond_memory`, on {page.machine(rows)}, load average
        {max(page.values(rows, "load")):.1f}.

        Cached activations of {first["samples"]} samples,
        {MODEL.tokens * MODEL.width * 4 * first["samples"] / 2**20:.0f} MB at each of two ends.
        Larger than memory: a rank has {first["cache_bytes"] >> 20} MB beside what it needs itself. Medians of all
        steps after the first {UNCOUNTED} epochs.
    """
    groups = sorted(page.grouped(rows, "line"), key=lambda group: LINES.index(group[0]["line"]))

    def steps(group: list[Row]) -> list[float]:
        return [seconds for row in group for seconds in row["steps"]]

    base = statistics.median(steps(groups[0]))
    cells = {
        "line": lambda group: group[0]["line"],
        "s a step": lambda group: f"{statistics.median(steps(group)):.3f}",
        "least": lambda group: f"{min(steps(group)):.3f}",
        "most": lambda group: f"{max(steps(group)):.3f}",
        "× memory store": lambda group: f"{statistics.median(steps(group)) / base:.3f}",
        "read from disk, MB a step": lambda group: f"{statistics.mean(page.values(group, 'read_bytes')) / 1e6:.1f}",
    }
    return [*prose(text), *page.columns(cells, groups)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(
        argv,
        __doc__,
        samples=(256, "of the training"),
        cache_mb=(64, "memory for cached activations when there is little"),
        epochs=(4, "the first two are not counted"),
        rounds=(2, "how often each line runs"),
        folder=(ROOT / "runs", "on the disk to be measured"),
    )
    setup = digest([given.samples, given.cache_mb, given.epochs])
    Runs(given, "store_beyond_memory", setup, ("line", "round")).complete(
        run,
        [(line, turn) for turn in range(given.rounds) for line in LINES],
        given.samples,
        given.epochs,
        given.cache_mb << 20,
        given.folder,
        line=lambda row: f"{statistics.median(row['steps']):.3f} s",
        page=results,
        workers=0,
    )
