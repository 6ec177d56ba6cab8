"""What can be planned without a speed: where to cut, each stage's memory, the bytes on each link."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from pipecomp.plan.options import Wanted, methods
from pipecomp.plan.prediction import Job, memory_bytes, packet_sizes
from pipecomp.plan.profile import Profile, balanced, tied_values, without_weights
from pipecomp.plan.report import stage_table, tied_names
from pipecomp.plan.search import layouts, shares
from pipecomp.schedule.in_flight import numbers
from pipecomp.utils.tables import table

LEFT_OUT = "For step times, bits and a configuration give --speed (or --profile, or --measure) and --bandwidth."


def sizes_of(wanted: Wanted, profile: Profile) -> Job:
    """Plan sizes for a number of stages, by default with one sample per micro-batch; the profile may lack seconds.

    Raises ConfigError.
    """
    [(K, replicas)] = layouts(wanted.nodes, wanted.stages, len(profile.blocks))
    [(samples, micro_batches)] = shares(wanted.batch, replicas, wanted.micro_batch or 1)
    model = without_weights(wanted.model, wanted.dtype)
    split = balanced(model, profile, K, tie=wanted.tie)
    job = Job(
        profile=profile,
        plan=split,
        samples=samples,
        micro_batches=micro_batches,
        replicas=replicas,
        dtype=wanted.dtype,
        tied=tied_values(model, split),
    )
    wanted.check_memory(max(memory_bytes(job)))
    return job


def show_sizes(job: Job, console: Console) -> None:
    """Print sizes as tables."""
    memory = [f"{size / 1e9:.2f}" for size in memory_bytes(job)]
    console.print(stage_table("Stages", job, {"in flight": list(map(str, _in_flight(job))), "memory GB": memory}))
    if job.plan.num_stages > 1:
        rows = (  # all links carry the same: tokens of one width cross each of them
            (name, *(f"{size[0] / 1e3:.1f}" for size in (first_visit, forward, backward)))
            for name, (forward, first_visit, backward) in _packets(job)
        )
        headings = ("method", "first visit", "forward", "back")
        console.print(table(headings, rows, left=("method",), title="KB on each link, per micro-batch"))
    console.print(job.text(), highlight=False)
    if job.tied:
        console.print(
            f"Stages also add up the gradients of tied weights in every step: {tied_names(job)}. gradients.method "
            "compresses them; with --no-tie each stage trains a copy of its own.",
            highlight=False,
        )
    console.print(f"pipecomp.initialize(..., cuts={list(job.plan.cuts)})", highlight=False)
    console.print(LEFT_OUT, highlight=False)


def sizes_as_json(job: Job) -> dict[str, Any]:
    """Give all of it for programs; names and units are those of a full plan."""
    keys = ("forward_bytes", "first_visit_bytes", "backward_bytes")
    return {
        "cuts": list(job.plan.cuts),
        "parameters": list(job.plan.parameters),
        "replicas": job.replicas,
        "micro_batch": job.samples,
        "micro_batches": job.micro_batches,
        "tokens": job.profile.tokens,
        "in_flight": list(_in_flight(job)),
        "memory_bytes": memory_bytes(job),
        "methods": [{"name": name, **dict(zip(keys, map(list, sizes), strict=True))} for name, sizes in _packets(job)],
    }


def _in_flight(job: Job) -> tuple[int, ...]:
    """Micro-batches of each stage, as few as keep all stages at work (1F1B); slow links take more."""
    return numbers(1, job.plan.num_stages, job.micro_batches)


def _packets(job: Job) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Name and `packet_sizes` of each method that is compared."""
    return [(name, packet_sizes(job, config)) for name, config in methods(job.plan.num_stages, job.plan.tie)]
