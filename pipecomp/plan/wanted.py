"""What is to be planned, and the methods that plans compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pipecomp.config import Config
from pipecomp.errors import ConfigError

FIRST_VISIT = 8  # bits that training does not notice: benchmarks/results/first_visit.md
_METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"method": "none"}),
    ("bf16", {"method": "bf16"}),
    ("DirectQ fw4 bw8", {"method": "direct", "forward_bits": 4, "backward_bits": 8}),
    *(
        (
            f"AQ-SGD fw{forward} bw{backward}",
            {"method": "aqsgd", "forward_bits": forward, "backward_bits": backward, "first_visit": FIRST_VISIT},
        )
        for forward, backward in ((8, 8), (4, 8), (3, 6), (2, 4))
    ),
)


def methods(stages: int, tie: bool) -> list[tuple[str, Config]]:
    """List what to compare, by name; one stage has nothing to compress."""
    return [
        (name, Config.from_dict({"activations": activations, "tie": tie}))
        for name, activations in (_METHODS if stages > 1 else _METHODS[:1])
    ]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be planned.

    nodes: stages × replicas. stages, micro_batch: None to choose. batch: samples of a step. memory_bytes: of a node.
    slowdowns: how many times the profile's seconds each node takes, stage 0's replicas first; empty where all are
    alike.
    """

    model: Any
    nodes: int
    batch: int
    stages: int | None = None
    micro_batch: int | None = None
    dtype: torch.dtype = torch.float32
    tie: bool = True
    memory_bytes: float = math.inf
    slowdowns: tuple[float, ...] = ()

    def stage_slowdowns(self, K: int) -> tuple[float, ...]:
        """Take the slowest replica's for each stage."""
        R = self.nodes // K
        return tuple(max(self.slowdowns[k * R : (k + 1) * R]) for k in range(K)) if self.slowdowns else ()

    def check_memory(self, needs: float) -> None:
        """Raise ConfigError if a node has less. needs: bytes."""
        if needs > self.memory_bytes:
            raise ConfigError("memory", self.memory_bytes / 1e9, f"at least {needs / 1e9:.1f} GB for each node")
