"""Which settings to take: bits that hide behind compute, stages and micro-batches, the gradients' method.

A choice is made among predictions only; of settings that take about equally long the gentlest wins: more bits, no
compression, fewer micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipecomp.config import Config
from pipecomp.errors import ConfigError
from pipecomp.gradient_config import Gradients
from pipecomp.plan.messages import with_bits
from pipecomp.plan.network import Network
from pipecomp.plan.prediction import Job, Prediction, Speeds, average_seconds, predict

PAIRS = ((8, 8), (7, 8), (6, 8), (5, 8), (4, 8), (3, 6), (2, 4))
"""Forward and backward bits, the gentlest first; the last three are the paper's. Fewer are for people to choose."""
ALMOST = 1.02  # a step that takes at most so much longer takes as long
PAYS = 1.05  # compression must make a step so much faster
_AVERAGES = ("none", "fp16", "global_qsgd", "double_squeeze")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """forward_bits, backward_bits: chosen. prediction: with them. plain: without compression. fits: whether fewer bits
    would not make a step faster.
    """

    forward_bits: int
    backward_bits: int
    prediction: Prediction
    plain: Prediction
    fits: bool

    @property
    def pays(self) -> bool:
        """Whether a step is faster than without compression, by enough to matter."""
        return self.plain.step_s > PAYS * self.prediction.step_s


def choose_bits(
    predicted: Callable[[int, int], float], forward: int | str = "auto", backward: int | str = "auto"
) -> tuple[int, int, bool]:
    """The most bits whose step takes hardly longer than with the fewest, and whether those hide behind compute.

    predicted(forward, backward): seconds of a step. forward, backward: a number where it is settled. The third value
    is False if the link is the limit even with the fewest bits: more than 2 bits forward then would be slower.
    """
    pairs = _pairs(forward, backward)
    least = predicted(*pairs[-1])
    for f, b in pairs:
        if predicted(f, b) <= ALMOST * least:
            return f, b, pairs[-1] != (f, b)
    raise AssertionError("the last pair is as fast as itself")


def _pairs(forward: int | str, backward: int | str) -> list[tuple[int, int]]:
    """What there is to choose from, the gentlest first."""
    if isinstance(forward, int) and isinstance(backward, int):
        return [(forward, backward)]
    if isinstance(forward, int):
        return [(forward, b) for b in (8, 7, 6, 5, 4)]
    if isinstance(backward, int):
        return [(f, backward) for f in (8, 7, 6, 5, 4, 3, 2)]
    return list(PAIRS)


def choose(job: Job, config: Config, network: Network, speeds: Speeds | None = None) -> Choice:
    """The bits for a configuration whose method quantizes, "auto" or not."""
    a = config.activations
    seen: dict[tuple[int, int], Prediction] = {}

    def predicted(f: int, b: int) -> float:
        if (f, b) not in seen:
            seen[f, b] = predict(job, with_bits(config, f, b), network, speeds)
        return seen[f, b].step_s

    f, b, fits = choose_bits(predicted, a.forward_bits, a.backward_bits)
    plain = predict(job, Config(gradients=config.gradients, in_flight=config.in_flight), network, speeds)
    return Choice(forward_bits=f, backward_bits=b, prediction=seen[f, b], plain=plain, fits=fits)


def bits_for_links(job: Job, config: Config, network: Network, speeds: Speeds | None = None) -> list[tuple[int, int]]:
    """For each link the bits that it could have if it were the only slow one. A configuration has one pair for all."""
    found = []
    for k in range(len(network.forward)):
        fast = replace(network.forward[k], bits_per_s=float("inf"), latency_s=0.0)
        alone = Network(
            forward=tuple(line if i == k else fast for i, line in enumerate(network.forward)),
            backward=tuple(line if i == k else fast for i, line in enumerate(network.backward)),
            shared=network.shared,
        )
        chosen = choose(job, config, alone, speeds)
        found.append((chosen.forward_bits, chosen.backward_bits))
    return found


def choose_average(config: Config, d: int, n: int, network: Network, speeds: Speeds) -> list[tuple[str, float]]:
    """Methods for data parallelism with the seconds of averaging d values over n ranks; the recommended one first."""
    options = [(m, average_seconds(_averaging(config, m), d, n, network, speeds)) for m in _AVERAGES]
    plain = options[0]
    best = min(options, key=lambda option: option[1])
    chosen = best if plain[1] > PAYS * best[1] else plain
    return [chosen, *[option for option in options if option is not chosen]]


def _averaging(config: Config, method: str) -> Config:
    return replace(config, gradients=Gradients(method=method))


def layouts(nodes: int, stages: int | None, blocks: int) -> list[tuple[int, int]]:
    """(stages, replicas) for so many nodes. ConfigError if there are none."""
    wanted: Iterable[int] = range(1, nodes + 1) if stages is None else (stages,)
    found = [(K, nodes // K) for K in wanted if nodes % K == 0 and blocks >= K]
    if not found:
        raise ConfigError("stages", stages, f"a divisor of {nodes} nodes, at most the model's {blocks} blocks")
    return found


def shares(batch: int, replicas: int, micro_batch: int | None) -> list[tuple[int, int]]:
    """(samples of a micro-batch, micro-batches) that make up a batch, few micro-batches first. ConfigError if none."""
    each, rest = divmod(batch, replicas)
    sizes = [micro_batch] if micro_batch is not None else [b for b in range(each, 0, -1) if each % b == 0]
    found = [(b, each // b) for b in sizes if rest == 0 and each and each % b == 0]
    if not found:
        raise ConfigError("batch", batch, f"a multiple of {replicas} replicas × micro-batches of {micro_batch or 1}")
    return found


def gentlest(found: Sequence[Any], seconds: Callable[[Any], float]) -> Any:
    """The first that takes hardly longer than the fastest."""
    least = min(map(seconds, found))
    return next(one for one in found if seconds(one) <= ALMOST * least)
