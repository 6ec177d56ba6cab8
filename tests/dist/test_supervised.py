"""The example of a supervised recipe: a rank is killed, all start again, the run ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.limits import HANG_S
from tests.recipes.recipe_runs import ROOT, launch, run_script
from tests.soak.signal_rounds import RECIPE, make_work

pytestmark = [pytest.mark.ranks, pytest.mark.soak]

STEPS, EVERY, KILLED_AFTER = 14, 3, 7


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tiny model with dropout, and a configuration whose checkpoints have the message stores."""
    return make_work(tmp_path_factory.mktemp("supervised"))


def arguments(text: str) -> list[str]:
    return [
        "--deepspeed_config",
        "../ds_config.json",
        "--model",
        "../model.json",
        "--tokenizer",
        "train:300",
        "--train-file",
        text,
        "--block-size",
        "16",
        "--max-steps",
        str(STEPS),
        "--epochs",
        "5",
        "--seed",
        "3",
        "--metrics",
        "metrics.jsonl",
    ]


def start(work: Path, where: str, *more: str) -> subprocess.Popen:
    command = ["bash", str(ROOT / "examples" / "supervised.sh"), *arguments("../text.txt"), *more]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env |= {"PYTHON": sys.executable, "SAVE_EVERY": str(EVERY), "MAX_RESTARTS": "2"}
    return subprocess.Popen(
        command,
        cwd=work / where,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def lines(work: Path, where: str) -> list[dict]:
    file = work / where / "metrics.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done in time:\n{output}")
    with pytest.raises(ProcessLookupError):  # nothing was left behind
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def ended(work: Path) -> tuple[str, str]:
    """Return the outputs of a run with a killed rank and of one without."""
    for where in ("undisturbed", "killed"):
        (work / where).mkdir()
    killed = start(work, "killed")
    try:
        deadline = time.monotonic() + HANG_S
        while not any(line["step"] >= KILLED_AFTER for line in lines(work, "killed")):
            assert time.monotonic() < deadline, "no step in time"
            assert killed.poll() is None, killed.communicate()[0]
            time.sleep(0.02)
        victims = [
            p
            for p in psutil.Process(killed.pid).children(recursive=True)
            if p.environ().get("RANK") == "1" and any(a.endswith("train.py") for a in p.cmdline())
        ]
        assert len(victims) == 1
        victims[0].kill()
    finally:
        output = finish(killed)
    given = ("--checkpoint", "checkpoints", "--save-every", str(EVERY), "--resume", "auto")
    undisturbed = launch(work / "undisturbed", "gpt2_wikitext2", *given, *arguments("../text.txt"))
    assert undisturbed.status == 0, undisturbed.output
    return output, undisturbed.output


def test_a_killed_rank_costs_a_restart_and_nothing_else(work, ended):
    output, expected = ended
    assert "continues after step" in output
    assert "with the cached activations of that step: losses equal those of an uninterrupted run" in output
    assert "continues after" not in expected
    ours, theirs = (
        [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines(work, where)]
        for where in ("killed", "undisturbed")
    )
    assert [line["step"] for line in theirs] == list(range(1, STEPS + 1))
    assert ours == theirs
    kept = {p.name for p in (work / "killed" / "checkpoints").iterdir()}
    assert kept == {f"checkpoint-{STEPS - STEPS % EVERY}", f"checkpoint-{STEPS}"}


@pytest.mark.usefixtures("ended")
def test_other_data_is_refused_before_anything_is_overwritten(work):
    (work / "other.txt").write_text((work / "text.txt").read_text().replace("as 3 is", "as 4 is"))
    before = (work / "killed" / "metrics.jsonl").read_bytes()
    again = ["--checkpoint", "checkpoints", "--resume", "auto", *arguments("../other.txt")]
    found = run_script(work / "killed", RECIPE, *again)
    assert found.status == 1, found.output
    told = "error: --resume: got 'auto', allowed: the settings of the checkpoint: hash of the training data is "
    assert found.output.count(told) == 1, found.output
    assert "Traceback" not in found.output
    assert (work / "killed" / "metrics.jsonl").read_bytes() == before
