"""Every decoder is fuzzed for a while: see tests/fuzz/run.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.limits import HANG_S

MINUTES = 0.5

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_decoder(target: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "fuzz" / "run.py"
    words = [sys.executable, str(script), "--target", target, "--minutes", str(MINUTES), "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
