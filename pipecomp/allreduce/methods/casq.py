"""CASQ: values are sent as the number of their cluster, and each cluster's values as means of hash buckets.

Every `interval` steps rank 0 computes centers by k-means on a tenth of its values (with the error-feedback residual)
and broadcasts them. A value belongs to the nearest center on its side of zero, in b bits; within its cluster a hash of
its coordinate selects one of the cluster's buckets, and it is decoded to the mean of that bucket. Clusters share the
buckets in proportion to their number of values and entropy. The error stays in an error-feedback residual, unless
`error_feedback` is false. Source: docs/algorithms.md, 2.5, with the paper's line 8 corrected: the value *with* its
residual is compressed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce.call import SAMPLE, Call, Slices, all_within
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.method import FLOAT, Average, Exchange, ExchangePlan, GradientMethod, PiecePlan, Shapes, to_all
from pipecomp.allreduce.reduce_scatter import packed_bytes
from pipecomp.config.gradients import CasqOptions
from pipecomp.kernels import ops

FEWEST = 4096  # values that are clustered, if there are so many
ROUNDS = 10  # of k-means
BINS = 32  # of the histogram, for each cluster
_SAMPLING, _HASH = 3, 4  # purposes of random draws
LARGEST_SUM = 2.0**120  # of a value and its residual


class Casq(GradientMethod):
    """`casq`."""

    options: CasqOptions

    def average(self, residuals: Residuals) -> Average:
        return CasqAverage(self.options, residuals)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        """Cluster numbers and means, and rank 0's centers and bucket counts spread over an interval; upper bounds."""
        clusters = 1 << self.options.bits
        centers = 12 * clusters * (n - 1) / self.options.interval
        broadcast = Exchange((centers, *[0.0] * (n - 1)), centers)
        means = clusters + bucket_count(self.options.buckets, d)
        everything = PiecePlan(to_all(FLOAT * means + packed_bytes(d, self.options.bits), n))
        return ExchangePlan((to_all(16, n), broadcast), ((everything,),), exact=False)


