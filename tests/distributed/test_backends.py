"""The backend of torch's collectives, and NCCL's start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.distributed import rendezvous
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import LinkError, LinkTimeoutError
from tests.limits import HANG_S


def test_ranks_that_choose_apart_take_what_works_for_all():
    assert rendezvous.common_backend(["nccl", "nccl"], ["one", "two"]) == "nccl"
    assert rendezvous.common_backend(["nccl", "gloo"], ["one", None]) == "gloo"  # another machine has no GPU
    assert rendezvous.common_backend(["nccl"] * 3, ["one", "two", "one"]) == "gloo"  # one for two ranks
    assert rendezvous.common_backend(["xccl", "xccl"], [None, None]) == "xccl"  # of no GPU of NVIDIA's


def work(rank: int, world: int, note: Any) -> tuple[str, str, float]:
    rendezvous.collective_backend, asked = lambda: ("nccl", "gloo")[rank], rendezvous.collective_backend
    rendezvous.join_processes()
    total = torch.ones(1)
    dist.all_reduce(total)
    found = dist.get_backend(), asked(), float(total)
    dist.destroy_process_group()
    return found


@pytest.mark.ranks
def test_a_rank_with_a_gpu_joins_one_without():
    assert run_ranks(2, work, timeout_s=HANG_S) == dict.fromkeys(range(2), ("gloo", "gloo", 2.0))


def test_nccl_is_not_bound_to_a_device(monkeypatch):
    """Else ranks outside of a group of gloo's would wait for those inside: see docs/deepspeed.md."""
    happened: list[Any] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(device))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: device)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: happened.append((backend, sorted(how))))
    monkeypatch.setattr(dist, "all_reduce", happened.append)
    monkeypatch.setattr(rendezvous, "_set_timeout", lambda timeout, group: None)
    rendezvous._initialize(None, "nccl", 1, 3)
    assert happened == [1, ("nccl", ["rank", "store", "timeout", "world_size"]), "cuda"]


@pytest.mark.parametrize(("backend", "remedy"), [("nccl", "NCCL_P2P_DISABLE=1"), ("gloo", "GLOO_SOCKET_IFNAME")])
def test_what_to_set_where_ranks_that_have_met_cannot_connect(monkeypatch, backend, remedy):
    def fail(*_: Any) -> None:
        raise RuntimeError("unhandled cuda error")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("PIPECOMP_KEYS", raising=False)
    monkeypatch.delenv("PIPECOMP_RESTARTS", raising=False)
    monkeypatch.setattr(rendezvous, "watch_launcher", lambda: None)
    monkeypatch.setattr(rendezvous, "_meet", lambda rank, world: (None, backend))
    monkeypatch.setattr(rendezvous, "_initialize", fail)
    said = f"^rank 1 cannot connect to the other ranks: unhandled cuda error.*{remedy}"
    with pytest.raises(LinkError, match=said) as found:
        rendezvous.join_processes()
    assert not isinstance(found.value, LinkTimeoutError)
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")
    with pytest.raises(LinkTimeoutError, match=said):  # a rank was lost meanwhile
        rendezvous.join_processes()
