"""Results of `python -m benchmarks demo_speedup` from measured steps, without network namespaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_speedup
from pipecomp.demo.results import compare, epoch_means
from pipecomp.demo.settings import Settings

LOSSES = {"none": [4.0, 3.0, 2.0, 1.0], "aqsgd": [4.0, 3.0, 2.0, 1.5]}
STEP_S = {"none": 10.0, "aqsgd": 1.0}


def demo(folder: Path) -> Path:
    """The folder of a demo with these losses: FP32 needs 4 steps of 10 s, AQ-SGD as many of 1 s."""
    settings = Settings(training=16, epochs=4, out=str(folder))
    results = [
        {
            "method": method, "losses": losses, "train_loss": epoch_means(losses, 1)[-1], "measured_steps": 4,
            "seconds": [STEP_S[method] * (i + 1) for i in range(4)],
        }
        for method, losses in LOSSES.items()
    ]  # fmt: skip
    (folder / "demo.json").write_text(json.dumps(compare(settings, results)))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, slower: float, losses: dict[str, list[float]] = LOSSES) -> None:
    """Compare it with steps that take so many times as long for FP32."""

    def measure(settings: Settings, bandwidth: int, method: str, steps: int) -> dict[str, Any]:
        assert (settings.training, bandwidth, settings.out) == (16, 5_000_000, str(folder))
        step_s = STEP_S[method] * (slower if method == "none" else 1.0)
        return {"losses": losses[method][:steps], "seconds": [step_s * (i + 1) for i in range(steps)]}

    monkeypatch.setattr(demo_speedup, "measure", measure)
    demo_speedup.main([str(folder)])


def test_speedups_that_agree(monkeypatch, tmp_path, capsys):
    run(monkeypatch, demo(tmp_path), 1.05)
    assert "faster: 10.50 times here, 10.00 times in the demo (-4.8 %)" in capsys.readouterr().out


def test_speedups_that_differ(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="differ by more than 10 %"):
        run(monkeypatch, demo(tmp_path), 1.2)
    with pytest.raises(SystemExit, match="differ by more than 10 %"):
        run(monkeypatch, tmp_path, 0.8)


def test_other_losses_are_not_compared(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="not those of the demo"):
        run(monkeypatch, demo(tmp_path), 1.0, {**LOSSES, "none": [4.0, 3.0, 2.0, 1.0000001]})
