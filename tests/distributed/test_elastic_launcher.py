"""Ranks that start again after a loss: on a spare machine, on those that are left, on one that answers again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipecomp.distributed import elastic_launcher
from pipecomp.distributed.elastic_launcher import JOIN, LOCAL, Roster, launch_elastic, silent_hosts
from pipecomp.distributed.launch_env import (
    CANDIDATES,
    COMMAND,
    MACHINES,
    RESTARTS,
    STARTS,
    check_progress,
    machine_names,
    note_start,
    read_start,
    restarts,
)
from pipecomp.distributed.preemption import LEFT_STATUS, LOST_STATUS, RECUT_STATUS, REQUEUE_STATUS
from pipecomp.distributed.ssh_launcher import watch_ranks
from pipecomp.distributed.supervisor import Ended, StartCount, final_status
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

    def test_a_machine_that_comes_is_a_spare(self):
        small = Roster.start(["a", "b", "c"]).without({"a", "b"})
        back = small.with_spares(["b", "new", "c"])
        assert (back.hosts, back.spares, back.lost) == (("c",), ("b", "new"), ("a",))

    def test_a_new_cut_takes_spares_beyond_those_of_the_start(self):
        whole = Roster.start(["a", "b"], ["c"]).with_spares(["d", "e"])
        assert whole.candidates() == ("d", "e")
        grown = whole.grown(1)
        assert (grown.hosts, grown.spares) == (("a", "b", "d"), ("c", "e"))
        assert grown.grown(0) == grown

    def test_with_fewer_machines_than_at_the_start_every_spare_is_needed(self):
        small = Roster.start(["a", "b"], ["c"]).without({"a", "c"}).with_spares(["c"])
        assert small.candidates() == ("c",)

    def test_a_machine_that_was_told_to_end_is_back_once_it_was_silent(self):
        small = Roster.start(["a", "b", "c"]).without({"a"}, {"b"})
        assert (small.hosts, small.lost, small.leaving) == (("c",), ("a", "b"), ("b",))
        small, back = small.after_look(small.lost, {})
        assert (back, small.leaving) == (["a"], ("b",))
        small, back = small.after_look(small.lost, {"b": "no answer"})
        assert (back, small.leaving) == (["a"], ())
        assert small.after_look(small.lost, {})[1] == ["a", "b"]

    def test_a_machine_that_was_told_to_end_may_join(self):
        small = Roster.start(["a", "b"]).without((), {"b"}).with_spares(["b"])
        assert (small.spares, small.lost, small.leaving) == (("b",), (), ())

    def test_machines_with_which_the_run_does_not_go_on(self):
        before = Roster.start(["a", "b"])
        after = before.with_spares(["c"]).grown(1).without_newcomers(before)
        assert (after.hosts, after.spares, after.refused) == (("a", "b"), (), ("c",))

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
        ((LEFT_STATUS, LOST_STATUS), False, True),
        ((LEFT_STATUS, 255), False, True),
        ((0, 0), False, False),
        ((0, None), False, False),
    ],
)
def test_which_ends_are_losses(statuses, stopped, loss):
    assert Ended(next(filter(None, statuses), 0), statuses, stopped, frozenset({1})).is_loss is loss


@pytest.mark.parametrize(
    ("statuses", "stopped", "more"),
    [
        ((RECUT_STATUS, RECUT_STATUS), False, 0),
        ((RECUT_STATUS + 2, RECUT_STATUS + 2, None), False, 2),
        ((KILLED, RECUT_STATUS + 1), False, 1),
        ((LEFT_STATUS, RECUT_STATUS), False, 0),
        ((LEFT_STATUS, RECUT_STATUS), True, None),
        ((RECUT_STATUS + 1, ERROR), False, None),
        ((RECUT_STATUS + 1, RECUT_STATUS + 1), True, None),
        ((REQUEUE_STATUS, REQUEUE_STATUS), False, None),
        ((LOST_STATUS, KILLED), False, None),
        ((0, 0), False, None),
    ],
)
def test_which_ends_ask_for_more_machines(statuses, stopped, more):
    ended = Ended(next(filter(None, statuses), 0), statuses, stopped)
    assert ended.more == more
    assert more is None or not ended.is_loss


def test_the_status_of_a_launcher_that_starts_no_ranks_again():
    asking = (LEFT_STATUS, RECUT_STATUS, RECUT_STATUS + 2)
    assert {final_status(status) for status in asking} == {REQUEUE_STATUS}
    assert [final_status(status) for status in (0, 1, REQUEUE_STATUS, KILLED)] == [0, 1, REQUEUE_STATUS, KILLED]


def program(folder: Path, text: str):
    """A rank that notes its start: number of restarts, rank, number of ranks, and the machine's place."""
    note = (
        "import json, os, pathlib, signal, sys, time\n"
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
    assert "no machine of the run is left: 127.0.0.1 (gone), 127.0.0.2 (gone)" in capfd.readouterr().err


@pytest.mark.parametrize("status", [1, 2, REQUEUE_STATUS])
def test_an_error_of_the_run_itself_is_no_loss(tmp_path, status):
    text = f"rank == 0 and sys.exit({status})\n"
    assert launch_elastic(program(tmp_path, text), Roster.start(HERE[:2]), 1) == status
    assert starts(tmp_path) == ["0-0-2", "0-1-2"]


def test_starts_that_fail_before_training_end(folder, capfd):
    """The ranks, which find too little progress, never come to that."""
    run = program(folder / "starts", "rank == 1 and os.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, out=Path("run")) == 128 + signal.SIGKILL
    assert starts(folder / "starts") == [f"{number}-{rank}-2" for number in range(4) for rank in range(2)]
    said = capfd.readouterr().err
    assert said.count("Restart") == 3
    assert "4 starts in a row have reached no newer step: the log says why each ended" in said


def test_starts_that_reach_newer_steps_go_on(folder):
    """Some fail before they find a state to go on from."""
    note = (
        "from pipecomp.distributed.launch_env import note_start\n"
        "noted = pathlib.Path('run', f'noted-{restarts}')\n"
        "if restarts % 4 < 2 and rank == 0:\n"
        f" begun = note_start(restarts * 10, [os.environ[{COMMAND!r}]])\n"
        f" pathlib.Path('run', {STARTS!r}).write_text(json.dumps(begun))\n"
        " noted.touch()\n"
        "while restarts % 4 < 2 and not noted.exists(): time.sleep(0.01)\n"
    )
    run = program(folder / "starts", note + "restarts < 6 and rank == 1 and os.kill(os.getpid(), signal.SIGKILL)\n")
    (folder / "run").mkdir()
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, out=Path("run")) == 0
    assert len(starts(folder / "starts")) == 14


def added(count: StartCount, *steps: int | None) -> list[bool]:
    """For each start whether the run goes on."""
    return [count.add(step) is None for step in steps]


class TestStartCount:
    """How often a run starts again without a newer step."""

    def test_each_newer_step_begins_a_new_count(self):
        assert all(added(StartCount(), 0, 0, 0, 0, 10, 10, 10, 10, 20, None, None, None, 30))

    @pytest.mark.parametrize(
        "fruitless", [[0, 0, 0, 0], [None, None, None, None], [None, 0, None, 0], [0, None, None, 0]]
    )
    def test_four_that_reach_no_newer_step_end_the_run(self, fruitless):
        """The first one may have trained: how far is known when the next one begins."""
        assert added(StartCount(), 0, *fruitless) == [True] * 4 + [False]

    def test_a_start_that_may_have_trained_is_not_counted_until_the_next_one_begins(self):
        assert all(added(StartCount(), 0, 0, None, None, None, 10))
        assert added(StartCount(), 0, 0, None, None, None, 0) == [True] * 5 + [False]

    def test_starts_that_never_begin(self):
        assert added(StartCount(), None, None, None, None) == [True] * 3 + [False]

    def test_the_ranks_end_the_run_when_the_fifth_start_begins_no_further(self, monkeypatch):
        """Once it is lost, it may have trained for days."""
        count = StartCount()
        for _ in range(4):
            assert not count.variables()
            assert count.add(7) is None
        for name, value in count.variables().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="4 starts in a row have reached no newer step than 7"):
            check_progress(7)
        check_progress(8)
        assert [count.ends_at(step) for step in (7, 8, None)] == [True, False, False]
        assert count.add(8) is None
        assert not count.variables()

    def test_starts_that_never_begin_name_no_step(self):
        count = StartCount()
        assert all(added(count, None, None, None))
        assert not count.variables()

    def test_a_run_that_lost_its_newest_state_counts_from_there(self):
        assert all(added(StartCount(), 40, 30, 35, 38, 39, 41))


