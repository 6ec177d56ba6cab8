"""Prediction for one configuration: bytes of packets, seconds of a step, memory of every stage.

K stages, M micro-batches of B samples with S tokens, R replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from pipecomp.allreduce import predict as predict_average
from pipecomp.config import Config
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.plan.profile import Profile
from pipecomp.plan.simulation import (
    Channel,
    LinkNetwork,
    SharedCores,
    SimulatedStep,
    StageCosts,
    StepSpec,
    simulate_step,
)
from pipecomp.rank_layout import STAGES_ACROSS, RankLayout
from pipecomp.schedule import in_flight_counts, slack_of
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.utils.processes import LARGE_BLOCK
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_count

NEARLY_EQUAL = 1.02  # seconds that differ by at most this factor count as equal
_SHORTER = 0.99  # factor by which one more micro-batch in flight must shorten a step
# Bytes per parameter on each replica, and bytes that replicas share: weight, gradient and Adam's two moments in
# float32; in half precision the weight and a float32 gradient, and a shared float32 copy and moments (ZeRO 1).
_FULL_PRECISION, _HALF_PRECISION = (16, 0), (6, 12)
# Of a micro-batch's activations: what freed tensors leave in the heap, where an aligned block of glibc's does not fit
# into the place of one of the same size (benchmarks/planned.py). Tensors of LARGE_BLOCK and more are given back.
HEAP_SHARE = 1.5
_WIDEST = 4  # an MLP's hidden values, as a multiple of the model's
RUNTIME_BYTES = 0.5e9
"""A process with torch, DeepSpeed and transformers before it has a model: benchmarks/planned.py."""


class Estimate(NamedTuple):
    """Seconds, and the least and the most that the measurements behind them allow."""

    low_s: float
    seconds: float
    high_s: float

    @classmethod
    def of(cls, seconds: float, spread: tuple[float, float] = (1.0, 1.0)) -> Estimate:
        """Make an estimate from seconds and the factors of a spread."""
        return cls(spread[0] * seconds, seconds, spread[1] * seconds)

    def reaches(self, faster: Estimate) -> bool:
        """Return whether these seconds cannot be told from those of a faster plan: spreads overlap, or 2 % differ."""
        return self.low_s <= faster.high_s or self.seconds <= NEARLY_EQUAL * faster.seconds

    def __str__(self) -> str:
        """Format as "3.1–3.4 s", or "3.24 s" where both ends look the same."""
        low, high = (f"{seconds:.2g}" for seconds in (self.low_s, self.high_s))
        return f"{self.seconds:.3g} s" if low == high else f"{low}–{high} s"


@serializable
@dataclass(frozen=True, kw_only=True)
class MachineSpeeds:
    """Speeds of a machine besides the model's; the defaults count as no time.

    Attributes:
        encode_values_s: Activation values encoded per second by a quantizing method.
        decode_values_s: The same for decoding.
        cast_values_s: Values cast per second by other methods, to send or to receive.
        disk_bytes_s: Bytes per second of the message store's disk, each byte written once and read once.
        disk_spread: Lowest and highest measurement of the disk, as factors of `disk_bytes_s`.
        average: Seconds per gradient value to "quantize", "reduce" and "decode".
        update_s_per_parameter: Seconds of the optimizer.
        accumulate_s_per_parameter: Seconds of adding a micro-batch's gradients to those before it.
    """

    encode_values_s: float = math.inf
    decode_values_s: float = math.inf
    cast_values_s: float = math.inf
    disk_bytes_s: float = math.inf
    disk_spread: tuple[float, float] = (1.0, 1.0)
    average: Mapping[str, float] = field(default_factory=dict)
    update_s_per_parameter: float = 0.0
    accumulate_s_per_parameter: float = 0.0

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> MachineSpeeds:
        """Read speeds from JSON; None is an infinite rate. Raises TypeError or ValueError for what cannot be read."""
        values: dict[str, Any] = {name: math.inf if value is None else value for name, value in stored.items()}
        if "disk_spread" in values:
            lowest, highest = values["disk_spread"]
            values["disk_spread"] = (lowest, highest)
        return cls(**values)

    def scaled(self, factor: float, disk: float = 1.0) -> MachineSpeeds:
        """Return the speeds, without spread, of a machine whose processor takes `factor` times as long.

        disk: Factor of the disk's rate.
        """
        rates = ("encode_values_s", "decode_values_s", "cast_values_s")
        return replace(
            self,
            **{rate: getattr(self, rate) / factor for rate in rates},
            disk_bytes_s=disk * self.disk_bytes_s,
            disk_spread=(1.0, 1.0),
            average={part: factor * seconds for part, seconds in self.average.items()},
            update_s_per_parameter=factor * self.update_s_per_parameter,
            accumulate_s_per_parameter=factor * self.accumulate_s_per_parameter,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Model, layout and batch of a training.

    Attributes:
        profile: Seconds and memory of the model's blocks.
        plan: Cuts of the model.
        samples: Samples per micro-batch.
        micro_batches: Micro-batches per step and replica.
        replicas: Replicas of the pipeline.
        dtype: Training precision.
        tied: Values of each tied weight, in the order of `plan.tied`.
        slowdowns: Each stage's seconds as a multiple of the profile's; empty if all are equal.
        shared_cores: Stages of a replica that compute on the same cores.
        layout: Order of the ranks.
    """

    profile: Profile
    plan: SplitPlan
    samples: int
    micro_batches: int
    replicas: int = 1
    dtype: torch.dtype = torch.float32
    tied: tuple[int, ...] = ()
    slowdowns: tuple[float, ...] = ()
    shared_cores: tuple[SharedCores, ...] = ()
    layout: str = STAGES_ACROSS

    @property
    def ranks(self) -> RankLayout:
        """The ranks of stages and replicas."""
        return RankLayout(self.plan.num_stages, self.replicas, self.layout)

    def stage_seconds(self) -> list[tuple[float, float]]:
        """Return forward and backward seconds of each stage per micro-batch."""
        seconds = self.profile.stage_seconds(self.plan, self.samples)
        slowdowns = self.slowdowns or (1.0,) * len(seconds)
        return [(factor * f, factor * b) for factor, (f, b) in zip(slowdowns, seconds, strict=True)]

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.samples * self.micro_batches * self.replicas

    def text(self) -> str:
        """Describe the job in a sentence."""
        return (
            f"{format_count(self.plan.num_stages, 'stage')} × {format_count(self.replicas, 'replica')}, "
            f"{self.micro_batches} micro-batches of {self.samples} for {self.batch} samples per step, "
            f"{self.profile.tokens} tokens each.{self._trained_text()}"
        )

    def _trained_text(self) -> str:
        trained, parameters = sum(self.plan.trained), sum(self.plan.parameters)
        if trained == parameters:
            return ""
        return f" {trained / 1e6:.2f} M of {parameters / 1e6:.1f} M parameters are trained."

    def untied_parameters(self) -> list[int]:
        """Return the number of trained values of each stage that no other stage holds."""
        left = list(self.plan.trained)
        for group, values in zip(self.plan.tied, self.tied, strict=True):
            for stage in group.stages:
                left[stage] -= values
        return left


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Prediction of one step.

    Attributes:
        job: The training job.
        config: Its configuration.
        step_s: Seconds of a step.
        first_epoch_s: Seconds of a step while every sample is new.
        forward_bytes: Bytes of an activation packet on each link.
        first_visit_bytes: The same while every sample is new.
        backward_bytes: Bytes of a gradient packet on each link.
        average_s: Seconds of averaging gradients over replicas, on the slowest stage.
        tied_s: Seconds of summing gradients of tied weights over all stages that hold them.
        slack: Forwards in flight that each stage has more than the next.
        wait_s: Seconds that each stage waits for packets.
        store_s: Seconds of the message store's disk per step, a lower limit of `step_s`.
        spread: The least and the most that the measurements of compute, links and disk allow, as factors of `step_s`.
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
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def estimate(self) -> Estimate:
        """Seconds of a step with their spread."""
        return Estimate.of(self.step_s, self.spread)

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.job.batch / self.step_s

    def memory_bytes(self) -> list[float]:
        """Return the bytes of each stage, with the state of averaging: residuals, common weights, outer momentum."""
        local = self.config.gradients.local
        common = 0 if local is None else 8 if local.outer.momentum else 4  # bytes per parameter, in float32
        held = memory_bytes(self.job, self.slack)
        residuals = _residual_bytes(self.job, self.config)
        return [
            size + common * values + kept
            for size, values, kept in zip(held, self.job.plan.trained, residuals, strict=True)
        ]


