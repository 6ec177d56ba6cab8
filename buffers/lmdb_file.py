"""Values in an LMDB file: how they are cut into records, written in one transaction, and read.

A value is cut into pieces so that little of LMDB's pages stays empty. As one record it would take whole pages of its
own: 41 % waste for 8.7 KB. Here its last pieces fill runs of exactly 16, 4 or 1 pages (few sizes, so that freed runs
fit what comes next), and what is left, beginning with the header, goes in pieces of an eighth of a page into pages
shared with other samples. Records are keyed by a slot, given out in the order of first visits, so that new records
are appended and leave full pages behind; keyed by sample id they would leave a third of every page empty.

    key of a value's first piece: slot u64, 0 u16, sample u64; of its others: slot u64, piece u16. Big-endian.

Transactions are not synced (`sync=False`): a process that is killed loses nothing it committed, because the system
has it already; only a power cut or a crash of the system can lose it. What is lost costs one more first visit per
sample, and an fsync per step costs every step. `sync()` is for checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import itertools
import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, explained
from pipecomp.buffers.value import HEADER_BYTES
from pipecomp.errors import ConfigError, StoreError

MAP_BYTES = 1 << 30  # address space, not memory and not disk; grows by doubling
MAX_LINKS = 255
_LOCK_BYTES = 8192  # LMDB's 126 places for readers
META = b"meta"
_CRC = b"crc:"  # before a remark's key: the key of its CRC-32
_RUNS = (16, 4, 1)
_PAGE_HEADER = 16
_RECORD_OVERHEAD = 8 + 10 + 2  # a record's header, its usual key, its entry in the page's index
_FIRST = struct.Struct(">QHQ")
_NEXT = struct.Struct(">QH")
_Value = TypeVar("_Value")


class Place(NamedTuple):
    """Where a sample's value is, and its size in bytes."""

    slot: int
    size: int


class Row(NamedTuple):
    """The beginning of a stored value, as a scan finds it. sample: from the key."""

    sample: int
    slot: int
    head: bytes  # HEADER_BYTES, fewer if the value is damaged


@dataclass(eq=False)
class Table:
    """The values of one link. `places` is read by any thread and changed by the writing one, after its commit."""

    name: str
    handle: Any
    places: dict[int, Place] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    end: int = 0

    def where(self, sample: int) -> str:
        """How errors name a sample of this link."""
        return f"store of {self.name}, sample {sample}"

    def load(self, places: Mapping[int, Place]) -> None:
        """Start with what a scan found."""
        self.places = dict(places)
        used = {place.slot for place in places.values()}
        self.end = max(used, default=-1) + 1
        self.free = sorted(set(range(self.end)) - used)


@lru_cache(maxsize=4096)
def piece_sizes(size: int, page: int) -> tuple[int, ...]:
    """How a value of `size` bytes is cut, first piece first; the first always holds the whole header."""
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


def _crc(value: bytes) -> bytes:
    return zlib.crc32(value).to_bytes(4, "big")


def _keys(slot: int, sample: int, first: int, end: int) -> list[bytes]:
    return [_NEXT.pack(slot, i) if i else _FIRST.pack(slot, 0, sample) for i in range(first, end)]


def check_length(file: Path) -> None:
    """Raise StoreError for a file that is shorter than it says; with its pages LMDB would leave what is mapped."""
    size = file.stat().st_size if file.exists() else 0
    expected = expected_bytes(file) if size else None
    if expected is not None and size < expected:
        raise StoreError(
            f"{file}: is cut short: it has {size} of {expected} bytes. Put a complete copy there, or remove it with "
            f"`pipecomp store prune {file.parent} --everything`: then all samples are sent as first visits once more"
        )


def _make_lock(file: Path) -> None:
    """Take room for LMDB's lock file, which it maps: without room the system would end this process."""
    file.touch(mode=0o600)
    if file.stat().st_size < _LOCK_BYTES:
        file.write_bytes(bytes(_LOCK_BYTES))


