"""Advice on what to change: settings tried one by one in the planner's simulation of the run's own step.

The simulated step has the run's measured costs and bytes. Links have the rates that a network lab set, or else those
that were measured between the ranks; if neither is known, the one rate with which the step takes the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch

from pipecomp.config import Activations, Config, Store
from pipecomp.config.activations import Bits, ConstantError, bits_text
from pipecomp.errors import PipecompError
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes, with_bits
from pipecomp.plan.prediction import NEARLY_EQUAL, best_in_flight
from pipecomp.plan.search import WORTHWHILE, choose_bits
from pipecomp.plan.simulation import (
    Channel,
    LinkNetwork,
    StepSpec,
    measured_costs,
    measured_end,
    simulate_step,
    uniform,
)
from pipecomp.report.reader import RunRecord, number
from pipecomp.stats import counted_since

_FITTED = 0.002  # relative tolerance of a fitted network's step time
_SLOWEST, _FASTEST = 1e4, 1e12  # bits per second: the range in which a link's rate is fitted
_LIMITS = 1.02  # links limit a step that takes this much longer than without limits
ACCURACY = 0.1
"""Share of the measured seconds by which a prediction for the run's own settings may differ."""
LAB, MEASURED, FITTED = "lab", "measured", "fitted"


@dataclass(frozen=True, kw_only=True)
class RunSimulation:
    """The planner's simulation of the later half of a run.

    Attributes:
        step: Measured costs and bytes of a step.
        network: The links.
        source: Source of the links' rates: LAB; MEASURED between the ranks; or FITTED, with the one rate at which a
            simulated step takes the measured seconds.
        measured_s: Measured mean seconds of a step.
        seconds: Simulated seconds of a step.
        raw_bytes: Bytes of a micro-batch's activations in the training dtype, for each link.
        new_share: Share of samples sent without reference to a cached activation, for each link.
        mean_bits: Mean bits per quantized value forward and back, for each link; None where nothing is quantized.
    """

    step: StepSpec
    network: LinkNetwork
    source: str
    measured_s: float
    seconds: float
    raw_bytes: list[float]
    new_share: list[float]
    mean_bits: list[tuple[float | None, float | None]]

    @property
    def known(self) -> bool:
        """True if the links' rates do not come from the run's seconds."""
        return self.source != FITTED

    @property
    def accurate(self) -> bool:
        """True if the step is simulated within ACCURACY of what it took."""
        return abs(self.seconds - self.measured_s) <= ACCURACY * self.measured_s

    @property
    def limited(self) -> bool:
        """True if infinitely fast links would make a step noticeably faster."""
        return self.seconds > _LIMITS * simulate_step(self.step, uniform(len(self.step.stages), math.inf)).seconds


