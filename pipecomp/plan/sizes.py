"""What can be planned without a speed: where to cut, each stage's memory, the bytes on each link."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from pipecomp.config import Config
from pipecomp.plan.prediction import Job, memory_bytes, message_bytes
from pipecomp.plan.profile import Profile, balanced, without_weights
from pipecomp.plan.search import layouts, shares
from pipecomp.plan.wanted import Wanted, methods
from pipecomp.schedule.in_flight import numbers

LEFT_OUT = "For step times, bits and a configuration give --speed (or --profile, or --measure) and --bandwidth."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """job: its profile may lack seconds. methods: whose messages are compared.

    in_flight: micro-batches of each stage, as few as keep all stages at work (1F1B); slow links take more.
    """

    job: Job
    methods: list[tuple[str, Config]]

    @property
    def in_flight(self) -> tuple[int, ...]:
        return numbers(1, self.job.plan.num_stages, self.job.micro_batches)


def sizes_of(wanted: Wanted, profile: Profile) -> Sizes:
    """Plan sizes for a number of stages, by default with one sample per micro-batch. Raises ConfigError."""
    [(K, replicas)] = layouts(wanted.nodes, wanted.stages, len(profile.blocks))
    [(samples, micro_batches)] = shares(wanted.batch, replicas, wanted.micro_batch or 1)
    job = Job(
        profile=profile,
        plan=balanced(without_weights(wanted.model, wanted.dtype), profile, K, tie=wanted.tie),
        samples=samples,
        micro_batches=micro_batches,
        replicas=replicas,
        dtype=wanted.dtype,
    )
    wanted.check_memory(max(memory_bytes(job)))
    return Sizes(job=job, methods=methods(K, wanted.tie))


def show_sizes(sizes: Sizes, console: Console) -> None:
    """Print sizes as tables."""
    job = sizes.job
    table = Table(title="Stages")
    for heading in ("stage", "blocks", "M parameters", "in flight", "memory GB"):
        table.add_column(heading, justify="right")
    for k, (lo, hi) in enumerate(pairwise(job.plan.cuts)):
        table.add_row(
            str(k),
            f"{lo}–{hi - 1}",
            f"{job.plan.parameters[k] / 1e6:.1f}",
            str(sizes.in_flight[k]),
            f"{memory_bytes(job)[k] / 1e9:.2f}",
        )
    console.print(table)
    if job.plan.num_stages > 1:
        console.print(_message_table(sizes))
    console.print(job.text(), highlight=False)
    console.print(f"pipecomp.initialize(..., cuts={list(job.plan.cuts)})", highlight=False)
    console.print(LEFT_OUT, highlight=False)


def _message_table(sizes: Sizes) -> Table:
    """All links carry the same: tokens of one width cross each of them."""
    table = Table(title="KB on each link, per micro-batch")
    table.add_column("method")
    for heading in ("first visit", "forward", "back"):
        table.add_column(heading, justify="right")
    for name, config in sizes.methods:
        forward, first_visit, backward = message_bytes(sizes.job, config)
        table.add_row(name, *(f"{size[0] / 1e3:.1f}" for size in (first_visit, forward, backward)))
    return table


def sizes_as_json(sizes: Sizes) -> dict[str, Any]:
    """Give all of it for programs; names and units are those of a full plan."""
    job, rows = sizes.job, []
    for name, config in sizes.methods:
        forward, first_visit, backward = message_bytes(job, config)
        rows.append(
            {
                "name": name,
                "forward_bytes": list(forward),
                "first_visit_bytes": list(first_visit),
                "backward_bytes": list(backward),
            }
        )
    return {
        "cuts": list(job.plan.cuts),
        "parameters": list(job.plan.parameters),
        "replicas": job.replicas,
        "micro_batch": job.samples,
        "micro_batches": job.micro_batches,
        "tokens": job.profile.tokens,
        "in_flight": list(sizes.in_flight),
        "memory_bytes": memory_bytes(job),
        "methods": rows,
    }
