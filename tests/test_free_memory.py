"""A rank's share of free memory, within the limits of its container."""

import psutil
import pytest
import torch

from pipecomp.utils import cgroups
from pipecomp.utils.cgroups import free_bytes, free_within_limits


def write_group(folder, limit, used, cache, *, old=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = cgroups._VERSION_1 if old else cgroups._VERSION_2
    for name, value in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Gives what is left for a process with these lines."""
    monkeypatch.setattr(cgroups, "_TOP", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "of_process")

    def found(lines):
        (tmp_path / "of_process").write_text(lines)
        return list(free_within_limits())

    return found


def test_each_group_above_a_process_limits_it(left, tmp_path):
    write_group(tmp_path / "groups/slurm/job", 1000, 700, 100)
    write_group(tmp_path / "groups/slurm", 900, 800, 0)
    write_group(tmp_path / "groups", "max", 10_000, 0)
    assert left("0::/slurm/job\n") == [400, 100]


def test_a_container_sees_its_own_group_at_the_top(left, tmp_path):
    write_group(tmp_path / "groups/memory", 1000, 700, 100, old=True)
    assert left("5:devices:/\n4:memory:/docker/0a1b\n") == [400]
    write_group(tmp_path / "groups", 1000, 600, 0)
    assert left("0::/\n") == [400]


def test_no_limits(left):
    assert list(free_within_limits()) == []  # nothing says in which groups the process is
    assert left("0::/\n5:devices:/\n") == []


@pytest.mark.parametrize(("limits", "free"), [([], 4000), ([1000, 900], 900), ([-5], 0)])
def test_a_rank_has_its_part_of_the_least(limits, free, monkeypatch):
    class Memory:
        available = 4000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(cgroups, "free_within_limits", lambda: limits)
    assert free_bytes(torch.device("cpu")) == free
    assert free_bytes(torch.device("cpu"), ranks=3) == free // 3


def test_ranks_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1200, 4000))
    assert [free_bytes(torch.device("cuda", 0), ranks) for ranks in (1, 2, 3)] == [1200, 600, 400]
