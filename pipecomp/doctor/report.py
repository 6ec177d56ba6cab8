"""The report for people: a line for each check, what to do below it, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding

WIDTH = 100
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """At most 100 columns wide, without colours where the console has none."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=min(WIDTH, console.width))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="fold")
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
    """One sentence on all of it."""
    count = Counter(finding.verdict for finding in findings)
    total = f"{count[OK]} checks ok, {_number(count[WARNING], WARNING)}, {_number(count[PROBLEM], PROBLEM)}."
    if count[PROBLEM]:
        return f"{total} A problem makes runs fail or give wrong results; the arrows (→) say what to do."
    if count[WARNING]:
        return f"{total} Training works; the arrows (→) say how to make it better."
    return f"{total} Training can start."


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
