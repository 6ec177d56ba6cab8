"""CudaStaging on the fake torch.cuda of tests/fake_cuda.py; on a real GPU: tests/gpu/test_staging_gpu.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.allreduce import State
from pipecomp.allreduce.loopback import LoopbackGroup
from pipecomp.allreduce.state import _AverageJob
from pipecomp.kernels import staging as staging_module
from pipecomp.kernels.staging import CudaStaging
from tests.fake_cuda import DEVICE, FakeCuda, use_fake_cuda
from tests.limits import HANG_S


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return use_fake_cuda(monkeypatch)


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(HANG_S)


@pytest.mark.parametrize("pinned_bytes", [1 << 20, 1], ids=["pinned", "pageable"])
def test_threads_select_their_gpu(cuda, pinned_bytes):
    staging, x = CudaStaging(DEVICE, pinned_bytes), torch.randn(3000)
    out = elsewhere(staging.to_host, x)
    assert torch.equal(elsewhere(out.wait), x)
    back = elsewhere(staging.to_device, torch.from_numpy(staging.buffer(12)).view(torch.float32).copy_(x[:3]))
    assert torch.equal(elsewhere(back.wait), x[:3])
    assert torch.equal(elsewhere(staging.to_device, x).wait(), x)


def test_copies_wait_for_computing_and_computing_for_copies(cuda):
    """Memory that a stream still uses is not given to another."""
    staging, x = CudaStaging(DEVICE), torch.randn(3)
    out = staging.to_host(x)
    assert cuda.did == [("wait", "copying", "computing"), ("keep", "copying")]
    out.wait()
    assert cuda.did[2:] == [("synchronize", "copying")]
    back = staging.to_device(x)
    assert len(cuda.did) == 3, "nobody waits before it is needed"
    back.wait()
    assert cuda.did[3:] == [("wait", "computing", "copying"), ("keep", "computing")]


def test_averages_select_their_gpu(cuda):
    state = State("double_squeeze", group=LoopbackGroup(0, 1, {}))
    state.staging = CudaStaging(DEVICE)
    x, out = torch.ones(100), torch.empty(100)
    job = _AverageJob(x, out, "g", None, 0, 1.0, torch.futures.Future(), ready=torch.cuda.Event())
    elsewhere(torch.no_grad()(state._run), job)
    assert torch.allclose(job.future.wait(), x, atol=0.2)


def test_without_pinned_memory_the_waiting_thread_copies(cuda):
    staging = CudaStaging(DEVICE, 1 << 14)
    x, targets = torch.arange(4096, dtype=torch.float32), []
    for pinned in (True, False):
        target = torch.from_numpy(staging.buffer(1 << 14)).view(torch.float32).fill_(7)
        assert target.is_pinned() == pinned
        targets.append(target)
    copies = [staging.to_host(x, target) for target in targets]
    assert torch.equal(targets[0], x)
    assert bool((targets[1] == 7).all()), "the computing thread waited for the GPU"
    before = x.clone()
    x.fill_(0)  # its memory is used for something else
    for copy, target in zip(copies, targets, strict=True):
        for _ in range(2):
            assert copy.wait() is target
        assert torch.equal(target, before)
    copies[1].wait()[0] = 5
    assert copies[1].wait()[0] == 5, "what was waited for is the caller's"


def test_pageable_copies_do_not_wait_for_later_work(cuda, monkeypatch):
    """The stream of other copies already waits for work launched later."""
    staging, used = CudaStaging(DEVICE, 1), list[Any]()
    copy = staging.to_host(torch.ones(3))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or cuda.on(stream))
    staging.to_host(torch.ones(3))
    others = len(used)
    copy.wait()
    (late,) = used[others:]
    assert all(late is not stream for stream in used[:others])


def test_idle_pinned_memory_of_another_size_is_released(cuda):
    staging = CudaStaging(DEVICE, 1 << 16)
    large = [staging.buffer(1 << 15) for _ in range(2)]
    assert not torch.from_numpy(staging.buffer(1 << 12)).is_pinned()
    del large
    small = [torch.from_numpy(staging.buffer(1 << 12)) for _ in range(17)]
    assert [x.is_pinned() for x in small] == [True] * 16 + [False]
    assert cuda.emptied == 2  # torch would keep it beside the new one


def test_pinned_memory_is_reused_once_its_copy_is_done(cuda):
    """Not only at the next copy in the same direction."""
    staging, x = CudaStaging(DEVICE, 1 << 15), torch.randn(1 << 12)
    cuda.come = False
    for copy in (staging.to_device, staging.to_host):
        copy(x)
    assert not torch.from_numpy(elsewhere(staging.buffer, 1 << 14)).is_pinned()
    cuda.come = True
    assert torch.from_numpy(elsewhere(staging.buffer, 1 << 15)).is_pinned()
    cuda.come = False
    elsewhere(staging.to_host, torch.randn(1 << 13))
    cuda.come = True
    copied = elsewhere(staging.to_device, torch.randn(1 << 13))
    assert copied.wait().is_pinned()  # nothing is copied to what stands for the GPU


def test_pageable_memory_replaces_refused_pinned_memory(cuda, monkeypatch):
    def refused(size: int) -> np.ndarray:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(staging_module, "pinned", refused)
    staging, x = CudaStaging(DEVICE, 1 << 20), torch.randn(1000)
    with pytest.warns(UserWarning, match=r"refuses 4096 bytes .*\(CUDA error: out of memory\)"):
        assert torch.equal(staging.to_host(x).wait(), x)
    monkeypatch.setattr(staging_module, "pinned", cuda.pin)
    assert not torch.from_numpy(staging.buffer(1 << 12)).is_pinned(), "nobody asks again"


def test_sources_of_copies_stay_alive_until_done(cuda):
    x, cuda.come = torch.randn(1000), False
    for pinned_bytes in (1 << 20, 1):
        staging = CudaStaging(DEVICE, pinned_bytes)
        staging.to_device(x)
        ((_, used),) = staging._in_progress[False]
        assert used.is_pinned() == (used is not x) == (pinned_bytes > 1)


def test_buffers_return_without_the_lock(cuda):
    """Finalizers of buffers would block the next copy."""
    staging, locked, host = CudaStaging(DEVICE), [], torch.empty(8)
    weakref.finalize(host, lambda: locked.append(staging._lock.locked()))
    cuda.come = False
    with cuda.guard(DEVICE):
        staging._finish(False, host)
        del host
        assert locked == []
        cuda.come = True
        staging._finish(False, torch.empty(8))
    assert locked == [False]
