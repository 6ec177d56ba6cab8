"""The records in a folder, and which of their steps are complete: a small JSON file beside them.

PATH/rank-H/index.json                      the records that rank H has written
PATH/rank-H/step-S-rank-R.safetensors       of rank R: rank H's own, and those it holds for others
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipecomp.elastic.record import StateRecord, parse_file_name
from pipecomp.errors import WireError
from pipecomp.utils.files import UNFINISHED, atomic_write_text, file_crc

INDEX = "index.json"
_FORMAT = 1
_FIELDS = ("session", "step", "rank", "world", "size", "crc")


@dataclass(frozen=True)
class IndexEntry:
    """A record's file.

    size: bytes. crc: CRC-32. checkpoint: folder of the checkpoint of this step on this machine; the record is kept as
    long as that. None if there is none.
    """

    session: str
    step: int
    rank: int
    world: int
    size: int
    crc: int
    path: Path
    checkpoint: str | None = None

    def problem(self) -> str | None:
        """Check the file; returns what is wrong, or None if it is as it was written."""
        try:
            if not self.path.is_file():
                return f"{self.path} is missing"
            if self.path.stat().st_size != self.size or file_crc(self.path) != self.crc:
                return f"{self.path} was changed"
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror})"
        return None


class RecordFolder:
    """The records that this rank has on disk, its own and those of others.

    Args:
        path: The folder, made if it is missing.

    Attributes:
        complete: Steps of which all ranks have their own record and their second home has it, as far as is known here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for part in path.glob(f"*{UNFINISHED}"):
            part.unlink(missing_ok=True)
        self.complete: list[int] = []
        self._lock = threading.Lock()
        self._entries = {(entry.step, entry.rank): entry for entry in read_index(path)}

    @property
    def is_empty(self) -> bool:
        """True without records."""
        return not self._entries

    def add(self, record: StateRecord, checkpoint: str | None = None) -> None:
        """List a record whose file is in the folder. checkpoint: see `IndexEntry`."""
        info, path = record.info, self.path / record.info.file_name
        size = len(record.header.text) + record.header.data_bytes
        entry = IndexEntry(info.session, info.step, info.rank, info.world, size, record.crc, path, checkpoint)
        with self._lock:
            self._entries[info.step, info.rank] = entry
            self._write()

    def bind(self, step: int, checkpoint: str) -> None:
        """Keep the records of a step as long as its checkpoint's folder."""
        with self._lock:
            for key, entry in self._entries.items():
                if key[0] == step:
                    self._entries[key] = replace(entry, checkpoint=checkpoint)
            self._write()

    def steps_of(self, rank: int, session: str) -> list[int]:
        """Return the steps of a rank's records of a session, in order."""
        with self._lock:
            return sorted(e.step for e in self._entries.values() if (e.rank, e.session) == (rank, session))

    def open(self, step: int, rank: int) -> StateRecord | None:
        """Map a record; None if it is not here, or cannot be read."""
        with self._lock:
            entry = self._entries.get((step, rank))
        try:
            return None if entry is None else StateRecord.open(entry.path)
        except (OSError, WireError):
            return None

    def keep(self, steps: Collection[int], session: str, *, earlier: bool) -> None:
        """Delete a session's records of other steps, except for those of checkpoints that are still there.

        earlier: keep the records of other sessions.
        """
        self._delete(
            lambda entry: (
                not (entry.step in steps if entry.session == session else earlier)
                and not (entry.checkpoint is not None and Path(entry.checkpoint).is_dir())
            )
        )

    def set_complete(self, steps: list[int]) -> None:
        """Note the steps that are complete."""
        with self._lock:
            if steps != self.complete:
                self.complete = steps
                self._write()

    def forget_from(self, step: int) -> None:
        """Delete the records of `step` and later ones, which a run that begins before them makes anew."""
        self._delete(lambda entry: entry.step >= step)

    def forget(self, step: int, rank: int) -> None:
        """Delete a record that cannot be used."""
        self._delete(lambda entry: (entry.step, entry.rank) == (step, rank))

    def _delete(self, unwanted: Callable[[IndexEntry], bool]) -> None:
        with self._lock:
            gone = [entry for entry in self._entries.values() if unwanted(entry)]
            for entry in gone:
                del self._entries[entry.step, entry.rank]
            if gone:
                self._write()  # before the files go
        for entry in gone:
            entry.path.unlink(missing_ok=True)

    def _write(self) -> None:
        rows = [
            [*(getattr(entry, name) for name in _FIELDS), entry.path.name, entry.checkpoint]
            for entry in self._entries.values()
        ]
        content = {"format": _FORMAT, "complete": self.complete, "records": rows}
        atomic_write_text(self.path / INDEX, json.dumps(content) + "\n")


def read_index(folder: Path) -> list[IndexEntry]:
    """Read the index of a folder; [] if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if content["format"] == _FORMAT:
            return list(_entries(folder, content["records"]))
    return []


def _entries(folder: Path, rows: list[Any]) -> Iterator[IndexEntry]:
    for *values, name, checkpoint in rows:
        entry = IndexEntry(**dict(zip(_FIELDS, values, strict=True)), path=folder / name, checkpoint=checkpoint)
        if parse_file_name(name) == (entry.step, entry.rank):
            yield entry


def find_records(folders: Iterable[Path]) -> list[IndexEntry]:
    """Return the records in some folders and below them."""
    return [entry for path in _find_indices(folders) for entry in read_index(path.parent)]


def forget_other_sessions(folder: Path, session: str) -> None:
    """Delete the records of other sessions in a folder and below it, except for those of checkpoints that are there.

    Folders with records of this session are left to their ranks.
    """
    for path in _find_indices([folder]):
        if any(entry.session == session for entry in read_index(path.parent)):
            continue
        records = RecordFolder(path.parent)
        records.keep((), session, earlier=False)
        if records.is_empty:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it has other files
                path.parent.rmdir()


def complete_steps(folders: Iterable[Path]) -> list[int]:
    """Return the steps that were complete when the indices in some folders and below them were written."""
    steps: set[int] = set()
    for path in _find_indices(folders):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            steps |= set(map(int, json.loads(path.read_text(encoding="utf-8"))["complete"]))
    return sorted(steps)


def _find_indices(folders: Iterable[Path]) -> list[Path]:
    found = {path.resolve() for folder in folders for path in [folder / INDEX, *folder.glob(f"*/{INDEX}")]}
    return [path for path in sorted(found) if path.is_file()]
