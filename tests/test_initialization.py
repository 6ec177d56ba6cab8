"""DeepSpeed's device while its module and engine are built, and its Adam there."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe import p2p
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from pipecomp import initialization
from pipecomp.engine import build, deepspeed_patches, validation


def devices(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    accelerator = SimpleNamespace(device_name=lambda: name, device_count=lambda: count)
    for module in (deepspeed_patches, validation):
        monkeypatch.setattr(module, "get_accelerator", lambda: accelerator, raising=False)


@pytest.mark.parametrize(
    ("name", "count", "place", "inside"), [("cuda", 1, "1", "0"), ("cuda", 2, "3", "1"), ("cpu", 1, "1", "1")]
)
def test_ranks_that_share_a_device_find_one_that_is_there(monkeypatch, name, count, place, inside):
    devices(monkeypatch, name, count)
    monkeypatch.setenv("LOCAL_RANK", place)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", place)
    with suppress(KeyError), deepspeed_patches.existing_device():
        assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == (inside, inside)
        raise KeyError
    assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == (place, place)


def test_what_no_launcher_set_stays_unset(monkeypatch):
    devices(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    with deepspeed_patches.existing_device():
        assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ


def test_stages_send_again_afterwards():
    stock = p2p.send, p2p.recv
    with suppress(KeyError), deepspeed_patches.no_stage_messages():
        assert p2p.send(None, 1) is None
        raise KeyError
    assert (p2p.send, p2p.recv) == stock


def test_groups_over_nccl_wait_as_long_as_others(monkeypatch):
    ten_minutes, seen = timedelta(minutes=10), []
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", ten_minutes)

    def building(*args: object) -> None:
        seen.append(distributed_c10d._get_default_timeout("nccl"))
        raise KeyError

    settings = SimpleNamespace(seed=0, transport=SimpleNamespace(timeout_s=1.0, data_timeout_s=1.0))
    stood_in_for = {
        "join_processes": lambda config: None,
        "attach_deepspeed": lambda: None,
        "process_heartbeat": lambda: SimpleNamespace(starting=nullcontext, missed=None),
        "validate": lambda *args, **more: SimpleNamespace(plan=None, ds_config={}, settings=settings, ranks=None),
        "AllRanks": SimpleNamespace,
    }
    for name, one in stood_in_for.items():
        monkeypatch.setattr(initialization, name, one)
    monkeypatch.setattr(build, "existing_device", nullcontext)
    monkeypatch.setattr(build, "pipeline_module", building)
    with pytest.raises(KeyError):
        initialization.initialize("model")
    assert seen == [default_pg_timeout]
    assert distributed_c10d._get_default_timeout("nccl") == ten_minutes < default_pg_timeout


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_no_compiler_is_needed_for_adam(monkeypatch, name):
    """And a checkpoint of one kind of device is loaded on the other."""
    devices(monkeypatch, name, 1)
    configs = [{"optimizer": {"type": "AdamW"}}, {"optimizer": {"type": "Adam", "params": {"torch_adam": False}}}]
    for config in configs:
        validation._set_defaults(config)
    assert [config["optimizer"]["params"]["torch_adam"] for config in configs] == [True, False]
