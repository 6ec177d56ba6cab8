"""Prediction of bytes and seconds of an average, from a method's plan and measured kernels.

The simulation follows the collectives: pieces of a bucket are pipelined, and a rank quantizes, reduces or decodes one
while others are on its link. All ranks are alike. Each has one full-duplex link, which transfers the larger of the
bytes sent and received, in order.

d: values in the bucket (float32), n: ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipecomp.allreduce.call import PARTS
from pipecomp.allreduce.method import FLOAT, Exchange, ExchangePlan, PiecePlan, Shapes
from pipecomp.allreduce.methods import create_method
from pipecomp.config.gradients import METHODS, Gradients
from pipecomp.errors import ConfigError, require
from pipecomp.stats import ring_bytes

KERNELS = ("quantize", "reduce", "decode")


@dataclass(frozen=True, kw_only=True)
class AveragePrediction:
    """An average of a bucket of d float32 values over n ranks.

    Attributes:
        method: its name.
        d: values.
        n: ranks.
        bytes_raw: bytes of a ring all-reduce of the bucket, per rank.
        bytes_sent_by_rank: bytes sent by each rank.
        exact: whether a state sends exactly these bytes; otherwise they are an estimate.
        quantize_s, reduce_s, decode_s: the given seconds.
        send_s: seconds of the link alone, with latencies.
        wait_s: the part of them that is not hidden by kernels.
        total_s: seconds in total.
        fp32_s: seconds of the same collective with uncompressed float32 values.
    """

    method: str
    d: int
    n: int
    bytes_raw: int
    bytes_sent_by_rank: tuple[int, ...]
    exact: bool
    quantize_s: float
    send_s: float
    reduce_s: float
    decode_s: float
    wait_s: float
    total_s: float
    fp32_s: float

    @property
    def bytes_sent(self) -> int:
        """Bytes of the rank that sends most."""
        return max(self.bytes_sent_by_rank)

    @property
    def speedup(self) -> float:
        """Speed relative to uncompressed float32; 1 if neither takes any time."""
        return self.fp32_s / self.total_s if self.total_s else 1.0


def predict(
    method: str,
    d: int,
    n: int,
    *,
    bandwidth_bit_per_s: float,
    latency_s: float = 0.0,
    kernel_seconds: Mapping[str, float] | None = None,
    shapes: Shapes | None = None,
    **options: Any,
) -> AveragePrediction:
    """Predict bytes and seconds of an average of d float32 values over n ranks.

    Bytes are those that `State` counts, or upper bounds if they depend on the values: for `casq`, with the centers of
    an interval spread over its steps; for `sparse`, of s·√(n·d) expected non-zeros, with 1/s the smallest level. A
    bucket of zeros sends its norm only. With `adaptive` all layers have the method's own value, as before the first
    plan; later codes are no larger if `adaptive.error` is at least 1. Source: arXiv:2305.18627 (Global-QSGD), section
    3; Theorem 3.3 with its factor s corrected, and without its s²: a value's probability to be sent is at most s·|x| /
    ‖x‖₂, even if that is above 1.

    Args:
        method: as for `State`.
        d: values in the bucket.
        n: ranks.
        bandwidth_bit_per_s: rate of each rank's link, in each direction.
        latency_s: latency of one message, in seconds.
        kernel_seconds: "quantize", "reduce" and "decode" of one call of this size, as in `State.stats()["seconds"]`
            (its "wait" is ignored), distributed over the pieces by their bytes. None: kernels take no time.
        shapes: shapes of the bucket's parameters, for "powersgd", which does not compress vectors; None: one vector.
            The prediction is for its third step, the first that compresses, and later ones.
        **options: as for `State`.

    Returns:
        The prediction.

    Raises:
        ConfigError: for options and numbers that are not allowed.

    Example:
        >>> predict("qsgd_mn", 1 << 20, 4, bandwidth_bit_per_s=1e9, bits=4).speedup
    """
    for name, count in (("d", d), ("n", n)):
        require(isinstance(count, int) and count >= 1, name, count, "a whole number of at least 1")
    require(bandwidth_bit_per_s > 0, "bandwidth_bit_per_s", bandwidth_bit_per_s, "a number above 0")
    require(latency_s >= 0, "latency_s", latency_s, "0 or more")
    kernels = _kernels(kernel_seconds or {})
    rate = bandwidth_bit_per_s / 8
    plan = plan_of(Gradients(method=method, **options), d, n, shapes)
    exchanges = plan.exchanges()
    total_s = _simulate(plan, n, kernels, rate, latency_s)
    return AveragePrediction(
        method=method,
        d=d,
        n=n,
        bytes_raw=ring_bytes(FLOAT * d, n),
        bytes_sent_by_rank=tuple(round(sum(e.sends[rank] for e in exchanges)) for rank in range(n)),
        exact=plan.exact,
        quantize_s=kernels["quantize"],
        send_s=sum(e.link / rate + e.hops * latency_s for e in exchanges) if n > 1 else 0.0,
        reduce_s=kernels["reduce"],
        decode_s=kernels["decode"],
        wait_s=max(0.0, total_s - sum(kernels.values())),
        total_s=total_s,
        fp32_s=_simulate(plan_of(Gradients(), d, n), n, dict.fromkeys(KERNELS, 0.0), rate, latency_s),
    )


def compression_pays(beta: float, gamma: float, omega: float, rho: float) -> bool:
    """Return whether compression makes an all-reduce faster: β < 2ω(ρ − 1) / (1 − ωρ) · γ, and always if 1 − ωρ ≤ 0.

    Quantizing and decoding are not included.
    Source: arXiv:2305.18627 (Global-QSGD), section 5, equation 8 before substitution of ρ = 4.

    Args:
        beta: rate of the links in bytes per second.
        gamma: rate of reducing uncompressed values in bytes per second.
        omega: rate of reducing compressed values relative to uncompressed ones, in bytes.
        rho: ratio of uncompressed to compressed bytes, above 1.

    Raises:
        ConfigError: for numbers that are not positive, and rho of at most 1.
    """
    for name, value in (("beta", beta), ("gamma", gamma), ("omega", omega)):
        require(value > 0, name, value, "a number above 0")
    require(rho > 1, "rho", rho, "a number above 1")
    return beta * (1 - omega * rho) < 2 * omega * (rho - 1) * gamma


def _kernels(measured: Mapping[str, float]) -> dict[str, float]:
    for name, seconds in measured.items():
        require(name in PARTS, f"kernel_seconds.{name}", seconds, f"only {', '.join(KERNELS)}")
        require(seconds >= 0, f"kernel_seconds.{name}", seconds, "0 or more")
    return {part: measured.get(part, 0.0) for part in KERNELS}


def plan_of(options: Gradients, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
    """Return the plan of a method for d values over n ranks. shapes: of the parameters, for methods `by_matrix`."""
    by_matrix = options.method_options.by_matrix
    if shapes is not None and (not by_matrix or sum(map(math.prod, shapes)) != d):
        users = ", ".join(repr(name) for name, method in METHODS.items() if method.by_matrix)
        raise ConfigError("shapes", list(shapes), f"with {users} only, {d} values in all")
    plan = create_method(options).plan(d, n, shapes)
    return plan if options.adaptive is None else replace(plan, exact=False)


class _Clock:
    """The time of one rank, and when its link is free."""

    def __init__(self, rate: float, latency_s: float) -> None:
        self.now = self._free = 0.0
        self._rate, self._latency_s = rate, latency_s

    def send(self, exchange: Exchange) -> float:
        """Post an exchange; return its arrival time, the same on all ranks."""
        self._free = max(self._free, self.now) + exchange.link / self._rate
        return self._free + exchange.hops * self._latency_s

    def wait(self, until: float) -> None:
        """Advance to a time."""
        self.now = max(self.now, until)


def _simulate(plan: ExchangePlan, n: int, kernels: Mapping[str, float], rate: float, latency_s: float) -> float:
    """Return the seconds of a plan."""
    if n == 1:
        return sum(kernels.values())
    clock = _Clock(rate, latency_s)
    for exchange in plan.before:
        clock.wait(clock.send(exchange))
    all_bytes = sum(piece.sent.link for pieces in plan.passes for piece in pieces)
    for pieces in plan.passes:
        _simulate_pieces(pieces, {part: seconds / all_bytes for part, seconds in kernels.items()}, clock)
    return clock.now


def _simulate_pieces(pieces: Sequence[PiecePlan], seconds_per_byte: Mapping[str, float], clock: _Clock) -> None:
    """Simulate `reduce_scatter.reduce_bucket`, or `all_gather.average_gathered` if nothing is returned."""
    sent: dict[int, float] = {}
    returned: dict[int, float] = {}

    def work(part: str, i: int) -> None:
        clock.now += seconds_per_byte[part] * pieces[i].sent.link

    for i in range(len(pieces) + 2):
        if i < len(pieces):
            work("quantize", i)
            lengths = pieces[i].lengths
            if lengths is not None:
                clock.wait(clock.send(lengths))
            sent[i] = clock.send(pieces[i].sent)
        if i - 1 in sent:
            clock.wait(sent.pop(i - 1))
            work("reduce", i - 1)
            back = pieces[i - 1].returned
            if back is None:
                work("decode", i - 1)
            else:
                returned[i - 1] = clock.send(back)
        if i - 2 in returned:
            clock.wait(returned.pop(i - 2))
            work("decode", i - 2)
