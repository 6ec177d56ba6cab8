"""What does a message store cost a training step when it does not fit into memory?

    python benchmarks/store_beyond_memory.py [--samples 256] [--cache-mb 64] [--epochs 4] [--rounds 2] [--folder FOLDER]

The model of `throughput.py` over two stages on 127.0.0.1, AQ-SGD fw3 bw6, messages kept at 32 bits: half a megabyte a
sample at each end. In turn with the memory store, with LMDB, and with LMDB in a control group that leaves --cache-mb of
memory beyond what a rank needs itself, so that most messages come from the disk. Needs root and the kernel's memory
controller. Steps of the first two epochs, in which a rank's own need is found, are not counted.
Writes store_beyond_memory.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pipecomp.bench.configurations import Model
from pipecomp.cluster.local_ranks import run_ranks
from pipecomp.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MODEL = Model()
UNCOUNTED = 2  # epochs
MEMORY, DISK, SMALL = LINES = ("memory store", "LMDB", "LMDB, larger than memory")
HEADINGS = ("line", "s a step", "least", "most", "× memory store", "read from disk, MB a step")


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
    for _ in range(UNCOUNTED * steps):  # samples go whole, then as changes
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


def main() -> None:
    """See the top of the file."""
    arguments = _arguments()
    size = MODEL.tokens * MODEL.width * 4 * arguments.samples
    found: dict[str, list[Any]] = {line: [] for line in LINES}
    for turn in range(arguments.rounds):
        for line in LINES:
            arguments.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                more = (line, arguments.samples, arguments.epochs, arguments.cache_mb << 20, folder)
                ranks = run_ranks(2, train, *more, timeout_s=3600)
            for _, group in ranks.values():
                if group is not None:
                    Path(group).rmdir()
            found[line].append([result for result, _ in ranks.values()])
            print(f"{turn + 1}/{arguments.rounds}  {line:<26} {_seconds(found[line][-1:])[0]:.3f} s", flush=True)
    base = _seconds(found[MEMORY])[0]
    page = [
        "# A message store that is larger than memory",
        "",
        f"`{' '.join(['python benchmarks/store_beyond_memory.py', *sys.argv[1:]])}`, on {os.cpu_count()} cores "
        f"({platform.machine()}), load average {os.getloadavg()[1]:.1f}.",
        "",
        f"Messages of {arguments.samples} samples, {size / 2**20:.0f} MB at each of two ends. Larger than memory: a "
        f"rank has {arguments.cache_mb} MB beside what it needs itself. Medians of all steps after two epochs.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    for line in LINES:
        ends = [end for ranks in found[line] for end in ranks]
        median, least, most = _seconds(found[line])
        cells = [line, *(f"{s:.3f}" for s in (median, least, most)), f"{median / base:.3f}"]
        cells.append(f"{sum(end[1] for end in ends) / arguments.rounds / 1e6:.1f}")
        page.append(f"| {' | '.join(cells)} |")
    (arguments.out / "store_beyond_memory.md").write_text("\n".join(page) + "\n")
    print("\n".join(page[6:]))


def _seconds(rounds: list[Any]) -> tuple[float, float, float]:
    """Median, least and most of a step; it ends when both ranks are done."""
    steps = [max(both) for ranks in rounds for both in zip(*(end[0] for end in ranks), strict=True)]
    return statistics.median(steps), min(steps), max(steps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=int, default=256)
    add("--cache-mb", type=int, default=64, help="memory for messages when there is little (64)")
    add("--epochs", type=int, default=4, help="the first two are not counted (4)")
    add("--rounds", type=int, default=2, help="how often each line runs (2)")
    add("--folder", type=Path, default=ROOT / "runs", help="on the disk to be measured")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
