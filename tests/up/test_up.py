"""`pipecomp up`: what it refuses, and two machines, which are two folders here, that come to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.distributed import up_launcher
from pipecomp.distributed.consistency import AllRanks
from pipecomp.distributed.placement import free_port
from pipecomp.distributed.preemption import LOST_STATUS
from pipecomp.errors import ConfigError, DataError, KeysError, LinkTimeoutError
from pipecomp.tls.certificates import generate_key, read_identity
from pipecomp.tls.enrollment import authority_fingerprint
from pipecomp.tls.key_folder import MACHINE, KeyFolder, create_keys, issue_certificate, list_machines
from pipecomp.tls.listener import ALL_INTERFACES, Address
from pipecomp.up import digest, input_paths
from tests.limits import HANG_S, until
from tests.models import save_model
from tests.soak.signal_rounds import RECIPE, ROOT, make_work


def run_of(*, machines: int = 2, procs: int = 1) -> up_launcher.UpRun:
    return up_launcher.UpRun(address=Address("127.0.0.1", 1), machines=machines, procs=procs, command=(__file__,))


def test_what_a_run_is() -> None:
    run = run_of(machines=3, procs=2)
    assert run.world == 6
    assert [run.ranks(machine) for machine in range(3)] == ["0-1", "2-3", "4-5"]
    with pytest.raises(ConfigError, match=r"command: got 'train\.py', allowed: a script file on this machine, or "):
        up_launcher.UpRun(address=run.address, machines=2, procs=1, command=("train.py",))
    with pytest.raises(ConfigError, match="machines: got 0"):
        run_of(machines=0)


def test_a_first_machine_with_ipv6_alone_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"2001:db8::1": "2001:db8::7"}
    monkeypatch.setattr(up_launcher, "address_towards", ways.get)
    asked: list[tuple[str, Address]] = []

    def invite(run: up_launcher.UpRun, keys: str, listen: Address, options: list[str], **_: object) -> None:
        asked.append((str(run.address), listen))

    monkeypatch.setattr(up_launcher, "invite_machines", invite)
    monkeypatch.setattr(up_launcher, "start_ranks", lambda *_, **__: 0)
    for more in ([], ["--listen", "[::]:29400"]):
        assert CliRunner().invoke(app, ["up", *more, "--", __file__]).exit_code == 0
    assert [shown for shown, _ in asked] == ["[2001:db8::7]:29400"] * 2
    assert asked[0][1].is_wildcard
    assert asked[0][1].host == ALL_INTERFACES, "over IPv6, too"
    monkeypatch.setattr(up_launcher, "address_towards", {**ways, "192.0.2.1": "198.51.100.7"}.get)
    assert str(up_launcher.own_address(1)) == "198.51.100.7:1"
    cable = SimpleNamespace(up=True, addresses=("fe80::1", "2001:db8::9", "198.51.100.9"))
    monkeypatch.setattr(up_launcher, "address_towards", lambda host: None)
    monkeypatch.setattr(up_launcher, "list_interfaces", lambda: {"eth0": cable})
    assert str(up_launcher.own_address(1)) == "198.51.100.9:1", "without a default route"


def test_keys_that_do_not_fit(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    create_keys(keys, ranks="0-1")
    with pytest.raises(KeysError, match=r"are for rank 0-1, which does not fit 2 machines of 1 rank\(s\)"):
        up_launcher.start_ranks(run_of(), keys, None, up_launcher.Checks(), say=print)
    create_keys(tmp_path / "third", ranks="2")
    with pytest.raises(KeysError, match="are for rank 2, which does not fit 2 machines of 1"):
        up_launcher.start_ranks(run_of(), str(tmp_path / "third"), None, up_launcher.Checks(), say=print)
    (tmp_path / "keys" / "authority.key").unlink()
    with pytest.raises(KeysError, match="was made by joining another machine"):
        up_launcher.invite_machines(run_of(), keys, Address("127.0.0.1", free_port()), [], minutes=1, say=print)


def test_a_machine_that_does_not_join(tmp_path: Path) -> None:
    said: list[str] = []
    listen = Address("127.0.0.1", free_port())
    with pytest.raises(LinkTimeoutError, match="machine-2 did not join"):
        up_launcher.invite_machines(
            run_of(), str(tmp_path / "keys"), listen, ["--procs", "1"], minutes=0.002, say=said.append
        )
    words = shlex.split(said[-1])
    assert words[:3] == ["pipecomp", "up", "--at"]
    assert words[-4:] == ["--procs", "1", "--", __file__]
    assert [line["machine"] for line in list_machines(tmp_path / "keys")] == ["first"]


def test_a_machine_that_has_joined_before_is_not_invited_and_the_way_out_is_said(tmp_path: Path) -> None:
    keys, said = str(tmp_path / "keys"), []
    issue_certificate(create_keys(keys), generate_key().public_key(), "other", (1,))
    listen = Address("127.0.0.1", free_port())
    up_launcher.invite_machines(run_of(), keys, listen, [], minutes=0.002, say=said.append)
    (line,) = said
    assert "other has joined before, for rank 1. If it lost its keys, run pipecomp keys revoke" in line
    words = shlex.split(line.partition("pipecomp ")[2])
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.raises(LinkTimeoutError, match="machine-2 did not join"):
        up_launcher.invite_machines(run_of(), keys, listen, [], minutes=0.002, say=said.append)


def test_keys_of_another_run_are_not_taken_for_those_that_the_first_machine_gives(tmp_path: Path) -> None:
    keys, said = str(tmp_path / "keys"), []
    ours, others = authority_fingerprint(create_keys(keys)), authority_fingerprint(create_keys(tmp_path / "others"))
    up_launcher.join_run(keys, "127.0.0.1:1", ours, "", say=said.append)
    assert said == [f"keys: this is first of run {read_identity(KeyFolder(keys).certificate(MACHINE)).run}, for rank 0"]
    with pytest.raises(KeysError, match=r"keys has keys of first in run .* or name another one with --keys"):
        up_launcher.join_run(keys, "127.0.0.1:1", others, "", say=said.append)


@pytest.mark.parametrize("listen", ["127.0.0.1:7", "none", None])
def test_what_ranks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str | None) -> None:
    """Two cannot listen at one port; where none shall listen, that is said to each."""
    keys, told = str(tmp_path / "keys"), []
    create_keys(keys, ranks="2-3")
    monkeypatch.setattr(up_launcher.Supervisor, "start", lambda self, spec: told.append(spec.environment))
    assert up_launcher.start_ranks(run_of(procs=2), keys, listen, up_launcher.Checks(), say=print) == 0
    assert [of.get(up_launcher.LISTEN) for of in told] == [listen, listen if listen == "none" else None]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", up_launcher.KEYS, up_launcher.ADDRESS)
    places = (("2", "0"), ("3", "1"))
    assert [tuple(of[name] for name in names) for of in told] == [(*p, "4", "2", keys, "127.0.0.1:1") for p in places]


def start_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, said: list[str]) -> int:
    """The status of two ranks that run a program."""
    create_keys(tmp_path / "keys", ranks="0-1")
    command = lambda *_: [sys.executable, "-c", program]  # noqa: E731
    monkeypatch.setattr(up_launcher, "python_module_command", command)
    run = run_of(machines=1, procs=2)
    return up_launcher.start_ranks(run, str(tmp_path / "keys"), None, up_launcher.Checks(), say=said.append)


STAYS = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(60)"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("import os; raise SystemExit(2 + int(os.environ['RANK']))", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + 15),
        (STAYS, 128 + 9),
    ],
)
def test_the_worst_status_counts_and_who_stays_after_a_failure_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, status: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(up_launcher, "_GRACE_S", 0.1 if program == STAYS else HANG_S)
    assert start_program(monkeypatch, tmp_path, program, said) == status
    assert len(said) == (program == STAYS)


def test_ranks_get_this_processs_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"""import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path({str(ready)!r}).open("a").write("x")
time.sleep({HANG_S})"""

    def end() -> None:
        until(lambda: ready.is_file() and len(ready.read_text()) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    assert start_program(monkeypatch, tmp_path, program, []) == 5
    thread.join()


def test_which_arguments_name_files() -> None:
    words = "--train-file a b --seed 3 --model=m --metrics out.jsonl --eval-file c --no-report --adapter d"
    assert input_paths(words.split()) == ["a", "b", "m", "c", "d"]


def test_a_folder_is_known_by_all_of_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "weights").write_bytes(b"w" * 99)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    (tmp_path / "two" / "inner" / "weights").write_bytes(b"w" * 98 + b"v")
    assert digest(tmp_path / "one") != digest(tmp_path / "two")
    assert digest(tmp_path / "three") == "missing"


# -- two machines


class Machine:
    """A folder, and a command that runs there."""

    def __init__(self, folder: Path, *inside: str) -> None:
        """inside: what starts the command somewhere else, as in a network namespace."""
        folder.mkdir(parents=True)
        self._inside = inside
        self.folder = make_work(folder)
        self.process: subprocess.Popen | None = None

    def start(self, words: list[str]) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (self.folder / "said.txt").open("w") as out:
            self.process = subprocess.Popen(
                [*self._inside, sys.executable, "-m", "pipecomp.cli", *words],
                cwd=self.folder,
                env=env,
                start_new_session=True,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(HANG_S)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    both = Machine(tmp_path / "first"), Machine(tmp_path / "second")
    yield both
    for machine in both:
        if machine.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.process.pid, signal.SIGKILL)  # its ranks end with it
            machine.process.wait()


def up(
    machines: Sequence[Machine],
    *options: str,
    port: int | None = None,
    at: str = "127.0.0.1",
    command: Sequence[str] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Start the first one, paste on each other one what it prints; returns the last such line."""
    first, *others = machines
    recipe = [str(RECIPE), "--deepspeed_config", "ds_config.json", "--model", "model.json", "--tokenizer", "train:300"]
    recipe += ["--train-file", "text.txt", "--block-size", "16", "--max-steps", "3", "--save", "trained", "--no-report"]
    first.start(["up", "--listen", f"{at}:{port or free_port()}", *options, "--", *(command or recipe)])
    deadline = time.monotonic() + HANG_S
    found: list[str] = []
    for number, machine in enumerate(others):
        while len(found) <= number:
            assert time.monotonic() < deadline, first.said()
            assert first.process is not None
            assert first.process.poll() is None, first.said()
            found = [line for line in first.said().splitlines() if line.startswith("pipecomp up --at ")]
            time.sleep(0.05)
        machine.start(["up", *more, *shlex.split(found[number])[2:]])
    return found[-1]


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(HANG_S)
def test_two_machines_come_to_a_trained_model(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    port = free_port()
    pasted = up(machines, port=port)
    assert [first.end(), second.end()] == [0, 0], first.said() + second.said()
    said = first.said()
    steps = ["machine-2 has joined", "connected over tls", "the same files", "under TLS with this run's keys"]
    steps += ["the doctor found no problem", "Predicted seconds", "up: planned", "up: training begins", "step 3/3"]
    places = [said.index(step) for step in steps]
    assert places == sorted(places)
    assert "gloo interface" not in said
    assert (first.folder / "trained" / "config.json").is_file()
    assert "this is machine-2 of run" in second.said()
    for machine in machines:  # a finished model is not overwritten
        shutil.rmtree(machine.folder / "trained", ignore_errors=True)
    # again, with the same two commands: nobody has to join
    words = shlex.split(pasted)[1:]
    command = words[words.index("--") :]
    first.start(["up", "--listen", f"127.0.0.1:{port}", "--no-doctor", "--no-plan", *command])
    words[1:1] = ["--no-doctor", "--no-plan"]
    second.start(words)
    assert [first.end(), second.end()] == [0, 0], first.said() + second.said()
    assert "machine-2 has joined before" in first.said()
    assert "pipecomp up --at" not in first.said()


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(HANG_S)
def test_other_data_on_one_machine_is_named_before_anything_is_trained(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    (second.folder / "text.txt").write_text("something else\n")
    (second.folder / "model.json").unlink()
    up(machines, "--no-doctor", "--no-plan")
    assert [first.end(), second.end()] == [1, 1]
    told = "the machines have different files: model.json is missing on rank 1; text.txt is not the same on all ranks"
    for machine in machines:
        assert told in machine.said()
        assert "Traceback" not in machine.said()
        assert "training begins" not in machine.said()


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(HANG_S)
def test_a_machine_takes_the_files_that_it_lacks(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    save_model(first.folder / "model", first.folder / "text.txt")
    (second.folder / "text.txt").unlink()
    train = ["train", "--model", "model", "--data", "text.txt", "--max-steps", "2", "--batch", "4", "--out", "run"]
    up(machines, "--no-doctor", command=train, more=["--yes"])
    assert [first.end(), second.end()] == [0, 0], first.said() + second.said()
    assert "up: copying model (" in first.said()
    assert digest(first.folder / "model") == digest(second.folder / "model")
    assert digest(first.folder / "text.txt") == digest(second.folder / "text.txt")


def test_files_that_are_missing_are_taken_after_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[up_launcher.Checks] = []
    monkeypatch.setattr(up_launcher, "join_run", lambda *_, **__: None)
    monkeypatch.setattr(up_launcher, "start_ranks", lambda *given, **_: started.append(given[3]) or 0)
    line = ["up", "--at", "127.0.0.1:1", "--fingerprint", "f", "--code", "c"]
    train = ["--", "train", "--model", "gpt2", "--data", "text.txt", "--out", "run"]
    refused = CliRunner().invoke(app, [*line, *train])
    assert refused.exit_code == 1
    assert "--yes: got False" in refused.output
    assert "Missing here: text.txt" in " ".join(refused.output.split())
    assert started == []
    assert CliRunner().invoke(app, [*line, "--yes", *train]).exit_code == 0
    (tmp_path / "text.txt").write_text("a text")
    assert CliRunner().invoke(app, [*line, *train]).exit_code == 0
    assert [checks.take for checks in started] == [True, False]


@pytest.mark.ranks
@pytest.mark.timeout(HANG_S)
def test_train_over_two_machines(machines: tuple[Machine, Machine]) -> None:
    """`pipecomp up -- train …` plans by itself; the first machine has the model."""
    text = machines[0].folder / "text.txt"
    for machine in machines:
        save_model(machine.folder / "model", text)
    train = ["train", "--model", "model", "--data", "text.txt", "--max-steps", "3", "--batch", "4", "--out", "run"]
    up(machines, "--no-doctor", command=train)
    first, second = machines
    assert [first.end(), second.end()] == [0, 0], first.said() + second.said()
    said = first.said()
    places = [said.index(step) for step in ("the same files", "training begins", "Stages (measured", "step 3/3")]
    assert places == sorted(places)
    assert (first.folder / "run" / "model" / "config.json").is_file()
    assert "Traceback" not in second.said()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "text.txt", "--out", "run"], "Missing option '--model'"),
        (["--model", "m", "--data", "text.txt"], "--out: got None, allowed: a folder, the same for all ranks"),
        (["--model", "m", "--data", "none.txt", "--out", "run"], "--data: got 'none.txt', allowed: JSON lines"),
        (["--model", "m", "--data", "text.txt", "--out", "run", "--epochs", "0"], "--epochs: got 0, allowed: a whole"),
    ],
)
def test_options_of_train_are_read_before_machines_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    result = CliRunner().invoke(app, ["up", "--", "train", *words])
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("anyway", [False, True])
def test_a_problem_that_the_doctor_finds_ends_the_start_but_with_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], anyway: bool
) -> None:
    from pipecomp import up

    (script := tmp_path / "train.py").write_text("print('it trains')")
    monkeypatch.setattr(up, "start_processes", lambda **_: None)
    monkeypatch.setattr(up, "examine", lambda *_, **__: True)
    monkeypatch.setattr(up, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    for name, value in (("get_rank", 0), ("get_world_size", 1), ("get_backend", "gloo")):
        monkeypatch.setattr(up.dist, name, lambda value=value: value)
    monkeypatch.setenv("RANK", "0")
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    checks = json.dumps(dataclasses.asdict(up_launcher.Checks(plan=False, anyway=anyway)))
    with contextlib.nullcontext() if anyway else pytest.raises(SystemExit, match="1"):
        up.main([checks, str(script)])
    said, told = capsys.readouterr()
    assert "up: the doctor found a problem" in said
    assert ("it trains" in said) is anyway
    refused = "pipecomp up: rank 0: training not started: the doctor found problems; --anyway starts it\n"
    assert told == ("" if anyway else refused)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), LOST_STATUS),
        (LinkTimeoutError("no heartbeat"), LOST_STATUS),
        (DataError("the machines have different files"), 1),
    ],
)
def test_a_rank_that_is_lost_before_training_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    from pipecomp import up

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(up, "start_processes", fail)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        up.main([json.dumps(dataclasses.asdict(up_launcher.Checks())), "train.py"])
    assert ended.value.code == status
    assert "pipecomp up: rank 0: " in capsys.readouterr().err


