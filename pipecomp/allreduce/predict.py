"""What averaging a bucket takes over links of a given rate, from the bytes that each method sends and measured kernels.

The collectives are played through as they run: pieces of the bucket follow each other, a rank quantizes, reduces or
decodes one while others are on its link, and waits only for what it needs. All ranks are alike, each has one link for
both directions at once, and what it sends or receives, whichever is more, passes that link in order.

d: values in the bucket (float32), n: ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipecomp.allreduce.call import PARTS
from pipecomp.allreduce.exchanges import FLOAT, Exchange, Piece, Plan, Shapes
from pipecomp.allreduce.options import Gradients
from pipecomp.allreduce.registry import METHODS
from pipecomp.errors import ConfigError, require
from pipecomp.stats import ring_bytes

KERNELS = ("quantize", "reduce", "decode")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One averaging of a bucket of d float32 values over n ranks.

    Args:
        method: its name.
        d: values.
        n: ranks.
        bytes_raw: of a ring all-reduce of the bucket, per rank.
        bytes_sent_by_rank: what each rank puts on its links.
        exact: whether a state sends just these bytes; otherwise they are an estimate.
        quantize_s, reduce_s, decode_s: seconds as they were given.
        send_s: seconds of the link alone, latencies included.
        wait_s: the part of them that no kernel hides.
        total_s: seconds of it all.
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
        """Of the rank that sends most."""
        return max(self.bytes_sent_by_rank)

    @property
    def speedup(self) -> float:
        """How many times as fast as uncompressed float32 (1 where neither takes any time)."""
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
) -> Prediction:
    """Predict bytes and seconds of averaging d float32 values over n ranks.

    Bytes are those that `State` counts, except where they depend on the values: `casq` never sends more than this (the
    centers of an interval are spread over its steps), `sparse` not more than s·√(n·d) expected non-zeros take, 1/s the
    smallest level. A bucket of zeros sends its norm only. With `adaptive` all layers are taken to have the method's own
    value, as before the first plan; later codes are no larger if `adaptive.error` is at least 1.
    Source: arXiv:2305.18627 (Global-QSGD), section 3; Theorem 3.3 with its factor s corrected, and without its s²: a
    value's chance to be sent is at most s·|x| / ‖x‖₂ also where that is above 1.

    Args:
        method: as for `State`.
        d: values in the bucket.
        n: ranks.
        bandwidth_bit_per_s: what each rank's link carries, each way.
        latency_s: seconds of one message.
        kernel_seconds: "quantize", "reduce" and "decode" of one call of this size, as in `State.stats()["seconds"]`
            (its "wait" is ignored); they are spread over the pieces by their bytes. None: kernels take no time.
        shapes: of the bucket's parameters, for "powersgd", which does not compress vectors (None: the bucket is one
            vector) and is predicted from its third step on: before that it does not compress.
        **options: as for `State`.

    Returns:
        The prediction.

    Raises:
        ConfigError: for wrong options and numbers.

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
    total_s = _play(plan, n, kernels, rate, latency_s)
    return Prediction(
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
        fp32_s=_play(plan_of(Gradients(), d, n), n, dict.fromkeys(KERNELS, 0.0), rate, latency_s),
    )


def compression_pays(beta: float, gamma: float, omega: float, rho: float) -> bool:
    """Say whether compression makes an all-reduce faster: β < 2ω(ρ − 1) / (1 − ωρ) · γ, and always where 1 − ωρ ≤ 0.

    Quantizing and decoding are left out.
    Source: arXiv:2305.18627 (Global-QSGD), section 5, equation 8 before ρ = 4 is put in.

    Args:
        beta: rate of the links in bytes per second.
        gamma: rate of reducing uncompressed values in bytes per second.
        omega: speed of reducing compressed values over that of uncompressed ones, both by their bytes.
        rho: uncompressed bytes over compressed ones, above 1.

    Returns:
        Whether it does.

    Raises:
        ConfigError: for other numbers than positive ones, and for rho of at most 1.
    """
    for name, value in (("beta", beta), ("gamma", gamma), ("omega", omega)):
        require(value > 0, name, value, "a number above 0")
    require(rho > 1, "rho", rho, "a number above 1")
    return beta * (1 - omega * rho) < 2 * omega * (rho - 1) * gamma


def _kernels(given: Mapping[str, float]) -> dict[str, float]:
    for name, seconds in given.items():
        require(name in PARTS, f"kernel_seconds.{name}", seconds, f"only {', '.join(KERNELS)}")
        require(seconds >= 0, f"kernel_seconds.{name}", seconds, "0 or more")
    return {part: given.get(part, 0.0) for part in KERNELS}


def plan_of(options: Gradients, d: int, n: int, shapes: Shapes | None = None) -> Plan:
    """What `options` exchange for d values over n ranks. shapes: of the parameters, for methods that look at them."""
    chosen = options.chosen
    if shapes is not None and (not chosen.by_matrix or sum(map(math.prod, shapes)) != d):
        users = ", ".join(repr(name) for name, method in METHODS.items() if method.by_matrix)
        raise ConfigError("shapes", list(shapes), f"with {users} only, {d} values in all")
    plan = chosen.plan(d, n, shapes)
    return plan if options.adaptive is None else replace(plan, exact=False)


class _Clock:
    """One rank: the time, and when its link has sent all that was posted."""

    def __init__(self, rate: float, latency_s: float) -> None:
        self.now = self._free = 0.0
        self._rate, self._latency_s = rate, latency_s

    def send(self, exchange: Exchange) -> float:
        """Post it. Returns when it has arrived, on every rank, as all are alike."""
        self._free = max(self._free, self.now) + exchange.link / self._rate
        return self._free + exchange.hops * self._latency_s

    def wait(self, until: float) -> None:
        """Nothing to do before that."""
        self.now = max(self.now, until)


def _play(plan: Plan, n: int, kernels: Mapping[str, float], rate: float, latency_s: float) -> float:
    """Seconds of a plan."""
    if n == 1:
        return sum(kernels.values())
    clock = _Clock(rate, latency_s)
    for exchange in plan.before:
        clock.wait(clock.send(exchange))
    all_bytes = sum(piece.sent.link for pieces in plan.passes for piece in pieces)
    for pieces in plan.passes:
        _play_pieces(pieces, {part: seconds / all_bytes for part, seconds in kernels.items()}, clock)
    return clock.now


def _play_pieces(pieces: Sequence[Piece], seconds_per_byte: Mapping[str, float], clock: _Clock) -> None:
    """The turns of `reduce_scatter.reduce_bucket`, or of `all_gather.average_gathered` where nothing is returned."""
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
