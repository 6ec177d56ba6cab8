"""`pipecomp store info | verify | prune`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from pipecomp.cli.common import JsonOption, console, plain_errors, write_json
from pipecomp.utils.tables import COMPACT, table

store = typer.Typer(no_args_is_help=True, help="Look at, check and clean a message store.")


@store.command("info")
@plain_errors()
def store_info(path: str, json_file: JsonOption = None) -> None:
    """Show what a message store holds for every rank and link: run, samples, bytes, bits, versions."""
    from pipecomp.buffers.admin import info

    found = info(path)
    write_json(json_file, [dataclasses.asdict(line) for line in found])
    headings = ("rank", "link", "samples", "bits", "stored MB", "file MB", "versions", "configuration")
    for run in dict.fromkeys(line.run for line in found):
        rows = (
            (
                str(line.rank),
                line.link,
                str(line.samples),
                str(line.bits),
                f"{line.stored_bytes / 1e6:.2f}",
                f"{line.file_bytes / 1e6:.2f}",
                "–" if line.versions is None else f"{line.versions[0]} to {line.versions[1]}",
                line.configuration,
            )
            for line in found
            if line.run == run
        )
        console.print(f"run {run}" if run else "no run has used it", highlight=False)
        console.print(table(headings, rows, left=("link", "versions", "configuration"), **COMPACT))


@store.command("verify")
@plain_errors()
def store_verify(path: str, json_file: JsonOption = None) -> None:
    """Check every stored value's checksum; exit status 1 if any is damaged."""
    from pipecomp.buffers.admin import verify
    from pipecomp.buffers.base import entry_name

    report = verify(path)
    damaged = [d._asdict() for d in report.damaged]
    write_json(json_file, {"checked": report.checked, "damaged": damaged})
    for d in report.damaged:
        place = "the file" if d.link is None else d.link
        place += "" if d.sample is None else f", sample {entry_name(d.sample)}"
        console.print(f"rank {d.rank}, {place}: {d.problem}", highlight=False)
    console.print(f"{report.checked} values checked, {len(damaged)} damaged", highlight=False)
    if damaged:
        console.print(
            f"`pipecomp store prune {path}` keeps what is whole and removes the rest, which is sent as first visits "
            "once; a run with --resume auto does so by itself",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


@store.command("prune")
@plain_errors()
def store_prune(
    path: str,
    link: Annotated[str | None, typer.Option(help="Remove this link's samples and settings.")] = None,
    ids_below: Annotated[int | None, typer.Option(help="Keep only samples with ids below this.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Keep at most this many samples per link.")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Remove the stores entirely.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Remove damaged values and whatever the options name, and shrink the files to what is left."""
    from pipecomp.buffers.admin import prune

    report = prune(path, link=link, ids_below=ids_below, max_samples=max_samples, everything=everything)
    write_json(json_file, dataclasses.asdict(report))
    values = f"{report.removed} values removed ({report.damaged} of them damaged), {report.kept} kept"
    console.print(
        f"{'all values removed' if everything else values}; "
        f"{report.bytes_before / 1e6:.2f} MB before, {report.bytes_after / 1e6:.2f} MB now",
        highlight=False,
    )
