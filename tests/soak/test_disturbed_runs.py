"""Two runs of each disturbance, with short outages: see tests/soak/disturbed_runs.py."""

from __future__ import annotations

import json

import pytest

from pipecomp.netlab import kernel, missing
from tests.soak import disturbed_runs

WHY_NOT = missing() or kernel.missing_filters()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.soak,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no labs with filters here: {WHY_NOT}"),
]


def test_no_disturbance_changes_a_loss(tmp_path, capsys):
    words = ["--rounds", "2", "--outage", "8", "--timeout", "15", "--out", str(tmp_path)]
    disturbed_runs.main(words)
    assert "all: 8 of 8" in capsys.readouterr().out
    file = tmp_path / "disturbed_runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(row.get("healed", 0) for row in rows if row["kind"] in ("outage", "address")) >= 4
    before = file.read_bytes()
    disturbed_runs.main(words)
    assert file.read_bytes() == before, "kept runs are not made again"
