"""Bits chosen when a run begins: every rank measures, rank 0 decides for all.

"auto" becomes a constant error whose maximum of bits hides behind compute on the measured links. An error within a rate
(`mbit_per_s`) keeps its error, and gets the maximum that hides at that rate. Nothing is measured later: the bits of a
packet follow from its values alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, Activations, Bits, ConstantError, bits_of_link, each_link, per_link
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.kernels.staging import Staging
from pipecomp.plan.measure import measure_links, network_of, time_link, time_stage, widest
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.prediction import Estimate, best_in_flight
from pipecomp.plan.profile import max_tokens
from pipecomp.plan.search import WORTHWHILE, choose_bits, constant_error_bits
from pipecomp.plan.simulation import TCP_SHARE, Channel, LinkNetwork, StageCosts, StepSpec
from pipecomp.stages.link.transport import Transport
from pipecomp.stages.partition.stage import Stage
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_rate

# Forward bits that cost at most 1 % of the loss with dropout 0.1, Hugging Face's default; scales of channels need one
# less, with the gain of the least error.
MIN_BITS_WITH_DROPOUT = 3
MIN_BITS_OF_CLASSIFIERS = 4
SAMPLES_READ = 32  # samples whose length is looked at
_CLASSIFIERS = ("Classification", "MaskedLM")  # hub encoders are masked language models before they get a class head
_NEGLIGIBLE_DROPOUT = 0.01
_ADAPTER_DROPOUT = "lora_dropout"  # 2 bits forward, 4 back lose 0.2 to 0.5 % there: benchmarks/results/shootout.md
_DEFAULT_TOKENS = 512
_log = logging.getLogger(__name__)


# -- dropout

# Note: with dropout a sample's activation changes from visit to visit by its mask, too, so that the deltas that AQ-SGD
# sends are larger, and so is the error of the same number of bits. The loss that this costs is measured:
# benchmarks/results/scales.md, and for more bits with scales of tokens convergence.md and shootout.md.


def dropout_of(module: nn.Module) -> float:
    """Return the largest dropout of a model, without that of LoRA adapters, which changes activations little.

    It counts modules, and numbers of modules that call the function, as attention does.
    """
    shares = [0.0]
    for name, part in module.named_modules():
        if _ADAPTER_DROPOUT in name:
            continue
        if isinstance(part, _DropoutNd):
            shares.append(float(part.p))
        else:
            shares += [v for key, v in vars(part).items() if "dropout" in key and isinstance(v, float) and 0 <= v < 1]
    return max(shares)


def _min_bits(module: nn.Module, settings: Config) -> int:
    plan = getattr(module, "plan", None)  # of a Stage
    name = type(module).__name__ if plan is None else plan.model_class
    bits = MIN_BITS_OF_CLASSIFIERS if any(kind in name for kind in _CLASSIFIERS) else MIN_BITS_WITH_DROPOUT
    a = settings.activations
    gain = a.gain if isinstance(a.gain, str) else a.gain.forward
    return bits - (a.scale_of("forward") in ("auto", "channels") and gain != "unbiased")


def has_dropout(module: nn.Module, dropout: float | None = None) -> bool:
    """Return True if a model or stage trains with more than negligible dropout. dropout: None for the model's own."""
    return (dropout_of(module) if dropout is None else dropout) >= _NEGLIGIBLE_DROPOUT


def _dropout_matters(dropout: float, settings: Config) -> bool:
    """Return True if deltas between visits of a sample, which have different masks, are sent."""
    return dropout >= _NEGLIGIBLE_DROPOUT and settings.activations.method == "aqsgd" and settings.store.clusters is None


def fewest_bits(module: nn.Module, settings: Config, dropout: float | None = None) -> int:
    """Return the lower limit of "auto" forward bits for a model or stage. dropout: None for the model's own."""
    share = dropout_of(module) if dropout is None else dropout
    return _min_bits(module, settings) if _dropout_matters(share, settings) else FEWEST["forward_bits"]


