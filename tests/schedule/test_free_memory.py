"""What a rank may still take is its part, within the limits of its container."""

import psutil
import pytest
import torch

from pipecomp.schedule import free_memory
from pipecomp.schedule.free_memory import free_bytes, left_by_limits


def write_group(folder, limit, used, cache, *, old=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = free_memory._VERSION_1 if old else free_memory._VERSION_2
    for name, value in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def left(tmp_path, line):
    (tmp_path / "of_process").write_text(line)
    return list(left_by_limits(tmp_path / "groups", tmp_path / "of_process"))


def test_each_group_above_a_process_limits_it(tmp_path):
    write_group(tmp_path / "groups/slurm/job", 1000, 700, 100)
    write_group(tmp_path / "groups/slurm", 900, 800, 0)
    write_group(tmp_path / "groups", "max", 10_000, 0)
    assert left(tmp_path, "0::/slurm/job\n") == [400, 100]


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    write_group(tmp_path / "groups/memory", 1000, 700, 100, old=True)
    assert left(tmp_path, "5:devices:/\n4:memory:/docker/0a1b\n") == [400]
    write_group(tmp_path / "groups", 1000, 600, 0)
    assert left(tmp_path, "0::/\n") == [400]


def test_no_limits(tmp_path):
    assert left(tmp_path, "0::/\n5:devices:/\n") == []
    assert list(left_by_limits(tmp_path, tmp_path / "missing")) == []


@pytest.mark.parametrize(("limits", "free"), [([], 4000), ([1000, 900], 900), ([-5], 0)])
def test_a_rank_has_its_part_of_the_least(limits, free, monkeypatch):
    class Memory:
        available = 4000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(free_memory, "left_by_limits", lambda: limits)
    assert free_bytes(torch.device("cpu")) == free
    assert free_bytes(torch.device("cpu"), ranks=3) == free // 3


def test_ranks_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1200, 4000))
    assert [free_bytes(torch.device("cuda", 0), ranks) for ranks in (1, 2, 3)] == [1200, 600, 400]
