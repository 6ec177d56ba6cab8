"""Tables, and words for numbers, as the commands print them for people."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Container, Iterable
from typing import Any

from rich.table import Table

COMPACT: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
"""The style of a table without lines."""


def replace_unprintable() -> None:
    """Let this process print "?" for what its locale has no bytes for, as arrows and dashes, rather than end there."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def counted(number: int, thing: str) -> str:
    """Say how many: 1 stage, 4 stages."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


class _Lasting(io.FileIO):
    """A descriptor that leads nowhere from when nobody reads it any more, and for as long as its disk is full."""

    before: io.TextIOWrapper  # kept: one that owns the descriptor, as os.fdopen makes it, would close it

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())  # for all that writes there, in any language
        except OSError:
            pass
        return len(data)


def _descriptor(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except io.UnsupportedOperation:  # of a stream in memory
        return None


def outlast_readers() -> None:
    """Let this process go on where its output cannot be written any more: a training costs money.

    So where nobody reads it, as behind `| head`, where its disk is full, and where it was closed, as by `>&-`.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
        if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == descriptor:
            stream.flush()
            raw = _Lasting(descriptor, "w", closefd=False)
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
    """Make a table, its columns to the right. In a narrow terminal cells are broken into lines: no digit is left out.

    Args:
        headings: Of the columns.
        rows: Their cells.
        left: Headings of the columns that go to the left.
        style: Options of `rich.table.Table`, "title" among them.
    """
    found = Table(**style)
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found
