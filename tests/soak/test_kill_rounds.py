"""Twenty rounds of kill -9 at a random instant of a random rank, then resume: see tests/soak/kill_rounds.py."""

from __future__ import annotations

import pytest

from tests.soak import kill_report, kill_rounds

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

ROUNDS = 20
SEED_IN_DOUBT = 0  # its kills leave samples in doubt
TIMEOUT_S = 12.0  # so that a rank that is killed before it has connections is missed soon


def test_no_kill_costs_more_than_a_resume(tmp_path):
    result = kill_rounds.kill_rounds(ROUNDS, tmp_path, tmp_path / "kept.jsonl", seed=7, timeout_s=TIMEOUT_S)
    assert kill_report.verdict(result) == []
    assert result["kills"] == ROUNDS
    assert sum(result["phases"].values()) == ROUNDS
    assert result["phases"]["training"] > 0
    assert result["copies"] > 0
    assert result["compared"] > 100
    assert result["left_different"] >= kill_report.IN_DOUBT
    assert result["dropped"] > 0
    assert result["resumes"] > 0
    assert f"| kills −9 | {ROUNDS} |" in kill_report.page(result, "…")
    again = kill_rounds.kill_rounds(ROUNDS, tmp_path, tmp_path / "kept.jsonl", seed=7, timeout_s=TIMEOUT_S)
    assert again == result, "kept runs are not made again"


def test_no_kill_with_scales_of_channels_costs_more_than_a_resume(tmp_path):
    result = kill_rounds.kill_rounds(
        6, tmp_path, tmp_path / "kept.jsonl", series=kill_rounds.CHANNELS, seed=5, timeout_s=TIMEOUT_S
    )
    assert kill_report.verdict(result) == []
    assert result["kills"] == 6
    assert result["compared"] > 0


def test_no_kill_in_an_outer_step_costs_more_than_a_resume(tmp_path):
    result = kill_rounds.kill_rounds(
        6, tmp_path, tmp_path / "kept.jsonl", series=kill_rounds.LOCAL, seed=3, timeout_s=TIMEOUT_S
    )
    assert kill_report.verdict(result) == []
    assert result["phases"]["outer"] == 6
    assert result["copies"] == result["same"] == result["runs"]
    assert "| · in an outer step, from sending to taking the mean | 6 |" in kill_report.page(result, "…")


def test_rounds_notice_ends_that_keep_what_they_do_not_have_in_common(tmp_path):
    """Without the agreement at resume: ends differ after it, or a run fails without a kill."""
    problems = []
    try:
        result = kill_rounds.kill_rounds(
            4, tmp_path, tmp_path / "kept.jsonl", seed=SEED_IN_DOUBT, timeout_s=TIMEOUT_S, agreement=False
        )
        problems = kill_report.verdict(result)
    except RuntimeError as error:
        problems = [str(error)]
    assert any("different after a resume" in p or "BaseMismatchError" in p for p in problems), problems
