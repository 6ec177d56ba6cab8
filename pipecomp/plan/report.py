"""A plan as tables, sentences and configuration: stages, links, methods on each network, recommended settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from pipecomp.config.activations import FEWEST, Bits, ConstantError, bits_text, each_link
from pipecomp.config.elastic import Elastic
from pipecomp.elastic.schedule import RecordSchedule, record_bytes
from pipecomp.plan.lines import MachineLines
from pipecomp.plan.options import DTYPES
from pipecomp.plan.prediction import Estimate, StepPrediction, TrainingJob, memory_bytes, packet_sizes
from pipecomp.plan.search import (
    MAX_SHARE,
    MIN_OUTER_STEPS,
    TIED,
    PlanChoice,
    aqsgd_sections,
    choose_local_steps,
    compared_methods,
    constant_error_bits,
)
from pipecomp.plan.simulation import LinkNetwork
from pipecomp.rank_layout import STAGES_ACROSS
from pipecomp.schedule import in_flight_counts
from pipecomp.utils.tables import table
from pipecomp.utils.units import format_count, format_duration, format_rate, format_time

MAX_RATE = 1e12  # of a line that nothing limits
TORCH_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class LayoutPrediction(NamedTuple):
    """Prediction for an order of ranks.

    Attributes:
        name: Name of the layout.
        step_s: Seconds of a step.
        activations: True if activations cross the line between machines.
        gradients: True if gradients of replicas do.
    """

    name: str
    step_s: float
    activations: bool
    gradients: bool

    def crossing(self) -> str:
        """Name the values that cross."""
        crossing = {"activations": self.activations, "gradients": self.gradients}
        return " and ".join(name for name, crosses in crossing.items() if crosses) or "nothing"


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan.

    Attributes:
        choice: Recommended settings with their predictions.
        averages: Methods for averaging gradients over replicas with their seconds, as from `choose_average`.
        tied_plain_s: Seconds for tied weights without `TIED`; None if that is not recommended.
        rows: Every compared method with its prediction on every network.
        steps: Steps of the training; None if its length is not known.
        epochs: Passes over the data.
        layouts: Orders of ranks that were compared, the chosen one first; empty if there is one only.
        lines: Between machines and within them; None if every rank has a line of its own.
    """

    choice: PlanChoice
    averages: list[tuple[str, float]] = field(default_factory=list)
    tied_plain_s: float | None = None
    rows: list[tuple[str, list[StepPrediction]]] = field(default_factory=list)
    steps: int | None = None
    epochs: int = 1
    layouts: tuple[LayoutPrediction, ...] = ()
    lines: MachineLines | None = None

    def duration(self) -> Estimate:
        """Return the seconds of all steps, or of 1,000 after the first epoch, without evaluations and checkpoints."""
        p = self.choice.taken
        if self.steps is None:
            return Estimate.of(1000 * p.step_s, p.spread)
        first = -(-self.steps // self.epochs)
        return Estimate.of(first * p.first_epoch_s + (self.steps - first) * p.step_s, p.spread)


def print_plan(result: PlanResult, network: LinkNetwork, names: Sequence[str], console: Console) -> None:
    """Print a plan. `network` is the one planned for, `names` are those of all."""
    p = result.choice.prediction
    console.print(stage_seconds_table(result.choice.taken))
    if p.job.plan.num_stages > 1:
        console.print(link_table(network, p, result.choice.plain))
    console.print(method_table(result.rows, names))
    console.print(p.job.text(), highlight=False)
    for sentence in (*advice(result), *describe_layouts(result), describe_duration(result)):
        console.print(sentence, highlight=False)
    records = record_schedule(p, network)
    if records is not None:
        console.print(f"Second home (elastic.second_home 'next'): {records}.", highlight=False)


def record_schedule(p: StepPrediction, network: LinkNetwork) -> RecordSchedule | None:
    """Predict how often the default share of the line lets each stage send its state to the next; None if alone."""
    job, share = p.job, Elastic().line_share
    stages = job.plan.num_stages
    if stages * job.replicas == 1:
        return None
    half = job.dtype != torch.float32
    lines = [channel.bits_per_s for channel in network.forward] + [network.slowest]  # the last one is to the first
    if job.layout != STAGES_ACROSS:  # the next stage is on the same machine, the second home on another one
        lines = [network.slowest] * stages
    sizes = [record_bytes(trained, half=half, replicas=job.replicas) for trained in job.plan.trained]
    each = [
        RecordSchedule.predict(size, min(line, MAX_RATE), p.step_s, share)
        for size, line in zip(sizes, lines[-stages:], strict=True)
    ]
    return max(each, key=lambda schedule: schedule.lost_steps)


def describe_layouts(result: PlanResult) -> list[str]:
    """Return a line with the order of ranks that is taken and the reason, if there are several."""
    if not result.layouts or result.lines is None:
        return []
    taken, *others = result.layouts
    slow = format_rate(min(channel.bits_per_s for channel in (*result.lines.out, *result.lines.back)))
    lines = f"the line between machines ({slow}; {format_rate(result.lines.inner.bits_per_s)} within one)"
    why = "; ".join(f"{other.step_s:.3g} s with {other.name}, where {other.crossing()} do" for other in others)
    return [f"Layout {taken.name}: {taken.step_s:.3g} s a step if {taken.crossing()} cross {lines}, {why}."]


def describe_duration(result: PlanResult) -> str:
    """Write the seconds of a step, and the duration of the training."""
    p, seconds = result.choice.taken, result.duration().seconds
    size, duration = f"of {format_count(p.job.batch, 'sample')}", format_duration(seconds)
    if result.steps is None:
        return (
            f"{p.estimate} a step; 1,000 steps {size} take {duration}. --samples and --epochs give that of your data."
        )
    steps = format_count(result.steps, "step")
    return f"{p.estimate} a step; {duration} for this data: {steps} {size}, without evaluations and checkpoints."


# -- tables


def stage_table(title: str, job: TrainingJob, more: Mapping[str, Sequence[str]]) -> Table:
    """Tabulate the stages: blocks, parameters, and further columns by heading."""
    rows = (
        (str(k), f"{lo}–{hi - 1}", f"{job.plan.parameters[k] / 1e6:.1f}", *(cells[k] for cells in more.values()))
        for k, (lo, hi) in enumerate(pairwise(job.plan.cuts))
    )
    return table(("stage", "blocks", "M parameters", *more), rows, title=title)


def stage_seconds_table(p: StepPrediction) -> Table:
    """Tabulate the stages with their seconds and memory."""
    forward, backward = zip(*p.job.stage_seconds(), strict=True)
    more = {
        "forward ms": [f"{1e3 * seconds:.1f}" for seconds in forward],
        "backward ms": [f"{1e3 * seconds:.1f}" for seconds in backward],
        "memory GB": [f"{size / 1e9:.2f}" for size in p.memory_bytes()],
    }
    return stage_table(f"Stages ({p.job.profile.measured})", p.job, more)


def link_table(network: LinkNetwork, p: StepPrediction, plain: StepPrediction) -> Table:
    """Tabulate each link's rates, and the bytes of a micro-batch on it."""
    sizes = (plain.forward_bytes, p.first_visit_bytes, p.forward_bytes, p.backward_bytes)
    rows = (
        (
            f"{k}→{k + 1}",
            format_rate(out.bits_per_s),
            format_rate(back.bits_per_s),
            format_time(out.latency_s),
            *(f"{size[k] / 1e3:.1f}" for size in sizes),
            "fw{} bw{}".format(*p.config.activations.bits(k)),
        )
        for k, (out, back) in enumerate(zip(network.forward, network.backward, strict=True))
    )
    headings = ("link", "forward", "back", "one way", "raw KB", "first KB", "later KB", "back KB", "bits")
    title = "Links, and KB per micro-batch: uncompressed (raw), first visits, later visits, gradients back"
    return table(headings, rows, title=title)


def method_table(rows: Sequence[tuple[str, Sequence[StepPrediction]]], names: Sequence[str]) -> Table:
    """Tabulate the seconds of a step, and of a step of the first epoch, by method and network."""
    cells = ((method, *map(_step_seconds, predictions)) for method, predictions in rows)
    gradients = rows[0][1][0].config.gradients.method
    title = "Predicted seconds per step (in the first epoch)"
    title += "" if gradients == "none" else f", gradients by {gradients}"
    return table(("method", *names), cells, left=("method",), title=title)


def _step_seconds(p: StepPrediction) -> str:
    text = f"{p.step_s:.3g}"
    return text if abs(p.first_epoch_s - p.step_s) < 0.005 * p.step_s else f"{text} ({p.first_epoch_s:.3g})"


# -- advice


def advice(result: PlanResult) -> list[str]:
    """Write the recommendation in sentences."""
    choice = result.choice
    p, plain = choice.prediction, choice.plain
    sentences = []
    if p.job.plan.num_stages > 1:
        method = _describe_method(choice)
        differs = abs(p.first_epoch_s - p.step_s) > 0.03 * p.step_s
        first = f" ({p.first_epoch_s:.3g} s in the first epoch)" if differs else ""
        if not choice.pays:
            sentences.append(
                f"Compressing activations does not pay on these links: a step takes {plain.estimate} uncompressed, "
                f"{p.estimate}{first} with {method}."
            )
        else:
            limit = "compute" if choice.fits else "the slowest link"
            limit = "the message store's disk" if p.store_s >= p.step_s else limit
            sentences.append(
                f"Take {method}: {p.estimate} per step{first} instead of {plain.estimate} "
                f"({plain.step_s / p.step_s:.2f}×), {p.samples_per_s:.3g} samples/s; the limit is {limit}."
            )
            if choice.fewest > FEWEST["forward_bits"] and choice.fewest in each_link(choice.forward_bits):
                sentences.append(
                    f"With dropout, fewer than {choice.fewest} bits forward may cost over 1 % of the loss."
                )
        taken = choice.taken
        if result.tied_plain_s is not None:
            sentences.append(
                f"Take gradients.method {TIED.method} with {TIED.bits} bits for the gradients of tied weights, which "
                f"stages sum in every step: {tied_names(taken.job)}. That takes {taken.tied_s:.3g} s of the step "
                f"instead of {result.tied_plain_s:.3g} s, and no loss was measured from it. --gradients {TIED.method} "
                f"uses 4 bits, --gradients none does not compress them; {_UNTIED}"
            )
        elif taken.job.replicas == 1 and taken.tied_s > MAX_SHARE * taken.step_s:
            sentences.append(
                f"Of this step, {taken.tied_s:.3g} s are for the gradients of tied weights, which stages sum in every "
                f"step: {tied_names(taken.job)}. Fewer bits for activations do not shorten that; a gradients.method "
                f"does. {_UNTIED}"
            )
        if p.store_s >= p.step_s:
            remedy = "" if _clusters(choice) is not None else "; store.bits 8 helps"
            sentences.append(f"The message store's disk takes {p.store_s:.3g} s per step{remedy}.")
    if result.averages:
        sentences += _average_advice(choice, result.averages)
    return sentences


def _average_advice(choice: PlanChoice, averages: Sequence[tuple[str, float]]) -> list[str]:
    (method, seconds), *rest = averages
    if method == "none":
        sentences = [f"Compressing gradients does not pay: averaging them takes {seconds:.3g} s per step."]
    else:
        plain_s = dict(rest)["none"]
        sentences = [f"Average gradients with {method}: {seconds:.3g} s per step instead of {plain_s:.3g} s."]
    step_s = choice.taken.step_s - choice.taken.average_s
    local_steps = choose_local_steps(step_s, seconds)
    if local_steps is not None and choice.taken.job.dtype == torch.float32:  # local steps support no other precision
        sentences.append(
            f"Averaging in every step takes {seconds / (step_s + seconds):.0%} of the time. With gradients.local_steps "
            f"{local_steps} replicas average after every {local_steps} steps only: {seconds / local_steps:.3g} s per "
            "step. That changes the training: compare losses. It needs a fine-tuning of at least "
            f"{MIN_OUTER_STEPS * local_steps} steps."
        )
    return sentences


def _describe_method(choice: PlanChoice) -> str:
    bits = f"{bits_text(choice.forward_bits)} bits forward and {bits_text(choice.backward_bits)} back"
    job, a = choice.prediction.job, choice.prediction.config.activations
    scales = a.with_scales(job.samples * job.profile.tokens).describe_scales()
    scales = f", {scales}" if scales else ""
    if (clusters := _clusters(choice)) is not None:
        return f"AQ-SGD with {bits}, as changes from {clusters} cluster centers, since no sample is seen twice{scales}"
    directions = "both ways" if _changes_back(choice) else "forward"
    errors = " and ".join(
        f"{'/'.join(dict.fromkeys(f'{bits.error:g}' for bits in constant))} {direction}"
        for direction, setting in zip(("forward", "back"), _recommended_bits(choice), strict=True)
        if (constant := [bits for bits in each_link(setting) if isinstance(bits, ConstantError)])
    )
    return (
        f"AQ-SGD with changes {directions} and at most {bits} (fewer in packets that keep errors of {errors}){scales}"
    )


def tied_names(job: TrainingJob) -> str:
    """List the weights that several stages hold, with the stages and the weights' sizes."""
    return ", ".join(
        f"{group.name} of stages {' and '.join(map(str, group.stages))} ({4 * values / 1e6:.1f} MB in float32)"
        for group, values in zip(job.plan.tied, job.tied, strict=True)
    )


_UNTIED = '--no-tie ("tie": false in the configuration) removes it, but each stage then trains a copy of its own.'


# -- configuration


def _clusters(choice: PlanChoice) -> int | None:
    return choice.prediction.config.store.clusters


def _changes_back(choice: PlanChoice) -> bool:
    return choice.prediction.config.activations.backward_method == "delta"


def _recommended_bits(choice: PlanChoice) -> tuple[Bits, Bits]:
    """Return the settings for a choice: constant errors within its bits; with cluster centers just its bits."""
    if _clusters(choice) is not None:
        return choice.forward_bits, choice.backward_bits
    return (
        constant_error_bits("forward_bits", choice.forward_bits, choice.fewest),
        constant_error_bits("backward_bits", choice.backward_bits),
    )


def configuration(choice: PlanChoice) -> dict[str, Any]:
    """Make the recommended part of DeepSpeed's configuration."""
    job = choice.prediction.job
    section: dict[str, Any] = {}
    if choice.pays and job.plan.num_stages > 1:
        one_pass = _clusters(choice) is not None
        section |= aqsgd_sections(*_recommended_bits(choice), one_pass=one_pass, changes_back=_changes_back(choice))
        if one_pass:
            section["store"]["in_checkpoints"] = True  # a few bytes, and nothing else restores the centers
    if job.layout != STAGES_ACROSS:
        section["layout"] = job.layout
    gradients = choice.prediction.config.gradients
    if gradients.method != "none":
        section["gradients"] = {"method": gradients.method} | ({"bits": TIED.bits} if gradients == TIED else {})
    if not job.plan.tie:
        section["tie"] = False
    return {
        "train_micro_batch_size_per_gpu": job.samples,
        "gradient_accumulation_steps": job.micro_batches,
        **precision_sections(DTYPE_NAMES[job.dtype]),
        "pipecomp": section,
    }


def precision_sections(dtype: str) -> dict[str, Any]:
    """Make DeepSpeed's sections for "fp32", "fp16" or "bf16".

    Half precision can be saved and loaded with ZeRO 1. bf16 gradients are summed in float32, as otherwise each
    micro-batch would round the sum to 8 bits.
    """
    if dtype == "fp32":
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if dtype == "bf16" else {}
    return {dtype: {"enabled": True}, "zero_optimization": {"stage": 1}, **sums}


def print_settings(choice: PlanChoice, console: Console) -> None:
    """Print the call of `pipecomp.initialize` and the configuration that a plan recommends."""
    call = f"pipecomp.initialize(..., cuts={list(choice.prediction.job.plan.cuts)})"
    console.print(f"{call}, with\n{json.dumps(configuration(choice), indent=2)}", highlight=False)


# -- sizes alone


def print_sizes(job: TrainingJob, console: Console) -> None:
    """Print stages, memory and packets as tables."""
    memory = [f"{size / 1e9:.2f}" for size in memory_bytes(job)]
    console.print(stage_table("Stages", job, {"in flight": list(map(str, _in_flight(job))), "memory GB": memory}))
    if job.plan.num_stages > 1:
        rows = (  # all links carry packets of the same size: the hidden size is the same everywhere
            (name, *(f"{size[0] / 1e3:.1f}" for size in (first_visit, forward, backward)))
            for name, (forward, first_visit, backward) in _method_packets(job)
        )
        headings = ("method", "first visit", "forward", "back")
        console.print(table(headings, rows, left=("method",), title="KB on each link, per micro-batch"))
    console.print(job.text(), highlight=False)
    if job.tied:
        console.print(
            f"Stages also sum the gradients of tied weights in every step: {tied_names(job)}. gradients.method "
            "compresses them; with --no-tie each stage trains a copy of its own.",
            highlight=False,
        )
    console.print(f"pipecomp.initialize(..., cuts={list(job.plan.cuts)})", highlight=False)
    hint = "For step times, bits and a configuration, give --speed (or --profile, or --measure) and --bandwidth."
    console.print(hint, highlight=False)


def sizes_as_json(job: TrainingJob) -> dict[str, Any]:
    """Return the sizes as JSON values, with the names and units of a full plan."""
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
        "methods": [
            {"name": name, **dict(zip(keys, map(list, sizes), strict=True))} for name, sizes in _method_packets(job)
        ],
    }


def _in_flight(job: TrainingJob) -> tuple[int, ...]:
    """Micro-batches in flight per stage under 1F1B, the fewest that keep all stages busy; slow links take more."""
    return in_flight_counts(1, job.plan.num_stages, job.micro_batches, job.plan.lowest_trained)


def _method_packets(job: TrainingJob) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return [(name, packet_sizes(job, config)) for name, config in compared_methods(job.plan.num_stages, job.plan.tie)]
