"""`pipecomp plan`: from a model, a network and a speed to predictions and settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipecomp.config import Config
from pipecomp.doctor.launch import Launch, read_launch
from pipecomp.errors import ConfigError
from pipecomp.netlab.shape import MAX_DELAY_S, parse_rate, parse_time, rate_text
from pipecomp.plan.network import TCP_SHARE, Line, Network, uniform
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
from pipecomp.plan.search import Choice, bits_for_links, choose, choose_average, gentlest, layouts, shares
from pipecomp.plan.survey import Survey, speeds_as_dict, survey_machine, survey_ranks
from pipecomp.stages.planning import SplitPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = ("10gbit", "1gbit", "500mbit", "300mbit", "100mbit")
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"method": "none"}),
    ("bf16", {"method": "bf16"}),
    ("DirectQ fw4 bw8", {"method": "direct", "forward_bits": 4, "backward_bits": 8}),
    ("AQ-SGD fw8 bw8", {"method": "aqsgd", "forward_bits": 8, "backward_bits": 8}),
    ("AQ-SGD fw4 bw8", {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}),
    ("AQ-SGD fw3 bw6", {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6}),
    ("AQ-SGD fw2 bw4", {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4}),
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the options say. networks: by name; the first one is planned for, the others are only predicted.

    nodes: stages × replicas. stages, micro_batch: None to choose. batch: samples of a step. memory_bytes: of a node.
    """

    model: Any
    nodes: int
    batch: int
    stages: int | None = None
    micro_batch: int | None = None
    dtype: torch.dtype = torch.float32
    tie: bool = True
    memory_bytes: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan. rows: each method at each network. bits: that each link alone would hide."""

    choice: Choice
    averages: list[tuple[str, float]]
    rows: list[tuple[str, list[Prediction]]]
    bits: list[tuple[int, int]]


def run_plan(
    console: Console, *, model: str, nodes: int | None, stages: int | None, batch: int, micro_batch: int | None,
    tokens: int | None, bandwidth: str | None, delay: str | None, speed: float | None, profile: Path | None,
    memory: float | None, dtype: str, tie: bool, recompute: bool, measure: bool, store: Path,
) -> dict[str, Any] | None:  # fmt: skip
    """What the command does with its options; prints the plan and returns it for JSON; None on ranks other than 0.

    ConfigError for the options.
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
    wanted = Wanted(
        model=model, nodes=world or nodes or stages or 2, stages=stages or world, batch=batch, micro_batch=micro_batch,
        tie=tie, dtype=DTYPES[dtype], memory_bytes=math.inf if memory is None else memory * 1e9,
    )  # fmt: skip
    networks = networks_of(bandwidth, delay)
    if measure:
        for key, option in (("speed", speed), ("profile", profile), ("recompute", recompute or None)):
            _check(option is None, key, option, "nothing beside --measure")
        size = (model, tokens or 1024, wanted.dtype, micro_batch or 1, store)
        seen = survey_ranks(*size, stages) if launch.started else survey_machine(*size)
        if seen is None:
            return None
    else:
        read = profile_of(model, tokens=tokens, dtype=wanted.dtype, speed=speed, file=profile, recompute=recompute)
        seen = Survey(profile=read, speeds=Speeds())
    if launch.started:
        networks = {"measured": (math.inf, 0.0)}
    found = plan(wanted, seen.profile, list(networks.values()), seen.speeds, seen.network)
    K = found.choice.prediction.job.plan.num_stages
    network = seen.network or uniform(K, *next(iter(networks.values())))
    show(found, network, list(networks), console)
    return {**as_json(found, network, list(networks)), "speeds": speeds_as_dict(seen.speeds)}


def _check(right: bool, key: str, got: object, allowed: str) -> None:
    if not right:
        raise ConfigError(key, got, allowed)


def networks_of(bandwidth: str | None, delay: str | None) -> dict[str, tuple[float, float]]:
    """By name: bits per second of content, and seconds one way. bandwidth: nominal rates with commas between them."""
    latency_s = 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S)
    names = [name.strip() for name in bandwidth.split(",")] if bandwidth is not None else list(RATES)
    rates = [parse_rate("bandwidth", name) for name in names]
    return {rate_text(rate): (rate * TCP_SHARE, latency_s) for rate in rates}


