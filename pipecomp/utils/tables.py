"""Tables on the terminal, and output streams that survive closed pipes, full disks and narrow encodings."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Container, Iterable
from typing import Any

from rich.table import Table

COMPACT: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
"""The style of a table without lines."""


def replace_unprintable() -> None:
    """Print "?" for characters that the locale cannot encode, such as arrows, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _LossyFile(io.FileIO):
    """A file descriptor that drops output after its reader has gone, and while its disk is full."""

    before: io.TextIOWrapper  # keeps the stream alive: one that owns the descriptor, as os.fdopen's, would close it

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())  # also for native code that writes there
        except OSError:
            pass
        return len(data)


def _descriptor(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except io.UnsupportedOperation:  # a stream in memory
        return None


def outlast_readers() -> None:
    """Keep this process running when its output can no longer be written.

    Output is dropped after its reader has gone (`| head`), while its disk is full, and if it is closed (`>&-`).
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
        if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == descriptor:
            with contextlib.suppress(OSError):
                stream.flush()
            raw = _LossyFile(descriptor, "w", closefd=False)
            raw.before = stream
            file: Any = raw if stream.write_through else io.BufferedWriter(raw)  # as Python makes it with -u
            form: Any = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(file, **form, write_through=stream.write_through))


def table(
    headings: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    left: Container[str] = (),
    **style: Any,
) -> Table:
    """Build a table with right-aligned columns. Cells wrap in a narrow terminal, so that no digit is lost.

    Args:
        headings: headings of the columns.
        rows: cells of each row.
        left: headings of the left-aligned columns.
        style: options of `rich.table.Table`, such as "title".
    """
    result = Table(**style)
    for heading in headings:
        result.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result
