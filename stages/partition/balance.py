"""Where to cut: the contiguous partition of the blocks whose most expensive stage is cheapest.

n blocks, K stages. Costs are in multiply-adds per token, or in seconds where the blocks were timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from pipecomp.errors import SplitError

UPDATE_COST = 0.05
"""What a parameter costs that no token is multiplied with (an embedding), in multiply-adds per token.

Each parameter is read and written by the optimizer once a step, whatever the number of tokens: about 30 bytes, against
3 multiply-adds for each token of the step. With 1,000 tokens in a step that ratio is near 0.05; with more it is less.
"""


def balance(
    block_costs: Sequence[float],
    num_stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    slowdowns: Sequence[float] = (),
) -> list[int]:
    """Cuts [0, ..., n] of K stages that minimize the largest stage cost; among those, the sum of squares.

    first, last: what the first stage pays for the embeddings and the last one for the head, on top of their blocks.
    slowdowns: what each stage's costs are multiplied with, one for each; empty for 1.
    Every stage gets one block at least. Raises SplitError if K is not in 1..n. O(K n^2).
    """
    n = len(block_costs)
    if not 1 <= num_stages <= n:
        raise SplitError(f"num_stages: got {num_stages}, allowed: 1 to {n} (the number of blocks)")
    if slowdowns and (len(slowdowns) != num_stages or not all(0 < slowdown < float("inf") for slowdown in slowdowns)):
        raise SplitError(f"slowdowns: got {list(slowdowns)}, allowed: {num_stages} numbers above 0, one for each stage")
    sums = [0.0, *accumulate(block_costs)]

    def cost(stage: int, lo: int, hi: int) -> float:
        whole = sums[hi] - sums[lo] + (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return whole * (slowdowns[stage] if slowdowns else 1.0)

    def best(limit: float, squares: bool) -> tuple[float, list[int]]:
        """Over partitions with no stage above `limit`: the least maximum, or the least sum of squares."""
        table: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for stage in range(num_stages):
            ends = [n] if stage == num_stages - 1 else range(stage + 1, n)
            row: dict[int, tuple[float, list[int]]] = {}
            for hi in ends:
                for lo, (so_far, cuts) in table.items():
                    c = cost(stage, lo, hi)
                    if lo >= hi or c > limit:
                        continue
                    total = so_far + c * c if squares else max(so_far, c)
                    if hi not in row or total < row[hi][0]:
                        row[hi] = (total, [*cuts, hi])
            table = row
        return table[n]

    smallest_maximum, _ = best(float("inf"), squares=False)
    return best(smallest_maximum * (1 + 1e-9), squares=True)[1]


def settle_cuts(
    blocks: int, num_stages: int | None, cuts: Sequence[int] | None, choose: Callable[[int], list[int]]
) -> list[int]:
    """Complete `cuts` with both ends, [0, ..., blocks]; without any, `choose(num_stages)` says. Raises SplitError."""
    if num_stages is not None and (isinstance(num_stages, bool) or not isinstance(num_stages, int)):
        raise SplitError(f"num_stages: got {num_stages!r}, allowed: a whole number from 1 to {blocks}")
    if num_stages is not None and not 1 <= num_stages <= blocks:
        raise SplitError(f"num_stages: got {num_stages}, allowed: 1 to {blocks} (the number of blocks)")
    if cuts is None:
        if num_stages is None:
            raise SplitError("say where to cut: num_stages=K, or cuts=[0, ..., number of blocks]")
        return choose(num_stages)
    bounds = list(cuts)
    if any(isinstance(c, bool) or not isinstance(c, int) for c in bounds):
        raise SplitError(f"cuts: got {cuts!r}, allowed: whole numbers, each the first block of a stage")
    if bounds and bounds[-1] < blocks:
        bounds.append(blocks)
    rising = all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != blocks or not rising:
        raise SplitError(f"cuts: got {list(cuts)}, allowed: rising block numbers from 0 to {blocks}")
    if num_stages is not None and len(bounds) - 1 != num_stages:
        raise SplitError(f"cuts: got {list(cuts)} for {len(bounds) - 1} stages, but num_stages is {num_stages}")
    return bounds
