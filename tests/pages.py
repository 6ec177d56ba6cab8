"""Code blocks and commands of the pages, and a check of each command without its work."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/README.md", "recipes/**/README.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)
ELIDED = ("…", "...")
# Words of commands that stand for something that the page explains.
PLACEHOLDERS = {
    "TRAIN": "recipes/gpt2_wikitext2/train.py …",
    "NAME": "convergence",
    "R": "1",
    "FIRST_MACHINE": "10.0.0.1",
    "MACHINES": "2",
    "PROCESSES": "2",
}
READERS_SCRIPT = "train.py"  # what README calls the script that somebody writes
PROGRAMS = ("deepspeed", "torchrun", "python", "pipecomp", "make", "pip", "bash")
OTHERS = ("head", "tail", "git", "echo")
# Of the machines where runs are started; those of tests need not have them.
ELSEWHERE = ("docker", "podman", "sbatch", "srun", "sky", "systemctl", "journalctl", "install")


class Block(NamedTuple):
    page: str
    language: str
    text: str


class Parsed(BaseException):
    """A command line was parsed; nothing of what it asks for is done. Its argument is the namespace."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*languages: str) -> list[Block]:
    """Fenced blocks of these languages on all pages; "" has those without one."""
    found = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    every = [Block(page, *match.groups()) for page in PAGES for match in found.finditer(text_of(page))]
    return [block for block in every if not languages or block.language in languages]


def commands(page: str) -> Iterator[list[str]]:
    """Words of every command of a page: in shell blocks, indented, or between backquotes."""
    for block in blocks("", "bash", "sh"):
        if block.page == page:
            yield from _split(block.text)
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", outside)
    indented = re.findall(rf"^    ((?:{'|'.join(PROGRAMS)}) .*(?:\\\n.*)*)", outside, re.MULTILINE)
    for text in (*inline, *indented):
        yield from _split(text)


def _split(text: str) -> Iterator[list[str]]:
    text = re.sub(r"[\[\]](?=-|\s|$)|(?<=\s)\[", " ", text)  # [--optional]
    for line in text.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            given = shlex.split(command, comments=True)
            words = shlex.split(" ".join(PLACEHOLDERS.get(word, shlex.quote(word)) for word in given))
            if ">" in words:
                words = words[: words.index(">")]
            if words:
                yield from _alternatives(words)


def _alternatives(words: list[str]) -> Iterator[list[str]]:
    """One command for each of a|b|c."""
    i = next((i for i, word in enumerate(words) if re.fullmatch(r"\w+(\|\w+)+", word)), None)
    if i is None:
        yield words
        return
    for choice in words[i].split("|"):
        yield from _alternatives([*words[:i], choice, *words[i + 1 :]])


def check(words: list[str]) -> None:
    """Raise AssertionError for a command that could not be given as it stands; nothing of its work is done."""
    program, *given = words
    elided = any(word in ELIDED for word in given)
    given = [word for word in given if word not in ELIDED]
    if program == "make":
        _check_make(given)
    elif program == "pipecomp":
        _check_own(given, elided)
    elif program == "python":
        _check_python(given, elided)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        found = parsed(lambda: get_args_parser().parse_args(given), elided)
        if found.training_script is not None:
            inner = ["-m"] if found.module else []
            _check_python([*inner, found.training_script, *found.training_script_args], elided)
    elif program == "deepspeed":
        from deepspeed.launcher import runner

        found = parsed(lambda: runner.parse_args(given), elided)
        if found.user_script is not None:
            _check_python([found.user_script, *found.user_args], elided)
    elif program == "pip":
        assert given[0] == "install", words
    elif program in ("uv", "pipx"):  # tests/soak/test_packaging.py runs them
        assert "install" in given[:2], words
    elif program == "bash":
        assert (ROOT / given[0]).is_file(), words
    elif program == ".":
        assert given == [".venv/bin/activate"], words
    elif program in ELSEWHERE:
        check_elsewhere(program, given)
    else:
        assert program in OTHERS, f"{program}: say in tests/pages.py how it is tried"
        assert shutil.which(program), program