class ValueFile:
    """The LMDB file of one rank. One thread writes at a time; any thread reads.

    before_write: called before each transaction that writes, but for the one that makes the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        map_bytes: int = MAP_BYTES,
        readonly: bool = False,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._before_write = before_write
        self._reading = threading.Lock()  # held by readers; the map must not move beneath them
        self._writing = threading.RLock()
        with explained(path, "open the message store"):
            size = self.size_bytes()
            check_length(path / DATA_FILE)
            if not readonly:
                _make_lock(path / LOCK_FILE)
            self._env = lmdb.open(
                str(path),
                map_size=max(map_bytes, 2 * size),
                max_dbs=MAX_LINKS + 1,
                readonly=readonly,
                mode=0o600,
                lock=not readonly,  # `Folder` has made sure that nobody writes
                sync=False,
                metasync=False,
            )
            try:
                new = not readonly and not self._env.stat()["entries"]  # what has anything else in it is not ours
                self._meta = self._env.open_db(META, create=new)
                self._page = self._env.stat()["psize"]
                self._identity = self._file_identity()
            except BaseException:
                self._env.close()
                raise

    def size_bytes(self) -> int:
        """Size of the file."""
        file = self.path / DATA_FILE
        return file.stat().st_size if file.exists() else 0

    def meta(self, key: bytes) -> bytes | None:
        """Read a remark about the file. StoreError if it is not what was written (older files have no CRC-32)."""
        with explained(self.path, "read"), self._reading, self._env.begin(db=self._meta) as txn:
            value, crc = txn.get(key), txn.get(_CRC + key)
        if crc is not None and (value is None or crc != _crc(value)):
            raise StoreError(
                f"{self.path}: what the store says about itself ({key.decode()}) is damaged; `pipecomp store prune "
                f"{self.path}` removes what nobody can say any more where it belongs"
            )
        return value

    def set_meta(self, key: bytes, value: bytes) -> None:
        """Write a remark about the file."""

        def body(txn: lmdb.Transaction) -> None:
            txn.put(key, value, db=self._meta)
            txn.put(_CRC + key, _crc(value), db=self._meta)

        self._transact(body)

    def table_names(self) -> list[str]:
        """List the links that have a table."""
        with explained(self.path, "read"), self._reading, self._env.begin() as txn, txn.cursor() as cursor:
            keys = [key for key in cursor.iternext(values=False) if key != META]
        try:
            return [key.decode() for key in keys]
        except UnicodeDecodeError as error:
            raise StoreError(f"{self.path}: damaged: no link is called {error.object!r}") from error

    def table(self, name: str, *, create: bool = True) -> Table:
        """Open the table of a link, with empty `places`: fill them from `scan`."""
        if create and name not in self.table_names():
            return Table(name, self._transact(lambda txn: self._env.open_db(name.encode(), txn=txn)))
        with explained(self.path, "read"), self._writing:
            return Table(name, self._env.open_db(name.encode(), create=False))

    def scan(self, table: Table) -> list[Row]:
        """Read the headers of all values, by slot; only their first pieces are looked at."""
        rows, most = [], self._most_slots()
        with explained(self.path, "read"), self._reading, self._cursor(table) as cursor:
            more = cursor.first()
            while more:
                key = bytes(cursor.key())
                slot, piece, sample = _FIRST.unpack(key) if len(key) == _FIRST.size else (most, 0, 0)
                if piece or slot >= most:
                    raise StoreError(f"{self.path}: store of {table.name}: no beginning of a value at {key[:32].hex()}")
                rows.append(Row(sample, slot, bytes(cursor.value()[:HEADER_BYTES])))
                more = cursor.set_range(_NEXT.pack(slot + 1, 0))
        return rows

    def slots(self, table: Table) -> int:
        """Count the slots up to the last one, or, where that cannot be read, as many as there are pieces."""
        with explained(self.path, "read"), self._reading, self._cursor(table) as cursor, suppress(lmdb.Error):
            last = bytes(cursor.key()) if cursor.last() else b""
            return min(int.from_bytes(last[:8], "big") + 1, self._most_slots())
        with explained(self.path, "read"), self._reading, self._env.begin(db=table.handle) as txn:
            return int(txn.stat(table.handle)["entries"])

    def _most_slots(self) -> int:
        """Bound the slots: all up to the last were in the file at one time, each with a header."""
        return self.size_bytes() // HEADER_BYTES

    def sample_at(self, table: Table, slot: int) -> int:
        """Read which sample's value is in a slot. StoreError if none is."""
        with explained(self.path, "read"), self._reading, self._cursor(table) as cursor:
            there = cursor.set_range(_NEXT.pack(slot, 0))
            key = bytes(cursor.key()) if there else b""
        if len(key) != _FIRST.size or key[:10] != _NEXT.pack(slot, 0)[:10]:
            raise StoreError(f"{self.path}: store of {table.name}: no value in slot {slot}")
        return int(_FIRST.unpack(key)[2])

    def read(self, table: Table, sample: int) -> bytearray | None:
        """Read a sample's value; None if it has no place. StoreError if its pieces do not add up to its size."""
        with self.reading(table) as read:
            return read(sample)

    @contextmanager
    def reading(self, table: Table) -> Iterator[Callable[[int], bytearray | None]]:
        """Look at one snapshot of a table: what is given is `read` for one sample after the other."""
        with explained(self.path, f"read {table.name}"), self._reading, self._cursor(table) as cursor:

            def read(sample: int) -> bytearray | None:
                place = table.places.get(sample)
                if place is None:
                    return None
                with explained(self.path, f"read sample {sample} of {table.name}"):
                    return self._joined(cursor, table, place.slot, sample, place.size)

            yield read

    def read_at(self, table: Table, slot: int, sample: int) -> bytearray:
        """Read the value in a slot, whatever its size."""
        doing = f"read sample {sample} of {table.name}"
        with explained(self.path, doing), self._reading, self._cursor(table) as cursor:
            return self._joined(cursor, table, slot, sample, None)

    def _joined(self, cursor: Any, table: Table, slot: int, sample: int, size: int | None) -> bytearray:
        """Join a value's pieces; its size is checked before anything is allocated, unless it is not known."""
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
            raise StoreError(f"{table.where(sample)}: {total} of {size} bytes are there")
        return bytearray().join(pieces)

    def write(self, changes: Mapping[Table, Mapping[int, bytearray | None]]) -> None:
        """Write all values, delete those that are None: all of it or, if the process dies, nothing."""
        puts: dict[Table, list[tuple[int, Place, bytearray, bool]]] = {}
        deletes: list[tuple[Table, list[bytes]]] = []
        freed: list[tuple[Table, int, int]] = []
        ends = {table: table.end for table in changes}
        for table, values in changes.items():
            puts[table] = []
            for sample, value in values.items():
                old, end, after = table.places.get(sample), table.end, 0
                if value is not None:
                    slot = old.slot if old is not None else self._new_slot(table)
                    puts[table].append((sample, Place(slot, len(value)), value, slot == end))
                    after = len(piece_sizes(len(value), self._page))
                elif old is not None:
                    freed.append((table, sample, old.slot))
                if old is not None:
                    before = len(piece_sizes(old.size, self._page))
                    deletes.append((table, _keys(old.slot, sample, after, before)))

        def body(txn: lmdb.Transaction) -> None:
            for table, keys in deletes:
                for key in keys:
                    txn.delete(key, db=table.handle)
            for table, its in puts.items():
                with txn.cursor(db=table.handle) as cursor:
                    for sample, place, value, append in its:
                        self._put(cursor, table, place.slot, sample, value, append)

        try:
            self._transact(body)
        except BaseException:
            for table, end in ends.items():  # what is not written takes no slots, however often it is tried
                taken = (place.slot for sample, place, *_ in puts[table] if sample not in table.places)
                table.free, table.end = sorted([*table.free, *(slot for slot in taken if slot < end)]), end
            raise
        for table, its in puts.items():
            table.places.update((sample, place) for sample, place, *_ in its)
        for table, sample, slot in freed:
            del table.places[sample]
            heapq.heappush(table.free, slot)

    def sync(self) -> None:
        """Wait until everything committed is on disk."""
        with explained(self.path, "sync"):
            self._env.sync(True)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._writing, self._reading:
            self._env.close()

    @contextmanager
    def _cursor(self, table: Table) -> Iterator[Any]:
        """Look at one snapshot of a table; keys and values are views that end with it."""
        with self._env.begin(db=table.handle, buffers=True) as txn, txn.cursor() as cursor:
            yield cursor

    def _new_slot(self, table: Table) -> int:
        if table.free:
            return heapq.heappop(table.free)
        table.end += 1
        return table.end - 1

    def _put(self, cursor: Any, table: Table, slot: int, sample: int, value: bytearray, append: bool) -> None:
        sizes, whole = piece_sizes(len(value), self._page), memoryview(value)
        ends = itertools.accumulate(sizes, initial=0)
        pieces = [whole[start:end] for start, end in itertools.pairwise(ends)]
        items = list(zip(_keys(slot, sample, 0, len(sizes)), pieces, strict=True))
        _, added = cursor.putmulti(items, append=append)
        if added != len(items):  # LMDB refuses to append below what is there, and says no more than this
            raise StoreError(f"{self.path}: store of {table.name}: slots are out of order")

    def _transact(self, body: Callable[[lmdb.Transaction], _Value]) -> _Value:
        with explained(self.path, "write"), self._writing:
            if self._file_identity() != self._identity:  # LMDB would go on with a file that nobody finds any more
                raise OSError(errno.ENOENT, f"{DATA_FILE} is not the file any more that was opened")
            self._before_write()
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
            # It gives up the old map first, and closes the file for good if there is no room for the new one.
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
            self._env.set_mapsize(2 * size)

    def _file_identity(self) -> tuple[int, int]:
        found = os.stat(self.path / DATA_FILE)
        return found.st_dev, found.st_ino


