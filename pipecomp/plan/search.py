"""Choice of settings: bits that hide behind compute, stages and micro-batches, the method for gradients.

Choices are made among predictions only. Of plans that these do not tell apart, because their seconds differ by at most
2 % or by less than the measurements behind them do, the simplest one is taken (`simplicity`), so that plans of a busy
machine do not change from call to call. Links much faster than the slowest one get bits of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecomp.config import Config
from pipecomp.config.activations import (
    DEFAULT_MAX,
    DEFAULT_MIN,
    FEWEST,
    Bits,
    ConstantError,
    bits_of_link,
    each_link,
    per_link,
    plain_bits,
)
from pipecomp.errors import require
from pipecomp.gradient_config import Gradients
from pipecomp.plan.options import GRADIENT_METHODS
from pipecomp.plan.packet_sizes import with_bits
from pipecomp.plan.prediction import (
    NEARLY_EQUAL,
    Estimate,
    MachineSpeeds,
    StepPrediction,
    TrainingJob,
    average_seconds,
    predict,
)
from pipecomp.plan.simulation import LinkNetwork
from pipecomp.rank_layout import STAGES_ACROSS, RankLayout

BIT_PAIRS = ((8, 8), (7, 8), (6, 8), (5, 8), (4, 8), (3, 6), (2, 4))
"""Forward and backward bits, most first; the last three are the paper's. Fewer bits are never chosen automatically."""
SURE_PAIRS = ((8, 8), (4, 8), (3, 6), (2, 4))
"""Those of BIT_PAIRS that are chosen among where measurements differ: between 4 and 8 bits noise would decide."""
ERRORS = {"forward_bits": 0.05, "backward_bits": 0.1}
"""Relative error of values and of deltas; benchmarks/constant_error.py trains with these errors."""
FINE_BITS = {"forward_bits": 4, "backward_bits": 8}
"""From this many bits on, half of ERRORS is kept, as more bytes cost no time there: benchmarks/shootout.py."""
FREE = 1.001  # factor on a step's seconds that more bits on a fast link may cost
FAST_LINK = 2.0  # a link is fast if its rate is this many times the slowest one's
WORTHWHILE = 1.05  # factor by which compression must shorten a step
MAX_SHARE = 0.05  # share of a step for gradients of replicas or tied weights above which an alternative is proposed
LOCAL_STEPS = (2, 4, 8, 16, 32)
MIN_OUTER_STEPS = 24
"""Averages that a fine-tuning needs: with half as many, a classifier loses accuracy, and four GPT-2 replicas loss."""
_FEWEST = FEWEST["forward_bits"]
TIED = Gradients(method="double_squeeze", bits=8)
"""For tied weights whose plain gradients take much of a step. No loss is measured with these bits (`replicas`)."""
CLUSTERS = 256
"""Cluster centers that deltas refer to where no sample is seen twice: benchmarks/results/one_pass.md."""


def aqsgd_sections(forward: Bits, backward: Bits, *, one_pass: bool, changes_back: bool = True) -> dict[str, Any]:
    """Make the configuration sections for AQ-SGD, with first visits of constant error and automatic scales.

    Args:
        forward: Forward bits.
        backward: Backward bits.
        one_pass: True if no sample is seen twice. Deltas then refer to cluster centers, and gradients are not deltas.
        changes_back: True to send gradients as deltas, too.
    """
    activations = {"method": "aqsgd", "forward_bits": plain_bits(forward), "backward_bits": plain_bits(backward)}
    activations["scale"] = "auto"
    if one_pass:
        return {"activations": activations, "store": {"clusters": CLUSTERS}}
    activations["first_visit"] = _first_visit(forward, "forward_bits")
    if changes_back:
        activations |= {"backward_method": "delta", "backward_first_visit": _first_visit(backward, "backward_bits")}
    return {"activations": activations}


def _first_visit(bits: Bits, key: str) -> dict[str, float]:
    """Return the error of first visits: half of it only where every link hides 8 bits, as nothing else limits them."""
    hidden = all(isinstance(each, ConstantError) and each.max == DEFAULT_MAX for each in each_link(bits))
    return {"error": ERRORS[key] / 2 if hidden else ERRORS[key]}


