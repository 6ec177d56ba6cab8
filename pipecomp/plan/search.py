"""Which settings to take: bits that hide behind compute, stages and micro-batches, the gradients' method.

A choice is made among predictions only; of settings that take about equally long the gentlest wins: more bits, no
compression, fewer micro-batches. Links that are much faster than the slowest one get bits of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, Bits, ConstantError, bits_of_link, each_link, per_link, plain_bits
from pipecomp.errors import require
from pipecomp.gradient_config import Gradients
from pipecomp.plan.packet_sizes import with_bits
from pipecomp.plan.prediction import MachineSpeeds, StepPrediction, TrainingJob, average_seconds, predict, tied_seconds
from pipecomp.plan.simulation import LinkNetwork

PAIRS = ((8, 8), (7, 8), (6, 8), (5, 8), (4, 8), (3, 6), (2, 4))
"""Forward and backward bits, the gentlest first; the last three are the paper's. Fewer are for people to choose."""
ERRORS = {"forward_bits": 0.05, "backward_bits": 0.1}
"""What is kept of values themselves and of changes; benchmarks/constant_error.py trains with these errors."""
FINE = {"forward_bits": 4, "backward_bits": 8}
"""Bits from which on a line keeps half of these errors, as more bytes cost no time there: benchmarks/shootout.py."""
ALMOST = 1.02  # a step that takes at most so much longer takes as long
FREE = 1.001  # so much longer it may be for more bits on a fast link
FASTER = 2.0  # a link is fast that has so many times the slowest one's rate
PAYS = 1.05  # compression must make a step so much faster
SHARE = 0.05  # of a step that gradients of replicas or tied weights may take before something else is proposed
LOCAL_STEPS = (2, 4, 8, 16, 32)
FEWEST_AVERAGES = 24  # of a fine-tuning: with half as many a classifier loses accuracy, and four replicas of GPT-2 loss
AVERAGES = ("none", "fp16", "global_qsgd", "double_squeeze")
TIED = Gradients(method="double_squeeze", bits=8)
"""Of tied weights, where uncompressed ones take much of a step: with these bits no loss is measured (`replicas`)."""


CLUSTERS = 256  # centers that changes build on where no sample comes back: benchmarks/results/one_pass.md
_OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"method": "none"}),
    ("bf16", {"method": "bf16"}),
    ("DirectQ fw4 bw8", {"method": "direct", "forward_bits": 4, "backward_bits": 8}),
)


def aqsgd_sections(forward: Bits, backward: Bits, *, one_pass: bool, changes_back: bool = True) -> dict[str, Any]:
    """Make AQ-SGD's sections, with first visits that keep an error.

    one_pass: whether no sample comes back: then changes build on cluster centers, and gradients are sent themselves.
    changes_back: whether gradients are sent as changes, too.
    """
    activations = {"method": "aqsgd", "forward_bits": plain_bits(forward), "backward_bits": plain_bits(backward)}
    if one_pass:
        return {"activations": activations, "store": {"clusters": CLUSTERS}}
    activations["first_visit"] = _first_visit(forward, "forward_bits")
    if changes_back:
        activations |= {"backward_method": "delta", "backward_first_visit": _first_visit(backward, "backward_bits")}
    return {"activations": activations}


def _first_visit(bits: Bits, key: str) -> dict[str, float]:
    """Let first visits, whose bits have no other limit, keep half the error only where all links hide 8 bits."""
    hidden = all(isinstance(each, ConstantError) and each.max == ConstantError.max for each in each_link(bits))
    return {"error": ERRORS[key] / 2 if hidden else ERRORS[key]}


