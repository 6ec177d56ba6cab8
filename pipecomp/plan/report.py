"""A plan for people: stages, links, methods at each bandwidth, and what to take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from pipecomp.config.activations import FEWEST, Bits, ConstantError, bits_text, each_link
from pipecomp.plan.options import DTYPES
from pipecomp.plan.prediction import StepPrediction, TrainingJob, memory_bytes, packet_sizes
from pipecomp.plan.search import (
    FEWEST_AVERAGES,
    TIED,
    PlanChoice,
    aqsgd_sections,
    choose_local_steps,
    keeping_error,
    methods,
)
from pipecomp.plan.simulation import LinkNetwork
from pipecomp.schedule import in_flight_counts
from pipecomp.utils.tables import table
from pipecomp.utils.units import format_rate, format_time

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stage_table(title: str, job: TrainingJob, more: Mapping[str, Sequence[str]]) -> Table:
    """Tabulate the stages: blocks, parameters, and columns of further cells by heading."""
    rows = (
        (str(k), f"{lo}–{hi - 1}", f"{job.plan.parameters[k] / 1e6:.1f}", *(cells[k] for cells in more.values()))
        for k, (lo, hi) in enumerate(pairwise(job.plan.cuts))
    )
    return table(("stage", "blocks", "M parameters", *more), rows, title=title)


def predicted_stages(p: StepPrediction) -> Table:
    """Tabulate what each stage holds and does."""
    forward, backward = zip(*p.job.stage_seconds(), strict=True)
    more = {
        "forward ms": [f"{1e3 * seconds:.1f}" for seconds in forward],
        "backward ms": [f"{1e3 * seconds:.1f}" for seconds in backward],
        "memory GB": [f"{size / 1e9:.2f}" for size in p.memory_bytes()],
    }
    return stage_table(f"Stages ({p.job.profile.measured})", p.job, more)


def link_table(network: LinkNetwork, p: StepPrediction, plain: StepPrediction) -> Table:
    """Tabulate each link's rates and what a micro-batch sends over it."""
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
    headings = ("link", "there", "back", "one way", "raw KB", "first KB", "later KB", "back KB", "bits")
    title = "Links, and KB of a micro-batch: uncompressed (raw), first visits, later ones, gradients back"
    return table(headings, rows, title=title)


def method_table(rows: Sequence[tuple[str, Sequence[StepPrediction]]], names: Sequence[str]) -> Table:
    """Tabulate seconds of a step, and of one while all samples are new, by method and network (`names`)."""
    cells = ((method, *map(_seconds, predictions)) for method, predictions in rows)
    gradients = rows[0][1][0].config.gradients.method
    title = "Predicted seconds per step (in the first epoch)"
    title += "" if gradients == "none" else f", gradients by {gradients}"
    return table(("method", *names), cells, left=("method",), title=title)


def _seconds(p: StepPrediction) -> str:
    text = f"{p.step_s:.3g}"
    return text if abs(p.first_epoch_s - p.step_s) < 0.005 * p.step_s else f"{text} ({p.first_epoch_s:.3g})"


