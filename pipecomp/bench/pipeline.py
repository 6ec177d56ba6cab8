"""What `pipecomp bench pipeline` measures: a training step over links of several rates, beside stock DeepSpeed.

Stages run in network namespaces of a lab (root needed), on the CPU, one thread each. All lines of one rate run in turn;
a line's steps are timed after some that are not counted: of stock DeepSpeed one, of pipecomp two and more, until it has
settled how many micro-batches are in flight. Where replicas average after several steps only, as many are timed
together. Where the processor has no BF16 products, lines in BF16 compute them in float32 and round (bench/bf16.py),
stock DeepSpeed's too.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipecomp.bench.configurations import LINES, RATES, STOCK, TWICE, UNTHROTTLED, Line, Model, rate_for
from pipecomp.errors import require
from pipecomp.netlab.lab import Lab
from pipecomp.utils.tables import table

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
_WAYS = ("forward", "backward")


def bench_pipeline(
    *,
    lines: Sequence[Line] = LINES,
    rates: Sequence[float] = RATES,
    stages: int = 2,
    steps: int = 3,
    rounds: int = 1,
    delay: str | None = None,
    model: Model | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure every line at every r in `rates` (0: unthrottled) and return one row for each.

    A row: "line", "r", "bits_per_s" (None unthrottled), "seconds" (median step), "least", "most", "wait_s" and
    "in_flight" (of the first stage), "compute_s" (of a micro-batch on one stage, mean over stages), "bytes" (of a timed
    step, on all nodes' interfaces), "loss" (of the second step, which all lines make).
    "stages", "micro_batches", "replicas" and "delay" (as given); "ranks": what each rank's counters say of a mean timed
    step (not of stock DeepSpeed): see `counted`.
    Raises ConfigError for numbers that cannot be, NetlabError without root.
    """
    model = model or Model()
    require(2 <= stages <= model.blocks, "stages", stages, f"2 to {model.blocks}, the model's blocks")
    for key, value in (("steps", steps), ("rounds", rounds)):
        require(value >= 1, key, value, "a whole number of at least 1")
    found: dict[tuple[float, str], list[Row]] = {}
    compute_s = None
    for r in sorted(rates, key=lambda rate: rate != UNTHROTTLED):
        if r != UNTHROTTLED and compute_s is None:
            compute_s = reference_compute(model, stages)
        rate = None if compute_s is None or r == UNTHROTTLED else rate_for(model, r, compute_s)
        for turn in range(rounds):
            for line in lines:
                row = measure(line, model, stages, steps, rate, delay)
                found.setdefault((r, line.name), []).append({"line": line.name, "r": r, "bits_per_s": rate, **row})
                if r == UNTHROTTLED and line.name == "FP32":
                    compute_s = row["compute_s"]
                if turn == rounds - 1 and on_row is not None:
                    on_row(summary(found[r, line.name]))
    return [summary(runs) for runs in found.values()]


def summary(runs: Sequence[Row]) -> Row:
    """Sum up all rounds of one line at one rate: their steps' median, least and most, the rest of the last one."""
    every = [s for run in runs for s in run["steps"]]
    times = {"seconds": statistics.median(every), "least": min(every), "most": max(every)}
    return {**{k: v for k, v in runs[-1].items() if k != "steps"}, **times}


def reference_compute(model: Model, stages: int, runs: int = 1) -> float:
    """Measure how long one stage computes on one micro-batch: the median of unthrottled runs without compression."""
    line = Line(name="FP32")
    return statistics.median(measure(line, model, stages, 3, None, None)["compute_s"] for _ in range(runs))


