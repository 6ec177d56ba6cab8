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

from pipecomp.buffers.base import DamagedStoreError
from pipecomp.buffers.lmdb_file import (
    MAP_BYTES,
    CheckedValue,
    LinkTable,
    ValueFile,
    ValueLocation,
    find_damage,
    has_all_pages,
    page_problems,
)
from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, RankFolder, copy_file, is_refused_write
from pipecomp.buffers.memory import MemoryStore
from pipecomp.buffers.store import BackgroundWriter, LinkStore, Read, StoreEntry
from pipecomp.buffers.value import ValueFormat, read_header, stored_size
from pipecomp.errors import ConfigError, StoreError

LINK_NAME = re.compile(r"(?!meta$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # "meta" is the database of metadata
MAX_REFUSED_BYTES = 1 << 30  # of refused values in memory, before a run that continues without the disk stops

StepChanges = Mapping[int, StoreEntry | None]  # by sample; None: deleted


class StepWriter:
    """Writes steps to the file, each in one transaction, on the writing thread alone.

    Args:
        path: path of the folder, for warnings.
        fmt: format of the values.
        on_write_error: "stop" raises the error. With "continue" a refused step stays in memory, in `refused`: first
            without its new samples, which need new pages, then all of it. Reads find it there, so both ends of a link
            stay in agreement, and every later step retries; the file keeps its last commit. Meanwhile `accepts_new` of
            the stores is False.
    """

    def __init__(self, path: Path, fmt: ValueFormat, on_write_error: str) -> None:
        if on_write_error not in ("stop", "continue"):
            raise ConfigError("store.on_write_error", on_write_error, "'stop' or 'continue'")
        self.refused: Mapping[LinkTable, StepChanges] = {}
        self._path, self._format = path, fmt
        self._continues = on_write_error == "continue"
        self._warned = False

    def write(self, file: ValueFile, steps: Mapping[LinkTable, StepChanges]) -> None:
        """Write these changes and those that the disk refused earlier."""
        merged = {t: {**self.refused.get(t, {}), **steps.get(t, {})} for t in {**self.refused, **steps}}
        try:
            self._write(file, merged)
            self.refused = {}
            return
        except StoreError as raised:
            if not (self._continues and is_refused_write(raised)):
                raise
            error = raised
        known = {t: {i: e for i, e in step.items() if i in t.locations} for t, step in merged.items()}
        try:
            self._write(file, known)
            rest = {t: {i: e for i, e in step.items() if i not in known[t]} for t, step in merged.items()}
            self.refused = {t: step for t, step in rest.items() if step}
        except StoreError:
            self.refused = merged
        size = sum(entry.size for step in self.refused.values() for entry in step.values() if entry is not None)
        if size > MAX_REFUSED_BYTES:
            raise StoreError(f"{error} ({size} unwritten bytes in memory, limit {MAX_REFUSED_BYTES})") from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{error}. As store.on_write_error is 'continue', samples that are not stored yet are sent as first "
                "visits until the disk accepts writes again",
                stacklevel=2,
            )

    def retry(self, file: ValueFile) -> None:
        """Write the refused changes, if there are any."""
        if self.refused:
            self.write(file, {})

    def warn_of_loss(self) -> None:
        """Warn about changes that the disk refused to the end of the run."""
        count = sum(map(len, self.refused.values()))
        if count:
            warnings.warn(
                f"{self._path}: until the end, the disk refused the latest activations of {count} samples. A resumed "
                "run sends them as first visits again",
                stacklevel=3,
            )

    def _write(self, file: ValueFile, steps: Mapping[LinkTable, StepChanges]) -> None:
        file.write(
            {
                table: {i: None if e is None else e.pack(self._format, table.where(i)) for i, e in step.items()}
                for table, step in steps.items()
            }
        )
        for step in steps.values():
            for entry in step.values():
                if entry is not None:
                    entry.release()


