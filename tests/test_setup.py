"""scripts/setup.sh around a virtual environment that is there: with stand-ins for Python, pip and venv."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.limits import HANG_S

SETUP = Path(__file__).parents[1] / "scripts" / "setup.sh"
WHOLE = "#!/bin/sh\nexit 0\n"
WITHOUT_PIP = '#!/bin/sh\n[ "$2" != pip ] || { echo "No module named pip" >&2; exit 1; }\n'
MAKES_VENVS = f"""#!/bin/sh
[ "$2" = venv ] || exit 0
echo made >>{{log}}
mkdir -p "$3/bin"
printf '%s' '{WHOLE}' >"$3/bin/python"
chmod +x "$3/bin/python"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def set_up(folder: Path, **environment: str) -> tuple[str, int]:
    """Set up folder/venv; returns what was said, and how many environments were made."""
    log = folder / "log"
    program(folder / "python", MAKES_VENVS.format(log=log))
    done = subprocess.run(
        ["sh", SETUP, "venv"], cwd=folder, env=os.environ | {"PYTHON": str(folder / "python")} | environment,
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready" in done.stdout
    return done.stdout, log.read_text().count("made") if log.exists() else 0


@pytest.mark.parametrize(
    ("python", "made"), [(None, 1), (WHOLE, 0), (WITHOUT_PIP, 1), ("#!/no/such/python", 1)],
    ids=["nothing", "whole", "without pip", "without python"],
)  # fmt: skip
def test_what_is_there_stays_if_it_has_pip(tmp_path, python, made):
    venv = tmp_path / "venv"
    if python is not None:
        program(venv / "bin" / "python", python)
        (venv / "pyvenv.cfg").write_text("")
        (venv / "of an earlier time").write_text("")
    assert set_up(tmp_path)[1] == made
    assert (venv / "of an earlier time").exists() == (made == 0)
    assert (venv / ".ready").exists()


def test_a_folder_that_is_no_environment_loses_nothing(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("")
    assert set_up(tmp_path)[1] == 1
    assert (tmp_path / "venv" / "thesis.txt").exists()


INSTALLS = """#!/bin/sh
case "$*" in
*"import sys, torch"*) exit 1 ;;
*" install "*) echo "$DS_ACCELERATOR: $*" >>installed ;;
esac
"""


@pytest.mark.parametrize("index", ["", "https://wheels/cu126"])
def test_with_a_gpu(tmp_path, index):
    """DeepSpeed is not to see it: its installation asks for CUDA's compiler. torch may be that of another index."""
    program(tmp_path / "venv" / "bin" / "python", INSTALLS)
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    program(tmp_path / "nvidia-smi", WHOLE)
    said, _ = set_up(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", TORCH_INDEX_URL=index, DS_ACCELERATOR="cuda")
    torch, pipecomp = (tmp_path / "installed").read_text().splitlines()
    assert "+cpu" not in torch
    assert torch.endswith(f"--extra-index-url {index}" if index else "torch==2.13.0"), said
    assert pipecomp.startswith("cpu: ")
