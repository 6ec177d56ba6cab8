"""`pipecomp plan`: from a model, a network and a speed to predictions and settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipecomp.config import Config
from pipecomp.doctor.launch import Launch, read_launch
from pipecomp.errors import ConfigError
from pipecomp.plan.network import TCP_SHARE, Line, Network, chain
from pipecomp.plan.prediction import Job, Prediction, Speeds, as_row, predict
from pipecomp.plan.profile import Profile, balanced, count, without_weights
from pipecomp.plan.report import (
    advice,
    configuration,
    configuration_text,
    link_table,
    method_table,
    stage_table,
)
from pipecomp.plan.search import Choice, choose, choose_average, gentlest, layouts, shares
from pipecomp.plan.sizes import show_sizes, sizes_as_json, sizes_of
from pipecomp.plan.survey import Survey, speeds_as_dict, survey_machine, survey_ranks
from pipecomp.plan.wanted import FIRST_VISIT, Wanted, methods
from pipecomp.rates import MAX_DELAY_S, parse_rate, parse_time, rate_text
from pipecomp.stages.partition.planning import SplitPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = ("10gbit", "1gbit", "500mbit", "300mbit", "100mbit")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan. rows: each method at each network."""

    choice: Choice
    averages: list[tuple[str, float]]
    rows: list[tuple[str, list[Prediction]]]


def run_plan(
    console: Console,
    *,
    model: str,
    nodes: int | None,
    stages: int | None,
    batch: int,
    micro_batch: int | None,
    tokens: int | None,
    bandwidth: str | None,
    delay: str | None,
    speed: str | None,
    profile: Path | None,
    memory: float | None,
    dtype: str,
    tie: bool,
    recompute: bool,
    measure: bool,
    store: Path,
) -> dict[str, Any] | None:
    """What the command does with its options; prints the plan and returns it for JSON; None on ranks other than 0.

    A number of stages without speed, profile and measure: sizes alone. ConfigError for the options.
    """
    _check(dtype in DTYPES, "dtype", dtype, ", ".join(DTYPES))
    for key, number in (("nodes", nodes), ("stages", stages), ("batch", batch), ("micro-batch", micro_batch)):
        _check(number is None or number >= 1, key, number, "a whole number of at least 1")
    _check(memory is None or memory > 0, "memory", memory, "GB above 0")
    launch = read_launch(os.environ) if measure else Launch()
    if launch.started:
        for key, value in (("nodes", nodes), ("bandwidth", bandwidth), ("delay", delay)):
            _check(value is None, key, value, "nothing where a launcher's ranks are measured")
    world = launch.world if launch.started and launch.world else None
    networks = networks_of(bandwidth, delay)
    drawn = stages_of(next(iter(networks.values())))
    speeds = speeds_of(speed)
    wanted = Wanted(
        model=model,
        nodes=world or nodes or (len(speeds) if len(speeds) > 1 else None) or stages or drawn or 2,
        stages=stages or world or drawn,
        batch=batch,
        micro_batch=micro_batch,
        tie=tie,
        dtype=DTYPES[dtype],
        memory_bytes=math.inf if memory is None else memory * 1e9,
    )
    if len(speeds) > 1:
        _check(len(speeds) == wanted.nodes, "speed", speed, f"one number, or one for each of {wanted.nodes} nodes")
        wanted = replace(wanted, slowdowns=tuple(min(speeds) / one for one in speeds))
    if wanted.stages is not None and speed is None and profile is None and not measure:
        _check(not recompute, "recompute", recompute, "nothing without --speed")
        for links in networks.values():
            chain(wanted.stages, *links)  # links that do not fit the stages are an error here too
        sizes = sizes_of(wanted, count(model, tokens or 1024, wanted.dtype))
        show_sizes(sizes, console)
        return sizes_as_json(sizes)
    if measure:
        for key, option in (("speed", speed), ("profile", profile), ("recompute", recompute or None)):
            _check(option is None, key, option, "nothing beside --measure")
        size = (model, tokens or 1024, wanted.dtype, micro_batch or 1, store)
        seen = survey_ranks(*size, stages) if launch.started else survey_machine(*size)
        if seen is None:
            return None
    else:
        slowest = min(speeds) if speeds else None
        read = profile_of(model, tokens=tokens, dtype=wanted.dtype, speed=slowest, file=profile, recompute=recompute)
        seen = Survey(profile=read, speeds=Speeds())
    if launch.started:
        networks = {"measured": ((math.inf,), 0.0)}
        wanted = replace(wanted, slowdowns=seen.slowdowns)
    found = plan(wanted, seen.profile, list(networks.values()), seen.speeds, seen.network)
    K = found.choice.prediction.job.plan.num_stages
    network = seen.network or chain(K, *next(iter(networks.values())))
    show(found, network, list(networks), console)
    return {**as_json(found, network, list(networks)), "speeds": speeds_as_dict(seen.speeds)}


def _check(right: bool, key: str, got: object, allowed: str) -> None:
    if not right:
        raise ConfigError(key, got, allowed)


def networks_of(bandwidth: str | None, delay: str | None) -> dict[str, tuple[tuple[float, ...], float]]:
    """By name: bits per second of content, of all links or of each, and seconds one way.

    bandwidth: nominal rates; commas between networks, slashes between the links of one.
    """
    latency_s = 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S)
    found = {}
    for name in bandwidth.split(",") if bandwidth is not None else RATES:
        rates = [parse_rate("bandwidth", link.strip()) for link in name.split("/")]
        found["/".join(map(rate_text, rates))] = (tuple(rate * TCP_SHARE for rate in rates), latency_s)
    return found


