"""Twenty rounds of kill -9 at a random instant of a random rank, then resume: see benchmarks/kill_rounds.py."""

from __future__ import annotations

import pytest

from benchmarks import kill_rounds

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

ROUNDS = 20


def test_no_kill_costs_more_than_a_resume(tmp_path):
    said: list[str] = []
    result = kill_rounds.kill_rounds(ROUNDS, tmp_path, epochs=4, seed=7, say=said.append)
    assert kill_rounds.verdict(result) == []
    assert result["kills"] == ROUNDS
    assert 0 < result["kills_at_the_start"] < ROUNDS
    assert result["runs_with_copies"] > 0
    assert result["samples_compared_after_resume"] > 100
    assert any(row["resumed"][0] for row in result["rounds"] if row["resumed"]), "nothing was ever resumed"
    assert f"| {ROUNDS}, of them" in kill_rounds.page(result, "…")
