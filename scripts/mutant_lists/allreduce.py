"""Defects in pipecomp/allreduce/: averages of gradients."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

EXACT = ("tests/allreduce/test_exact.py",)
GRADIENT_STAGING = ("tests/allreduce/test_staging.py",)
_DITHERING = "pipecomp/allreduce/dithering.py"
_GATHER = "pipecomp/allreduce/all_gather.py"
_CASQ = "pipecomp/allreduce/methods/casq.py"
_RESIDUALS = "pipecomp/allreduce/error_feedback.py"


def _draws_every_call_alike(what: str, file: str, before: str, old: str, new: str) -> Mutant:
    """Random numbers of a gradient method without the number of the call."""
    why = "the same rounding noise in every step: an unbiased method becomes biased"
    return Mutant(f"{what}: the same draws in every call", file, before + old, before + new, EXACT, why)


MUTANTS = (
    # -- sums and means
    Mutant(
        "a mean over replicas without its division",
        "pipecomp/allreduce/methods/uncompressed.py",
        "total.div_(self._n).to(self._dtype)",
        "total.to(self._dtype)",
        EXACT,
        "gradients grow with the number of replicas",
    ),
    Mutant(
        "a mean of local norms without its division",
        _GATHER,
        "        out.div_(divisor(len(rows), out))\n",
        "",
        EXACT,
        "gradients grow with the number of replicas",
    ),
    # -- norms
    Mutant(
        "QSGD-MN relative to the largest value",
        "pipecomp/allreduce/methods/qsgd_mn.py",
        "MAX_OF_L2 = (2.0, math.inf)",
        "MAX_OF_L2 = (math.inf, math.inf)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "QSGD relative to the largest value",
        "pipecomp/allreduce/methods/local_norm.py",
        "GatheredAverage(self.bits, 2.0)",
        "GatheredAverage(self.bits, math.inf)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "NUQSGD relative to the largest value",
        "pipecomp/allreduce/methods/local_norm.py",
        "GatheredAverage(self.bits, 2.0, exponential=True)",
        "GatheredAverage(self.bits, math.inf, exponential=True)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "[q, p] of a norm swapped",
        "pipecomp/allreduce/methods/global_qsgd.py",
        "return float(q), float(p)",
        "return float(p), float(q)",
        EXACT,
        "a norm over workers where one inside a worker was asked for",
    ),
    # -- draws
    _draws_every_call_alike(
        "linear levels",
        _DITHERING,
        "self._sum_bits = ops.linear_bits(self._least, self._n)\n",
        "        self._seed = call.draw(_ENCODE, call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, _ENCODE, call.group.rank)",
    ),
    _draws_every_call_alike(
        "exponential levels",
        _DITHERING,
        "self._n = call.group.size\n",
        "        self._seed = call.draw(_ENCODE, call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, _ENCODE, call.group.rank)",
    ),
    _draws_every_call_alike(
        "the sum of exponential levels",
        _DITHERING,
        "",
        "self._call.draw(_REDUCE, start, level, i)",
        "ops.mix_seed(self._call.seed, _REDUCE, start, level, i)",
    ),
    _draws_every_call_alike(
        "QSGD and TernGrad",
        _GATHER,
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n",
        "        self._seed = call.draw(call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, call.group.rank)",
    ),
    _draws_every_call_alike(
        "NUQSGD",
        _GATHER,
        "self._norm, self._bits = norm, bits\n",
        "        self._seed = call.draw(call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, call.group.rank)",
    ),
    _draws_every_call_alike(
        "GRandK's coordinates",
        "pipecomp/allreduce/methods/grandk.py",
        "",
        "call.draw(_COORDINATES)",
        "_COORDINATES",
    ),
    Mutant(
        "ranks round with the same noise",
        _GATHER,
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n"
        "        self._seed = call.draw(call.group.rank)",
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n        self._seed = call.draw(0)",
        EXACT,
        "the variance does not fall with the number of replicas",
    ),
    Mutant(
        "draws begin anew after a resume",
        "pipecomp/allreduce/state.py",
        '        self._calls = state["calls"]\n',
        "",
        ("tests/allreduce/test_methods.py::test_restored_memories_continue_alike",),
        "a run that goes on rounds with the noise of its first steps again, and ends with another loss",
    ),
    # -- error feedback
    Mutant(
        "CASQ's residual without its old value",
        _CASQ,
        "ops.sketch_encode_(sum_d, e_d, centers, how)",
        "ops.sketch_encode_(x_d, e_d, centers, how)",
        EXACT,
        "what was left out twice is lost",
    ),
    Mutant(
        "one CASQ plan for all tensors",
        _CASQ,
        "self._plans.get(call.key, (0, nothing, nothing, None))",
        "next(iter(self._plans.values()), (0, nothing, nothing, None))",
        EXACT,
        "a tensor is clustered around the values of another",
    ),
    Mutant(
        "CASQ's buckets shared by number alone",
        _CASQ,
        "float(-(share * share.log2()).sum()) * values.numel()",
        "1.0 * values.numel()",
        EXACT,
        "another algorithm than the paper's: clusters that spread get too few means",
    ),
    Mutant(
        "residuals start anew when buckets change",
        _RESIDUALS,
        "target.copy_(_used_here(piece))",
        "target.zero_()",
        EXACT,
        "what was left out before DDP made its buckets anew is lost",
    ),
    Mutant(
        "owners' residuals by key alone",
        _RESIDUALS,
        "dtype=torch.float32)\n        return self._owned[key, slices]",
        "dtype=torch.float32)\n        return next(e for (k, _), e in self._owned.items() if k == key)",
        EXACT,
        "what was left out of one parameter is added to another",
    ),
    Mutant(
        "owners' residuals start anew when buckets change",
        _RESIDUALS,
        "self._make_up(*place, left)",
        "pass",
        EXACT,
        "what owners left out before DDP made its buckets anew is lost",
    ),
    # -- staging: the double of tests/lazy_staging.py has the poisoned buffer of a copy as `target`
    Mutant(
        "no wait for a chunk's codes before they are sent",
        "pipecomp/allreduce/reduce_scatter.py",
        "[copy.wait() for copy in encoded]",
        "[copy.target for copy in encoded]",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for reduced codes before they are decoded",
        "pipecomp/allreduce/reduce_scatter.py",
        "code.decode(copy.wait(),",
        "code.decode(copy.target,",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
    Mutant(
        "no wait for a gathered piece's codes before they are sent",
        _GATHER,
        "codes = encoded.wait()",
        "codes = encoded.target",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for other ranks' codes before they are decoded",
        _GATHER,
        "code.add(copy.wait(),",
        "code.add(copy.target,",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
    Mutant(
        "no wait for CASQ's codes before they are sent",
        _CASQ,
        "codes])).wait()",
        "codes])).target",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for CASQ's codes before they are decoded",
        _CASQ,
        "copy.wait().split(",
        "copy.target.split(",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
)
