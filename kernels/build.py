"""Build of the native kernels: `python -m pipecomp.kernels.build [OUTPUT]` in a source tree. Needs no other package.

setup.py builds the package's extension with the same function.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = ("avx512.cpp", "avx2.cpp", "portable.cpp", "interface.cpp")  # in native/, the longest to compile first
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
    "-fPIC",
)
LINK_FLAGS = ("-pthread", "-shared")
TIMEOUT_S = 900  # for a compiler that hangs: 50 times the longest command on one quiet core


def find_compiler() -> str | None:
    """Find the C++ compiler: $CXX, else c++, g++ or clang++; None if there is none."""
    named = os.environ.get("CXX", "")
    return next((path for path in map(shutil.which, (named, "c++", "g++", "clang++")) if path), None)


def source_flags(source: str) -> tuple[str, ...]:
    """List a source's flags. On x86-64 only CPUs without AVX2 run the portable code: not worth 15 s of compiling."""
    fast = source != "portable.cpp" or platform.machine() not in ("x86_64", "AMD64")
    return COMPILE_FLAGS if fast else (*COMPILE_FLAGS, "-O1")


def run(command: list[str], timeout_s: float) -> None:
    """Run a compiler command. RuntimeError with its output if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)}\nstopped after {timeout_s} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def build(output: Path, extra_flags: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S) -> Path:
    """Compile the kernels to the shared library `output`, on all cores.

    timeout_s: limit for each compiler command. RuntimeError with the compiler's output if one fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++ or clang++, or name one in CXX")
    folder = Path(__file__).resolve().parent / "native"
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(temporary, source).with_suffix(".o")) for source in SOURCES]

        def compile_one(source: str, to: str) -> None:
            run([compiler, *source_flags(source), *extra_flags, "-c", str(folder / source), "-o", to], timeout_s)

        list(pool.map(compile_one, SOURCES, objects))
        run([compiler, *extra_flags, *objects, "-o", str(partial), *LINK_FLAGS], timeout_s)
    os.replace(partial, output)
    return output


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent / "_native.so"))
    except RuntimeError as error:
        sys.exit(str(error))
