"""`pipecomp up -- train` without a lost machine: the others agree, cut the model anew and go on. Machines that come."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipecomp.distributed.placement import free_port
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


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(3 * HANG_S)
def test_a_machine_that_gets_sigterm_leaves(machines: list[Machine]) -> None:
    """No step is lost. Ctrl-C on one machine then ends the run on all."""
    up(machines, "--machines", "3", "--no-doctor", command=[*COMMAND, "100000"])
    until(lambda: len(steps(machines[0])) >= 20)
    machines[1].process.terminate()
    assert machines[1].end() == 75, machines[1].said()
    assert "this machine leaves the run" in machines[1].said()
    until(lambda: "restart 1: machine-1, machine-3" in machines[0].said())
    left = machines[0], machines[2]
    began = len(steps(left[0]))
    until(lambda: len(steps(left[0])) > began + 5)
    trained = steps(left[0])
    assert trained == list(range(1, len(trained) + 1)), left[0].said()
    left[1].process.send_signal(signal.SIGINT)
    assert [machine.end() for machine in left] == [75, 75], "\n".join(machine.said() for machine in left)


COMMAND = [
    "train",
    "--model",
    "model",
    "--data",
    "text.txt",
    "--batch",
    "4",
    "--out",
    "run",
    "--epochs",
    "999",
    "--second-home",
    "next",
    "--max-steps",
]


def lines(machine: Machine, start: str) -> list[str]:
    return [line for line in machine.said().splitlines() if line.startswith(start)]


def decided(machines: list[Machine], name: str) -> bool | None:
    """Return whether a machine was taken in, None before it is decided."""
    said = "\n".join(machine.said() for machine in machines)
    assert "no prediction" not in said, said
    found = [line for line in said.splitlines() if f"{name} can take part: " in line]
    return "it is taken in" in found[0] if found else None


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(3 * HANG_S)
def test_a_killed_rank_starts_again_and_a_third_machine_joins(machines: list[Machine]) -> None:
    first, second, third = machines
    up([first, second], "--machines", "2", "--no-doctor", command=[*COMMAND, str(STEPS)])
    until(lambda: len(steps(first)) >= 20)
    for process in psutil.Process(second.process.pid).children(recursive=True):
        if process.environ().get("RANK") == "1":
            process.kill()
    until(lambda: "restart 1: machine-1, machine-2" in first.said() and len(steps(first)) >= 25)
    [line] = lines(first, "pipecomp up --join ")
    words = shlex.split(line)[1:]
    third.start(words)
    until(lambda: decided(machines[:2], "machine-3") is not None)
    taken = decided(machines[:2], "machine-3")
    assert "the run goes on; this machine waits until it is taken in" in third.said()
    assert [machine.end() for machine in machines] == [0, 0, 0], "\n".join(machine.said() for machine in machines)
    assert steps(first) == list(range(1, STEPS + 1))
    if taken:
        assert "restart 2: machine-1, machine-2, machine-3" in first.said()
        assert (third.folder / "run" / "plan.json").is_file()
    else:
        assert "restart 2" not in first.said()
        assert "the run has ended" in third.said()
    codes = {words[words.index("--code") + 1] for words in map(shlex.split, lines(first, "pipecomp up --join "))}
    assert len(codes) == 2, "the next machine gets another code"


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(3 * HANG_S)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_machine_that_comes_back_is_a_spare_or_is_taken_in(machines: list[Machine], victim: int) -> None:
    port = free_port()
    pasted = up(machines, "--machines", "3", "--no-doctor", port=port, command=[*COMMAND, str(4 * STEPS)])
    until(lambda: len(steps(machines[0])) >= 20)
    kill(machines[victim])
    left = [machine for machine in machines if machine is not machines[victim]]
    until(lambda: lines(left[0], "restart 1: ") and max(steps(left[0]), default=0) > 25)
    if victim == 0:
        words = shlex.split(pasted)
        options = ["--listen", f"127.0.0.1:{port}", "--machines", "3", "--no-doctor"]
        machines[0].start(["up", *options, *words[words.index("--") :]])
    else:
        machines[victim].start(shlex.split(pasted)[1:])
    until(lambda: decided(left, f"machine-{victim + 1}") is not None)
    assert [machine.end() for machine in machines] == [0, 0, 0], "\n".join(machine.said() for machine in machines)
    assert steps(left[0])[-1] == 4 * STEPS