def stages_of(network: tuple[tuple[float, ...], float]) -> int | None:
    """How many stages links that were given one by one connect."""
    rates, _ = network
    return len(rates) + 1 if len(rates) > 1 else None


def speeds_of(speed: str | None) -> tuple[float, ...]:
    """TFLOP/s of all nodes, or of each, with slashes between them; empty for None."""
    try:
        found = tuple(float(part) for part in speed.split("/")) if speed is not None else ()
    except ValueError:
        found = (0.0,)
    _check(all(0 < one < math.inf for one in found), "speed", speed, "numbers above 0, with slashes between them")
    return found


def plan(
    wanted: Wanted,
    profile: Profile,
    rates: Sequence[tuple[tuple[float, ...], float]],
    speeds: Speeds,
    measured: Network | None,
) -> Found:
    """Choose for the first network: `measured`, or links of the first of `rates` (as of `networks_of`)."""
    model = without_weights(wanted.model, wanted.dtype)
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    activations = {
        "method": "aqsgd",
        "forward_bits": "auto",
        "backward_bits": "auto",
        "first_visit": FIRST_VISIT,
    }
    config = Config.from_dict({"activations": activations, "tie": wanted.tie})

    def network(split: SplitPlan, index: int) -> Network:
        return measured if measured is not None and index == 0 else chain(split.num_stages, *rates[index])

    choices: list[Choice] = []
    too_large = math.inf
    for K, replicas in layouts(wanted.nodes, wanted.stages, len(profile.blocks)):
        slowdowns = wanted.stage_slowdowns(K)
        split = balanced(model, profile, K, tie=wanted.tie, slowdowns=slowdowns)
        tied = tuple(sizes[group.name] for group in split.tied)
        for samples, micro_batches in shares(wanted.batch, replicas, wanted.micro_batch):
            job = Job(
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
                alone = predict(job, Config(tie=wanted.tie), network(split, 0), speeds)
                found = Choice(forward_bits=8, backward_bits=8, prediction=alone, plain=alone, fits=True)
            else:
                found = choose(job, config, network(split, 0), speeds)
            needs = max(found.prediction.memory_bytes())
            too_large = min(too_large, needs)
            if needs <= wanted.memory_bytes:
                choices.append(found)
    wanted.check_memory(too_large)
    choice = gentlest(choices, lambda c: c.prediction.step_s if c.pays else c.plain.step_s)
    return _around(choice, config, network, speeds, len(rates))


def _around(choice: Choice, config: Config, network: Any, speeds: Speeds, networks: int) -> Found:
    """What else to tell of a choice."""
    job = choice.prediction.job
    first = network(job.plan, 0)
    rows = [
        (name, [predict(job, made, network(job.plan, i), speeds) for i in range(networks)])
        for name, made in methods(job.plan.num_stages, config.tie)
    ]
    averages = []
    if job.replicas > 1:
        averages = choose_average(config, max(job.plan.parameters), job.replicas, first, speeds)
    return Found(choice=choice, averages=averages, rows=rows)


def show(found: Found, network: Network, names: Sequence[str], console: Console) -> None:
    """Print it."""
    p = found.choice.prediction
    console.print(stage_table(p))
    if p.job.plan.num_stages > 1:
        console.print(link_table(network, p, found.choice.plain))
    console.print(method_table(found.rows, names))
    console.print(p.job.text(), highlight=False)
    for sentence in advice(found.choice, found.averages):
        console.print(sentence, highlight=False)
    console.print(configuration_text(configuration(found.choice, found.averages), p), highlight=False)


def as_json(found: Found, network: Network, names: Sequence[str]) -> dict[str, Any]:
    """All of it, for programs; without limits where bits per second are null."""
    p = found.choice.prediction
    lines = [(_line(out), _line(back)) for out, back in zip(network.forward, network.backward, strict=True)]
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
        "methods": [
            {"name": name, "network": at, **as_row(prediction)}
            for name, predictions in found.rows
            for at, prediction in zip(names, predictions, strict=True)
        ],
        "config": configuration(found.choice, found.averages),
        "profile": p.job.profile.as_dict(),
    }


def _line(line: Line) -> dict[str, float | None]:
    return {**asdict(line), "bits_per_s": None if math.isinf(line.bits_per_s) else line.bits_per_s}


def profile_of(
    model: Any, *, tokens: int | None, dtype: torch.dtype, speed: float | None, file: Path | None, recompute: bool
) -> Profile:
    """The model's profile: read from a file, or counted and given seconds by a speed in TFLOP/s."""
    if file is not None:
        for key, value in (("speed", speed), ("tokens", tokens), ("recompute", recompute or None)):
            if value is not None:
                raise ConfigError(key, value, "nothing beside a profile, which says it")
        try:
            return Profile.from_dict(json.loads(file.read_text()).get("profile"))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError("profile", str(file), "a file that pipecomp plan --measure --json wrote") from error
    if speed is None:
        allowed = "TFLOP/s of a stage's machine; or --measure on it; or --profile FILE; or --stages, for sizes alone"
        raise ConfigError("speed", None, allowed)
    return count(model, tokens or 1024, dtype).estimated(speed * 1e12, recompute=recompute)
