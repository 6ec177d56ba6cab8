"""The Dockerfile's steps as a script in an empty folder, and a training with what they have installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tests.packaging as packaging
from tests.models import save_model, write_text

pytestmark = [pytest.mark.soak, pytest.mark.timeout(packaging.HANGS_S * 6)]

DOCKERFILE = packaging.ROOT / "examples" / "docker" / "Dockerfile"
SYSTEM = ("apt-get ", "useradd ")  # steps that change the machine itself


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_its_steps_make_an_environment_that_trains(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    source = packaging.committed(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    (tmp_path / "torch.txt").write_text(f"torch=={torch.__version__}\n")  # this one: a CUDA build has several GB
    environment["PIP_CONSTRAINT"] = str(tmp_path / "torch.txt")
    entry: list[str] = []

    def inside(text: str) -> str:
        return re.sub(r"(?<![\w.])/(src|opt/pipecomp)\b", rf"{image}/\1", text)

    for word, rest in instructions():
        if word == "COPY":
            _, to = rest.split()
            shutil.copytree(source, inside(to), ignore=shutil.ignore_patterns(".git"))
        elif word == "RUN" and not rest.startswith(SYSTEM):
            done = subprocess.run(
                inside(rest), shell=True, cwd=image, env=environment, capture_output=True, text=True, check=False,
                timeout=packaging.HANGS_S * 5,
            )  # fmt: skip
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                environment[name] = inside(value).replace("$PATH", environment["PATH"])
        elif word == "ENTRYPOINT":
            entry = re.findall(r'"([^"]+)"', rest)
        else:
            assert word in ("ARG", "FROM", "USER", "WORKDIR", "CMD", "RUN"), word
    shutil.rmtree(image / "src")  # an image's layers may keep it; nothing needs it

    assert shutil.which(entry[0], path=environment["PATH"]) == str(image / "opt/pipecomp/bin/pipecomp")
    work = tmp_path / "work"
    work.mkdir()
    save_model(work / "model", write_text(work / "text.txt"))
    command = [*entry, *"train --model model --data text.txt --max-steps 3 --batch 8 --out run".split()]  # noqa: SIM905
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=packaging.HANGS_S, check=False,
        executable=shutil.which(entry[0], path=environment["PATH"]),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "run" / "model" / "config.json").is_file()
    told = subprocess.run(
        ["pipecomp", "init", "gpt2_wikitext2"], cwd=work, env=environment, capture_output=True, text=True, check=False,
        timeout=packaging.HANGS_S, executable=str(image / "opt/pipecomp/bin/pipecomp"),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert (work / "gpt2_wikitext2" / "train.py").is_file()


def test_the_image_has_no_root() -> None:
    words = [word for word, _ in instructions()]
    assert words.index("USER") < words.index("ENTRYPOINT")
    (user,) = (rest for word, rest in instructions() if word == "USER")
    assert user not in ("root", "0")
