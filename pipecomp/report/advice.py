"""What to change next: settings tried one by one in the planner's simulation of the run's own step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch

from pipecomp.config import Activations, Config, Store
from pipecomp.config.activations import Bits, ConstantError, bits_text
from pipecomp.errors import PipecompError
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.prediction import best_in_flight
from pipecomp.plan.search import ALMOST, PAYS, choose_bits
from pipecomp.plan.simulation import LinkNetwork, simulate_step
from pipecomp.report.read import Run
from pipecomp.report.simulated import Simulated

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_A_MICRO_BATCH = ("forward_s", "backward_s", "encode_s", "decode_s")
_LEAST = (2, 4)  # forward and backward bits, the fewest of AQ-SGD's paper
_FIRST_VISIT = 8  # bits that training does not notice: benchmarks/results/first_visit.md


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change and what it predicts.

    Attributes:
        what: The change, as a setting: "forward_bits 3 → 2".
        step_s: Seconds of a step with it, for as many samples as now.
        gain: How many times as fast as now.
        why: What speaks for it, or against.
        costs_nothing: Whether it is worth making though it is not faster, as more bits are.
        setting: Whether it is one, and not another network.
        assumes: Whether the prediction takes something for granted that a run may not have.
    """

    what: str
    step_s: float
    gain: float
    why: str
    costs_nothing: bool = False
    setting: bool = True
    assumes: bool = False

    @property
    def pays(self) -> bool:
        """Whether it is to be recommended."""
        return self.setting and (self.gain >= PAYS or (self.costs_nothing and self.gain * ALMOST >= 1))


def changes(run: Run, now: Simulated) -> list[Change]:
    """Try changes in the simulation, those that pay first, by what they gain."""
    packets = _Packets.of(run, now)
    found = [*_bits(packets, now), *_others(run, packets, now)]
    if now.limited:
        seconds, why = simulate_step(now.step, _faster(now.network)).seconds, "what a faster line is worth"
        found.append(_change(now, "links of twice the rate", seconds, why, setting=False))
    return sorted(found, key=lambda change: (not change.pays, change.costs_nothing, change.assumes, -change.gain))


def _change(now: Simulated, what: str, step_s: float, why: str, **more: bool) -> Change:
    return Change(what=what, step_s=step_s, gain=now.seconds / step_s, why=why, **more)


def _bits(packets: _Packets | None, now: Simulated) -> Iterator[Change]:
    """Other methods and bits of activations."""
    if packets is None:
        return
    config, a = packets.config, packets.config.activations
    if a.method not in a.QUANTIZED:
        if now.limited:
            yield from _compressed(packets)
        return
    f, b = a.forward_bits, a.backward_bits
    fewer = [("forward_bits", f, max(_LEAST[0], f - 1), "forward")] if isinstance(f, int) else []
    fewer += [("backward_bits", b, max(_LEAST[1], b - 2), "back")] if isinstance(b, int) else []
    for key, old, new, name in fewer:
        if new < old:
            made = with_bits(config, new, b) if key == "forward_bits" else with_bits(config, f, new)
            why = f"fewer bytes {name}; the loss may end higher"
            yield _change(now, f"{key} {old} → {new}", packets.seconds(made), why)
    if len(fewer) == 2 and all(old > least for (_, old, _, _), least in zip(fewer, _LEAST, strict=True)):
        why = "the paper's fewest; the loss may end higher"
        yield _change(now, _in_words(_LEAST), packets.seconds(with_bits(config, *_LEAST)), why)
    if not any(isinstance(bits, ConstantError) for k in range(len(now.mean_bits)) for bits in a.bits(k)):
        pair = _chosen(packets, config)
        if pair != (f, b) and _sum(pair) > _sum((f, b)):
            seconds, why = packets.seconds(with_bits(config, *pair)), "the most bits that cost no time"
            yield _change(now, _in_words(pair), seconds, why, costs_nothing=True)
    why = "exact, and without a message store"
    yield _change(now, "method none", packets.seconds(Config()), why, costs_nothing=True)


def _compressed(packets: _Packets) -> Iterator[Change]:
    config = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}})
    pair = _chosen(packets, config)
    why = "after the first epoch; the time of quantizing is not in it"
    yield _change(packets.now, f"method aqsgd, {_in_words(pair)}", packets.seconds(with_bits(config, *pair)), why)


