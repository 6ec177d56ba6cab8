"""Output that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

TALKS = """
import sys
from pipecomp.utils.tables import outlast_readers
outlast_readers()
for _ in range(3):
    sys.stdout.write("out " * 5000)
    sys.stdout.flush()
    sys.stderr.write("err\\n")
    sys.stderr.flush()
open(sys.argv[1], "w").write("went on")
"""


@pytest.mark.parametrize("way", [">/dev/full", "2>/dev/full", ">&-", ">&- 2>&-", "| true"])
def test_a_process_outlasts_its_output(tmp_path: Path, way: str) -> None:
    line = f'"$0" -c "$1" "$2" {way}'
    words = ["sh", "-c", line, sys.executable, TALKS, str(tmp_path / "after")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (tmp_path / "after").read_text() == "went on", done.stderr


def test_a_stream_of_ones_own_keeps_its_descriptor() -> None:
    own = "import os, sys; sys.stdout = os.fdopen(1, 'w')\n"
    said = own + "from pipecomp.utils.tables import outlast_readers\noutlast_readers()\nprint('said')"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "said\n"