def dropout_advice(dropout: float, settings: Config, fewest: int = MIN_BITS_WITH_DROPOUT) -> str | None:
    """Return a warning for fewer than the `fewest` forward bits with dropout; None if there is none.

    Constant errors count with their maximum of bits.
    """
    bits = min(
        each.max if isinstance(each, ConstantError) else each for each in each_link(settings.activations.forward_bits)
    )
    if not _dropout_matters(dropout, settings) or bits >= fewest:
        return None
    return (
        f"this model trains with dropout {dropout:g}, which makes the deltas of AQ-SGD larger: "
        f"activations.forward_bits {bits} may cost more than 1 % of the loss. Use {fewest} or more, "
        '{"error": 0.05}, which takes as many as are needed, or no dropout (`--dropout 0` of a recipe)'
    )


def warn_of_dropout(module: nn.Module, settings: Config) -> None:
    """Log `dropout_advice`, if there is any, at a level that Python shows by default."""
    text = dropout_advice(dropout_of(module), settings, _min_bits(module, settings))
    if text is not None:
        _log.warning("%s", text)


def settle_scales(settings: Config, module: nn.Module, stage: int, tokens: Callable[[], int]) -> Config:
    """Return the settings with "auto" of `activations.scale` and of `gain` settled; all ranks call it together.

    A link whose values pass dropout in a stage before it takes the gain with the least error, which averages masks;
    others take an unbiased one, which keeps what evaluation expects.

    Args:
        settings: The run's configuration.
        module: This rank's stage.
        stage: Its number.
        tokens: Called, if it matters, for the tokens of this rank's packets; the most of all ranks count.
    """
    a = settings.activations
    automatic = "auto" in (a.scale_of("forward"), a.scale_of("backward"))
    if not automatic and "channels" not in a.scale_of("forward"):
        return settings
    gpu = any(weight.is_cuda for weight in module.parameters())
    ranks = gathered((stage, has_dropout(module), tokens() if automatic else 0, gpu))
    a = a.with_scales(max(rank[2] for rank in ranks), gpu=any(rank[3] for rank in ranks))
    if "channels" in a.scale_of("forward"):
        first = min((rank[0] for rank in ranks if rank[1]), default=math.inf)
        a = a.with_dropout(first <= link for link in range(max(rank[0] for rank in ranks)))
    return settings.replace(activations=a)


# -- measuring


@serializable
class RankMeasurement(NamedTuple):
    """Measurements of one rank.

    Attributes:
        stage: Its stage.
        costs: Seconds of its stage and of packets.
        link: The link to the next stage; None on the last stage, and where rates are given.
        fewest: Lower limit of "auto" forward bits for the stage's dropout.
        spread: Spread of the stage's seconds, see `StageTime`.
    """

    stage: int
    costs: StageCosts
    link: LinkMeasurement | None
    fewest: int = FEWEST["forward_bits"]
    spread: tuple[float, float] = (1.0, 1.0)


class BatchShape(NamedTuple):
    """A step of one replica: samples per micro-batch, tokens per sample, micro-batches."""

    samples: int
    tokens: int
    micro_batches: int


@serializable
class BitsDecision(NamedTuple):
    """Chosen bits, a sentence with the predictions behind them, and the links if they were measured."""

    forward_bits: Bits
    backward_bits: Bits
    reason: str
    network: LinkNetwork | None = None


def needs_measuring(config: Config) -> bool:
    """Return whether bits are chosen when the run begins."""
    return any(config.activations.measured(key) for key in FEWEST)


def sample_length(data: Any, stage: Stage) -> int:
    """Return the tokens of the longest of the first samples; without data 512, as costs grow in proportion."""
    try:
        return max(len(data[i]["input_ids"]) for i in range(min(SAMPLES_READ, len(data))))
    except (TypeError, KeyError, IndexError, ValueError):
        return min(_DEFAULT_TOKENS, max_tokens(stage.config) or _DEFAULT_TOKENS)


