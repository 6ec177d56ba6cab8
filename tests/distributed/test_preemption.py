"""Signals that end a run after its step, and launchers that ranks do not outlive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from pipecomp.distributed import launch_env
from pipecomp.distributed.preemption import (
    GO_ON_WITHOUT,
    LAUNCHER_GONE,
    LEAVING,
    LEFT_STATUS,
    NEW_CUT,
    RECUT_STATUS,
    REQUEUE_STATUS,
    Interrupted,
    Interruption,
)
from pipecomp.errors import ConfigError
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def started(body: str, **environment: str) -> subprocess.Popen:
    """A Python process that runs `body`, and has printed "ready" on its standard output."""
    default = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
    process = subprocess.Popen(
        [sys.executable, "-c", default + textwrap.dedent(body)],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


WAITING = """
    import sys, threading, time
    from pipecomp.distributed.preemption import Interruption
    with Interruption() as found:
        print("ready", flush=True)
        while not found.wanted:
            time.sleep(0.01)
        print("noted", found.wanted, flush=True)
        {then}
    print("left", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number: int) -> None:
    process = started(WAITING.format(then="threading.Event().wait()"))
    process.send_signal(number)
    assert process.stdout is not None
    said = {process.stdout.readline() for _ in range(2)}
    name = signal.Signals(number).name
    assert said == {f"pipecomp: rank 0: got {name}: the ranks end after this step, with a checkpoint\n",
                    f"noted {number}\n"}  # fmt: skip
    time.sleep(1.2)  # sooner it is the same one, passed on by a launcher
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + number
    assert output == f"pipecomp: rank 0: {name} again: it ends here\n"


def test_a_signal_that_is_ignored_or_has_a_handler_ends_no_run() -> None:
    handlers = "signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.signal(signal.SIGUSR1, lambda *_: None)"
    process = started(f"import signal\n{handlers}\n{textwrap.dedent(WAITING.format(then='pass'))}")
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.2)
    output, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, "noted 15" in output, "SIGHUP" in output) == (0, True, False)


def test_what_a_launcher_passes_on_is_not_a_second_signal() -> None:
    process = started(WAITING.format(then="time.sleep(2.5)"))
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, output.splitlines()[-1]) == (0, "left")


