"""`pipecomp up -- train` on three machines of a network lab, of which one loses its line for a while."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import psutil
import pytest

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S, until
from tests.models import byte_pairs, gpt2
from tests.up.test_up import Machine, up
from tests.up.test_up_elastic import decided, kill, steps

WHY_NOT = missing()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.soak,
    pytest.mark.timeout(3 * HANG_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no labs here: {WHY_NOT}"),
]
PORT = 29400
COMMAND = ["train", "--model", "model", "--data", "text.txt", "--batch", "4", "--out", "run"]
COMMAND += ["--epochs", "99999", "--max-steps", "100000"]
OPTIONS = ["--machines", "3", "--no-doctor"]


def make_machines(folder: Path, lab: Lab) -> list[Machine]:
    machines = [Machine(folder / f"machine-{n}", "ip", "netns", "exec", f"{lab.name}-n{n}") for n in range(3)]
    for machine in machines:
        gpt2(3, vocab_size=300, n_positions=32, n_head=2).save_pretrained(machine.folder / "model")
        lines = (machine.folder / "text.txt").read_text().splitlines(keepends=True)
        byte_pairs(lines).save_model(str(machine.folder / "model"))
    return machines


@pytest.mark.parametrize(("victim", "starts_again"), [(0, True), (1, False)], ids=["first", "second"])
def test_two_go_on_and_the_cut_one_comes_back(tmp_path: Path, victim: int, starts_again: bool) -> None:
    """starts_again: its command is killed and started again; otherwise only its line comes back."""
    with Lab(nodes=3, bandwidth="50mbit", delay="1ms") as lab:
        machines = make_machines(tmp_path, lab)
        try:
            at = lab.network.address(0)
            pasted = up(machines, *OPTIONS, port=PORT, at=at, command=COMMAND)
            until(lambda: len(steps(machines[0])) >= 20)
            lab.cut(victim)
            cut, left = machines[victim], [machine for machine in machines if machine is not machines[victim]]
            names = ", ".join(f"machine-{n + 1}" for n in range(3) if n != victim)
            until(lambda: all(f"restart 1: {names}" in machine.said() for machine in left))
            began = len(steps(left[0]))
            until(lambda: len(steps(left[0])) > began + 5)
            until(lambda: "a machine or rank was lost; looking for those that are left" in cut.said())
            trained = steps(cut)
            assert cut.process is not None
            assert cut.process.poll() is None
            assert psutil.Process(cut.process.pid).children() == [], "it trains on"
            if starts_again:
                kill(cut)
            lab.join(victim)
            if starts_again:
                words = shlex.split(pasted)
                first = ["up", "--listen", f"{at}:{PORT}", *OPTIONS, *words[words.index("--") :]]
                cut.start(first if victim == 0 else words[1:])
            until(lambda: "the run goes on; this machine waits until it is taken in" in cut.said())
            until(lambda: decided(left, f"machine-{victim + 1}") is not None)
            if decided(left, f"machine-{victim + 1}"):
                until(lambda: all("restart 2: " in machine.said() for machine in machines))
            else:
                assert steps(cut) == trained
                assert "restart" not in cut.said()
            began = max(max(steps(machine), default=0) for machine in machines)
            until(lambda: max(max(steps(machine), default=0) for machine in machines) > began + 5)
            for machine in machines:
                assert "Traceback" not in machine.said()
                assert machine.process is not None
                assert machine.process.poll() is None
            assert left[0].process is not None
            left[0].process.send_signal(signal.SIGINT)
            assert [machine.end() for machine in left] == [75, 75]
            assert cut.end() in (0, 75), cut.said()
            assert "the run has ended" in cut.said() or "stopped" in cut.said()
        finally:
            for machine in machines:
                kill(machine)