def choose_auto_bits(
    config: Config,
    stage: Stage,
    batch: BatchShape,
    to_previous: Transport | None = None,
    to_next: Transport | None = None,
    *,
    staging: Staging | None = None,
) -> tuple[Config, LinkNetwork | None]:
    """Replace "auto" and rates by bits that hide behind compute; all ranks must call it together.

    Args:
        config: The run's configuration.
        stage: This rank's stage.
        batch: The run's batch.
        to_previous: Transport to the previous stage.
        to_next: Transport to the next stage.
        staging: Copies of the run, whose pinned memory is used; by default one of its own.

    Returns:
        The configuration with numbers and constant errors, and the links if they were measured. Rank 0 logs the reason.
    """
    measurements = gathered(measure_rank(config, stage, batch, to_previous, to_next, staging))
    decision = None
    if dist.get_rank() == 0:
        lowest = stage.plan.lowest_trained
        decision = decide_bits(config, measurements, batch, stage.hidden_size, stage.dtype, lowest)
        _log.warning("%s", decision.reason)  # Python shows this level by default
    decision = broadcast(decision)
    return with_bits(config, decision.forward_bits, decision.backward_bits), decision.network


def measure_rank(
    config: Config,
    stage: Stage,
    batch: BatchShape,
    to_previous: Transport | None,
    to_next: Transport | None,
    staging: Staging | None,
) -> RankMeasurement:
    """Measure this rank's stage and packets, and its links if a direction is "auto"; all ranks call it together."""
    auto = "auto" in (config.activations.forward_bits, config.activations.backward_bits)
    link = measure_links(stage.index, to_previous, to_next) if auto else None
    sends_gradients = stage.index > stage.plan.lowest_trained
    spent = time_stage(stage, batch.samples, batch.tokens, sends_gradients=sends_gradients)
    weight = next(stage.parameters())
    most = [_chosen(config.activations, key, 8, 1) for key in FEWEST]
    size = (batch.samples, batch.tokens, stage.hidden_size, stage.dtype, weight.device)
    encode_s, decode_s = time_link(with_bits(config, *most), *size, staging=staging)
    costs = StageCosts(forward_s=spent.forward_s, backward_s=spent.backward_s, encode_s=encode_s, decode_s=decode_s)
    return RankMeasurement(stage.index, costs, link, fewest_bits(stage, config), spent.spread)


# -- deciding