def test_afterwards_signals_do_what_they_did_before() -> None:
    process = started(
        """
        import threading
        from pipecomp.distributed.preemption import Interruption
        with Interruption():
            pass
        print("ready", flush=True)
        threading.Event().wait()
        """
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGTERM


REPORTING = """
    import os, sys, threading, time
    from pipecomp.distributed import preemption
    preemption.report_signals(lambda reason: print("reported", reason, flush=True) or "rank 0 is lost")
    {first}
    print("ready", flush=True)
    {then}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_ends_a_rank_is_reported_first(number: int) -> None:
    """Also while the main thread is in a library, as in a collective."""
    busy = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    process = started(REPORTING.format(first="", then=busy))
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_S)
    name = signal.Signals(number).name
    assert process.returncode == 128 + number
    assert output.splitlines() == [
        f"pipecomp: rank 0: got {name}: it ends here",
        f"reported it got {name}",
        "pipecomp: rank 0: rank 0 is lost",
    ]


def test_a_handler_that_the_program_sets_later_comes_first() -> None:
    own = "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('own', flush=True), os._exit(3)))"
    process = started(REPORTING.format(first=own, then="threading.Event().wait()"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, output) == (3, "own\n")


def test_a_training_takes_the_signals_over_and_gives_them_back() -> None:
    trains = """
    with preemption.Interruption() as found:
        os.kill(os.getpid(), 15)
        while not found.wanted:
            time.sleep(0.01)
    os.kill(os.getpid(), 15)
    threading.Event().wait()
    """
    output, _ = (process := started(REPORTING.format(first="", then=trains))).communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert output.count("reported it got SIGTERM") == 1


@pytest.mark.parametrize("leaves", ["preemption.begin_exit()", "interrupted()"])
def test_a_signal_in_the_last_moments_leaves_the_exit_status(leaves: str) -> None:
    """Such as torchrun's to the others once the first rank has ended: in the exit functions, and after them."""
    then = f"""
    import atexit, signal

    class EndOfInterpreter:
        def __del__(self, kill=os.kill, pid=os.getpid()):
            kill(pid, 15)

    def interrupted():
        preemption.Interruption().__enter__()
        preemption.begin_exit()

    {leaves}
    atexit.register(lambda: (os.kill(os.getpid(), 15), time.sleep(0.2)))
    last = EndOfInterpreter()
    sys.exit(75)
    """
    output, _ = (process := started(REPORTING.format(first="", then=then))).communicate(timeout=HANG_S)
    assert (process.returncode, output) == (75, "")


def test_a_signal_to_a_forked_child_is_none_to_its_parent() -> None:
    process = started(
        """
        import os, signal, time
        from pipecomp.distributed.preemption import Interruption
        with Interruption() as found:
            child = os.fork()
            if child == 0:
                time.sleep(1000)
            print("ready", flush=True)
            time.sleep(0.5)
            os.kill(child, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            time.sleep(0.5)
            print(status, found.wanted, flush=True)
        """,
        PYTHONWARNINGS="ignore",  # Python 3.12 warns of a fork beside threads
    )
    output, _ = process.communicate(timeout=HANG_S)
    assert output == f"{-signal.SIGTERM} 0\n"


def test_without_a_place_to_save_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interruption(active=False) as found:
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        assert found.agree(None) is None


def test_one_rank_decides_for_all() -> None:
    found = Interruption(active=False)
    assert found.decide([0, 0]) is None
    assert found.decide([0, signal.SIGTERM]) == "SIGTERM on rank 1"
    assert found.decide([LAUNCHER_GONE, signal.SIGTERM]) == "the launcher ended on rank 0"
    assert Interrupted("SIGTERM on rank 1").code == REQUEUE_STATUS == 75


TWO_MACHINES = {launch_env.MACHINES: "a,b", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("wanted", "statuses"),
    [
        ([0, 0, signal.SIGTERM, signal.SIGTERM], [RECUT_STATUS, RECUT_STATUS, LEFT_STATUS, LEFT_STATUS]),
        ([signal.SIGHUP, 0, 0, 0], [LEFT_STATUS, RECUT_STATUS, RECUT_STATUS, RECUT_STATUS]),
        ([0, 0, LAUNCHER_GONE, 0], [RECUT_STATUS] * 4),
        ([0, 0, signal.SIGTERM, signal.SIGINT], [REQUEUE_STATUS] * 4),
        ([signal.SIGTERM, 0, signal.SIGTERM, 0], [REQUEUE_STATUS] * 4),
        ([LAUNCHER_GONE] * 4, [REQUEUE_STATUS] * 4),
        ([0, 0, 0, signal.SIGINT], [REQUEUE_STATUS] * 4),
    ],
)
def test_which_machines_leave_and_which_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: list[int], statuses: list[int]
) -> None:
    """A launcher that starts ranks again does so without a machine that was told to end; Ctrl-C ends the run."""
    file = tmp_path / "leaving.json"
    for name, value in (TWO_MACHINES | {LEAVING: str(file)}).items():
        monkeypatch.setenv(name, value)
    found, reasons = [], set()
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        interruption = Interruption()
        reasons.add(interruption.decide(wanted))
        found.append(interruption._status)
    assert found == statuses
    [reason] = reasons
    left = "a" if wanted[0] else "b"
    if REQUEUE_STATUS in statuses:
        assert "leaves" not in reason
        assert not file.exists()
    else:
        assert reason.endswith(f"; {left} leaves the run, and {GO_ON_WITHOUT}")
        assert json.loads(file.read_text()) == [left]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_recipe_goes_on_when_nobody_reads_its_output(tmp_path: Path, unbuffered: str) -> None:
    process = started(
        f"""
        import argparse, os, sys, time
        from pathlib import Path
        from pipecomp.recipes import run

        def main(args):
            print("ready", flush=True)
            for line in range(20_000):
                print("line", line)
                print("error", line, file=sys.stderr)
            os.write(1, b"from elsewhere")
            Path({str(tmp_path)!r}, "trained").touch()

        run.run(main, argparse.ArgumentParser())
        """,
        PYTHONUNBUFFERED=unbuffered,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    "program",
    [
        *("-m pipecomp.recipes.planned", "-m pipecomp.up"),
        *sorted(str(script.relative_to(ROOT)) for script in (ROOT / "recipes").glob("*/train.py")),
    ],
)
def test_ctrl_c_while_a_rank_imports_leaves_no_traceback(tmp_path: Path, program: str) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(10000)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = started(
        f"import os, sys; os.execv(sys.executable, [sys.executable, *'{program}'.split()])", PYTHONPATH=path
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, output) == (-signal.SIGINT, "")


