"""A recipe started from a hostfile over ssh: two nodes of a network lab, each with an ssh server of its own.

Needs root, iproute2, and Debian's openssh-server and pdsh.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipecomp.netlab import Lab, missing
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = missing() or next(
    (f"{tool} is not installed" for tool in ("/usr/sbin/sshd", "pdsh", "ssh", "ssh-keygen") if not shutil.which(tool)),
    None,
)
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no ssh between namespaces here: {WHY_NOT}"),
]


@pytest.fixture
def folder(tmp_path):
    """Keys, servers' configuration, and a recipe's data and model."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path / 'host'}\nAuthorizedKeysFile {tmp_path / 'user.pub'}\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPidFile none\n"
    )
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -i {tmp_path / 'user'} -o StrictHostKeyChecking=no "
        '-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    )
    wrapper.chmod(0o755)
    (tmp_path / "hosts").write_text("198.18.0.1 slots=1\n198.18.0.2 slots=1\n")
    settings = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    text = "the river sends the same message .\na small model keeps an old song .\n" * 60
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tokenizer").mkdir()
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(tmp_path / "text.txt")], vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(tmp_path / "tokenizer"))
    model = {"model_type": "gpt2", "vocab_size": bpe.get_vocab_size(), "n_positions": 32, "n_embd": 32, "n_layer": 2}
    model |= {"n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "model.json").write_text(json.dumps(model))
    return tmp_path


def test_a_recipe_over_ssh(folder):
    script = ROOT / "recipes" / "gpt2_wikitext2" / "train.py"
    arguments = [
        "--deepspeed_config",
        str(ROOT / "recipes" / "gpt2_wikitext2" / "ds_config_cpu.json"),
        "--model",
        "model.json",
        "--tokenizer",
        "tokenizer",
        "--train-file",
        "text.txt",
        "--eval-file",
        "text.txt",
        "--epochs",
        "1",
        "--seed",
        "1",
        "--metrics",
        "metrics.jsonl",
    ]
    said = []
    with Lab(nodes=2) as lab:
        done = lab.run(
            [sys.executable, str(Path(__file__).with_name("ssh_node.py")), str(folder), str(script), *arguments],
            timeout_s=HANG_S,
            on_line=lambda label, stream, line: said.append(f"{label} | {line}"),
        )
        counted = lab.bytes()
    assert done.status == 0, "\n".join(said)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "eval" in lines[-1]
    assert counted[0].sent > lines[-1]["links"]["0->1"]["forward_bytes_sent"] > 0