def methods(stages: int, tie: bool, *, one_pass: bool = False, changes_back: bool = True) -> list[tuple[str, Config]]:
    """List the methods to compare, by name; a single stage has nothing to compress."""
    found = [(name, {"activations": activations}) for name, activations in _OTHERS]
    found += [
        (f"AQ-SGD fw{f} bw{b}", aqsgd_sections(f, b, one_pass=one_pass, changes_back=changes_back))
        for f, b in ((8, 8), (4, 8), (3, 6), (2, 4))
    ]
    return [(name, Config.from_dict({**given, "tie": tie})) for name, given in (found if stages > 1 else found[:1])]


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Bits that are chosen. forward_bits, backward_bits: one number or one for each link.

    prediction: with them. plain: without compression. fits: whether fewer bits would not make a step faster. fewest:
    bits forward that were not gone below.
    """

    forward_bits: Bits
    backward_bits: Bits
    prediction: StepPrediction
    plain: StepPrediction
    fits: bool
    fewest: int = FEWEST["forward_bits"]

    @property
    def pays(self) -> bool:
        """Whether a step is faster than without compression, by enough to matter."""
        return self.plain.step_s > PAYS * self.prediction.step_s

    @property
    def taken(self) -> StepPrediction:
        """The prediction of what is recommended."""
        return self.prediction if self.pays else self.plain


def choose_bits(
    predicted: Callable[[Bits, Bits], float],
    network: LinkNetwork,
    forward: Bits = "auto",
    backward: Bits = "auto",
    fewest: int = FEWEST["forward_bits"],
) -> tuple[Bits, Bits, bool]:
    """Choose the most bits whose step takes hardly longer than with the fewest, and tell if those hide behind compute.

    The same bits on all links first; then fast ones get as many as cost nothing, and lines that are fast one way only
    that way.

    Args:
        predicted: Called as predicted(forward, backward), with numbers; returns seconds of a step.
        network: The links.
        forward: "auto", or an error within a rate, of which the most bits are chosen. Anything else is settled, an
            error counts as its most bits.
        backward: The same, of gradients.
        fewest: Bits forward that "auto" does not go below; else FEWEST, and an error's own `min`.

    Returns:
        Numbers of bits, forward and backward. The third value is False if the slowest link is the limit even with the
        fewest: more bits there would be slower.
    """
    links = max(1, len(network.forward))
    spans = [
        (
            _span(bits_of_link(forward, k), FEWEST["forward_bits"], fewest),
            _span(bits_of_link(backward, k), FEWEST["backward_bits"], FEWEST["backward_bits"]),
        )
        for k in range(links)
    ]
    options = [_ladder(*both) for both in spans]

    def step_s(chosen: Sequence[tuple[int, int]]) -> float:
        return predicted(*_by_way(chosen))

    def common(place: int) -> list[tuple[int, int]]:
        return [ladder[min(place, len(ladder) - 1)] for ladder in options]

    last = max(map(len, options)) - 1
    least = step_s(common(last))
    place = next(p for p in range(last + 1) if step_s(common(p)) <= ALMOST * least)
    chosen = common(place)
    limit = FREE * step_s(chosen)
    for k, ways in _fast(network):
        f, b = chosen[k]
        if ways == (True, True):
            more = options[k][: place + 1]
        elif ways[0]:
            more = [(n, b) for n in range(spans[k][0][0], f, -1)]
        else:
            more = [(f, n) for n in range(spans[k][1][0], b, -1)]
        tried = ([*chosen[:k], pair, *chosen[k + 1 :]] for pair in more)
        chosen = next((found for found in tried if step_s(found) <= limit), chosen)
    return *_by_way(chosen), place != last


def _fast(network: LinkNetwork) -> list[tuple[int, tuple[bool, bool]]]:
    """Links that have much more than the slowest line's rate, and which ways."""
    lines = zip(network.forward, network.backward, strict=True)
    rates = [(out.bits_per_s, back.bits_per_s) for out, back in lines]
    limit = FASTER * network.slowest
    return [(k, (out >= limit, back >= limit)) for k, (out, back) in enumerate(rates) if max(out, back) >= limit]


def _by_way(chosen: Sequence[tuple[int, int]]) -> tuple[Bits, Bits]:
    """Forward bits and backward bits: one number, or one for each link."""
    forward, backward = (per_link(pair[way] for pair in chosen) for way in (0, 1))
    return forward, backward


def _span(bits: int | str | ConstantError, least: int, least_auto: int) -> tuple[int, int]:
    """Say the most and the fewest bits that may be chosen."""
    if isinstance(bits, int):
        return bits, bits
    if not isinstance(bits, ConstantError):
        return 8, least_auto
    return bits.max, bits.max if bits.mbit_per_s is None else max(bits.min, least)


def _ladder(forward: tuple[int, int], backward: tuple[int, int]) -> list[tuple[int, int]]:
    """List what a link can have, the gentlest first. forward, backward: as of `_span`."""
    (most_f, least_f), (most_b, least_b) = forward, backward
    if most_f == least_f:
        return [(most_f, b) for b in range(most_b, least_b - 1, -1)]
    if most_b == least_b:
        return [(f, most_b) for f in range(most_f, least_f - 1, -1)]
    within = ((min(most_f, max(least_f, f)), min(most_b, max(least_b, b))) for f, b in PAIRS)
    return list(dict.fromkeys(within))


def keeping_error(key: str, most: Bits, fewest: int = FEWEST["forward_bits"]) -> Bits:
    """Let packets have as many bits as keep an error, and at most those that were chosen.

    The error is that of ERRORS, or half of it on lines that hide FINE bits.

    Args:
        key: "forward_bits" or "backward_bits".
        most: Chosen bits, one number or one for each link.
        fewest: Bits forward.
    """
    least = fewest if key == "forward_bits" else ConstantError.min
    errors = [(ERRORS[key] / 2 if bits >= FINE[key] else ERRORS[key], bits) for bits in each_link(most)]
    return per_link(ConstantError(error=error, min=least).at_most(bits) for error, bits in errors)