def test_ctrl_c_before_the_training_of_up_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipecomp import up

    def interrupted(**given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "start_processes", interrupted)
    with pytest.raises(SystemExit) as ended:
        up.main(["{}", "train.py"])
    assert ended.value.code == 130


# -- launchers


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/usr/bin/python3.11 /opt/bin/torchrun train.py", "torchrun"),
        ("python -u -X dev -m torch.distributed.run --nnodes 1 train.py", "torch.distributed.run"),
        ("/venv/bin/python -u -m deepspeed.launcher.launch --world_info=e30= train.py", "deepspeed.launcher.launch"),
        ("slurmstepd: [123.0]", "slurmstepd"),
        ("python train.py torchrun", "train.py"),
        ("bash -c torchrun", "bash"),
        ("python", "python"),
        ("", ""),
    ],
)
def test_what_a_command_line_runs(command: str, name: str) -> None:
    words = ["slurmstepd: [123.0]"] if command.startswith("slurm") else command.split()
    assert launch_env.program(words) == name


class Process:
    """The part of a psutil.Process that is used."""

    def __init__(self, command: str) -> None:
        self._command = command.split()

    def cmdline(self) -> list[str]:
        return self._command


def test_all_up_to_the_last_launcher_are_watched() -> None:
    ancestors = [Process(c) for c in ("bash wrap.sh", "python -m deepspeed.launcher.launch", "python /x/deepspeed",
                                      "bash", "sshd", "systemd")]  # fmt: skip
    assert launch_env.launchers(ancestors) == ancestors[:3]  # type: ignore[arg-type, comparison-overlap]
    assert launch_env.launchers(ancestors[3:]) == []  # type: ignore[arg-type]


WATCHED = """
    import time
    from pipecomp.distributed.launch_env import watch_launcher
    watch_launcher()
    watch_launcher()
    print("ready", flush=True)
    time.sleep({seconds})
    print("done", flush=True)
"""


def test_a_rank_ends_with_the_process_that_is_named() -> None:
    named = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"])
    rank = started(WATCHED.format(seconds=10000), RANK="1", PIPECOMP_LAUNCHER=str(named.pid))
    named.kill()  # and nobody waits for it: a zombie has ended, too
    output, _ = rank.communicate(timeout=HANG_S)
    named.wait()
    assert (rank.returncode, output) == (13, "pipecomp: rank 1: its launcher ended: this rank ends too\n")


@pytest.mark.soak
def test_a_run_that_nobody_launched_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    """As under nohup: with and without RANK, which people set by hand."""
    for environment in ({}, {"RANK": "0"}):
        script = tmp_path / "run.py"
        script.write_text(textwrap.dedent(WATCHED.format(seconds=4)))
        shell = f"nohup {sys.executable} {script} > {tmp_path}/said.txt 2>&1 & echo $!"
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | environment | {"PYTHONPATH": str(ROOT)}
        pid = int(subprocess.run(["sh", "-c", shell], env=env, text=True, stdout=subprocess.PIPE, check=True).stdout)
        deadline = time.monotonic() + HANG_S
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (tmp_path / "said.txt").read_text() == "ready\ndone\n"


def test_a_name_that_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("x", "999999999"):
        monkeypatch.setenv("PIPECOMP_LAUNCHER", text)
        with pytest.raises(ConfigError, match="PIPECOMP_LAUNCHER: got "):
            launch_env._own()


def test_ranks_that_ask_for_a_new_cut_end_with_the_number_of_machines() -> None:
    asking = Interruption()
    asking.ask_for_new_cut(2)
    others = Interruption()
    assert others.decide([0, 0]) is None
    assert others.decide([0, asking.wanted]) == NEW_CUT
    assert others._status == RECUT_STATUS + 2
    stopped = Interruption()
    assert stopped.decide([asking.wanted, signal.SIGTERM]) == "SIGTERM on rank 1", "a signal comes first"
    assert stopped._status == REQUEUE_STATUS
    stopped.ask(signal.SIGTERM, why="test")
    stopped.ask_for_new_cut(1)
    assert stopped.wanted == signal.SIGTERM