def decide_bits(
    config: Config,
    measurements: Sequence[RankMeasurement],
    batch: BatchShape,
    hidden: int,
    dtype: torch.dtype,
    lowest: int = 0,
) -> BitsDecision:
    """Choose bits from the measurements of all ranks. The slowest replica counts; fixed numbers are not changed.

    lowest: `SplitPlan.lowest_trained`.
    """
    K = 1 + max(m.stage for m in measurements)
    by_stage = [[m for m in measurements if m.stage == k] for k in range(K)]
    a = config.activations
    links = [[m.link for m in by_stage[k] if m.link is not None] for k in range(K - 1)]
    network = _network(a, links)
    parts = ("forward_s", "backward_s", "encode_s", "decode_s")
    stages = [
        StageCosts(**{part: max(getattr(m.costs, part) for m in replicas) for part in parts}) for replicas in by_stage
    ]
    counts = [batch.tokens] * batch.samples
    compute = widest([m.spread for m in measurements])

    def simulated(candidate: Config, slowness: float, links: LinkNetwork) -> float:
        step = StepSpec(
            stages=[StageCosts(**{part: slowness * getattr(costs, part) for part in parts}) for costs in stages],
            micro_batches=batch.micro_batches,
            forward_bytes=[activation_bytes(candidate, k, counts, hidden, dtype) for k in range(K - 1)],
            backward_bytes=[
                gradient_bytes(candidate, k, counts, hidden, dtype) if k >= lowest else 0 for k in range(K - 1)
            ],
            lowest=lowest,
        )
        return best_in_flight(step, links, config.in_flight)[1].seconds

    def predicted(candidate: Config) -> Estimate:
        seconds = simulated(candidate, 1.0, network)
        if compute == network.spread == (1.0, 1.0):
            return Estimate.of(seconds)
        best, worst = ((compute[end], network.scaled(network.spread[1 - end])) for end in (0, 1))
        return Estimate(min(seconds, simulated(candidate, *best)), seconds, max(seconds, simulated(candidate, *worst)))

    fewest = max(m.fewest for m in measurements)
    *most, fits = choose_bits(
        lambda f, b: predicted(with_bits(config, f, b)), network, a.forward_bits, a.backward_bits, fewest
    )
    f, b = (_chosen(a, key, bits, K - 1, fewest) for key, bits in zip(FEWEST, most, strict=True))
    step, plain = predicted(with_bits(config, f, b)), predicted(Config())
    rates_known = all(channel.bits_per_s < math.inf for channel in network.channels)
    if rates_known and (plain.seconds <= WORTHWHILE * step.seconds or plain.reaches(step)):
        why = "links so fast that method 'none' would do as well"
    elif fits:
        why = "the most that compute time hides"
    else:
        why = "no more, as the slowest link is the limit"
    setting = "'auto'" if "auto" in (a.forward_bits, a.backward_bits) else "within the links' rates"
    reason = (
        f"bits {setting}: {_bits_text(f, 'forward')}, {_bits_text(b, 'back')}: {why} (at most {step} per step "
        f"predicted, {plain} uncompressed; slowest link {format_rate(network.slowest)})"
    )
    return BitsDecision(f, b, reason, network_of(links) if links and all(links) else None)


def _network(a: Activations, links: Sequence[Sequence[LinkMeasurement]]) -> LinkNetwork:
    """Make the network from measured links and given rates; a direction with neither is unlimited."""
    unlimited = (Channel(),) * len(links)
    measured = network_of(links) if all(links) else LinkNetwork(forward=unlimited, backward=unlimited)

    def channels(key: str, of_links: Sequence[Channel]) -> tuple[Channel, ...]:
        rates = [getattr(bits_of_link(getattr(a, key), k), "mbit_per_s", None) for k in range(len(of_links))]
        return tuple(
            channel if rate is None else replace(channel, bits_per_s=1e6 * rate * TCP_SHARE)
            for rate, channel in zip(rates, of_links, strict=True)
        )

    return LinkNetwork(
        forward=channels("forward_bits", measured.forward),
        backward=channels("backward_bits", measured.backward),
        spread=measured.spread,
    )


def _chosen(a: Activations, key: str, most: Bits, links: int, fewest: int = FEWEST["forward_bits"]) -> Bits:
    """Return a direction's setting with the chosen maximum of bits per link. fewest: of "auto" forward."""
    setting = getattr(a, key)
    if not a.measured(key):
        return setting
    if setting == "auto":
        if key == "backward_bits" and a.backward_top_k is not None:
            return most  # the error comes from the dropped values
        return constant_error_bits(key, most, fewest)

    def limited(bits: Any, maximum: Any) -> int | ConstantError:
        return bits.at_most(maximum) if isinstance(bits, ConstantError) else int(bits)

    return per_link(limited(bits_of_link(setting, k), bits_of_link(most, k)) for k in range(links))


def _bits_text(bits: Bits, direction: str) -> str:
    """Write "2 to 4 forward (error 0.07)", "2 to 4/2 to 8 back (error 0.1)" or "3 forward"."""
    every = each_link(bits)
    counts = "/".join(f"{e.min} to {e.max}" if isinstance(e, ConstantError) else str(e) for e in every)
    errors = "/".join(dict.fromkeys(f"{e.error:g}" for e in every if isinstance(e, ConstantError)))
    return f"{counts} {direction}" + (f" (error {errors})" if errors else "")
