"""`pipecomp up` on a machine whose command is started again: it finds the run that goes on, or starts it again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed import up_launcher
from pipecomp.distributed.preemption import LEFT_STATUS, LOST_STATUS, REQUEUE_STATUS
from pipecomp.distributed.supervisor import Ended
from pipecomp.errors import LinkTimeoutError
from pipecomp.tls import membership
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import KeyFolder, create_keys
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.membership import Membership, MembershipConfig, NoRunError, RunEndedError
from pipecomp.tls.mesh import JoinConfig, Mesh
from tests.tls.meshes import add_machine, free_address

LOADS_S = 20.0  # between two starts the ranks load, and nobody listens


class Clock:
    """Time for `membership` that passes while it sleeps. on_sleep: called with the seconds that have passed."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.on_sleep: Callable[[float], None] = lambda slept_s: None

    def monotonic(self) -> float:
        return time.monotonic() + self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.on_sleep(self.slept_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(membership, "time", found)
    return found


@pytest.fixture
def folders(tmp_path: Path) -> list[KeyFolder]:
    """Three machines of one rank."""
    first = create_keys(tmp_path / "0", machine="machine-1")
    return [first, *(add_machine(first, tmp_path / str(n), f"machine-{n + 1}", (n,)) for n in (1, 2))]


@pytest.fixture
def mesh(folders: list[KeyFolder]) -> Iterator[Mesh]:
    """Rank 0 of the second and third machine, which go on without the first; it does not listen yet."""
    at = free_address()
    found = Mesh(JoinConfig(0, 2, at), Credentials(folders[1], (1, 2)))
    found.book = {"1": str(at)}
    yield found
    found.close()


def listen(mesh: Mesh) -> None:
    if mesh._listener is None:
        mesh._listener = Listener(mesh._config.address, mesh._authenticate)


def run_of(address: Address) -> up_launcher.UpRun:
    return up_launcher.UpRun(address=address, machines=3, procs=1, command=(__file__,), elastic=True)


def write_book(folder: KeyFolder, book: dict[int, Address]) -> Path:
    path = Path(folder.path) / up_launcher.BOOK
    path.write_text(json.dumps({place: str(address) for place, address in book.items()}))
    return path


def find(run: up_launcher.UpRun, folder: KeyFolder, place: int, said: list[str]) -> Membership | None:
    return up_launcher.find_run(run, str(folder.path), place, joins=False, say=said.append)


def test_a_run_whose_ranks_load_is_found(folders: list[KeyFolder], mesh: Mesh, clock: Clock) -> None:
    run, said = run_of(free_address()), []
    write_book(folders[0], {0: run.address, 1: mesh._config.address})

    def answer(slept_s: float) -> None:
        if mesh.visitors():
            assert mesh._listener is not None
            mesh._listener.close()  # as the run ends
            clock.on_sleep = lambda _: None
        elif slept_s > LOADS_S:
            listen(mesh)

    clock.on_sleep = answer
    with pytest.raises(RunEndedError):
        find(run, folders[0], 0, said)
    assert "the run goes on; this machine waits until it is taken in" in said


def test_a_run_that_no_machine_answers_for_is_started_again(folders: list[KeyFolder], clock: Clock) -> None:
    """All machines were lost."""
    run, said = run_of(free_address()), []
    write_book(folders[0], {0: run.address, 1: free_address()})
    assert find(run, folders[0], 0, said) is None
    assert clock.slept_s > LOADS_S


def test_a_machine_that_knows_of_no_run_does_not_wait(folders: list[KeyFolder], clock: Clock) -> None:
    run = run_of(free_address())
    assert find(run, folders[0], 0, []) is None
    assert find(run, folders[1], 1, []) is None
    assert clock.slept_s == 0


def test_a_first_start_that_waits_for_its_machines_is_joined_at_once(folders: list[KeyFolder], clock: Clock) -> None:
    mesh = Mesh(JoinConfig(0, 3, free_address()), Credentials(folders[0]))
    run = run_of(mesh._config.address)
    write_book(folders[1], {0: run.address, 2: free_address()})
    listen(mesh)
    try:
        assert find(run, folders[1], 1, []) is None
    finally:
        mesh.close()
    assert clock.slept_s == 0


class TestBook:
    """The file that tells a command that is started again of a run."""

    @pytest.fixture(autouse=True)
    def found(self, monkeypatch: pytest.MonkeyPatch) -> list[Membership | Exception]:
        """The results of agreements, in order."""
        found: list[Membership | Exception] = []

        def agree(*_: object, **__: object) -> Membership:
            result = found.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(up_launcher, "agree_on_members", agree)
        return found

    def start(self, monkeypatch: pytest.MonkeyPatch, folder: KeyFolder, statuses: list[Any], said: list[str]) -> int:
        """Start ranks of the second machine that write the book and end with a status in each start."""
        book = Path(folder.path) / up_launcher.BOOK

        def command(*_: str) -> list[str]:
            write = f"import pathlib, sys; pathlib.Path({str(book)!r}).write_text('{{}}'); sys.exit({statuses.pop(0)})"
            return [sys.executable, "-c", write]

        monkeypatch.setattr(up_launcher, "python_module_command", command)
        run = run_of(Address("127.0.0.1", 1))
        return up_launcher.start_ranks(run, str(folder.path), None, up_launcher.Checks(), say=said.append)

    @pytest.mark.parametrize("status", [0, 1, 75])
    def test_it_goes_with_the_run(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list, status: int
    ) -> None:
        found += [NoRunError("")]
        assert self.start(monkeypatch, folders[1], [status], []) == status
        assert up_launcher.read_book(str(folders[1].path)) == {}
        assert not (Path(folders[1].path) / up_launcher.BOOK).exists()

    def test_a_machine_that_is_told_to_end_leaves_and_may_come_back(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        said: list[str] = []
        found += [NoRunError("")]
        assert self.start(monkeypatch, folders[1], [LEFT_STATUS], said) == REQUEUE_STATUS
        assert "this machine leaves the run" in said[-1]
        assert (Path(folders[1].path) / up_launcher.BOOK).exists()

    @pytest.mark.parametrize(
        ("ended", "goes_on"),
        [
            (Ended(75, (75, 75), True), False),
            (Ended(79, (79, 79), True), True),
            (Ended(143, (143, 13), True), True),
            (Ended(143, (143, 13), True, interrupted=True), False),
            (Ended(130, (130, 130), True, interrupted=True), False),
            (Ended(79, (79, 80), False), True),
            (Ended(13, (13, 137), False), False),
            (Ended(0, (0, 0), True), False),
        ],
    )
    def test_which_signals_let_the_others_go_on(self, ended: Ended, goes_on: bool) -> None:
        assert up_launcher._goes_on_without_this(ended) is goes_on

    def test_the_others_agree_without_a_machine_that_leaves(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        """Even the first of two: no other one can go on with the run."""
        configs = []
        agree = up_launcher.agree_on_members

        def note(config: MembershipConfig, *args: object, **more: object) -> Membership:
            configs.append(config)
            return agree(config, *args, **more)

        monkeypatch.setattr(up_launcher, "agree_on_members", note)
        file = Path(folders[1].path) / "leaving.json"
        write = f"pathlib.Path({str(file)!r}).write_text('[\"machine-1\"]')"
        found += [NoRunError(""), Membership((1, 2), Address("127.0.0.1", 1), 1)]
        assert self.start(monkeypatch, folders[1], [f"({write}, 80)[1]", "1"], []) == 1
        assert (configs[1].before, configs[1].wanted) == ((1, 2), 2)
        assert not file.exists(), "it is of the start before"

    def test_ctrl_c_on_another_machine_ends_the_run_with_a_machine_that_came(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        """All ranks have saved, and the same command goes on."""
        found += [Membership((0, 1), Address("127.0.0.1", 1), 1), Membership((0, 1, 2), Address("127.0.0.1", 1), 2)]
        statuses, said = ["80 + 1", REQUEUE_STATUS], []
        assert self.start(monkeypatch, folders[1], statuses, said) == REQUEUE_STATUS
        assert statuses == found == []
        assert not (Path(folders[1].path) / up_launcher.BOOK).exists()

    def test_it_stays_on_a_machine_that_finds_no_others(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        found += [NoRunError(""), LinkTimeoutError("too few machines are left")]
        with pytest.raises(LinkTimeoutError, match="too few"):
            self.start(monkeypatch, folders[1], [LOST_STATUS], [])
        assert (Path(folders[1].path) / up_launcher.BOOK).exists()

    def test_starts_that_fail_before_training_end(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        said: list[str] = []
        found += [NoRunError(""), *(Membership((0, 1, 2), Address("127.0.0.1", 1), number) for number in range(1, 9))]
        statuses = [LOST_STATUS] * 9
        assert self.start(monkeypatch, folders[1], statuses, said) == LOST_STATUS
        assert len(statuses) == 5
        assert "4 starts in a row have reached no newer step: the log says why each ended" in said
        assert not (Path(folders[1].path) / up_launcher.BOOK).exists()

    def test_a_machine_without_which_the_run_has_ended_ends(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        said: list[str] = []
        found += [NoRunError(""), RunEndedError("the run has ended")]
        assert self.start(monkeypatch, folders[1], [LOST_STATUS], said) == 0
        assert "the run has ended" in said
        assert not (Path(folders[1].path) / up_launcher.BOOK).exists()

    def test_a_machine_takes_part_if_the_first_one_starts_the_run_again(
        self, folders: list[KeyFolder], monkeypatch: pytest.MonkeyPatch, found: list
    ) -> None:
        found += [NoRunError(""), NoRunError("the run's first start waits for its machines")]
        statuses, said = [LOST_STATUS, 0], []
        assert self.start(monkeypatch, folders[1], statuses, said) == 0
        assert statuses == []
        assert not any(line.startswith("restart") for line in said)
