"""How long an LMDB file should be, by its own first pages, read without LMDB.

LMDB maps its file, and the system ends a process that reads a mapped page behind the end of the file. So a file that
was cut short, by a copy that was not finished or by a damaged file system, must be noticed before it is opened.
"""

from __future__ import annotations

import struct
from pathlib import Path

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