# -- memory


def memory_bytes(job: TrainingJob, slack: int = 1) -> list[float]:
    """Return the peak bytes of each stage's process.

    They are the process itself, weights, gradients, Adam's state, activations of micro-batches in flight, what the
    forward and backward of one micro-batch need for a moment, and what small tensors leave in the heap. Frozen weights
    have no gradients and no state, and may be quantized. With activation checkpointing they include the activations of
    one block.
    """
    full = job.dtype == torch.float32
    own, shared = _FULL_PRECISION if full else _HALF_PRECISION
    plan, profile = job.plan, job.profile
    counts = in_flight_counts(slack, plan.num_stages, job.micro_batches, plan.lowest_trained)
    kept, working = profile.kept_bytes(plan, job.samples), profile.working_bytes(plan, job.samples)
    again = job.samples * profile.again_bytes
    weights = [
        (own + shared / job.replicas) * n + more for n, more in zip(plan.trained, plan.frozen_bytes, strict=True)
    ]
    small = _WIDEST * job.samples * profile.tokens * profile.hidden * job.dtype.itemsize < LARGE_BLOCK
    heap = HEAP_SHARE if small else 0.0
    activations = [
        (count + heap) * each + (again if each else 0) + moment
        for count, each, moment in zip(counts, kept, working, strict=True)
    ]
    return [RUNTIME_BYTES + a + b for a, b in zip(weights, activations, strict=True)]


