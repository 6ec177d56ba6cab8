"""What one configuration takes: bytes of its packets, seconds of a step, memory of every stage.

K stages, M micro-batches of B samples with S tokens, R replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pipecomp.allreduce import predict as predict_average
from pipecomp.allreduce.local_options import LocalSteps
from pipecomp.config import Config
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.plan.profile import Profile
from pipecomp.plan.simulation import LinkNetwork, SimulatedStep, StageCosts, StepSpec, simulate_step
from pipecomp.schedule import in_flight_counts
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_count

_WORTH = 0.99  # running further ahead must shorten a step to this
# Bytes of a parameter on each replica, and more that replicas share out: weight, gradient and Adam's two moments in
# float32; in half precision the weight and a float32 gradient, and shared out a copy and the moments in float32.
_FULL, _HALF = (16, 0), (6, 12)


@serializable
@dataclass(frozen=True, kw_only=True)
class MachineSpeeds:
    """What a machine does besides the model.

    Values (of activations) a second: encode and decode of quantized packets, cast of others. disk_bytes_s: of the
    message store, reading and writing each. average: seconds of quantizing, reducing and decoding a gradient value.
    `math.inf` and nothing where they are not known: they count as no time.
    """

    encode_values_s: float = math.inf
    decode_values_s: float = math.inf
    cast_values_s: float = math.inf
    disk_bytes_s: float = math.inf
    average: Mapping[str, float] = field(default_factory=dict)
    update_s_per_parameter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is to be trained. plan: the cuts. tied: values of each tied weight, in the order of `plan.tied`.

    slowdowns: how many times the profile's seconds each stage's machine takes; empty where all are alike.
    """

    profile: Profile
    plan: SplitPlan
    samples: int
    micro_batches: int
    replicas: int = 1
    dtype: torch.dtype = torch.float32
    tied: tuple[int, ...] = ()
    slowdowns: tuple[float, ...] = ()

    def stage_seconds(self) -> list[tuple[float, float]]:
        """Tell forward and backward of each stage on a micro-batch."""
        found = self.profile.stage_seconds(self.plan, self.samples)
        slowdowns = self.slowdowns or (1.0,) * len(found)
        return [
            (slowdown * forward, slowdown * backward)
            for slowdown, (forward, backward) in zip(slowdowns, found, strict=True)
        ]

    @property
    def batch(self) -> int:
        """Count the samples of a step."""
        return self.samples * self.micro_batches * self.replicas

    def text(self) -> str:
        """Describe it for people."""
        return (
            f"{format_count(self.plan.num_stages, 'stage')} × {format_count(self.replicas, 'replica')}, "
            f"{self.micro_batches} micro-batches of {self.samples} for {self.batch} samples per step, "
            f"{self.profile.tokens} tokens each."
        )


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Of one step. step_s; first_epoch_s: while every sample is new.

    forward_bytes, backward_bytes and first_visit_bytes: of a packet on each link. average_s: of its gradients over
    replicas, the slowest stage. tied_s: of those of tied weights, over all stages that hold them. slack: forwards in
    flight that each stage has more than the next. wait_s: of each stage, for packets. store_s: what the disk needs for
    the activations of a step; the step takes no less.
    """

    job: TrainingJob
    config: Config
    step_s: float
    first_epoch_s: float
    forward_bytes: tuple[int, ...]
    first_visit_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    average_s: float
    tied_s: float
    slack: int
    wait_s: tuple[float, ...]
    store_s: float

    @property
    def samples_per_s(self) -> float:
        """Count the samples that are trained in a second."""
        return self.job.batch / self.step_s

    def memory_bytes(self) -> list[float]:
        """Count the bytes of each stage, as `memory_bytes` does, and what averaging its gradients keeps.

        With local steps these are common weights and an outer momentum, with "double_squeeze" residuals.
        """
        local = self.config.gradients.local
        more = 0 if local is None else 8 if local.outer.momentum else 4  # in float32
        held = memory_bytes(self.job, self.slack)
        residuals = _residual_bytes(self.job, self.config)
        return [
            size + more * values + kept
            for size, values, kept in zip(held, self.job.plan.parameters, residuals, strict=True)
        ]


def memory_bytes(job: TrainingJob, slack: int = 1) -> list[float]:
    """Count the bytes of each stage: weights, gradients, Adam's state, and what it keeps of micro-batches in flight.

    Where blocks are recomputed a stage also has what one of them keeps, of the micro-batch whose backward runs.
    """
    ahead = in_flight_counts(slack, job.plan.num_stages, job.micro_batches)
    kept = job.profile.kept_bytes(job.plan, job.samples)
    held, shared = _FULL if job.dtype == torch.float32 else _HALF
    state, again = held + shared / job.replicas, job.samples * job.profile.again_bytes
    return [
        state * values + flying * each + again
        for values, flying, each in zip(job.plan.parameters, ahead, kept, strict=True)
    ]


def _residual_bytes(job: TrainingJob, config: Config) -> list[float]:
    """Count the bytes of each stage's error-feedback residuals: a worker's, and those of its share as an owner."""
    found = [0.0] * job.plan.num_stages
    if config.gradients.method != "double_squeeze":
        return found
    for group, values in zip(job.plan.tied, job.tied, strict=True):
        for stage in group.stages:
            found[stage] += 4 * values * (1 + 1 / (job.replicas * len(group.stages)))
    if job.replicas == 1:
        return found
    return [kept + 4 * values * (1 + 1 / job.replicas) for kept, values in zip(found, _untied(job), strict=True)]


def _untied(job: TrainingJob) -> list[int]:
    """Count the values of each stage that no other stage holds."""
    left = list(job.plan.parameters)
    for group, values in zip(job.plan.tied, job.tied, strict=True):
        for stage in group.stages:
            left[stage] -= values
    return left


def packet_sizes(job: TrainingJob, config: Config) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Count the bytes of a micro-batch's packets on each link: forward, forward of new samples, and backward."""
    size = ([job.profile.tokens] * job.samples, job.profile.hidden, job.dtype)
    links = range(job.plan.num_stages - 1)
    forward = tuple(activation_bytes(config, k, *size) for k in links)
    first_visit = tuple(activation_bytes(config, k, *size, first_visit=True) for k in links)
    return forward, first_visit, tuple(gradient_bytes(config, k, *size) for k in links)


