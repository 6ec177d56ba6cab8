"""Ranks on this machine and others: who runs where, the line for ssh, statuses and signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipecomp.cluster import remote_ranks
from pipecomp.cluster.remote_ranks import Rank, is_here, meeting_address, ranks_of, run_ranks_of
from pipecomp.errors import ConfigError
from tests.limits import HANG_S


def test_ranks_follow_the_order_of_the_hosts(monkeypatch):
    monkeypatch.setattr(remote_ranks, "is_here", lambda host: host == "198.51.100.1")
    found = ranks_of(["train"], 4, ["198.51.100.1", "me@198.51.100.2"])
    assert [rank.host for rank in found] == [None, None, "me@198.51.100.2", "me@198.51.100.2"]
    assert [rank.variables["RANK"] for rank in found] == ["0", "1", "2", "3"]
    assert [rank.variables["LOCAL_RANK"] for rank in found] == ["0", "1", "0", "1"]
    assert {rank.variables["MASTER_ADDR"] for rank in found} == {"198.51.100.1"}


def test_without_hosts_all_ranks_are_here():
    found = ranks_of(["train"], 3)
    assert [rank.host for rank in found] == [None] * 3
    assert {(r.variables["MASTER_ADDR"], r.variables["LOCAL_WORLD_SIZE"]) for r in found} == {("127.0.0.1", "3")}
    assert len({rank.variables["MASTER_PORT"] for rank in found}) == 1


@pytest.mark.parametrize(
    ("world", "hosts", "message"),
    [
        (3, ["198.51.100.1", "198.51.100.2"], "--stages: got 3, allowed: a multiple of 2"),
        (0, [], "--stages: got 0"),
        (2, ["a", "a"], "each host once"),
        (2, ["a", ""], "host names with commas"),
        (2, ["no.such.host.invalid", "198.51.100.2"], "--peers: got 'no.such.host.invalid'"),
    ],
)
def test_hosts_that_cannot_be(world, hosts, message):
    with pytest.raises(ConfigError, match=message):
        ranks_of(["train"], world, hosts)


def test_a_first_host_whose_name_is_127_0_1_1_here_meets_at_the_address_that_leads_to_the_second(monkeypatch):
    names = {"one": ["127.0.1.1"], "two": ["198.51.100.2"], "198.51.100.2": ["198.51.100.2"]}
    monkeypatch.setattr(remote_ranks, "_addresses", names.__getitem__)
    monkeypatch.setattr(remote_ranks, "address_towards", {"two": "198.51.100.1"}.get)
    assert meeting_address(["me@one", "me@two"]) == "198.51.100.1"
    assert meeting_address(["one"]) == "127.0.1.1"
    assert is_here("me@one")
    assert not is_here("two")


def test_the_line_for_another_machine_survives_its_shell():
    command = (sys.executable, "-c", "import os, sys; print(os.getcwd(), os.environ['PIPECOMP_KEYS'], sys.argv[1:])")
    rank = Rank(number=1, host="two", command=(*command, "a b", "$HOME"), variables={"RANK": "1"})
    line = rank.line("/", {"PIPECOMP_KEYS": "my keys", "PIPECOMP_LISTEN": "198.51.100.1:1", "SECRET": "x"})
    assert "RANK=1" in shlex.split(line)
    assert "SECRET" not in line
    assert "PIPECOMP_LISTEN" not in line, "it names this machine's own address"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "/ my keys ['a b', '$HOME']"


def test_what_other_machines_are_given_stands_on_no_command_line(tmp_path, monkeypatch, capfd):
    """With a stand-in for ssh that shows its arguments, and starts the line with none of this machine's variables."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@"\nexec env -i PATH="$PATH" sh -c "$4"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HF_TOKEN", secret := "it's \\ a\nsecret")
    program = "import os, sys; print(ascii(os.environ['HF_TOKEN']), os.environ['RANK'], sys.stdin.read() == '')"
    rank = Rank(number=1, host="two", command=(sys.executable, "-c", program), variables={"RANK": "1"})
    assert run_ranks_of([rank]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == f"{secret!a} 1 True"
    assert "RANK=1" in " ".join(said[:-1])
    assert "secret" not in " ".join(said[:-1])


def python(*programs: str) -> list[Rank]:
    return [Rank(number=n, host=None, command=(sys.executable, "-c", text)) for n, text in enumerate(programs)]


def test_the_first_status_that_is_not_0_counts():
    assert run_ranks_of(python("", "")) == 0
    assert run_ranks_of(python("", "raise SystemExit(3)")) == 3
    assert run_ranks_of(python("import os; os.kill(os.getpid(), 15)", "")) == 128 + 15


def test_a_rank_that_stays_when_another_has_failed_is_ended(monkeypatch):
    monkeypatch.setattr(remote_ranks, "_GRACE_S", 0.5)
    assert run_ranks_of(python("raise SystemExit(2)", f"import time; time.sleep({HANG_S})")) == 2


def test_a_signal_reaches_every_rank(tmp_path):
    wait = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        f"pathlib.Path({str(tmp_path)!r}, '{{}}').touch()\n"
        f"time.sleep({HANG_S})"
    )

    def end() -> None:
        until = time.monotonic() + HANG_S
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    assert run_ranks_of(python(wait.format("a"), wait.format("b"))) == 5
    thread.join()


def test_a_program_that_is_not_there():
    with pytest.raises(ConfigError, match="--dry-run says what to run"):
        run_ranks_of([Rank(number=0, host=None, command=("/no/such/program",))])