def plan(
    wanted: Wanted, profile: Profile, rates: Sequence[tuple[float, float]], speeds: Speeds, measured: Network | None
) -> Found:
    """Choose for the first network: `measured`, or links of the first of `rates` (bits per second, latency)."""
    model = without_weights(wanted.model, wanted.dtype)
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    config = Config.from_dict({
        "activations": {"method": "aqsgd", "forward_bits": "auto", "backward_bits": "auto"}, "tie": wanted.tie,
    })  # fmt: skip

    def network(split: SplitPlan, index: int) -> Network:
        return measured if measured is not None and index == 0 else uniform(split.num_stages, *rates[index])

    choices: list[Choice] = []
    too_large = math.inf
    for K, replicas in layouts(wanted.nodes, wanted.stages, len(profile.blocks)):
        split = balanced(model, profile, K, tie=wanted.tie)
        tied = tuple(sizes[group.name] for group in split.tied)
        for samples, micro_batches in shares(wanted.batch, replicas, wanted.micro_batch):
            job = Job(
                profile=profile, plan=split, samples=samples, micro_batches=micro_batches, replicas=replicas,
                dtype=wanted.dtype, tied=tied,
            )  # fmt: skip
            if K == 1:
                alone = predict(job, Config(tie=wanted.tie), network(split, 0), speeds)
                found = Choice(forward_bits=8, backward_bits=8, prediction=alone, plain=alone, fits=True)
            else:
                found = choose(job, config, network(split, 0), speeds)
            needs = max(found.prediction.memory_bytes())
            too_large = min(too_large, needs)
            if needs <= wanted.memory_bytes:
                choices.append(found)
    if not choices:
        raise ConfigError("memory", wanted.memory_bytes / 1e9, f"at least {too_large / 1e9:.1f} GB for each node")
    choice = gentlest(choices, lambda c: c.prediction.step_s if c.pays else c.plain.step_s)
    return _around(choice, config, network, speeds, len(rates))


def _around(choice: Choice, config: Config, network: Any, speeds: Speeds, networks: int) -> Found:
    """What else to tell of a choice."""
    job = choice.prediction.job
    first = network(job.plan, 0)
    rows = []
    for name, activations in METHODS if job.plan.num_stages > 1 else METHODS[:1]:
        made = Config.from_dict({"activations": activations, "tie": config.tie})
        rows.append((name, [predict(job, made, network(job.plan, i), speeds) for i in range(networks)]))
    averages = []
    if job.replicas > 1:
        averages = choose_average(config, max(job.plan.parameters), job.replicas, first, speeds)
    bits = bits_for_links(job, config, first, speeds) if job.plan.num_stages > 1 else []
    return Found(choice=choice, averages=averages, rows=rows, bits=bits)


def show(found: Found, network: Network, names: Sequence[str], console: Console) -> None:
    """Print it."""
    p = found.choice.prediction
    console.print(stage_table(p))
    if p.job.plan.num_stages > 1:
        console.print(link_table(network, p, found.choice.plain, found.bits))
    console.print(method_table(found.rows, names))
    job = p.job
    console.print(
        f"{job.plan.num_stages} stages × {job.replicas} replicas, {job.micro_batches} micro-batches of {job.samples} "
        f"for {job.batch} samples a step, {job.profile.tokens} tokens each.",
        highlight=False,
    )
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
        "stage_s": [list(pair) for pair in p.job.profile.stage_seconds(p.job.plan, p.job.samples)],
        "links": [{"forward": out, "backward": back} for out, back in lines],
        "bits_that_hide": [list(pair) for pair in found.bits],
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
        raise ConfigError("speed", None, "TFLOP/s of a stage's machine; or --measure on it; or --profile FILE")
    return count(model, tokens or 1024, dtype).estimated(speed * 1e12, recompute=recompute)
