"""The same training twice: as a pipeline of processes, and unsplit in plain torch; how far parameters end up apart.

The reference knows neither DeepSpeed nor pipecomp: Hugging Face's model with its own loss, torch's optimizer, gradients
averaged over micro-batches and replicas by adding up losses, `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.limits import HANG_S
from tests.trust.conditions import (
    ADAMW,
    CLIP,
    MICRO_BATCH,
    SAMPLES,
    SGD,
    STEPS,
    Row,
    collated,
    deepspeed_config,
    model_of,
    samples,
    schedule,
)

LIMIT = 1e-6  # of ‖p − q‖ / ‖q‖, p the pipeline's parameter, q the unsplit model's


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of a training: parameters by name, the loss of each step. unused: names of those without gradients."""

    parameters: dict[str, np.ndarray]
    losses: list[float]
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row's result.

    difference: the largest ‖p − q‖ / ‖q‖ of all parameters and ranks; parameter: whose it is. moved: the median of
    ‖q − start‖ / ‖q‖, what training has changed. losses: the largest relative difference of a step's loss. unused:
    the same difference of parameters that no loss depends on: torch leaves them alone, ZeRO's weight decay does not.
    error: why there is no result.
    """

    row: Row
    difference: float = math.nan
    parameter: str = ""
    moved: float = math.nan
    losses: float = math.nan
    unused: float = 0.0
    error: str = ""

    @property
    def holds(self) -> bool:
        """Return True if the pipeline trained as the unsplit model."""
        return not self.error and self.difference <= LIMIT and self.losses <= LIMIT


# -- unsplit


def unsplit(row: Row) -> Trained:
    """Train Hugging Face's model in this process, with one thread, as ranks have."""
    torch.set_num_threads(1)
    model, data, collate = model_of(row), samples(row), collated(row)
    make = torch.optim.SGD if row.optimizer == "SGD" else torch.optim.AdamW
    optimizer = make(model.parameters(), **(SGD if row.optimizer == "SGD" else ADAMW))
    made = schedule(row)
    scheduler = None if made is None else made(optimizer)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for replica, number in itertools.product(range(row.replicas), range(row.micro_batches)):
            own = range(replica, SAMPLES, row.replicas)
            first = (step * row.micro_batches + number) * MICRO_BATCH
            batch = collate([data[own[(first + i) % len(own)]] for i in range(MICRO_BATCH)])
            loss = model(**batch, use_cache=False).loss if "bert" not in row.model else model(**batch).loss
            loss = loss / (row.replicas * row.micro_batches)
            loss.backward()
            total += float(loss.detach())
        if row.clipped:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            assert norm > CLIP, f"{row}: nothing is clipped at {norm}"
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    unused = frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.grad is None)
    return Trained(parameters=_values(model), losses=losses, unused=unused)


def _values(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Under all names, where a parameter has several."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters(remove_duplicate=False)}


# -- as a pipeline


def as_pipeline(rank: int, world: int, note: Any, rows: Sequence[Row], faulty: Callable | None = None) -> list[Trained]:
    """Train each row's model on this rank; faulty: changes an engine, to see that this is found."""
    import pipecomp

    found = []
    for row in rows:
        engine = pipecomp.initialize(
            model_of(row),
            num_stages=row.stages,
            config=deepspeed_config(row),
            training_data=samples(row),
            collate_fn=collated(row),
            lr_scheduler=schedule(row),
            shuffle=False,
        )
        if faulty is not None:
            faulty(engine)
        losses = [float(engine.train_batch()) for _ in range(STEPS)]
        found.append(Trained(parameters=_values(engine.stage), losses=losses))
        engine.close()
    return found


def compare(rows: Sequence[Row], *, faulty: Callable | None = None) -> Iterator[Found]:
    """Each row's result; rows that need as many processes share them."""
    from pipecomp.distributed.local_launcher import RankFailedError, run_ranks

    for ranks in sorted({row.ranks for row in rows}):
        these = [row for row in rows if row.ranks == ranks]
        try:
            trained = run_ranks(ranks, as_pipeline, these, faulty, timeout_s=HANG_S)
        except RankFailedError as error:
            if len(these) > 1:  # which of them?
                for row in these:
                    yield from compare([row], faulty=faulty)
            else:
                yield Found(row=these[0], error=str(error).strip().splitlines()[-1])
            continue
        for i, row in enumerate(these):
            yield difference(row, [trained[rank][i] for rank in range(ranks)])


def difference(row: Row, pipeline: Sequence[Trained]) -> Found:
    """Return the distance of the ranks' parameters and losses from the unsplit model's."""
    reference, start = unsplit(row), _values(model_of(row))
    apart: dict[str, float] = {}
    for rank in pipeline:
        for name, p in rank.parameters.items():
            apart[name] = max(apart.get(name, 0.0), _relative(p, reference.parameters[name]))
    missing = reference.parameters.keys() - apart.keys()
    if missing:
        return Found(row=row, error=f"no stage has {', '.join(sorted(missing))}")
    used = [name for name in apart if name not in reference.unused]
    worst = max(used, key=lambda name: apart[name] if math.isfinite(apart[name]) else math.inf)
    losses = [abs(a - b) / abs(b) for rank in pipeline for a, b in zip(rank.losses, reference.losses, strict=True)]
    return Found(
        row=row,
        difference=apart[worst],
        parameter=worst,
        moved=statistics.median(_relative(start[name], reference.parameters[name]) for name in used),
        losses=max(losses),
        unused=max((apart[name] for name in reference.unused), default=0.0),
    )


def _relative(p: np.ndarray, q: np.ndarray) -> float:
    """‖p − q‖ / ‖q‖, in double precision."""
    wide = q.astype(np.float64)
    return float(np.linalg.norm(p.astype(np.float64) - wide) / np.linalg.norm(wide))