def _residual_bytes(job: TrainingJob, config: Config) -> list[float]:
    """Return the bytes of each stage's error-feedback residuals: a worker's, and those of its share as an owner."""
    residuals = [0.0] * job.plan.num_stages
    if config.gradients.method != "double_squeeze":
        return residuals
    for group, values in zip(job.plan.tied, job.tied, strict=True):
        for stage in group.stages:
            residuals[stage] += 4 * values * (1 + 1 / (job.replicas * len(group.stages)))
    if job.replicas == 1:
        return residuals
    untied = job.untied_parameters()
    return [kept + 4 * values * (1 + 1 / job.replicas) for kept, values in zip(residuals, untied, strict=True)]


# -- a step


def packet_sizes(job: TrainingJob, config: Config) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the bytes of a micro-batch's packets on each link: forward, forward of new samples, backward.

    Links to stages below the lowest trained one carry no gradients.
    """
    size = ([job.profile.tokens] * job.samples, job.profile.hidden, job.dtype)
    links = range(job.plan.num_stages - 1)
    forward = tuple(activation_bytes(config, k, *size) for k in links)
    first_visit = tuple(activation_bytes(config, k, *size, first_visit=True) for k in links)
    return forward, first_visit, _gradient_packets(job, config)


def _gradient_packets(job: TrainingJob, config: Config, *, first_visit: bool = False) -> tuple[int, ...]:
    size = ([job.profile.tokens] * job.samples, job.profile.hidden, job.dtype)
    return tuple(
        gradient_bytes(config, k, *size, first_visit=first_visit) if k >= job.plan.lowest_trained else 0
        for k in range(job.plan.num_stages - 1)
    )


def predict(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds | None = None
) -> StepPrediction:
    """Simulate a step of a job under a configuration.

    Packets of constant error count with their maximum of bits, so that the prediction is an upper bound.

    Raises:
        ConfigError: Job, configuration and network do not fit together.
    """
    speeds = speeds or MachineSpeeds()
    values = job.samples * job.profile.tokens * job.profile.hidden
    forward, first_visit, backward = packet_sizes(job, config)
    tied_s = tied_seconds(job, config, network, speeds)
    norm_hops = 2 * (job.plan.num_stages - 1) + 1 if job.plan.num_stages > 1 else 0  # a ring, then the loss to all
    step = StepSpec(
        stages=_stage_costs(job, config, network, speeds, values),
        micro_batches=job.micro_batches,
        forward_bytes=forward,
        backward_bytes=backward,
        lowest=job.plan.lowest_trained,
        together_s=tied_s + norm_hops * network.stage_line.latency_s,
        shared_cores=job.shared_cores,
    )
    local = config.gradients.local
    if local is not None and local.overlap:
        hidden_s = _hidden_seconds(step, network, config)
        stages = [replace(costs, reduce_s=max(0.0, costs.reduce_s - hidden_s)) for costs in step.stages]
        step = replace(step, stages=stages)
    slack, simulated = best_in_flight(step, network, config.in_flight)
    store_s = _store_seconds(job, config, speeds, values)
    first_epoch_s = simulated.seconds
    first_backward = _gradient_packets(job, config, first_visit=True)
    if (first_visit, first_backward) != (forward, backward):
        first_epoch = replace(step, forward_bytes=first_visit, backward_bytes=first_backward)
        first_epoch_s = best_in_flight(first_epoch, network, config.in_flight)[1].seconds
    step_s = max(simulated.seconds, store_s)
    return StepPrediction(
        job=job,
        config=config,
        step_s=step_s,
        spread=_spread(job, config, network, speeds, step_s),
        first_epoch_s=max(first_epoch_s, store_s),
        forward_bytes=forward,
        first_visit_bytes=first_visit,
        backward_bytes=backward,
        average_s=max(costs.reduce_s for costs in step.stages),
        tied_s=tied_s,
        slack=slack,
        wait_s=simulated.waits,
        store_s=store_s,
    )


def _spread(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds, step_s: float
) -> tuple[float, float]:
    """Return the factors of the steps with all that was measured at its best, and at its worst."""
    compute, links, disk = job.profile.spread, network.spread, speeds.disk_spread
    if compute == links == disk == (1.0, 1.0):
        return compute

    def at(slowness: float, rate: float, disk_rate: float) -> float:
        made = replace(job, profile=job.profile.scaled(slowness))
        return predict(made, config, network.scaled(rate), speeds.scaled(slowness, disk_rate)).step_s / step_s

    return min(1.0, at(compute[0], links[1], disk[1])), max(1.0, at(compute[1], links[0], disk[0]))


def best_in_flight(step: StepSpec, network: LinkNetwork, setting: str | int = "auto") -> tuple[int, SimulatedStep]:
    """Return the slack and the step simulated with it.

    "auto" raises the slack (forwards in flight that each stage has more than the next) as long as that shortens the
    step; a number is that of the first stage that has backwards.
    """
    K, M, lowest = len(step.stages), step.micro_batches, step.lowest
    if K - lowest == 1:
        return 1, simulate_step(step, network)

    def simulated(slack: int) -> SimulatedStep:
        return simulate_step(replace(step, in_flight=in_flight_counts(slack, K, M, lowest)), network)

    if isinstance(setting, int):
        slack = slack_of(setting, K, lowest)
        return slack, simulated(slack)
    slack, best = 1, simulated(1)
    while in_flight_counts(slack, K, M, lowest)[lowest] < M:
        more = simulated(slack + 1)
        if more.seconds > _SHORTER * best.seconds:
            break
        slack, best = slack + 1, more
    return slack, best


def _stage_costs(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds, values: int
) -> list[StageCosts]:
    """Return each stage's costs. values: of a micro-batch's activations."""
    quantized = config.activations.method in config.activations.QUANTIZED
    average_s = _average_seconds_by_stage(job, config, network, speeds)
    return [
        StageCosts(
            forward_s=forward_s,
            backward_s=backward_s + parameters * speeds.accumulate_s_per_parameter,
            encode_s=values / (speeds.encode_values_s if quantized else speeds.cast_values_s),
            decode_s=values / (speeds.decode_values_s if quantized else speeds.cast_values_s),
            reduce_s=reduce_s,
            update_s=parameters * speeds.update_s_per_parameter,
        )
        for (forward_s, backward_s), reduce_s, parameters in zip(
            job.stage_seconds(), average_s, job.plan.trained, strict=True
        )
    ]


def _store_seconds(job: TrainingJob, config: Config, speeds: MachineSpeeds, values: int) -> float:
    links = job.plan.num_stages - 1
    if config.activations.method != "aqsgd" or not links:
        return 0.0
    ends = 2 if links > 1 else 1  # a middle stage caches the activations of two links
    cached = 2 if config.activations.backward_method == "delta" else 1  # tensors of a sample: its gradient, too
    written = cached * job.micro_batches * values * config.store.bits / 8
    if config.store.clusters is not None:
        written = 4 * config.store.clusters * job.profile.hidden  # upper bound: all centers move
    return ends * written / speeds.disk_bytes_s


# -- gradients


def _average_seconds_by_stage(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds
) -> list[float]:
    """Return the seconds per step of averaging each stage's gradients over replicas.

    Tied weights that are compressed count in `tied_seconds`; with local steps they are part of the outer step.
    """
    local = config.gradients.local
    if local is not None and local.local_steps > 1:
        outer = [average_seconds(config, d, job.replicas, network, speeds) for d in job.plan.trained]
        return [seconds / local.local_steps for seconds in outer]
    averaged = job.plan.trained if config.gradients.method == "none" else job.untied_parameters()
    return [
        average_seconds(config, d, job.replicas, network, speeds, job.dtype) + _gather_seconds(job, whole, network)
        for d, whole in zip(averaged, job.plan.trained, strict=True)
    ]


def _gather_seconds(job: TrainingJob, d: int, network: LinkNetwork) -> float:
    """Return the seconds of gathering d weights in half precision, as each replica updates a part of them (ZeRO 1)."""
    n = job.replicas
    if n == 1 or job.dtype == torch.float32:
        return 0.0
    line = network.replica_line
    return (n - 1) * (8 * d * job.dtype.itemsize / n / min(line.bits_per_s, 1e15) + line.latency_s)


def tied_seconds(job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds) -> float:
    """Return the seconds of summing the gradients of tied weights over all stages that hold them.

    Without compression the sum is over one replica's stages, as DeepSpeed then averages all gradients over replicas;
    with local steps, too. DeepSpeed sums fp16 gradients in fp16 and bf16 gradients in float32.
    """
    local = config.gradients.local
    alone = config.gradients.method == "none" or (local is not None and local.local_steps > 1)
    replicas = 1 if alone else job.replicas
    dtype = torch.float16 if job.dtype == torch.float16 else torch.float32
    line = network.stage_line
    if replicas > 1:
        rate = min(line.bits_per_s, network.replica_line.bits_per_s)
        line = Channel(bits_per_s=rate, latency_s=max(line.latency_s, network.replica_line.latency_s))
    return sum(
        average_seconds(config, values, replicas * len(group.stages), network, speeds, dtype, line)
        for group, values in zip(job.plan.tied, job.tied, strict=True)
    )


def _hidden_seconds(step: StepSpec, network: LinkNetwork, config: Config) -> float:
    """Return the averaging seconds per step that overlapping fragments hide: those in which the links are idle."""
    local = config.gradients.local
    assert local is not None, "only local steps overlap"
    free = replace(step, stages=[replace(costs, reduce_s=0.0) for costs in step.stages])
    step_s = best_in_flight(free, network, config.in_flight)[1].seconds
    channels = [
        *zip(network.forward, step.forward_bytes, strict=True),
        *zip(network.backward, step.backward_bytes, strict=True),
    ]
    busy_s = max((step.micro_batches * 8 * size / channel.bits_per_s for channel, size in channels), default=0.0)
    return max(0.0, step_s - busy_s) * min(1.0, local.fragments * local.overlap / local.local_steps)


def average_seconds(
    config: Config,
    d: int,
    n: int,
    network: LinkNetwork,
    speeds: MachineSpeeds,
    dtype: torch.dtype = torch.float32,
    line: Channel | None = None,
) -> float:
    """Predict the seconds of averaging d values over n ranks.

    `pipecomp.allreduce.predict` simulates the exchange; "quantized_adam" counts as the exchange of its momentum.
    `dtype` is that of uncompressed values. `line` is by default that between replicas.
    """
    if n == 1 or d == 0:
        return 0.0
    options = config.gradients.state_options()
    if options["method"] == "none":
        d = d * dtype.itemsize // 4
    line = line or network.replica_line
    kernels = {part: d * s for part, s in speeds.average.items()} if options["method"] != "none" else {}
    prediction = predict_average(
        d=d,
        n=n,
        bandwidth_bit_per_s=min(line.bits_per_s, 1e15),
        latency_s=line.latency_s,
        kernel_seconds=kernels,
        **options,
    )
    return float(prediction.total_s)


def as_row(p: StepPrediction) -> dict[str, Any]:
    """Return a prediction as JSON values."""
    a, plan = p.config.activations, p.job.plan
    quantized = a.method in a.QUANTIZED
    row = {
        "stages": p.job.plan.num_stages,
        "replicas": p.job.replicas,
        "layout": p.job.layout,
        "micro_batch": p.job.samples,
        "micro_batches": p.job.micro_batches,
        "method": a.method,
        "forward_bits": a.forward_bits if quantized else None,
        "backward_bits": a.backward_bits if quantized else None,
        "gradients": p.config.gradients.method,
        "local_steps": p.config.gradients.local_steps,
        "in_flight": list(in_flight_counts(p.slack, plan.num_stages, p.job.micro_batches, plan.lowest_trained)),
        "memory_bytes": p.memory_bytes(),
    }
    row |= {
        key: getattr(p, key) for key in ("step_s", "first_epoch_s", "samples_per_s", "average_s", "tied_s", "store_s")
    }
    row["step_range_s"] = [p.estimate.low_s, p.estimate.high_s]
    return row | {
        key: list(getattr(p, key)) for key in ("forward_bytes", "first_visit_bytes", "backward_bytes", "wait_s")
    }
