"""What DeepSpeed takes for granted while its module and engine are built, and is not so here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

# DeepSpeed demands that mpirun's name, where it is set, has the same number.
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@contextmanager
def device_that_is_there() -> Iterator[None]:
    """Let DeepSpeed take a device that this machine has, also where ranks share one: LOCAL_RANK modulo their number.

    DeepSpeed takes the device with the number LOCAL_RANK. To be left when module and engine are built: afterwards
    LOCAL_RANK is the rank's place on its machine again.
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
def silent_stages() -> Iterator[None]:
    """Let DeepSpeed's stages send each other nothing.

    Its engine begins with a zero, which nobody reads, to let NCCL connect the stages. It is in the device's memory,
    from which gloo cannot send; and later packets go over links of our own.
    """
    p2p = deepspeed_pipe.p2p
    stock = p2p.send, p2p.recv

    def nothing(tensor: Any, stage: int, async_op: bool = False) -> None:
        pass

    p2p.send = p2p.recv = nothing
    try:
        yield
    finally:
        p2p.send, p2p.recv = stock


@contextmanager
def patient_groups() -> Iterator[None]:
    """Let groups that are made inside wait as long over NCCL as over all else: half an hour, not ten minutes.

    After that NCCL ends the process. Over a slow link averages of replicas and sums of tied weights may take so long,
    and the loss of an evaluation comes when all activations have. A rank that is gone is missed by the heartbeat.
    """
    stock = distributed_c10d.default_pg_nccl_timeout
    distributed_c10d.default_pg_nccl_timeout = default_pg_timeout
    try:
        yield
    finally:
        distributed_c10d.default_pg_nccl_timeout = stock
