"""`pipecomp train --peers` on two nodes of a slow network, with a stand-in for ssh that enters the other node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S
from tests.models import metrics, save_model, write_text
from tests.recipes.recipe_runs import ROOT

WHY_NOT = missing()
pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

# Its last argument is a line for the other machine's shell, which starts with none of this one's variables.
SSH = """#!/bin/sh
[ "$1 $2 $7" = "-o BatchMode=yes me@198.18.0.2" ] || exit 255
exec env -i PATH="$PATH" ip netns exec {space} sh -c "$8"
"""


def test_two_machines(tmp_path: Path) -> None:
    save_model(tmp_path / "model", write_text(tmp_path / "text.txt"))
    script = (
        'if [ "$NODE_RANK" != 0 ]; then exec sleep 1; fi\n'
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME\n"
        f'cd {tmp_path} && PATH="{tmp_path}:$PATH" PYTHONPATH={ROOT} DS_ACCELERATOR=cpu exec {sys.executable} '
        "-m pipecomp.cli train --model model --data text.txt --peers 198.18.0.1,me@198.18.0.2 --batch 8 --max-steps 6 "
        "--epochs 9 --lr 1e-2 --out mine"
    )
    said: list[str] = []
    with Lab(nodes=2, bandwidth="1mbit", delay="5ms") as lab:
        (tmp_path / "ssh").write_text(SSH.format(space=f"{lab.name}-n1"))
        (tmp_path / "ssh").chmod(0o755)
        done = lab.run(["sh", "-c", script], timeout_s=HANG_S, on_line=lambda label, stream, line: said.append(line))
        counted = lab.bytes()
    text = "\n".join(said)
    assert done.status == 0, text
    assert "rank 1 on me@198.18.0.2" in text
    assert "Take AQ-SGD with" in text, text
    plan = json.loads((tmp_path / "mine" / "plan.json").read_text())
    assert plan["pays"]
    assert plan["config"]["pipecomp"]["activations"]["method"] == "aqsgd"
    assert plan["links"][0]["forward"]["bits_per_s"] < 1.1e6
    lines = [line for line in metrics(tmp_path / "mine") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    link = lines[-1]["links"]["0->1"]
    assert 0 < link["forward_bytes_sent"] < link["forward_bytes_raw"] / 2
    assert counted[0].sent > link["forward_bytes_sent"]
    assert (tmp_path / "mine" / "model" / "config.json").is_file()