class CasqAverage:
    """The mean of all workers' decoded values, with error feedback."""

    saved_as = "casq"

    def __init__(self, options: CasqOptions, residuals: Residuals) -> None:
        self._clusters, self._options, self._residuals = 1 << options.bits, options, residuals
        # By key: uses, centers, buckets of each cluster, and the slices of the bucket at the last clustering.
        self._plans: dict[str, tuple[int, Tensor, Tensor, Slices | None]] = {}

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. If any rank has NaN or Inf, all ranks get NaN and residuals are unchanged."""
        if self._options.error_feedback:
            with self._residuals.added_to(x_d, out_d, call, LARGEST_SUM) as sums:
                if sums is not None:
                    self._mean(*sums, out_d, call)
        elif all_within(x_d, call, LARGEST_SUM):
            g_d = x_d.to(torch.float32, memory_format=torch.contiguous_format)
            self._mean(torch.empty_like(g_d), g_d, out_d, call)
        else:
            out_d.fill_(math.nan)

    def _mean(self, e_d: Tensor, sum_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average x + e; the residual becomes the error."""
        centers, counts = self._plan(sum_d, call)
        sketch = ops.Sketch(counts, self._options.bits, ops.mix_seed(call.seed, _HASH))
        with call.counters.part("quantize"):
            codes, means = ops.sketch_encode_(sum_d, e_d, centers, sketch)
            call.counters.add_error(sum_d[:SAMPLE], sum_d[:SAMPLE] - e_d[:SAMPLE])
            encoded = call.to_host(torch.cat([means.view(torch.uint8), codes])).wait()
        pending = call.group.gather(encoded)
        with call.counters.part("wait"):
            rows = pending.wait()
        with call.counters.part("decode"):
            arriving = [call.to_device(row) for row in rows]
            for i, copy in enumerate(arriving):
                rank_means, codes = copy.wait().split([4 * means.numel(), codes.numel()])
                divisor = len(rows) if i == len(rows) - 1 else 1
                rank_means = rank_means.view(torch.float32)
                ops.sketch_decode(codes, rank_means, sketch, out_d, add=i > 0, divisor=divisor)
        with call.counters.part("wait"):
            pending.finish()

    def _plan(self, sum_d: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return centers (float32 [K], ascending) and buckets of each cluster (int64 [K]), the same on all ranks."""
        nothing = torch.empty(0, dtype=torch.float32)
        uses, centers, counts, slices = self._plans.get(call.key, (0, nothing, nothing, None))
        if uses % self._options.interval == 0 or slices != call.slices:
            data = torch.empty(12 * self._clusters, dtype=torch.uint8)
            if call.group.rank == 0:
                with call.counters.part("quantize"):
                    sample = take_sample(sum_d, self._options.sample, call.draw(_SAMPLING)).cpu()
                    centers = k_means(sample, self._clusters)
                    buckets = bucket_count(self._options.buckets, sum_d.numel())
                    counts = share_buckets(sample, centers, buckets, equal=self._options.allocation == "equal")
                    data = torch.cat([centers.view(torch.uint8), counts.view(torch.uint8)])
            with call.counters.part("wait"):
                data = call.group.broadcast(data)
            centers = data[: 4 * self._clusters].clone().view(torch.float32)
            counts = data[4 * self._clusters :].clone().view(torch.int64)
        self._plans[call.key] = (uses + 1, centers, counts, call.slices)
        return centers, counts

    def state_dict(self) -> dict[Any, Any]:
        """Return centers and their use, by key."""
        return {key: (uses, mu.clone(), counts.clone(), of) for key, (uses, mu, counts, of) in self._plans.items()}

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore centers, which stay on the CPU; older files lack the slices."""
        self._plans = {key: plan if len(plan) == 4 else (*plan, None) for key, plan in state.items()}


def bucket_count(share: float, d: int) -> int:
    """Return the buckets of d values, at least one unless the share is 0."""
    return max(1, round(share * d)) if share else 0


def take_sample(x_d: Tensor, share: float, seed: int) -> Tensor:
    """Draw a share of the values with replacement, or FEWEST if that is more; all values if there are no more."""
    d = x_d.numel()
    count = min(d, max(FEWEST, int(d * share)))
    if count == d:
        return x_d
    index = torch.randint(d, (count,), generator=torch.Generator().manual_seed(seed))
    return x_d[index.to(x_d.device)]


def k_means(sample: Tensor, clusters: int) -> Tensor:
    """Return the centers of a sample (float32 on the CPU): float32 [clusters], ascending.

    Negative values and others are clustered separately; each side has centers in proportion to its values, at least one
    if it has any. They start at quantiles, and repeat if there are fewer different values than centers.
    """
    negative, other = sample[sample < 0].sort().values, sample[sample >= 0].sort().values
    share = negative.numel() / max(1, sample.numel())
    left = min(max(round(clusters * share), int(negative.numel() > 0)), clusters - int(other.numel() > 0))
    if clusters == 1:
        return sample.mean().reshape(1)
    parts = [_one_side(values, k) for values, k in ((negative, left), (other, clusters - left)) if k]
    return torch.cat(parts).sort().values


def _one_side(values: Tensor, k: int) -> Tensor:
    """Run Lloyd's iterations on sorted values. Clusters are contiguous, so one cumulative sum gives all their sums."""
    if not values.numel():
        return torch.zeros(k, dtype=torch.float32)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    quantiles = ((torch.arange(k, dtype=torch.float64) + 0.5) / k * values.numel()).long()
    centers = values[quantiles].double()
    for _ in range(ROUNDS):
        cuts = torch.searchsorted(values.double(), (centers[1:] + centers[:-1]) / 2, right=True)
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([values.numel()])])
        count = edges.diff()
        total = sums[edges[1:]] - sums[edges[:-1]]
        centers = torch.where(count > 0, total / count.clamp(min=1), centers)
    return centers.to(torch.float32)


def share_buckets(sample: Tensor, centers: Tensor, buckets: int, *, equal: bool = False) -> Tensor:
    """Distribute `buckets` over clusters in proportion to H_k · μ_k (entropy, share of values); int64 [K].

    H_k is the entropy over the bins of one histogram of all values, in which a wide cluster covers many bins and a
    narrow one few: of two clusters with as many values, the wide one gets more buckets. A cluster with no bucket uses
    its center.

    Args:
        sample: values, float32 on the CPU.
        centers: centers of the clusters, float32 [K].
        buckets: number of all.
        equal: give every cluster that has values as many.
    """
    K = centers.numel()
    cluster = ops.kmeans_assign(sample, centers).long()
    sizes = torch.bincount(cluster, minlength=K).double()
    weight = (sizes > 0).double()
    low, high = (float(limit) for limit in torch.aminmax(sample))
    if not equal and high > low:
        bins = BINS * K
        number = ((sample.double() - low) * (bins / (high - low))).long().clamp_(max=bins - 1)
        counts = torch.bincount(cluster * bins + number, minlength=K * bins).view(K, bins)
        entropy = torch.special.entr(counts / sizes.clamp(min=1)[:, None]).sum(1)
        weight = entropy * sizes
    total = float(weight.sum())
    return (buckets * weight / total).floor().long() if total and high > low else torch.zeros(K, dtype=torch.int64)
