"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    """What one check found.

    check: what was looked at. verdict: "ok"; "warning" (it runs, but slowly, or not everything runs); "problem" (a run
    fails or its results are wrong). found: the fact and what it means. advice: what to do, empty if nothing.
    """

    check: str
    verdict: str
    found: str
    advice: str = ""


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether any finding is a problem."""
    return any(finding.verdict == PROBLEM for finding in findings)


def mib(size_bytes: float) -> str:
    """A size in bytes for people, in MiB or GiB."""
    value = size_bytes / 2**20
    return f"{value:.0f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"