def simulate(run: RunRecord) -> RunSimulation | str:
    """Simulate a run's step.

    Returns:
        The simulation, or the reason why there is none.
    """
    stats = run.ranks.get("end")
    most, K = run.facts.get("micro_batches"), run.facts.get("stages")
    if not stats or not isinstance(most, int) or not isinstance(K, int):
        return "the run did not finish, or did not record its ranks"
    if K < 2:
        return "one stage has no links"
    if len(stats) < K:
        return "ranks are missing"
    first = int(number(run.ranks.get("first_step")) or 0)
    later = _since(stats, run.ranks.get("halfway"), first)
    begin, end = stats[0]["steps"] - later[0]["steps"], stats[0]["steps"]
    spent = [number(line.get("step_s")) for line in run.steps if begin < line["step"] <= end]
    measured = [s for s in spent if s is not None]
    if not measured or len(measured) != later[0]["steps"]:
        return "the seconds of its steps are not known"
    ranks = [[r for r in later if r["stage"] == k] for k in range(K)]
    if not all(ranks):
        return "ranks are missing"
    measured_s = mean(measured)
    links = [_link(ranks[k], f"{k}->{k + 1}") for k in range(K - 1)]
    if any(link["messages"] == 0 for link in links):
        return "nothing crossed its links"
    # Seconds of a step that no part counts: data loading and work between steps.
    uncounted = [measured_s - sum(r["seconds"].values()) / r["steps"] for r in later]
    # An epoch's last step may have fewer than configured: the mean step is simulated.
    micro_batches = max(1, round(links[0]["messages"] / (later[0]["steps"] * len(ranks[0]))))
    step = StepSpec(
        stages=[  # of the slowest replica, which the others wait for
            max((measured_costs(r, micro_batches) for r in replicas), key=lambda c: c.forward_s + c.backward_s)
            for replicas in ranks
        ],
        micro_batches=micro_batches,
        forward_bytes=[link["forward"] for link in links],
        backward_bytes=[link["backward"] for link in links],
        in_flight=[int(replicas[0].get("in_flight") or 1) for replicas in ranks],
        # Links to stages that train nothing carry no gradients.
        lowest=next((k for k, link in enumerate(links) if link["backward"]), K - 1),
        together_s=measured_end(later) + max(0.0, min(uncounted)),
    )
    network, source = _known_network(run, K) or (_fit(step, measured_s), FITTED)
    return RunSimulation(
        step=step,
        network=network,
        source=source,
        measured_s=measured_s,
        seconds=simulate_step(step, network).seconds,
        raw_bytes=[link["raw"] for link in links],
        new_share=[link["new"] for link in links],
        mean_bits=[(link.get("forward_bits"), link.get("backward_bits")) for link in links],
    )


def _since(stats: Sequence[dict[str, Any]], halfway: Any, first: int) -> list[dict[str, Any]]:
    """Counters since half time, or else since the start or resumption of the run."""
    if not halfway or halfway[0]["steps"] >= stats[0]["steps"]:
        return [{**rank, "steps": rank["steps"] - first} for rank in stats]
    before = {rank["rank"]: rank for rank in halfway}
    return [counted_since(before[rank["rank"]], rank) for rank in stats]


