"""The methods of docs/algorithms.md, section 2: each made of norm, levels, selection, collective and residual."""

from __future__ import annotations

import math

from torch import Tensor

from pipecomp.allreduce.all_gather import LocalCode, LocalExponential, LocalLinear, Sparse, average_gathered
from pipecomp.allreduce.call import SAMPLE, Call, Method
from pipecomp.allreduce.casq import Casq
from pipecomp.allreduce.dithering import ExponentialCode, LeastIndexCode, LinearCode, levels_of
from pipecomp.allreduce.double_squeeze import DoubleSqueeze
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.norms import LARGEST, global_norm, local_norm
from pipecomp.allreduce.reduce_scatter import reduce_bucket
from pipecomp.allreduce.selection import RandomK
from pipecomp.allreduce.uncompressed import Plain
from pipecomp.gradient_config import Gradients, norm_exponents
from pipecomp.kernels import ops


class Dithered:
    """One norm for all workers, linear or exponential levels, reduced by the chunks' owners. Unbiased."""

    def __init__(self, bits: int, norm: tuple[float, float], *, exponential: bool = False) -> None:
        self._bits, self._norm, self._exponential = bits, norm, exponential

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Method."""
        norm = shared_norm(x_d, self._norm, call)
        if not finish_without_codes(norm, out_d):
            code = (ExponentialCode if self._exponential else LinearCode)(norm, self._bits, call)
            call.counters.add_error(x_d[:SAMPLE], code.own(x_d[:SAMPLE]))
            reduce_bucket(x_d, out_d, code, call)


class MultiScale:
    """QSGD-MN-TS: of two or more scales each value gets the finest that fits it on every worker. Unbiased."""

    def __init__(self, bits: tuple[int, ...]) -> None:
        self._bits = bits[0]
        self._levels = tuple(levels_of(b) for b in bits)

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Method. Scales are picked before anything is rounded: picking by what was drawn would be a bias."""
        norm = shared_norm(x_d, (2.0, math.inf), call)
        if finish_without_codes(norm, out_d):
            return
        with call.counters.part("quantize"):
            index_d = ops.multiscale_index(x_d, norm, self._levels)
        reduce_bucket(index_d, index_d, LeastIndexCode(len(self._levels)), call)
        code = LinearCode(norm, self._bits, call, levels=self._levels, scale_index_d=index_d)
        call.counters.add_error(x_d[:SAMPLE], code.own(x_d[:SAMPLE]))
        reduce_bucket(x_d, out_d, code, call)


class Gathered:
    """Each worker's own norm (or, sparse, one for all); codes go to everyone. Unbiased."""

    def __init__(self, bits: int, norm: float | tuple[float, float], *, exponential: bool, sparse: bool) -> None:
        self._bits, self._norm, self._exponential, self._sparse = bits, norm, exponential, sparse

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Method."""
        if isinstance(self._norm, tuple):
            norms = [shared_norm(x_d, self._norm, call)] * call.group.size
        else:
            with call.counters.part("quantize"):
                own = local_norm(x_d, self._norm)
            with call.counters.part("wait"):
                norms = [row[0] for row in call.group.gather_numbers([own])]
        if finish_without_codes(max(norms) if all(n <= LARGEST for n in norms) else math.nan, out_d):
            return
        norm = norms[call.group.rank]
        inner = (LocalExponential if self._exponential else LocalLinear)(norm, self._bits, call)
        code: LocalCode = Sparse(inner, self._bits, linear=not self._exponential) if self._sparse else inner
        average_gathered(x_d, out_d, code, norms, call)


def shared_norm(x_d: Tensor, exponents: tuple[float, float], call: Call) -> float:
    """‖x‖_{q,p} over all workers; NaN or Inf if any worker's x holds any."""
    with call.counters.part("quantize"):
        local = local_norm(x_d, exponents[0])
    with call.counters.part("wait"):
        return global_norm(local, exponents[1], call.group)


def finish_without_codes(norm: float, out_d: Tensor) -> bool:
    """Nothing to send: all zeros, or NaN everywhere where any rank has a value that is not finite."""
    if norm == 0:
        out_d.zero_()
    elif not math.isfinite(norm):
        out_d.fill_(math.nan)
    else:
        return False
    return True


def make_method(options: Gradients, memory: Residuals) -> Method:
    """The method that these options describe. Not for "powersgd" and "fp16", which are torch's own hooks."""
    name, bits = options.method, options.bits
    if name == "none":
        return Plain()
    if name == "global_qsgd":
        assert isinstance(bits, int)
        assert options.norm is not None
        norm, exponential = norm_exponents(options.norm), options.levels == "exponential"
        if options.sparse:
            return Gathered(bits, norm, exponential=exponential, sparse=True)
        return Dithered(bits, norm, exponential=exponential)
    if name in ("qsgd_mn", "grandk_mn"):
        assert isinstance(bits, int)
        dense: Method = Dithered(bits, (2.0, math.inf))
    elif name in ("qsgd_mn_ts", "grandk_mn_ts"):
        assert isinstance(bits, tuple)
        dense = MultiScale(bits)
    elif name == "terngrad":
        return Gathered(2, math.inf, exponential=False, sparse=False)
    elif name in ("qsgd", "nuqsgd"):
        assert isinstance(bits, int)
        return Gathered(bits, 2.0, exponential=name == "nuqsgd", sparse=False)
    elif name == "casq":
        return Casq(options, memory)
    elif name in ("double_squeeze", "quantized_adam"):
        return DoubleSqueeze(options, memory)
    else:
        raise ValueError(name)
    return RandomK(dense, options, memory) if name.startswith("grandk") else dense
