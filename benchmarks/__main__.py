"""python -m benchmarks [NAME ...]: the list of benchmarks, or one of them with its options (--help names them)."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def questions() -> dict[str, str]:
    """Return each benchmark's description: the first line of every module here that has a `main`."""
    lines = {}
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in module.body):
            lines[file.stem] = (ast.get_docstring(module) or "").splitlines()[0]
    return lines


def run(argv: list[str]) -> None:
    """Hand the options to the benchmark that comes first in them; without one print the list."""
    known = questions()
    if argv and argv[0] in known:
        importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    elif argv and argv[0] not in ("-h", "--help"):
        raise SystemExit(f"python -m benchmarks: got {argv[0]}, allowed: {', '.join(known)}")
    else:
        print("\n".join([str(__doc__), *(f"{name:<20} {question}" for name, question in known.items())]))


if __name__ == "__main__":
    run(sys.argv[1:])
