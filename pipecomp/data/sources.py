"""Sources of training data: files, folders and data sets, read as records or as text.

A record is a mapping of columns with the place it comes from. Text is kept as it is: only LF and CR LF end a line, and
white space stays. Files are read in pieces, so that memory depends on the longest record, not on the file.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pipecomp.errors import ConfigError, DataError, PipecompError, require
from pipecomp.utils.activity import Activity, limits

TEXT, JSON, CSV, PARQUET, ARROW, DATASET = "plain text", "JSON", "CSV", "Parquet", "Arrow", "a data set"
KINDS = {
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".txt": TEXT,
    ".text": TEXT,
}
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # not data
_FORMATS = "JSON lines, JSON, CSV, Parquet, plain text, a folder of these, or the name of a data set"
_PIECE = 1 << 20  # bytes read at once
_ROWS = 256  # of Parquet files and data sets, read at once
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_SIGNATURES = (
    (b"PK\x03\x04", "a zip archive, as .docx, .xlsx and .epub are too: unpack it, or save it as text"),
    (b"\x1f\x8b", "gzip: unpack it with `gunzip`"),
    (b"BZh", "bzip2: unpack it with `bunzip2`"),
    (b"\xfd7zXZ", "xz: unpack it with `unxz`"),
    (b"\x28\xb5\x2f\xfd", "zstd: unpack it with `unzstd`"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it"),
    (b"Rar!", "a rar archive: unpack it"),
    (b"%PDF-", "a PDF: extract its text, for example with `pdftotext`"),
    (b"PAR1", "Parquet: name it .parquet"),
    (b"ARROW1", "an Arrow file: give the folder that save_to_disk wrote, or save it as Parquet"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"\x89HDF", "HDF5: save it as Parquet or JSON lines"),
    (b"SQLite format 3", "an SQLite database: export its table as CSV"),
    (b"\xff\xfe\x00\x00", "UTF-32: convert it with `iconv -f UTF-32 -t UTF-8`"),
    (b"\x00\x00\xfe\xff", "UTF-32: convert it with `iconv -f UTF-32 -t UTF-8`"),
)
T = TypeVar("T")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class SourceRecord(NamedTuple):
    """A row of a source. where: file and line, or data set and row, for errors."""

    values: dict[str, Any]
    where: str


@dataclass(frozen=True)
class DataSource:
    """One file, or one split of a data set.

    Attributes:
        name: path or name, for messages.
        kind: TEXT, JSON, CSV, PARQUET, ARROW or DATASET.
        rows: the data set, for DATASET.
    """

    name: str
    kind: str
    rows: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Size in bytes, or rows of a data set."""
        return len(self.rows) if self.kind == DATASET else os.stat(self.name).st_size

    def digest(self) -> str:
        """Hash the content: a file's bytes, a data set's fingerprint."""
        digest = hashlib.sha256(self.kind.encode())
        if self.kind == DATASET:
            digest.update(str(getattr(self.rows, "_fingerprint", None)).encode())
            return digest.hexdigest()
        with _readable(self.name), _open(self.name) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        digest.update(Path(self.name).suffix.lower().encode())
        return digest.hexdigest()

    def records(self) -> Iterator[SourceRecord]:
        """Read the rows. Raises DataError, with file and line, for what cannot be read; for plain text always."""
        with _readable(self.name):
            if self.kind == JSON:
                rows = _json_records(self.name)
            elif self.kind == CSV:
                rows = _csv_records(self.name)
            elif self.kind == PARQUET:
                rows = _parquet_records(self.name)
            elif self.kind == ARROW:
                from datasets import Dataset

                rows = _dataset_records(self.name, Dataset.from_file(self.name))
            elif self.kind == DATASET:
                rows = _dataset_records(self.name, self.rows)
            else:
                raise DataError(f"{self.name} is plain text, which has no rows")
            yield from _watched(rows, self.name)

    def text(self) -> Iterator[str]:
        """Read plain text in pieces of up to 1 MiB, byte for byte, without a byte order mark. Raises DataError."""
        with _readable(self.name):
            yield from _watched(_decoded(self.name), self.name)

    def lines(self) -> Iterator[str]:
        """Read plain text as lines without their ends, which are only LF and CR LF. Raises DataError."""
        return (line.removesuffix("\r\n").removesuffix("\n") for line in _lines(self.text()))


