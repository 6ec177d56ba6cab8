"""Results that must be equal on CPUs and GPUs are never divided by a Python number: see `reproducible.divisor`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomp.allreduce.all_gather import GatheredAverage
from pipecomp.allreduce.call import Call, Counters
from pipecomp.allreduce.loopback import LoopbackGroup
from pipecomp.kernels.reference import batches, gradients
from pipecomp.kernels.reference import rows as reference
from pipecomp.kernels.reference.layout import QuantizerOptions

N, D = 3, 1000  # a number of ranks whose reciprocal is rounded
DIVISIONS = {torch.ops.aten.div, torch.ops.aten.div_, torch.ops.aten.true_divide}


class Refusing(TorchDispatchMode):
    """Fail on divisions by anything but a tensor."""

    divisions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in DIVISIONS:
            self.divisions += 1
            assert isinstance(args[1], Tensor), f"{func} by {args[1]}"
        return func(*args, **(kwargs or {}))


def test_division_by_a_number_is_detected():
    for divide in (lambda x: x / 3, lambda x: x.div_(3.0), lambda x: torch.div(x, 3)):
        with Refusing(), pytest.raises(AssertionError, match="by 3"):
            divide(torch.ones(2))


def scales_of_rms() -> None:
    reference.quantize(torch.randn(3, 50), QuantizerOptions(4, 7, "rms"))
    batches.encode_batch(
        [batches.EncodeItem(torch.randn(3, 5), None, QuantizerOptions(4, None, "rms"))], torch.empty(24).byte(), None
    )


def mean_magnitudes() -> None:
    gradients.feedback_quantize_(torch.randn(D), torch.zeros(D), 1, 7, True)


def mean_of_codes() -> None:
    e = torch.zeros(D)
    codes, scales = gradients.feedback_quantize_(torch.randn(D), e, 4, 100, False)
    gradients.feedback_reduce_([codes] * N, [scales] * N, 4, e, 100, False)


def mean_of_sketches() -> None:
    how, x = gradients.Sketch(torch.tensor([2, 3]), 1, 5), torch.randn(D)
    codes, means = gradients.sketch_encode(x, torch.empty(D), torch.tensor([-1.0, 1.0]), torch.zeros(1), how)
    gradients.sketch_decode(codes, means, how, x, True, N)


def mean_of_gathered_codes() -> None:
    group = LoopbackGroup(0, 1, {})
    GatheredAverage(4, 2.0).mean(torch.randn(D), torch.empty(D), Call(group, Counters(), 0, 0, "g"))


@pytest.mark.parametrize(
    "computed", [scales_of_rms, mean_magnitudes, mean_of_codes, mean_of_sketches, mean_of_gathered_codes]
)
def test_shared_results_are_divided_by_tensors(computed: Callable[[], None]):
    with Refusing() as mode:
        computed()
    assert mode.divisions


def test_a_count_of_many_values_is_exact():
    """In float32 2**24 + 1 is 2**24."""
    count, o = (1 << 24) + 1, QuantizerOptions(4, None, "rms")
    squares = torch.randint(1 << 50, (1000,), generator=torch.Generator().manual_seed(0))
    most = torch.ones(1000)
    scales = [reference.finish_scales(most, squares, each, o) for each in (torch.full((1000,), count), count)]
    assert torch.equal(*scales)
