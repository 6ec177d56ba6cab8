"""Links on a GPU: the same results, packets and stores as on the host, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import pytest
import torch

from pipecomp.allreduce import State
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.allreduce.reduce_scatter import PIECE
from pipecomp.buffers import open_environment
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.reference.batches import DecodeItem, EncodeItem
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.layout import Layout
from tests.stages.test_staging import METHODS, H, S, but_for_norms, ends, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: python -m pytest tests/gpu"),
]


@pytest.fixture
def staging():
    from pipecomp.kernels.staging import CudaStaging

    return CudaStaging(torch.device("cuda", 0), pinned_bytes=1 << 20)


def hold_up(stream: torch.cuda.Stream, times: int = 1) -> None:
    """Delay a stream by some hundredths of a second for each time."""
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.cuda._sleep(50_000_000)


@pytest.mark.parametrize("late", ["copies", "computing"])
@pytest.mark.parametrize("pinned_bytes", [1 << 26, 1], ids=["pinned", "pageable"])
def test_copies_and_computing_wait_for_each_other(pinned_bytes, late):
    """Memory is reused once both are done with it, not before."""
    from pipecomp.kernels.staging import CudaStaging

    staging, size = CudaStaging(torch.device("cuda", 0), pinned_bytes), 1 << 20
    out, into = staging._streams[True], staging._streams[False]
    hold_up(torch.cuda.current_stream(), 1 if late == "copies" else 2)
    hold_up(out, 2 if late == "copies" else 0)
    x = torch.full((size,), 1.0, device="cuda")
    to_host = staging.to_host(x)
    del x
    others = [torch.full((size,), 2.0, device="cuda") for _ in range(4)]  # one would lie where x lay
    assert bool((to_host.wait() == 1.0).all())
    assert all(bool((x == 2.0).all()) for x in others)
    hold_up(into, 2 if late == "copies" else 0)
    to_device = staging.to_device(torch.full((size,), 3.0))
    other = staging.to_device(torch.full((size,), 5.0))  # not through the same memory of the host
    y = to_device.wait()
    hold_up(torch.cuda.current_stream())
    z = y + 1.0
    del y, to_device
    another = staging.to_device(torch.full((size,), 7.0))  # would lie where y lay
    assert bool((z == 4.0).all())
    assert bool((other.wait() == 5.0).all())
    assert bool((another.wait() == 7.0).all())


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_gpu_computes_sends_and_stores_what_the_host_does(tmp_path, staging, options):
    on_gpu, on_host = (train(tmp_path / name, s, **options) for name, s in (("gpu", staging), ("host", None)))
    assert on_gpu == but_for_norms(on_host)


def test_a_link_with_the_torch_backend(tmp_path, staging):
    """Without a compiler for Triton's first launch."""
    dispatch.prefer("torch", "cuda")
    try:
        on_gpu = train(tmp_path / "gpu", staging, forward_bits=3)
    finally:
        dispatch.prefer("auto", "cuda")
    assert on_gpu == but_for_norms(train(tmp_path / "host", None, forward_bits=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "group_size"), [(97, 40), (1600, None)])
def test_samples_lie_at_any_address(width, group_size, dtype):
    """A GPU cannot load or store four bytes at an odd address, or sixteen at one that is no multiple of 16."""
    assert_alike(width, ops.QuantizerOptions(3, group_size), dtype, ("cpu", "cuda"))


def assert_alike(width: int, o: ops.QuantizerOptions, dtype: torch.dtype, devices: Sequence[str]) -> None:
    counts = (5, 1, 40, 2)
    how = [(o, True), (o, True), (None, False), (o, False)]
    size = sum(ops.payload_bytes(n, width, options, dtype) for n, (options, _) in zip(counts, how, strict=True))
    x_TH, m_TH = torch.randn(48, width).to(dtype), torch.randn(48, width)
    found = []
    for device in devices:
        whole = torch.zeros(1 + size, dtype=torch.uint8, device=device)
        sent_TH, held_TH = m_TH.to(device, copy=True), m_TH.to(device, copy=True)
        rows = zip(x_TH.to(device).split(counts), sent_TH.split(counts), how, strict=True)
        ops.encode_batch([EncodeItem(x, m, options, delta) for x, m, (options, delta) in rows], whole[1:]).check()
        held = zip(held_TH.split(counts), how, strict=True)
        ops.decode_batch(whole[1:], [DecodeItem(m, options, delta, dtype) for m, (options, delta) in held])
        assert torch.equal(held_TH, sent_TH)
        found.append([whole.cpu(), held_TH.cpu()])
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


@pytest.mark.parametrize("backend", ["memory", "lmdb"])
@pytest.mark.parametrize("bits", [4, 16, 32])
def test_results_of_another_stream_are_stored_correctly(tmp_path, staging, backend, bits):
    """The store's thread waits for it."""
    on_host, on_gpu = (
        open_environment(backend, tmp_path / name, 0, bits=bits, staging=s)
        for name, s in (("host", None), ("gpu", staging))
    )
    with closing(on_host), closing(on_gpu):
        here, there = (one.link("link-0", {}) for one in (on_host, on_gpu))
        side = torch.cuda.Stream()
        for sample in range(8):
            m_nH = torch.randn(500, H)
            here.put(sample, 1, m_nH)
            hold_up(side)
            with torch.cuda.stream(side):
                there.put(sample, 1, m_nH.cuda() * 1.0)
        for one in (on_host, on_gpu):
            one.commit()
        assert here.inventory() == there.inventory()
        for stored, back in zip(here.get(range(8)), there.get(range(8)), strict=True):
            assert torch.equal(stored.m_nH, back.m_nH.cpu())


AVERAGED = [{"method": "none"}, {"method": "double_squeeze"}, {"method": "terngrad"}, {"method": "global_qsgd"}]


@pytest.mark.parametrize("options", AVERAGED, ids=str)
def test_gradients_of_a_gpu_are_averaged_as_the_hosts(options):
    size = 3 * PIECE + 40  # of the last piece two ranks own nothing
    gradients = [torch.randn(size) for _ in range(3)]  # 3 has a reciprocal that is rounded

    def work(group: LoopbackGroup, device: str) -> list[torch.Tensor]:
        state = State(group=group, **options)
        means = [state.submit(gradients[group.rank].to(device), "g").wait() for _ in range(2)]
        state.close()
        return [mean.cpu() for mean in means]

    on_host, on_gpu = (run_threads(3, partial(work, device=device)) for device in ("cpu", "cuda"))
    for host, gpu in zip(on_host, on_gpu, strict=True):
        assert all(map(torch.equal, host, gpu))
