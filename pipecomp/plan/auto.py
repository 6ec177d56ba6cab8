"""Bits that are "auto": what every rank measures when a run begins, and the decision that rank 0 makes for all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.activation_config import Bits, bits_text
from pipecomp.cluster.collectives import broadcast, gathered
from pipecomp.config import Config
from pipecomp.doctor.measure import Measured
from pipecomp.plain_objects import exchanged
from pipecomp.plan.messages import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.network import Network
from pipecomp.plan.prediction import best_in_flight
from pipecomp.plan.probe import measure_links, network_of
from pipecomp.plan.search import PAYS, choose_bits
from pipecomp.plan.simulation import StageCosts, Step
from pipecomp.plan.timing import time_link, time_stage
from pipecomp.rates import bits_per_second
from pipecomp.stages.link.transport import Transport
from pipecomp.stages.partition.splitting import Stage

_TOKENS = 512
_LOOKED_AT = 32  # samples
_log = logging.getLogger(__name__)


@exchanged
class Seen(NamedTuple):
    """What one rank measured. link: to the next stage, None on the last one."""

    stage: int
    costs: StageCosts
    link: Measured | None


class Batch(NamedTuple):
    """A step of one replica: micro-batches of so many samples with so many tokens each."""

    samples: int
    tokens: int
    micro_batches: int


@exchanged
class Decision(NamedTuple):
    """forward_bits, backward_bits; reason: a sentence with the predictions behind them."""

    forward_bits: Bits
    backward_bits: Bits
    reason: str


def wants_auto(config: Config) -> bool:
    """Say whether bits are to be settled."""
    return "auto" in (config.activations.forward_bits, config.activations.backward_bits)


def look(config: Config, stage: Stage, batch: Batch, to_previous: Transport | None, to_next: Transport | None) -> Seen:
    """Measure this rank's links, then its stage and what packets cost it; all ranks must call it together."""
    link = measure_links(stage.index, to_previous, to_next)
    spent = time_stage(stage, batch.samples, batch.tokens)
    parameter = next(stage.parameters())
    encode_s, decode_s = time_link(
        with_bits(config, 4, 8), batch.samples, batch.tokens, stage.hidden_size, parameter.dtype, parameter.device
    )
    costs = StageCosts(forward_s=spent.forward_s, backward_s=spent.backward_s, encode_s=encode_s, decode_s=decode_s)
    return Seen(stage.index, costs, link)


def settle(
    config: Config, stage: Stage, batch: Batch, to_previous: Transport | None = None, to_next: Transport | None = None
) -> Config:
    """Put numbers in place of "auto": all ranks measure, rank 0 decides for all and says so."""
    seen = gathered(look(config, stage, batch, to_previous, to_next))
    found = None
    if dist.get_rank() == 0:
        found = decide(config, seen, batch, stage.hidden_size, next(stage.parameters()).dtype)
        _log.warning("%s", found.reason)  # the level that Python shows where nobody has set up logging
    found = broadcast(found)
    return with_bits(config, found.forward_bits, found.backward_bits)


def sample_length(data: Any, stage: Stage) -> int:
    """Count the tokens of the longest of the first samples. Without data 512: compute and bytes grow alike."""
    try:
        return max(len(data[i]["input_ids"]) for i in range(min(_LOOKED_AT, len(data))))
    except (TypeError, KeyError, IndexError, ValueError):
        return min(_TOKENS, getattr(stage.config, "max_position_embeddings", _TOKENS))


def decide(config: Config, seen: Sequence[Seen], batch: Batch, hidden: int, dtype: torch.dtype) -> Decision:
    """Choose bits for what all ranks have seen; of replicas the slowest counts. Bits that are numbers stay."""
    K = 1 + max(s.stage for s in seen)
    by_stage = [[s for s in seen if s.stage == k] for k in range(K)]
    network = network_of([[s.link for s in by_stage[k] if s.link is not None] for k in range(K - 1)])
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
        step = Step(
            stages=stages,
            micro_batches=batch.micro_batches,
            forward_bytes=[activation_bytes(made, k, counts, hidden, dtype) for k in range(K - 1)],
            backward_bytes=[gradient_bytes(made, k, counts, hidden, dtype) for k in range(K - 1)],
        )
        return best_in_flight(step, network, config.in_flight)[1].seconds

    a = config.activations
    f, b, fits = choose_bits(lambda f, b: predicted(with_bits(config, f, b)), network, a.forward_bits, a.backward_bits)
    return Decision(f, b, _reason(f, b, fits, predicted(with_bits(config, f, b)), predicted(Config()), network))


def _reason(f: Bits, b: Bits, fits: bool, step_s: float, plain_s: float, network: Network) -> str:
    compared = f"predicted {step_s:.3g} s per step, {plain_s:.3g} s uncompressed"
    slowest = bits_per_second(network.slowest)
    if plain_s <= PAYS * step_s:
        why = "links so fast that method 'none' would do as well"
    elif fits:
        why = "the most that compute time hides"
    else:
        why = "the fewest that 'auto' takes: the slowest link is the limit"
    return f"bits 'auto': {bits_text(f)} forward, {bits_text(b)} back ({why}; {compared}; slowest link {slowest})"