# -- finding


def find_sources(data: Any, key: str = "--data") -> list[DataSource]:
    """Find the files and data sets that `--data` names.

    Args:
        data: a path, a name (NAME or NAME:CONFIG of `datasets.load_dataset`), a `datasets.Dataset`, or a sequence of
            these. Of a folder all files in its subfolders are taken, in the order of their paths.
        key: the setting's name, for errors.

    Returns:
        Sources in the given order. Of a data set with splits the split "train".

    Raises:
        ConfigError: something is not there, empty, binary, a pipe, or a stream.

    Example:
        >>> find_sources(["chat.jsonl"])
        [DataSource(name='chat.jsonl', kind='JSON')]
    """
    single = isinstance(data, (str, os.PathLike, Mapping)) or hasattr(data, "column_names")
    items = [data] if single else list(data)
    require(items, key, data, _FORMATS)
    found: list[DataSource] = []
    for item in items:
        if isinstance(item, (str, os.PathLike)):
            found += _named(os.fspath(item), key)
        else:
            found.append(_given(item, key, ("train",)))
    return found


def find_split(data: Any, splits: Sequence[str], key: str = "--data") -> DataSource | None:
    """Return the first of these splits that a data set has, such as the held-out part; None for files."""
    items = [data] if isinstance(data, (str, os.PathLike, Mapping)) or hasattr(data, "column_names") else list(data)
    if len(items) != 1:
        return None
    item = items[0]
    if isinstance(item, (str, os.PathLike)):
        name = os.fspath(item)
        if Path(name).is_dir() and (Path(name) / "dataset_dict.json").is_file():
            item = _loaded(name, key)
        elif not Path(name).exists():
            item = _from_hub(name, key)
    if isinstance(item, Mapping) and any(split in item for split in splits):
        return _given(item, key, splits, None if isinstance(data, Mapping) else str(items[0]))
    return None


def _named(name: str, key: str) -> list[DataSource]:
    path = Path(name)
    try:
        with _reading(name):
            mode = path.stat().st_mode
    except FileNotFoundError:
        return [_given(_from_hub(name, key), key, ("train",), name)]
    except OSError as error:
        raise ConfigError(key, name, f"{_FORMATS} ({error.strerror})") from error
    again = "a file or folder: every process reads it, and a pipe can be read once only. Write it to a file first"
    regular = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    require(regular and not name.startswith(("/dev/", "/proc/")), key, name, again)
    if stat.S_ISREG(mode):
        return [_file(path, key)]
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return [_given(_loaded(name, key), key, ("train",), name)]
    inside = [
        p
        for p in sorted(_watched(path.rglob("*"), name))
        if not any(q.startswith(".") for q in p.relative_to(path).parts)
    ]
    files = [p for p in inside if p.is_file()]
    chosen = [p for p in files if p.suffix.lower() in KINDS and p.name not in _DESCRIPTIONS]
    if not chosen:
        has = ", ".join(sorted({p.suffix or p.name for p in files})[:8]) or "no files"
        hint = f"The folder has {has}. Name its files one by one to read them as plain text"
        raise ConfigError(key, name, f"a folder with files {', '.join(KINDS)}", hint)
    return [_file(p, key) for p in chosen]


def _file(path: Path, key: str) -> DataSource:
    """Check what a file is by its suffix and its first bytes."""
    name = str(path)
    kind = KINDS.get(path.suffix.lower(), TEXT)
    try:
        with _reading(name), path.open("rb") as file:
            begin = file.read(512)
            if kind == PARQUET:
                file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ConfigError(key, name, f"a file that can be read ({error.strerror})") from error
    require(begin, key, name, "a file that is not empty")
    if kind == PARQUET:
        require(begin.startswith(b"PAR1"), key, name, "Parquet, which begins with PAR1; this is another format")
    elif kind != ARROW:
        for signature, what in _SIGNATURES:
            require(not begin.startswith(signature), key, name, _FORMATS, f"It looks like {what}")
        tar = begin[257:262] == b"ustar"
        require(not tar, key, name, _FORMATS, "It looks like a tar archive: unpack it with `tar -xf`")
        _check_encoding(name, begin, kind)
    return DataSource(name, kind)