def predict(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds | None = None
) -> StepPrediction:
    """Play a step of this job under a configuration. ConfigError for what does not fit together.

    Where bits follow an error every packet counts with the most, so that a step takes at most as long.
    """
    speeds = speeds or MachineSpeeds()
    values = job.samples * job.profile.tokens * job.profile.hidden
    links = job.plan.num_stages - 1
    forward, first, backward = packet_sizes(job, config)
    average = _averages(job, config, network, speeds)
    tied_s = tied_seconds(job, config, network, speeds)
    step = StepSpec(
        stages=_costs(job, config, speeds, values, average),
        micro_batches=job.micro_batches,
        forward_bytes=forward,
        backward_bytes=backward,
        together_s=tied_s + _together(job, network),
    )
    local = config.gradients.local
    if local is not None and local.overlap:
        step = _with_what_shows(step, local, network, config.in_flight)
        average = [costs.reduce_s for costs in step.stages]
    slack, played = best_in_flight(step, network, config.in_flight)
    store_s = 0.0
    if config.activations.method == "aqsgd" and links:
        ends = 2 if links > 1 else 1  # a middle stage keeps both its links' activations
        held = 2 if config.activations.backward_method == "delta" else 1  # of a sample: its gradient too
        written = held * job.micro_batches * values * config.store.bits / 8
        if config.store.clusters is not None:
            written = 4 * config.store.clusters * job.profile.hidden  # at most: all centers, whoever moves them
        store_s = ends * written / speeds.disk_bytes_s
    first_epoch_s = played.seconds
    first_backward = _first_gradients(job, config)
    if (first, first_backward) != (forward, backward):
        whole = replace(step, forward_bytes=first, backward_bytes=first_backward)
        first_epoch_s = best_in_flight(whole, network, config.in_flight)[1].seconds
    return StepPrediction(
        job=job,
        config=config,
        step_s=max(played.seconds, store_s),
        first_epoch_s=max(first_epoch_s, store_s),
        forward_bytes=forward,
        first_visit_bytes=first,
        backward_bytes=backward,
        average_s=max(average, default=0.0),
        tied_s=tied_s,
        slack=slack,
        wait_s=played.waits,
        store_s=store_s,
    )


