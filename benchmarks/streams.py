"""Several TCP connections for one link: rate and step time on a long fat line, and the price on a short one.

    python -m benchmarks streams [--steps 4] [--pairs 8] [--only NAME ...] [--out FOLDER] [--redraw]

The line between two nodes of the network lab carries 1 Gbit/s; `cable.py` delays it, since not every kernel has netem.
TCP's windows are limited as Linux limits them by default. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import page
from benchmarks.cable import limit_windows, long_cable
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.bench.training import Model, untied_gpt2

MODEL = Model(blocks=2, width=64, heads=2, tokens=32, vocabulary=64, samples=4096)  # much to send, little to compute
MICRO_BATCHES, BANDWIDTH = 8, "1000mbit"
LONG_S, SHORT_S = 0.1, 0.0005  # one way
WINDOWS = {"net.ipv4.tcp_rmem": "4096 131072 6291456", "net.ipv4.tcp_wmem": "4096 16384 4194304"}
COUNTS: tuple[int | str, ...] = (1, 2, 4, 8, "auto")
TRANSPORTS = ("tls", "gloo")
WARM_UP, RATE_S, BLOCK_BYTES = 1, 5.0, 1 << 20
CASES = {
    **{f"{transport} {count}": (transport, count, LONG_S) for transport in TRANSPORTS for count in COUNTS},
    **{f"{transport} short": (transport, "auto", SHORT_S) for transport in TRANSPORTS},
}


def run(name: str, steps: int, pairs: int) -> Row:
    """Rate and steps of one number of streams on the long line, or steps of "auto" and 1 in turn on the short one."""
    from pipecomp.netlab import Lab
    from pipecomp.tls.key_folder import create_keys

    transport, count, delay_s = CASES[name]
    with tempfile.TemporaryDirectory() as folder, Lab(nodes=2, bandwidth=BANDWIDTH) as lab:
        environment = {"PIPECOMP_KEYS": ""}
        if transport == "tls":
            create_keys(f"{folder}/keys", ranks="0-1")
            environment = {"PIPECOMP_KEYS": f"{folder}/keys"}
        limit_windows(lab, WINDOWS)
        with long_cable(lab, 1, delay_s):
            if delay_s == LONG_S:
                ranks = lab.run(on_long_line, count, steps, timeout_s=900, environment=environment, threads=1)
            else:
                ranks = lab.run(in_turn, pairs, timeout_s=900, environment=environment, threads=1)
    return {"name": name, **ranks[0], **{key: value for key, value in ranks[1].items() if key == "rate"}}


def on_long_line(rank: int, world: int, note: Any, streams: int | str, steps: int) -> dict[str, Any]:
    """Seconds of steps and of the choice, the streams chosen, and the rate in bytes per second from rank 0 to 1."""
    import torch.distributed as dist

    from pipecomp.distributed.consistency import AllRanks
    from pipecomp.distributed.rendezvous import join_processes
    from pipecomp.stages.link.neighbors import open_neighbors

    join_processes()
    dist.barrier()
    began = time.perf_counter()
    neighbors = open_neighbors([[0, 1]], timeout_s=120.0, streams=streams, all_ranks=AllRanks())
    settled_s = time.perf_counter() - began
    (end,) = neighbors.transports.values()
    (choice,) = neighbors.streams.values()
    found: dict[str, Any] = {"settled_s": settled_s, "streams": choice.streams, "rates": dict(choice.rates)}
    if rank == 0:
        _send_for(end, RATE_S)
    else:
        found["rate"] = _late_rate_of(end)
    dist.barrier()
    end.close()
    dist.barrier()
    for group in neighbors.groups:
        dist.destroy_process_group(group)
    engine = _engine(streams)
    found["steps"] = [_step(engine) for _ in range(WARM_UP + steps)][WARM_UP:]
    stats = engine.comm_stats()
    found["in_training"] = stats["streams"]["0->1"]
    (link,) = stats["links"].values()
    found["bytes"] = [link[way]["bytes_sent"] / (WARM_UP + steps) for way in ("forward", "backward")]
    engine.close()
    return found


def in_turn(rank: int, world: int, note: Any, pairs: int) -> dict[str, Any]:
    """Steps of an engine with "auto" and of one with 1 stream, in turn."""
    engines = [_engine(streams) for streams in (1, "auto")]
    timed = []
    for number in range(WARM_UP + pairs):
        seconds = {side: _step(engines[side]) for side in ((0, 1) if number % 2 == 0 else (1, 0))}
        timed.append([seconds[0], seconds[1]])
    picked = engines[1].comm_stats()["streams"]["0->1"]
    for engine in engines:
        engine.close()
    return {"pairs": timed[WARM_UP:], "streams": picked}


def _send_for(end: Any, seconds: float) -> None:
    import numpy as np

    block, until = np.zeros(BLOCK_BYTES, dtype=np.uint8), time.monotonic() + seconds
    while time.monotonic() < until:
        if end.waiting_bytes < 4 * BLOCK_BYTES:
            end.send(block)
        else:
            time.sleep(0.002)
    end.send(np.zeros(1, dtype=np.uint8))


def _late_rate_of(end: Any) -> float:
    """Bytes per second that arrive in the second half of the time."""
    arrivals = []
    while (size := end.recv().size) > 1:
        arrivals.append((time.perf_counter(), size))
    middle = (arrivals[0][0] + arrivals[-1][0]) / 2
    late = [(at, size) for at, size in arrivals if at >= middle]
    return float(sum(size for _, size in late[1:]) / (late[-1][0] - late[0][0]))


def _engine(streams: int | str) -> Any:
    import torch

    import pipecomp

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocabulary, (MODEL.samples, MODEL.tokens), generator=draw)
    config = {
        "train_micro_batch_size_per_gpu": MODEL.samples // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "pipecomp": {"tie": False, "transport": {"streams": streams}},
    }
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return pipecomp.initialize(untied_gpt2(MODEL), cuts=[0, 1, 2], config=config, training_data=data)


def _step(engine: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    engine.train_batch()
    dist.barrier()
    return time.perf_counter() - began


def results(rows: list[Row]) -> list[str]:
    """The page."""
    by_name = {row["name"]: row for row in rows}
    long = [name for name in CASES if name in by_name and "steps" in by_name[name]]
    short = [name for name in CASES if name in by_name and "pairs" in by_name[name]]
    some = by_name[long[0]] if long else {"bytes": [0, 0]}
    text = f"""
        # Streams

        `python -m benchmarks streams`, on {page.machine(rows)}; both ranks, the cable and the kernel's shaping share
        these cores. Two nodes of the network lab, {BANDWIDTH}, {1000 * LONG_S:g} ms each way, TCP's windows limited to
        Linux's defaults (6 MB to receive, 4 MB to send). Rate: packets of 1 MiB from rank 0 to rank 1, the second half
        of {RATE_S:g} s. Step: {MODEL.blocks} blocks of width {MODEL.width} on two stages, float32,
        {some["bytes"][0] / 1e6:.0f} MB forward and {some["bytes"][1] / 1e6:.0f} MB back in {MICRO_BATCHES}
        micro-batches; median, with the shortest and the longest step.
    """

    def steps(name: str) -> str:
        seconds = by_name[name]["steps"]
        return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"

    cells = {
        "transport": lambda name: CASES[name][0],
        "`transport.streams`": lambda name: CASES[name][1],
        "streams used": lambda name: by_name[name]["in_training"],
        "MB/s": lambda name: f"{by_name[name]['rate'] / 1e6:.1f}",
        "s a step": steps,
        "s to open, and to choose": lambda name: f"{by_name[name]['settled_s']:.1f}",
    }
    lines = [*prose(text), *page.columns(cells, long)]
    for transport in TRANSPORTS:
        row = by_name.get(f"{transport} auto")
        if row is not None:
            rates = ", ".join(f"{float(rate) / 1e6:.1f} MB/s with {count}" for count, rate in row["rates"].items())
            lines += prose(f"What `auto` measured over {transport}, both directions together: {rates}.")
    if short:
        lines += prose(
            f"""
            ## A short line

            The same with {1000 * SHORT_S:g} ms each way. Two engines in the same processes, one with `auto`, one with
            1 stream, make a step in turn; the ratio of their steps is the median over pairs, with quarters of pairs
            below and above.
            """
        )

        def ratio(name: str, number: int) -> str:
            return f"{statistics.quantiles([auto / one for one, auto in by_name[name]['pairs']], n=4)[number]:.3f}"

        lines += page.columns(
            {
                "transport": lambda name: CASES[name][0],
                "`auto` uses": lambda name: by_name[name]["streams"],
                "s a step, 1 and auto": lambda name: " and ".join(
                    f"{statistics.median(side):.2f}" for side in zip(*by_name[name]["pairs"], strict=True)
                ),
                "ratio": lambda name: f"**{ratio(name, 1)}**",
                "a quarter below": lambda name: ratio(name, 0),
                "a quarter above": lambda name: ratio(name, 2),
            },
            short,
        )
    return lines


def _line(row: Row) -> str:
    if "pairs" in row:
        return f"{statistics.median(auto / one for one, auto in row['pairs']):.3f}, {row['streams']} streams"
    return f"{row['rate'] / 1e6:.1f} MB/s, {statistics.median(row['steps']):.2f} s a step, {row['in_training']} streams"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", steps=(4, "of each number"), pairs=(8, "of steps on the short line"))
    setup = digest([asdict(MODEL), MICRO_BATCHES, BANDWIDTH, LONG_S, SHORT_S, WINDOWS])
    runs = Runs(given, "streams", setup, ("name",))
    cases = [(name,) for name in chosen(CASES, given.only)]
    os.environ.pop("PIPECOMP_KEYS", None)
    runs.complete(run, cases, given.steps, given.pairs, line=_line, page=results)