def _check_encoding(name: str, begin: bytes, kind: str) -> None:
    """Raise DataError for UTF-16 where it cannot be read, and for NUL bytes."""
    if begin.startswith(_UTF16):
        if kind == JSON:
            raise DataError(f"{name}: looks like UTF-16; JSON is UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`")
        return
    if b"\0" not in begin:
        return
    for offset, order in ((1, "LE"), (0, "BE")):
        half = begin[offset::2]
        if half.count(0) > 0.7 * len(half) and begin[1 - offset :: 2].count(0) < 0.2 * len(half):
            convert = f"convert it with `iconv -f UTF-16{order} -t UTF-8`"
            raise DataError(f"{name}: looks like UTF-16 without a byte order mark; expected UTF-8: {convert}")
    if kind != JSON:  # whose reader names the line
        raise DataError(_nul(name, begin.index(0)))


def _nul(name: str, position: int) -> str:
    return f"{name}: byte {position} is NUL, so it is not text but a binary format; expected {_FORMATS}"


def _given(item: Any, key: str, splits: Sequence[str], name: str | None = None) -> DataSource:
    """Return a data set object as a source."""
    shown = name or f"the given {type(item).__name__}"
    if isinstance(item, Mapping):
        split = next((split for split in splits if split in item), None)
        if split is None:
            raise DataError(f"{shown} has the splits {', '.join(map(str, item))}; needed: {' or '.join(splits)}")
        return _given(item[split], key, splits, f"{shown}, split {split}")
    if hasattr(item, "column_names") and not hasattr(item, "__len__"):
        hint = (
            "A stream has no length and no sample by number, which caches and resuming need: load it without "
            "streaming=True, or write its part to JSON lines"
        )
        raise ConfigError(key, type(item).__name__, "a data set with a length", hint)
    require(hasattr(item, "column_names"), key, type(item).__name__, "paths, names, or a datasets.Dataset")
    require(len(item), key, shown, "a data set that is not empty")
    return DataSource(shown, DATASET, item)


def _loaded(name: str, key: str) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(name)
    except Exception as error:
        raise ConfigError(key, name, f"a folder that save_to_disk wrote ({first_line(error)})") from error


def _from_hub(name: str, key: str) -> Any:
    looks_like_file = Path(name).suffix.lower() in KINDS or name.startswith(("/", ".", "~"))
    require(not looks_like_file and _DATASET_NAME.fullmatch(name), key, name, _FORMATS, "There is no such file")
    path, _, config = name.partition(":")
    with hub_errors(key, name):
        from datasets import load_dataset

        return load_dataset(path, config or None)


@contextlib.contextmanager
def hub_errors(argument: str, name: str) -> Iterator[None]:
    """Convert exceptions of Hugging Face's libraries about a name into ConfigError with one line."""
    from pipecomp.stages.partition.loading import hub_unreachable

    if hub_unreachable(name.partition(":")[0]):  # retries would take a minute; caches still work
        import huggingface_hub.constants as hub

        hub.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
    try:
        yield
    except PipecompError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError and the libraries' own errors
        allowed = f"a folder, or a name on the Hugging Face hub ({first_line(error)})"
        raise ConfigError(argument, name, allowed) from error


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error


def _reading(name: str) -> Activity:
    """Return the activity of reading a piece of a source: its disk may be dead, however long tokenization may take."""
    return Activity(f"reads {name}", limits.data_s, explain=lambda: "Look at its disk")


def _watched(pieces: Iterator[T], name: str) -> Iterator[T]:
    """Yield the pieces of a source, each read within the limit of data."""
    reading = _reading(name)
    while True:
        with reading:
            try:
                piece = next(pieces)
            except StopIteration:
                return
        yield piece


