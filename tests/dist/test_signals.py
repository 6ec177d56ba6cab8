"""A recipe that is asked to stop, and recipes whose launcher is killed; more rounds: tests/soak/signal_rounds.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed.preemption import REQUEUE_STATUS
from tests.limits import HANG_S
from tests.recipes.recipe_runs import launch
from tests.soak import signal_rounds
from tests.soak.signal_rounds import arguments, make_work, one_round, wrong

pytestmark = pytest.mark.ranks
EPOCHS = 3


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_work(tmp_path_factory.mktemp("signals"))
    (folder / "held-out.txt").write_text((folder / "text.txt").read_text()[:2000])
    return folder


def fresh(work: Path, name: str) -> Path:
    (work / name).mkdir()
    return work / name


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in text.splitlines()]


@pytest.mark.soak
def test_sigterm_costs_nothing(work: Path) -> None:
    """The run is stopped after a step, goes on with the same command, and becomes what it would have become."""
    words = [*arguments(work, epochs=EPOCHS), "--eval-file", str(work / "held-out.txt")]
    stopped = fresh(work, "stopped")
    found = one_round("srun", stopped, words, signal.SIGTERM, after=2, delay_s=0.1)
    assert wrong(found, limit_s=HANG_S) == [], found.output
    assert found.status == REQUEUE_STATUS, found.output
    assert found.output.count(f"stopped   after step {found.step}: SIGTERM on rank ") == 1
    assert "Traceback" not in found.output
    assert json.loads(next(stopped.glob("runs/*/run.json")).read_text())["status"] == "interrupted"
    again = launch(stopped, "gpt2_wikitext2", *words)
    assert again.status == 0, again.output
    assert f"continues after step {found.step}" in again.output
    undisturbed = fresh(work, "undisturbed")
    assert launch(undisturbed, "gpt2_wikitext2", *words).status == 0
    assert lines(stopped) == lines(undisturbed)
    assert sum("eval" in line for line in lines(stopped)) == EPOCHS


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_sigterm_to_a_launcher_saves(work: Path, launcher: str) -> None:
    found = one_round(launcher, fresh(work, launcher), arguments(work), signal.SIGTERM, after=1, delay_s=0.2)
    assert wrong(found, limit_s=HANG_S) == [], found.output
    assert found.saved == found.step > 0


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "srun"])
def test_no_rank_outlives_its_launcher(work: Path, launcher: str) -> None:
    found = one_round(
        launcher, fresh(work, f"killed-{launcher}"), arguments(work), signal.SIGKILL, after=1, delay_s=0.2
    )
    assert wrong(found, limit_s=HANG_S) == [], found.output
    assert "launcher ended" in found.output


def test_the_rounds_script_has_a_launcher_for_each(work: Path) -> None:
    for launcher in signal_rounds.LAUNCHERS:
        assert any("train.py" in word for word in signal_rounds.command(launcher, []))
