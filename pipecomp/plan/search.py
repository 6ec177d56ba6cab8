"""Which settings to take: bits that hide behind compute, stages and micro-batches, the gradients' method.

A choice is made among predictions only; of settings that take about equally long the gentlest wins: more bits, no
compression, fewer micro-batches. Links that are much faster than the slowest one get bits of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipecomp.activation_config import Bits, bits_of_link
from pipecomp.config import Config
from pipecomp.errors import require
from pipecomp.gradient_config import Gradients
from pipecomp.plan.messages import with_bits
from pipecomp.plan.network import Network
from pipecomp.plan.prediction import Job, Prediction, Speeds, average_seconds, predict

PAIRS = ((8, 8), (7, 8), (6, 8), (5, 8), (4, 8), (3, 6), (2, 4))
"""Forward and backward bits, the gentlest first; the last three are the paper's. Fewer are for people to choose."""
ALMOST = 1.02  # a step that takes at most so much longer takes as long
FREE = 1.001  # so much longer it may be for more bits on a fast link
FASTER = 2.0  # a link is fast that has so many times the slowest one's rate
PAYS = 1.05  # compression must make a step so much faster
SHARE = 0.05  # of a run's time that averaging replicas may take before local steps are proposed
LOCAL_STEPS = (2, 4, 8, 16, 32)
_AVERAGES = ("none", "fp16", "global_qsgd", "double_squeeze")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Bits that are chosen. forward_bits, backward_bits: one number or one for each link.

    prediction: with them. plain: without compression. fits: whether fewer bits would not make a step faster.
    """

    forward_bits: Bits
    backward_bits: Bits
    prediction: Prediction
    plain: Prediction
    fits: bool

    @property
    def pays(self) -> bool:
        """Whether a step is faster than without compression, by enough to matter."""
        return self.plain.step_s > PAYS * self.prediction.step_s


def choose_bits(
    predicted: Callable[[Bits, Bits], float], network: Network, forward: Bits = "auto", backward: Bits = "auto"
) -> tuple[Bits, Bits, bool]:
    """Choose the most bits whose step takes hardly longer than with the fewest, and tell if those hide behind compute.

    The same bits on all links first; then fast ones get as many as cost nothing. predicted(forward, backward): seconds
    of a step. forward, backward: anything but "auto" is settled. The third value is False if the slowest link is the
    limit even with the fewest bits: more than 2 bits forward there would be slower.
    """
    links = max(1, len(network.forward))
    options = [_pairs(bits_of_link(forward, k), bits_of_link(backward, k)) for k in range(links)]

    def bits(places: Sequence[int]) -> tuple[Bits, Bits]:
        chosen = [options[k][place] for k, place in enumerate(places)]
        return _one_for_all([f for f, _ in chosen]), _one_for_all([b for _, b in chosen])

    last = len(options[0]) - 1
    least = predicted(*bits([last] * links))
    common = next(p for p in range(last + 1) if predicted(*bits([p] * links)) <= ALMOST * least)
    places = [common] * links
    limit = FREE * predicted(*bits(places))
    for k in _fast(network):
        tried = ([*places[:k], p, *places[k + 1 :]] for p in range(common + 1))
        places = next(found for found in tried if predicted(*bits(found)) <= limit)
    return *bits(places), common != last


def _fast(network: Network) -> list[int]:
    """Links that have much more than the slowest line's rate, both ways."""
    both = zip(network.forward, network.backward, strict=True)
    return [k for k, (out, back) in enumerate(both) if min(out.bits_per_s, back.bits_per_s) >= FASTER * network.slowest]


def _one_for_all(bits: list[int]) -> Bits:
    return bits[0] if len(set(bits)) == 1 else tuple(bits)


def _pairs(forward: object, backward: object) -> list[tuple[int, int]]:
    """List what a link can have, the gentlest first."""
    if isinstance(forward, int) and isinstance(backward, int):
        return [(forward, backward)]
    if isinstance(forward, int):
        return [(forward, b) for b in (8, 7, 6, 5, 4)]
    if isinstance(backward, int):
        return [(f, backward) for f in (8, 7, 6, 5, 4, 3, 2)]
    return list(PAIRS)


def choose(job: Job, config: Config, network: Network, speeds: Speeds | None = None) -> Choice:
    """Choose the bits for a configuration whose method quantizes, "auto" or not."""
    a = config.activations
    seen: dict[tuple[Bits, Bits], Prediction] = {}

    def predicted(f: Bits, b: Bits) -> float:
        if (f, b) not in seen:
            seen[f, b] = predict(job, with_bits(config, f, b), network, speeds)
        return seen[f, b].step_s

    f, b, fits = choose_bits(predicted, network, a.forward_bits, a.backward_bits)
    plain = predict(job, Config(gradients=config.gradients, in_flight=config.in_flight), network, speeds)
    return Choice(forward_bits=f, backward_bits=b, prediction=seen[f, b], plain=plain, fits=fits)


def choose_average(config: Config, d: int, n: int, network: Network, speeds: Speeds) -> list[tuple[str, float]]:
    """Methods for data parallelism with the seconds of averaging d values over n ranks; the recommended one first."""
    options = [
        (m, average_seconds(replace(config, gradients=Gradients(method=m)), d, n, network, speeds)) for m in _AVERAGES
    ]
    plain = options[0]
    best = min(options, key=lambda option: option[1])
    chosen = best if plain[1] > PAYS * best[1] else plain
    return [chosen, *[option for option in options if option is not chosen]]


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
    found = [(K, nodes // K) for K in wanted if nodes % K == 0 and blocks >= K]
    require(found, "stages", stages, f"a divisor of {nodes} nodes, at most the model's {blocks} blocks")
    return found


def shares(batch: int, replicas: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """List (samples of a micro-batch, micro-batches) of a batch, few micro-batches first. ConfigError if none."""
    each, rest = divmod(batch, replicas)
    sizes = [micro_batch] if micro_batch is not None else [b for b in range(each, 0, -1) if each % b == 0]
    found = [(b, each // b) for b in sizes if rest == 0 and each and each % b == 0]
    require(found, "batch", batch, f"a multiple of {replicas} replicas × micro-batches of {micro_batch or 1}")
    return found


def gentlest(found: Sequence[Any], seconds: Callable[[Any], float]) -> Any:
    """Choose the first that takes hardly longer than the fastest."""
    least = min(map(seconds, found))
    return next(one for one in found if seconds(one) <= ALMOST * least)
