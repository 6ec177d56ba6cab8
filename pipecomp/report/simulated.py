"""A run's own step for the planner's simulation: its measured costs and bytes, over links that are known or fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from pipecomp.plan.simulation import (
    Channel,
    LinkNetwork,
    StageCosts,
    StepSpec,
    measured_costs,
    measured_end,
    simulate_step,
    uniform,
)
from pipecomp.report.read import Run, number
from pipecomp.stats import counted_since

_FITTED = 0.002  # how closely a fitted network's step takes the measured seconds
_SLOWEST, _FASTEST = 1e4, 1e12  # bits per second between which a link's rate is looked for
_LIMITS = 1.02  # a link limits if a step takes so much longer than without limits


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The later half of a run, as the planner plays it.

    Attributes:
        step: Its measured costs and bytes.
        network: Its links.
        known: Whether the links' rates were known. If not, all links have the rate with which a simulated step takes
            the measured seconds.
        measured_s: Mean seconds of a step.
        seconds: Of the simulated step.
        raw_bytes: Of a micro-batch's activations in the training dtype on each link.
        new_share: Of the samples on each link, how many are sent without reference to a cached activation.
        mean_bits: Of a quantized value on each link, forward and back; None where there is none.
    """

    step: StepSpec
    network: LinkNetwork
    known: bool
    measured_s: float
    seconds: float
    raw_bytes: list[float]
    new_share: list[float]
    mean_bits: list[tuple[float | None, float | None]]

    @property
    def limited(self) -> bool:
        """Whether links that cost no time would make a step faster, by enough to matter."""
        return self.seconds > _LIMITS * simulate_step(self.step, uniform(len(self.step.stages), math.inf)).seconds


def simulate(run: Run) -> Simulated | str:
    """Play a run's step.

    Returns:
        The step; in its place words that say why there is none.
    """
    stats = run.ranks.get("end")
    most, K = run.facts.get("micro_batches"), run.facts.get("stages")
    if not stats or not isinstance(most, int) or not isinstance(K, int):
        return "the run did not end in order, or did not write what its ranks did"
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
    # An epoch's last step may have fewer than the configuration says: it is the mean step that is played.
    micro_batches = max(1, round(links[0]["messages"] / (later[0]["steps"] * len(ranks[0]))))
    step = StepSpec(
        stages=[_slowest([measured_costs(r, micro_batches) for r in found]) for found in ranks],
        micro_batches=micro_batches,
        forward_bytes=[link["forward"] for link in links],
        backward_bytes=[link["backward"] for link in links],
        in_flight=[int(found[0].get("in_flight") or 1) for found in ranks],
        together_s=measured_end(later) + min(_rest(r, measured_s) for r in later),
    )
    known = _network(run.facts.get("network"), K)
    network = known or _fit(step, measured_s)
    return Simulated(
        step=step,
        network=network,
        known=known is not None,
        measured_s=measured_s,
        seconds=simulate_step(step, network).seconds,
        raw_bytes=[link["raw"] for link in links],
        new_share=[link["new"] for link in links],
        mean_bits=[(link.get("forward_bits"), link.get("backward_bits")) for link in links],
    )


def _since(stats: Sequence[dict[str, Any]], halfway: Any, first: int) -> list[dict[str, Any]]:
    """What ranks counted since half time; without that, since the start or since the run was resumed."""
    if not halfway or halfway[0]["steps"] >= stats[0]["steps"]:
        return [{**rank, "steps": rank["steps"] - first} for rank in stats]
    before = {rank["rank"]: rank for rank in halfway}
    return [counted_since(before[rank["rank"]], rank) for rank in stats]


def _link(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Means over the packets of a link, as its sending stage counts them; of replicas all together."""
    ends = [rank["links"][name] for rank in ranks]
    found: dict[str, float] = {}
    for way in ("forward", "backward"):
        messages = sum(end[way]["messages"] for end in ends)
        found[way] = sum(end[way]["bytes_sent"] for end in ends) / max(1, messages)
        values = sum(end[way].get("values_quantized", 0) for end in ends)  # older versions count none
        if values:
            found[f"{way}_bits"] = sum(end[way]["code_bits"] for end in ends) / values
        if way == "forward":
            found["messages"] = messages
            found["raw"] = sum(end[way]["bytes_raw"] for end in ends) / max(1, messages)
    new, old = sum(end["full_samples"] for end in ends), sum(end["delta_samples"] for end in ends)
    found["new"] = new / (new + old) if new + old else 1.0
    return found


def _slowest(costs: Sequence[StageCosts]) -> StageCosts:
    """Of replicas, the one that the others wait for."""
    return max(costs, key=lambda c: c.forward_s + c.backward_s)


def _rest(rank: Mapping[str, Any], measured_s: float) -> float:
    """Seconds of a step that no part counts: loading data, and what the program does between steps."""
    return max(0.0, measured_s - sum(rank["seconds"].values()) / rank["steps"])


def _network(found: Any, stages: int) -> LinkNetwork | None:
    """The links that a network lab told of."""
    if not isinstance(found, Mapping):
        return None
    try:
        lines = {
            way: tuple(
                Channel(bits_per_s=number(line["bits_per_s"]) or math.inf, latency_s=float(line["latency_s"]))
                for line in found[way]
            )
            for way in ("forward", "backward")
        }
        made = LinkNetwork(forward=lines["forward"], backward=lines["backward"], shared=bool(found["shared"]))
    except (KeyError, TypeError, ValueError):
        return None
    return made if len(made.forward) == stages - 1 else None


def _fit(step: StepSpec, measured_s: float) -> LinkNetwork:
    """Links of one rate, with which the step takes so long; without limits if they cost no time."""
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