def choose(
    job: TrainingJob,
    config: Config,
    network: LinkNetwork,
    speeds: MachineSpeeds | None = None,
    fewest: int = FEWEST["forward_bits"],
) -> PlanChoice:
    """Choose the bits for a configuration whose method quantizes, "auto" or not. fewest: as of `choose_bits`.

    Where the disk of the message store is the limit, gradients are sent themselves, which halves what it stores.
    """
    a = config.activations
    seen: dict[tuple[Bits, Bits], StepPrediction] = {}

    def predicted(f: Bits, b: Bits) -> float:
        if (f, b) not in seen:
            seen[f, b] = predict(job, with_bits(config, f, b), network, speeds)
        return seen[f, b].step_s

    f, b, fits = choose_bits(predicted, network, a.forward_bits, a.backward_bits, fewest)
    plain = predict(job, Config(gradients=config.gradients, in_flight=config.in_flight), network, speeds)
    found = PlanChoice(forward_bits=f, backward_bits=b, prediction=seen[f, b], plain=plain, fits=fits, fewest=fewest)
    if a.backward_method == "direct" or found.prediction.store_s < found.prediction.step_s:
        return found
    made = replace(config, activations=replace(a, backward_method="direct"))
    other = choose(job, made, network, speeds, fewest)
    return other if found.prediction.step_s > PAYS * other.prediction.step_s else found


def choose_with_tied(
    job: TrainingJob, config: Config, network: LinkNetwork, speeds: MachineSpeeds, fewest: int = FEWEST["forward_bits"]
) -> PlanChoice:
    """Choose bits as `choose` does, and TIED for the gradients of tied weights if these take much of a step."""
    found = choose(job, config, network, speeds, fewest)
    if found.taken.tied_s <= SHARE * found.taken.step_s:
        return found
    other = choose(job, replace(config, gradients=TIED), network, speeds, fewest)
    return other if found.taken.step_s > PAYS * other.taken.step_s else found


def choose_average(
    config: Config, d: int, n: int, network: LinkNetwork, speeds: MachineSpeeds, dtype: torch.dtype = torch.float32
) -> list[tuple[str, float]]:
    """Methods for data parallelism with the seconds of averaging d values over n ranks; the recommended one first."""
    options = [
        (m, average_seconds(replace(config, gradients=Gradients(method=m)), d, n, network, speeds, dtype))
        for m in AVERAGES
    ]
    plain = options[0]
    best = min(options, key=lambda option: option[1])
    chosen = best if plain[1] > PAYS * best[1] else plain
    return [chosen, *[option for option in options if option is not chosen]]


def choose_tied(p: StepPrediction, network: LinkNetwork, speeds: MachineSpeeds) -> list[tuple[str, float]]:
    """Methods for tied weights with the seconds of summing them in a step, the fastest first; none if that is little.

    What a prediction's configuration has is not among them.
    """
    if p.tied_s <= SHARE * p.step_s:
        return []
    methods = [m for m in AVERAGES if m != p.config.gradients.method]
    configs = [replace(p.config, gradients=Gradients(method=m)) for m in methods]
    found = [(m, tied_seconds(p.job, config, network, speeds)) for m, config in zip(methods, configs, strict=True)]
    return sorted(found, key=lambda option: option[1])


def choose_local_steps(step_s: float, average_s: float) -> int | None:
    """Choose after how many steps replicas average, so that it takes at most a twentieth of the time.

    Args:
        step_s: Seconds of a step without averaging.
        average_s: Seconds of averaging.

    Returns:
        One of LOCAL_STEPS, the fewest that are enough or else the most; None where every step may average.
    """
    if average_s <= SHARE * (step_s + average_s):
        return None
    return next((h for h in LOCAL_STEPS if average_s <= SHARE * (h * step_s + average_s)), LOCAL_STEPS[-1])


def layouts(nodes: int, stages: int | None, blocks: int) -> list[tuple[int, int]]:
    """(stages, replicas) for so many nodes. ConfigError if there are none."""
    wanted: Iterable[int] = range(1, nodes + 1) if stages is None else (stages,)
    require(stages is None or stages <= blocks, "stages", stages, f"at most {blocks}: the model has so many blocks")
    found = [(K, nodes // K) for K in wanted if nodes % K == 0 and blocks >= K]
    require(found, "stages", stages, f"a divisor of {nodes} nodes")
    return found


def dividing(found: Sequence[tuple[int, int]], batch: int, micro_batch: int | None) -> Sequence[tuple[int, int]]:
    """Leave those of `layouts` among whose replicas a batch can be divided; all where it cannot among any."""
    return [(K, R) for K, R in found if batch % (R * (micro_batch or 1)) == 0] or found


def shares(batch: int, replicas: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """List (samples of a micro-batch, micro-batches) of a batch, few micro-batches first. ConfigError if none."""
    each, rest = divmod(batch, replicas)
    sizes = [micro_batch] if micro_batch is not None else [b for b in range(each, 0, -1) if each % b == 0]
    found = [(b, each // b) for b in sizes if rest == 0 and each and each % b == 0]
    require(found, "batch", batch, f"a multiple of {replicas} replicas × micro-batches of {micro_batch or 1}")
    return found


def first_near_fastest(found: Sequence[Any], seconds: Callable[[Any], float]) -> Any:
    """Choose the first that takes hardly longer than the fastest."""
    least = min(map(seconds, found))
    return next(one for one in found if seconds(one) <= ALMOST * least)
