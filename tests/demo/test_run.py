"""The demo around its training: where it computes, what it reads, and what it writes."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from pipecomp.demo import run, task
from pipecomp.demo.settings import Settings
from pipecomp.errors import ConfigError, DataError


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


def test_what_nothing_can_be_written_to_is_refused_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"out: got .*, allowed: an existing folder or one that can be made"):
            run.run_demo(Settings(out=str(out)))


def test_losses_that_are_no_numbers_are_written_as_json_has_them(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "preload_large_packages", lambda: None)
    monkeypatch.setattr(run, "start_fork_server", lambda: None)
    monkeypatch.setattr(run, "documentation_task", lambda **sizes: None)
    losses = {"losses": [3.0, math.nan], "seconds": [1.0, 2.0], "eval_loss": math.nan, "store_bytes": 0}
    monkeypatch.setattr(run, "run_ranks", lambda *given, **options: {0: [{**losses, "method": "none", "stats": {}}]})
    run.run_demo(Settings(methods=("none",), training=16, epochs=2, out=str(tmp_path)))

    def refuse(name: str) -> None:
        raise ValueError(name)

    found = json.loads((tmp_path / "demo.json").read_text(), parse_constant=refuse)
    assert found["results"][0]["losses"] == [3.0, None]
    assert (tmp_path / "losses.png").is_file()

    def full(found: dict[str, Any], path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "plot", full)
    with pytest.raises(ConfigError, match=r"can be written \(No space left on device\)"):
        run.run_demo(Settings(methods=("none",), training=16, epochs=2, out=str(tmp_path)))


def test_too_little_documentation_is_an_error_that_says_so(monkeypatch):
    texts = [("json", "to pre-train on " * 9), *[("http", f"a text of module http, number {i}") for i in range(300)]]
    monkeypatch.setattr(task, "docstrings", lambda: iter(texts))
    found = task.documentation_task(vocabulary=300, length=16, training=20, held_out=10)
    assert (len(found.training), len(found.held_out)) == (20, 10)
    with pytest.raises(DataError, match="needed: 5010"):
        task.documentation_task(vocabulary=300, length=16, training=5000, held_out=10)
