"""Compare the papers' theorems with measurements on small problems; seconds.

    python -m benchmarks theory [--out FOLDER]

Each function returns `Claim`s: a quantity, what it is here, and the bound that a paper states for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.page import prose, table, this_machine
from benchmarks.runner import arguments
from pipecomp.allreduce import State, allreduce_mean
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.allreduce.methods.casq import k_means, share_buckets
from pipecomp.kernels import ops
from pipecomp.utils.files import atomic_write

ROOT_HALF = math.sqrt(0.5)  # Theorem 3.1 of AQ-SGD needs c_Q below it
DRAWS = 200


class Claim(NamedTuple):
    """A measured quantity and its bound."""

    what: str
    measured: float
    bound: float

    @property
    def holds(self) -> bool:
        """True if the quantity is at most its bound, as exactly as it was measured."""
        return self.measured <= self.bound * (1 + 1e-3)


# -- AQ-SGD


def rows_of(kind: str, count: int = 64, hidden: int = 128) -> Tensor:
    """Rows to quantize, float32 [count, hidden]: "Gaussian", "heavy tails", "one value", or "changes" of a GPT-2."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, hidden, generator=draw)
    if kind == "heavy tails":  # Student's t with 2 degrees of freedom
        return x / torch.randn(2, count, hidden, generator=draw).square().mean(0).sqrt()
    if kind == "one value":
        return torch.eye(hidden)[:count]
    return x if kind == "Gaussian" else _changes(count)