def measure(
    line: Line, model: Model, stages: int, steps: int, rate: int | None, delay: str | None, **network: Any
) -> Row:
    """Run a line once; give a row as of `bench_pipeline` and the "steps", seconds of each.

    rate: of links, in bit/s. network: of the lab besides.
    """
    world = stages * line.replicas
    bandwidth = None if rate is None else f"{rate}bit"
    with Lab(nodes=world, bandwidth=bandwidth, delay=delay, **network) as lab, tempfile.TemporaryDirectory() as folder:
        # Here and not in `train`: what is set later, when deepspeed has been imported, is not read.
        cpu = {"DS_ACCELERATOR": "cpu"}
        ranks = lab.run(train, line, model, stages, steps, folder, timeout_s=1800, environment=cpu)
    times = [max(rank["steps"][i] for rank in ranks.values()) for i in range(steps)]
    compute = [rank["compute_s"] for rank in ranks.values() if rank["compute_s"]]
    return {
        "steps": times,
        "wait_s": ranks[0]["wait_s"],
        "in_flight": ranks[0]["in_flight"],
        "compute_s": statistics.mean(compute) if compute else None,
        "bytes": sum(rank["bytes"] for rank in ranks.values()),
        "loss": ranks[0]["loss"],
        "stages": stages,
        "micro_batches": line.micro_batches,
        "replicas": line.replicas,
        "delay": delay,
        "ranks": [ranks[rank]["counted"] for rank in sorted(ranks)],
    }


def start_engine(line: Line, model: Model, stages: int, folder: str) -> Any:
    """Make the engine of a line on one of its ranks. folder: for its message store."""
    import torch

    whole = untied_gpt2(model)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, (model.samples * line.replicas, model.tokens), generator=draw)
    return (_stock if line.engine == "deepspeed" else _ours)(line, whole, tokens, stages, folder)


def untied_gpt2(model: Model) -> Any:
    """Make the GPT-2 with random weights; stock DeepSpeed cannot tie weights across stages as pipecomp does."""
    from pipecomp.demo.task import gpt2, untie

    whole = gpt2(model.vocabulary, model.tokens, layers=model.blocks, width=model.width, heads=model.heads, seed=0)
    untie(whole)
    return whole


def train(rank: int, world: int, note: Any, line: Line, model: Model, stages: int, steps: int, folder: str) -> Row:
    """Make one rank's steps: seconds of each, and what it waited and computed in the last one."""
    import torch
    import torch.distributed as dist

    from pipecomp.distributed.collectives import gathered

    torch.set_num_threads(1)
    engine = start_engine(line, model, stages, folder)
    seconds: list[float] = []
    loss, sent = 0.0, 0
    before: dict[str, float] = {}
    first: Row = {}
    for step in itertools.count(step=line.period):
        timed = bool(seconds) or all(gathered(line.counts(step, engine)))  # replicas settle apart from each other
        if hasattr(engine, "comm_stats"):
            stats = engine.comm_stats()
            before = stats["seconds"]
            first = stats if timed and not seconds else first
        dist.barrier()
        sent = sent if seconds else _sent_bytes()
        began = time.perf_counter()
        for part in range(line.period):
            with through_float32(line, engine.device):
                found = float(engine.train_batch())
            loss = found if step + part == 1 else loss
        dist.barrier()
        if timed:
            seconds.append((time.perf_counter() - began) / line.period)
        if len(seconds) == steps:
            break
    row: Row = {"steps": seconds, "wait_s": None, "in_flight": None, "compute_s": None, "loss": loss}
    row["counted"], row["bytes"] = None, (_sent_bytes() - sent) / steps / line.period
    if hasattr(engine, "comm_stats"):
        stats = engine.comm_stats()
        spent = {part: (stats["seconds"][part] - before[part]) / line.period for part in before}
        row["wait_s"], row["in_flight"] = spent["wait"], stats["in_flight"]
        row["compute_s"] = (spent["forward"] + spent["backward"]) / line.micro_batches
        row["counted"] = counted(first, stats, steps * line.period)
        engine.close()
    return row


def through_float32(line: Line, device: torch.device) -> AbstractContextManager[None]:
    """Make a context in which BF16 products are float32's, rounded, for lines in BF16 on a CPU that has none.

    device: where the line computes. On a GPU nothing is done: even looking at each operation would take time there.
    """
    from pipecomp.bench.bf16 import cpu_multiplies_bf16, products_in_float32

    return products_in_float32(line.dtype == "bf16" and device.type == "cpu" and not cpu_multiplies_bf16())


