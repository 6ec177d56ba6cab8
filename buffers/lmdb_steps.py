"""Whole steps on their way into the file, and what becomes of them where a disk refuses a write."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from pipecomp.buffers.entry import Entry
from pipecomp.buffers.lmdb_errors import of_the_disk
from pipecomp.buffers.lmdb_file import Table, ValueFile
from pipecomp.buffers.value import ValueFormat
from pipecomp.errors import ConfigError, StoreError

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
