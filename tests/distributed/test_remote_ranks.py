"""Ranks on this machine and others: who runs where, the line for ssh, statuses and signals."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipecomp.distributed import ssh_launcher, supervisor
from pipecomp.distributed.placement import free_port
from pipecomp.distributed.ssh_launcher import (
    RankCommand,
    assign_ranks,
    check_hosts,
    is_this_machine,
    launch_ranks,
    rendezvous_address,
    working_directory,
)
from pipecomp.errors import ConfigError
from tests.limits import HANG_S, until
from tests.recipes.recipe_runs import ROOT


def test_ranks_follow_the_order_of_the_hosts(monkeypatch):
    monkeypatch.setattr(ssh_launcher, "is_this_machine", lambda host: host == "198.51.100.1")
    found = assign_ranks(["train"], 4, ["198.51.100.1", "me@198.51.100.2"])
    assert [rank.host for rank in found] == [None, None, "me@198.51.100.2", "me@198.51.100.2"]
    assert [rank.variables["RANK"] for rank in found] == ["0", "1", "2", "3"]
    assert [rank.variables["LOCAL_RANK"] for rank in found] == ["0", "1", "0", "1"]
    assert {rank.variables["MASTER_ADDR"] for rank in found} == {"198.51.100.1"}


def test_where_they_meet_may_be_another_port(monkeypatch):
    """Two runs at a time on one first host, or a firewall that lets others in."""
    hosts = ["198.51.100.1", "198.51.100.2"]
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert {rank.variables["MASTER_PORT"] for rank in assign_ranks(["train"], 2, hosts)} == {"29501"}
    for wrong in ("", "0", "65536", "http"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        with pytest.raises(ConfigError, match=f"MASTER_PORT: got '{wrong}', allowed: a number from 1 to 65535"):
            assign_ranks(["train"], 2, hosts)
    monkeypatch.delenv("MASTER_PORT")
    assert {rank.variables["MASTER_PORT"] for rank in assign_ranks(["train"], 2, hosts)} == {"29500"}


def test_without_hosts_all_ranks_are_here():
    found = assign_ranks(["train"], 3)
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
        assign_ranks(["train"], world, hosts)


def test_a_first_host_whose_name_is_127_0_1_1_here_meets_at_the_address_that_leads_to_the_second(monkeypatch):
    names = {"one": ["127.0.1.1"], "two": ["198.51.100.2"], "198.51.100.2": ["198.51.100.2"]}
    monkeypatch.setattr(ssh_launcher, "_resolve", names.__getitem__)
    monkeypatch.setattr(ssh_launcher, "address_towards", {"two": "198.51.100.1"}.get)
    assert rendezvous_address(["me@one", "me@two"]) == "198.51.100.1"
    assert rendezvous_address(["one"]) == "127.0.1.1"
    assert is_this_machine("me@one")
    assert not is_this_machine("two")
    names["three"] = ["198.51.100.3"]
    with pytest.raises(
        ConfigError, match="--peers: got 'me@one', allowed: an address of this machine that three can reach"
    ):
        rendezvous_address(["me@one", "three"])


def test_a_host_may_be_one_of_ssh_s_configuration(monkeypatch, stand_in):
    stand_in('[ "$*" = "$1 $2 $3 $4 $5 $6 -G me@office.invalid" ] && echo user me && echo hostname 198.51.100.7')
    assert rendezvous_address(["me@office.invalid", "198.51.100.2"]) == "198.51.100.7"
    assert not is_this_machine("me@office.invalid")


def test_an_address_with_an_interface_of_this_machine_is_none_for_others(monkeypatch):
    found = [(0, 0, 0, "", (address, 0)) for address in ("fe80::1%eth0", "2001:db8::7")]
    monkeypatch.setattr(ssh_launcher.socket, "getaddrinfo", lambda *name, **how: found)
    assert rendezvous_address(["host.local"]) == "2001:db8::7"


def test_folders_are_named_as_people_name_them(tmp_path, monkeypatch):
    """The target of /home/me on this machine need not exist on another one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PWD", str(tmp_path / "home"))
    assert working_directory() == str(tmp_path / "home")
    for elsewhere in ("/", str(tmp_path / "gone"), "", "."):
        monkeypatch.setenv("PWD", elsewhere)
        assert working_directory() == str(tmp_path / "disk")


def test_the_line_for_another_machine_survives_its_shell():
    command = (sys.executable, "-c", "import os, sys; print(os.getcwd(), os.environ['PIPECOMP_KEYS'], sys.argv[1:])")
    rank = RankCommand(rank=1, host="two", command=(*command, "a b", "$HOME"), variables={"RANK": "1"})
    own = {"PIPECOMP_LISTEN": "198.51.100.1:1", "PIPECOMP_LAUNCHER": "7"}
    line = rank.shell_line("/", {"PIPECOMP_KEYS": "my keys", "SECRET": "x", **own})
    assert "RANK=1" in shlex.split(line)
    assert "SECRET" not in line
    assert not any(name in line for name in own), "they name this machine's own address, and a process of it"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "/ my keys ['a b', '$HOME']"


