"""Starts of a few ranks on this machine, to be killed, stopped and looked at from outside; and their stores on disk."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.distributed.local_launcher import preload_large_packages
from tests.soak.restart_work import PHASES, Job, one_rank

_TICK_S = 0.005


class Start:
    """The ranks of one start of a run. number: from 0, no two of a run alike."""

    def __init__(self, job: Job, world: int, number: int, environment: Callable[[int], Mapping[str, str]]) -> None:
        """environment: of a rank, what is set besides what launchers set."""
        from pipecomp.distributed.placement import free_port

        preload_large_packages()
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self.job, self.world, self.began = job, world, time.monotonic()
        self._notes = [Path(job["folder"]) / f"notes-{number}-{rank}" for rank in range(world)]
        self._known: list[list[list[Any]]] = [[] for _ in range(world)]
        self._read = [0] * world  # bytes of the files that are known
        self.ranks = [
            context.Process(
                target=one_rank, args=(rank, world, port, job, number, dict(environment(rank))), daemon=True
            )
            for rank in range(world)
        ]
        for process in self.ranks:
            process.start()

    def notes(self, rank: int) -> list[list[Any]]:
        """Return a rank's output so far; see `restart_work`."""
        if self._notes[rank].is_file():
            with self._notes[rank].open("rb") as file:
                file.seek(self._read[rank])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[rank] += len(whole) + 1
                self._known[rank] += map(json.loads, whole.split(b"\n"))
        return self._known[rank]

    def found(self, kind: str) -> list[list[Any]]:
        """The notes of this kind, of all ranks, without kind and time."""
        return [note[1:-1] for rank in range(self.world) for note in self.notes(rank) if note[0] == kind]

    def phase(self, rank: int) -> str:
        """Return a rank's place, the last one if it was killed."""
        return next((note[0] for note in reversed(self.notes(rank)) if note[0] in PHASES), PHASES[0])

    def steps(self) -> int:
        """The last step that any rank has made."""
        return max((words[0] for words in self.found("step")), default=0)

    def alive(self) -> list[int]:
        """Ranks whose process has not ended."""
        return [rank for rank, process in enumerate(self.ranks) if process.is_alive()]

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Until something is true (True), for so long, or until all ranks have ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.alive():
            if until():
                return True
            time.sleep(_TICK_S)
        return until()

    def send(self, rank: int, number: signal.Signals) -> bool:
        """Send a signal; False if the rank had ended before."""
        pid = self.ranks[rank].pid
        if pid is None or not self.ranks[rank].is_alive():
            return False
        os.kill(pid, number)
        return True

    def end(self, seconds: float, *, but: tuple[int, ...] = ()) -> list[int]:
        """Wait until all ranks have ended; those that have not by then are ended, and returned unless they are in
        `but`."""
        self.wait(seconds, lambda: not set(self.alive()) - set(but))
        late = [rank for rank in self.alive() if rank not in but]
        for process in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()
        return late

    def statuses(self) -> list[int | None]:
        """Exit statuses, by rank."""
        return [process.exitcode for process in self.ranks]

    def said(self) -> str:
        """The end of what the ranks of this run have printed, for an error."""
        files = sorted(Path(self.job["folder"]).glob("said-*.txt"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files)


class OnDisk(NamedTuple):
    """Message stores as they lie on disk, nobody using them.

    unopened: ranks whose store does not open, or whose pages or values are damaged, and why. alike: samples that the
    two ends of a link hold alike, byte for byte. differ: that they do not, as a kill may leave them. silent: of these
    those with one version, which no comparison of versions would find.
    """

    unopened: dict[str, str]
    alike: int = 0
    differ: int = 0
    silent: int = 0


def stores_on_disk(path: Path) -> OnDisk:
    """Look at all stores of a run on this machine."""
    from pipecomp.buffers.admin import info, rank_folders, verify
    from pipecomp.buffers.lmdb_file import ValueFile
    from pipecomp.buffers.value import HEADER_BYTES, read_header
    from pipecomp.errors import StoreError

    unopened: dict[str, str] = {}
    held: dict[str, list[dict[int, tuple[int, str]]]] = {}
    if not path.is_dir():
        return OnDisk(unopened)  # killed before there was any
    try:
        folders = rank_folders(path)
    except StoreError:
        return OnDisk(unopened)
    for _, folder in folders:
        if not (folder / "data.mdb").is_file():
            continue
        try:
            damaged = verify(folder).damaged
            if damaged:
                unopened[folder.name] = str(damaged[0])
                continue
            replica = {link.link: str(link.settings.get("replica")) for link in info(folder)}
            file = ValueFile(folder, readonly=True)
            for name in file.table_names():
                table = file.table(name, create=False)
                end = {}
                for row in file.scan(table):
                    value = bytes(file.read_at(table, row.slot, row.sample))
                    version = read_header(memoryview(value)[:HEADER_BYTES], name).version
                    end[row.sample] = (version, hashlib.sha256(value).hexdigest())
                held.setdefault(f"{name} {replica.get(name)}", []).append(end)
            file.close()
        except StoreError as error:
            unopened[folder.name] = str(error)
    alike = differ = silent = 0
    for ends in held.values():
        one, other = ends if len(ends) == 2 else (ends[0], {})
        for sample in one.keys() | other.keys():
            here, there = one.get(sample), other.get(sample)
            alike += here == there
            differ += here != there
            silent += here is not None and there is not None and here[0] == there[0] and here[1] != there[1]
    return OnDisk(unopened, alike, differ, silent)