def compared_methods(
    stages: int, tie: bool, *, one_pass: bool = False, changes_back: bool = True
) -> list[tuple[str, Config]]:
    """List the methods that plans compare, by name; a single stage has nothing to compress."""
    sections: list[tuple[str, dict[str, Any]]] = [("none", {"activations": {"method": "none"}})]
    if stages > 1:
        direct = {"method": "direct", "forward_bits": 4, "backward_bits": 8}
        sections += [("bf16", {"activations": {"method": "bf16"}}), ("DirectQ fw4 bw8", {"activations": direct})]
        sections += [
            (f"AQ-SGD fw{f} bw{b}", aqsgd_sections(f, b, one_pass=one_pass, changes_back=changes_back))
            for f, b in ((8, 8), (4, 8), (3, 6), (2, 4))
        ]
    return [(name, Config.from_dict({**section, "tie": tie})) for name, section in sections]


# -- what is simpler


def simplicity(p: StepPrediction) -> tuple[float, ...]:
    """Return a sort key: of plans that take about equally long, the one with the least key is taken.

    Fewer stages come first, then less compression of activations, gradients that are sent themselves rather than as
    changes, more bits, no compression of weights' gradients, and fewer micro-batches.
    """
    a, gradients = p.config.activations, p.config.gradients
    pairs = [a.bits(k) for k in range(p.job.plan.num_stages - 1)] if a.method in a.QUANTIZED else []
    bits = [each.max if isinstance(each, ConstantError) else each for pair in pairs for each in pair]
    return (
        p.job.plan.num_stages,
        a.METHODS.index(a.method),
        a.backward_method == "delta",
        -sum(bits),
        gradients.method != "none",
        p.job.micro_batches,
    )


def simplest(candidates: Sequence[Any], prediction: Callable[[Any], StepPrediction]) -> Any:
    """Return the simplest of the candidates that are as fast as the fastest, as far as predictions can tell."""
    fastest = min((prediction(one) for one in candidates), key=lambda p: p.step_s)
    near = [one for one in candidates if prediction(one).estimate.reaches(fastest.estimate)]
    return min(near, key=lambda one: simplicity(prediction(one)))


def pays(plain: StepPrediction, other: StepPrediction) -> bool:
    """Return whether a less simple plan makes steps faster by enough to matter and by more than measurements differ."""
    return plain.step_s > WORTHWHILE * other.step_s and not plain.estimate.reaches(other.estimate)


def by_layout(choices: Sequence[PlanChoice]) -> dict[RankLayout, StepPrediction]:
    """Return for each layout of ranks the prediction of the settings that are taken in it."""
    groups: dict[RankLayout, list[PlanChoice]] = {}
    for choice in choices:
        groups.setdefault(choice.taken.job.ranks, []).append(choice)
    return {ranks: simplest(group, lambda c: c.taken).taken for ranks, group in groups.items()}


def with_faster_layouts(choices: Sequence[PlanChoice]) -> list[PlanChoice]:
    """Keep the choices of one layout for each number of stages and replicas: of the usual one unless another is faster.

    Both layouts are predicted from the same measurements, so that their spread does not count here.
    """
    taken = by_layout(choices)

    def kept(ranks: RankLayout) -> bool:
        alike = [other for other in taken if (other.stages, other.replicas) == (ranks.stages, ranks.replicas)]
        factors = {other: 1.0 if other.name == STAGES_ACROSS else NEARLY_EQUAL for other in alike}
        return ranks == min(alike, key=lambda other: factors[other] * taken[other].step_s)

    return [choice for choice in choices if kept(choice.taken.job.ranks)]


