"""Ranks that start again after a loss: on a spare machine, on those that are left, on one that answers again."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from pipecomp.distributed import elastic_launcher
from pipecomp.distributed.elastic_launcher import LOCAL, Roster, launch_elastic, silent_hosts
from pipecomp.distributed.launch_env import RESTARTS, restarts
from pipecomp.distributed.preemption import LOST_STATUS, REQUEUE_STATUS
from pipecomp.distributed.supervisor import Ended
from pipecomp.errors import ConfigError
from tests.limits import HANG_S

HERE = ("127.0.0.1", "127.0.0.2", "127.0.0.3")  # each of them is this machine
SPARE = "127.0.0.4"


class TestRoster:
    def test_a_spare_takes_the_place_of_a_lost_machine(self):
        found = Roster.start(["a", "b", "c"], ["d", "e"]).without({"b"})
        assert (found.hosts, found.spares, found.lost) == (("a", "d", "c"), ("e",), ("b",))

    def test_without_a_spare_the_others_keep_their_order(self):
        found = Roster.start(["a", "b", "c"]).without({"a"})
        assert (found.hosts, found.lost, found.places) == (("b", "c"), ("a",), 3)

    def test_a_spare_that_does_not_answer_takes_no_place(self):
        found = Roster.start(["a", "b"], ["c", "d"]).without({"b", "c"})
        assert (found.hosts, found.spares, found.lost) == (("a", "d"), (), ("b", "c"))

    def test_all_lost(self):
        assert Roster.start(["a", "b"]).without({"a", "b"}).hosts == ()

    def test_a_machine_that_returns_takes_an_open_place_or_is_a_spare(self):
        small = Roster.start(["a", "b", "c"]).without({"a", "b"})
        back = small.with_returned({"a", "b"})
        assert (back.hosts, back.spares, back.lost) == (("c", "a", "b"), (), ())
        replaced = Roster.start(["a", "b"], ["c"]).without({"b"}).with_returned({"b"})
        assert (replaced.hosts, replaced.spares, replaced.lost) == (("a", "c"), ("b",), ())

    def test_one_that_did_not_return_stays_lost(self):
        found = Roster.start(["a", "b", "c"]).without({"b", "c"}).with_returned({"c"})
        assert (found.hosts, found.lost) == (("a", "c"), ("b",))

    @pytest.mark.parametrize("spares", [["a"], ["c", "c"]])
    def test_a_spare_that_takes_part_already(self, spares):
        with pytest.raises(ConfigError, match="--spare"):
            Roster.start(["a", "b"], spares)


KILLED, ERROR = 128 + signal.SIGKILL, 1


@pytest.mark.parametrize(
    ("statuses", "stopped", "loss"),
    [
        ((0, KILLED), False, True),
        ((LOST_STATUS, KILLED), False, True),
        ((LOST_STATUS, 255), False, True),
        ((LOST_STATUS, None), False, True),
        ((255, None), False, False),  # of a program on this machine
        ((LOST_STATUS, ERROR), False, False),
        ((KILLED, KILLED), True, False),
        ((0, 2), False, False),
        ((REQUEUE_STATUS, REQUEUE_STATUS), False, False),
        ((0, 0), False, False),
        ((0, None), False, False),
    ],
)
def test_which_ends_are_losses(statuses, stopped, loss):
    assert Ended(next(filter(None, statuses), 0), statuses, stopped, frozenset({1})).is_loss is loss


def program(folder: Path, text: str):
    """A rank that notes its start: number of restarts, rank, number of ranks, and the machine's place."""
    note = (
        "import os, pathlib, signal, sys, time\n"
        f"restarts, rank, world = (int(os.environ[n]) for n in ({RESTARTS!r}, 'RANK', 'WORLD_SIZE'))\n"
        f"pathlib.Path({str(folder)!r}, f'{{restarts}}-{{rank}}-{{world}}').touch()\n"
    )
    return lambda world: (sys.executable, "-c", note + text)


def starts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KILLED_ONCE = "restarts == 0 and rank == 1 and os.kill(os.getpid(), signal.SIGKILL)\n"


def test_a_killed_rank_starts_again_where_it_was(tmp_path, capfd):
    assert launch_elastic(program(tmp_path, KILLED_ONCE), Roster.start(HERE[:2]), 1) == 0
    assert starts(tmp_path) == ["0-0-2", "0-1-2", "1-0-2", "1-1-2"]
    said = capfd.readouterr().err
    assert "SIGKILL" in said
    assert "Restart 1: 2 stages on 127.0.0.1, 127.0.0.2" in said