_MAGIC = 0xBEEFC0DE
_PAGE_HEADERS = (16, 24)  # bytes before the magic number, in LMDB 0.9 and 1.0
# Magic number, version, address, size of the map, size of a page, two tables, last page, transaction.
_META = struct.Struct("<IIQQ I44x 48x QQ")


def expected_bytes(path: Path) -> int | None:
    """Length of the file up to the last page of its newest transaction; None if it does not begin as an LMDB file."""
    with path.open("rb") as file:
        first = file.read(max(_PAGE_HEADERS) + _META.size)
        for header in _PAGE_HEADERS:
            if len(first) < header + _META.size:
                return None
            magic, _, _, _, page, last, transaction = _META.unpack_from(first, header)
            if magic == _MAGIC:
                file.seek(page + header)
                second = file.read(_META.size)
                if len(second) == _META.size and _META.unpack(second)[0] == _MAGIC:
                    *_, other_last, other_transaction = _META.unpack(second)
                    last = other_last if other_transaction > transaction else last
                return (last + 1) * page
    return None


FORMAT_KEY = b"format"
FORMAT = b"1"
RUN_KEY = b"run"
_LINK = b"link:"


def link_key(name: str) -> bytes:
    """Name the remark in which a file keeps a link's settings."""
    return _LINK + name.encode()