def test_the_plan_is_of_the_steps_that_the_script_will_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's configuration says how many samples a step has, and leaves DeepSpeed to find the micro-batches."""
    from pipecomp import up

    wanted: list[Any] = []
    monkeypatch.setattr(up, "run_plan", lambda console, options, pacer_to: wanted.append(options))
    monkeypatch.setattr(up, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(up.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(up.dist, "get_rank", lambda: 0)
    path = ROOT / "recipes" / "llama_lora" / "ds_config.json"
    command = ["train.py", "--model", "model", "--stages", "2", "--deepspeed_config", str(path), "--block-size", "64"]
    up._plan(Console(), command)
    (own := tmp_path / "ds_config.json").write_text('{"gradient_accumulation_steps": 3, "pipecomp": {"tie": false}}')
    up._plan(Console(), ["train.py", "--model", "model", "--deepspeed_config", str(own), "--dropout", "0"])
    own.write_text('{"train_batch_size": 32, "gradient_accumulation_steps": 4, "bf16": {"enabled": "auto"}}')
    up._plan(Console(), ["train.py", "--model", "model", "--deepspeed_config", str(own)])
    assert [(o.batch, o.micro_batch, o.stages, o.tokens, o.dtype, o.tie, o.dropout) for o in wanted] == [
        (32, 1, 2, 64, "bf16", True, None),
        (3, 1, None, None, "fp32", False, 0.0),
        (32, 8, None, None, "fp32", True, None),
    ]
    own.write_text('{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 2}')
    up._plan(Console(file=(said := io.StringIO())), ["train.py", "--model", "model", f"--deepspeed_config={own}"])
    assert "up: no plan: train_batch_size: got 33" in said.getvalue()
    other = ["train.py", "--model", "model", f"--deepspeed_config={path}", "--dropout", "none"]
    up._plan(Console(file=(said := io.StringIO())), other)
    assert "up: no plan: " in said.getvalue(), "a script's own option may mean something else"
