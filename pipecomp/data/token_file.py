"""Files of tokens: Arrow streams, as `datasets.Dataset.from_file` reads them, mapped into memory.

Columns: document int64, its number; input_ids list of int32; learned list of bool, only where some tokens are not
learned. A long document has several rows, one after the other. The file KEY.json beside KEY.arrow has the counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pipecomp.utils.files import atomic_write_text

VERSION = 1
_ROW = 1 << 20  # tokens of a row
_FLUSH = 1 << 18  # tokens that are kept in memory before they are written


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a file of tokens.

    Attributes:
        documents: number of documents that have tokens.
        tokens: tokens of all documents.
        learned: tokens that the loss counts.
        empty: documents without text, left out.
        forced: places where a long text was cut although the whole text may have other tokens there.
        left_out: samples whose prompt alone ends in other tokens than before its completion.
        largest: the largest token id, -1 without tokens.
        digest: digest of all documents' tokens and of what is learned.
    """

    documents: int
    tokens: int
    learned: int
    empty: int
    forced: int
    left_out: int
    largest: int
    digest: str


class TokenWriter:
    """Writes a file of tokens; on an error nothing stays."""

    def __init__(self, path: Path, *, masked: bool) -> None:
        """Open a temporary file beside `path`. masked: documents have tokens that are not learned."""
        import pyarrow as pa

        self._path, self._masked, self._pa = path, masked, pa
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        fields = [("document", pa.int64()), ("input_ids", pa.list_(pa.int32()))]
        self._schema = pa.schema(fields + ([("learned", pa.list_(pa.bool_()))] if masked else []))
        self._rows: list[tuple[int, np.ndarray, np.ndarray | None]] = []
        self._waiting = 0
        self._digest = hashlib.sha256()
        self._documents = self._tokens = self._learned = 0
        self._largest = -1
        self.empty = 0

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return self._documents

    def __enter__(self) -> TokenWriter:
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb")
        self._stream = self._pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def add(self, pieces: Iterator[np.ndarray] | Sequence[np.ndarray], learned: np.ndarray | None = None) -> None:
        """Add a document.

        Args:
            pieces: its tokens, int32 [any], in order.
            learned: bool, for all of its tokens; None if all are learned.
        """
        done = 0
        for piece in pieces:
            for at in range(0, len(piece), _ROW):
                ids = np.asarray(piece[at : at + _ROW], np.int32)
                mask = None
                if self._masked:
                    mask = np.ones(len(ids), bool) if learned is None else learned[done : done + len(ids)]
                    self._digest.update(np.packbits(mask).tobytes())
                self._digest.update(ids.tobytes())
                self._learned += len(ids) if mask is None else int(mask.sum())
                self._largest = max(self._largest, int(ids.max()))
                self._rows.append((self._documents, ids, mask))
                self._waiting += len(ids)
                done += len(ids)
                if self._waiting > _FLUSH:
                    self._flush()
        self._digest.update(f"end {done}".encode())
        self._tokens += done
        self._documents += 1

    def finish(self, *, forced: int = 0, left_out: int = 0) -> TokenCounts:
        """Complete the file and write its counts."""
        self._flush()
        self._stream.close()
        self._file.close()
        os.replace(self._part, self._path)
        counts = TokenCounts(
            self._documents,
            self._tokens,
            self._learned,
            self.empty,
            forced,
            left_out,
            self._largest,
            self._digest.hexdigest()[:16],
        )
        atomic_write_text(_description(self._path), json.dumps({"version": VERSION, **asdict(counts)}) + "\n")
        return counts

    def _flush(self) -> None:
        if not self._rows:
            return
        pa = self._pa
        numbers, ids, masks = zip(*self._rows, strict=True)
        offsets = pa.array(np.concatenate([[0], np.cumsum([len(x) for x in ids])]).astype(np.int32))
        columns = [
            pa.array(numbers, pa.int64()),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ids))),
        ]
        if self._masked:
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))))
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._waiting = [], 0


class TokenFile:
    """Reads a file of tokens through a memory map. Copies to other processes carry the path only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @cached_property
    def counts(self) -> TokenCounts:
        """The counts that were written with it."""
        values = json.loads(_description(self.path).read_text())
        del values["version"]
        return TokenCounts(**values)

    @cached_property
    def _table(self) -> Any:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source, pa.ipc.open_stream(source) as stream:
            return stream.read_all()

    @cached_property
    def _chunks(self) -> tuple[np.ndarray, list[Any], list[Any] | None]:
        """Positions of the batches' first tokens, and their tokens and masks."""
        columns = [self._table.column(name).chunks for name in self._table.column_names[1:]]
        values = [[chunk.values for chunk in chunks] for chunks in columns]
        starts = np.concatenate([[0], np.cumsum([len(chunk) for chunk in values[0]])])
        return starts, values[0], values[1] if len(values) > 1 else None

    @cached_property
    def documents(self) -> np.ndarray:
        """Positions of the documents' first tokens, and the end, int64 [D + 1]."""
        numbers = self._table.column("document").to_numpy()
        lengths = np.concatenate([np.diff(chunk.offsets) for chunk in self._table.column("input_ids").chunks] or [[]])
        ends = np.cumsum(lengths, dtype=np.int64)
        last = np.append(np.diff(numbers) != 0, True) if len(numbers) else np.zeros(0, bool)
        return np.concatenate([np.zeros(1, np.int64), ends[last]])

    def read(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Read the tokens from one position to another. Returns ids int32 [end - start], learned bool or None."""
        starts, tokens, masks = self._chunks
        ids, learned = [], []
        at = int(np.searchsorted(starts, start, "right")) - 1
        while start < end:
            offset = start - int(starts[at])
            count = min(end - start, len(tokens[at]) - offset)
            ids.append(tokens[at].slice(offset, count).to_numpy())
            if masks is not None:
                learned.append(masks[at].slice(offset, count).to_numpy(zero_copy_only=False))
            start, at = start + count, at + 1
        if not ids:
            return np.zeros(0, np.int32), None if masks is None else np.zeros(0, bool)
        return np.concatenate(ids), np.concatenate(learned) if masks is not None else None

    def learned_between(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return how many tokens between each pair of positions are learned, int64 [any]."""
        if self._chunks[2] is None:
            return ends - starts
        return np.array([self.read(a, b)[1].sum() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])  # type: ignore[union-attr]


def is_complete(path: Path) -> bool:
    """Return whether a file of tokens and its counts are there, of this version."""
    try:
        return path.is_file() and json.loads(_description(path).read_text()).get("version") == VERSION
    except (OSError, ValueError):
        return False


def _description(path: Path) -> Path:
    return path.with_suffix(".json")
