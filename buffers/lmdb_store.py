"""Message stores of one rank in an LMDB file: one named database per link, one transaction per step."""

from __future__ import annotations

import atexit
import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from pipecomp.buffers.lmdb_check import unsound
from pipecomp.buffers.lmdb_file import (
    MAP_BYTES,
    META,
    RUN_KEY,
    Place,
    Table,
    ValueFile,
    check_format,
    check_settings,
    other_settings,
    read_run,
)
from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, Folder, copy_file, of_the_disk
from pipecomp.buffers.memory import MemoryStore
from pipecomp.buffers.store import Entry, LinkStore, Read, Writer
from pipecomp.buffers.value import ValueFormat, read_header, stored_size
from pipecomp.errors import ConfigError, StoreError

LINK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LmdbStore(LinkStore):
    """A MessageStore on disk, made by `LmdbEnvironment.link`. Values are packed and written behind the training.

    settings: what its activations depend on. options: see LinkStore.
    """

    def __init__(
        self,
        environment: LmdbEnvironment,
        table: Table,
        fmt: ValueFormat,
        settings: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(table.name, fmt, **options)
        self.settings = settings
        self._environment = environment
        self._reload(table)

    def commit(self) -> None:
        """End a training step of this link, in a transaction of its own; see MessageStore."""
        self._check()
        self._environment.commit([self])

    def keeps_new(self) -> bool:
        """Whether samples that are not held may be put; see MessageStore."""
        return not self._environment.steps.refused

    def flush(self) -> None:
        """Wait until every commit so far, of any link of the rank, is on disk."""
        self._check()
        self._environment.flush()

    def close(self) -> None:
        """Flush and release; safe to call twice. What was put after the last commit is dropped: it is half a step."""
        if not self._closed:
            self._stop()
            self._environment.flush()

    def _check(self) -> None:
        super()._check()
        self._environment.check()

    def _added(self, entries: Sequence[Entry]) -> None:
        if self._packs_early:
            self._environment.writer.submit(lambda: self._pack_all(entries))

    def _reading(self) -> AbstractContextManager[Read]:
        return self._environment.file.reading(self._table)

    def _load_value(self, sample: int) -> bytearray | None:
        return self._environment.file.read(self._table, sample)

    def _reload(self, table: Table) -> None:
        """Hold what is in `table`, this store's in the file that has taken the place of the old one."""
        self._table = table
        self._start_with(self._scan())

    def _scan(self) -> list[Entry]:
        entries: dict[int, Entry] = {}
        places: dict[int, Place] = {}
        for row in self._environment.file.scan(self._table):
            where = self.where(row.sample)
            header = read_header(row.head, where)
            if header.sample != row.sample or row.sample in entries:
                raise StoreError(f"{where}: damaged: its header names sample {header.sample}")
            size = stored_size(header)
            entries[row.sample] = Entry(row.sample, header.version, size, crc=header.crc)
            places[row.sample] = Place(row.slot, size)
        self._table.load(places)
        return list(entries.values())


class LmdbEnvironment:
    """Holds the stores of one rank in `path`, a folder that no other process uses meanwhile.

    Options and errors as for `open_environment`. map_bytes: address space to start with, grows by itself.
    on_write_error: see `lmdb_steps`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bits: int = 32,
        group_size: int | None = None,
        map_bytes: int = MAP_BYTES,
        on_write_error: str = "stop",
        **options: Any,
    ) -> None:
        self.path = Path(path).absolute()  # wherever the program goes
        self._format = ValueFormat(bits, group_size)
        self.steps = StepWriter(self.path, self._format, on_write_error)
        self._options = options
        MemoryStore(**options).close()  # a wrong option is an error before any file is made
        self._lock = threading.RLock()
        self._stores: dict[str, LmdbStore] = {}
        self._pid = os.getpid()
        self._closed = False
        self._folder = Folder(self.path)
        with ExitStack() as undo:
            undo.callback(self._folder.release)
            self._prove_sound()
            self.file = ValueFile(self.path, map_bytes=map_bytes, before_write=self._folder.mark_unsynced)
            undo.callback(self.file.close)
            check_format(self.file)
            undo.pop_all()
        self.writer = Writer(f"message store {self.path}")
        atexit.register(self.close)

    @property
    def run(self) -> str | None:
        """The id of the run that the store belongs to; None if no run has used it."""
        self.check()
        return read_run(self.file)

    def bind(self, run: str) -> None:
        """Make the store this run's."""
        self.check()
        if read_run(self.file) != run:
            self.file.set_meta(RUN_KEY, run.encode())

    def save(self, folder: str | os.PathLike[str]) -> bool:
        """Copy everything committed into `folder`, for `restore`; call it between steps.

        False, and no copy, while the disk refuses some of it.
        """
        self.flush()
        if self.steps.refused:
            return False
        copy_file(self.path / DATA_FILE, Path(folder) / DATA_FILE)
        return True

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Hold what `save` wrote to `folder` in place of all else, in the stores that are open.

        False, and nothing changes, if there is nothing, or it is a copy of a store that was damaged already or made
        with other settings: a warning says so.
        """
        saved = Path(folder) / DATA_FILE
        if not saved.is_file():
            return False
        self.check()
        if (problem := unsound(saved.parent)) is not None:
            warnings.warn(f"{folder} is damaged and is not used: {problem}", stacklevel=2)
            return False
        with closing(ValueFile(saved.parent, readonly=True)) as copy:
            differs = {name: other_settings(copy, name, store.settings) for name, store in self._stores.items()}
        if any(differs.values()):
            words = ", ".join(f"{name} was stored with other settings ({how})" for name, how in differs.items() if how)
            warnings.warn(f"{folder} is not used: {words}", stacklevel=2)
            return False
        with self._lock:
            self.writer.drain()
            self.steps.refused = {}
            self.file.close()
            self._folder.mark_unsynced()
            for name in (LOCK_FILE, DATA_FILE):  # there may be no room for both files, and the copy is a good one
                (self.path / name).unlink(missing_ok=True)
            copy_file(saved, self.path / DATA_FILE)
            self.file = ValueFile(self.path, before_write=self._folder.mark_unsynced)
            check_format(self.file)
            for store in self._stores.values():
                if not store._closed:
                    check_settings(self.file, store.link, store.settings)
                    store._reload(self.file.table(store.link))
        return True

    def link(self, name: str, settings: Mapping[str, Any]) -> LmdbStore:
        """Open the store of one endpoint, kept in the named database `name`.

        settings: what its activations depend on, JSON values. StoreError if what is stored was made with others.
        """
        self.check()
        if not LINK_NAME.fullmatch(name) or name == META.decode():
            raise ConfigError("link", name, "letters, digits, '.', '_' and '-', at most 100, and not 'meta'")
        with self._lock:
            if name in self._stores and not self._stores[name]._closed:
                raise StoreError(f"{self.path}: store of {name}: is open already")
            described = {**settings, "bits": self._format.bits, "grouping": self._format.grouping}
            check_settings(self.file, name, described)
            # What the disk refused before the link was closed is still to be written, into slots that nobody else has.
            refused = next((table for table in self.steps.refused if table.name == name), None)
            table = refused or self.file.table(name)
            self._stores[name] = LmdbStore(self, table, self._format, described, **self._options)
            return self._stores[name]

    def commit(self, stores: Iterable[LmdbStore] | None = None) -> None:
        """End a training step: what these links, or all, put and dropped becomes durable in one transaction."""
        self.check()
        with self._lock:
            ended = {store: store._end_step() for store in stores or self._stores.values() if not store._closed}
            steps = {store._table: step for store, step in ended.items() if step}
            if steps:
                waited = self.writer.submit_step(lambda: self.steps.write(self.file, steps))
                for store in ended:
                    store._waited(waited / len(ended))

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut too, but for what it goes on refusing."""
        self.check()
        self.writer.submit(lambda: self.steps.retry(self.file))
        self.writer.submit(self.file.sync)
        self.writer.drain()

    def check(self) -> None:
        """Raise StoreError if the environment is closed or a background write failed."""
        if self._closed:
            raise StoreError(f"{self.path}: message store: used after close")
        self.writer.check()

    def close(self) -> None:
        """Flush and release everything; safe to call twice. StoreError if a write failed that nobody heard of."""
        if self._closed or os.getpid() != self._pid:  # a forked child has neither the thread nor the lock
            return
        try:
            for store in self._stores.values():
                store._stop()
            if not self.writer.failed:
                self.flush()
                self.steps.warn_of_the_rest()
                self._folder.mark_synced()
        finally:
            self._closed = True
            atexit.unregister(self.close)
            try:
                self.writer.close()
            finally:
                self.file.close()
                self._folder.release()

    def size_bytes(self) -> int:
        """Count the bytes of the LMDB file."""
        return self.file.size_bytes()

    def _prove_sound(self) -> None:
        if not self._folder.restarted() or not (self.path / DATA_FILE).is_file():
            return
        problem = unsound(self.path)
        if problem is not None:
            raise StoreError(
                f"{self.path}: the machine stopped before everything was on disk, and the message store is damaged: "
                f"{problem}. `pipecomp store prune {self.path}` keeps what is intact, with --everything nothing; what "
                "is missing is sent as a first visit once more"
            )


REFUSED_BYTES = 1 << 30  # of refused values in memory, before a run that goes on without the disk stops

Step = Mapping[int, Entry | None]  # what became of each sample; None: deleted
Steps = Mapping[Table, Step]


class StepWriter:
    """Writes steps, each in one transaction; only the writing thread calls it.

    path: for warnings. on_write_error: "stop" raises what the disk raised. With "continue" a refused step stays in
    memory, in `refused`: first without its new samples, whose pages are the ones that lack, then all of it. Both ends
    of a link go on alike, as reads find it there, and every later step tries again; the file keeps what it last
    committed. Meanwhile the stores' `keeps_new` says that no new sample may come.
    """

    def __init__(self, path: Path, fmt: ValueFormat, on_write_error: str) -> None:
        if on_write_error not in ("stop", "continue"):
            raise ConfigError("store.on_write_error", on_write_error, "'stop' or 'continue'")
        self.refused: Steps = {}
        self._path, self._format = path, fmt
        self._goes_on = on_write_error == "continue"
        self._warned = False

    def write(self, file: ValueFile, steps: Steps) -> None:
        """Write these steps and what the disk refused of earlier ones."""
        merged = {t: {**self.refused.get(t, {}), **steps.get(t, {})} for t in {**self.refused, **steps}}
        try:
            self._write(file, merged)
        except StoreError as error:
            if not (self._goes_on and of_the_disk(error)):
                raise
            self._go_on_without(file, merged, error)
        else:
            self.refused = {}

    def retry(self, file: ValueFile) -> None:
        """Write what was refused, if anything was."""
        if self.refused:
            self.write(file, {})

    def warn_of_the_rest(self) -> None:
        """Say how much the disk refused to the end."""
        count = sum(map(len, self.refused.values()))
        if count:
            warnings.warn(
                f"{self._path}: to the end, the disk refused the latest activations of {count} samples. If the "
                "run goes on, they are sent as first visits once more",
                stacklevel=3,
            )

    def _go_on_without(self, file: ValueFile, merged: Steps, error: StoreError) -> None:
        known = {t: {i: e for i, e in step.items() if i in t.places} for t, step in merged.items()}
        try:
            self._write(file, known)
            rest = {t: {i: e for i, e in step.items() if i not in known[t]} for t, step in merged.items()}
            self.refused = {t: step for t, step in rest.items() if step}
        except StoreError:
            self.refused = merged
        held = sum(entry.size for step in self.refused.values() for entry in step.values() if entry is not None)
        if held > REFUSED_BYTES:
            raise StoreError(f"{error} ({held} bytes wait in memory, the limit is {REFUSED_BYTES})") from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{error}. As store.on_write_error is 'continue', samples that are not stored yet are sent as first "
                "visits until the disk takes writes again",
                stacklevel=2,
            )

    def _write(self, file: ValueFile, steps: Steps) -> None:
        changes: dict[Table, dict[int, bytearray | None]] = {
            table: {i: None if e is None else e.pack(self._format, table.where(i)) for i, e in step.items()}
            for table, step in steps.items()
        }
        file.write(changes)
        for step in steps.values():
            for entry in step.values():
                if entry is not None:
                    entry.release()