# -- bits


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Chosen bits and their predictions.

    Attributes:
        forward_bits: One number, or one per link.
        backward_bits: The same for gradients.
        prediction: With these bits.
        plain: Without compression.
        fits: True if fewer bits would not make a step faster.
        fewest: Forward bits below which none were tried.
    """

    forward_bits: Bits
    backward_bits: Bits
    prediction: StepPrediction
    plain: StepPrediction
    fits: bool
    fewest: int = _FEWEST

    @property
    def pays(self) -> bool:
        """True if a step is faster than without compression, by enough to matter and to be sure."""
        return pays(self.plain, self.prediction)

    @property
    def taken(self) -> StepPrediction:
        """Prediction of the recommended settings."""
        return self.prediction if self.pays else self.plain


def choose_bits(
    predicted: Callable[[Bits, Bits], float | Estimate],
    network: LinkNetwork,
    forward: Bits = "auto",
    backward: Bits = "auto",
    fewest: int = _FEWEST,
) -> tuple[Bits, Bits, bool]:
    """Choose the most bits whose step is as fast as with the fewest, as far as predictions can tell.

    All links get the same bits first. Then fast links get as many as cost no time; links that are fast in one
    direction only get more in that direction.

    Args:
        predicted: Called as `predicted(forward, backward)` with numbers of bits; returns seconds of a step, or their
            estimate.
        network: The links.
        forward: "auto", or an error within a rate, whose maximum is chosen. Anything else is fixed; an error then
            counts with its maximum.
        backward: The same for gradients.
        fewest: Lower limit of "auto" forward bits. Otherwise FEWEST and an error's own `min` limit.

    Returns:
        Forward bits, backward bits, and whether they hide behind compute: False if the slowest link is the limit even
        with the fewest bits.
    """
    links = max(1, len(network.forward))
    spans = [
        (
            _span(bits_of_link(forward, k), _FEWEST, fewest),
            _span(bits_of_link(backward, k), FEWEST["backward_bits"], FEWEST["backward_bits"]),
        )
        for k in range(links)
    ]

    def step(pairs: Sequence[tuple[int, int]]) -> Estimate:
        found = predicted(*_by_direction(pairs))
        return found if isinstance(found, Estimate) else Estimate.of(found)

    def rung(place: int) -> list[tuple[int, int]]:
        return [ladder[min(place, len(ladder) - 1)] for ladder in ladders]

    ladders = [_ladder(*both, BIT_PAIRS) for both in spans]
    least = step([ladder[-1] for ladder in ladders])
    if least.high_s > NEARLY_EQUAL * least.low_s:
        ladders = [_ladder(*both, SURE_PAIRS) for both in spans]
    last = max(map(len, ladders)) - 1
    place = next(p for p in range(last + 1) if step(rung(p)).reaches(least))
    chosen = rung(place)
    limit = FREE * step(chosen).seconds
    fast_rate = FAST_LINK * network.slowest
    for k, (out, back) in enumerate(zip(network.forward, network.backward, strict=True)):
        f, b = chosen[k]
        fast_out, fast_back = out.bits_per_s >= fast_rate, back.bits_per_s >= fast_rate
        if fast_out and fast_back:
            more = ladders[k][: place + 1]
        elif fast_out:
            more = [(n, b) for n in range(spans[k][0][0], f, -1)]
        elif fast_back:
            more = [(f, n) for n in range(spans[k][1][0], b, -1)]
        else:
            continue
        tried = ([*chosen[:k], pair, *chosen[k + 1 :]] for pair in more)
        chosen = next((pairs for pairs in tried if step(pairs).seconds <= limit), chosen)
    return *_by_direction(chosen), place != last


def _by_direction(pairs: Sequence[tuple[int, int]]) -> tuple[Bits, Bits]:
    return per_link(f for f, _ in pairs), per_link(b for _, b in pairs)


def _span(bits: int | str | ConstantError, least: int, least_auto: int) -> tuple[int, int]:
    """Return the most and the fewest bits that may be chosen."""
    if isinstance(bits, int):
        return bits, bits
    if not isinstance(bits, ConstantError):
        return 8, least_auto
    return bits.max, bits.max if bits.mbit_per_s is None else max(bits.min, least)


def _ladder(
    forward: tuple[int, int], backward: tuple[int, int], pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """List the bits that a link can have, most first. forward, backward: as from `_span`. pairs: if both are free."""
    (most_f, least_f), (most_b, least_b) = forward, backward
    if most_f == least_f:
        return [(most_f, b) for b in range(most_b, least_b - 1, -1)]
    if most_b == least_b:
        return [(f, most_b) for f in range(most_f, least_f - 1, -1)]
    within = ((min(most_f, max(least_f, f)), min(most_b, max(least_b, b))) for f, b in pairs)
    return list(dict.fromkeys(within))


def constant_error_bits(key: str, most: Bits, fewest: int = _FEWEST) -> Bits:
    """Make a setting that keeps an error of ERRORS, or half of it from FINE_BITS on.

    Args:
        key: "forward_bits" or "backward_bits".
        most: Upper limit of the bits, one number or one per link.
        fewest: Lower limit of forward bits.
    """
    least = fewest if key == "forward_bits" else DEFAULT_MIN
    errors = [(ERRORS[key] / 2 if bits >= FINE_BITS[key] else ERRORS[key], bits) for bits in each_link(most)]
    return per_link(ConstantError(error=error, min=least).at_most(bits) for error, bits in errors)


def choose(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds | None = None, fewest: int = _FEWEST
) -> PlanChoice:
    """Choose the bits of a configuration whose method quantizes.

    If the disk of the message store is the limit, gradients are not sent as deltas, which halves the stored bytes.
    `fewest` is as for `choose_bits`.
    """
    a = config.activations
    predictions: dict[tuple[Bits, Bits], StepPrediction] = {}

    def predicted(f: Bits, b: Bits) -> Estimate:
        if (f, b) not in predictions:
            predictions[f, b] = predict(job, with_bits(config, f, b), network, speeds)
        return predictions[f, b].estimate

    f, b, fits = choose_bits(predicted, network, a.forward_bits, a.backward_bits, fewest)
    plain = predict(job, Config(gradients=config.gradients, in_flight=config.in_flight), network, speeds)
    best = predictions[f, b]
    choice = PlanChoice(forward_bits=f, backward_bits=b, prediction=best, plain=plain, fits=fits, fewest=fewest)
    if a.backward_method == "direct" or best.store_s < best.step_s:
        return choice
    other = choose(job, config.replace(activations=a.replace(backward_method="direct")), network, speeds, fewest)
    return other if pays(best, other.prediction) else choice


def choose_with_tied(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds, fewest: int = _FEWEST
) -> PlanChoice:
    """Choose bits as `choose` does, and TIED for the gradients of tied weights if these take much of a step."""
    choice = choose(job, config, network, speeds, fewest)
    if choice.taken.tied_s <= MAX_SHARE * choice.taken.step_s:
        return choice
    other = choose(job, config.replace(gradients=TIED), network, speeds, fewest)
    return other if pays(choice.taken, other.taken) else choice


# -- gradients


def choose_average(
    config: Config, d: int, n: int, network: LinkNetwork, speeds: MachineSpeeds, dtype: torch.dtype = torch.float32
) -> list[tuple[str, float]]:
    """List methods of data parallelism with the seconds of averaging d values over n ranks, the recommended first."""
    options = [
        (m, average_seconds(config.replace(gradients=Gradients(method=m)), d, n, network, speeds, dtype))
        for m in GRADIENT_METHODS
    ]
    plain, best = options[0], min(options, key=lambda option: option[1])
    chosen = best if plain[1] > WORTHWHILE * best[1] else plain
    return [chosen, *(option for option in options if option is not chosen)]


def choose_local_steps(step_s: float, average_s: float) -> int | None:
    """Choose after how many steps replicas average, so that averaging takes at most MAX_SHARE of the time.

    Args:
        step_s: Seconds of a step without averaging.
        average_s: Seconds of averaging.

    Returns:
        The fewest LOCAL_STEPS that suffice, or else the most; None if averaging in every step is cheap enough.
    """
    if average_s <= MAX_SHARE * (step_s + average_s):
        return None
    return next((h for h in LOCAL_STEPS if average_s <= MAX_SHARE * (h * step_s + average_s)), LOCAL_STEPS[-1])


# -- layouts


def layouts(nodes: int, stages: int | None, blocks: int) -> list[tuple[int, int]]:
    """List (stages, replicas) for a number of nodes. ConfigError if there are none."""
    counts: Iterable[int] = range(1, nodes + 1) if stages is None else (stages,)
    require(stages is None or stages <= blocks, "stages", stages, f"at most {blocks}: the model has so many blocks")
    pairs = [(K, nodes // K) for K in counts if nodes % K == 0 and blocks >= K]
    require(pairs, "stages", stages, f"a divisor of {nodes} nodes")
    return pairs


def divisible(pairs: Sequence[tuple[int, int]], batch: int, micro_batch: int | None) -> Sequence[tuple[int, int]]:
    """Keep the layouts whose number of replicas divides the batch; keep all if there are none."""
    return [(K, R) for K, R in pairs if batch % (R * (micro_batch or 1)) == 0] or pairs


def micro_batch_splits(batch: int, replicas: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """List (samples per micro-batch, micro-batches) of a batch, few micro-batches first. ConfigError if none."""
    each, rest = divmod(batch, replicas)
    sizes = [micro_batch] if micro_batch is not None else [b for b in range(each, 0, -1) if each % b == 0]
    splits = [(b, each // b) for b in sizes if rest == 0 and each and each % b == 0]
    require(splits, "batch", batch, f"a multiple of {replicas} replicas × micro-batches of {micro_batch or 1}")
    return splits
