"""`pipecomp plan`: predictions and recommended settings for a model, a network and the machines' speeds."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipecomp.config import Config
from pipecomp.config.activations import Activations
from pipecomp.config.elastic import Elastic
from pipecomp.distributed.launch_env import Launch, read_launch
from pipecomp.distributed.placement import usable_cores
from pipecomp.distributed.rendezvous import computes_on_cpu
from pipecomp.elastic.schedule import record_bytes, seconds_between
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.plan import report, search
from pipecomp.plan.auto_bits import fewest_bits, has_dropout
from pipecomp.plan.lines import MachineLines, check_per_machine, layouts_of
from pipecomp.plan.measure import SurveyResult, survey_machine, survey_ranks
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.prediction import (
    Estimate,
    MachineSpeeds,
    TrainingJob,
    as_row,
    memory_bytes,
    predict,
    tied_seconds,
)
from pipecomp.plan.profile import Profile, balanced, count, max_tokens, tied_values, without_weights
from pipecomp.plan.simulation import TCP_SHARE, Channel, LinkNetwork, SharedCores, chain
from pipecomp.rank_layout import RankLayout
from pipecomp.stages.link.transport import PacerTo, unpaced
from pipecomp.stages.partition.loading import resolve, with_adapter
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.utils.units import (
    MAX_DELAY_S,
    format_count,
    format_duration,
    format_nominal_rate,
    format_size,
    parse_rate,
    parse_time,
)

DEFAULT_RATES = ("10gbit", "1gbit", "500mbit", "300mbit", "100mbit")
_MAX_DEFAULT_TOKENS = 1024
LinkRates = tuple[tuple[float, ...], float]
"""Bits of content per second, of all links or of each, and one-way latency in seconds."""
NetworkOf = Callable[[RankLayout, int], LinkNetwork]  # of the ranks, and the position among the compared networks


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of a plan, resolved.

    Attributes:
        options: The options.
        nodes: Stages × replicas.
        stages: None to choose.
        slowdowns: Each node's seconds as a multiple of the profile's, by rank; empty if all are equal.
        shared_cores: Nodes that compute on the same cores.
        lines: Between machines and within them, of each compared network; None if every node has a line of its own.
        machines: The machine of each node, from 0; empty without a launcher.
    """

    options: PlanOptions
    nodes: int
    stages: int | None
    slowdowns: tuple[float, ...] = ()
    shared_cores: tuple[SharedCores, ...] = ()
    lines: tuple[MachineLines, ...] | None = None
    machines: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Training precision."""
        return report.TORCH_DTYPES[self.options.dtype]

    def stage_slowdowns(self, ranks: RankLayout) -> tuple[float, ...]:
        """Return the slowdown of each stage: that of its slowest replica."""
        return tuple(max(self.slowdowns[r] for r in row) for row in ranks.averages()) if self.slowdowns else ()

    def stage_cores(self, ranks: RankLayout) -> tuple[SharedCores, ...]:
        """Return the stages of the first replica that share cores, with its part of these."""
        parts = []
        for shared in self.shared_cores:
            places = [ranks.place(node) for node in shared.members]
            stages = tuple(stage for stage, replica in places if replica == 0)
            part = shared.at_once * len(stages) / len(shared.members)
            if len(stages) > part:
                parts.append(SharedCores(members=stages, at_once=part))
        return tuple(parts)

    def check_memory(self, stages: Sequence[float]) -> None:
        """Raise ConfigError if a node has less memory than a stage needs. stages: bytes of each."""
        options, needed = self.options, max(stages)
        ways = {
            "more stages": True,
            "fewer samples in --micro-batch": options.micro_batch != 1,
            "fewer --tokens": True,
            "--recompute": not options.recompute and options.speed is not None,
            "--lora 16": options.lora is None,
            "--load-in-4bit": options.lora is not None and options.bits != 4,
        }
        allowed = f"at least {round_up(needed / 1e9)} GB for each node"
        hint = f"Stage {stages.index(needed)} needs the most. Less is needed with any of: " + ", ".join(
            way for way, possible in ways.items() if possible
        )
        require(options.memory is None or needed <= options.memory * 1e9, "memory", options.memory, allowed, hint)


def run_plan(
    console: Console, options: PlanOptions, pacer_to: PacerTo = unpaced, *, settings: bool = True
) -> dict[str, Any] | None:
    """Plan as `pipecomp plan` does, and print the plan.

    Args:
        console: Receives the tables.
        options: What to plan. With `stages` but no `speed`, `profile` or `measure`, only sizes are planned.
        pacer_to: Throttles links while they are measured.
        settings: True to print the recommended configuration, too.

    Returns:
        The plan as JSON values (see `as_json` and `report.sizes_as_json`); None on ranks other than 0.

    Raises:
        ConfigError: The options do not fit the model, the network or each other.
    """
    launch = read_launch(os.environ) if options.measure else Launch()
    if launch.started:
        given = ("nodes", "bandwidth", "delay", "threads", "per_machine", "inner_bandwidth")
        options.require_unset("when a launcher's ranks are measured", *given)
    networks = parse_networks(options.bandwidth, options.delay)
    request = resolve_request(options, networks, launch.world if launch.started else None)
    if options.sizes_only and request.stages is not None:
        for links in networks.values():
            chain(request.stages, *links)  # raises ConfigError for another number of links
        job = plan_sizes(request, count(*model_size(options)))
        report.print_sizes(job, console)
        return report.sizes_as_json(job)

    threads = rank_threads(request, os.environ) if options.measure and not launch.started else None
    with _limited_threads(threads):
        survey = _survey(options, launch, pacer_to)
    if survey is None:
        return None
    if launch.started:
        networks = {"measured": ((math.inf,), 0.0)}
        lines = None if survey.lines is None else (survey.lines,)
        request = replace(
            request,
            slowdowns=survey.slowdowns,
            shared_cores=survey.shared_cores,
            lines=lines,
            machines=survey.machines,
        )
    rates = list(networks.values())

    def network_of(ranks: RankLayout, position: int) -> LinkNetwork:
        if request.lines is not None:
            return request.lines[position].network(ranks)
        if survey.network is not None and position == 0:
            return survey.network
        return chain(ranks.stages, *rates[position])

    result = plan(request, survey.profile, survey.speeds, network_of, len(rates))
    network = network_of(result.choice.prediction.job.ranks, 0)
    report.print_plan(result, network, list(networks), console)
    if threads is not None and options.threads is None and request.nodes > 1 and computes_on_cpu():
        console.print(
            f"Measured with {format_count(threads, 'thread')}, as {request.nodes} nodes share this machine's cores. "
            "Where each has a machine of its own, give --threads.",
            highlight=False,
        )
    if settings:
        report.print_settings(result.choice, console)
    return {
        **as_json(result, network, list(networks)),
        "speeds": _finite(survey.speeds),
        "lora": options.lora,
        "threads": threads,
    }


def describe_records(options: PlanOptions) -> str:
    """Describe how often a stage's state can go to its second home, from the model's sizes alone.

    options: options with a number of stages.

    Raises:
        ConfigError, SplitError: The model cannot be read or cut.
    """
    request = resolve_request(options, parse_networks(options.bandwidth, options.delay), None)
    job = plan_sizes(request, count(*model_size(options)))
    half = job.dtype != torch.float32
    size, share = record_bytes(max(job.plan.trained), half=half, replicas=job.replicas), Elastic().line_share
    rates = [parse_rate("bandwidth", rate) for rate in ("10mbit", "100mbit")]
    times = [f"{format_duration(seconds_between(size, r, share))} at {format_nominal_rate(r)}" for r in rates]
    state = f"the state of a stage, {format_size(size)}"
    text = f"second home: {share:.0%} of the line sends {state}, every {' or '.join(times)}"
    return f"{text}; the run measures, and prints after how many steps"


# -- the request


def parse_networks(bandwidth: str | None, delay: str | None) -> dict[str, LinkRates]:
    """Parse the networks to compare, by name; the plan is for the first.

    Args:
        bandwidth: Nominal rates, networks separated by commas, the links of one by slashes; None for DEFAULT_RATES.
        delay: One-way latency, such as "20ms".

    Raises:
        ConfigError: A rate or the delay cannot be parsed.
    """
    latency_s = 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S)
    networks = {}
    for name in DEFAULT_RATES if bandwidth is None else bandwidth.split(","):
        rates = [parse_rate("bandwidth", link.strip()) for link in name.split("/")]
        networks["/".join(map(format_nominal_rate, rates))] = (tuple(rate * TCP_SHARE for rate in rates), latency_s)
    return networks


def parse_speeds(speed: str | None) -> tuple[float, ...]:
    """Parse TFLOP/s of all nodes, or of each; () for None."""
    try:
        speeds = () if speed is None else tuple(float(part) for part in speed.split("/"))
    except ValueError:
        speeds = (0.0,)
    require(all(0 < one < math.inf for one in speeds), "speed", speed, "numbers above 0, separated by slashes")
    return speeds


def resolve_request(options: PlanOptions, networks: Mapping[str, LinkRates], world: int | None) -> PlanRequest:
    """Derive the numbers of nodes and stages from the options, the first network and the launcher's ranks, if any."""
    rates, _ = next(iter(networks.values()))
    per_machine = options.per_machine
    hint = "All processes of a machine share its line."
    one_line = per_machine is None or all(len(links) == 1 for links, _ in networks.values())
    require(one_line, "bandwidth", options.bandwidth, "one rate with --per-machine", hint)
    drawn = len(rates) + 1 if len(rates) > 1 else None  # rates given link by link imply the number of stages
    stages = options.stages or world or drawn
    for links, _ in networks.values():
        allowed = "one rate; --stages says how many links there are"
        if stages is not None:
            allowed = f"one rate, or {stages - 1} for {stages} stages"
        require(len(links) in (1, (stages or 0) - 1), "bandwidth", options.bandwidth, allowed)
    speeds = parse_speeds(options.speed)
    nodes = world or options.nodes or (len(speeds) if len(speeds) > 1 else None) or options.stages or drawn or 2
    slowdowns: tuple[float, ...] = ()
    if len(speeds) > 1:
        require(len(speeds) == nodes, "speed", options.speed, f"one number, or one for each of {nodes} nodes")
        slowdowns = tuple(min(speeds) / one for one in speeds)
    check_per_machine(per_machine, nodes)
    lines = None
    if per_machine is not None and per_machine > 1:
        inner = parse_rate("inner-bandwidth", options.inner_bandwidth) if options.inner_bandwidth else math.inf
        within = Channel(bits_per_s=inner * TCP_SHARE)
        between = [Channel(bits_per_s=links[0], latency_s=latency_s) for links, latency_s in networks.values()]
        lines = tuple(MachineLines.alike(nodes, per_machine, line, within) for line in between)
    return PlanRequest(options=options, nodes=nodes, stages=stages, slowdowns=slowdowns, lines=lines)


