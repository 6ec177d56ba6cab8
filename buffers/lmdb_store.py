"""Message stores of one rank in an LMDB file: one named database per link, one transaction per step."""

from __future__ import annotations

import atexit
import os
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipecomp.buffers.core import LinkStore
from pipecomp.buffers.entry import Entry
from pipecomp.buffers.identity import RUN_KEY, check_format, check_settings, read_run
from pipecomp.buffers.lmdb_check import unsound
from pipecomp.buffers.lmdb_errors import of_the_disk
from pipecomp.buffers.lmdb_file import MAP_BYTES, META, Place, Table, ValueFile
from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, Folder
from pipecomp.buffers.snapshot import copy_file
from pipecomp.buffers.value import ValueFormat, read_header, stored_size
from pipecomp.buffers.writer import Writer
from pipecomp.errors import ConfigError, StoreError

UNWRITTEN_BYTES = 1 << 30  # of refused values in memory, before a run that goes on without the disk stops
LINK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LmdbStore(LinkStore):
    """A MessageStore on disk, made by `LmdbEnvironment.link`. Values are packed and written behind the training."""

    def __init__(
        self,
        environment: LmdbEnvironment,
        table: Table,
        fmt: ValueFormat,
        *,
        max_bytes: int | None = None,
        prefetch: int = 0,
    ) -> None:
        super().__init__(table.name, fmt, max_bytes=max_bytes, prefetch=prefetch)
        self._environment = environment
        self._table = table
        self._start_with(self._scan())

    def commit(self) -> None:
        """End a training step of this link; see MessageStore and `LmdbEnvironment.commit`."""
        self._check()
        self._environment.commit_link(self)

    def keeps_new(self) -> bool:
        """Whether samples that are not held may be put; see MessageStore."""
        return not self._environment.unwritten

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

    def _added(self, entry: Entry) -> None:
        self._environment.writer.submit(lambda: self._pack_ahead(entry))

    def _pack_ahead(self, entry: Entry) -> None:
        self._pack(entry)

    def _load_value(self, entry: Entry) -> bytearray | None:
        return self._environment.file.read(self._table, entry.sample)

    def _reload(self, table: Table) -> None:
        """The file under this store was replaced; `table` is its own there."""
        self._table = table
        self._start_anew(self._scan())

    def _has_changes(self) -> bool:
        return bool(self._changed)

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


Steps = Mapping[LmdbStore, Mapping[int, Entry | None]]  # by link, what became of each sample; None: deleted


