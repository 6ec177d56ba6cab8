"""The files for SkyPilot, systemd and Slurm, as far as any machine can run them: with a stand-in for pipecomp."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# Says which rank it is, and checks its command line as the real one would.
STAND_IN = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import tests.pages
tests.pages._check_own(sys.argv[1:], elided=False)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ[name] for name in names))
print(*sys.argv[1:])
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with the stand-in first."""
    (tmp_path / "pipecomp").write_text(STAND_IN)
    (tmp_path / "pipecomp").chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def said(command: list[str], **environment: str) -> list[str]:
    done = subprocess.run(
        command, env={"HOME": "/nowhere", **environment}, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_skypilot_starts_the_ranks(path):
    task = yaml.safe_load((EXAMPLES / "sky" / "train.yaml").read_text())
    assert task["num_nodes"] == 2
    assert task["resources"]["use_spot"] is True
    (python,) = re.findall(r"--python (\d+\.\d+) ", task["setup"])
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert SpecifierSet(wanted).contains(python), "images may bring an older one"
    mounts = tuple(task["file_mounts"])
    assert task["envs"]["OUT"].startswith(mounts), "checkpoints must outlive a machine"
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    place, command = said(["bash", "-euc", task["run"]], PATH=path, **task["envs"], **nodes)
    assert place == "1 2 0 1 10.0.0.5 29500"
    assert command.startswith("train --model gpt2 --data text.txt --out /checkpoints/run --store /nowhere/messages")


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(EXAMPLES / "systemd" / "pipecomp.service")
    return found


def test_systemd_starts_a_rank(path):
    lines = (EXAMPLES / "systemd" / "run.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert program == "/opt/pipecomp/bin/pipecomp"
    words = [re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word) for word in words]
    place, command = said(["pipecomp", *words], PATH=path, **variables)
    assert place == "0 2 0 1 10.8.0.1 29500"
    assert command == "train --model /srv/pipecomp/model --data /srv/pipecomp/text.txt --out run --save-every 100"


def test_systemd_starts_a_run_again_that_was_told_to_stop():
    service = unit()["Service"]
    assert service["RestartForceExitStatus"] == service["SuccessExitStatus"] == "75"
    assert (service["KillMode"], service["Restart"]) == ("mixed", "on-failure")
    assert int(service["TimeoutStopSec"]) >= 60
    assert service["ReadWritePaths"] == service["WorkingDirectory"]


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = (EXAMPLES / "systemd" / "pipecomp.service").read_text()
    (tmp_path / "pipecomp.service").write_text(text.replace("/opt/pipecomp/bin/pipecomp", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "pipecomp.service"], capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert "pipecomp.service:" not in done.stderr, done.stderr


def test_what_was_installed_is_checked_and_not_the_checkout(tmp_path):
    """The page of systemd installs from a checkout, in which pipecomp is importable, without compiled kernels."""
    (tmp_path / "pipecomp" / "kernels").mkdir(parents=True)
    (tmp_path / "pipecomp" / "kernels" / "dispatch.py").write_text("raise SystemExit('the one of the checkout')")
    found = shlex.quote(sys.executable)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "DeepSpeed finds: $DS_ACCELERATOR"\n')
    (tmp_path / "pip").chmod(0o755)
    makes = f'#!/bin/sh\nmkdir -p "$3/bin"; mv pip "$3/bin/pip"; ln -s {found} "$3/bin/python"\n'
    (tmp_path / "python3").write_text(makes)
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        ["sh", EXAMPLES / "docker" / "install.sh", ".", "made"], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert "the one of the checkout" not in done.stderr
    assert done.stdout == "DeepSpeed finds: cpu\n", "with a GPU it would look for CUDA's compiler"
    assert (tmp_path / "made" / "bin" / "python").is_file()


def test_slurm_asks_for_what_the_page_says():
    text = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    asked = re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert dict(asked) == {
        "--job-name": "pipecomp",
        "--nodes": "2",
        "--ntasks-per-node": "1",
        "--time": "12:00:00",
        "--requeue": "",
        "--open-mode": "append",
        "--signal": "B:TERM@120",
    }
    lines = text.splitlines()
    assert not [line for line in lines[: lines.index("set -uo pipefail")] if not line.startswith("#")], (
        "Slurm reads no directive behind a command"
    )


def test_every_example_of_a_shell_can_be_parsed():
    scripts = [*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")]
    assert len(scripts) >= 3
    for script in scripts:
        shell = "sh" if script.read_text().startswith("#!/bin/sh") else "bash"
        subprocess.run([shell, "-n", script], check=True, timeout=HANG_S)
