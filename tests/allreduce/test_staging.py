"""Averages over a GPU's double, tests/lazy_staging.py: each wait for a copy is needed, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from pipecomp.allreduce import State, all_gather, reduce_scatter, state
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from tests.allreduce.test_methods import ALL, Options, gradients, name
from tests.lazy_staging import LazyStaging
from tests.pretend_gpu import DEVICE, PretendStaging, pretend_gpu

N, D = 3, 1098  # no rank owns nothing of a piece


@pytest.fixture
def pieces(monkeypatch):
    """Buckets of a thousand values have three pieces, so that some are quantized while others travel."""
    for module in (reduce_scatter, all_gather):
        monkeypatch.setattr(module, "PIECE", 384)


def averaged(
    options: Options, dtype: torch.dtype = torch.float32, d: int = D, device: torch.device | None = None
) -> list[list[list[float]]]:
    """Means and residuals of each rank after two calls, the second one in place; options: of the state."""
    inputs = [g.to(dtype) for g in gradients(N, d)]

    def work(group: LoopbackGroup) -> list[list[float]]:
        one = State(group=group, seed=5, **options)
        x_d = inputs[group.rank].to(device, copy=True)
        first = one.submit(x_d, "g").wait()
        second = one.submit(x_d, "g", out=x_d).wait()
        kept = [e_d for _, e_d in one.state_dict()["memory"]["worker"].values()]
        one.close()
        return [t.tolist() for t in (first, second, *kept)]

    return run_threads(N, work)


@pytest.mark.parametrize("options", [*ALL, {"method": "none"}], ids=name)
def test_a_device_averages_as_the_host_does(options, pieces, monkeypatch):
    on_host = averaged(options)
    monkeypatch.setattr(state, "staging_for", lambda device: LazyStaging())
    assert averaged(options) == on_host


@pytest.mark.parametrize("options", [*ALL, {"method": "none"}], ids=name)
def test_a_gpu_computes_with_its_own_tensors_alone(options, pieces, monkeypatch):
    """Also where ranks own nothing of a piece, of which no byte goes to the GPU."""
    d = 384 + 40  # of the second piece the first rank owns all
    on_host = averaged(options, d=d)
    monkeypatch.setattr(state, "staging_for", lambda device: PretendStaging())
    with pretend_gpu():
        assert averaged(options, d=d, device=DEVICE) == on_host


def test_values_of_a_half_travel_as_they_are(pieces, monkeypatch):
    on_host = averaged({"method": "none"}, torch.bfloat16)
    monkeypatch.setattr(state, "staging_for", lambda device: LazyStaging())
    assert averaged({"method": "none"}, torch.bfloat16) == on_host


def test_codes_are_copied_out_while_the_next_piece_is_quantized(pieces, monkeypatch):
    seen: list[str] = []

    class Noticed(reduce_scatter.Copy):
        def __init__(self, copy):
            self._copy = copy

        def wait(self):
            seen.append("wait")
            return self._copy.wait()

    class Staging(LazyStaging):
        def to_host(self, x, target=None):
            seen.append("copy")
            return Noticed(super().to_host(x, target))

    one = State("qsgd_mn", bits=4, group=LoopbackGroup(0, 1, {}))
    one.staging = Staging()
    one.submit(torch.randn(D), "g").wait()
    one.close()
    assert seen == ["copy", *["copy", "wait"] * 2, "wait"]
