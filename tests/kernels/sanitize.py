"""Run test_backends.py on native kernels built with the address and undefined-behaviour sanitizers.

    python tests/kernels/sanitize.py

Takes a few minutes, most of them in the compiler. Any finding ends the run with the sanitizer's report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pipecomp.kernels.build import build, find_compiler

FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def runtime(name: str) -> str:
    """Path of a sanitizer's runtime, which must be loaded before Python's own libraries."""
    return subprocess.run(
        [find_compiler() or "c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    """Build, run, return pytest's exit status."""
    tests = Path(__file__).with_name("test_backends.py")
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder) / "sanitized.so", FLAGS, timeout_s=1800)
        env = {
            **os.environ,
            "KERNELS_UNDER_TEST": str(library),
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')} {runtime('libstdc++.so')}",
            # Python and torch keep much until exit; the kernels allocate nothing that outlives a call.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        options = ["-p", "no:cacheprovider", "-k", "not triton", "--timeout=600"]
        command = [sys.executable, "-m", "pytest", *options, str(tests)]
        return subprocess.run(command, env=env, cwd=tests.parents[1], timeout=1800).returncode


if __name__ == "__main__":
    sys.exit(main())