def test_all_ranks_on_this_machine(tmp_path):
    assert launch_elastic(program(tmp_path, KILLED_ONCE), Roster.start([LOCAL]), 2) == 0
    assert starts(tmp_path) == ["0-0-2", "0-1-2", "1-0-2", "1-1-2"]


@pytest.mark.parametrize(("spares", "world"), [((), 2), ((SPARE,), 3)])
def test_a_machine_that_does_not_answer_is_replaced_or_left_out(tmp_path, capfd, spares, world):
    def silent(hosts):
        return {HERE[1]: "no answer"} if HERE[1] in hosts else {}

    assert launch_elastic(program(tmp_path, KILLED_ONCE), Roster.start(HERE, spares), 1, silent) == 0
    assert starts(tmp_path)[3:] == [f"1-{rank}-{world}" for rank in range(world)]
    said = capfd.readouterr().err
    assert "127.0.0.2 (no answer) is lost" in said
    hosts = [HERE[0], *spares, HERE[2]]
    assert f"{world} stages on {', '.join(hosts)}" in said


def test_two_ranks_per_machine(tmp_path):
    lost = {HERE[0]: "gone"}
    run = Roster.start(HERE[:2])
    assert launch_elastic(program(tmp_path, KILLED_ONCE), run, 2, lambda hosts: lost) == 0
    assert starts(tmp_path) == ["0-0-4", "0-1-4", "0-2-4", "0-3-4", "1-0-2", "1-1-2"]


def test_no_machine_answers(tmp_path, capfd):
    text = KILLED_ONCE + f"rank == 0 and time.sleep({HANG_S})\n"
    lost = dict.fromkeys(HERE, "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic_launcher, "_GRACE_S", 0.2)
        status = launch_elastic(program(tmp_path, text), Roster.start(HERE[:2]), 1, lambda hosts: lost)
    assert status == 128 + signal.SIGKILL
    assert "no machine of the run answers: 127.0.0.1 (gone), 127.0.0.2 (gone)" in capfd.readouterr().err


@pytest.mark.parametrize("status", [1, 2, REQUEUE_STATUS])
def test_an_error_of_the_run_itself_is_no_loss(tmp_path, status):
    text = f"rank == 0 and sys.exit({status})\n"
    assert launch_elastic(program(tmp_path, text), Roster.start(HERE[:2]), 1) == status
    assert starts(tmp_path) == ["0-0-2", "0-1-2"]


def test_a_machine_that_answers_again_gets_its_place_back(tmp_path, monkeypatch, capfd):
    """The ranks are asked to save and to end; then there are as many as at the start."""
    monkeypatch.setattr(elastic_launcher, "_LOOK_S", 0.1)
    asked = []

    def silent(hosts):
        asked.append(tuple(hosts))
        return {HERE[1]: "down"} if len(asked) < 3 else {}

    until_asked = (
        f"def saved(*_): sys.exit(75)\nsignal.signal(signal.SIGTERM, saved)\nrestarts == 1 and time.sleep({HANG_S})\n"
    )
    assert launch_elastic(program(tmp_path, KILLED_ONCE + until_asked), Roster.start(HERE), 1, silent) == 0
    assert starts(tmp_path)[3:] == ["1-0-2", "1-1-2", "2-0-3", "2-1-3", "2-2-3"]
    assert asked[1:] == [(HERE[1],)] * (len(asked) - 1)
    assert "127.0.0.2 answers again. Restart 2: 3 stages" in capfd.readouterr().err


def test_silent_hosts_are_those_that_ssh_does_not_reach(monkeypatch):
    monkeypatch.setattr(elastic_launcher, "try_login", lambda host, line: {"two": "no route"}.get(host))
    monkeypatch.setattr(elastic_launcher, "is_this_machine", lambda host: host == "one")
    assert silent_hosts(["one", "two", "three", "two"]) == {"two": "no route"}
    assert silent_hosts(["one"]) == {}


def test_the_number_of_restarts(monkeypatch):
    monkeypatch.delenv(RESTARTS, raising=False)
    assert restarts() == 0
    monkeypatch.setenv(RESTARTS, "3")
    assert restarts() == 3