def _others(run: Run, packets: _Packets | None, now: Simulated) -> Iterator[Change]:
    step, K = now.step, len(now.step.stages)
    new_share = max(now.new_share, default=0.0)
    if packets is not None and new_share > 0.02 and packets.config.store.clusters is None:
        a = packets.config.activations
        if a.method == "aqsgd" and a.first_visit == "full":
            made = replace(packets.config, activations=replace(a, first_visit=_FIRST_VISIT))
            why = f"{new_share:.0%} of the samples were new to a link"
            yield _change(now, f"first_visit {_FIRST_VISIT}", packets.seconds(made), why)
    samples = run.facts.get("micro_batch")
    if isinstance(samples, int) and samples % 2 == 0:
        smaller = replace(
            step,
            stages=[replace(c, **{key: getattr(c, key) / 2 for key in _OF_A_MICRO_BATCH}) for c in step.stages],
            micro_batches=2 * step.micro_batches,
            forward_bytes=[size / 2 for size in step.forward_bytes],
            backward_bytes=[size / 2 for size in step.backward_bytes],
            in_flight=None,
        )
        words = f"micro-batches of {samples // 2} instead of {samples}, twice as many"
        why = "stages wait less at both ends of a step; taken as if small ones computed as fast"
        yield _change(now, words, best_in_flight(smaller, now.network)[1].seconds, why, assumes=True)
    if isinstance(run.facts.get("settings", {}).get("in_flight"), int):
        seconds = best_in_flight(step, now.network)[1].seconds
        yield _change(now, "in_flight auto", seconds, "stages run further ahead; takes memory")
    spent = [c.forward_s + c.backward_s for c in step.stages]
    if max(spent) > 1.1 * sum(spent) / K:
        slowest = spent.index(max(spent))
        factors = sum(spent) / K
        even = [
            replace(c, forward_s=c.forward_s * factors / s, backward_s=c.backward_s * factors / s)
            for c, s in zip(step.stages, spent, strict=True)
        ]
        why = (
            f"stage {slowest} computes {max(spent) * K / sum(spent):.2g} times as long as the mean; see `pipecomp plan`"
        )
        yield _change(now, "other cuts", simulate_step(replace(step, stages=even), now.network).seconds, why)


@dataclass(frozen=True, kw_only=True)
class _Packets:
    """Packets of other settings: the run's own bytes, scaled as the planner's formulas say."""

    config: Config
    counts: list[list[int]]  # tokens of each sample of a micro-batch, for each link
    hidden: int
    dtype: torch.dtype
    now: Simulated

    @classmethod
    def of(cls, run: Run, now: Simulated) -> _Packets | None:
        """None for plain modules, and for settings that this version does not know."""
        hidden, dtype = run.facts.get("hidden"), _DTYPES.get(str(run.facts.get("dtype")))
        samples = run.facts.get("micro_batch")
        if not isinstance(hidden, int) or hidden < 1 or dtype is None or not isinstance(samples, int) or samples < 1:
            return None
        try:
            settings = run.facts["settings"]
            store = Store(clusters=settings.get("store", {}).get("clusters"))
            config = Config(activations=Activations(**settings["activations"]), store=store)
        except (PipecompError, AttributeError, KeyError, TypeError):
            return None
        tokens = [max(1, round(raw / hidden / dtype.itemsize / samples)) for raw in now.raw_bytes]
        return cls(config=config, counts=[[n] * samples for n in tokens], hidden=hidden, dtype=dtype, now=now)

    def seconds(self, made: Config) -> float:
        """Of a step with these settings."""
        links = range(len(self.now.network.forward))
        forward = [self._forward(made, k) / self._forward(self.config, k) for k in links]
        backward = [self._back(made, k) / self._back(self.config, k) for k in links]
        step = self.now.step
        scaled = replace(
            step,
            forward_bytes=[size * factor for size, factor in zip(step.forward_bytes, forward, strict=True)],
            backward_bytes=[size * factor for size, factor in zip(step.backward_bytes, backward, strict=True)],
        )
        return simulate_step(scaled, self.now.network).seconds

    def _forward(self, config: Config, link: int) -> float:
        """Bytes of a packet, with the run's share of samples that are new, and its bits where they follow an error."""
        size = (self.counts[link], self.hidden, self.dtype)
        own, mean_bits = self.config.activations, self.now.mean_bits[link][0]
        new = self.now.new_share[link] if own.method == "aqsgd" else 0.0
        first = activation_bytes(config, link, *size, first_visit=True, mean_bits=mean_bits)
        if mean_bits is not None and isinstance(own.first_visit, int) and new < 1:  # the mean is over these, too
            mean_bits = max(1.0, (mean_bits - new * own.first_visit) / (1 - new))
        return new * first + (1 - new) * activation_bytes(config, link, *size, mean_bits=mean_bits)

    def _back(self, config: Config, link: int) -> float:
        mean_bits = self.now.mean_bits[link][1]
        return gradient_bytes(config, link, self.counts[link], self.hidden, self.dtype, mean_bits=mean_bits)


def _faster(network: LinkNetwork) -> LinkNetwork:
    def twice(lines: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(line, bits_per_s=min(math.inf, 2 * line.bits_per_s)) for line in lines)

    return replace(network, forward=twice(network.forward), backward=twice(network.backward))


def _chosen(packets: _Packets, config: Config) -> tuple[Bits, Bits]:
    """What `auto` would choose here."""
    return choose_bits(lambda *bits: packets.seconds(with_bits(config, *bits)), packets.now.network)[:2]


def _in_words(pair: tuple[Bits, Bits]) -> str:
    return f"{bits_text(pair[0])} bits forward, {bits_text(pair[1])} back"


def _sum(pair: tuple[Any, Any]) -> float:
    """How gentle they are: their mean over the links, both ways."""
    return sum(bits if isinstance(bits, int) else mean(bits) for bits in pair)
