"""Predicted seconds of a step on other machines, or with another cut, from what a run has measured.

A run's plan keeps, under "machines", the seconds of each machine and the rates of the lines between them. Machines and
lines that were not measured count as the slowest ones that were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipecomp.config import Config
from pipecomp.config.activations import FEWEST
from pipecomp.plan.command import choose_cuts
from pipecomp.plan.options import PlanOptions
from pipecomp.plan.prediction import MachineSpeeds, StepPrediction, TrainingJob, predict
from pipecomp.plan.profile import Profile, balanced, tied_values, without_weights
from pipecomp.plan.report import TORCH_DTYPES
from pipecomp.plan.simulation import Channel, LinkNetwork, SharedCores

FASTER = 0.9  # share of a step's seconds that a new cut may take at most to be made


def describe_machines(
    made: Mapping[str, Any], names: Sequence[str], earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a plan tells about its machines, as JSON values.

    Args:
        made: A plan, see `plan.command.run_plan`, measured on these machines.
        names: The machine of each stage.
        earlier: The same of an earlier start, whose machines may come back; None without.

    Returns:
        names; seconds, by name: of the model's blocks on one sample; lines, by "NAME NAME": from the first to the
        second, see `Channel`, null for no limit; shared: machines on the same cores, see `SharedCores`.
    """
    earlier = earlier or {}
    whole = sum(Profile.from_dict(made["profile"]).block_seconds())
    seconds: dict[str, float] = {}
    for name, slowdown in zip(names, made.get("slowdowns") or [1.0] * len(names), strict=True):
        seconds[name] = max(seconds.get(name, 0.0), slowdown * whole)
    lines: dict[str, Any] = {}
    for (one, other), link in zip(pairwise(names), made["links"], strict=True):
        lines |= {f"{one} {other}": link["forward"], f"{other} {one}": link["backward"]}
    shared = []
    for group in made.get("shared_cores", []):
        members = {names[stage] for stage in group["members"]}
        for other in earlier.get("shared", []):
            if not members.isdisjoint(other["names"]):
                members |= set(other["names"]) - set(names)
        shared.append({"names": sorted(members), "at_once": group["at_once"]})
    return {
        "names": list(names),
        "seconds": {**earlier.get("seconds", {}), **seconds},
        "lines": {**earlier.get("lines", {}), **lines},
        "shared": shared,
    }