def configuration(settings: Mapping[str, Any]) -> str:
    """Hash, in short, what a link's activations depend on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class Remarks(NamedTuple):
    """What a file says about itself, as far as it is whole.

    links: whose settings, and whose file's format and run, are whole. problems: by link, None: of the file.
    """

    whole: dict[bytes, bytes]
    links: list[str]
    problems: dict[str | None, str]


def read_remarks(file: ValueFile) -> Remarks:
    """Read all of it; a damaged remark is no error here."""
    names = file.table_names()
    whole: dict[bytes, bytes] = {}
    problems: dict[str | None, str] = {}
    for name, key in ((None, FORMAT_KEY), (None, RUN_KEY), *((name, link_key(name)) for name in names)):
        try:
            value = file.meta(key)
        except StoreError as error:
            problems[name] = str(error)
        else:
            if value is not None:
                whole[key] = value
            elif name is not None:
                problems[name] = f"{file.path}: {name} has no settings: its name, or theirs, is damaged"
    return Remarks(whole, [] if None in problems else [name for name in names if name not in problems], problems)


def read_run(file: ValueFile) -> str | None:
    """Read the id of the run that a store belongs to, None if no run has used it."""
    found = file.meta(RUN_KEY)
    return None if found is None else found.decode(errors="replace")


def check_format(file: ValueFile) -> None:
    """Mark a new file; StoreError for one of another format."""
    found = file.meta(FORMAT_KEY)
    if found is None:
        file.set_meta(FORMAT_KEY, FORMAT)
    elif found != FORMAT:
        raise StoreError(
            f"{file.path}: message store of format {found.decode(errors='replace')}, this program reads "
            f"{FORMAT.decode()}: give another store.path, or remove it with `pipecomp store prune --everything`"
        )


def check_settings(file: ValueFile, name: str, settings: Mapping[str, Any]) -> None:
    """Keep a new link's settings; StoreError if there are others, ConfigError if they are not JSON values."""
    try:
        mine = json.loads(json.dumps(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError("settings", dict(settings), f"JSON values: {error}") from error
    if file.meta(link_key(name)) is None:
        file.set_meta(link_key(name), json.dumps(mine, sort_keys=True).encode())
    elif differs := other_settings(file, name, mine):
        raise StoreError(
            f"{file.path}: {name} was stored with other settings ({differs}). Keep them, give "
            f"another store.path, or remove what is stored with `pipecomp store prune "
            f"{file.path} --link {name}`"
        )


def other_settings(file: ValueFile, name: str, settings: Mapping[str, Any]) -> str:
    """Say in which settings a link's activations were stored otherwise; nothing if in none, or there are none."""
    found = file.meta(link_key(name))
    if found is None:
        return ""
    mine, theirs = json.loads(json.dumps(settings)), json.loads(found)
    return "; ".join(
        f"{k}: {mine.get(k, 'not set')!r}, stored with {theirs.get(k, 'not set')!r}"
        for k in sorted({*mine, *theirs})
        if mine.get(k) != theirs.get(k) or (k in mine) != (k in theirs)
    )
