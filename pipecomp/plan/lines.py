"""Lines within machines and between them, and the links of a pipeline whose ranks are laid out over these.

K stages, R replicas. All ranks of a machine share its line to the other machines; each pair within it has the inner
line to itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipecomp.errors import require
from pipecomp.plan.simulation import Channel, LinkNetwork
from pipecomp.rank_layout import LAYOUTS, REPLICAS_ACROSS, STAGES_ACROSS, RankLayout
from pipecomp.utils.serialization import serializable


@serializable
@dataclass(frozen=True, kw_only=True)
class MachineLines:
    """Lines of machines of which one runs several ranks.

    Attributes:
        machines: The machine of each rank, from 0 in the order of the ranks.
        inner: Between two ranks of a machine.
        out: From each machine to the next one.
        back: From the next one back.
        spread: Lowest and highest measured rates between machines, as factors.
    """

    machines: tuple[int, ...]
    inner: Channel
    out: tuple[Channel, ...]
    back: tuple[Channel, ...]
    spread: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def alike(cls, world: int, per_machine: int, line: Channel, inner: Channel) -> MachineLines:
        """Make the lines of machines that all have the same. line: between machines."""
        machines = tuple(rank // per_machine for rank in range(world))
        return cls(machines=machines, inner=inner, out=(line,) * machines[-1], back=(line,) * machines[-1])

    def network(self, ranks: RankLayout) -> LinkNetwork:
        """Return the links between stages, of which the slowest replica's counts, and the channel between replicas.

        Links that leave a machine in the same direction share its line, and so do the averages of different stages.
        """
        pipelines = ranks.pipelines()
        links = [[(ranks_of[k], ranks_of[k + 1]) for ranks_of in pipelines] for k in range(ranks.stages - 1)]
        crossing = [pair for pairs in links for pair in pairs if self._crosses(pair)]
        leaving, entering = (Counter(self.machines[pair[side]] for pair in crossing) for side in (0, 1))

        def channel(source: int, target: int, users: int) -> Channel:
            if not self._crosses((source, target)):
                return self.inner
            line = self._line(self.machines[source], self.machines[target])
            return Channel(bits_per_s=line.bits_per_s / users, latency_s=line.latency_s)

        def both(pairs: Sequence[tuple[int, int]]) -> tuple[Channel, Channel]:
            users = [max(leaving[self.machines[a]], entering[self.machines[b]], 1) for a, b in pairs]
            out = _slowest([channel(a, b, n) for (a, b), n in zip(pairs, users, strict=True)])
            return out, _slowest([channel(b, a, n) for (a, b), n in zip(pairs, users, strict=True)])

        ways = [both(pairs) for pairs in links]
        return LinkNetwork(
            forward=tuple(out for out, _ in ways),
            backward=tuple(back for _, back in ways),
            between=self._between(ranks),
            spread=self.spread,
        )

    def crossing(self, ranks: RankLayout) -> tuple[bool, bool]:
        """Return whether activations cross the line between machines, and whether gradients of replicas do."""
        pipelines, averages = ([{self.machines[r] for r in row} for row in rows] for rows in _rows(ranks))
        return any(len(found) > 1 for found in pipelines), any(len(found) > 1 for found in averages)

    def _between(self, ranks: RankLayout) -> Channel:
        spans = [row for row in ranks.averages() if len({self.machines[r] for r in row}) > 1]
        if not spans:
            return self.inner
        users = max(Counter(self.machines[r] for row in spans for r in row).values())
        pairs = {(self.machines[a], self.machines[b]) for row in spans for a in row for b in row}
        line = _slowest([self._line(a, b) for a, b in pairs if a != b])
        return Channel(bits_per_s=line.bits_per_s / users, latency_s=line.latency_s)

    def _crosses(self, pair: tuple[int, int]) -> bool:
        return self.machines[pair[0]] != self.machines[pair[1]]

    def _line(self, source: int, target: int) -> Channel:
        """Return the channel between two machines; between those that are no neighbours the slowest of all."""
        if target == source + 1:
            return self.out[source]
        if source == target + 1:
            return self.back[target]
        return _slowest([*self.out, *self.back])


def _rows(ranks: RankLayout) -> tuple[list[list[int]], list[list[int]]]:
    return ranks.pipelines(), ranks.averages()


def _slowest(channels: Sequence[Channel]) -> Channel:
    """Return a channel with the lowest rate and the longest latency of several."""
    rate = min((channel.bits_per_s for channel in channels), default=math.inf)
    return Channel(bits_per_s=rate, latency_s=max((channel.latency_s for channel in channels), default=0.0))


def layouts_of(
    wanted: str, pairs: Sequence[tuple[int, int]], lines: MachineLines | None, machines: Sequence[int] = ()
) -> list[RankLayout]:
    """List the layouts to compare for numbers of stages and replicas.

    Args:
        wanted: "auto" or the only layout.
        pairs: Stages and replicas.
        lines: None if every rank has a line of its own, or all are on one machine.
        machines: The machine of each rank, as far as known; by default those of the lines.

    Raises:
        ConfigError: The wanted layout makes no difference for any of them.
    """
    if wanted == REPLICAS_ACROSS:
        world = pairs[0][0] * pairs[0][1]
        machines = machines or (range(world) if lines is None else lines.machines)
        several = [(K, R) for K, R in pairs if K > 1 and R > 1]
        RankLayout(*(several or pairs)[0], REPLICAS_ACROSS).check("layout", machines)
        hint = "All ranks are on one machine, so that nothing crosses a line between machines in any layout."
        require(len(set(machines)) > 1, "layout", wanted, f"{STAGES_ACROSS!r} or no value", hint)
        return [RankLayout(K, R, REPLICAS_ACROSS) for K, R in several]
    names = LAYOUTS if wanted != STAGES_ACROSS and lines is not None else (STAGES_ACROSS,)
    several_machines = lines is not None and bool(lines.out)
    return [
        RankLayout(K, R, name)
        for K, R in pairs
        for name in names
        if name == STAGES_ACROSS or (K > 1 and R > 1 and several_machines)
    ]


def check_per_machine(per_machine: int | None, nodes: int) -> None:
    """Raise ConfigError unless the nodes fill whole machines."""
    allowed = f"a divisor of {nodes} nodes"
    require(per_machine is None or nodes % per_machine == 0, "per-machine", per_machine, allowed)
