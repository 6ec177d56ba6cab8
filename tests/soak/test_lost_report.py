"""The page of lost machines: it says how often machines were lost in its own rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak.lost_report import page

ROW: dict[str, Any] = {
    "scenario": "shrink", "full": False, "run": 0, "seed": 0, "status": 0, "steps": 400, "loss": 4.9, "lost": [],
    "restarts": 0, "taken_in": 0, "compressed": True, "drift": 0, "said": [], "setup": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("times", "first", "back", "carries"),
    [({}, "20", "10", "600"), ({"every": 60.0, "cut": 90.0}, "60", "30", "90")],
)
def test_the_times_are_those_of_the_rows(
    tmp_path: Path, times: dict[str, float], first: str, back: str, carries: str
) -> None:
    rows = [{**ROW, **times}, {**ROW, **times, "scenario": "cut"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(page(tmp_path / "rows.jsonl").split())
    assert f"The first kill or cut comes {first} s after the first step" in text
    assert f"answers again after {back} s" in text
    assert f"a cut line carries again after {carries} s" in text
