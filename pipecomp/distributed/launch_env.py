"""What a launcher (torchrun, deepspeed, or a person) has set for this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipecomp.errors import ConfigError, require

# What launchers of tasks set, which know nothing of RANK: how many tasks there are, and what each rank is to be told.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",
    "OMPI_COMM_WORLD_SIZE": (
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK "
        "LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "MV2_COMM_WORLD_SIZE": (
        "RANK=$MV2_COMM_WORLD_RANK WORLD_SIZE=$MV2_COMM_WORLD_SIZE LOCAL_RANK=$MV2_COMM_WORLD_LOCAL_RANK "
        "LOCAL_WORLD_SIZE=$MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    "PMI_SIZE": "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE LOCAL_RANK=$MPI_LOCALRANKID LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS",
}
_TERMINAL = "SLURM_PTY_PORT"  # of srun --pty: a shell for people, whatever the number of tasks
# Names what a rank ends with: a process by its id, or a launcher at the other end of its standard input.
LAUNCHER, STDIN = "PIPECOMP_LAUNCHER", "stdin"


class Launch(NamedTuple):
    """rank and world are None without a launcher; local_world, the ranks on this machine, where it was not said."""

    rank: int | None = None
    world: int | None = None
    local_rank: int = 0
    local_world: int | None = None
    master: str | None = None

    @property
    def started(self) -> bool:
        """Whether this process is one of several ranks."""
        return self.world is not None and self.world > 1

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world of a process that a launcher has started."""
        assert self.rank is not None, "started by a launcher"
        assert self.world is not None, "started by a launcher"
        return self.rank, self.world

    @property
    def several_machines(self) -> bool | None:
        """Whether ranks run on more than one machine, None where that is not known."""
        if self.world is None:
            return None
        if self.local_world is not None:
            return self.world > self.local_world
        return False if self.world == 1 else None


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read RANK, WORLD_SIZE and what goes with them. ConfigError where they cannot be, or are missing among tasks."""
    # torchrun and deepspeed name differently how many ranks share this machine
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1) or _number(environ, "LOCAL_SIZE", 1)
    rank, world = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if rank is None and world is None:
        _check_alone(environ)
    if (rank is None) != (world is None):
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ConfigError(missing, None, "a number: RANK and WORLD_SIZE go together, and a launcher sets both")
    if rank is not None and world is not None and rank >= world:
        raise ConfigError("RANK", rank, f"0 to {world - 1}, as WORLD_SIZE is {world}")
    return Launch(rank, world, _number(environ, "LOCAL_RANK", 0) or 0, local_world, environ.get("MASTER_ADDR"))


def _check_alone(environ: Mapping[str, str]) -> None:
    """ConfigError where this process is one of several tasks, each of which would take itself for the whole run."""
    for name, variables in _TASKS.items():
        if environ.get(name, "1") != "1" and _TERMINAL not in environ:
            launcher = "srun" if name.startswith("SLURM") else "mpirun"
            allowed = (
                f"a number: {launcher} has started this {environ[name]} times, and each would train alone. Let it "
                f"start bash -c 'export {variables}; exec \"$@\"' rank COMMAND, with MASTER_ADDR and MASTER_PORT "
                "in the environment, as examples/slurm/train.sbatch does"
            )
            raise ConfigError("RANK", None, allowed)


def _number(environ: Mapping[str, str], name: str, smallest: int) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    require(text.isdecimal() and int(text) >= smallest, name, text, f"a whole number from {smallest} on")
    return int(text)