@pytest.fixture
def stand_in(tmp_path_factory, monkeypatch):
    """Writes a stand-in for ssh. LINE starts what its last argument says, with none of this machine's variables, and
    leaves it alone when it is ended itself, as sshd does."""
    folder = tmp_path_factory.mktemp("bin")

    def write(script: str) -> None:
        (folder / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "ssh").chmod(0o755)

    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return write


LINE = """for line; do :; done
exec 3<&0
setsid env -i PATH="$PATH" sh -c "$line" <&3 3<&- &
wait $!"""


def test_what_other_machines_are_given_stands_on_no_command_line(monkeypatch, capfd, stand_in):
    stand_in(f'echo "$@"\n{LINE}')
    monkeypatch.setenv("HF_TOKEN", secret := "it's \\ a\nsecret")
    program = "import os; print(ascii(os.environ['HF_TOKEN']), os.environ['RANK'])"
    rank = RankCommand(rank=1, host="two", command=(sys.executable, "-c", program), variables={"RANK": "1"})
    assert launch_ranks([rank]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == f"{secret!a} 1"
    assert "RANK=1" in " ".join(said[:-1])
    assert "secret" not in " ".join(said[:-1])


def test_variables_that_change_numbers_go_along_and_those_of_a_machine_are_named(monkeypatch, capfd, stand_in):
    stand_in(LINE)
    for name, value in {"OMP_NUM_THREADS": "3", "NVIDIA_TF32_OVERRIDE": "0", "PYTHONHASHSEED": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/here")
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy")
    names = ("OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "https_proxy")
    program = f"import os; print([os.environ.get(name) for name in {names}])"
    rank = RankCommand(rank=1, host="two", command=(sys.executable, "-c", program))
    assert launch_ranks([rank]) == 0
    said = capfd.readouterr()
    assert said.out.splitlines()[-1] == "['3', '0', '5', None, None]"
    assert "LD_LIBRARY_PATH, https_proxy" in said.err
    assert "secret" not in said.err
    assert launch_ranks(python("")) == 0
    assert "LD_LIBRARY_PATH" not in capfd.readouterr().err, "all ranks are on this machine"


def test_an_ipv6_address_may_have_brackets():
    found = assign_ranks(["train"], 2, ["[2001:db8::1]", "me@[2001:db8::2]"])
    assert [rank.host for rank in found] == ["2001:db8::1", "me@2001:db8::2"]
    assert {rank.variables["MASTER_ADDR"] for rank in found} == {"2001:db8::1"}


MEETING = {"MASTER_ADDR": "one", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("ssh", "reason", "remedy"),
    [
        ("echo 'ssh: Could not resolve hostname two: Name or service not known' >&2; exit 255", "resolve", "the name"),
        ("echo 'me@two: Permission denied (publickey).' >&2; exit 255", "Permission denied", "ssh-copy-id two"),
        ("echo 'ssh: connect to host two port 22: Connection refused' >&2; exit 255", "refused", "~/.ssh/config"),
        ("echo 'Host key verification failed.' >&2; exit 255", "verification failed", "log in once by hand, ssh two"),
        ("exec sleep 60", "no answer within 0.5 s", "ssh two true"),
        ("exit 3", "exit status 3", "ssh two true"),
        ('echo "sh: 1: cd: can\'t cd to /work" >&2; exit 2', "cd", "the same folder"),
    ],
)
def test_a_machine_that_cannot_be_logged_in_to_is_named(monkeypatch, stand_in, ssh, reason, remedy):
    stand_in(ssh)
    if "sleep" in ssh:
        monkeypatch.setattr(ssh_launcher, "_CHECK_S", 0.5)
    ranks = [RankCommand(rank=1, host="two", command=(sys.executable,), variables=MEETING)]
    with pytest.raises(ConfigError, match="--peers: got 'two'") as caught:
        check_hosts(ranks)
    assert reason in str(caught.value)
    assert remedy in str(caught.value)


def test_machines_that_reach_the_first_one_s_port(stand_in):
    stand_in(LINE)
    port = free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        RankCommand(rank=rank, host=host, command=(sys.executable,), variables=variables)
        for rank, host in enumerate((None, "two", "three"))
    ]
    check_hosts(ranks)
    away = [replace(rank, variables={**variables, "MASTER_ADDR": "127.0.0.2"}) for rank in ranks[:2]]
    check_hosts(away)
    with socket.create_server(("", port)), pytest.raises(ConfigError, match=f"MASTER_PORT: got {port}"):
        check_hosts(ranks)
    nowhere = [replace(rank, variables={**variables, "MASTER_ADDR": "no.such.host.invalid"}) for rank in ranks[:2]]
    with pytest.raises(ConfigError, match="open the port here for two"):
        check_hosts(nowhere)


def python(*programs: str) -> list[RankCommand]:
    return [RankCommand(rank=n, host=None, command=(sys.executable, "-c", text)) for n, text in enumerate(programs)]


def test_the_first_status_that_is_not_0_counts():
    assert launch_ranks(python("", "")) == 0
    assert launch_ranks(python("", "raise SystemExit(3)")) == 3
    assert launch_ranks(python("import os; os.kill(os.getpid(), 15)", "")) == 128 + 15


@pytest.mark.parametrize(("kills", "why"), [(0, "most often"), (1, "out of memory, as the kernel's count")])
def test_a_killed_rank_is_named_with_what_to_do(monkeypatch, capfd, kills, why):
    counts = iter([4, 4 + kills])
    monkeypatch.setattr("pipecomp.utils.cgroups.count_oom_kills", lambda: next(counts))
    assert launch_ranks(python("import os; os.kill(os.getpid(), 9)")) == 128 + 9
    said = capfd.readouterr().err
    assert f"rank 0 on {socket.gethostname()} was killed by SIGKILL (exit status 137)" in said
    assert why in said
    assert "Run the same command again" in said


def test_a_rank_that_stays_when_another_has_failed_is_ended(monkeypatch):
    monkeypatch.setattr(ssh_launcher, "_GRACE_S", 0.5)
    assert launch_ranks(python("raise SystemExit(2)", f"import time; time.sleep({HANG_S})")) == 2


WAIT = f"""import os, pathlib, signal, sys, time
from pipecomp.distributed.launch_env import watch_launcher
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
watch_launcher()
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep({HANG_S})"""


def waiting(number: int, file: Path, host: str | None = None) -> RankCommand:
    """A rank that writes its process's id to a file, and ends with 5 when it gets SIGTERM."""
    variables = {"RANK": str(number), "PYTHONPATH": str(ROOT)}
    return RankCommand(rank=number, host=host, command=(sys.executable, "-c", WAIT, str(file)), variables=variables)


def process_of(file: Path) -> psutil.Process:
    """The process that has written its id to a file."""
    until(lambda: file.is_file() and file.read_text())
    return psutil.Process(int(file.read_text()))


@pytest.mark.parametrize("hosts", [(None, None), (None, "two"), ("one", "two")])
def test_a_signal_reaches_every_rank(tmp_path, stand_in, hosts):
    """Also where this machine has no rank that could tell the others."""
    stand_in(LINE)
    files = [tmp_path / "0", tmp_path / "1"]
    ranks = [waiting(number, files[number], host) for number, host in enumerate(hosts)]
    found: list[psutil.Process] = []

    def end() -> None:
        found.extend(process_of(file) for file in files)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    assert launch_ranks(ranks) == 5
    thread.join()
    assert len(found) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in found)


def test_a_signal_that_comes_during_the_login_is_not_lost(tmp_path, monkeypatch, stand_in):
    """It waits behind the variables, of which the other machine's shell has to take no byte more."""
    begun, may_go = tmp_path / "begun", tmp_path / "may go"
    stand_in(f"touch {begun}\nwhile [ ! -e '{may_go}' ]; do sleep 0.05; done\n{LINE}")
    monkeypatch.setenv("HF_HOME", "a\nb")
    written, write = [], supervisor._write
    monkeypatch.setattr(supervisor, "_write", lambda *given: (write(*given), written.append(given)))

    def end() -> None:
        until(begun.exists)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: len(written) == 2)
        may_go.touch()

    thread = threading.Thread(target=end)
    thread.start()
    assert launch_ranks([waiting(0, tmp_path / "0", "one")]) == 5
    thread.join()


