"""`pipecomp plan`: from a model, a network and a speed to predictions and settings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from pipecomp.config import Config
from pipecomp.config.activations import Activations
from pipecomp.distributed.launch_env import Launch, read_launch
from pipecomp.gradient_config import Gradients
from pipecomp.plan.auto_bits import fewest_bits
from pipecomp.plan.measure import SurveyResult, survey_machine, survey_ranks
from pipecomp.plan.options import PlanOptions, PlanRequest, Rates
from pipecomp.plan.prediction import (
    MachineSpeeds,
    StepPrediction,
    TrainingJob,
    as_row,
    memory_bytes,
    predict,
    tied_seconds,
)
from pipecomp.plan.profile import Profile, balanced, tied_values, without_weights
from pipecomp.plan.report import (
    NAMES,
    advice,
    configuration,
    configuration_text,
    link_table,
    method_table,
    predicted_stages,
    show_sizes,
    sizes_as_json,
)
from pipecomp.plan.search import (
    TIED,
    PlanChoice,
    aqsgd_sections,
    choose,
    choose_average,
    choose_tied,
    choose_with_tied,
    dividing,
    first_near_fastest,
    layouts,
    methods,
    shares,
)
from pipecomp.plan.simulation import Channel, LinkNetwork, chain
from pipecomp.stages.link.transport import PacerTo, unpaced
from pipecomp.stages.partition.planning import SplitPlan


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan. averages, tied: methods for gradients with their seconds. rows: each method at each network.

    untouched_s: what tied weights would take without TIED, None without it.
    """

    choice: PlanChoice
    averages: list[tuple[str, float]]
    tied: list[tuple[str, float]]
    untouched_s: float | None
    rows: list[tuple[str, list[StepPrediction]]]


def run_plan(
    console: Console, options: PlanOptions, pacer_to: PacerTo = unpaced, *, settings: bool = True
) -> dict[str, Any] | None:
    """Plan as `pipecomp plan` does, and print it.

    Args:
        console: where to print.
        options: what is asked for. A number of stages without `speed`, `profile` and `measure` gives sizes alone.
        pacer_to: slows links down that are measured.
        settings: whether to print what to write into a program and its configuration, too.

    Returns:
        The plan as JSON values (see `as_json` and `sizes.sizes_as_json`); None on a launcher's ranks other than 0.

    Raises:
        ConfigError: options that do not fit the model, the network or each other.
    """
    launch = read_launch(os.environ) if options.measure else Launch()
    options.check_launch(launch)
    networks = options.networks
    wanted = options.wanted(launch.world if launch.started else None)
    if options.without_seconds and wanted.stages is not None:
        for links in networks.values():
            chain(wanted.stages, *links)  # links that do not fit the stages are an error here too
        sizes = sizes_of(wanted, options.counted())
        show_sizes(sizes, console)
        return sizes_as_json(sizes)
    seen = _survey(options, launch, pacer_to)
    if seen is None:
        return None
    if launch.started:
        networks = {"measured": ((math.inf,), 0.0)}
        wanted = replace(wanted, slowdowns=seen.slowdowns)
    found = plan(wanted, seen.profile, list(networks.values()), seen.speeds, seen.network)
    K = found.choice.prediction.job.plan.num_stages
    network = seen.network or chain(K, *next(iter(networks.values())))
    show(found, network, list(networks), console)
    if settings:
        print_settings(found, console)
    return {**as_json(found, network, list(networks)), "speeds": _limited(seen.speeds)}


def _survey(options: PlanOptions, launch: Launch, pacer_to: PacerTo) -> SurveyResult | None:
    """Find what is known of the machines, measured or not; None on a launcher's ranks other than 0."""
    if not options.measure:
        return SurveyResult(profile=options.estimated(), speeds=options.noted_speeds())
    measured = (*options.size, options.micro_batch or 1, options.store)
    if not launch.started:
        return survey_machine(*measured, one_pass=options.one_pass)
    return survey_ranks(*measured, stages=options.stages, pacer_to=pacer_to, one_pass=options.one_pass)