def test_a_spare_is_not_to_blame_for_a_run_without_progress(folder):
    """The start with it is ended by the ranks, and is the last one."""
    looks = []

    def silent(hosts):
        looks.append(hosts)
        return {HERE[1]: "down"} if len(looks) >= 4 else {}

    text = (
        "from pipecomp.distributed.launch_env import check_progress, note_start\n"
        f"pathlib.Path('run', f'{STARTS}.{{rank}}').write_text(json.dumps(note_start(5, [os.environ[{COMMAND!r}]])))\n"
        f"os.replace(f'run/{STARTS}.{{rank}}', 'run/{STARTS}')\n"
        "check_progress(5)\n"
        f"sys.exit({LOST_STATUS})\n"
    )
    (folder / "run").mkdir()
    run = program(folder / "starts", text)
    assert launch_elastic(run, Roster.start(HERE[:2], [SPARE]), 1, silent, out=Path("run")) == 1
    assert starts(folder / "starts") == [f"{number}-{rank}-2" for number in range(5) for rank in range(2)]


def test_the_note_of_another_start_does_not_count(monkeypatch):
    """A machine may have the file of an earlier run, and a start that fails early leaves that of the one before."""
    monkeypatch.setenv(RESTARTS, "2")
    text = json.dumps(note_start(7, ["one", "another machine's"]))
    assert read_start(text, "one", 2) == read_start(text, "another machine's", 2) == 7
    others = [("two", 2, text), ("one", 1, text), ("one", 2, None), ("one", 2, "no JSON"), ("one", 2, "[5]")]
    assert all(read_start(text, name, number) is None for name, number, text in others)


