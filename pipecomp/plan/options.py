"""The options of `pipecomp plan`, checked, what they ask for, and the methods that plans compare."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipecomp.distributed.launch_env import Launch
from pipecomp.errors import ConfigError, require
from pipecomp.plan.prediction import MachineSpeeds
from pipecomp.plan.profile import Profile, count, most_tokens
from pipecomp.plan.search import AVERAGES
from pipecomp.plan.simulation import TCP_SHARE
from pipecomp.stages.partition.loading import resolve
from pipecomp.utils.units import MAX_DELAY_S, format_nominal_rate, parse_rate, parse_time

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = ("10gbit", "1gbit", "500mbit", "300mbit", "100mbit")
_TOKENS = 1024
Rates = tuple[tuple[float, ...], float]  # bits per second of content, of all links or of each; seconds one way


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned.

    nodes: stages × replicas. stages, micro_batch: None to choose. batch: samples of a step. memory_bytes: of a node.
    gradients: the method for those of replicas and tied weights, None to choose. slowdowns: how many times the
    profile's seconds each node takes, stage 0's replicas first; empty where all are alike. dropout: that the model is
    trained with, None for its own. one_pass: whether every sample is seen once.
    """

    model: Any
    nodes: int
    batch: int
    stages: int | None = None
    micro_batch: int | None = None
    dtype: torch.dtype = torch.float32
    tie: bool = True
    gradients: str | None = None
    memory_bytes: float = math.inf
    slowdowns: tuple[float, ...] = ()
    dropout: float | None = None
    one_pass: bool = False

    def of_gradients(self) -> dict[str, Any]:
        """Make the section "gradients" of predictions."""
        return {} if self.gradients is None else {"method": self.gradients}

    def stage_slowdowns(self, K: int) -> tuple[float, ...]:
        """Take the slowest replica's for each stage."""
        R = self.nodes // K
        return tuple(max(self.slowdowns[k * R : (k + 1) * R]) for k in range(K)) if self.slowdowns else ()

    def check_memory(self, needs: float) -> None:
        """Raise ConfigError if a node has less. needs: bytes."""
        require(
            needs <= self.memory_bytes,
            "memory",
            self.memory_bytes / 1e9,
            f"at least {_rounded_up(needs / 1e9)} GB for each node",
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan is asked for, as on the command line. Raises ConfigError for what does not fit together.

    Attributes:
        model: a Hugging Face model, config, folder or hub name; of a folder only config.json is read.
        nodes, stages, micro_batch: None to choose.
        batch: samples of a step, over all replicas.
        tokens: of a sample; None for 1024, or as many as the model takes.
        bandwidth: of the links, as in "100mbit" or, link by link, "1gbit/100mbit"; several networks with commas.
        delay: one way, as in "20ms".
        speed: TFLOP/s of the nodes, as in "30" or, node by node, "30/10".
        profile: instead of `speed`, a file that a plan with `measure` wrote.
        memory: GB of a node.
        dtype: "fp32", "bf16" or "fp16".
        tie: whether tied weights stay tied.
        gradients: one of `search.AVERAGES`, for replicas and tied weights; None to choose.
        recompute: with `speed`: activation checkpointing.
        measure: time this machine, or all of a launcher's with their links.
        store: with `measure`: where the message store would be.
        dropout: that the model is trained with; None for its own.
        one_pass: whether the training sees every sample once.
    """

    model: Any
    nodes: int | None = None
    stages: int | None = None
    batch: int = 32
    micro_batch: int | None = None
    tokens: int | None = None
    bandwidth: str | None = None
    delay: str | None = None
    speed: str | None = None
    profile: Path | None = None
    memory: float | None = None
    dtype: str = "fp32"
    tie: bool = True
    gradients: str | None = None
    recompute: bool = False
    measure: bool = False
    store: Path = Path("messages")
    dropout: float | None = None
    one_pass: bool = False

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.gradients in (None, *AVERAGES), "gradients", self.gradients, ", ".join(AVERAGES))
        counts = {"nodes": self.nodes, "stages": self.stages, "batch": self.batch, "micro-batch": self.micro_batch}
        for key, number in counts.items():
            require(number is None or number >= 1, key, number, "a whole number from 1")
        share = self.dropout
        require(share is None or 0 <= share < 1, "dropout", share, "0, or a share below 1")
        require(self.memory is None or self.memory > 0, "memory", self.memory, "a number of GB above 0")
        recompute = self.recompute or None
        if self.measure:
            _check_unset("together with --measure", speed=self.speed, profile=self.profile, recompute=recompute)
        elif self.profile is not None:
            states = "together with --profile, which states it"
            _check_unset(states, speed=self.speed, tokens=self.tokens, recompute=recompute)
        elif self.speed is None:
            more = {"dropout": self.dropout, "one-pass": self.one_pass or None}
            _check_unset("without --speed", recompute=recompute, **more)

    @cached_property
    def networks(self) -> dict[str, Rates]:
        """Read the networks to plan for, by name; the first one decides."""
        return networks_of(self.bandwidth, self.delay)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Read the TFLOP/s of all nodes, or of each; empty where none was given."""
        try:
            found = tuple(float(part) for part in self.speed.split("/")) if self.speed is not None else ()
        except ValueError:
            found = (0.0,)
        allowed = "numbers above 0, with slashes between them"
        require(all(0 < one < math.inf for one in found), "speed", self.speed, allowed)
        return found

    def check_launch(self, launch: Launch) -> None:
        """Refuse what the ranks of a launcher measure or are."""
        if launch.started:
            with_ranks = "when a launcher's ranks are measured"
            _check_unset(with_ranks, nodes=self.nodes, bandwidth=self.bandwidth, delay=self.delay)

    def wanted(self, world: int | None) -> PlanRequest:
        """Say what is to be planned. world: ranks of a launcher, None without one."""
        rates, _ = next(iter(self.networks.values()))
        drawn = len(rates) + 1 if len(rates) > 1 else None  # links given one by one say how many stages there are
        several = len(self.speeds) > 1
        stages = self.stages or world or drawn
        for links, _ in self.networks.values():
            allowed = "one rate; --stages says how many links there are"
            if stages is not None:
                allowed = f"one rate, or {stages - 1} for {stages} stages"
            require(len(links) in (1, (stages or 0) - 1), "bandwidth", self.bandwidth, allowed)
        nodes = world or self.nodes or (len(self.speeds) if several else None) or self.stages or drawn or 2
        wanted = PlanRequest(
            model=self.model,
            nodes=nodes,
            stages=stages,
            batch=self.batch,
            micro_batch=self.micro_batch,
            tie=self.tie,
            gradients=self.gradients,
            dtype=DTYPES[self.dtype],
            memory_bytes=math.inf if self.memory is None else self.memory * 1e9,
            dropout=self.dropout,
            one_pass=self.one_pass,
        )
        if several:
            require(len(self.speeds) == nodes, "speed", self.speed, f"one number, or one for each of {nodes} nodes")
            wanted = replace(wanted, slowdowns=tuple(min(self.speeds) / one for one in self.speeds))
        return wanted

    @cached_property
    def _noted(self) -> dict[str, Any]:
        """Read the file of `profile`."""
        assert self.profile is not None, "asked for only with a profile"
        written = "a file that pipecomp plan --measure --json wrote"
        try:
            found = json.loads(self.profile.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("profile", str(self.profile), written) from error
        require(isinstance(found, dict), "profile", str(self.profile), written)
        dtype = found.get("dtype", self.dtype)
        require(dtype == self.dtype, "dtype", self.dtype, f"{dtype}, in which the profile's seconds were measured")
        one_pass = found.get("one_pass", self.one_pass)
        require(one_pass == self.one_pass, "one-pass", self.one_pass, f"{one_pass}, as when the profile was measured")
        return dict(found)

    def noted_speeds(self) -> MachineSpeeds:
        """Take what the machines of a profile do besides the model; without one nothing is known of that."""
        noted = {} if self.profile is None else self._noted.get("speeds", {})
        try:
            known: dict[str, Any] = {name: math.inf if value is None else value for name, value in noted.items()}
            return MachineSpeeds(**known)
        except (AttributeError, TypeError) as error:
            written = "the speeds that pipecomp plan --measure --json wrote"
            raise ConfigError("profile", str(self.profile), written) from error

    @property
    def without_seconds(self) -> bool:
        """Say whether nothing tells how fast machines are: then sizes are all that can be planned."""
        return self.speed is None and self.profile is None and not self.measure

    @property
    def size(self) -> tuple[Any, int, torch.dtype]:
        """Give model, tokens of a sample, dtype."""
        tokens = self.tokens
        if tokens is None:
            tokens = min(_TOKENS, most_tokens(resolve(self.model).config) or _TOKENS)
        return self.model, tokens, DTYPES[self.dtype]

    def counted(self) -> Profile:
        """Count the model's operations and memory; no seconds."""
        return count(*self.size)

    def estimated(self) -> Profile:
        """Read the model's profile from a file, or give its operations seconds by the slowest node's speed."""
        if self.profile is not None:
            return Profile.from_dict(self._noted.get("profile"))
        if not self.speeds:
            allowed = (
                "TFLOP/s of a stage's machine; or --measure on it; or --profile FILE; or --stages, for sizes alone"
            )
            raise ConfigError("speed", None, allowed)
        found = self.counted().estimated(min(self.speeds) * 1e12)
        return found.recomputing(DTYPES[self.dtype]) if self.recompute else found


def _rounded_up(size: float) -> float:
    """Round to two digits, but never below."""
    step = 10.0 ** (math.floor(math.log10(size)) - 1)
    return float(f"{math.ceil(size / step) * step:.2g}")


def _check_unset(where: str, **given: object) -> None:
    for key, value in given.items():
        require(value is None, key, value, f"no value {where}")


def networks_of(bandwidth: str | None, delay: str | None) -> dict[str, Rates]:
    """Read networks by name: content rates in bits per second, and seconds one way.

    bandwidth: nominal rates; commas between networks, slashes between the links of one; None for RATES.
    """
    latency_s = 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S)
    names: Sequence[str] = bandwidth.split(",") if bandwidth is not None else RATES
    found = {}
    for name in names:
        rates = [parse_rate("bandwidth", link.strip()) for link in name.split("/")]
        found["/".join(map(format_nominal_rate, rates))] = (tuple(rate * TCP_SHARE for rate in rates), latency_s)
    return found
