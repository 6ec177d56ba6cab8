"""Does a test notice it? Puts each defect of scripts/mutant_lists into a copy of the repository and runs its tests.

    python scripts/mutants.py                 # all, and the table of docs/reliability.md
    python scripts/mutants.py --only CASQ     # those whose name contains this

Exit status 1: a defect survives its tests. An edit whose text is not found exactly once is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.mutant_lists import MUTANTS  # noqa: E402
from scripts.mutant_lists.mutant import Mutant  # noqa: E402

PAGE, BEGIN, END = ROOT / "docs" / "reliability.md", "<!-- mutants -->\n", "<!-- end of mutants -->\n"
LEFT_OUT = (".git", ".venv", "shared", "__pycache__", ".*_cache", "build", "*.egg-info", "demo-out")
LIMIT_S = 900


def changed(source: str, mutant: Mutant) -> str:
    """The text with the edit. ValueError unless what it replaces is there exactly once."""
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: its text is {found} times in {mutant.file}: {mutant.old!r}")
    return source.replace(mutant.old, mutant.new)


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status in the copy, and what it said."""
    # No bytecode: of two edits in one second Python could take the first one's for the second.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "soak or not soak", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def survives(copy: Path, mutant: Mutant) -> bool:
    """Whether the tests pass with the edit. RuntimeError if they could not run."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(changed(source, mutant), encoding="utf-8")
    try:
        status, said = run_tests(copy, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    if status not in (0, 1):  # 1: tests failed; others: there are none, or they could not be collected
        raise RuntimeError(f"{mutant.name}: pytest ended with {status}\n{said[-2000:]}")
    return status == 0


def line(mutant: Mutant, killed: bool | None) -> str:
    """A row of the table; killed: None where it was not run."""
    tests = " ".join(f"`{test.partition('[')[0]}`" for test in mutant.tests)
    result = {True: "noticed", False: "**not noticed**", None: "not run yet"}[killed]
    return f"| {mutant.name} | {mutant.why} | {result} | {tests} |\n"


def write_page(killed: dict[str, bool]) -> None:
    """Put the table into docs/reliability.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = f"{sum(killed.values())} of {len(killed)} that were run are noticed, of {len(MUTANTS)} in all:\n\n"
    table += "| defect | what it would do | | by |\n|---|---|---|---|\n"
    table += "".join(line(mutant, killed.get(mutant.name)) for mutant in MUTANTS)
    PAGE.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status. argv: the command line's arguments, by default those of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="defects whose name contains this; draws no table")
    given = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if given.only in mutant.name]
    if not chosen:
        parser.error(f"--only: no defect's name contains {given.only!r}")
    for mutant in chosen:
        changed((ROOT / mutant.file).read_text(encoding="utf-8"), mutant)
    killed = {}
    with tempfile.TemporaryDirectory(prefix="pipecomp-mutants-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        status, said = run_tests(copy, sorted({test for mutant in chosen for test in mutant.tests}))
        if status:
            print(f"Without any defect the tests do not pass:\n{said[-3000:]}")
            return 2
        for mutant in chosen:
            killed[mutant.name] = not survives(copy, mutant)
            print(f"{'noticed ' if killed[mutant.name] else 'SURVIVES'}  {mutant.name}", flush=True)
    if not given.only:
        write_page(killed)
    print(f"{sum(killed.values())} of {len(killed)} defects are noticed")
    return 0 if all(killed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
