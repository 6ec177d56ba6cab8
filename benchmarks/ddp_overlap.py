"""Record the communication and the backward pass of a DDP step over a slow link.

    python -m benchmarks ddp_overlap [--bandwidth 100mbit] [--method double_squeeze] [--out FOLDER] [--redraw]

Two ranks in two network namespaces train an MLP with a hook of `pipecomp.allreduce`. Every bucket's averaging is timed
from the hook's call to its end, beside the backward pass; the picture shows one step of both ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, digest

STEPS, WIDTH, LAYERS, BATCH = 6, 768, 12, 512


def train(rank: int, world: int, note: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Begin and end of the last step's backward pass and of every bucket, seconds from the step's begin."""
    import torch
    import torch.distributed as dist

    from pipecomp.allreduce import State, ddp_hook

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=5)
    state = None if options["method"] == "gloo" else State(**options)
    buckets: list[tuple[float, float]] = []

    def timed(own: State | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        began = time.time()
        if own is not None:
            future = ddp_hook(own, bucket)
        else:
            work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            future = work.then(lambda f: f.value()[0] / world)

        def done(f: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buckets.append((began, time.time()))
            return f.value()

        return future.then(done)

    timed.__annotations__.clear()  # DDP reads them, and wants classes in place of names
    model.register_comm_hook(state, timed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        dist.barrier()
        buckets.clear()
        step = time.time()
        loss = model(x).square().mean()
        backward = time.time()
        loss.backward()
        ended = time.time()
        optimizer.step()
        optimizer.zero_grad()
        stepped = time.time()
    alone = time.time()
    with model.no_sync():
        model(x).square().mean().backward()
    compute = time.time() - alone
    if state is not None:
        state.close()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "forward": (0.0, backward - step),
        "backward": (backward - step, ended - step),
        "buckets": [(a - step, b - step) for a, b in buckets],
        "step": stepped - step,
        "alone": compute,  # forward and backward without communication
    }


def measure(method: str, bandwidth: str) -> Row:
    """The last step of both ranks."""
    from pipecomp.netlab.lab import Lab

    with Lab(nodes=2, bandwidth=bandwidth) as lab:
        ranks = lab.run(train, {"method": method}, timeout_s=300)
    return {"method": method, "bandwidth": bandwidth, "ranks": [ranks[rank] for rank in sorted(ranks)]}


def draw(row: Row, file: Path) -> None:
    """A bar for each rank's compute and one for each bucket."""
    labels = []
    with page.picture(file, size=(11, 5)) as (axis,):
        for rank, times in enumerate(row["ranks"]):
            y = len(labels)
            labels.append(f"rank {rank}  compute")
            begin, end = times["backward"]
            axis.barh(y, begin, left=0, color="#4c72b0", label=None if rank else "forward")
            # Until backward() returns it also waits for the last buckets; alone it takes what it takes without them.
            own = max(0.0, times["alone"] - begin)
            axis.barh(y, own, left=begin, color="#2a4d80", label=None if rank else "backward")
            rest = max(0.0, end - begin - own)
            axis.barh(y, rest, left=begin + own, color="#d9d9d9", label=None if rank else "waiting")
            for number, (a, b) in enumerate(sorted(times["buckets"])):
                labels.append(f"rank {rank}  bucket {number}")
                name = "averaging" if rank == number == 0 else None
                axis.barh(len(labels) - 1, b - a, left=a, color="#55a868", label=name)
        axis.set_yticks(range(len(labels)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("seconds")
        axis.set_title(f"One DDP step, {row['method']}, over {row['bandwidth']}", fontsize=10)
        axis.legend(fontsize=8)


def results(rows: list[Row], picture: Path) -> list[str]:
    """The page, and its picture beside it."""
    text = f"""
        # When a DDP step communicates

        `python -m benchmarks ddp_overlap`, on {page.machine(rows)}.

        Two ranks over {rows[0]["bandwidth"]}. Seconds of the last of {STEPS} steps; compute alone: forward and backward
        without communication.

        ![one step](ddp_overlap.png)
    """
    draw(rows[-1], picture)
    cells = {
        "method": lambda row: row["method"],
        "rank": lambda row: row["rank"],
        "step": lambda row: f"{row['step']:.3f}",
        "compute alone": lambda row: f"{row['alone']:.3f}",
        "first bucket begins": lambda row: f"{min(a for a, _ in row['buckets']):.3f}",
        "last bucket ends": lambda row: f"{max(b for _, b in row['buckets']):.3f}",
    }
    ranks = [{"method": row["method"], "rank": i, **rank} for row in rows for i, rank in enumerate(row["ranks"])]
    return [*prose(text), *page.columns(cells, ranks)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    method = ("double_squeeze", "what is compared with gloo")
    given = arguments(argv, __doc__, bandwidth=("100mbit", "of the link"), method=method)
    setup = digest([STEPS, WIDTH, LAYERS, BATCH, given.bandwidth])
    Runs(given, "ddp_overlap", setup, ("method", "bandwidth")).complete(
        measure,
        [(method, given.bandwidth) for method in ("gloo", given.method)],
        line=lambda row: "  ".join(f"step {rank['step']:.3f} s" for rank in row["ranks"]),
        page=lambda rows: results(rows, given.out / "ddp_overlap.png"),
    )