def _changes(count: int) -> Tensor:
    """Changes of a small GPT-2's hidden states over one step of training, float32 [count, 128]."""
    from benchmarks.wikitext import VOCABULARY, new_model

    model = new_model(0)
    tokens = torch.randint(VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(4):
        out = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
        seen.append(out.hidden_states[4].detach().flatten(0, 1))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return (seen[-1] - seen[-2])[:count].contiguous()


def c_q(x: Tensor, bits: int, scale: str = "max", rounding: str = "nearest") -> float:
    """The largest mean of ‖x − Q(x)‖ / ‖x‖ over rows x; over draws with stochastic rounding."""
    total, draws = torch.zeros(len(x)), 16 if rounding == "stochastic" else 1
    for seed in range(draws):
        options: dict[str, Any] = {"rounding": rounding}
        codes, scales = ops.quantize(x, bits, scale=scale, seed=seed, **options)
        decoded = ops.dequantize(codes, scales, bits, tuple(x.shape), **options)
        total += (x - decoded).norm(dim=1) / x.norm(dim=1)
    return float((total / draws).max())


FORMS = (("max", "nearest"), ("rms", "nearest"), ("max", "stochastic"))
KINDS = ("Gaussian", "changes", "heavy tails", "one value")


def quantizer_constants(bits: Sequence[int] = (1, 2, 3, 4, 6, 8)) -> list[tuple[str, int, list[float]]]:
    """c_Q by rows, bits, and scale with rounding (FORMS)."""
    return [
        (kind, b, [c_q(x, b, scale, rounding) for scale, rounding in FORMS])
        for kind in KINDS
        for x in [rows_of(kind)]
        for b in bits
    ]


class _Training(NamedTuple):
    """Sums over a training: ‖δ‖², ‖a − a of the last visit‖², ‖∇f‖²; and the largest ‖δ‖ over its change's norm."""

    errors: float
    changes: float
    gradients: float
    largest: float


def _two_stages(bits: int, steps: int) -> _Training:
    """AQ-SGD on a convex problem: least squares over two linear stages of which the first is trained, a(ξ) = W ξ.

    The learning rate is 0.1 / √steps, as the theorem's falls.
    """
    draw = torch.Generator().manual_seed(3)
    samples, weights = torch.randn(16, 12, generator=draw), torch.randn(24, 12, generator=draw)
    targets, m = torch.randn(16, 24, generator=draw), {}
    before: dict[int, Tensor] = {}
    errors = changes = gradients = largest = 0.0
    for _ in range(steps):
        gradients += float(((samples @ weights.T - targets).T @ samples / len(samples)).square().sum())
        i = int(torch.randint(16, (1,), generator=draw))
        a = weights @ samples[i]
        if i in m:
            delta = (a - m[i])[None]
            codes, scale = ops.quantize(delta, bits)
            sent = ops.dequantize(codes, scale, bits, (1, 24))
            largest = max(largest, float((delta - sent).norm() / delta.norm()))
            m[i] = m[i] + sent[0]
            errors += float((a - m[i]).square().sum())
            changes += float((a - before[i]).square().sum())
        else:
            m[i] = a.clone()
        before[i] = a
        weights = weights - 0.1 / math.sqrt(steps) * torch.outer(m[i] - targets[i], samples[i])
    return _Training(errors, changes, gradients, largest)


def delta_sum(bits: int = 4, steps: int = 400) -> Claim:
    """Sum of ‖δ‖² beside that of the changes of a: Lemma A.2 before it bounds the latter by the steps."""
    done = _two_stages(bits, steps)
    bound = 2 * done.largest**2 / (1 - 2 * done.largest**2) * done.changes
    return Claim(f"Σ‖δ‖² with {bits} bits, c_Q = {done.largest:.2f}", done.errors, bound)


def rate(bits: int = 4, steps: int = 1600, times: int = 16) -> Claim:
    """Mean of ‖∇f‖² over `times` as many steps, beside 1/√times of that over `steps`: Theorem 3.1's rate."""
    few, many = (_two_stages(bits, count).gradients / count for count in (steps, times * steps))
    name = f"mean ‖∇f‖² over {times * steps:,} steps with {bits} bits, beside 1/√T of that over {steps:,}"
    return Claim(name, many, few / math.sqrt(times))


# -- gradients


def _means(options: dict[str, Any], inputs: list[Tensor], draws: int) -> Tensor:
    """Averages of `draws` copies side by side, [draws, d]: each is drawn for itself, all under one norm."""

    def work(group: LoopbackGroup) -> Tensor:
        state = State(group=group, seed=1, **options)
        found = [allreduce_mean(state, inputs[group.rank]).clone() for _ in range(draws)]
        state.close()
        return torch.stack(found)

    return run_threads(len(inputs), work)[0]


def _gradients(n: int, d: int = 256, *, equal: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    shared = torch.randn(d, generator=draw)
    return [shared if equal else shared + 0.3 * torch.randn(d, generator=draw) for _ in range(n)]


def _variance(options: dict[str, Any], inputs: list[Tensor]) -> float:
    wanted = torch.stack(inputs).double().mean(0)
    return float((_means(options, inputs, DRAWS).double() - wanted).square().sum(1).mean())


def theorem_3_3(n: int, *, exponential: bool, equal: bool = False) -> list[Claim]:
    """Variance of Global-QSGD's mean with 2-norms, beside the theorem's and, of exponential levels, that with trees."""
    bits, inputs = (8 if exponential else 3), _gradients(n, equal=equal)
    levels = "exponential" if exponential else "linear"
    found = _variance({"method": "global_qsgd", "levels": levels, "bits": bits, "norm": 2}, inputs)
    d, squares = inputs[0].numel(), float(sum(x.double().square().sum() for x in inputs)) / n
    name = f"Global-QSGD, {levels}, {'equal' if equal else 'different'} gradients, n = {n}"
    if not exponential:
        return [Claim(f"{name}: Theorem 3.3", found, math.sqrt(d) / (math.sqrt(n) * 3) * squares)]
    # 2^(s-1) of the theorem is 1 / (smallest level); tree: each node multiplies by 9/8 and adds (A + B)²/8.
    smallest = 2.0 ** -(ops.exponential_levels(bits, n) - 1)
    stated = (1 / (8 * n) + math.sqrt(d) / math.sqrt(n) * smallest) * squares
    depth = math.ceil(math.log2(n))
    grown = (9 / 8) ** depth * stated + ((9 / 8) ** depth - 1) * squares
    return [Claim(f"{name}: Theorem 3.3", found, stated), Claim(f"{name}: with (9/8)^⌈log2 n⌉", found, grown)]


def lemma_5(bits: int = 3) -> Claim:
    """Variance of QSGD-MN's rounding of one worker's values under the largest norm of two."""
    v = _gradients(1)[0]
    s, d = 2 ** (bits - 1) - 1, v.numel()
    found = _variance({"method": "qsgd_mn", "bits": bits}, [v])
    return Claim("QSGD-MN: Lemma 5", found, (1 + min(d / s**2, math.sqrt(d) / s)) * float(v.square().sum()))


def lemma_7(bits: tuple[int, int] = (3, 6)) -> Claim:
    """The same with two scales; the bound has the smaller one."""
    v = _gradients(1)[0]
    s, d = 2 ** (bits[0] - 1) - 1, v.numel()
    found = _variance({"method": "qsgd_mn_ts", "bits": bits}, [v])
    return Claim("QSGD-MN-TS: Lemma 7", found, (1 + min(d / s**2, math.sqrt(d) / s)) * float(v.square().sum()))


def convex(method: str, bits: Any, *, workers: int = 2, steps: int = 400) -> Claim:
    """f(mean of θ) − min f of parallel SGD with the step size of QSGD-MN's Theorems 6 and 8.

    The bound is R·√(2B̃/(M·T)) + L·R²/T, from which the theorems get their number of steps. f(θ) = ‖θ‖²/2 (L = 1)
    from a distance R, gradients with noise.
    """
    d, radius, noise = 32, 1.0, 0.1
    s = 2 ** ((bits if isinstance(bits, int) else bits[0]) - 1) - 1
    moment = radius**2 + noise**2 * d
    spread = (2 + min(d / s**2, math.sqrt(d) / s)) * moment

    def work(group: LoopbackGroup) -> Tensor:
        state = State(group=group, method=method, bits=bits, seed=2)
        draw = torch.Generator().manual_seed(10 + group.rank)
        theta = torch.full((d,), radius / math.sqrt(d))
        total = torch.zeros(d)
        gamma = radius / math.sqrt(spread) * math.sqrt(2 / steps)
        for _ in range(steps):
            total += theta / steps
            noisy = theta + noise * torch.randn(d, generator=draw)
            theta = theta - allreduce_mean(state, noisy) / (1 + math.sqrt(workers) ** -1 / gamma)
        state.close()
        return total

    found = float(run_threads(workers, work)[0].square().sum()) / 2
    theorem = {"qsgd_mn": "QSGD-MN: Theorem 6", "qsgd_mn_ts": "QSGD-MN-TS: Theorem 8"}[method]
    return Claim(theorem, found, radius * math.sqrt(2 * spread / (workers * steps)) + radius**2 / steps)


def casq_theorem_1() -> list[Claim]:
    """Theorem 1 of CASQ for the first cluster: how far (1) is from its value, in standard errors, and (2) to (4)."""
    x = torch.randn(8000, generator=torch.Generator().manual_seed(7))
    centers = k_means(x, 4)
    counts = share_buckets(x, centers, 40)
    cluster = ops.kmeans_assign(x, centers).long()
    decoded = []
    for seed in range(DRAWS):
        error = torch.empty_like(x)
        ops.sketch_encode_(x, error, centers, ops.Sketch(counts, 2, seed))
        decoded.append(x - error)
    estimates = torch.stack(decoded).double()
    square = float(x.double().square().sum())
    members = (cluster == 0).nonzero().flatten()
    mean, share = x[members].double().mean(), float(counts[0]) / len(members)
    bias = estimates[:, members].mean(0) - x[members].double()
    stated = (1 - share) * (mean - x[members].double())
    standard = estimates[:, members].std(0) / math.sqrt(DRAWS)
    return [
        Claim(
            "CASQ: Theorem 1 (1), standard errors (rms)",
            float(((bias - stated) / standard).square().mean().sqrt()),
            1.2,
        ),
        Claim(
            "CASQ: Theorem 1 (2), variance of a value, as a bound",
            float(estimates[:, members].var(0).mean()),
            share * float(x[members].double().var() + (1 - 1 / float(counts[0])) * mean**2),
        ),
        Claim("CASQ: Theorem 1 (3), ‖ĝ‖²", float(estimates.square().sum(1).mean()), square),
        Claim("CASQ: Theorem 1 (4), ‖ĝ − g‖²", float((estimates - x).square().sum(1).mean()), square),
    ]


def gradient_claims() -> list[Claim]:
    """Bounds of averages of gradients."""
    return [
        *(claim for n in (2, 4) for claim in theorem_3_3(n, exponential=False)),
        *(claim for n in (2, 5) for equal in (False, True) for claim in theorem_3_3(n, exponential=True, equal=equal)),
        lemma_5(),
        lemma_7(),
        convex("qsgd_mn", 4),
        convex("qsgd_mn_ts", [4, 8]),
        *casq_theorem_1(),
    ]


def results() -> list[str]:
    """The page."""
    text = f"""
        # The papers' theorems on small problems

        `python -m benchmarks theory`, on {this_machine()}. Bounds are tested in `tests/benchmarks/test_theory.py`.

        ## AQ-SGD: c_Q of Theorem 3.1

        The theorem needs an unbiased Q with E‖x − Q(x)‖ ≤ c_Q ‖x‖ and c_Q < √½ = {ROOT_HALF:.2f}. The largest mean over
        64 rows of 128 values; in bold what exceeds √½. Changes: of a small GPT-2's hidden states over one step. Heavy
        tails: Student's t with 2 degrees of freedom. One value: a row of one value and zeros. Nearest rounding, the
        default, is biased.
    """
    columns = [f"{scale}, {rounding}" for scale, rounding in FORMS]
    rows = [
        [kind, bits, *(f"{c:.2f}" if c < ROOT_HALF else f"**{c:.2f}**" for c in constants)]
        for kind, bits, constants in quantizer_constants()
    ]
    claims = [*(delta_sum(bits) for bits in (3, 4, 8)), *(rate(bits) for bits in (2, 4)), *gradient_claims()]
    shown = [
        [c.what, f"{c.measured:.3g}", f"{c.bound:.3g}", "holds" if c.holds else "**does not hold**"] for c in claims
    ]
    more = """
        ## Bounds

        AQ-SGD's Lemma A.2 is compared before it bounds the changes of a by the steps: Σ‖δ‖² ≤ 2c_Q²/(1 − 2c_Q²) · Σ‖a −
        a of the last visit‖². Its rate is measured on the same problem, with learning rates of 0.1 / √T. Global-QSGD's
        Theorem 3.3 for exponential levels leaves out the variance of the reduction.
    """
    return [
        *prose(text),
        *table(["rows", "bits", *columns], rows),
        *prose(more),
        *table(["bound", "measured", "at most", ""], shown),
    ]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__)
    torch.set_num_threads(1)
    with atomic_write(given.out / "theory.md", synced=False) as part:
        part.write_text("\n".join(results()).rstrip("\n") + "\n", encoding="utf-8")