def check_elsewhere(program: str, given: list[str]) -> None:
    """Check that such a command's files of this repository exist, and pipecomp's own command in it."""
    assert not [word for word in given if word.startswith("examples/") and not (ROOT / word).exists()], given
    if program in ("docker", "podman") and given[0] == "run" and "pipecomp" in given:
        _check_own(given[given.index("pipecomp") + 1 :], elided=False)
    if program == "sbatch":
        _check_own(["train", *given[1:]], elided=False)


def parsed(act: Callable[[], Any], elided: bool = False) -> Any:
    """Return the namespace that the argument parser called by `act` makes of its command line; `act` goes no further.

    elided: the page leaves some arguments out, so that required ones may be missing.
    """
    original = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        if elided:
            for group in self._mutually_exclusive_groups:
                group.required = False
            for action in self._actions:
                action.required = False
                if not action.option_strings and action.nargs is None:
                    action.nargs = "?"
        found, rest = original(self, args, namespace, **more)
        assert not rest, f"unknown arguments: {rest}"
        raise Parsed(found)

    said = io.StringIO()
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse), contextlib.redirect_stderr(said):
        try:
            act()
        except Parsed as found:
            return found.args[0]
        except SystemExit as error:
            raise AssertionError(said.getvalue()) from error
    raise AssertionError("no command line was parsed")


def _check_make(given: list[str]) -> None:
    known = "".join((ROOT / name).read_text() for name in ("Makefile", "scripts/setup.sh"))
    for word in given:
        name, is_variable, value = word.partition("=")
        where = rf"[$][({{]{name}\b" if is_variable else rf"^{name}:"
        assert re.search(where, known, re.MULTILINE), word
        if name == "ARGS" and value not in ELIDED:
            target = next(other for other in given if "=" not in other)
            if target == "test":
                _check_pytest(shlex.split(value))
            elif target == "demo":
                _check_own(["demo", *shlex.split(value)], elided=False)


def _check_own(given: list[str], elided: bool) -> None:
    """The command line of pipecomp, parsed down to the command that would run."""
    import click
    import typer

    from pipecomp.cli import app

    command: Any = typer.main.get_command(app)
    context, words = None, given
    try:
        while hasattr(command, "commands"):
            if not words:
                return
            assert words[0] in command.commands, f"no command {words[0]!r} among {sorted(command.commands)}"
            context = type(command).context_class(command, parent=context)
            command, words = command.commands[words[0]], words[1:]
        command.make_context(command.name, list(words), parent=context, resilient_parsing=elided or not words)
    except click.exceptions.Exit:  # --help
        pass
    except click.ClickException as error:
        raise AssertionError(f"pipecomp {' '.join(given)}: {error.format_message()}") from error


def _check_pytest(given: list[str]) -> None:
    """Folders and files are there, and markers are registered."""
    registered = (ROOT / "pyproject.toml").read_text()
    for before, word in zip(["", *given], given, strict=False):
        if before == "-m":
            assert f'"{word}: ' in registered, f"no marker {word!r}"
        elif before != "-k" and not word.startswith("-"):
            assert (ROOT / word).exists(), word


def _check_python(given: list[str], elided: bool) -> None:
    if given == [READERS_SCRIPT]:
        return
    if not given:
        assert elided, "python without anything to run"
        return
    if given[0] == "-m" and given[1] == "pipecomp.cli":
        _check_own(given[2:], elided)
        return
    if given[:2] == ["-m", "pytest"]:
        _check_pytest(given[2:])
        return
    if given == ["-m", "pipecomp.kernels.build"]:  # takes no arguments
        assert (ROOT / "kernels" / "build.py").is_file()
        return
    if given == ["-m", "benchmarks"]:  # lists them
        assert (ROOT / "benchmarks" / "__main__.py").is_file()
        return
    if given[0] == "-m":
        path, rest = ROOT / (given[1].replace(".", "/") + ".py"), given[2:]
        if not path.is_file():
            path = path.with_suffix("") / "__main__.py"
    else:
        path, rest = ROOT / given[0], given[1:]
    assert path.is_file(), given
    with (
        mock.patch.object(sys, "argv", [str(path), *rest]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        parsed(lambda: runpy.run_path(str(path), run_name="__main__"), elided)
