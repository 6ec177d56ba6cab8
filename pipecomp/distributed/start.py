"""How a program's processes start: they join each other, share the cores of a machine, and seed torch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.heartbeat import process_heartbeat
from pipecomp.distributed.network_interfaces import GLOO_VARIABLE, interface_towards
from pipecomp.distributed.placement import ranks_on_cores, usable_cores
from pipecomp.distributed.rendezvous import join_processes


def start_processes(seed: int | None = None, config: Any = None) -> None:
    """Join the other processes of this run; call it before anything else, on every process.

    Processes that compute on a machine's CPU share its cores, or what their container may use of them, evenly, unless
    OMP_NUM_THREADS is set or each has cores of its own, as Slurm and mpirun give them. Processes that meet at a
    loopback address let gloo use the loopback interface, unless GLOO_SOCKET_IFNAME is set.

    Args:
        seed: Of torch's generator, which is seeded differently on every rank. None means 0.
        config: DeepSpeed's, a dict or a JSON file, for what its "pipecomp" section says of TLS; without it
            PIPECOMP_KEYS decides.

    Raises:
        LinkError: On every rank, if the ranks have different versions or cannot reach each other.
        KeysError: This machine's keys do not allow it to join.
    """
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        # Without it gloo takes the address that the host name resolves to, which need not be reachable.
        own = interface_towards("127.0.0.1")
        if own is not None:
            os.environ.setdefault(GLOO_VARIABLE, own)
    join_processes(config)
    sharing = ranks_on_cores(all_ranks())
    if computes_on_cpu() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // sharing))
    torch.manual_seed((seed or 0) * 65536 + dist.get_rank())


def all_ranks() -> AllRanks:
    """Begin a round of questions to all ranks of a run that has started; every rank must call this.

    Returns:
        The round. If a rank ends before it has answered, those that wait for it raise an error.
    """
    return AllRanks(missed=process_heartbeat().missed)


def computes_on_cpu() -> bool:
    """Say whether stages compute on the CPU: there is no NVIDIA GPU, or DeepSpeed was told to leave it alone."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