def fit_links(config: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """Return a configuration for another number of stages: of bits for each link, all links get the fewest."""
    section = dict(config["pipecomp"])
    activations = dict(section.get("activations", {}))
    for key in FEWEST:
        bits = activations.get(key)
        if isinstance(bits, list) and len(bits) != stages - 1:
            activations[key] = min(bits, key=lambda one: one.get("max", 8) if isinstance(one, dict) else one)
    if "activations" in section:
        section["activations"] = activations
    return {**config, "pipecomp": section}


@dataclass(frozen=True, kw_only=True)
class NewCut:
    """A cut that could be made.

    Attributes:
        names: The machine of each stage.
        cuts: First block of each stage, and the number of blocks.
        step_s: Predicted seconds of a step.
        before_s: Those of a step as it is now.
        fits: True if no stage needs more memory than the machines have.
    """

    names: tuple[str, ...]
    cuts: tuple[int, ...]
    step_s: float
    before_s: float
    fits: bool = True

    @property
    def pays(self) -> bool:
        """True if steps get at least 10 % faster."""
        return self.fits and self.step_s <= FASTER * self.before_s

    def __str__(self) -> str:
        text = f"{self.step_s:.3g} s a step instead of {self.before_s:.3g} s, as predicted"
        return text if self.fits else f"{text}, but more memory than the machines have"


class CutPlanner:
    """Predicts steps of a run, and chooses new cuts.

    Args:
        made: The run's plan with "machines", see `describe_machines`.
        options: The options that it was made with.
        memory: Bytes that a machine has for a stage; None if unknown.
    """

    def __init__(self, made: Mapping[str, Any], options: PlanOptions, memory: float | None = None) -> None:
        self.made, self._options, self._memory = made, options, memory
        self.names: tuple[str, ...] = tuple(made["machines"]["names"])
        self._profile = Profile.from_dict(made["profile"])
        self._speeds = MachineSpeeds.from_dict(made["speeds"])
        self._whole = sum(self._profile.block_seconds())

    @cached_property
    def _model(self) -> Any:
        return without_weights(self._options.model, TORCH_DTYPES[self._options.dtype], quantized=True)

    def slowdowns(self, names: Sequence[str], factors: Mapping[str, float]) -> tuple[float, ...]:
        """Return the seconds of machines as multiples of the profile's. factors: by name, of what was measured."""
        measured = self.made["machines"]["seconds"]
        slowest = max(measured.values(), default=self._whole)
        return tuple(factors.get(name, 1.0) * measured.get(name, slowest) / self._whole for name in names)

    def network(self, names: Sequence[str]) -> LinkNetwork:
        """Return the lines between machines, each with the next."""
        lines = {pair: _channel(line) for pair, line in self.made["machines"]["lines"].items()}
        slowest = Channel(
            bits_per_s=min((line.bits_per_s for line in lines.values()), default=math.inf),
            latency_s=max((line.latency_s for line in lines.values()), default=0.0),
        )
        pairs = list(pairwise(names))
        return LinkNetwork(
            forward=tuple(lines.get(f"{one} {other}", slowest) for one, other in pairs),
            backward=tuple(lines.get(f"{other} {one}", slowest) for one, other in pairs),
        )

    def shared_cores(self, names: Sequence[str]) -> tuple[SharedCores, ...]:
        """Return the stages that compute on the same cores, if these do not suffice for all at once."""
        found = []
        for group in self.made["machines"].get("shared", []):
            members = tuple(stage for stage, name in enumerate(names) if name in group["names"])
            if len(members) > group["at_once"]:
                found.append(SharedCores(members=members, at_once=group["at_once"]))
        return tuple(found)

    def predict(
        self, names: Sequence[str], factors: Mapping[str, float] | None = None, cuts: Sequence[int] | None = None
    ) -> StepPrediction:
        """Predict a step.

        Args:
            names: The machine of each stage.
            factors: By name, seconds of a machine as a multiple of those that were measured; 1 for others.
            cuts: None to balance them.
        """
        stages, made = len(names), self.made
        slowdowns = self.slowdowns(names, factors or {})
        if cuts is not None:
            split = balanced(self._model, self._profile, list(cuts), tie=self._options.tie)
        else:
            split = choose_cuts(self._model, self._profile, stages, tie=self._options.tie, slowdowns=slowdowns)
        config = fit_links(made.get("start", made["config"]), stages)
        settings = Config.from_dict(config["pipecomp"] if stages > 1 else {})
        job = TrainingJob(
            profile=self._profile,
            plan=split,
            samples=config["train_micro_batch_size_per_gpu"],
            micro_batches=config.get("gradient_accumulation_steps", 1),
            dtype=TORCH_DTYPES[self._options.dtype],
            tied=tied_values(self._model, split),
            slowdowns=slowdowns,
            shared_cores=self.shared_cores(names),
        )
        return predict(job, settings, self.network(names), self._speeds)

    def stage_seconds(self) -> list[float]:
        """Return the planned forward and backward seconds of each stage for a step."""
        job = self.predict(self.names, cuts=self.made["cuts"]).job
        return [job.micro_batches * sum(pair) for pair in job.stage_seconds()]

    def choose(self, names: Sequence[str], factors: Mapping[str, float] | None = None) -> NewCut:
        """Choose the cut for machines, and compare it with the one of now. Arguments as for `predict`."""
        now = self.predict(self.names, factors, self.made["cuts"])
        new = self.predict(names, factors)
        fits = self._memory is None or max(new.memory_bytes()) <= self._memory
        return NewCut(
            names=tuple(names), cuts=tuple(new.job.plan.cuts), step_s=new.step_s, before_s=now.step_s, fits=fits
        )

    def plan_of(self, cut: NewCut, factors: Mapping[str, float]) -> dict[str, Any]:
        """Return the run's plan with a new cut over the same machines, whose speeds have changed by `factors`."""
        machines = self.made["machines"]
        seconds = {name: factors.get(name, 1.0) * measured for name, measured in machines["seconds"].items()}
        return {**self.made, "cuts": list(cut.cuts), "machines": {**machines, "seconds": seconds}}


def _channel(line: Mapping[str, Any]) -> Channel:
    return Channel(bits_per_s=line["bits_per_s"] or math.inf, latency_s=line["latency_s"])