def _link(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Means over a link's packets of all replicas, as counted by its sending stage."""
    ends = [rank["links"][name] for rank in ranks]
    link: dict[str, float] = {}
    for way in ("forward", "backward"):
        messages = sum(end[way]["messages"] for end in ends)
        link[way] = sum(end[way]["bytes_sent"] for end in ends) / max(1, messages)
        values = sum(end[way].get("values_quantized", 0) for end in ends)  # older versions count none
        if values:
            link[f"{way}_bits"] = sum(end[way]["code_bits"] for end in ends) / values
        if way == "forward":
            link["messages"] = messages
            link["raw"] = sum(end[way]["bytes_raw"] for end in ends) / max(1, messages)
    new, old = sum(end["full_samples"] for end in ends), sum(end["delta_samples"] for end in ends)
    link["new"] = new / (new + old) if new + old else 1.0
    return link


def _known_network(run: RunRecord, stages: int) -> tuple[LinkNetwork, str] | None:
    """The links and their source, if a lab set them, or the run or its plan measured them between the ranks."""
    recorded = run.facts.get("network")
    if isinstance(recorded, Mapping):
        made = _network(recorded.get("forward"), recorded.get("backward"), stages, shared=bool(recorded.get("shared")))
        if made is not None:
            return made, MEASURED if recorded.get("measured") else LAB
    between_ranks = any(
        row.get("network") == MEASURED for row in run.plan.get("methods") or () if isinstance(row, dict)
    )
    links = run.plan.get("links")
    if not between_ranks or not isinstance(links, list) or not all(isinstance(link, Mapping) for link in links):
        return None
    forward, backward = ([link.get(way) for link in links] for way in ("forward", "backward"))
    made = _network(forward, backward, stages, shared=True)
    return None if made is None else (made, MEASURED)


def _network(forward: Any, backward: Any, stages: int, *, shared: bool) -> LinkNetwork | None:
    """Links from JSON values; None if they are of another form, or for another number of stages."""
    try:
        ways = [
            tuple(
                Channel(bits_per_s=number(line["bits_per_s"]) or math.inf, latency_s=float(line["latency_s"]))
                for line in lines
            )
            for lines in (forward, backward)
        ]
        made = LinkNetwork(forward=ways[0], backward=ways[1], shared=shared)
    except (KeyError, TypeError, ValueError, PipecompError):
        return None
    return made if len(made.forward) == stages - 1 else None


def _fit(step: StepSpec, measured_s: float) -> LinkNetwork:
    """Links of the one rate at which the step takes the measured time; unlimited if links cost nothing."""
    K = len(step.stages)
    if simulate_step(step, uniform(K, math.inf)).seconds * _LIMITS >= measured_s:
        return uniform(K, math.inf)
    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    for _ in range(60):
        middle = (low + high) / 2
        seconds = simulate_step(step, uniform(K, math.exp(middle))).seconds
        if abs(seconds - measured_s) <= _FITTED * measured_s:
            break
        low, high = (middle, high) if seconds > measured_s else (low, middle)
    return uniform(K, math.exp(middle))


# -- changes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_A_MICRO_BATCH = ("forward_s", "backward_s", "encode_s", "decode_s")
_LEAST = (2, 4)  # forward and backward bits, the fewest of AQ-SGD's paper
_FIRST_VISIT = 8  # as good as uncompressed: benchmarks/results/first_visit.md


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A changed setting and its predicted effect.

    Attributes:
        what: The change: "forward_bits 3 → 2".
        step_s: Predicted seconds of a step with as many samples as now.
        gain: Speed relative to now.
        why: Reason for or against it.
        costs_nothing: Whether it is worth making at equal speed, as more bits are.
        setting: False for another network.
        assumes: Whether the prediction rests on an assumption that may not hold.
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
        """True if the change is recommended."""
        return self.setting and (self.gain >= WORTHWHILE or (self.costs_nothing and self.gain * NEARLY_EQUAL >= 1))


def try_changes(run: RunRecord, now: RunSimulation) -> list[SettingChange]:
    """Try changes in the simulation; those that pay come first, ordered by gain.

    There are none if the simulation is not accurate for the run's own settings.
    """
    if not now.accurate:
        return []
    packets = _PacketModel.of(run, now)
    changes = [*_bits(packets, now), *_others(run, packets, now)]
    if now.limited:
        forward, backward = (
            tuple(replace(line, bits_per_s=2 * line.bits_per_s) for line in lines)
            for lines in (now.network.forward, now.network.backward)
        )
        faster = replace(now.network, forward=forward, backward=backward)
        seconds, why = simulate_step(now.step, faster).seconds, "the value of a faster line"
        changes.append(_change(now, "links of twice the rate", seconds, why, setting=False))
    return sorted(changes, key=lambda change: (not change.pays, change.costs_nothing, change.assumes, -change.gain))


def _change(now: RunSimulation, what: str, step_s: float, why: str, **more: bool) -> SettingChange:
    return SettingChange(what=what, step_s=step_s, gain=now.seconds / step_s, why=why, **more)


def _bits(packets: _PacketModel | None, now: RunSimulation) -> Iterator[SettingChange]:
    """Other methods and bits of activations."""
    if packets is None:
        return
    config, a = packets.config, packets.config.activations
    if a.method not in a.QUANTIZED:
        if now.limited:
            config = Config.from_dict({"activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}})
            pair = _chosen(packets, config)
            why, seconds = (
                "after the first epoch; without the time of quantizing",
                packets.seconds(with_bits(config, *pair)),
            )
            yield _change(now, f"method aqsgd, {_describe_bits(pair)}", seconds, why)
        return
    f, b = a.forward_bits, a.backward_bits
    if isinstance(f, int) and f > _LEAST[0]:
        why = "fewer bytes forward; the loss may end higher"
        yield _change(now, f"forward_bits {f} → {f - 1}", packets.seconds(with_bits(config, f - 1, b)), why)
    if isinstance(b, int) and b > _LEAST[1]:
        new, why = max(_LEAST[1], b - 2), "fewer bytes back; the loss may end higher"
        yield _change(now, f"backward_bits {b} → {new}", packets.seconds(with_bits(config, f, new)), why)
    if isinstance(f, int) and isinstance(b, int) and f > _LEAST[0] and b > _LEAST[1]:
        why = "the paper's fewest; the loss may end higher"
        yield _change(now, _describe_bits(_LEAST), packets.seconds(with_bits(config, *_LEAST)), why)
    if not any(isinstance(bits, ConstantError) for k in range(len(now.mean_bits)) for bits in a.bits(k)):
        pair = _chosen(packets, config)
        if pair != (f, b) and _sum(pair) > _sum((f, b)):
            seconds, why = packets.seconds(with_bits(config, *pair)), "the most bits that cost no time"
            yield _change(now, _describe_bits(pair), seconds, why, costs_nothing=True)
    why = "exact, and without a message store"
    yield _change(now, "method none", packets.seconds(Config()), why, costs_nothing=True)


def _others(run: RunRecord, packets: _PacketModel | None, now: RunSimulation) -> Iterator[SettingChange]:
    step, K = now.step, len(now.step.stages)
    new_share = max(now.new_share, default=0.0)
    if packets is not None and new_share > 0.02 and packets.config.store.clusters is None:
        a = packets.config.activations
        if a.method == "aqsgd" and a.first_visit == "full":
            made = packets.config.replace(activations=a.replace(first_visit=_FIRST_VISIT))
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
        why = "stages wait less at both ends of a step; assumes that small ones compute as fast"
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
class _PacketModel:
    """Packet sizes under other settings: the run's own bytes, scaled by the planner's formulas."""

    config: Config
    counts: list[list[int]]  # tokens of each sample of a micro-batch, for each link
    hidden: int
    dtype: torch.dtype
    now: RunSimulation

    @classmethod
    def of(cls, run: RunRecord, now: RunSimulation) -> _PacketModel | None:
        """None for plain modules and for settings unknown to this version."""
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
        """Predict the seconds of a step with these settings."""
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
        """Bytes of a packet with the run's share of new samples and, for bits by error, its mean bits."""
        size = (self.counts[link], self.hidden, self.dtype)
        own, mean_bits = self.config.activations, self.now.mean_bits[link][0]
        new = self.now.new_share[link] if own.method == "aqsgd" else 0.0
        first = activation_bytes(config, link, *size, first_visit=True, mean_bits=mean_bits)
        if mean_bits is not None and isinstance(own.first_visit, int) and new < 1:  # the mean includes them
            mean_bits = max(1.0, (mean_bits - new * own.first_visit) / (1 - new))
        return new * first + (1 - new) * activation_bytes(config, link, *size, mean_bits=mean_bits)

    def _back(self, config: Config, link: int) -> float:
        mean_bits = self.now.mean_bits[link][1]
        return gradient_bytes(config, link, self.counts[link], self.hidden, self.dtype, mean_bits=mean_bits)


def _chosen(packets: _PacketModel, config: Config) -> tuple[Bits, Bits]:
    """The bits that "auto" would choose here."""
    return choose_bits(lambda *bits: packets.seconds(with_bits(config, *bits)), packets.now.network)[:2]


def _describe_bits(pair: tuple[Bits, Bits]) -> str:
    return f"{bits_text(pair[0])} bits forward, {bits_text(pair[1])} back"


def _sum(pair: tuple[Any, Any]) -> float:
    """Sum of both directions' mean bits over the links."""
    return sum(bits if isinstance(bits, int) else mean(bits) for bits in pair)
