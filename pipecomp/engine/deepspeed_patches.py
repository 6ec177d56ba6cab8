"""Adapt DeepSpeed while its module and engine are built: devices, point-to-point calls, group timeouts, output.

docs/deepspeed.md lists each of its behaviours that needs this.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.utils import groups
from deepspeed.utils import logger as deepspeed_logger
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.constants import default_pg_timeout

from pipecomp.distributed.rendezvous import collective_backend

_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")  # DeepSpeed requires that mpirun's has the same value


def attach_deepspeed() -> None:
    """Initialize DeepSpeed in the process group that torch has joined."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for 25 s, and never used
    deepspeed.init_distributed(dist_backend=collective_backend(), verbose=False)


@contextmanager
def existing_device() -> Iterator[None]:
    """Let DeepSpeed pick an existing device when several ranks share one: LOCAL_RANK modulo the number of devices.

    DeepSpeed picks the device whose number is LOCAL_RANK. The variable is restored at the end.
    """
    accelerator = get_accelerator()
    devices = 0 if accelerator.device_name() == "cpu" else accelerator.device_count()
    before = {name: os.environ[name] for name in _LOCAL_RANK if devices and name in os.environ}
    os.environ.update({name: str(int(place) % devices) for name, place in before.items()})
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def no_stage_messages() -> Iterator[None]:
    """Disable DeepSpeed's own point-to-point calls.

    Its engine starts by sending a zero from stage to stage, to make NCCL connect them. The zero is in device memory,
    which gloo cannot send, and packets use the links of this package instead.
    """
    p2p = deepspeed_pipe.p2p
    stock = p2p.send, p2p.recv

    def skip(tensor: Any, stage: int, async_op: bool = False) -> None:
        pass

    p2p.send = p2p.recv = skip
    try:
        yield
    finally:
        p2p.send, p2p.recv = stock


@contextmanager
def long_group_timeouts() -> Iterator[None]:
    """Give NCCL groups the timeout of other backends: 30 minutes instead of 10, after which NCCL ends the process.

    Over a slow link an average or the loss of an evaluation may take that long. The heartbeat detects lost ranks.
    """
    stock = distributed_c10d.default_pg_nccl_timeout
    distributed_c10d.default_pg_nccl_timeout = default_pg_timeout
    try:
        yield
    finally:
        distributed_c10d.default_pg_nccl_timeout = stock


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's tables of layers and memory, and its warning about its own first learning rate."""

    def wanted(record: logging.LogRecord) -> bool:
        return "Attempting to get learning rate" not in record.getMessage()

    deepspeed_logger.addFilter(wanted)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        deepspeed_logger.removeFilter(wanted)


def deepspeed_groups() -> set[Any]:
    """Return the process groups that DeepSpeed keeps for all engines of a process."""
    values = list(vars(groups).values())
    values += [value for each in values if isinstance(each, dict) for value in each.values()]
    return {value for value in values if isinstance(value, ProcessGroup)}
