"""Bits that are found when a run begins: what every rank measures, and the decision that rank 0 makes for all.

"auto" becomes an error whose most bits are those that compute hides on links as they are measured; an error within a
rate (`mbit_per_s`) keeps its error and gets the most bits that compute hides at that rate. Nothing is measured later:
what a packet takes follows from its values alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, Activations, Bits, ConstantError, bits_of_link, each_link, per_link
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.doctor.measure import LinkMeasurement
from pipecomp.kernels.staging import Staging
from pipecomp.plan.measure import measure_links, network_of, time_link, time_stage
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.prediction import best_in_flight
from pipecomp.plan.profile import most_tokens
from pipecomp.plan.search import PAYS, choose_bits, keeping_error
from pipecomp.plan.simulation import TCP_SHARE, Channel, LinkNetwork, StageCosts, StepSpec
from pipecomp.stages.link.transport import Transport
from pipecomp.stages.partition.splitting import Stage
from pipecomp.utils.serialization import serializable
from pipecomp.utils.units import format_rate

# -- How few bits carry the changes of a model with dropout, and a line at the start where there are fewer.

# Forward, that cost at most 1 % of the training loss with dropout 0.1, Hugging Face's default.
FEWEST_BITS = 3
CLASSIFIERS_FEWEST_BITS = 4
_CLASSIFIERS = ("Classification", "MaskedLM")  # the latter are encoders of the hub, before they get a head for classes
_SMALL = 0.01  # dropout that changes hardly anything
_ADAPTERS = "lora_dropout"  # 2 bits forward and 4 back lose 0.2 to 0.5 % there: benchmarks/results/shootout.md
_log = logging.getLogger(__name__)


def dropout_of(module: nn.Module) -> float:
    """Find the largest share that any part of a model drops, but before LoRA's adapters, where it changes little."""
    parts = module.named_modules()
    return max((float(p.p) for name, p in parts if isinstance(p, nn.Dropout) and _ADAPTERS not in name), default=0.0)


def bits_for_dropout(module: nn.Module) -> int:
    """Say how few bits forward the changes of a model, or of a stage of it, take with dropout."""
    plan = getattr(module, "plan", None)  # of a Stage
    name = type(module).__name__ if plan is None else plan.model_class
    return CLASSIFIERS_FEWEST_BITS if any(kind in name for kind in _CLASSIFIERS) else FEWEST_BITS


def dropout_advice(dropout: float, settings: Config, fewest: int = FEWEST_BITS) -> str | None:
    """Say what fewer than the `fewest` bits cost with so much dropout, and what to do; None where it is little.

    Bits that follow an error need no advice where they may grow with the changes: their most count.
    """
    every = each_link(settings.activations.forward_bits)
    bits = min(e.max if isinstance(e, ConstantError) else e for e in every)
    if not _feels(dropout, settings) or bits >= fewest:
        return None
    return (
        f"this model trains with dropout {dropout:g}, which makes the changes that AQ-SGD sends larger: "
        f"activations.forward_bits {bits} may cost more than 1 % of the training loss. Use {fewest} or more, "
        '{"error": 0.05}, which takes as many as are needed, or no dropout (`--dropout 0` of a recipe)'
    )


def fewest_bits(module: nn.Module, settings: Config, dropout: float | None = None) -> int:
    """Say how few bits forward "auto" may take for a model. dropout: that it is trained with, None for its own."""
    share = dropout_of(module) if dropout is None else dropout
    return bits_for_dropout(module) if _feels(share, settings) else FEWEST["forward_bits"]


def warn_of_dropout(module: nn.Module, settings: Config) -> None:
    """Log the advice, if there is any; the level is one that Python shows where nobody has set up logging."""
    text = dropout_advice(dropout_of(module), settings, bits_for_dropout(module))
    if text is not None:
        _log.warning("%s", text)


def _feels(dropout: float, settings: Config) -> bool:
    """Say whether the changes sent are those since a sample's last visit, which had another mask."""
    return dropout >= _SMALL and settings.activations.method == "aqsgd" and settings.store.clusters is None