class LmdbStore(LinkStore):
    """A MessageStore on disk, opened by `LmdbEnvironment.link`. Values are packed and written in the background.

    settings: those that its activations depend on. options: see LinkStore.
    """

    def __init__(
        self,
        environment: LmdbEnvironment,
        table: LinkTable,
        fmt: ValueFormat,
        settings: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(table.name, fmt, **options)
        self.settings = settings
        self._environment = environment
        self._load_index(table)

    def commit(self) -> None:
        self._check()
        self._environment.commit([self])

    def accepts_new(self) -> bool:
        return not self._environment.steps.refused

    def flush(self) -> None:
        self._check()
        self._environment.flush()

    def close(self) -> None:
        if not self._closed:
            self._stop()
            self._environment.flush()

    def _check(self) -> None:
        super()._check()
        self._environment.check()

    def _after_put(self, entries: Sequence[StoreEntry]) -> None:
        if self._packs_early:
            self._environment.writer.submit(lambda: self._pack_all(entries))

    def _reader(self) -> AbstractContextManager[Read]:
        return self._environment.file.reader(self._table)

    def _load_value(self, sample: int) -> bytearray | None:
        return self._environment.file.read(self._table, sample)

    def _drop_damaged(self, entry: StoreEntry, error: DamagedStoreError) -> None:
        self._environment.damaged = True
        super()._drop_damaged(entry, error)

    def _load_index(self, table: LinkTable) -> None:
        """Load the index from `table` of the environment's file; values with damaged headers are dropped."""
        entries, locations, damaged = [], {}, []
        for head in self._environment.file.scan(table):
            where = self.where(head.sample)
            try:
                header = read_header(head.head, where)
                if header.sample != head.sample:
                    raise DamagedStoreError(f"{where}: holds a value of sample {header.sample}")
            except DamagedStoreError as error:
                damaged.append(CheckedValue(head.sample, head.slot, None, str(error)))
                continue
            size = stored_size(header)
            entries.append(StoreEntry(head.sample, header.version, size, crc=header.crc))
            locations[head.sample] = ValueLocation(head.slot, size)
        if damaged:
            self._environment.damaged = True
            self._environment.drop_damaged(self._environment.file, table, damaged)
        table.load(locations)
        self._table = table
        self._reset(entries)


class LmdbEnvironment:
    """The stores of one rank in `path`, a folder that this process locks.

    A file that LMDB cannot use, or with damaged pages or metadata, is set aside with a warning that names its new path,
    and a new one begins. Damaged values are dropped with a warning. All pages and values are checked only if the store
    was not closed in order: see `lmdb_folder`, Note [Full check]. Options and errors as for `open_environment`.

    Args:
        path: the rank's folder.
        bits: bits of a stored value.
        group_size: group size of the quantizer.
        map_bytes: address space to start with; it grows by itself.
        on_write_error: see StepWriter.
        options: see LinkStore.

    Attributes:
        damaged: damage was found after the opening, so the next one checks everything.
        temporary: see StoreEnvironment.
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
        self.path = Path(path).absolute()  # the program may change its working directory
        self._format = ValueFormat(bits, group_size)
        self.steps = StepWriter(self.path, self._format, on_write_error)
        self._options = options
        MemoryStore(**options).close()  # raises for an invalid option, before any file is made
        self._lock = threading.RLock()
        self._stores: dict[str, LmdbStore] = {}
        self._pid = os.getpid()
        self._closed = False
        self.damaged = self.temporary = False
        self._folder = RankFolder(self.path)
        with ExitStack() as undo:
            undo.callback(self._folder.release)
            if not self._folder.unsynced:
                undo.callback(self._folder.mark_synced)
            self._folder.mark_unsynced()
            try:
                self.file = self._open_file(map_bytes)
            except DamagedStoreError as error:
                aside = self._folder.set_aside()
                warnings.warn(
                    f"{error}. The file is set aside as {aside}, and a new store begins: samples are sent as first "
                    "visits again",
                    stacklevel=2,
                )
                self.file = self._open_file(map_bytes)
            undo.pop_all()
        self.writer = BackgroundWriter(f"message store {self.path}")
        atexit.register(self.close)

    @property
    def run(self) -> str | None:
        self.check()
        return self.file.run()

    @property
    def disposable(self) -> bool:
        self.check()
        return self.file.disposable()

    def bind(self, run: str, *, disposable: bool) -> None:
        self.check()
        self.file.bind(run, disposable=disposable)

    def save(self, folder: str | os.PathLike[str]) -> bool:
        self.flush()
        if self.steps.refused:
            return False
        copy_file(self.path / DATA_FILE, Path(folder) / DATA_FILE)
        return True

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Replace the contents of the open stores by the copy that `save` wrote to `folder`.

        Returns:
            False, and nothing changes, if there is no copy, or it is damaged or made with other settings, which gives a
            warning.
        """
        saved = Path(folder) / DATA_FILE
        if not saved.is_file():
            return False
        self.check()
        if (problem := find_damage(saved.parent)) is not None:
            warnings.warn(f"{folder} is damaged and is not used: {problem}", stacklevel=2)
            return False
        with closing(ValueFile(saved.parent, readonly=True)) as copy:
            differences = {n: copy.settings_differences(n, store.settings) for n, store in self._stores.items()}
        if any(differences.values()):
            words = ", ".join(f"{name} was stored with other settings ({d})" for name, d in differences.items() if d)
            warnings.warn(f"{folder} is not used: {words}", stacklevel=2)
            return False
        with self._lock:
            self.writer.drain()
            self.steps.refused = {}
            self.file.close()
            for name in (LOCK_FILE, DATA_FILE):  # first, as the disk may not have room for both files
                (self.path / name).unlink(missing_ok=True)
            copy_file(saved, self.path / DATA_FILE)
            self.file = ValueFile(self.path)
            self.file.check_format()
            for store in self._stores.values():
                if not store._closed:
                    self.file.check_settings(store.link, store.settings)
                    store._load_index(self.file.table(store.link))
        return True

    def link(self, name: str, settings: Mapping[str, Any]) -> LmdbStore:
        """Open the store of one end, kept in the named database `name`.

        Args:
            name: letters, digits, ".", "_" and "-".
            settings: those that its activations depend on, JSON values.

        Raises:
            StoreError: it was stored with other settings, or is open already.
            DamagedStoreError: a key is damaged; the next start checks the store.
            ConfigError: the name or the settings are invalid.
        """
        self.check()
        if not LINK_NAME.fullmatch(name):
            raise ConfigError("link", name, "letters, digits, '.', '_' and '-', at most 100, and not 'meta'")
        with self._lock:
            if name in self._stores and not self._stores[name]._closed:
                raise StoreError(f"{self.path}: store of {name}: is open already")
            settings = {**settings, "bits": self._format.bits, "grouping": self._format.grouping}
            self.file.check_settings(name, settings)
            # Changes that the disk refused before the link was closed keep their slots.
            refused = next((table for table in self.steps.refused if table.name == name), None)
            table = refused or self.file.table(name)
            try:
                self._stores[name] = LmdbStore(self, table, self._format, settings, **self._options)
            except DamagedStoreError as error:
                self.damaged = True
                raise DamagedStoreError(f"{error}. The next start checks the whole store: start again") from error
            return self._stores[name]

    def drop_damaged(self, file: ValueFile, table: LinkTable, damaged: Sequence[CheckedValue]) -> None:
        """Delete damaged values from the file, with a warning that names the first one."""
        file.delete_slots(table, [value.slot for value in damaged])
        warnings.warn(
            f"{self.path}: {damaged[0].problem}. {len(damaged)} damaged values are dropped, and their samples are sent "
            "as first visits again",
            stacklevel=2,
        )

    def commit(self, stores: Iterable[LmdbStore] | None = None) -> None:
        """End a training step: the changes of these links, or of all, become durable in one transaction."""
        self.check()
        with self._lock:
            ended = {store: store._end_step() for store in stores or self._stores.values() if not store._closed}
            steps = {store._table: step for store, step in ended.items() if step}
            if steps:
                waited = self.writer.submit_step(lambda: self.steps.write(self.file, steps))
                for store in ended:
                    store._add_wait(waited / len(ended))

    def flush(self) -> None:
        """Wait until every commit so far is on disk, safe from a power cut; not for writes that the disk refuses."""
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
        """Flush and release everything; safe to call twice. StoreError for a failed write that was not raised yet."""
        if self._closed or os.getpid() != self._pid:  # a forked child has neither the thread nor the lock
            return
        synced = False
        try:
            for store in self._stores.values():
                store._stop()
            if not self.writer.failed:
                self.flush()
                synced = True
                self.steps.warn_of_loss()
        finally:
            self._closed = True
            atexit.unregister(self.close)
            try:
                self.writer.close()
            finally:
                self.file.close()
                if self.temporary:
                    self._folder.remove_store()
                elif synced and not self.damaged:
                    self._folder.mark_synced()
                self._folder.release()

    def size_bytes(self) -> int:
        return self.file.size_bytes()

    def _open_file(self, map_bytes: int) -> ValueFile:
        """Open a sound file, or a new one; DamagedStoreError for a damaged one."""
        data = self.path / DATA_FILE
        check = self._folder.unsynced
        if data.is_file() and data.stat().st_size:
            check = check or not has_all_pages(data)
            if check and (pages := page_problems(self.path)):
                raise DamagedStoreError(pages[0])
        file = ValueFile(self.path, map_bytes=map_bytes)
        try:
            if problems := file.problems(keys=check):
                raise DamagedStoreError(problems[0][1])
            file.check_format()
            for table in [file.table(name, create=False) for name in file.table_names()] if check else ():
                if damaged := [value for value in file.check_values(table) if value.problem is not None]:
                    self.drop_damaged(file, table, damaged)
        except BaseException:
            file.close()
            raise
        return file