def _first_gradients(job: TrainingJob, config: Config) -> tuple[int, ...]:
    """Count the bytes of a micro-batch's gradients on each link, of samples that are new there."""
    size = ([job.profile.tokens] * job.samples, job.profile.hidden, job.dtype)
    return tuple(gradient_bytes(config, k, *size, first_visit=True) for k in range(job.plan.num_stages - 1))


def best_in_flight(step: StepSpec, network: LinkNetwork, setting: str | int = "auto") -> tuple[int, SimulatedStep]:
    """Find how far ahead the stages run, and the step with it: as long as each link having one more shortens it."""
    K, M = len(step.stages), step.micro_batches
    if K == 1:
        return 1, simulate_step(step, network)
    if isinstance(setting, int):
        slack = max(1, (setting - 1) // (K - 1))
        return slack, simulate_step(replace(step, in_flight=in_flight_counts(slack, K, M)), network)
    slack, best = 1, simulate_step(replace(step, in_flight=in_flight_counts(1, K, M)), network)
    while in_flight_counts(slack, K, M)[0] < M:
        more = simulate_step(replace(step, in_flight=in_flight_counts(slack + 1, K, M)), network)
        if more.seconds > _WORTH * best.seconds:
            break
        slack, best = slack + 1, more
    return slack, best


def _costs(
    job: TrainingJob, config: Config, speeds: MachineSpeeds, values: int, average: list[float]
) -> list[StageCosts]:
    quantized = config.activations.method in config.activations.QUANTIZED
    encode_s = values / (speeds.encode_values_s if quantized else speeds.cast_values_s)
    decode_s = values / (speeds.decode_values_s if quantized else speeds.cast_values_s)
    seconds = job.stage_seconds()
    return [
        StageCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            encode_s=encode_s,
            decode_s=decode_s,
            reduce_s=reduce_s,
            update_s=parameters * speeds.update_s_per_parameter,
        )
        for (forward_s, backward_s), reduce_s, parameters in zip(seconds, average, job.plan.parameters, strict=True)
    ]


def _averages(job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds) -> list[float]:
    """Seconds of averaging each stage's gradients over replicas, without tied weights' where these are compressed.

    With local steps it is their share of an outer step, in which tied weights are, too.
    """
    local = config.gradients.local
    if local is not None and local.local_steps > 1:
        found = [average_seconds(config, d, job.replicas, network, speeds) for d in job.plan.parameters]
        return [seconds / local.local_steps for seconds in found]
    averaged = job.plan.parameters if config.gradients.method == "none" else _untied(job)
    return [
        average_seconds(config, d, job.replicas, network, speeds, job.dtype) + _gather_seconds(job, whole, network)
        for d, whole in zip(averaged, job.plan.parameters, strict=True)
    ]


def _gather_seconds(job: TrainingJob, d: int, network: LinkNetwork) -> float:
    """Predict what replicas of half precision send each other of d weights, as each of them updates a part (ZeRO 1)."""
    n = job.replicas
    if n == 1 or job.dtype == torch.float32:
        return 0.0
    return (n - 1) * (8 * d * job.dtype.itemsize / n / min(network.slowest, 1e15) + network.latency_s)