_WAYS = ("forward", "back")
_TOKENS = 512
LOOKED_AT = 32  # samples


@serializable
class RankMeasurement(NamedTuple):
    """What one rank measured.

    link: to the next stage; None on the last one, and where rates are given. fewest: bits forward that this stage's
    dropout leaves, see `pipecomp.plan.auto_bits`.
    """

    stage: int
    costs: StageCosts
    link: LinkMeasurement | None
    fewest: int = FEWEST["forward_bits"]


class BatchShape(NamedTuple):
    """A step of one replica: micro-batches of so many samples with so many tokens each."""

    samples: int
    tokens: int
    micro_batches: int


@serializable
class BitsDecision(NamedTuple):
    """forward_bits, backward_bits; reason: a sentence with the predictions behind them."""

    forward_bits: Bits
    backward_bits: Bits
    reason: str


def wants_measuring(config: Config) -> bool:
    """Say whether bits are to be found when the run begins."""
    return any(config.activations.measured(key) for key in FEWEST)


def look(
    config: Config,
    stage: Stage,
    batch: BatchShape,
    to_previous: Transport | None,
    to_next: Transport | None,
    fewest: int,
    staging: Staging | None,
) -> RankMeasurement:
    """Measure this rank's links, if "auto" asks for it, its stage, and what packets cost it; all ranks must call it."""
    unknown = "auto" in (config.activations.forward_bits, config.activations.backward_bits)
    link = measure_links(stage.index, to_previous, to_next) if unknown else None
    spent = time_stage(stage, batch.samples, batch.tokens)
    weight = next(stage.parameters())
    most = [_found(config.activations, key, 8, 1) for key in FEWEST]
    size = (batch.samples, batch.tokens, stage.hidden_size, weight.dtype, weight.device)
    encode_s, decode_s = time_link(with_bits(config, *most), *size, staging=staging)
    costs = StageCosts(forward_s=spent.forward_s, backward_s=spent.backward_s, encode_s=encode_s, decode_s=decode_s)
    return RankMeasurement(stage.index, costs, link, fewest)


def settle(
    config: Config,
    stage: Stage,
    batch: BatchShape,
    to_previous: Transport | None = None,
    to_next: Transport | None = None,
    *,
    fewest: int = FEWEST["forward_bits"],
    staging: Staging | None = None,
) -> Config:
    """Put what compute hides in place of "auto" and of rates: all ranks measure, rank 0 decides for all and says so.

    fewest: bits forward that "auto" does not go below here, for the stage's dropout; of all stages the most count.
    staging: that the run will copy by, whose pinned memory measurements use, too; by default one of their own.
    """
    seen = gathered(look(config, stage, batch, to_previous, to_next, fewest, staging))
    found = None
    if dist.get_rank() == 0:
        found = decide(config, seen, batch, stage.hidden_size, next(stage.parameters()).dtype)
        _log.warning("%s", found.reason)  # the level that Python shows where nobody has set up logging
    found = broadcast(found)
    return with_bits(config, found.forward_bits, found.backward_bits)


def sample_length(data: Any, stage: Stage) -> int:
    """Count the tokens of the longest of the first samples. Without data 512: compute and bytes grow alike."""
    try:
        return max(len(data[i]["input_ids"]) for i in range(min(LOOKED_AT, len(data))))
    except (TypeError, KeyError, IndexError, ValueError):
        return min(_TOKENS, most_tokens(stage.config) or _TOKENS)


