"""A rank's trace of a long run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomp.engine import reporting, trace
from pipecomp.engine.reporting import Reporting


@pytest.mark.parametrize("steps", [2, 50])
def test_a_trace_has_the_last_events_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    for module in (trace, reporting):
        monkeypatch.setattr(module, "MAX_EVENTS", 10)
    monkeypatch.setattr(reporting, "gathered", lambda events: [events])
    monkeypatch.setattr(reporting, "broadcast", lambda problem: problem)
    context: Any = SimpleNamespace(rank=0)
    others: Any = None
    kept = Reporting(context, others, others, None)
    kept.start_trace()
    for step in range(steps):
        kept.begin_step(step)
        for name in ("forward", "backward", "update"):
            kept.trace.add(name, step, step + 1)
        kept.trace.end_step()
    kept.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [event["args"]["step"] for event in events if event["ph"] == "X"]
    assert found == [step for step in range(steps) for _ in range(3)][-10:]
    assert ("has only the last steps: each rank keeps its last 10 events" in caplog.text) == (steps == 50)