class LmdbEnvironment:
    """The stores of one rank in `path`, a folder that no other process uses meanwhile.

    bits, group_size: how values are stored; max_bytes: budget of each link end, None for no limit; prefetch:
    micro-batches loaded ahead. map_bytes: address space to start with, grows by itself. on_write_error: "stop", or
    "continue" where the disk refuses a write: see `_write`.
    Raises StoreError if the folder is in use, cannot be written, or lost data in a power cut.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bits: int = 32,
        group_size: int | None = None,
        max_bytes: int | None = None,
        prefetch: int = 0,
        map_bytes: int = MAP_BYTES,
        on_write_error: str = "stop",
    ) -> None:
        if on_write_error not in ("stop", "continue"):
            raise ConfigError("store.on_write_error", on_write_error, "'stop' or 'continue'")
        self.path = Path(path)
        self.unwritten: Steps = {}  # what the disk refused; kept in memory, replaced by the writing thread only
        self._goes_on = on_write_error == "continue"
        self._warned = False
        self._format = ValueFormat(bits, group_size)
        self._options: dict[str, Any] = {"max_bytes": max_bytes, "prefetch": prefetch}
        LinkStore("check", self._format, **self._options)  # a wrong option is an error before any file is made
        self._lock = threading.RLock()
        self._stores: dict[str, LmdbStore] = {}
        self._described: dict[str, dict[str, Any]] = {}
        self._ended: dict[LmdbStore, dict[int, Entry | None]] = {}  # ended by their link, not yet written
        self._pid = os.getpid()
        self._closed = False
        self._folder = Folder(self.path)
        try:
            self._prove_sound()
            self.file = ValueFile(self.path, map_bytes=map_bytes)
            try:
                check_format(self.file)
            except BaseException:
                self.file.close()
                raise
        except BaseException:
            self._folder.release()
            raise
        self.writer = Writer(f"message store {self.path}")
        atexit.register(self.close)

    @property
    def run(self) -> str | None:
        """The id of the run whose messages these are; None if no run has used the store."""
        self.check()
        return read_run(self.file)

    def bind(self, run: str) -> None:
        """From now on the store belongs to this run."""
        self.check()
        if read_run(self.file) != run:
            self.file.set_meta(RUN_KEY, run.encode())

    def save(self, folder: str | os.PathLike[str]) -> bool:
        """Copy everything committed into `folder`, for `restore`; call it between steps. False, and no copy, while the
        disk refuses some of it."""
        self.flush()
        if self.unwritten:
            return False
        copy_file(self.path / DATA_FILE, Path(folder) / DATA_FILE)
        return True

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Hold what `save` wrote to `folder` in place of all else, in the stores that are open; False if it is not
        there. StoreError if its links' settings differ; then the environment is of no use any more."""
        saved = Path(folder) / DATA_FILE
        if not saved.is_file():
            return False
        self.check()
        with self._lock:
            self._ended = {}
            self.writer.drain()
            self.unwritten = {}
            self.file.close()
            self._folder.mark_unsynced()
            (self.path / LOCK_FILE).unlink(missing_ok=True)
            copy_file(saved, self.path / DATA_FILE)
            self.file = ValueFile(self.path)
            check_format(self.file)
            for store in self._stores.values():
                if not store._closed:
                    check_settings(self.file, store.link, self._described[store.link])
                    store._reload(self.file.table(store.link))
        return True

    def link(self, name: str, settings: Mapping[str, Any]) -> LmdbStore:
        """The store of one link end, kept in the named database `name`.

        settings: what its messages depend on, JSON values. StoreError if the stored ones were made with others.
        """
        self.check()
        if not LINK_NAME.fullmatch(name) or name == META.decode():
            raise ConfigError("link", name, "letters, digits, '.', '_' and '-', at most 100, and not 'meta'")
        with self._lock:
            if name in self._stores and not self._stores[name]._closed:
                raise StoreError(f"{self.path}: store of {name}: is open already")
            described = {**settings, "bits": self._format.bits, "grouping": self._format.grouping}
            check_settings(self.file, name, described)
            self._described[name] = described
            self._stores[name] = LmdbStore(self, self.file.table(name), self._format, **self._options)
            return self._stores[name]

    def commit(self) -> None:
        """End a training step of the rank: what all links put and dropped becomes durable in one transaction."""
        self.check()
        with self._lock:
            for store in self._stores.values():
                self._end_step(store)
            self._write_ended()

    def commit_link(self, store: LmdbStore) -> None:
        """End a step of one link. It is written once no other link is in the middle of a step, so that links that are
        committed one after the other share a transaction; at the latest when `store` ends its next step."""
        with self._lock:
            if store in self._ended:
                self._write_ended()
            self._end_step(store)
            others = (other for other in self._stores.values() if other not in self._ended and not other._closed)
            if not any(other._has_changes() for other in others):
                self._write_ended()

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut too, but for what it goes on refusing."""
        self.check()
        with self._lock:
            self._write_ended()
        self.writer.submit(self._write_refused)
        self.writer.submit(self.file.sync)
        self.writer.drain()

    def check(self) -> None:
        """Raise StoreError if the environment is closed or a background write failed."""
        if self._closed:
            raise StoreError(f"{self.path}: message store used after close")
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
                self._say_unwritten()
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
        """Size of the LMDB file."""
        return self.file.size_bytes()

    def _end_step(self, store: LmdbStore) -> None:
        if store._closed:
            return
        step = store._end_step()
        if step:
            self._ended.setdefault(store, {}).update(step)

    def _write_ended(self) -> None:
        if not self._ended:
            return
        steps, self._ended = self._ended, {}
        waited = self.writer.submit_step(lambda: self._write(steps))
        for store in steps:
            store._waited(waited / len(steps))

    def _write(self, steps: Steps) -> None:
        """Write one step, and what the disk refused of earlier ones.

        With on_write_error "continue" a refused step stays in memory: first without its new samples, whose pages are
        the ones that lack, then all of it. Both ends of a link go on alike, as reads find it there, and every later
        step tries again; the file keeps what it last committed. Meanwhile `keeps_new` says that no new sample may come.
        """
        merged = {s: {**self.unwritten.get(s, {}), **steps.get(s, {})} for s in {**self.unwritten, **steps}}
        try:
            self._write_once(merged)
        except StoreError as error:
            if not (self._goes_on and of_the_disk(error)):
                raise
            self._go_on_without(merged, error)
        else:
            self.unwritten = {}

    def _write_refused(self) -> None:
        if self.unwritten:
            self._write({})

    def _say_unwritten(self) -> None:
        count = sum(len(step) for step in self.unwritten.values())
        if count:
            warnings.warn(
                f"{self.path}: the disk refused the last messages of {count} samples to the end. When the run goes on, "
                "they are sent whole once",
                stacklevel=3,
            )

    def _go_on_without(self, merged: Steps, error: StoreError) -> None:
        known = {s: {i: e for i, e in step.items() if i in s._table.places} for s, step in merged.items()}
        try:
            self._write_once(known)
            rest = {s: {i: e for i, e in step.items() if i not in known[s]} for s, step in merged.items()}
            self.unwritten = {s: step for s, step in rest.items() if step}
        except StoreError:
            self.unwritten = merged
        held = sum(entry.size for step in self.unwritten.values() for entry in step.values() if entry is not None)
        if held > UNWRITTEN_BYTES:
            raise StoreError(f"{error} ({held} bytes wait in memory, the limit is {UNWRITTEN_BYTES})") from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{error}. As store.on_write_error is 'continue', samples that are not stored yet are sent in full "
                "precision until the disk takes writes again",
                stacklevel=2,
            )

    def _write_once(self, steps: Steps) -> None:
        changes: dict[Table, dict[int, bytearray | None]] = {}
        for store, step in steps.items():
            values = changes.setdefault(store._table, {})
            for sample, entry in step.items():
                values[sample] = store._pack(entry) if entry is not None else None
        self._folder.mark_unsynced()
        self.file.write(changes)
        for step in steps.values():
            for entry in step.values():
                if entry is not None:
                    entry.release()

    def _prove_sound(self) -> None:
        if not self._folder.restarted() or not (self.path / DATA_FILE).is_file():
            return
        problem = unsound(self.path)
        if problem is not None:
            raise StoreError(
                f"{self.path}: the machine stopped before everything was on disk, and the message store is damaged: "
                f"{problem}. `pipecomp store prune {self.path}` keeps what is whole, with --everything nothing; what "
                "is missing is sent in full precision once"
            )
