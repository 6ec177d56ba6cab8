"""The ranks of a run's stages and replicas, the only place that computes one from the other.

K stages, R replicas. Launchers put consecutive ranks on one machine, so that the order of the ranks decides what
crosses the line between machines:

    stages-across     stage k of replica r is rank k·R + r: a stage's replicas are together, activations cross
    replicas-across   stage k of replica r is rank r·K + k: a replica's stages are together, gradients cross

Files of a rank's state (checkpoints, message stores, records) are named by `state_number`, k·R + r in every layout, so
that a run continues in another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecomp.errors import require

STAGES_ACROSS, REPLICAS_ACROSS = "stages-across", "replicas-across"
LAYOUTS = (STAGES_ACROSS, REPLICAS_ACROSS)


@dataclass(frozen=True)
class RankLayout:
    """The order of ranks.

    Attributes:
        stages: K.
        replicas: R.
        name: One of LAYOUTS.
    """

    stages: int
    replicas: int
    name: str = STAGES_ACROSS

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stages * self.replicas

    @property
    def axes(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """DeepSpeed's names of the axes with their lengths; consecutive ranks differ in the last one."""
        pipe, data = ("pipe", self.stages), ("data", self.replicas)
        return (pipe, data) if self.name == STAGES_ACROSS else (data, pipe)

    def rank(self, stage: int, replica: int) -> int:
        """Return the rank of a stage of a replica."""
        if self.name == STAGES_ACROSS:
            return stage * self.replicas + replica
        return replica * self.stages + stage

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage and the replica of a rank."""
        if self.name == STAGES_ACROSS:
            return divmod(rank, self.replicas)
        replica, stage = divmod(rank, self.stages)
        return stage, replica

    def pipelines(self) -> list[list[int]]:
        """Return for each replica the ranks of its stages, in order."""
        return [[self.rank(k, r) for k in range(self.stages)] for r in range(self.replicas)]

    def averages(self) -> list[list[int]]:
        """Return for each stage the ranks of its replicas, in order."""
        return [[self.rank(k, r) for r in range(self.replicas)] for k in range(self.stages)]

    def state_number(self, rank: int) -> int:
        """Return the number in the names of a rank's files."""
        return state_number(*self.place(rank), self.replicas)

    def check(self, key: str, machines: Sequence[object]) -> None:
        """Raise ConfigError if the layout makes no difference.

        Args:
            key: The setting.
            machines: Machine of each rank; equal for ranks on one machine.
        """
        allowed = f"{STAGES_ACROSS!r} or no value"
        several = self.stages > 1 and self.replicas > 1
        counts = f"{self.stages} stage(s) × {self.replicas} replica(s)"
        hint = f"This run has {counts}, of which the order of ranks is the same in every layout."
        require(several or self.name == STAGES_ACROSS, key, self.name, allowed, hint)
        hint = "Every machine has one process, so that activations and gradients cross the line in every layout."
        together = len(set(machines)) < len(machines)
        require(together or self.name == STAGES_ACROSS, key, self.name, allowed, hint)


def state_number(stage: int, replica: int, replicas: int) -> int:
    """Return the number in the names of files with the state of a stage of a replica, in every layout."""
    return stage * replicas + replica
