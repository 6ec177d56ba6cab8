"""One rank's LMDB file: its metadata, and values stored as records of several pieces.

Note: [Pieces and slots]
    A value is cut into pieces so that little of LMDB's pages stays empty. As one record it would take whole pages of
    its own: 41 % waste for 8.7 KB. Its last pieces fill runs of exactly 16, 4 or 1 pages (few sizes, so that freed runs
    fit later values), and the rest, beginning with the header, goes in pieces of an eighth of a page into pages shared
    with other samples. Records are keyed by a slot, assigned in the order of first visits, so that new records are
    appended and leave full pages behind; keyed by sample id they would leave a third of every page empty.

        key of a value's first piece: slot u64, 0 u16, sample u64; of its others: slot u64, piece u16. Big-endian.

Note: [No fsync per step]
    Transactions are not synced (`sync=False`): a killed process loses nothing that it committed, because the system
    already has it; only a power cut or a crash of the system can. Such a loss costs one more first visit per sample,
    while an fsync per step costs every step. `sync()` is for checkpoints.

Note: [Damage]
    LMDB trusts its file: a damaged page can crash the process, and so does a mapped page behind the end of a truncated
    file. `has_all_pages` therefore compares its length with its headers before the file is opened, and `page_problems`
    walks the pages without LMDB (`lmdb.verify`) where `lmdb_folder` asks for a full check. Metadata and values have a
    CRC-32 each.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from pipecomp.buffers.base import DamagedStoreError
from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, store_errors
from pipecomp.buffers.value import HEADER_BYTES, verify_value
from pipecomp.errors import ConfigError, StoreError

MAP_BYTES = 1 << 30  # address space, not memory and not disk; grows by doubling
MAX_LINKS = 255
META = b"meta"  # name of the database with the metadata; the others are links
FORMAT_KEY, FORMAT = b"format", b"1"
RUN_KEY = b"run"
_DISPOSABLE_KEY, _YES = b"disposable", b"yes"

_CRC = b"crc:"  # prefix of the key of a metadata record's CRC-32
_LOCK_BYTES = 8192  # size of LMDB's lock file: 126 readers
_RUNS = (16, 4, 1)
_PAGE_HEADER = 16
_FILE_HEADER = struct.Struct("=II16xI92xQQ")  # after a page header: magic, version, page size, last page, transaction
_MAGIC = 0xBEEFC0DE
_RECORD_OVERHEAD = 8 + 10 + 2  # a record's header, its usual key, its entry in the page's index
_FIRST = struct.Struct(">QHQ")
_NEXT = struct.Struct(">QH")
_Result = TypeVar("_Result")


class ValueLocation(NamedTuple):
    """Slot of a sample's value, and its size in bytes."""

    slot: int
    size: int


class ValueHead(NamedTuple):
    """Beginning of a stored value. sample: from the key."""

    sample: int
    slot: int
    head: bytes  # HEADER_BYTES, fewer if the value is damaged


class CheckedValue(NamedTuple):
    """A stored value with the result of its check: None for one of `value` and `problem`."""

    sample: int
    slot: int
    value: bytearray | None
    problem: str | None


@dataclass(eq=False)
class LinkTable:
    """The values of one link. `locations` is read by any thread and changed by the writing one, after its commit."""

    name: str
    handle: Any
    locations: dict[int, ValueLocation] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    end: int = 0

    def where(self, sample: int) -> str:
        """Name a sample of this link in an error."""
        return f"store of {self.name}, sample {sample}"

    def load(self, locations: Mapping[int, ValueLocation]) -> None:
        """Start with the values found in the file."""
        self.locations = dict(locations)
        used = {location.slot for location in locations.values()}
        self.end = max(used, default=-1) + 1
        self.free = sorted(set(range(self.end)) - used)

    def new_slot(self) -> int:
        """Take a free slot, or the next one."""
        if self.free:
            return heapq.heappop(self.free)
        self.end += 1
        return self.end - 1


