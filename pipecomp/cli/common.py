"""What all commands share: the terminal, errors as one line, and `--json FILE`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pipecomp.errors import ConfigError, PipecompError, require

# What is printed holds paths and other processes' errors, whose brackets and colons are no markup of rich's.
console = Console(markup=False, emoji=False)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the command that this decorates with one line and status 1 on an error that users can do something about."""
    try:
        yield
    except PipecompError as error:
        say_error(str(error))
        raise typer.Exit(1) from error


def say(text: str) -> None:
    """Tell people something that is not the result: on standard error, as it is."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def say_error(text: str) -> None:
    """Say why the command ends."""
    Console(stderr=True).print(Text.assemble(("pipecomp:", "red"), f" {text}"), soft_wrap=True)


def _check_json(file: Path | None) -> Path | None:
    """End the command before its work if nothing can be written to the file of `--json`."""
    with plain_errors():
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise _no_file(file)
    return file


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=_check_json, help="Also write the result to this file.")
]

GradientsOption = Annotated[
    str | None,
    typer.Option(
        help="How gradients of tied weights (as GPT-2's embedding) and of replicas travel: none, fp16, global_qsgd or "
        "double_squeeze; by default the fastest for replicas, and double_squeeze with 8 bits for tied weights that "
        "take much of a step."
    ),
]

TieOption = Annotated[
    bool,
    typer.Option(
        "--tie/--no-tie",
        help="Whether weights that several stages hold (as GPT-2's embedding) stay the same, or each stage trains its "
        "copy apart, and nothing crosses the link for it.",
    ),
]


def write_json(file: Path | None, value: Any) -> None:
    """Write what a command found, if its `--json` named a file. Raises ConfigError if it cannot be written."""
    if file is not None:
        try:
            file.write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise _no_file(file) from error


def _no_file(file: Path) -> ConfigError:
    return ConfigError("--json", str(file), "a file that can be written, in a folder that exists")


def check_minutes(minutes: float) -> None:
    """Raise ConfigError for a time to wait that is none."""
    require(0 < minutes < math.inf, "minutes", minutes, "a number above 0")


def whole_numbers(key: str, text: str, count: int | None = None) -> list[int]:
    """Read numbers separated by commas, `count` of them. ConfigError names `key`."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdecimal() for part in parts) and count in (None, len(parts)),
        key,
        text,
        f"{'' if count is None else f'{count} '}whole numbers, separated by commas",
    )
    return [int(part) for part in parts]
