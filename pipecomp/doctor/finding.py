"""What checks found, and the report of it for people: a line for each check, what to do below it, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipecomp.utils.units import format_count

OK, WARNING, PROBLEM = "ok", "warning", "problem"
WIDTH = 100
_CHECK = 30
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


class Finding(NamedTuple):
    """What one check found.

    check: what was looked at. verdict: "ok"; "warning" (it runs, but slowly, or not everything runs); "problem" (a run
    fails or its results are wrong). found: the fact and what it means. advice: what to do, empty if nothing.
    """

    check: str
    verdict: str
    found: str
    advice: str = ""


def judge(check: str, found: str, *faults: tuple[bool, str, str, str]) -> Finding:
    """Judge a fact by the first fault that it has.

    Args:
        check: What was looked at.
        found: The fact.
        faults: Whether the fact is like that, the verdict then, what it means, and advice; the gravest first.

    Returns:
        The finding, "ok" if there is no fault.
    """
    for applies, verdict, meaning, advice in faults:
        if applies:
            return Finding(check, verdict, f"{found}: {meaning}", advice)
    return Finding(check, OK, found)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Say whether any finding is a problem."""
    return any(finding.verdict == PROBLEM for finding in findings)


def mib(size_bytes: float) -> str:
    """Write a size in bytes for people, in MiB or GiB."""
    value = size_bytes / 2**20
    return f"{value:.0f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print the report at most 100 columns wide, without colours where the console has none."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=min(WIDTH, console.width))
    table.add_column(no_wrap=True)
    table.add_column(max_width=_CHECK, overflow="fold")  # a host's name is in some, which may be long
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append("\n→ ", style="bold")
            text.append(finding.advice, style="bold" if finding.verdict != OK else "")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.check), text)
    console.print(table)
    console.print(summary(findings), highlight=False, width=min(WIDTH, console.width))


def summary(findings: Sequence[Finding]) -> str:
    """Say in a sentence what all of it comes to."""
    count = Counter(finding.verdict for finding in findings)
    total = ", ".join(
        [f"{format_count(count[OK], 'check')} ok", *(format_count(count[kind], kind) for kind in (WARNING, PROBLEM))]
    )
    total += "."
    if count[PROBLEM]:
        return f"{total} A problem makes runs fail or give wrong results; the arrows (→) say what to do."
    if count[WARNING]:
        return f"{total} Training works; the arrows (→) say how to make it better."
    return f"{total} Training can start."