def _sent_bytes() -> int:
    """Read what this node's interface has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def counted(first: Row, last: Row, steps: int) -> Row:
    """Tell what a rank's `comm_stats` have gained over `steps` steps, for each of them.

    "stage", "in_flight", "seconds" by part, and "links": by name the bytes sent "forward" and "backward". "bits": by
    name those of a quantized value each way, on average; None where there is none.
    """

    def gain(name: str, way: str, count: str = "bytes_sent") -> float:
        before, after = (stats["links"][name][way][count] for stats in (first, last))
        return float(after - before) / steps

    def bits(name: str, way: str) -> float | None:
        values = gain(name, way, "values_quantized")
        return gain(name, way, "code_bits") / values if values else None

    return {
        "stage": last["stage"],
        "in_flight": last["in_flight"],
        "seconds": {part: (last["seconds"][part] - first["seconds"][part]) / steps for part in last["seconds"]},
        "links": {name: {way: gain(name, way) for way in _WAYS} for name in last["links"]},
        "bits": {name: {way: bits(name, way) for way in _WAYS} for name in last["links"]},
    }


def _config(line: Line, tokens: Any) -> dict[str, Any]:
    from pipecomp.plan.report import precision_sections

    return {
        "train_micro_batch_size_per_gpu": len(tokens) // line.replicas // line.micro_batches,
        "gradient_accumulation_steps": line.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        **precision_sections(line.dtype),
    }


def _ours(line: Line, whole: Any, tokens: Any, stages: int, folder: str) -> Any:
    import pipecomp

    section = {"tie": False, **line.section}
    if section.get("store", {}).get("backend") == "lmdb":
        section["store"] = {**section["store"], "path": folder}
    config = {**_config(line, tokens), "pipecomp": section}
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return pipecomp.initialize(whole, num_stages=stages, config=config, training_data=data)


def _stock(line: Line, whole: Any, tokens: Any, stages: int, folder: str) -> Any:
    from pipecomp.bench.stock_deepspeed import stock_engine

    config = _config(line, tokens)
    engine = stock_engine(whole, stages, config)
    size = config["train_micro_batch_size_per_gpu"]
    replica = engine.grid.data_parallel_id
    own = tokens.chunk(line.replicas)[replica].split(size)
    iterator = itertools.cycle((part, part) for part in own)
    train_batch = engine.train_batch
    engine.train_batch = lambda: train_batch(iterator)
    return engine


def pipeline_table(rows: Sequence[Row]) -> Table:
    """Tabulate the rows for people, each against stock DeepSpeed in float32 over the same link."""
    every = {(row["r"], row["line"]): row["seconds"] for row in rows}
    free = {row["line"]: row["seconds"] for row in rows if row["r"] == UNTHROTTLED}
    cells = []
    for row in rows:
        mbit = "" if row["bits_per_s"] is None else f"{row['bits_per_s'] / 1e6:.1f}"
        base = every.get((row["r"], TWICE if row["replicas"] > 1 else STOCK))
        faster = "" if base is None else f"{base / row['seconds']:.2f}"
        share = f"{free[row['line']] / row['seconds']:.2f}" if row["line"] in free else ""
        ahead = "" if row["in_flight"] is None else str(row["in_flight"])
        times = [f"{row[key]:.2f}" for key in ("seconds", "least", "most")]
        cells.append((f"{row['r']:g}", mbit, row["line"], *times, faster, share, ahead, mean_bits(row)))
    headings = ("r", "Mbit/s", "line", "seconds", "least", "most", "× DeepSpeed", "of unthrottled", "in flight", "bits")
    return table(headings, cells, left=("line",), title="Seconds per training step")


def mean_bits(row: Row) -> str:
    """Write the bits of a value forward and back, the mean over a row's links; empty where none are quantized."""
    links = [link for rank in row["ranks"] if rank is not None for link in rank.get("bits", {}).values()]
    found = [[link[way] for link in links if link[way] is not None] for way in _WAYS]
    return "/".join(f"{statistics.mean(bits):.3g}" if bits else "–" for bits in found) if any(found) else ""
