"""Run the shell commands of README.md, docs/using.md and docs/running in order, as a reader on a new machine does.

    python scripts/page_commands.py                      # all pages
    python scripts/page_commands.py README.md --setup    # one page; `make setup` makes a new environment
    python scripts/page_commands.py --list               # the blocks, and how each is run

Every page begins in a copy of the checkout with an empty home. Commands run one after another in bash; the working
directory and exported variables last to the end of the page. A comment before a block changes how it is run:

    <!-- not run: REASON -->        nothing here can stand in for what it needs
    <!-- run elsewhere: WHERE -->   another part of CI runs it
    <!-- needs: root, nft -->       run where these are there, otherwise reported
    <!-- new folder: REASON -->     begins in a new copy: an alternative to the blocks above it

Exit status 1: a command failed; its page, line and output are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGES = (
    "README.md",
    "docs/using.md",
    *(f"docs/running/{name}.md" for name in ("README", "ssh", "elastic", "docker", "slurm", "sky", "systemd", "vpn")),
)
HANGS_S = 900.0
SHOWN_LINES = 200  # of a failed command's output

# -- what stands in for what a reader has and one machine without a network has not

# Words of commands. Both machines are processes of this one; each of a word's values gets a process, all at once.
WORDS: dict[str, tuple[str, ...]] = {
    "host1,host2,host3": ("127.0.0.1,127.0.0.2,127.0.0.3",),
    "host1,host2": ("127.0.0.1,127.0.0.2",),
    "host4": ("127.0.0.4",),
    "100.101.102.103,100.101.102.104": ("127.0.0.1,127.0.0.2",),
    "10.8.0.1,10.8.0.2": ("127.0.0.1,127.0.0.2",),
    "10.8.0.1": ("127.0.0.1",),
    "FIRST_MACHINE": ("127.0.0.1",),
    "29500": ("PORT",),  # a free one
    "R": ("0", "1"),
}
# Programs of other machines. The image of a container is this environment.
PROGRAMS = {
    "docker": """
        case $1 in
        build) shift; while [[ $1 == -* ]]; do [[ $1 == -f ]] && test -f "$2"; shift 2; done; test -d "$1" ;;
        run)
            shift
            while [[ $1 == -* ]]; do
                case $1 in -e) export "$2"; shift 2 ;; -v) shift 2 ;; *) shift ;; esac
            done
            [[ $1 == pipecomp ]]; exec "$@" ;;
        esac""",
    "podman": """exec docker "$@" """,
    "sbatch": """
        export SLURM_JOB_ID=$((MASTER_PORT - 20000)) SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST='node[0-1]'
        exec bash "$@" """,
    "srun": """
        SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
        SLURM_PROCID=1 SLURM_LOCALID=0 "$@"
        wait $first""",
    "scontrol": """echo 127.0.0.1""",
}
# A script of the reader's own, started by `python train.py`.
TRAIN = """
import os
import pipecomp
from tests.models import ds_config, samples

