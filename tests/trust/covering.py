"""Covering arrays: few rows in which every pair of values of any two factors occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Assignment = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Assignment], bool]) -> list[Assignment]:
    """Rows, made greedily and always the same, in which every pair of values occurs that any allowed row has.

    allowed: whether values go together; asked about rows that have only some of the factors too.
    """
    missing = {pair for pair in _all_pairs(factors) if allowed(dict(pair))}
    rows: list[Assignment] = []
    used: Counter[tuple] = Counter()
    while missing:
        seed = min(missing, key=lambda pair: _place(factors, pair))
        row = _completed(factors, allowed, dict(seed), missing, used)
        if row is None:  # no row has this pair
            missing.discard(seed)
            continue
        rows.append({name: row[name] for name in factors})
        missing -= pairs_of(rows[-1])
        used.update(pairs_of(rows[-1]))
    return rows


def pairs_of(row: Assignment) -> set[tuple]:
    """The pairs of (factor, value) that occur in a row."""
    return {_pair(a, b) for a, b in itertools.combinations(row.items(), 2)}


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[tuple]:
    return {
        _pair((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }


def _pair(a: tuple, b: tuple) -> tuple:
    return (a, b) if a[0] < b[0] else (b, a)


def _place(factors: Mapping[str, Sequence[Any]], pair: tuple) -> list[tuple[int, int]]:
    """Pairs in the order of factors and of their values, so that a run does not depend on how sets are ordered."""
    names = list(factors)
    return sorted((names.index(name), list(factors[name]).index(value)) for name, value in pair)


def _completed(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Assignment], bool],
    row: Assignment,
    missing: set[tuple],
    used: Counter[tuple],
) -> Assignment | None:
    """The row with a value for every factor: of those that are allowed, one with most missing pairs.

    Among equals the value that was used least beside those that the row has, so that all of them are mixed.
    """
    free = [name for name in factors if name not in row]
    if not free:
        return row
    name = free[0]

    def gain(value: Any) -> tuple[int, int]:
        pairs = [_pair((name, value), item) for item in row.items()]
        return sum(pair in missing for pair in pairs), -sum(used[pair] for pair in pairs)

    for value in sorted(factors[name], key=gain, reverse=True):
        if not allowed({**row, name: value}):
            continue
        found = _completed(factors, allowed, {**row, name: value}, missing, used)
        if found is not None:
            return found
    return None
