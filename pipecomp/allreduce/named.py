"""Averaging tensors that have names, together in buckets: residuals belong to names, so buckets may change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipecomp.allreduce.buckets import BUCKET
from pipecomp.allreduce.state import State

Waiting = tuple[torch.futures.Future[Tensor], list[Tensor]]  # a mean, and where its parts go


def submit_named(state: State, tensors: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
    """Start to replace tensors, by name, in place by their means over a state's ranks.

    Args:
        state: what averages.
        tensors: of float dtypes; they must not change before it is done.
        label: where only some of the tensors that the state averages are given, names these, the same every time.

    Returns:
        What waits until it is done. It raises what the average did.
    """
    rest, waiting = dict(tensors), list[Waiting]()
    if state.options.chosen.by_matrix:  # low-rank methods need the shape
        for name in [name for name, x in rest.items() if x.dim() > 1]:
            x = rest.pop(name)
            waiting.append((state.submit(x, name), [x]))
    for i, bucket in enumerate(buckets(rest)):
        flat = torch.cat([x.reshape(-1) for x in bucket.values()])
        slices = tuple((name, x.numel()) for name, x in bucket.items())
        future = state.submit(flat, f"{label}bucket-{i}", slices=slices, out=flat)
        waiting.append((future, list(bucket.values())))

    def finish() -> None:
        for future, targets in waiting:
            mean = future.wait().view(-1)
            for target, part in zip(targets, mean.split([x.numel() for x in targets]), strict=True):
                target.copy_(part.view_as(target))

    return finish


def buckets(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors by name, in order, those of one dtype together, in runs of about BUCKET values.

    While one is copied, the one before it is on the link.
    """
    out: list[dict[str, Tensor]] = []
    for dtype in sorted({x.dtype for x in tensors.values()}, key=str):
        count = BUCKET
        for name, x in tensors.items():
            if x.dtype != dtype:
                continue
            if count >= BUCKET:
                out.append({})
                count = 0
            out[-1][name] = x
            count += x.numel()
    return out
