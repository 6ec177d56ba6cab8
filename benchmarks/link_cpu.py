"""Measure the CPU time of a sample at both ends of a link: AQ-SGD beside uncompressed.

    python -m benchmarks link_cpu [--rounds 8] [--steps 8] [--tokens 36] [--hidden 384] [--profile FILE]

Two processes of this machine, a link between them for each line, no model. Lines take turns, some steps each, in the
same processes: a shared machine slows all of them down alike. A line's first visits do not count. Printed are
milliseconds of CPU time of both processes a sample, the median of the rounds, and how they divide among threads.
--profile writes cProfile's table of what the first process's main thread does.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipecomp.buffers import open_environment
from pipecomp.codecs.wire import PacketHeader
from pipecomp.config import Config
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.gloo import GlooTransport, neighbour_groups
from pipecomp.stages.link.layout import Layout

AQSGD = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}
LINES: dict[str, dict[str, Any]] = {
    "uncompressed": {"activations": {"method": "none"}},
    "direct": {"activations": AQSGD | {"method": "direct"}},
    "AQ-SGD, memory": {"activations": AQSGD, "store": {"backend": "memory"}},
    "AQ-SGD, LMDB": {"activations": AQSGD, "store": {"backend": "lmdb"}},
}
SAMPLES, MICRO_BATCH, AHEAD = 64, 4, 3


class Line:
    """One end of one line's link."""

    def __init__(self, rank: int, name: str, folder: str, tokens: int, hidden: int) -> None:
        self.rank, self.steps, settings = rank, 0, LINES[name]
        store = settings.get("store", {}).get("backend")
        config = Config.from_dict(settings)
        self.environment = None
        if store is not None:
            path = f"{folder}/{name}/{rank}"
            self.environment = open_environment(store, path, rank, bits=32, prefetch=2)
        held = self.environment and self.environment.link("link-0", {})
        self.transport = GlooTransport(neighbour_groups([[0, 1]], 60.0)[0, 1][0].group, timeout_s=60.0)
        end = LinkReceiver if rank else LinkSender
        self.end: Any = end(0, config, self.transport, held)
        draw = torch.Generator().manual_seed(0)
        self.x_BSH = torch.randn(SAMPLES // MICRO_BATCH, MICRO_BATCH, tokens, hidden, generator=draw)
        self.layouts = [
            Layout(tuple(range(i, i + MICRO_BATCH)), (0,) * MICRO_BATCH, (tokens,) * MICRO_BATCH, tokens)
            for i in range(0, SAMPLES, MICRO_BATCH)
        ]
        if rank and held is not None:
            self.end.receive_staging.on_header = self._prefetch

    def _prefetch(self, header: PacketHeader) -> None:
        self.end.store.prefetch([sample.id for sample in header.samples])

    def step(self) -> None:
        """Send every sample once, and its gradient back."""
        for i in range(len(self.layouts) + AHEAD):
            if i < len(self.layouts):
                self._forward(i)
            if i >= AHEAD and not self.rank:
                self.end.recv_gradient(self.layouts[i - AHEAD], Position(self.steps, i - AHEAD))
        self.steps += 1
        if self.environment is not None:
            self.environment.commit()

    def _forward(self, i: int) -> None:
        layout, at = self.layouts[i], Position(self.steps, i)
        if self.rank:
            y_BSH, _ = self.end.recv_activation(at)
            self.end.send_gradient(y_BSH, layout, at)
            return
        if self.end.store is not None:
            for ahead in self.layouts[i + 1 : i + 2]:
                self.end.store.prefetch(ahead.ids)
        self.end.send_activation(self.x_BSH[i] * (1 + 0.01 * self.steps), layout, at)

    def close(self) -> None:
        self.transport.close()
        if self.environment is not None:
            self.environment.close()


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process's threads by name; those that are not Python's count as "others"."""
    names = {thread.native_id: thread.name.rstrip("0123456789-") for thread in threading.enumerate()}
    seconds: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            name = names.get(int(task.name), "others").split(" ")[0]
            seconds[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def work(rank: int, world: int, note: Any, given: argparse.Namespace, folder: str) -> dict[str, list[dict[str, float]]]:
    """By line, milliseconds of CPU time a sample in each round, by thread."""
    import torch.distributed as dist

    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    lines = {name: Line(rank, name, folder, given.tokens, given.hidden) for name in LINES}
    for line in lines.values():
        line.step()
        line.step()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in lines}
    profile = cProfile.Profile(time.thread_time)  # this thread alone, while it runs
    for _ in range(given.rounds):
        for name, line in lines.items():
            dist.barrier()
            before = cpu_seconds()
            if given.profile and not rank and name == given.line:
                profile.enable()
            for _ in range(given.steps):
                line.step()
            profile.disable()
            if line.environment is not None:
                line.end.store.flush()
            dist.barrier()
            after = cpu_seconds()
            count = given.steps * SAMPLES
            rounds[name].append({t: 1e3 * (after[t] - before.get(t, 0.0)) / count for t in after})
    for line in lines.values():
        line.close()
    if given.profile and not rank:
        with open(given.profile, "w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)
    return rounds


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 8), ("steps", 8), ("tokens", 36), ("hidden", 384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile")
    parser.add_argument("--line", choices=LINES, default="AQ-SGD, LMDB", help="what --profile looks at")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(2, work, given, folder, timeout_s=600)
    for name in LINES:
        rounds = [{rank: ranks[rank][name][i] for rank in ranks} for i in range(given.rounds)]
        sums = [sum(sum(threads.values()) for threads in one.values()) for one in rounds]
        print(f"{name:<16} {statistics.median(sums):6.3f} ms a sample ({min(sums):.3f} to {max(sums):.3f})")
        for rank in ranks:
            threads = {t for one in rounds for t in one[rank]}
            means = {t: statistics.median(one[rank].get(t, 0.0) for one in rounds) for t in threads}
            print(f"    rank {rank}:", ", ".join(f"{t} {m:.3f}" for t, m in sorted(means.items()) if m >= 0.002))