def model_size(options: PlanOptions) -> tuple[Any, int, torch.dtype]:
    """Return model, tokens per sample and dtype."""
    tokens = options.tokens
    if tokens is None:
        tokens = min(_MAX_DEFAULT_TOKENS, max_tokens(resolve(options.model).config) or _MAX_DEFAULT_TOKENS)
    return _adapted(options), tokens, report.TORCH_DTYPES[options.dtype]


def _adapted(options: PlanOptions) -> Any:
    """Return the model, with new adapters in all linear layers if the options ask for them."""
    if options.lora is None:
        return options.model
    return with_adapter(options.model, options.lora, options.bits)


def round_up(size: float) -> float:
    """Round up to two digits."""
    step = 10.0 ** (math.floor(math.log10(size)) - 1)
    return float(f"{math.ceil(size / step) * step:.2g}")


# -- speeds of the machines


def rank_threads(request: PlanRequest, environment: Mapping[str, str]) -> int:
    """Return the threads that a rank of the planned run has, as `join_processes` sets them.

    Without --threads and OMP_NUM_THREADS it is a node's share of this machine's cores.
    """
    if request.options.threads is not None:
        return request.options.threads
    if "OMP_NUM_THREADS" in environment:
        return torch.get_num_threads()
    return min(torch.get_num_threads(), max(1, usable_cores() // request.nodes))


@contextlib.contextmanager
def _limited_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this many threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _survey(options: PlanOptions, launch: Launch, pacer_to: PacerTo) -> SurveyResult | None:
    """Measure, read or estimate profile and speeds; None on ranks other than 0."""
    if options.measure:
        size = (*model_size(options), options.micro_batch or 1, options.store)
        if launch.started:
            return survey_ranks(*size, stages=options.stages, pacer_to=pacer_to, one_pass=options.one_pass)
        return survey_machine(*size, one_pass=options.one_pass)
    if options.profile is not None:
        return _read_profile(options, options.profile)
    speeds = parse_speeds(options.speed)
    if not speeds:
        allowed = "TFLOP/s of a stage's machine; or --measure on it; or --profile FILE; or --stages, for sizes alone"
        raise ConfigError("speed", None, allowed)
    profile = count(*model_size(options)).estimated(min(speeds) * 1e12)
    if options.recompute:
        profile = profile.recomputing(report.TORCH_DTYPES[options.dtype])
    return SurveyResult(profile=profile, speeds=MachineSpeeds())


def _read_profile(options: PlanOptions, file: Path) -> SurveyResult:
    allowed = "a file from pipecomp plan --measure --json"
    try:
        content = json.loads(file.read_text())
        require(isinstance(content, dict), "profile", str(file), allowed)
        speeds = MachineSpeeds.from_dict(content.get("speeds", {}))
    except ConfigError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError("profile", str(file), allowed) from error
    dtype, one_pass = content.get("dtype", options.dtype), content.get("one_pass", options.one_pass)
    require(dtype == options.dtype, "dtype", options.dtype, str(dtype), "The profile was measured in that precision")
    require(
        one_pass == options.one_pass, "one-pass", options.one_pass, str(one_pass), "The profile was measured for that"
    )
    lora = content.get("lora")
    require(lora == options.lora, "lora", options.lora, str(lora), "The profile was measured for that")
    return SurveyResult(profile=Profile.from_dict(content.get("profile")), speeds=speeds)


# -- planning


def plan(
    request: PlanRequest, profile: Profile, speeds: MachineSpeeds, network_of: NetworkOf, networks: int
) -> report.PlanResult:
    """Choose layout, cuts, micro-batches and bits for the first network, and predict each method on every network.

    Args:
        request: What to plan.
        profile: The model's seconds and memory on the slowest machine.
        speeds: Speeds of the machines besides the model's.
        network_of: Called as `network_of(stages, position)`; returns the network at that position.
        networks: Number of networks.

    Raises:
        ConfigError: No layout fits, or none fits the nodes' memory.
    """
    options = request.options
    model = without_weights(_adapted(options), request.dtype, quantized=True)
    gradients = {} if options.gradients is None else {"method": options.gradients}
    sections = search.aqsgd_sections("auto", "auto", one_pass=options.one_pass)
    config = Config.from_dict({**sections, "tie": options.tie, "gradients": gradients})
    gpu = options.measure and not computes_on_cpu()
    scales = config.activations.with_scales(profile.tokens * (options.micro_batch or 1), gpu=gpu)  # of the run
    fewest = fewest_bits(model, config.replace(activations=scales), options.dropout)
    config = config.replace(activations=config.activations.with_dropout([has_dropout(model, options.dropout)]))
    choices: list[search.PlanChoice] = []
    averages: dict[RankLayout, list[tuple[str, float]]] = {}
    least_memory: list[float] = [math.inf]  # of each stage, in the layout that needs least
    possible = search.layouts(request.nodes, request.stages, len(profile.blocks))
    possible = list(search.divisible(possible, options.batch, options.micro_batch))
    lines = None if request.lines is None else request.lines[0]
    for ranks in layouts_of(options.layout, possible, lines, request.machines):
        K, replicas = ranks.stages, ranks.replicas
        slowdowns = request.stage_slowdowns(ranks)
        split = choose_cuts(model, profile, K, tie=options.tie, slowdowns=slowdowns)
        network = network_of(ranks, 0)
        layout: dict[str, Any] = {"plan": split, "replicas": replicas, "tied": tied_values(model, split)}
        layout |= {"profile": profile, "dtype": request.dtype, "slowdowns": slowdowns, "layout": ranks.name}
        layout["shared_cores"] = request.stage_cores(ranks)
        used = config
        if replicas > 1 and options.gradients is None:
            found = search.choose_average(config, max(split.trained), replicas, network, speeds, request.dtype)
            averages[ranks] = found
            used = config.replace(gradients=Gradients(method=found[0][0]))
        for samples, micro_batches in search.micro_batch_splits(options.batch, replicas, options.micro_batch):
            job = TrainingJob(samples=samples, micro_batches=micro_batches, **layout)
            if K == 1:
                alone = predict(job, used.replace(activations=Activations()), network, speeds)
                choice = search.PlanChoice(forward_bits=8, backward_bits=8, prediction=alone, plain=alone, fits=True)
            elif replicas == 1 and options.gradients is None:
                choice = search.choose_with_tied(job, used, network, speeds, fewest)
            else:
                choice = search.choose(job, used, network, speeds, fewest)
            needed = choice.taken.memory_bytes()
            least_memory = min(least_memory, needed, key=max)
            if options.memory is None or max(needed) <= options.memory * 1e9:
                choices.append(choice)
    request.check_memory(least_memory)
    choice = search.simplest(search.with_faster_layouts(choices), lambda c: c.taken)
    ranks = choice.prediction.job.ranks
    result = _compare(choice, averages.get(ranks, []), network_of, speeds, networks)
    result = replace(
        result,
        layouts=_compare_layouts(request, ranks, choices),
        lines=lines,
    )
    if options.samples is not None:
        taken = choice.taken.job
        steps = (options.epochs or 1) * (options.samples // taken.replicas // taken.samples) // taken.micro_batches
        steps = min(steps, options.max_steps or steps)
        require(steps, "samples", options.samples, f"at least {taken.batch}, one step's", "or more --epochs")
        result = replace(result, steps=steps, epochs=options.epochs or 1)
    return result


def choose_cuts(model: Any, profile: Profile, stages: int, *, tie: bool, slowdowns: Sequence[float]) -> SplitPlan:
    """Plan cuts by operations, which are the same in every call, or by seconds if these are surely better."""
    by_seconds = balanced(model, profile, stages, tie=tie, slowdowns=slowdowns)
    if profile.spread == (1.0, 1.0):
        return by_seconds
    by_operations = balanced(model, profile.estimated(1.0), stages, tie=tie, slowdowns=slowdowns)

    def slowest(split: SplitPlan) -> Estimate:
        factors = slowdowns or (1.0,) * stages
        seconds = [f * sum(pair) for f, pair in zip(factors, profile.stage_seconds(split, 1), strict=True)]
        return Estimate.of(max(seconds), profile.spread)

    return by_operations if slowest(by_operations).reaches(slowest(by_seconds)) else by_seconds


def _compare(
    choice: search.PlanChoice,
    averages: list[tuple[str, float]],
    network_of: NetworkOf,
    speeds: MachineSpeeds,
    count: int,
) -> report.PlanResult:
    """Predict the compared methods on `count` networks, and the alternatives for tied weights."""
    job, config = choice.prediction.job, choice.prediction.config
    one_pass, changes_back = config.store.clusters is not None, config.activations.backward_method == "delta"
    networks = [network_of(job.ranks, position) for position in range(count)]
    compared = search.compared_methods(job.plan.num_stages, job.plan.tie, one_pass=one_pass, changes_back=changes_back)
    rows = [
        (name, [predict(job, method.replace(gradients=config.gradients), network, speeds) for network in networks])
        for name, method in compared
    ]
    tied_plain_s = None
    if config.gradients == search.TIED:
        tied_plain_s = tied_seconds(job, config.replace(gradients=Gradients()), networks[0], speeds)
    return report.PlanResult(choice=choice, averages=averages, tied_plain_s=tied_plain_s, rows=rows)


def _compare_layouts(
    request: PlanRequest, ranks: RankLayout, choices: Sequence[search.PlanChoice]
) -> tuple[report.LayoutPrediction, ...]:
    """Return the prediction in each layout of the chosen stages, the chosen layout first; () for one layout."""
    if request.lines is None:
        return ()
    alike = {one: p for one, p in search.by_layout(choices).items() if replace(one, name=ranks.name) == ranks}
    found = [
        report.LayoutPrediction(one.name, alike[one].step_s, *request.lines[0].crossing(one))
        for one in sorted(alike, key=lambda one: one != ranks)
    ]
    return tuple(found) if len(found) > 1 else ()


def plan_sizes(request: PlanRequest, profile: Profile) -> TrainingJob:
    """Plan sizes for a number of stages, by default with one sample per micro-batch. The profile may lack seconds.

    Raises:
        ConfigError: The layout does not fit, or needs more memory than a node has.
    """
    options = request.options
    [(K, replicas)] = search.layouts(request.nodes, request.stages, len(profile.blocks))
    [(samples, micro_batches)] = search.micro_batch_splits(options.batch, replicas, options.micro_batch or 1)
    model = without_weights(_adapted(options), request.dtype, quantized=True)
    split = balanced(model, profile, K, tie=options.tie)
    layout: dict[str, Any] = {"plan": split, "replicas": replicas, "tied": tied_values(model, split)}
    job = TrainingJob(profile=profile, samples=samples, micro_batches=micro_batches, dtype=request.dtype, **layout)
    request.check_memory(memory_bytes(job))
    return job


def as_json(result: report.PlanResult, network: LinkNetwork, names: Sequence[str]) -> dict[str, Any]:
    """Return the plan as JSON values; bits per second are null where nothing limits them."""
    p = result.choice.prediction
    records = report.record_schedule(p, network)
    links = [
        {"forward": _finite(out), "backward": _finite(back)}
        for out, back in zip(network.forward, network.backward, strict=True)
    ]
    return {
        "cuts": list(p.job.plan.cuts),
        "parameters": list(p.job.plan.parameters),
        "stage_s": [list(pair) for pair in p.job.stage_seconds()],
        "slowdowns": list(p.job.slowdowns),
        "shared_cores": [asdict(shared) for shared in p.job.shared_cores],
        "links": links,
        "bits": [list(p.config.activations.bits(k)) for k in range(len(links))],
        "chosen": as_row(p),
        "plain": as_row(result.choice.plain),
        "pays": result.choice.pays,
        "averages": [{"method": method, "seconds": seconds} for method, seconds in result.averages],
        "methods": [
            {"name": name, "network": at, **as_row(prediction)}
            for name, predictions in result.rows
            for at, prediction in zip(names, predictions, strict=True)
        ],
        "config": report.configuration(result.choice),
        "duration": None if result.steps is None else {"steps": result.steps, **result.duration()._asdict()},
        "second_home": None if records is None else {**asdict(records), "lost_steps": records.lost_steps},
        "dtype": report.DTYPE_NAMES[p.job.dtype],
        "one_pass": p.config.store.clusters is not None,
        "profile": p.job.profile.as_dict(),
    }


def _finite(figures: Channel | MachineSpeeds) -> dict[str, Any]:
    return {key: None if value == math.inf else value for key, value in asdict(figures).items()}