engine = pipecomp.initialize(
    model="gpt2",
    num_stages=int(os.environ["WORLD_SIZE"]),
    config=ds_config({"activations": {"method": "aqsgd"}}),
    training_data=samples(24),
)
losses = [float(engine.train_batch()) for _ in range(8)]
assert losses[-1] < losses[0], losses
engine.close()
"""


def write_inputs(folder: Path) -> None:
    """Write what the pages' readers bring: models of the hub as small folders of the same architecture, and data."""
    from tests.models import byte_pairs, gpt2, save_qwen3, write_text

    text = write_text(folder / "text.txt", 120)
    gpt2(4, vocab_size=300, n_positions=32).save_pretrained(folder / "gpt2")
    byte_pairs(text.read_text().splitlines(keepends=True)).save_model(str(folder / "gpt2"))
    chats = [
        [
            {"role": "user", "content": f"What is {i} plus {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}, as {i} and {i} make {2 * i}."},
        ]
        for i in range(48)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    save_qwen3(folder / "Qwen" / "Qwen3-0.6B", chats)
    (folder / "train.py").write_text(TRAIN)


# -- blocks of the pages

MARKS = ("not run", "run elsewhere", "needs", "new folder")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+): (?P<reason>[^>]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A shell block of a page. line: of its first command; mark: "" or one of MARKS."""

    page: str
    line: int
    text: str
    mark: str
    reason: str

    def commands(self) -> list[tuple[int, str]]:
        """Divide the block into commands that bash takes, each with its line."""
        out, kept = [], ""
        for number, line in enumerate(self.text.splitlines(), self.line):
            if not kept and (not line.strip() or line.lstrip().startswith("#")):
                continue
            kept += line + "\n"
            whole = (
                not line.endswith("\\")
                and subprocess.run(["bash", "-n", "-c", kept], capture_output=True).returncode == 0
            )
            if whole:
                out.append((number - kept.count("\n") + 1, kept.strip()))
                kept = ""
        if kept:
            raise SystemExit(f"{self.page}:{self.line}: bash cannot read this:\n{kept}")
        return out


def blocks_of(page: str, text: str) -> list[Block]:
    """Find the shell blocks of a page. Raises SystemExit for a mark that is not known or not before a shell block."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        mark = match["mark"] or ""
        if mark and (mark not in MARKS or match["language"] not in ("", "bash", "sh")):
            raise SystemExit(
                f"{page}:{line}: got mark {mark!r}, allowed: {', '.join(MARKS)}, before a block for a shell"
            )
        if match["language"] in ("", "bash", "sh"):
            found.append(Block(page, line, match["text"], mark, " ".join((match["reason"] or "").split())))
    marks = len(re.findall(rf"^<!-- (?:{'|'.join(MARKS)}):", text, re.M))
    if marks != sum(bool(block.mark) for block in found):
        raise SystemExit(f"{page}: a mark is not directly before a block for a shell")
    return found


def missing_for(needs: str) -> list[str]:
    """Return those of the things that a block needs which are not there: programs, or the right to do all (root)."""
    names = [name.strip() for name in needs.split(",")]
    return [name for name in names if (os.geteuid() != 0 if name == "root" else shutil.which(name) is None)]


# -- a reader

_KEPT = 'status=$?; pwd >"$STATE/folder"; env -0 >"$STATE/environment"; exit $status'


class CommandError(Exception):
    """A command failed."""


class Reader:
    """One reader of a page: a home, a folder and variables that last from command to command."""

    def __init__(self, folder: Path, inputs: Path, *, port: int, real_setup: bool = False) -> None:
        self.home, self.port, self._inputs, self._real_setup = folder, port, inputs, real_setup
        self._programs = folder / "stand-ins"
        self._programs.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            path = self._programs / name
            path.write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{text}\n")
            path.chmod(0o755)
        self._copies = 0
        self.begin()

    def begin(self) -> None:
        """Change to a new copy of the checkout, with the environment of a new login."""
        self._copies += 1
        self.folder = self.home / f"pipecomp{self._copies if self._copies > 1 else ''}"
        copy_checkout(self.folder)
        path = [str(self._programs), *os.environ["PATH"].split(os.pathsep)]
        if not self._real_setup:
            # In place of what `make setup` makes from the same files: the environment of this script.
            (self.folder / ".venv").mkdir()
            (self.folder / ".venv" / "bin").symlink_to(Path(sys.prefix) / "bin")
            (self.folder / ".venv" / ".ready").touch()
            path.insert(1, str(Path(sys.prefix) / "bin"))
        else:
            path = [entry for entry in path if Path(entry) != Path(sys.prefix) / "bin"]
        shutil.copytree(self._inputs, self.folder, dirs_exist_ok=True)
        self.environment = {
            "PATH": os.pathsep.join(path),
            "HOME": str(self.home),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "PYTHONPATH": str(self.folder if self._real_setup else ROOT),
            "MASTER_PORT": str(self.port),
            "PET_MASTER_PORT": str(self.port),  # torchrun's
        }

    def run(self, command: str) -> str:
        """Run a command, in one process for each value of its words; returns the output. Raises CommandError."""
        started = []
        for number, text in enumerate(versions_of(command, self.port)):
            state = self.home / f"state-{number}"
            state.mkdir(exist_ok=True)
            output = (state / "output").open("w+b")
            words = ["bash", "-c", f"set -eo pipefail; trap '{_KEPT}' EXIT\n{text}\n"]
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment | {"STATE": str(state)}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            started.append((text, process, output, state))
        deadline, problems, said = time.monotonic() + HANGS_S, [], ""
        for text, process, output, _ in started:
            with output:
                try:
                    status = str(process.wait(max(1.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    status = f"no end within {HANGS_S:g} s"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what a command has left behind
                output.seek(0)
                said = output.read().decode(errors="replace")
            if status != "0":
                problems.append(
                    f"$ {text}\n" + "\n".join(said.splitlines()[-SHOWN_LINES:]) + f"\nexit status: {status}"
                )
        if problems:
            raise CommandError("\n\n".join(problems))
        state = started[0][3]
        self.folder = Path((state / "folder").read_text().rstrip("\n"))
        kept = (state / "environment").read_bytes().decode().split("\0")
        self.environment = dict(pair.split("=", 1) for pair in kept if "=" in pair)
        return said


def versions_of(command: str, port: int) -> list[str]:
    """Return the command with every word of WORDS replaced, once for each of the word's values."""
    found = [command]
    for word, values in WORDS.items():
        pattern = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.])")
        if pattern.search(found[0]):
            found = [pattern.sub(str(port) if value == "PORT" else value, text) for text in found for value in values]
    return found


def copy_checkout(folder: Path) -> None:
    """Copy what git has or would take, and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "kernels").glob("*.so")]
    for name in filter(None, [*listed.split("\0"), *kernels]):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def free_port() -> int:
    """Find a free port from 20000 to 29999, from which stand-ins make the number of a Slurm job."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise SystemExit("no port from 20000 to 29999 is free")


# -- all pages


class Tour:
    """All pages one after another. An alternative whose commands have succeeded is not run again."""

    def __init__(self, folder: Path, *, real_setup: bool = False, show: bool = False) -> None:
        self._folder, self._real_setup, self._show = folder, real_setup, show
        self._inputs = folder / "inputs"
        self._inputs.mkdir(parents=True)
        write_inputs(self._inputs)
        self._port = free_port()
        self._alone: dict[tuple[str, ...], str] = {}  # commands of blocks that began in a new copy, and where that was

    def run(self, page: str, blocks: list[Block]) -> None:
        """Run a page's blocks and print a line for each command. Raises SystemExit with the first that fails."""
        reader: Reader | None = None
        with tempfile.TemporaryDirectory(prefix="home-", dir=self._folder) as home:
            for block in blocks:
                place, first = f"{page}:{block.line}", block.text.strip().splitlines()[0]
                lacking = missing_for(block.reason) if block.mark == "needs" else []
                if block.mark in ("not run", "run elsewhere") or lacking:
                    why = f"not run: needs {', '.join(lacking)}" if lacking else f"{block.mark}: {block.reason}"
                    print(f"{place}: {first}\n    {why}", flush=True)
                    continue
                key = tuple(text for _, command in block.commands() for text in versions_of(command, self._port))
                is_new = reader is None or block.mark == "new folder"
                if is_new and key in self._alone:
                    print(f"{place}: {first}\n    the same commands as in {self._alone[key]}", flush=True)
                    continue
                if reader is None:
                    reader = Reader(Path(home), self._inputs, port=self._port, real_setup=self._real_setup)
                elif block.mark == "new folder":
                    reader.begin()
                for line, command in block.commands():
                    self._run(reader, page, line, command)
                if is_new:
                    self._alone[key] = place

    def _run(self, reader: Reader, page: str, line: int, command: str) -> None:
        print(f"{page}:{line}: {command}", flush=True)
        began = time.monotonic()
        try:
            said = reader.run(command)
        except CommandError as error:
            raise SystemExit(f"\n{page}:{line}: this command fails\n{error}") from None
        if self._show:
            print(said)
        print(f"    done in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Run the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="default: README.md, docs/using.md and docs/running")
    parser.add_argument("--list", action="store_true", help="show the blocks and how each is run, and run nothing")
    parser.add_argument("--setup", action="store_true", help="let `make setup` make a new environment (minutes)")
    parser.add_argument("--show", action="store_true", help="print what the commands print")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pages = {page: blocks_of(page, (ROOT / page).read_text(encoding="utf-8")) for page in options.pages}
    if options.list:
        for block in (block for blocks in pages.values() for block in blocks):
            how = f"{block.mark}: {block.reason}" if block.mark else "run"
            print(f"{block.page}:{block.line}: {how}\n{block.text}")
        return
    with tempfile.TemporaryDirectory(prefix="pages-") as folder:
        tour = Tour(Path(folder), real_setup=options.setup, show=options.show)
        for page, blocks in pages.items():
            tour.run(page, blocks)


if __name__ == "__main__":
    main()
