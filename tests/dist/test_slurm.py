"""The job for Slurm on two network namespaces, with stand-ins for srun and scontrol: preempted, requeued, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S
from tests.models import metrics, save_model, write_text
from tests.recipes.recipe_runs import LAUNCHER_SET, ROOT

WHY_NOT = missing()
pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

STEPS, EVERY, STOPPED_AFTER = 40, 10, 12
# As the real one: a task on each node, signals handed on, the highest status.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for node in 0 1; do
    SLURM_PROCID=$node SLURM_LOCALID=0 ip netns exec {lab}-n$node "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${{tasks[@]}}" 2>/dev/null' TERM
highest=0
for task in "${{tasks[@]}}"; do
    wait "$task"; status=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
    (( status > highest )) && highest=$status
done
exit $highest
"""
SCONTROL = """#!/bin/sh
case "$1" in
show) printf '198.18.0.1\\n198.18.0.2\\n' ;;
requeue) echo "$2" >>requeued ;;
esac
"""


def job(folder: Path) -> subprocess.Popen[str]:
    """The batch script as Slurm starts it."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_SET}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    env |= {"DS_ACCELERATOR": "cpu", "TMPDIR": str(folder), "SAVE_EVERY": str(EVERY), "OUT": "run"}
    arguments = f"--model model --data text.txt --batch 8 --epochs 99 --max-steps {STEPS} --lr 1e-3"
    return subprocess.Popen(
        ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), *arguments.split()],
        cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    """Return its output; check that no process of it is left."""
    try:
        output, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done in time:\n{output}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"processes were left behind:\n{output}")
    return output


def steps(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [line["step"] for line in metrics(folder / "run") if "loss" in line]
    return []


def test_a_job_is_preempted_and_goes_on(tmp_path: Path) -> None:
    save_model(tmp_path / "model", write_text(tmp_path / "text.txt"))
    with Lab(nodes=2) as lab:
        (tmp_path / "bin").mkdir()
        pipecomp = f'#!/bin/sh\nexec {sys.executable} -m pipecomp.cli "$@"\n'
        for name, text in {"srun": SRUN.format(lab=lab.name), "scontrol": SCONTROL, "pipecomp": pipecomp}.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)

        first = job(tmp_path)
        until = time.monotonic() + HANG_S
        while max(steps(tmp_path), default=0) < STOPPED_AFTER:
            assert first.poll() is None, ended(first)
            assert time.monotonic() < until, "no step in time"
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGTERM)
        said = ended(first)
        assert first.returncode == 75, said
        assert (tmp_path / "requeued").read_text() == "4711\n", said
        assert max(steps(tmp_path)) < STEPS, "it was told to stop before its end"

        again = job(tmp_path)
        said = ended(again)
    assert again.returncode == 0, said
    assert "continues after step" in said
    assert "Stages (measured" not in said, "its plan is that of the first start"
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert (tmp_path / "requeued").read_text() == "4711\n", "a job that is done does not come back"