def sizes_of(wanted: PlanRequest, profile: Profile) -> TrainingJob:
    """Plan sizes for a number of stages, by default with one sample per micro-batch; the profile may lack seconds.

    Raises ConfigError.
    """
    [(K, replicas)] = layouts(wanted.nodes, wanted.stages, len(profile.blocks))
    [(samples, micro_batches)] = shares(wanted.batch, replicas, wanted.micro_batch or 1)
    model = without_weights(wanted.model, wanted.dtype)
    split = balanced(model, profile, K, tie=wanted.tie)
    job = TrainingJob(
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


def plan(
    wanted: PlanRequest, profile: Profile, rates: Sequence[Rates], speeds: MachineSpeeds, measured: LinkNetwork | None
) -> PlanResult:
    """Choose for the first network: `measured`, or links of the first of `rates` (as of `networks_of`)."""
    model = without_weights(wanted.model, wanted.dtype)

    def network(split: SplitPlan, index: int) -> LinkNetwork:
        return measured if measured is not None and index == 0 else chain(split.num_stages, *rates[index])

    config = _config(wanted)
    fewest = fewest_bits(model, config, wanted.dropout)
    choices: list[PlanChoice] = []
    averages: dict[int, list[tuple[str, float]]] = {}  # by stages
    too_large = math.inf
    possible = layouts(wanted.nodes, wanted.stages, len(profile.blocks))
    for K, replicas in dividing(possible, wanted.batch, wanted.micro_batch):
        slowdowns = wanted.stage_slowdowns(K)
        split = balanced(model, profile, K, tie=wanted.tie, slowdowns=slowdowns)
        tied = tied_values(model, split)
        made = config
        if replicas > 1 and wanted.gradients is None:
            averages[K] = choose_average(
                config, max(split.parameters), replicas, network(split, 0), speeds, wanted.dtype
            )
            made = replace(config, gradients=Gradients(method=averages[K][0][0]))
        for samples, micro_batches in shares(wanted.batch, replicas, wanted.micro_batch):
            job = TrainingJob(
                profile=profile,
                plan=split,
                samples=samples,
                micro_batches=micro_batches,
                replicas=replicas,
                dtype=wanted.dtype,
                tied=tied,
                slowdowns=slowdowns,
            )
            if K == 1:
                alone = predict(job, replace(made, activations=Activations()), network(split, 0), speeds)
                found = PlanChoice(forward_bits=8, backward_bits=8, prediction=alone, plain=alone, fits=True)
            else:
                choosing = choose_with_tied if replicas == 1 and wanted.gradients is None else choose
                found = choosing(job, made, network(split, 0), speeds, fewest)
            needs = max(found.taken.memory_bytes())
            too_large = min(too_large, needs)
            if needs <= wanted.memory_bytes:
                choices.append(found)
    wanted.check_memory(too_large)
    choice = first_near_fastest(choices, lambda c: c.taken.step_s)
    stages = choice.prediction.job.plan.num_stages
    return _around(choice, averages.get(stages, []), network, speeds, len(rates))


def _config(wanted: PlanRequest) -> Config:
    """Make what bits are chosen for."""
    found = aqsgd_sections("auto", "auto", one_pass=wanted.one_pass)
    return Config.from_dict({**found, "tie": wanted.tie, "gradients": wanted.of_gradients()})


def _around(
    choice: PlanChoice, averages: list[tuple[str, float]], network: Any, speeds: MachineSpeeds, networks: int
) -> PlanResult:
    """Add what else to tell of a choice."""
    job, config = choice.prediction.job, choice.prediction.config
    first = network(job.plan, 0)

    def at_networks(made: Config) -> list[StepPrediction]:
        with_gradients = replace(made, gradients=config.gradients)
        return [predict(job, with_gradients, network(job.plan, i), speeds) for i in range(networks)]

    compared = methods(
        job.plan.num_stages,
        job.plan.tie,
        one_pass=config.store.clusters is not None,
        changes_back=config.activations.backward_method == "delta",
    )
    rows = [(name, at_networks(made)) for name, made in compared]
    tied = choose_tied(choice.taken, first, speeds) if job.replicas == 1 else []
    untouched_s = None
    if config.gradients == TIED:
        untouched_s = tied_seconds(job, replace(config, gradients=Gradients()), first, speeds)
    return PlanResult(choice=choice, averages=averages, tied=tied, untouched_s=untouched_s, rows=rows)


def show(found: PlanResult, network: LinkNetwork, names: Sequence[str], console: Console) -> None:
    """Print a plan."""
    p = found.choice.prediction
    console.print(predicted_stages(found.choice.taken))
    if p.job.plan.num_stages > 1:
        console.print(link_table(network, p, found.choice.plain))
    console.print(method_table(found.rows, names))
    console.print(p.job.text(), highlight=False)
    for sentence in advice(found.choice, found.averages, found.tied, found.untouched_s):
        console.print(sentence, highlight=False)


def print_settings(found: PlanResult, console: Console) -> None:
    """Print what a plan means for a program and its configuration."""
    written = configuration(found.choice)
    console.print(configuration_text(written, found.choice.prediction), highlight=False)


def as_json(found: PlanResult, network: LinkNetwork, names: Sequence[str]) -> dict[str, Any]:
    """Give all of it for programs; bits per second are null where there is no limit."""
    p = found.choice.prediction
    lines = [(_limited(out), _limited(back)) for out, back in zip(network.forward, network.backward, strict=True)]
    return {
        "cuts": list(p.job.plan.cuts),
        "parameters": list(p.job.plan.parameters),
        "stage_s": [list(pair) for pair in p.job.stage_seconds()],
        "links": [{"forward": out, "backward": back} for out, back in lines],
        "bits": [list(p.config.activations.bits(k)) for k in range(len(lines))],
        "chosen": as_row(p),
        "plain": as_row(found.choice.plain),
        "pays": found.choice.pays,
        "averages": [{"method": method, "seconds": seconds} for method, seconds in found.averages],
        "tied": [{"method": method, "seconds": seconds} for method, seconds in found.tied],
        "methods": [
            {"name": name, "network": at, **as_row(prediction)}
            for name, predictions in found.rows
            for at, prediction in zip(names, predictions, strict=True)
        ],
        "config": configuration(found.choice),
        "dtype": NAMES[p.job.dtype],
        "one_pass": p.config.store.clusters is not None,
        "profile": p.job.profile.as_dict(),
    }


def _limited(figures: Channel | MachineSpeeds) -> dict[str, Any]:
    """For JSON: None where nothing limits."""
    return {k: None if v == math.inf else v for k, v in asdict(figures).items()}