def test_a_rank_on_another_machine_ends_with_the_launcher(tmp_path, stand_in):
    """Else it would train on, and keep the port where the ranks meet."""
    stand_in(LINE)
    start = (
        "import pathlib, sys\nfrom tests.distributed.test_remote_ranks import launch_ranks, waiting\n"
        "launch_ranks([waiting(0, pathlib.Path(sys.argv[1]), 'one')])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", start, str(tmp_path / "0")], cwd=ROOT)
    rank = process_of(tmp_path / "0")
    launcher.kill()
    launcher.wait(HANG_S)
    psutil.wait_procs([rank], HANG_S)
    assert not rank.is_running()


def test_whom_the_others_wait_for_is_told(monkeypatch, capfd, stand_in):
    monkeypatch.setattr(ssh_launcher, "_WARN_S", 0.1)
    monkeypatch.setattr(ssh_launcher, "_GRACE_S", 0.5)
    stand_in("exit 255")
    lost = RankCommand(rank=1, host="two", command=("true",))
    assert launch_ranks([*python(f"import time; time.sleep({HANG_S})"), lost]) == 255
    warning = "pipecomp: rank 1 on two failed with exit status 255 of ssh itself: try `ssh two true`. The remaining"
    assert warning in capfd.readouterr().err


def test_a_program_that_is_not_there():
    with pytest.raises(ConfigError, match="command: got '/no/such/program'"):
        launch_ranks([RankCommand(rank=0, host=None, command=("/no/such/program",))])