def decide(
    config: Config, seen: Sequence[RankMeasurement], batch: BatchShape, hidden: int, dtype: torch.dtype
) -> BitsDecision:
    """Choose bits for what all ranks have seen; of replicas the slowest counts. Bits that are settled stay."""
    K = 1 + max(s.stage for s in seen)
    by_stage = [[s for s in seen if s.stage == k] for k in range(K)]
    a = config.activations
    network = _network(a, [[s.link for s in by_stage[k] if s.link is not None] for k in range(K - 1)])
    stages = [
        StageCosts(
            forward_s=max(s.costs.forward_s for s in found),
            backward_s=max(s.costs.backward_s for s in found),
            encode_s=max(s.costs.encode_s for s in found),
            decode_s=max(s.costs.decode_s for s in found),
        )
        for found in by_stage
    ]

    def predicted(made: Config) -> float:
        counts = [batch.tokens] * batch.samples
        step = StepSpec(
            stages=stages,
            micro_batches=batch.micro_batches,
            forward_bytes=[activation_bytes(made, k, counts, hidden, dtype) for k in range(K - 1)],
            backward_bytes=[gradient_bytes(made, k, counts, hidden, dtype) for k in range(K - 1)],
        )
        return best_in_flight(step, network, config.in_flight)[1].seconds

    fewest = max(s.fewest for s in seen)
    *most, fits = choose_bits(
        lambda f, b: predicted(with_bits(config, f, b)), network, a.forward_bits, a.backward_bits, fewest
    )
    f, b = (_found(a, key, bits, K - 1, fewest) for key, bits in zip(FEWEST, most, strict=True))
    reason = _reason(a, (f, b), fits, predicted(with_bits(config, f, b)), predicted(Config()), network)
    return BitsDecision(f, b, reason)


def _network(a: Activations, links: Sequence[Sequence[LinkMeasurement]]) -> LinkNetwork:
    """The links as they were measured, at the rates that are given; what is neither does not limit."""
    free = (Channel(),) * len(links)
    found = network_of(links) if all(links) else LinkNetwork(forward=free, backward=free)

    def lines(key: str, measured: Sequence[Channel]) -> tuple[Channel, ...]:
        rates = [getattr(bits_of_link(getattr(a, key), k), "mbit_per_s", None) for k in range(len(measured))]
        return tuple(
            line if rate is None else replace(line, bits_per_s=1e6 * rate * TCP_SHARE)
            for rate, line in zip(rates, measured, strict=True)
        )

    return LinkNetwork(forward=lines("forward_bits", found.forward), backward=lines("backward_bits", found.backward))


def _found(a: Activations, key: str, most: Bits, links: int, fewest: int = FEWEST["forward_bits"]) -> Bits:
    """Put the most bits of each link, which were found, into a direction's setting. fewest: of "auto" forward."""
    given = getattr(a, key)
    if not a.measured(key):
        return given
    if given == "auto":
        if key == "backward_bits" and a.backward_top_k is not None:
            return most  # its error is in what it leaves out
        return keeping_error(key, most, fewest)
    return per_link(_within(bits_of_link(given, k), bits_of_link(most, k)) for k in range(links))


def _within(given: Any, most: Any) -> int | ConstantError:
    """Limit an error within a rate to so many bits; a number where that leaves only one, and numbers stay."""
    return given.at_most(most) if isinstance(given, ConstantError) else int(given)


def _reason(
    a: Activations, found: tuple[Bits, Bits], fits: bool, step_s: float, plain_s: float, network: LinkNetwork
) -> str:
    head = "bits 'auto'" if "auto" in (a.forward_bits, a.backward_bits) else "bits within the links' rates"
    both = ", ".join(_said(bits, way) for bits, way in zip(found, _WAYS, strict=True))
    known = all(line.bits_per_s < math.inf for line in (*network.forward, *network.backward))
    if known and plain_s <= PAYS * step_s:
        why = "links so fast that method 'none' would do as well"
    elif fits:
        why = "the most that compute time hides"
    else:
        why = "no more, as the slowest link is the limit"
    compared = f"at most {step_s:.3g} s per step predicted, {plain_s:.3g} s uncompressed"
    return f"{head}: {both}: {why} ({compared}; slowest link {format_rate(network.slowest)})"


def _said(bits: Bits, way: str) -> str:
    """Write "2 to 4 forward (error 0.07)", "2 to 4/2 to 8 back (error 0.1)" or "3 forward"."""
    every = each_link(bits)
    counts = "/".join(f"{e.min} to {e.max}" if isinstance(e, ConstantError) else str(e) for e in every)
    errors = "/".join(dict.fromkeys(f"{e.error:g}" for e in every if isinstance(e, ConstantError)))
    return f"{counts} {way}" + (f" (error {errors})" if errors else "")