def advice(
    choice: PlanChoice,
    averages: Sequence[tuple[str, float]],
    tied: Sequence[tuple[str, float]] = (),
    untouched_s: float | None = None,
) -> list[str]:
    """Say in sentences what to take.

    Args:
        choice: Bits and what they take.
        averages: As of `search.choose_average`; empty with one replica, or where nothing is to be chosen.
        tied: As of `search.choose_tied`; empty where tied weights hardly matter.
        untouched_s: Seconds that these would take without `search.TIED`; None where that is not taken.
    """
    p, plain = choice.prediction, choice.plain
    said = []
    if p.job.plan.num_stages > 1:
        gain = plain.step_s / p.step_s
        bits = _compression(choice)
        differs = abs(p.first_epoch_s - p.step_s) > 0.03 * p.step_s
        first = f" ({p.first_epoch_s:.3g} s in the first epoch)" if differs else ""
        if not choice.pays:
            said.append(
                f"Compressing activations does not pay on these links: a step takes {plain.step_s:.3g} s uncompressed, "
                f"{p.step_s:.3g} s{first} with {bits}."
            )
        else:
            link = "compute" if choice.fits else "the slowest link"
            limit = "the message store's disk" if p.store_s >= p.step_s else link
            said.append(
                f"Take {bits}: {p.step_s:.3g} s per step{first} instead of {plain.step_s:.3g} s ({gain:.2f}×), "
                f"{p.samples_per_s:.3g} samples/s; the limit is {limit}."
            )
            if choice.fewest > FEWEST["forward_bits"] and choice.fewest in each_link(choice.forward_bits):
                said.append(
                    f"With dropout, fewer than {choice.fewest} bits forward may cost over 1 % of the training loss."
                )
        if untouched_s is not None:
            said.append(_of_compressed(choice.taken, untouched_s))
        elif tied:
            said.append(_of_tied(choice.taken, tied[0]))
        if p.store_s >= p.step_s:
            helps = "" if _clusters(choice) is not None else "; store.bits 8 helps"
            said.append(f"The message store's disk takes {p.store_s:.3g} s per step{helps}.")
    if averages:
        (method, seconds), *rest = averages
        plain_s = seconds if method == "none" else dict(rest)["none"]
        if method == "none":
            said.append(f"Compressing gradients does not pay: averaging them takes {plain_s:.3g} s per step.")
        else:
            said.append(f"Average gradients with {method}: {seconds:.3g} s per step instead of {plain_s:.3g} s.")
        step_s = choice.taken.step_s - choice.taken.average_s
        local_steps = choose_local_steps(step_s, seconds)
        if local_steps is not None and choice.taken.job.dtype == DTYPES["fp32"]:  # the only precision that they take
            share = seconds / (step_s + seconds)
            rest_s = seconds / local_steps
            said.append(
                f"Averaging in every step takes {share:.0%} of the time. With gradients.local_steps {local_steps} "
                f"replicas average after every {local_steps} steps only: {rest_s:.3g} s per step. That is another "
                "training: compare losses. It is too many for a fine-tuning of fewer than "
                f"{FEWEST_AVERAGES * local_steps} steps."
            )
    return said


def _compression(choice: PlanChoice) -> str:
    """Say what activations and gradients are sent with."""
    bits = f"{bits_text(choice.forward_bits)} bits forward and {bits_text(choice.backward_bits)} back"
    if (clusters := _clusters(choice)) is not None:
        return f"AQ-SGD with {bits}, as changes from {clusters} cluster centers, since no sample comes back"
    ways = "both ways" if _changes_back(choice) else "forward"
    errors = " and ".join(
        f"{'/'.join(dict.fromkeys(f'{bits.error:g}' for bits in found))} {way}"
        for way, setting in zip(("forward", "back"), _taken(choice), strict=True)
        if (found := [bits for bits in each_link(setting) if isinstance(bits, ConstantError)])
    )
    return f"AQ-SGD with changes {ways} and at most {bits} (fewer in packets that keep errors of {errors} with them)"


def tied_names(job: TrainingJob) -> str:
    """Say which weights several stages hold, which stages those are, and how large the weights."""
    groups = zip(job.plan.tied, job.tied, strict=True)
    return ", ".join(
        f"{group.name} of stages {' and '.join(map(str, group.stages))} ({4 * values / 1e6:.1f} MB in float32)"
        for group, values in groups
    )


_UNTIED = '--no-tie ("tie": false in the configuration) it is nothing, but then each stage trains a copy of its own.'


def _of_compressed(p: StepPrediction, untouched_s: float) -> str:
    """Say what `search.TIED` is taken for."""
    return (
        f"Take gradients.method {TIED.method} with {TIED.bits} bits for gradients of tied weights, which stages add "
        f"up in every step: {tied_names(p.job)}. That is {p.tied_s:.3g} s of the step instead of {untouched_s:.3g} s, "
        f"and no loss was measured from it. --gradients {TIED.method} takes 4 bits, --gradients none leaves them as "
        f"they are; with {_UNTIED}"
    )


