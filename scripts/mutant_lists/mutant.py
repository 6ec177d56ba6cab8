"""One small defect that a test must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit. tests: files or nodes, as pytest takes them. why: what users would get.

    `old` stands exactly once in its file; a unit test checks that, so that the lists follow the code.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