# What ranks of three machines do if the second one is told to end while they train.
LEFT = f"restarts == 0 and sys.exit({LEFT_STATUS} if rank == 1 else {RECUT_STATUS})\n"


@pytest.mark.parametrize(("spares", "world"), [((), 2), ((SPARE,), 3)])
def test_a_machine_that_is_told_to_end_leaves(folder, capfd, spares, world):
    """It answers, and is not taken in again as long as it does."""
    told = f"rank == 0 and time.sleep(0.5)\nsys.exit(pathlib.Path('run', {CANDIDATES!r}).exists())\n"
    run = program(folder / "starts", LEFT + told)
    assert launch_elastic(run, Roster.start(HERE, spares), 1, lambda hosts: {}, out=Path("run")) == 0
    assert starts(folder / "starts")[3:] == [f"1-{rank}-{world}" for rank in range(world)]
    said = capfd.readouterr().err
    hosts = [HERE[0], *spares, HERE[2]]
    assert f"127.0.0.2 (it was told to end) leaves. Restart 1: {world} stages on {', '.join(hosts)}" in said
    assert "answers again" not in said
    assert said.count("127.0.0.2 still answers: it is a spare again") == 1
    assert "or at once with: echo 127.0.0.2 >> run/join.txt" in said


def test_a_rank_that_ends_by_sigterm_before_training_leaves_with_its_machine(folder):
    run = program(folder / "starts", "restarts == 0 and rank == 1 and os.kill(os.getpid(), signal.SIGTERM)\n")
    assert launch_elastic(run, Roster.start(HERE), 1, lambda hosts: {}, out=Path("run")) == 0
    assert starts(folder / "starts")[3:] == ["1-0-2", "1-1-2"]


def test_a_connection_that_ends_while_the_others_have_saved_is_a_loss(folder, monkeypatch, capfd):
    """Its machine answers, and takes part again."""
    text = f"restarts == 0 and sys.exit(255 if rank == 1 else {RECUT_STATUS})\n"
    monkeypatch.setattr(
        elastic_launcher, "watch_ranks", lambda *args, **more: watch_ranks(*args, **more)._replace(remote={1})
    )
    assert launch_elastic(program(folder / "starts", text), Roster.start(HERE), 1, lambda hosts: {}) == 0
    assert starts(folder / "starts")[3:] == ["1-0-3", "1-1-3", "1-2-3"]
    assert "a rank was lost, and its machine answers. Restart 1: 3 stages" in capfd.readouterr().err


def test_a_signal_to_the_launcher_ends_the_run(folder):
    text = "rank == 0 and os.kill(os.getppid(), signal.SIGTERM)\n" + LEFT
    assert launch_elastic(program(folder / "starts", text), Roster.start(HERE), 1, lambda hosts: {}) != 0
    assert {name[0] for name in starts(folder / "starts")} == {"0"}