def tied_seconds(job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds) -> float:
    """Predict summing the gradients of tied weights over all that hold them.

    Uncompressed it is over one replica's stages, before DeepSpeed averages all gradients over replicas, and with local
    steps over these alone. In fp16 DeepSpeed sums in that, in bf16 in float32.
    """
    local = config.gradients.local
    alone = config.gradients.method == "none" or (local is not None and local.local_steps > 1)
    replicas = 1 if alone else job.replicas
    dtype = torch.float16 if job.dtype == torch.float16 else torch.float32
    return sum(
        average_seconds(config, values, replicas * len(group.stages), network, speeds, dtype)
        for group, values in zip(job.plan.tied, job.tied, strict=True)
    )


def _with_what_shows(step: StepSpec, local: LocalSteps, network: LinkNetwork, in_flight: str | int) -> StepSpec:
    """Leave of each stage's averaging what its fragments do not hide: they travel while the links are idle."""
    free = replace(step, stages=[replace(costs, reduce_s=0.0) for costs in step.stages])
    step_s = best_in_flight(free, network, in_flight)[1].seconds
    lines = [
        *zip(network.forward, step.forward_bytes, strict=True),
        *zip(network.backward, step.backward_bytes, strict=True),
    ]
    busy_s = max((step.micro_batches * 8 * size / line.bits_per_s for line, size in lines), default=0.0)
    hidden_s = max(0.0, step_s - busy_s) * min(1.0, local.fragments * local.overlap / local.local_steps)
    return replace(step, stages=[replace(costs, reduce_s=max(0.0, costs.reduce_s - hidden_s)) for costs in step.stages])


def average_seconds(
    config: Config, d: int, n: int, network: LinkNetwork, speeds: MachineSpeeds, dtype: torch.dtype = torch.float32
) -> float:
    """Predict averaging d values over n ranks, as `pipecomp.allreduce.predict` plays it; 0 for one rank.

    The slowest of the network's lines carries it. "quantized_adam" is taken as what exchanges its momentum. dtype: in
    which they travel uncompressed.
    """
    if n == 1 or d == 0:
        return 0.0
    given = config.gradients.of_average()
    if given["method"] == "none":
        d = d * dtype.itemsize // 4
    kernels = {part: d * s for part, s in speeds.average.items()} if given["method"] != "none" else {}
    bits_per_s = min(network.slowest, 1e15)
    found = predict_average(
        d=d, n=n, bandwidth_bit_per_s=bits_per_s, latency_s=network.latency_s, kernel_seconds=kernels, **given
    )
    return float(found.total_s)


def _together(job: TrainingJob, network: LinkNetwork) -> float:
    """Count the seconds of summing the global norm in a ring over the stages and of telling all the loss."""
    hops = 2 * (job.plan.num_stages - 1) + 1 if job.plan.num_stages > 1 else 0
    return hops * network.latency_s


def as_row(prediction: StepPrediction) -> dict[str, Any]:
    """Give it for JSON and tables."""
    p, a = prediction, prediction.config.activations
    quantized = a.method in a.QUANTIZED
    return {
        "stages": p.job.plan.num_stages,
        "replicas": p.job.replicas,
        "micro_batch": p.job.samples,
        "micro_batches": p.job.micro_batches,
        "method": a.method,
        "forward_bits": a.forward_bits if quantized else None,
        "backward_bits": a.backward_bits if quantized else None,
        "gradients": p.config.gradients.method,
        "local_steps": p.config.gradients.local_steps,
        "step_s": p.step_s,
        "first_epoch_s": p.first_epoch_s,
        "samples_per_s": p.samples_per_s,
        "forward_bytes": list(p.forward_bytes),
        "first_visit_bytes": list(p.first_visit_bytes),
        "backward_bytes": list(p.backward_bytes),
        "average_s": p.average_s,
        "tied_s": p.tied_s,
        "wait_s": list(p.wait_s),
        "store_s": p.store_s,
        "in_flight": list(in_flight_counts(p.slack, p.job.plan.num_stages, p.job.micro_batches)),
        "memory_bytes": p.memory_bytes(),
    }
