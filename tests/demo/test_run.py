"""What the demo's ranks decide before they train."""

from __future__ import annotations

import os
from typing import Any

from pipecomp.demo import run
from pipecomp.demo.settings import Settings


def test_ranks_compute_on_the_cpu(monkeypatch):
    """By what is set before the engine is imported, which the first run does."""
    seen = []

    class Rank:
        def __init__(self, *given: Any) -> None:
            pass

        def pretrain(self) -> None:
            seen.append(os.environ["DS_ACCELERATOR"])

        def fine_tune(self, method: str) -> dict[str, Any]:
            return {"method": method}

    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(run, "_Rank", Rank)
    settings, task = Settings(methods=("direct",)), None
    assert run.train_rank(0, 2, print, settings, task, [None, None]) == [{"method": "direct"}]  # type: ignore[arg-type]
    assert seen == ["cpu"]