# Rank 0 asks for a new cut once it is told of a candidate, as `MachineWatch` does; the others wait for the end.
ASKS = f"""
import json
told = pathlib.Path("run", {CANDIDATES!r})
while True:
    found = json.loads(told.read_text()) if told.exists() else {{{{"start": -1}}}}
    if found["start"] == restarts and found["names"]:
        sys.exit({RECUT_STATUS} + len(found["names"]))
    time.sleep(0.02)
""".replace("{{", "{").replace("}}", "}")


def requests(rank: int, *hosts: str, wait_s: float = 0.0) -> str:
    """Lines of a program: a rank asks the launcher to let hosts join."""
    lines = "".join(f"{host}\n" for host in hosts)
    return f"if rank == {rank}:\n time.sleep({wait_s})\n pathlib.Path('run', {JOIN!r}).open('a').write({lines!r})\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory; starts are noted in a folder there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(elastic_launcher, "_LOOK_S", 0.1)
    monkeypatch.setattr(elastic_launcher, "_READ_S", 0.05)
    (tmp_path / "starts").mkdir()
    return tmp_path


def test_a_machine_that_answers_again_is_taken_in_when_the_ranks_ask_for_it(folder, capfd):
    asked = []

    def silent(hosts):
        asked.append(tuple(hosts))
        return {HERE[1]: "down"} if len(asked) < 3 else {}

    text = KILLED_ONCE + "restarts == 2 and sys.exit(0)\n" + ASKS
    run = program(folder / "starts", text)
    assert launch_elastic(run, Roster.start(HERE), 1, silent, out=Path("run")) == 0
    assert starts(folder / "starts")[3:] == ["1-0-2", "1-1-2", "2-0-3", "2-1-3", "2-2-3"]
    assert asked[1:] == [(HERE[1],)] * (len(asked) - 1)
    said = capfd.readouterr().err
    assert "127.0.0.2 answers again: a spare" in said
    assert "127.0.0.2 takes part. Restart 2: 3 stages on 127.0.0.1, 127.0.0.3, 127.0.0.2" in said


def test_a_new_machine_that_lacks_something_does_not_join(folder, capfd):
    """One that was mended may; the program and files of a rank are looked for there."""
    asked, answers = [], [{SPARE: "No such file or package: text.txt"}, {}]

    def lacking(ranks):
        asked.extend(ranks)
        return answers.pop(0) if ranks else {}

    text = "restarts == 1 and sys.exit(0)\n" + requests(0, SPARE) + requests(1, SPARE, wait_s=0.5)
    run = program(folder / "starts", text + ASKS)
    more = {"out": Path("run"), "lacking": lacking, "needs": ["text.txt"]}
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, lambda hosts: {}, **more) == 0
    said = capfd.readouterr().err
    assert "127.0.0.4 cannot join: No such file or package: text.txt" in said
    assert said.count("127.0.0.4 joins: a spare") == 1
    assert [(rank.host, rank.command, rank.needs) for rank in asked] == [(SPARE, tuple(run(1)), ("text.txt",))] * 2


def test_a_new_machine_joins(folder, capfd):
    """One that does not answer is named; a line may be given again."""
    answers = {SPARE: ["no route", None]}

    def silent(hosts):
        return {host: why for host in hosts if (why := answers.get(host, [None])[0]) and answers[host].pop(0)}

    text = "restarts == 1 and sys.exit(0)\n" + requests(0, SPARE) + requests(1, SPARE, HERE[0], wait_s=0.5)
    run = program(folder / "starts", text + ASKS)
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, silent, out=Path("run")) == 0
    assert starts(folder / "starts") == ["0-0-2", "0-1-2", "1-0-3", "1-1-3", "1-2-3"]
    said = capfd.readouterr().err
    assert "another machine joins with: echo HOST >> run/join.txt" in said
    assert "127.0.0.4 cannot join: no route" in said
    assert "127.0.0.4 joins: a spare" in said
    assert "127.0.0.1 cannot join: it takes part already" in said