class _WatchedFile(io.FileIO):
    """A file each of whose reads has the limit of data, as a row may have any size."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._activity = _reading(name)

    def readinto(self, buffer: Any) -> int | None:
        with self._activity:
            return super().readinto(buffer)


def _open(name: str) -> BinaryIO:
    return io.BufferedReader(_WatchedFile(name), _PIECE)


# -- text


def read_text(path: str | os.PathLike[str], *, nul: bool = False) -> str:
    """Read a whole text file: UTF-8, or UTF-16 with a byte order mark, without the mark. Line ends stay.

    Args:
        path: the file.
        nul: allow NUL characters.

    Raises:
        DataError: it cannot be read or decoded, or holds NUL bytes.
    """
    with _readable(str(path)):
        return "".join(_watched(_decoded(str(path), nul=nul), str(path)))


def _decoded(name: str, *, nul: bool = False) -> Iterator[str]:
    with _open(name) as file:
        piece, position = file.read(_PIECE), 0
        wide = piece.startswith(_UTF16)
        decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")()
        while True:
            if not wide and not nul and b"\0" in piece:
                raise DataError(_nul(name, position + piece.index(0)))
            kept = len(decoder.getstate()[0])  # of a character that the piece before began
            try:
                text = decoder.decode(piece, not piece)
            except UnicodeDecodeError as error:
                raise DataError(f"{name}: {_undecodable(error, position - kept, wide)}") from error
            if text:
                yield text
            if not piece:
                return
            position += len(piece)
            piece = file.read(_PIECE)


def _undecodable(error: UnicodeDecodeError, position: int, wide: bool) -> str:
    if wide:
        return f"not UTF-16, although its byte order mark says so: {error.reason}"
    return _not_utf8(error, position)


def _not_utf8(error: UnicodeDecodeError, position: int) -> str:
    at = position + error.start
    return (
        f"not UTF-8: byte {at} is {error.object[error.start]:#04x}. It looks like another encoding, such as "
        "Windows-1252 or Latin-1: convert it with `iconv -f WINDOWS-1252 -t UTF-8`"
    )


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Cut text after each LF."""
    begun: list[str] = []
    for piece in pieces:
        first, *others = piece.split("\n")
        for line in others:
            yield "".join([*begun, first, "\n"])
            begun, first = [], line
        begun.append(first)
    if rest := "".join(begun):
        yield rest


# -- records


def _json_records(name: str) -> Iterator[SourceRecord]:
    """Read JSON lines, a JSON array of rows, or a JSON object of columns; a string is a row with the column text."""
    with _open(name) as file:
        begin = file.read(512)
        _check_encoding(name, begin, JSON)
        start = 3 if begin.startswith(codecs.BOM_UTF8) else 0
        if _is_one_document(name, file, start):
            file.seek(start)
            yield from _json_document(name, b"".join(iter(partial(file.read, _PIECE), b"")))
            return
        file.seek(start)
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{name}, line {number}"
                yield SourceRecord(_row(_json_value(line, where), where), where)


def _is_one_document(name: str, file: BinaryIO, start: int) -> bool:
    """Return whether a file is a JSON array, or one object that is not JSON lines."""
    file.seek(start)
    head = next((stripped for line in file if (stripped := line.strip())), b"")
    if head.startswith(b"["):
        return True
    if Path(name).suffix.lower() != ".json" or not head.startswith(b"{"):
        return False
    return not _is_json(head) or not any(line.strip() for line in file)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json_value(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {_not_utf8(error, 0)}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}, at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if b"\\ud" in line or b"\\uD" in line:
        check_characters(value, where)
    return value