@lru_cache(maxsize=4096)
def piece_sizes(size: int, page: int) -> tuple[int, ...]:
    """Return the sizes of a value's pieces, in order; the first piece always holds the whole header."""
    runs: list[int] = []
    rest = size
    for pages in _RUNS:
        run = pages * page - _PAGE_HEADER
        count = max(0, rest - HEADER_BYTES) // run
        runs += [run] * count
        rest -= count * run
    count = -(-rest // ((page - _PAGE_HEADER) // 8 - _RECORD_OVERHEAD))
    small, larger = divmod(rest, count)
    return (*(small + (i < larger) for i in range(count)), *runs)


def link_key(name: str) -> bytes:
    """Return the metadata key of a link's settings."""
    return b"link:" + name.encode()


def has_all_pages(file: Path) -> bool:
    """Return whether both headers of an LMDB file are plausible and it is as long as the newer one requires."""
    with store_errors(file.parent, "read the message store"), file.open("rb") as data:
        size = file.stat().st_size
        headers = []
        for _ in range(2):
            header = data.read(_PAGE_HEADER + _FILE_HEADER.size)[_PAGE_HEADER:]
            if len(header) < _FILE_HEADER.size:
                return False
            headers.append(_FILE_HEADER.unpack(header))
            data.seek(headers[0][2])  # the second page has the other header
    magic, _, page_size, *_ = headers[0]
    last_page = max(headers, key=lambda header: header[-1])[3]
    return magic == _MAGIC and headers[0][:3] == headers[1][:3] and size >= (last_page + 1) * page_size


def page_problems(path: Path) -> list[str]:
    """List problems of the pages of the file in folder `path`, without LMDB; StoreError if it is unreadable."""
    with store_errors(path, "check the message store"):
        try:
            return [
                f"{path}: damaged pages: {problem}" for problem in verify_pages(str(path / DATA_FILE), subdir=False)
            ]
        except VerifyError as error:
            return [f"{path}: damaged pages: {error}"]


def find_damage(path: Path) -> str | None:
    """Check pages, metadata and every value of the store in folder `path`; return the first problem, or None."""
    if pages := page_problems(path):
        return pages[0]
    with closing(ValueFile(path, readonly=True)) as file:
        if problems := file.problems():
            return problems[0][1]
        checked = (value for name in file.table_names() for value in file.check_values(file.table(name, create=False)))
        return next((value.problem for value in checked if value.problem is not None), None)


class ValueFile:
    """The LMDB file of one rank. One thread writes at a time; any thread reads.

    Args:
        path: the rank's folder, locked by a `RankFolder`.
        map_bytes: address space to start with.
        readonly: open an existing file, which has no writer.

    Raises:
        DamagedStoreError: LMDB cannot use the file.
        StoreError: it cannot be opened, or is not a message store.
    """

    def __init__(self, path: Path, *, map_bytes: int = MAP_BYTES, readonly: bool = False) -> None:
        self.path = path
        self._reading = threading.Lock()  # held by readers; the map must not move beneath them
        self._writing = threading.RLock()
        with store_errors(path, "open the message store"):
            if not readonly:
                # LMDB maps its lock file: without room on the disk the system would kill this process.
                lock_file = path / LOCK_FILE
                lock_file.touch(mode=0o600)
                if lock_file.stat().st_size < _LOCK_BYTES:
                    lock_file.write_bytes(bytes(_LOCK_BYTES))
            self._env = lmdb.open(
                str(path),
                map_size=max(map_bytes, 2 * self.size_bytes()),
                max_dbs=MAX_LINKS + 1,
                readonly=readonly,
                mode=0o600,
                lock=not readonly,
                sync=False,
                metasync=False,
            )
            try:
                # A file with other contents belongs to another program.
                self._meta = self._env.open_db(META, create=not readonly and not self._env.stat()["entries"])
                self._page = self._env.stat()["psize"]
                self._identity = self._file_identity()
            except lmdb.NotFoundError as error:
                self._env.close()
                raise StoreError(
                    f"{path}: {DATA_FILE} is not a message store. Give another store.path, or remove it with "
                    f"`pipecomp store prune {path} --everything`"
                ) from error
            except BaseException:
                self._env.close()
                raise

    def size_bytes(self) -> int:
        """Return the size of the file."""
        file = self.path / DATA_FILE
        return file.stat().st_size if file.exists() else 0

    # Metadata.

    def meta(self, key: bytes) -> bytes | None:
        """Read a metadata record. DamagedStoreError if its CRC-32 is wrong; records of older versions have none."""
        with store_errors(self.path, "read"), self._reading, self._env.begin(db=self._meta) as txn:
            value, crc = txn.get(key), txn.get(_CRC + key)
        if crc is not None and (value is None or crc != zlib.crc32(value).to_bytes(4, "big")):
            raise DamagedStoreError(f"{self.path}: damaged metadata: {key.decode()}")
        return value

    def set_meta(self, key: bytes, value: bytes) -> None:
        """Write a metadata record."""

        def body(txn: lmdb.Transaction) -> None:
            txn.put(key, value, db=self._meta)
            txn.put(_CRC + key, zlib.crc32(value).to_bytes(4, "big"), db=self._meta)

        self._transact(body)

    def run(self) -> str | None:
        """Return the id of the run that the store belongs to, None if no run has used it."""
        run = self.meta(RUN_KEY)
        return None if run is None else run.decode(errors="replace")

    def disposable(self) -> bool:
        """Return whether nothing lets another process continue with the store; see StoreEnvironment."""
        return self.meta(_DISPOSABLE_KEY) == _YES

    def bind(self, run: str, *, disposable: bool) -> None:
        """Assign the store to a run."""
        if self.run() != run:
            self.set_meta(RUN_KEY, run.encode())
        if self.disposable() != disposable:
            self.set_meta(_DISPOSABLE_KEY, _YES if disposable else b"")

    def check_format(self) -> None:
        """Write the format of a new file; StoreError for a file of another format."""
        found = self.meta(FORMAT_KEY)
        if found is None:
            self.set_meta(FORMAT_KEY, FORMAT)
        elif found != FORMAT:
            raise StoreError(
                f"{self.path}: message store of format {found.decode(errors='replace')}, this version reads "
                f"{FORMAT.decode()}. Give another store.path, or remove it with `pipecomp store prune --everything`"
            )

    def check_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write the settings of a new link.

        A cached activation depends on model, cut and bits: the other end holds none that was made with other settings.

        Raises:
            StoreError: the link was stored with other settings.
            ConfigError: the settings are not JSON values.
        """
        try:
            text = json.dumps(settings, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError("settings", dict(settings), f"JSON values: {error}") from error
        if self.meta(link_key(name)) is None:
            self.set_meta(link_key(name), text.encode())
        elif differences := self.settings_differences(name, settings):
            raise StoreError(
                f"{self.path}: {name} was stored with other settings ({differences}). Keep them, set another "
                f"store.path, or remove what is stored with `pipecomp store prune {self.path} --link {name}`"
            )

    def settings_differences(self, name: str, settings: Mapping[str, Any]) -> str:
        """Describe how `settings` differ from those that a link was stored with; "" without a difference."""
        found = self.meta(link_key(name))
        if found is None:
            return ""
        mine, stored = json.loads(json.dumps(settings)), json.loads(found)
        return "; ".join(
            f"{k}: {mine.get(k, 'not set')!r}, stored with {stored.get(k, 'not set')!r}"
            for k in sorted({*mine, *stored})
            if mine.get(k) != stored.get(k) or (k in mine) != (k in stored)
        )

    def problems(self, *, keys: bool = True) -> list[tuple[str | None, str]]:
        """Check metadata, and with `keys` the keys of all values.

        Returns:
            (link, problem) pairs, link None for the file as a whole.
        """
        found: list[tuple[str | None, str]] = []
        try:
            names = self.table_names()
        except DamagedStoreError as error:
            return [(None, str(error))]
        for name, key in ((None, FORMAT_KEY), (None, RUN_KEY), *((name, link_key(name)) for name in names)):
            try:
                value = self.meta(key)
                if name is not None:
                    if value is None:
                        found.append((name, f"{self.path}: {name} has no settings: its name, or theirs, is damaged"))
                    if keys:
                        self.scan(self.table(name, create=False))
            except DamagedStoreError as error:
                found.append((name, str(error)))
        return found

    # Links and their values.

    def table_names(self) -> list[str]:
        """List the links that have a table."""
        with store_errors(self.path, "read"), self._reading, self._env.begin() as txn, txn.cursor() as cursor:
            keys = [key for key in cursor.iternext(values=False) if key != META]
        try:
            return [key.decode() for key in keys]
        except UnicodeDecodeError as error:
            raise DamagedStoreError(f"{self.path}: damaged: a link is named {error.object!r}") from error

    def table(self, name: str, *, create: bool = True) -> LinkTable:
        """Open the table of a link; its `locations` are empty until they are loaded from `scan`."""
        if create and name not in self.table_names():
            return LinkTable(name, self._transact(lambda txn: self._env.open_db(name.encode(), txn=txn)))
        with store_errors(self.path, "read"), self._writing:
            return LinkTable(name, self._env.open_db(name.encode(), create=False))

    def scan(self, table: LinkTable) -> list[ValueHead]:
        """Read the first pieces of all values, by slot. DamagedStoreError for a key that cannot be one."""
        heads: list[ValueHead] = []
        limit = self.size_bytes() // HEADER_BYTES  # all slots up to the last one were used at one time
        with store_errors(self.path, "read"), self._reading, self._cursor(table) as cursor:
            more = cursor.first()
            while more:
                key = bytes(cursor.key())
                slot, piece, sample = _FIRST.unpack(key) if len(key) == _FIRST.size else (limit, 0, 0)
                if piece or slot >= limit:
                    raise DamagedStoreError(
                        f"{self.path}: store of {table.name}: damaged key {key[:32].hex()}, expected a value's first"
                    )
                heads.append(ValueHead(sample, slot, bytes(cursor.value()[:HEADER_BYTES])))
                more = cursor.set_range(_NEXT.pack(slot + 1, 0))
        return heads

    def check_values(self, table: LinkTable) -> Iterator[CheckedValue]:
        """Read every value of a link and compare it with its header, its key's sample and its CRC-32."""
        for head in self.scan(table):
            where = table.where(head.sample)
            try:
                value = self.read_at(table, head.slot, head.sample)
                sample = verify_value(value, where).sample
                if sample != head.sample:
                    raise DamagedStoreError(f"{where}: holds a value of sample {sample}")
            except DamagedStoreError as error:
                yield CheckedValue(head.sample, head.slot, None, str(error))
            else:
                yield CheckedValue(head.sample, head.slot, value, None)

    def read(self, table: LinkTable, sample: int) -> bytearray | None:
        """Read a sample's value, None if it has no location. DamagedStoreError if pieces are missing."""
        with self.reader(table) as read:
            return read(sample)

    @contextmanager
    def reader(self, table: LinkTable) -> Iterator[Callable[[int], bytearray | None]]:
        """Open a snapshot of a table; yields `read` for one sample after the other."""
        with store_errors(self.path, f"read {table.name}"), self._reading, self._cursor(table) as cursor:

            def read(sample: int) -> bytearray | None:
                location = table.locations.get(sample)
                if location is None:
                    return None
                with store_errors(self.path, f"read sample {sample} of {table.name}"):
                    return self._join(cursor, table, location.slot, sample, location.size)

            yield read

    def read_at(self, table: LinkTable, slot: int, sample: int) -> bytearray:
        """Read the value in a slot, whatever its size."""
        action = f"read sample {sample} of {table.name}"
        with store_errors(self.path, action), self._reading, self._cursor(table) as cursor:
            return self._join(cursor, table, slot, sample, None)

    def _join(self, cursor: Any, table: LinkTable, slot: int, sample: int, size: int | None) -> bytearray:
        """Join a value's pieces; a known size is checked before anything is allocated."""
        prefix = slot.to_bytes(8, "big")
        items: Iterable[Any] = cursor if cursor.set_key(_FIRST.pack(slot, 0, sample)) else ()
        if size is not None:
            items = list(itertools.islice(items, len(piece_sizes(size, self._page))))
        # Keys ascend: if the last one is of the slot, all are.
        if not isinstance(items, list) or (items and items[-1][0][:8] != prefix):
            items = itertools.takewhile(lambda item: item[0][:8] == prefix, items)
        pieces = [piece for _, piece in items]
        total = sum(map(len, pieces))
        if size is not None and total != size:
            raise DamagedStoreError(f"{table.where(sample)}: has {total} of {size} bytes")
        return bytearray().join(pieces)

    def write(self, changes: Mapping[LinkTable, Mapping[int, bytearray | None]]) -> None:
        """Write all values, and delete those that are None, in one transaction."""
        puts: dict[LinkTable, list[tuple[int, ValueLocation, bytearray, bool]]] = {}
        surplus: list[tuple[LinkTable, list[bytes]]] = []  # pieces of longer values that are replaced
        freed: list[tuple[LinkTable, int, int]] = []
        ends = {table: table.end for table in changes}
        for table, values in changes.items():
            puts[table] = []
            for sample, value in values.items():
                old, end = table.locations.get(sample), table.end
                if value is not None:
                    slot = old.slot if old is not None else table.new_slot()
                    puts[table].append((sample, ValueLocation(slot, len(value)), value, slot == end))
                    if old is not None:
                        after, before = (len(piece_sizes(size, self._page)) for size in (len(value), old.size))
                        surplus.append((table, _keys(slot, sample, after, before)))
                elif old is not None:
                    freed.append((table, sample, old.slot))

        def body(txn: lmdb.Transaction) -> None:
            for table, keys in surplus:
                for key in keys:
                    txn.delete(key, db=table.handle)
            for table, _, slot in freed:
                _delete_slot(txn, table, slot)
            for table, its in puts.items():
                with txn.cursor(db=table.handle) as cursor:
                    for sample, location, value, append in its:
                        self._put(cursor, table, location.slot, sample, value, append)

        try:
            self._transact(body)
        except BaseException:
            for table, end in ends.items():  # give back the slots, so that retries do not use up others
                taken = (location.slot for sample, location, *_ in puts[table] if sample not in table.locations)
                table.free, table.end = sorted([*table.free, *(slot for slot in taken if slot < end)]), end
            raise
        for table, its in puts.items():
            table.locations.update((sample, location) for sample, location, *_ in its)
        for table, sample, slot in freed:
            del table.locations[sample]
            heapq.heappush(table.free, slot)

    def delete_slots(self, table: LinkTable, slots: Iterable[int]) -> None:
        """Delete the values in these slots."""

        def body(txn: lmdb.Transaction) -> None:
            for slot in slots:
                _delete_slot(txn, table, slot)

        self._transact(body)

    def sync(self) -> None:
        """Wait until everything committed is on disk."""
        with store_errors(self.path, "sync"):
            self._env.sync(True)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._writing, self._reading:
            self._env.close()

    @contextmanager
    def _cursor(self, table: LinkTable) -> Iterator[Any]:
        """Open a snapshot of a table; keys and values are views that end with it."""
        with self._env.begin(db=table.handle, buffers=True) as txn, txn.cursor() as cursor:
            yield cursor

    def _put(self, cursor: Any, table: LinkTable, slot: int, sample: int, value: bytearray, append: bool) -> None:
        sizes, whole = piece_sizes(len(value), self._page), memoryview(value)
        ends = itertools.accumulate(sizes, initial=0)
        pieces = [whole[start:end] for start, end in itertools.pairwise(ends)]
        items = list(zip(_keys(slot, sample, 0, len(sizes)), pieces, strict=True))
        _, added = cursor.putmulti(items, append=append)
        if added != len(items):  # LMDB's only sign that it refuses to append below existing keys
            raise StoreError(f"{self.path}: store of {table.name}: slots are out of order")

    def _transact(self, body: Callable[[lmdb.Transaction], _Result]) -> _Result:
        with store_errors(self.path, "write"), self._writing:
            if self._file_identity() != self._identity:  # LMDB would go on with a file that was unlinked
                raise OSError(errno.ENOENT, f"{DATA_FILE} was replaced by another file since it was opened")
            while True:
                try:
                    with self._env.begin(write=True) as txn:
                        return body(txn)
                except lmdb.MapFullError:
                    self._grow()

    def _grow(self) -> None:
        # LMDB moves the map: no transaction of this process may be open.
        with self._reading:
            size = self._env.info()["map_size"]
            # It unmaps the old map first, and closes the file for good if there is no room for the new one.
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
            self._env.set_mapsize(2 * size)

    def _file_identity(self) -> tuple[int, int]:
        status = os.stat(self.path / DATA_FILE)
        return status.st_dev, status.st_ino


def _keys(slot: int, sample: int, first: int, end: int) -> list[bytes]:
    return [_NEXT.pack(slot, i) if i else _FIRST.pack(slot, 0, sample) for i in range(first, end)]


def _delete_slot(txn: lmdb.Transaction, table: LinkTable, slot: int) -> None:
    """Delete all pieces in a slot; a damaged header may count them wrongly."""
    prefix = slot.to_bytes(8, "big")
    with txn.cursor(db=table.handle) as cursor:
        cursor.set_range(prefix)
        while cursor.key()[:8] == prefix:  # a cursor at the end has an empty key
            cursor.delete()