def _of_tied(p: StepPrediction, other: tuple[str, float]) -> str:
    """Say what tied weights take of a step, and what shortens that."""
    method, seconds = other
    used = p.config.gradients.method
    how = "uncompressed" if used == "none" else f"with {used}"
    told = (
        f"Of this step, {p.tied_s:.3g} s are for the gradients of tied weights, which stages add up in every step, "
        f"{how}: {tied_names(p.job)}. Fewer bits for activations do not shorten that. "
    )
    if seconds >= p.tied_s:
        return f"{told}With {_UNTIED}"
    return f"{told}With gradients.method {method} (--gradients {method}) it is {seconds:.3g} s; with {_UNTIED}"


def _clusters(choice: PlanChoice) -> int | None:
    return choice.prediction.config.store.clusters


def _changes_back(choice: PlanChoice) -> bool:
    return choice.prediction.config.activations.backward_method == "delta"


def _taken(choice: PlanChoice) -> tuple[Bits, Bits]:
    """Let packets have at most the bits of a choice, forward and back; from cluster centers, just these."""
    if _clusters(choice) is not None:
        return choice.forward_bits, choice.backward_bits
    return (
        keeping_error("forward_bits", choice.forward_bits, choice.fewest),
        keeping_error("backward_bits", choice.backward_bits),
    )


def configuration(choice: PlanChoice) -> dict[str, Any]:
    """Make what to write into DeepSpeed's configuration."""
    job = choice.prediction.job
    section: dict[str, Any] = {}
    if choice.pays and job.plan.num_stages > 1:
        one_pass = _clusters(choice) is not None
        section |= aqsgd_sections(*_taken(choice), one_pass=one_pass, changes_back=_changes_back(choice))
        if one_pass:
            section["store"]["in_checkpoints"] = True  # few bytes, and nothing else brings centers back
    gradients = choice.prediction.config.gradients
    if gradients.method != "none":
        section["gradients"] = {"method": gradients.method} | ({"bits": TIED.bits} if gradients == TIED else {})
    if not job.plan.tie:
        section["tie"] = False
    return {
        "train_micro_batch_size_per_gpu": job.samples,
        "gradient_accumulation_steps": job.micro_batches,
        **precision(NAMES[job.dtype]),
        "pipecomp": section,
    }


def precision(dtype: str) -> dict[str, Any]:
    """Make DeepSpeed's sections for fp32, fp16 or bf16: with ZeRO 1 the last two can be saved and loaded.

    Gradients in bf16 are summed in float32, or each micro-batch would round the sum to 8 bits.
    """
    if dtype == "fp32":
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if dtype == "bf16" else {}
    return {dtype: {"enabled": True}, "zero_optimization": {"stage": 1}, **sums}


def configuration_text(found: dict[str, Any], prediction: StepPrediction) -> str:
    """Write that for people."""
    call = f"pipecomp.initialize(..., cuts={list(prediction.job.plan.cuts)})"
    return f"{call}, with\n{json.dumps(found, indent=2)}"


# -- sizes alone

LEFT_OUT = "For step times, bits and a configuration give --speed (or --profile, or --measure) and --bandwidth."


def show_sizes(job: TrainingJob, console: Console) -> None:
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


def sizes_as_json(job: TrainingJob) -> dict[str, Any]:
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


def _in_flight(job: TrainingJob) -> tuple[int, ...]:
    """Micro-batches of each stage, as few as keep all stages at work (1F1B); slow links take more."""
    return in_flight_counts(1, job.plan.num_stages, job.micro_batches)


def _packets(job: TrainingJob) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Name and `packet_sizes` of each method that is compared."""
    return [(name, packet_sizes(job, config)) for name, config in methods(job.plan.num_stages, job.plan.tie)]