def check_characters(value: Any, where: str) -> None:
    """Raise DataError for halves of characters, which JSON can write and no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: \\u{ord(value[error.start]):04x} is an unpaired surrogate") from error
    elif isinstance(value, Mapping):
        for inner in value.values():
            check_characters(inner, where)
    elif isinstance(value, list):
        for inner in value:
            check_characters(inner, where)


def _json_document(name: str, content: bytes) -> Iterator[SourceRecord]:
    """Read the rows of an array one by one, or all columns of an object."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {_not_utf8(error, 0)}") from error
    del content
    surrogates = "\\ud" in text or "\\uD" in text
    space = re.compile(r"[ \t\n\r]*")
    decoder = json.JSONDecoder()
    at = space.match(text).end()  # type: ignore[union-attr]

    def line() -> str:
        return f"{name}, line {text.count(chr(10), 0, at) + 1}"

    def value_at(at: int) -> tuple[Any, int]:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            number = text.count("\n", 0, at) + 1
            if isinstance(error, json.JSONDecodeError) and text[error.pos :].strip():
                number = error.lineno  # otherwise the file ends within the value that begins here
            raise DataError(f"{name}, line {number}: not JSON: {error}") from error
        return value, space.match(text, end).end()  # type: ignore[union-attr]

    if text[at] == "{":
        value, at = value_at(at)
        if at < len(text):
            raise DataError(f"{line()}: not JSON: more text after the object; JSON lines need an object on each line")
        if surrogates:
            check_characters(value, name)
        yield from _columns(name, value)
        return
    number, at = 0, space.match(text, at + 1).end()  # type: ignore[union-attr]
    while text[at : at + 1] != "]":
        where = line() if number < 1 else f"{name}, item {number + 1}"
        value, at = value_at(at)
        number += 1
        if surrogates:
            check_characters(value, where)
        yield SourceRecord(_row(value, where), where)
        if text[at : at + 1] == ",":
            at = space.match(text, at + 1).end()  # type: ignore[union-attr]
        elif text[at : at + 1] != "]":
            raise DataError(f"{line()}: not JSON: expected ',' or ']' after item {number}")
    if text[at + 1 :].strip(" \t\n\r"):
        raise DataError(f"{line()}: not JSON: more text after the array")


def _columns(name: str, value: dict[str, Any]) -> Iterator[SourceRecord]:
    lists = value and all(isinstance(column, list) for column in value.values())
    lengths = {len(column) for column in value.values()} if lists else set()
    if not lists or value.keys() <= {"messages", "conversations", "tools"}:
        yield SourceRecord(value, name)  # one row
        return
    if len(lengths) != 1:
        counts = ", ".join(f"{key} {len(column)}" for key, column in value.items())
        raise DataError(f"{name}: its columns have different lengths: {counts}")
    for number, row in enumerate(zip(*value.values(), strict=True), 1):
        yield SourceRecord(dict(zip(value, row, strict=True)), f"{name}, row {number}")


def _row(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise DataError(f"{where}: has a value of type {type(value).__name__}; needed: an object, or a text")
    return value


def _csv_records(name: str) -> Iterator[SourceRecord]:
    """Read CSV with a header; quoted fields keep their line ends."""
    csv.field_size_limit(sys.maxsize)
    tabs = Path(name).suffix.lower() == ".tsv"
    reader = csv.reader(_lines(_decoded(name)), delimiter="\t" if tabs else ",", strict=True)
    columns: list[str] | None = None
    while True:
        where = f"{name}, line {reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            lone = "a carriage return outside of quotes: put fields with line ends in double quotes"
            reason = lone if "new-line" in str(error) else str(error)
            raise DataError(f"{where}: not {'TSV' if tabs else 'CSV'}: {reason}") from error
        if fields is None:
            return
        if not fields:
            continue
        if columns is None:
            columns = fields
            if len(set(columns)) != len(columns):
                raise DataError(f"{where}: the header names a column twice: {', '.join(columns)}")
            continue
        if len(fields) != len(columns):
            names = ", ".join(columns)
            raise DataError(f"{where}: has {len(fields)} fields; the header names {len(columns)}: {names}")
        yield SourceRecord(dict(zip(columns, fields, strict=True)), where)


def _parquet_records(name: str) -> Iterator[SourceRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(name, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield SourceRecord(row, f"{name}, row {number}")
    except pa.ArrowException as error:
        raise DataError(f"{name}: damaged Parquet: {first_line(error)}") from error


def _dataset_records(name: str, rows: Any) -> Iterator[SourceRecord]:
    number = 0
    for batch in rows.with_format(None).iter(_ROWS):
        columns = list(batch)
        for row in zip(*batch.values(), strict=True):
            number += 1
            yield SourceRecord(dict(zip(columns, row, strict=True)), f"{name}, row {number}")
