"""Links over a GPU: what is computed, sent and stored is what the host does, and nothing waits for the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipecomp.allreduce import State
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.kernels import ops
from pipecomp.kernels.ragged import Visit
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.endpoint import Position
from tests.stages.test_staging import H, S, but_for_norms, ends, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def staging():
    from pipecomp.kernels.staging_cuda import CudaStaging

    return CudaStaging(torch.device("cuda", 0), pinned_bytes=1 << 20)


@pytest.mark.parametrize("options", [{"forward_bits": 3}, {"first_visit": 8}, {"rounding": "stochastic"}], ids=str)
def test_a_gpu_computes_sends_and_stores_what_the_host_does(tmp_path, staging, options):
    on_gpu, on_host = (train(tmp_path / name, s, **options) for name, s in (("gpu", staging), ("host", None)))
    assert on_gpu == but_for_norms(on_host)


def test_samples_of_different_lengths_on_a_gpu():
    o = ops.Options(4, None)
    pairs = [(torch.randn(n, 96), torch.randn(n, 96)) for n in (5, 1, 40)]
    size = sum(ops.payload_bytes(x.shape[0], 96, o, x.dtype) for x, _ in pairs)
    found = []
    for device in ("cpu", "cuda"):
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        visits = [Visit(x.to(device), m.to(device, copy=True), o, True) for x, m in pairs]
        ops.encode_batch(visits, payload).check()
        found.append([payload.cpu(), *(v.m.cpu() for v in visits if v.m is not None)])
    assert all(map(torch.equal, *found))


def test_sending_does_not_wait_for_the_gpu(tmp_path, staging):
    up, down, wires, stores = ends({}, tmp_path, staging, "memory")
    layout = Layout((1, 2), (0, 0), (S, S), S)
    for step in range(3):
        x_BSH = torch.randn(2, S, H).cuda()
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            up.send_activation(x_BSH, layout, Position(step, 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        down.recv_activation(Position(step, 1))
        for one in stores:
            one.flush()
    for transport in wires:
        transport.drain()
    for one in stores:
        one.close()


@pytest.mark.parametrize("options", [{"method": "none"}, {"method": "double_squeeze"}, {"method": "terngrad"}], ids=str)
def test_gradients_of_a_gpu_are_averaged_as_the_hosts(options):
    gradients = [torch.randn(3_000_000) for _ in range(3)]  # 3 has a reciprocal that is rounded

    def work(group: LoopbackGroup, device: str) -> list[torch.Tensor]:
        state = State(group=group, **options)
        means = [state.submit(gradients[group.rank].to(device), "g").wait() for _ in range(2)]
        state.close()
        return [mean.cpu() for mean in means]

    on_host, on_gpu = (run_threads(3, partial(work, device=device)) for device in ("cpu", "cuda"))
    for host, gpu in zip(on_host, on_gpu, strict=True):
        assert all(map(torch.equal, host, gpu))
