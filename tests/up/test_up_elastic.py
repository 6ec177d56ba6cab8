"""`pipecomp up -- train` without a machine that is lost: the others agree, cut the model anew and go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.limits import HANG_S, until
from tests.models import byte_pairs, gpt2, metrics
from tests.up.test_up import Machine, up

STEPS = 400


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    found = [Machine(tmp_path / f"machine-{n}") for n in range(3)]
    for machine in found:
        gpt2(3, vocab_size=300, n_positions=32, n_head=2).save_pretrained(machine.folder / "model")
        lines = (machine.folder / "text.txt").read_text().splitlines(keepends=True)
        byte_pairs(lines).save_model(str(machine.folder / "model"))
    yield found
    for machine in found:
        kill(machine)


def kill(machine: Machine) -> None:
    """Kill the command and its ranks."""
    if machine.process is None or machine.process.poll() is not None:
        return
    for process in [*psutil.Process(machine.process.pid).children(recursive=True), machine.process]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    machine.process.wait()


def steps(machine: Machine) -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # its last line may be half written
        return [line["step"] for line in metrics(machine.folder / "run") if "loss" in line]
    return []


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(3 * HANG_S)
@pytest.mark.parametrize("victim", [0, 1])
def test_two_of_three_machines_go_on(machines: list[Machine], victim: int) -> None:
    """Also without the first one: then the second listens for the third."""
    command = ["train", "--model", "model", "--data", "text.txt", "--batch", "4", "--out", "run", "--epochs", "999"]
    command += ["--max-steps", str(STEPS), "--second-home", "next"]  # all are on this machine
    up(machines, "--machines", "3", "--no-doctor", command=command)
    until(lambda: len(steps(machines[0])) >= 60)
    kill(machines[victim])
    left = [machine for machine in machines if machine is not machines[victim]]
    statuses = [machine.end() for machine in left]
    said = "\n".join(machine.said() for machine in machines)
    assert statuses == [0, 0], said
    trained = steps(left[0])
    assert trained[-1] == STEPS, said
    if victim == 1:
        assert len(trained) < STEPS + 60, "it goes on from a record"
    else:  # the second machine has no metrics of the first start
        assert trained[0] > 1, "it goes on from a record"
    assert "restart 1: " in left[0].said()
    assert (left[0].folder / "run" / "model" / "config.json").is_file()
