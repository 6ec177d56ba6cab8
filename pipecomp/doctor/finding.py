"""Findings of checks and their report: a line per check, advice below it, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipecomp.utils.units import format_count

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_MAX_WIDTH, _MAX_CHECK_WIDTH = 100, 30
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        check: Subject of the check.
        verdict: "ok"; "warning" (training runs, but slowly, or not everything runs); "problem" (a run fails or its
            results are wrong).
        found: The fact and its consequence.
        advice: The remedy; empty if none is needed.
    """

    check: str
    verdict: str
    found: str
    advice: str = ""


def judge(check: str, fact: str, *faults: tuple[bool, str, str, str]) -> Finding:
    """Make the finding for the first fault that applies, "ok" if none does.

    Args:
        check: Subject of the check.
        fact: The fact.
        faults: For each fault: True if it applies, its verdict, its consequence, and the advice; gravest first.
    """
    for applies, verdict, consequence, advice in faults:
        if applies:
            return Finding(check, verdict, f"{fact}: {consequence}", advice)
    return Finding(check, OK, fact)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is a problem."""
    return any(finding.verdict == PROBLEM for finding in findings)


def format_bytes(size_bytes: float) -> str:
    """Format a size in MiB or GiB."""
    value = size_bytes / 2**20
    return f"{value:.0f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings and a summary, at most 100 columns wide."""
    width = min(_MAX_WIDTH, console.width)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=width)
    table.add_column(no_wrap=True)
    table.add_column(max_width=_MAX_CHECK_WIDTH, overflow="fold")  # some contain a host name, which may be long
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append("\n→ ", style="bold")
            text.append(finding.advice, style="bold" if finding.verdict != OK else "")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.check), text)
    console.print(table)
    console.print(summary(findings), highlight=False, width=width)


def summary(findings: Sequence[Finding]) -> str:
    """Summarize the findings in a sentence."""
    count = Counter(finding.verdict for finding in findings)
    total = ", ".join(
        (f"{format_count(count[OK], 'check')} ok", *(format_count(count[kind], kind) for kind in (WARNING, PROBLEM)))
    )
    if count[PROBLEM]:
        return f"{total}. A problem makes runs fail or give wrong results; the arrows (→) show the remedy."
    if count[WARNING]:
        return f"{total}. Training works; the arrows (→) show how to improve it."
    return f"{total}. Training can start."
