"""Parts that all commands share: the terminal, errors as one line, `--json FILE`, options from a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from pipecomp.errors import ConfigError, PipecompError, require

# Note: no markup, as output holds paths and other processes' errors with brackets and colons.
console = Console(markup=False, emoji=False)


@contextmanager
def plain_errors() -> Iterator[None]:
    """As a decorator, end a command with one line and exit status 1 on one of this project's errors."""
    try:
        yield
    except PipecompError as error:
        print_error(str(error))
        raise typer.Exit(1) from error


def print_line(text: str) -> None:
    """Print a line to standard output unformatted, so that people can copy it and programs can read it."""
    console.print(text, highlight=False, soft_wrap=True)


def print_status(text: str) -> None:
    """Print a line that is not part of the result to standard error."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def print_error(text: str) -> None:
    """Print an error to standard error."""
    Console(stderr=True).print(Text.assemble(("pipecomp:", "red"), f" {text}"), soft_wrap=True)


def option(text: str, *flags: str) -> Any:
    """Return a typer option with a help text; by default its flag is the parameter's name."""
    return typer.Option(*flags, help=text)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add to a command one option per field of the dataclass that its first parameter is annotated with.

    A field is annotated as `Annotated[type, help, *flags]`; without flags the option has the field's name. Further
    parameters of the command stay options of their own.
    """
    first, *others = inspect.signature(command, eval_str=True).parameters.values()
    kind, parameters = first.annotation, []
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotation, text, *flags = get_args(hints[field.name])
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        annotation = Annotated[str if annotation is Any else annotation, option(text, *flags)]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    own = {parameter.name for parameter in parameters}
    parameters += [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        options = kind(**{name: values.pop(name) for name in own})
        command(options, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _check_json(file: Path | None) -> Path | None:
    """Fail before the command's work if the file of `--json` cannot be written."""
    with plain_errors():
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise _unwritable_json(file)
    return file


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=_check_json, help="Also write the result to this file.")
]


def write_json(file: Path | None, value: Any) -> None:
    """Write a command's result to the file of `--json`, if given. ConfigError if it cannot be written."""
    if file is not None:
        try:
            file.write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise _unwritable_json(file) from error


def _unwritable_json(file: Path) -> ConfigError:
    return ConfigError("--json", str(file), "a file that can be written, in a folder that exists")


def check_minutes(minutes: float) -> None:
    """Raise ConfigError unless a timeout is positive and finite."""
    require(0 < minutes < math.inf, "minutes", minutes, "a number above 0")


def parse_integers(key: str, text: str, count: int | None = None) -> list[int]:
    """Parse whole numbers separated by commas, `count` of them. ConfigError names `key`."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdecimal() for part in parts) and count in (None, len(parts)),
        key,
        text,
        f"{'' if count is None else f'{count} '}whole numbers, separated by commas",
    )
    return [int(part) for part in parts]
