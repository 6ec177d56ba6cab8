"""What all commands share: the terminal, errors as one line, and `--json FILE`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pipecomp.errors import PipecompError

console = Console()
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


@contextmanager
def plain_errors() -> Iterator[None]:
    """An error that users can do something about ends the command with one line and status 1."""
    try:
        yield
    except PipecompError as error:
        Console(stderr=True).print(f"[red]pipecomp:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def write_json(file: Path | None, value: Any) -> None:
    """Keep what a command found, if its `--json` named a file."""
    if file is not None:
        file.write_text(json.dumps(value, indent=2) + "\n")
