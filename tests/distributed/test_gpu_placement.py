"""GPUs are told apart by what they are, since their numbers differ from process to process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomp.distributed import rendezvous
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.placement import RankGpu, own_gpu, ranks_on_gpu
from pipecomp.distributed.rendezvous import collective_backend
from tests.limits import HANG_S


def see(set_attribute: Any, *gpus: tuple[str, str]) -> None:
    """Let torch see these GPUs: names of their kind, and unique ones."""
    set_attribute(torch.cuda, "is_available", lambda: bool(gpus))
    set_attribute(torch.cuda, "device_count", lambda: len(gpus))
    set_attribute(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(name=gpus[n][0], uuid=gpus[n][1]))


def test_a_rank_takes_the_gpu_of_its_place_or_the_only_one_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch.setattr, ("H100", "a"), ("H100", "b"))
    assert [own_gpu(place) for place in range(3)] == [RankGpu("a", "a"), RankGpu("b", "b"), RankGpu("a", "a")]
    see(monkeypatch.setattr, ("H100", "b"))
    assert own_gpu(1) == RankGpu("b", "b")
    see(monkeypatch.setattr)
    assert own_gpu(0) is None


@pytest.mark.parametrize("uuid", ["of the whole GPU", "of the instance"])
def test_instances_of_a_gpu_have_their_own_memory_and_are_one_for_nccl(
    monkeypatch: pytest.MonkeyPatch, uuid: str
) -> None:
    found = []
    for instance in ("MIG-1", "MIG-2"):
        see(monkeypatch.setattr, ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", uuid))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", instance)
        found.append(own_gpu(0))
    first, second = found
    assert first is not None
    assert second is not None
    assert first.name != second.name
    assert first.whole == second.whole
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own_gpu(0) is not None


def test_ranks_on_a_gpu_are_counted() -> None:
    ranks: Any = SimpleNamespace(all_gather_object=lambda name: ["a", "b", None, name])
    assert ranks_on_gpu(ranks, RankGpu("a", "a")) == 2
    assert ranks_on_gpu(ranks, RankGpu("c", "c")) == 1
    assert ranks_on_gpu(ranks, None) == 0


def test_how_many_gpus_a_rank_sees_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Slurm, with a GPU for each task, it is one of four."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert collective_backend() == "nccl"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert collective_backend() == "gloo"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert collective_backend() == "gloo"


def work(rank: int, world: int, note: Any, names: list[str]) -> str:
    see(setattr, ("H100", names[rank]))
    chosen: list[str] = []
    joined = rendezvous._initialize

    def initialize(store: Any, backend: str, rank: int, world: int) -> None:
        chosen.append(backend)
        joined(store, "gloo", rank, world)

    rendezvous.collective_backend, rendezvous._initialize = lambda: "nccl", initialize
    rendezvous.join_processes()
    dist.barrier()
    dist.destroy_process_group()
    return chosen[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("names", "backend"), [(["a", "b"], "nccl"), (["a", "a"], "gloo")])
def test_all_ranks_come_to_the_same(names: list[str], backend: str) -> None:
    """Each sees one GPU alone, as number 0."""
    assert run_ranks(2, work, names, timeout_s=HANG_S) == {0: backend, 1: backend}
