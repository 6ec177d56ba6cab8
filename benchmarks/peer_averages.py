"""Averages of gradients by methods that the papers compare with, and that are not in the product.

Each averages the gradients of n workers in one process, counts the bytes that a worker would send, and the error of the
first worker's part. Values are grouped in buckets of BUCKET values with a scale each, where a method has scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BUCKET = 8192
SCALE_BYTES = 4
LEVELS_EVERY = 10  # steps after which ALQ and AMQ fit their levels again
SAMPLE = 20_000  # values of each worker to which they fit them


class Peer(ABC):
    """The average of a method over n workers, step after step."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.draw = n, torch.Generator().manual_seed(seed)
        self._bytes = self._raw = 0.0
        self._squares = [0.0, 0.0]  # of the first worker's error, and of its values

    def average(self, gradients: Sequence[Tensor]) -> Tensor:
        """The average of the workers' gradients, float32 [d] each."""
        mean, first = self.combine(gradients)
        self._bytes += self.bytes_sent(gradients[0].numel())
        self._raw += 8 * gradients[0].numel() * (self.n - 1) / self.n
        self._squares[0] += float((first - gradients[0]).square().sum())
        self._squares[1] += float(gradients[0].square().sum())
        return mean

    def stats(self) -> dict[str, Any]:
        """Counters with the names of the product's."""
        error = (self._squares[0] / self._squares[1]) ** 0.5
        return {"bytes_raw": int(self._raw), "bytes_sent": int(self._bytes), "relative_error": error}

    @abstractmethod
    def combine(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The average, and what the others get of the first worker's gradient."""

    @abstractmethod
    def bytes_sent(self, d: int) -> float:
        """Bytes that a worker sends to average d values."""

    def rounded(self, x: Tensor) -> Tensor:
        """Round to one of the two next whole numbers, without bias."""
        return (x + torch.rand(x.shape, generator=self.draw)).floor()


class IntSgd(Peer):
    """IntSGD (Mishchenko et al., 2021): whole numbers with a common factor, which an all-reduce can add.

    The factor is √d / √(2n r), where r is a moving average of the squared norm of averages: that of an SGD step divided
    by its learning rate, so that the rule is the paper's there, and has a meaning with other optimizers. Numbers are
    clipped so that the sum fits 8 bits. The first step is exact.
    """

    KEEP = 0.9
    _norm: Tensor | None = None

    def combine(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self._norm is None:
            mean, first = torch.stack(list(gradients)).mean(0), gradients[0]
            self._norm = mean.square().sum()
        else:
            factor = (gradients[0].numel() / (2 * self.n * self._norm.clamp_min(1e-30))).sqrt()
            most = 127 // self.n
            sent = [self.rounded(factor * x).clamp(-most, most) for x in gradients]
            mean, first = torch.stack(sent).sum(0) / (self.n * factor), sent[0] / factor
            self._norm = self.KEEP * self._norm + (1 - self.KEEP) * mean.square().sum()
        return mean, first

    def bytes_sent(self, d: int) -> float:
        return 2 * d * (self.n - 1) / self.n


class _Gathered(Peer):
    """A method whose packets cannot be added: each worker sends its own to all others."""

    @abstractmethod
    def sent(self, x: Tensor) -> Tensor:
        """The gradient of a worker as the others decode it."""

    def combine(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        parts = [self.sent(x) for x in gradients]
        return torch.stack(parts).mean(0), parts[0]


class NatSgd(_Gathered):
    """Natural compression (Horváth et al., 2019): a sign and a power of two, rounded without bias; 9 bits."""

    def sent(self, x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.abs())  # mantissa in [0.5, 1)
        up = torch.rand(x.shape, generator=self.draw) < 2 * mantissa - 1
        return torch.where(x == 0, 0.0, x.sign() * torch.ldexp(torch.where(up, 1.0, 0.5), exponent))

    def bytes_sent(self, d: int) -> float:
        return 9 * d / 8 * (self.n - 1)


class SignSgd(Peer):
    """SignSGD with majority vote (Bernstein et al., 2019): signs to each part's owner, and the majority's back.

    The majority has the workers' mean magnitude, since learning rates are not tuned for each method here.
    """

    def combine(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        votes = torch.stack([x.sign() for x in gradients]).sum(0).sign()
        magnitude = torch.stack([x.abs().mean() for x in gradients]).mean()
        return votes * magnitude, gradients[0].sign() * gradients[0].abs().mean()

    def bytes_sent(self, d: int) -> float:
        return 2 * (d / 8 + SCALE_BYTES) * (self.n - 1) / self.n


class Leveled(_Gathered):
    """Magnitudes are rounded to levels without bias, as shares of their bucket's scale; a sign and log2(levels) bits.

    levels: from the smallest to 1. norm: of a bucket, 2 or inf, its scale.
    """

    def __init__(self, n: int, seed: int, bits: int, norm: float, levels: Sequence[float]) -> None:
        super().__init__(n, seed)
        self.bits, self.norm, self.levels = bits, norm, torch.tensor(levels)

    def sent(self, x: Tensor) -> Tensor:
        rows = buckets(x)
        scale = torch.linalg.vector_norm(rows, self.norm, dim=1, keepdim=True)
        magnitude = torch.where(scale > 0, rows.abs() / scale, 0.0)
        above = torch.bucketize(magnitude, self.levels).clamp(1, len(self.levels) - 1)
        low, high = self.levels[above - 1], self.levels[above]
        up = torch.rand(magnitude.shape, generator=self.draw) * (high - low) < magnitude - low
        sign = rows.sign()
        if self.levels[0] > 0:  # without a level of zero, the smallest level has either sign, so that 0 is its mean
            below = magnitude < self.levels[0]
            flip = torch.rand(magnitude.shape, generator=self.draw) * 2 * self.levels[0] < self.levels[0] - magnitude
            up, sign = up & ~below, torch.where(below & flip, -1.0, 1.0) * torch.where(rows < 0, -1.0, 1.0)
        return (sign * torch.where(up, high, low) * scale).reshape(-1)[: x.numel()]

    def bytes_sent(self, d: int) -> float:
        return (self.bits * d / 8 + SCALE_BYTES * -(-d // BUCKET)) * (self.n - 1)


class AdaptiveLevels(Leveled):
    """ALQ and AMQ (Faghri et al., 2020): levels with the least expected variance for the gradients of all workers.

    They are fitted to a sample of the magnitudes, weighted by the squared scales of their buckets, where the papers fit
    a truncated Gaussian whose moments are exchanged; the bytes of those are not counted here either.
    """

    def __init__(self, n: int, seed: int, bits: int, fit: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        count = 2 ** (bits - 1)
        start = [0.0] * (fit is alq_levels) + [2.0**-k for k in range(count - (fit is alq_levels))][::-1]
        super().__init__(n, seed, bits, 2, start)
        self._fit, self._steps = fit, 0

    def combine(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self._steps % LEVELS_EVERY == 0:
            rows = torch.cat([buckets(x) for x in gradients])
            scale = torch.linalg.vector_norm(rows, 2, dim=1, keepdim=True)
            r, weight = (rows.abs() / scale.clamp_min(1e-30)).flatten(), scale.square().expand_as(rows).flatten()
            kept = torch.randperm(len(r), generator=self.draw)[: self.n * SAMPLE]
            order = r[kept].argsort()
            self.levels = self._fit(r[kept][order], weight[kept][order], self.levels)
        self._steps += 1
        return super().combine(gradients)


def alq_levels(r: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
    """Coordinate descent on the inner levels: each is where the mass above balances the weighted mass around it.

    Args:
        r: Magnitudes in ascending order, float32 [d].
        weight: Weight of each magnitude, float32 [d].
        levels: Where to start, from 0 to 1.

    Returns:
        The levels.
    """
    r, weight, found = r.double(), weight.double(), levels.double().clone()
    mass, first = (torch.cat([torch.zeros(1).double(), x.cumsum(0)]) for x in (weight, weight * r))
    for _ in range(10):
        for j in range(1, len(found) - 1):
            low, high = found[j - 1], found[j + 1]
            a, b = (int(torch.searchsorted(r, level, right=True)) for level in (low, high))
            if b - a < 2:
                found[j] = (low + high) / 2
                continue
            share = ((first[b] - first[a]) - low * (mass[b] - mass[a])) / (high - low)
            place = int(torch.searchsorted(mass, mass[b] - share))
            found[j] = r[min(max(place - 1, a), b - 1)].clamp(low, high)
    return found.float()


def amq_levels(r: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
    """The powers of a factor, as many as `levels`, whose factor has the least variance. Arguments as `alq_levels`."""
    exponents = torch.arange(len(levels) - 1, -1, -1.0)
    candidates = [p**exponents for p in torch.linspace(0.05, 0.95, 91)]
    return min(candidates, key=lambda tried: float(variance(r, weight, tried)))


def variance(r: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
    """The mean variance of magnitudes that are rounded to levels without bias."""
    above = torch.bucketize(r, levels).clamp(1, len(levels) - 1)
    each = (levels[above] - r) * (r - levels[above - 1])
    if levels[0] > 0:
        each = torch.where(r < levels[0], levels[0].square() - r.square(), each)
    return (weight * each.clamp_min(0)).sum() / weight.sum()


def buckets(x: Tensor) -> Tensor:
    """The values in rows of BUCKET, the last one filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BUCKET)).view(-1, BUCKET)


def qinf(n: int, seed: int, bits: int) -> Peer:
    """QSGD with the largest value as a bucket's scale: uniform levels, zero among them."""
    count = 2 ** (bits - 1)
    return Leveled(n, seed, bits, float("inf"), [k / (count - 1) for k in range(count)])


PEERS: dict[str, Callable[[int, int], Peer]] = {
    "IntSGD, 8 bits": IntSgd,
    "NatSGD, 9 bits": NatSgd,
    "SignSGD, majority vote": SignSgd,
    **{f"Qinf, {bits} bits": lambda n, seed, bits=bits: qinf(n, seed, bits) for bits in (4, 3, 2)},
    **{f"ALQ, {bits} bits": lambda n, seed, bits=bits: AdaptiveLevels(n, seed, bits, alq_levels) for bits in (4, 3, 2)},
    **{f"AMQ, {bits} bits": lambda n, seed, bits=bits: AdaptiveLevels(n, seed, bits, amq_levels) for bits in (4, 3, 2)},
}
"""By the line's name: what makes the average of n workers with a seed."""
