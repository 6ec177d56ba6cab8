"""A DDP training step over a slow link: does communication begin before the backward pass ends?

    python benchmarks/ddp_overlap.py [--bandwidth 100mbit] [--method double_squeeze] [--picture FILE] [--json FILE]

Two ranks in two network namespaces train an MLP with a hook of `pipecomp.allreduce`. Every bucket's averaging is timed
from the hook's call to its end, beside the backward pass; the picture shows one step of both ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

STEPS, WIDTH, LAYERS, BATCH = 6, 768, 12, 512


def train(rank: int, world: int, note: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Begin and end of the last step's backward pass and of every bucket, seconds from the step's begin."""
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
        "forward and backward without communication": compute,
    }


def draw(found: dict[int, dict[str, Any]], title: str, path: Path) -> None:
    """A row for each rank's compute and one for each bucket."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5))
    labels = []
    for rank, times in sorted(found.items()):
        y = len(labels)
        labels.append(f"rank {rank}  compute")
        compute = times["forward and backward without communication"]
        begin = times["backward"][0]
        axes.barh(y, begin, left=0, color="#4c72b0", label="forward" if rank == 0 else None)
        # Until backward() returns it also waits for the last buckets; alone it takes what it takes without them.
        own = max(0.0, compute - begin)
        axes.barh(y, own, left=begin, color="#2a4d80", label="backward" if rank == 0 else None)
        rest = times["backward"][1] - begin - own
        axes.barh(y, max(0.0, rest), left=begin + own, color="#d9d9d9", label="waiting" if rank == 0 else None)
        for number, (a, b) in enumerate(sorted(times["buckets"])):
            labels.append(f"rank {rank}  bucket {number}")
            name = "averaging" if rank == number == 0 else None
            axes.barh(len(labels) - 1, b - a, left=a, color="#55a868", label=name)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Run from the command line."""
    import ddp_overlap as this  # processes of the lab import it by name

    from pipecomp.netlab.lab import Lab

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="100mbit")
    parser.add_argument("--method", default="double_squeeze")
    parser.add_argument("--picture", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    results = {}
    with Lab(nodes=2, bandwidth=arguments.bandwidth) as lab:
        for method in ("gloo", arguments.method):
            results[method] = lab.run(this.train, {"method": method}, timeout_s=300)
    for method, found in results.items():
        for rank, times in sorted(found.items()):
            first, last = min(a for a, _ in times["buckets"]), max(b for _, b in times["buckets"])
            own = times["forward and backward without communication"]
            print(
                f"{method:16} rank {rank}: step {times['step']:.3f} s; compute alone {own:.3f} s; "
                f"first bucket begins at {first:.3f} s, last ends at {last:.3f} s"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.picture:
        title = f"One DDP step, {arguments.method}, over {arguments.bandwidth}"
        draw(results[arguments.method], title, arguments.picture)


if __name__ == "__main__":
    main()
