"""Steps over links of several rates, as `throughput`, `paired` and others measure them: configurations and one run.

Stages run in network namespaces of a lab (root needed), on the CPU, one thread each. A line's steps are timed after
some that do not count: one of stock DeepSpeed, two and more of pipecomp, until its number of micro-batches in flight is
settled. Replicas that average after several steps are timed over as many. Without BF16 instructions, lines in BF16
compute products in float32 and round (`pipecomp/bench/training.py`), stock DeepSpeed's too.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipecomp.bench.training import STOCK, STOCK_BF16, Line, Model, Row, aqsgd, start_engine, through_float32
from pipecomp.netlab.lab import Lab

UNTHROTTLED = 0.0
RATES = (UNTHROTTLED, 0.3, 1.0, 3.0, 5.8, 12.0)
TWICE = "DeepSpeed FP32, 2 replicas"
EIGHT, SIXTEEN = "AQ-SGD fw3 bw6", "AQ-SGD fw3 bw6, 16 micro-batches"
COARSE = "AQ-SGD fw2 bw4, 16 micro-batches"
MEMORY = f"{SIXTEEN}, memory store"
REPLICAS = {bits: f"{EIGHT}, 2 replicas, {bits}-bit gradients" for bits in (4, 1)}
_WAYS = ("forward", "backward")

LINES = (
    Line(name=STOCK, engine="deepspeed"),
    Line(name=STOCK_BF16, engine="deepspeed", dtype="bf16"),
    Line(name="FP32"),
    Line(name="FP32, 1F1B's number in flight", section={"in_flight": 1}),
    Line(name="BF16", dtype="bf16"),
    Line(name="DirectQ fw3 bw6", section={"activations": {"method": "direct", "forward_bits": 3, "backward_bits": 6}}),
    Line(name=EIGHT, section=aqsgd(3, 6)),
    Line(name=SIXTEEN, section=aqsgd(3, 6), micro_batches=16),
    Line(name=COARSE, section=aqsgd(2, 4), micro_batches=16),
    Line(name=MEMORY, section=aqsgd(3, 6, "memory"), micro_batches=16),
    Line(name=TWICE, engine="deepspeed", replicas=2, against=TWICE),
    *(
        Line(
            name=name,
            replicas=2,
            against=TWICE,
            section={**aqsgd(3, 6), "gradients": {"method": "double_squeeze", "bits": bits}},
        )
        for bits, name in REPLICAS.items()
    ),
)

ADAM = Line(  # not in LINES: rows of throughput.py are of these
    name=f"{EIGHT}, 2 replicas, QuantizedAdam 4 bits",
    replicas=2,
    against=TWICE,
    section={**aqsgd(3, 6), "gradients": {"method": "quantized_adam", "bits": 4, "freeze_step": 2}},
)


def local_lines(local_steps: int) -> tuple[Line, ...]:
    """Two replicas that average after so many steps, with few bits; fragments travel while the next steps are taken."""
    every = f"every {local_steps} steps"
    overlap = {"fragments": min(2, local_steps), "overlap": max(1, local_steps // 4)}
    kinds = (
        (f"{EIGHT}, 2 replicas, 4 bits {every}", aqsgd(3, 6), 8, {"bits": 4}),
        (f"{SIXTEEN}, 2 replicas, 4 bits {every}", aqsgd(3, 6), 16, {"bits": 4}),
        (f"{SIXTEEN}, 2 replicas, 4 bits {every}, overlapped", aqsgd(3, 6), 16, {"bits": 4, **overlap}),
        (f"{COARSE}, 2 replicas, 2 bits {every}, overlapped", aqsgd(2, 4), 16, {"bits": 2, **overlap}),
        (f"{COARSE}, 2 replicas, 1 bit {every}, overlapped", aqsgd(2, 4), 16, {"bits": 1, **overlap}),
    )
    return tuple(
        Line(
            name=name,
            replicas=2,
            against=TWICE,
            micro_batches=micro_batches,
            section={**section, "gradients": {"method": "double_squeeze", "local_steps": local_steps, **gradients}},
        )
        for name, section, micro_batches, gradients in kinds
    )


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
    """Run a line once; give a row with "steps", the seconds of each.

    rate: rate of the links, in bit/s. network: other settings of the lab.
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
                loss_here = float(engine.train_batch())
            loss = loss_here if step + part == 1 else loss
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


def _sent_bytes() -> int:
    """Read what this node's interface has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def counted(first: Row, last: Row, steps: int) -> Row:
    """Return the increase of a rank's `comm_stats` over `steps` steps, for each of them.

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


def mean_bits(row: Row) -> str:
    """Write the bits of a value forward and back, the mean over a row's links; empty where none are quantized."""
    links = [link for rank in row["ranks"] if rank is not None for link in rank.get("bits", {}).values()]
    by_direction = [[link[way] for link in links if link[way] is not None] for way in _WAYS]
    return (
        "/".join(f"{statistics.mean(bits):.3g}" if bits else "–" for bits in by_direction) if any(by_direction) else ""
    )