def test_a_machine_that_joins_while_a_start_ends_is_not_forgotten(folder, monkeypatch, capfd):
    """The answer to its request comes after the loss."""
    monkeypatch.setattr(elastic_launcher, "_GRACE_S", 0.2)
    lost, asked = threading.Event(), []

    def lacking(ranks):
        if ranks:
            asked.append(ranks)
            if len(asked) == 1:
                assert lost.wait(HANG_S)
        return {}

    def silent(hosts):
        if SPARE not in hosts:
            lost.set()
        return {}

    text = f"restarts == 0 and rank == 0 and pathlib.Path('run', {JOIN!r}).open('a').write({SPARE + chr(10)!r})\n"
    text += "restarts == 0 and rank == 1 and (time.sleep(1.0), os.kill(os.getpid(), signal.SIGKILL))\n"
    text += "restarts == 2 and sys.exit(0)\n" + ASKS
    run = program(folder / "starts", text)
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, silent, out=Path("run"), lacking=lacking) == 0
    assert starts(folder / "starts") == ["0-0-2", "0-1-2", "1-0-2", "1-1-2", "2-0-3", "2-1-3", "2-2-3"]
    assert capfd.readouterr().err.count("127.0.0.4 joins: a spare") == 1


def test_spare_machines_of_the_start_stay_spare(folder):
    """Rank 0 is not told of them."""
    text = f"time.sleep(0.5)\nrank == 0 and sys.exit(pathlib.Path('run', {CANDIDATES!r}).exists())\n"
    run = program(folder / "starts", text)
    assert launch_elastic(run, Roster.start(HERE, [SPARE]), 1, lambda hosts: {}, out=Path("run")) == 0


def test_a_new_cut_of_the_same_machines(folder, capfd):
    text = f"restarts == 0 and sys.exit({RECUT_STATUS})\n"
    assert launch_elastic(program(folder / "starts", text), Roster.start(HERE[:2]), 1, out=Path("run")) == 0
    assert starts(folder / "starts") == ["0-0-2", "0-1-2", "1-0-2", "1-1-2"]
    assert "a new cut. Restart 1: 2 stages on 127.0.0.1, 127.0.0.2" in capfd.readouterr().err


def test_a_run_goes_on_without_a_machine_that_cannot_take_part(folder, capfd):
    """Such as one with other data, which every rank refuses."""
    text = "restarts == 1 and sys.exit(1)\nrestarts == 2 and sys.exit(0)\n"
    run = program(folder / "starts", text + requests(0, SPARE) + ASKS)
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, lambda hosts: {}, out=Path("run")) == 0
    assert starts(folder / "starts")[2:] == ["1-0-3", "1-1-3", "1-2-3", "2-0-2", "2-1-2"]
    assert "the run did not go on with 127.0.0.4. Restart 2: 2 stages on 127.0.0.1, 127.0.0.2" in capfd.readouterr().err


def test_a_run_that_is_ended_with_a_machine_that_came_starts_no_more(folder):
    """Its ranks have saved, and the same command goes on."""
    text = f"restarts == 1 and sys.exit({REQUEUE_STATUS})\n"
    run = program(folder / "starts", text + requests(0, SPARE) + ASKS)
    assert launch_elastic(run, Roster.start(HERE[:2]), 1, lambda hosts: {}, out=Path("run")) == REQUEUE_STATUS
    assert starts(folder / "starts")[2:] == ["1-0-3", "1-1-3", "1-2-3"]


def test_rank_0_on_another_machine_is_told_there(folder, monkeypatch):
    told = []
    monkeypatch.setattr(elastic_launcher, "is_this_machine", lambda host: False)
    monkeypatch.setattr(elastic_launcher, "try_login", lambda host, line: told.append((host, line)))
    assert elastic_launcher.write_file("there", Path("my run/x.json"), "it's") is None
    [(host, line)] = told
    assert host == "there"
    assert subprocess.run(["sh", "-c", line], check=True).returncode == 0
    assert (folder / "my run" / "x.json").read_text() == "it's"


def test_a_file_is_read_where_it_is(folder, monkeypatch):
    (folder / "my run").mkdir()
    (folder / "my run" / STARTS).write_text("[3]")
    assert elastic_launcher.read_file(HERE[0], Path("my run", STARTS)) == "[3]"
    assert elastic_launcher.read_file(LOCAL, Path("no run", STARTS)) is None
    monkeypatch.setattr(elastic_launcher, "is_this_machine", lambda host: False)
    lines = []
    monkeypatch.setattr(elastic_launcher, "read_remote", lambda host, line: lines.append(line))
    assert elastic_launcher.read_file("there", Path("my run", STARTS)) is None
    assert subprocess.run(["sh", "-c", lines[0]], check=True, capture_output=True).stdout == b"[3]"


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


def test_the_names_of_the_machines(monkeypatch):
    monkeypatch.delenv(MACHINES, raising=False)
    assert machine_names(2) == []
    monkeypatch.setenv(MACHINES, "a,b")
    assert machine_names(4) == ["a", "a", "b", "b"]
