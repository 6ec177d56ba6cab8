"""Builds the native kernels in a source tree: `python -m pipecomp.kernels.build`. Needs no other package.

setup.py takes its compiler flags from here, so that both give the same code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = "native.cpp"
# -ffp-contract=off: a fused multiply-add rounds once where the other backends round twice.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-pthread",
)
LINK_FLAGS = ("-pthread",)


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX, else c++, g++ or clang++; None if there is none."""
    named = os.environ.get("CXX", "")
    return next((path for path in map(shutil.which, (named, "c++", "g++", "clang++")) if path), None)


def build(output: Path, extra_flags: tuple[str, ...] = (), timeout_s: float = 600) -> Path:
    """Compile the kernels to the shared library `output`. RuntimeError with the compiler's words if that fails."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++ or clang++, or name one in CXX")
    source = Path(__file__).resolve().parent / SOURCE
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    command = [compiler, *COMPILE_FLAGS, *extra_flags, "-fPIC", "-shared", str(source), "-o", str(partial), *LINK_FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    os.replace(partial, output)
    return output


if __name__ == "__main__":
    try:
        print(build(Path(__file__).resolve().parent / "_native.so"))
    except RuntimeError as error:
        sys.exit(str(error))
