"""Runs whose every bit is in golden.json: losses, weights, packets on the wire, stored messages, averaged gradients.

    python tests/golden/work.py run OUT.json        what this code does
    python tests/golden/work.py record              keep it: only where bits are meant to change, and say why
    python tests/golden/work.py pack                train and save a run, for later code to resume, before `record`

The last bits of a matrix product depend on the processor, so libraries are held to instructions that all x86 machines
have; `probe` tells whether that was enough, `environment` what else may have changed them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script's own folder is there instead
from pipecomp.distributed.local_launcher import preload_large_packages, run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

HERE = Path(__file__).parent
GOLDEN, OLD_RUN = HERE / "golden.json", HERE / "old_run.tar.xz"
SAME_EVERYWHERE = {  # variables of torch, MKL and oneDNN
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKLDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}

LINKS = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "first_visit": 8}
STOCHASTIC = {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4, "rounding": "stochastic", "group_size": 16}
TOP_K = {"method": "direct", "forward_bits": 4, "backward_bits": 8, "backward_top_k": 0.2, "rotation": True}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "exponential": {"method": "global_qsgd", "levels": "exponential", "bits": 4},
    "linear": {"method": "global_qsgd", "levels": "linear", "bits": 8, "norm": [2, "inf"]},
    "sparse": {"method": "global_qsgd", "sparse": True},
    "qsgd_mn": {},
    "qsgd_mn_ts": {},
    "grandk_mn": {"k": 0.25, "error_feedback": True},
    "grandk_mn_ts": {"k": 500, "rescale": True},
    "qsgd": {},
    "terngrad": {},
    "nuqsgd": {},
    "casq": {"interval": 2},
    "double_squeeze": {"bits": 4, "group_size": 64},
    "powersgd": {"rank": 2},
    "fp16": {},
}
IN_ENGINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"method": "none"}, {}),
    "exponential": ({"method": "global_qsgd"}, {}),
    "double_squeeze, ZeRO 1": (
        {"method": "double_squeeze", "bits": 4, "group_size": 64},
        {"zero_optimization": {"stage": 1}},
    ),
    "quantized_adam": ({"method": "quantized_adam", "freeze_step": 2, "bits": 8, "group_size": 64}, {}),
}


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def probe() -> str:
    """Return plain torch's results for a model like the runs' own, on this processor."""
    torch.set_num_threads(1)
    model, x = gpt2(), torch.stack([s["input_ids"] for s in samples(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(input_ids=x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return digest(*model.parameters())


def environment() -> dict[str, str]:
    """Return the versions and the kind of processor, which the probe's last bits may depend on."""
    import transformers

    kind = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = " ".join([platform.machine(), *kind[:3]])  # of the first one: there is a paragraph for each
    return {"torch": torch.__version__, "transformers": transformers.__version__, "processor": processor}


def messages(engine: Any) -> dict[str, dict[str, Any]]:
    """Return sample -> version, digest of m, for every link with a store."""
    out: dict[str, dict[str, Any]] = {}
    for end in engine.links:
        if end.store is not None:
            ids = sorted(held.sample for held in end.store.inventory())
            held = zip(ids, end.store.get(ids), strict=True)
            out[str(end.index)] = {str(i): [m.version, digest(m.m_nH)] for i, m in held}
    return out


def listen(engine: Any) -> dict[str, list[str]]:
    """Digests of every packet that this rank sends from here on, by link."""
    heard: dict[str, list[str]] = {}
    for end in engine.links:
        packets = heard.setdefault(str(end.index), [])

        def send(message: Any, send: Any = end.transport.send, packets: list[str] = packets) -> None:
            packets.append(hashlib.sha256(_as_recorded(message.tobytes())).hexdigest()[:16])
            send(message)

        end.transport.send = send
    return heard


def _as_recorded(packet: bytes) -> bytes:
    """Return a packet in format version 1, of which golden.json is: without the digest at the header's end."""
    body = packet[:4] + (1).to_bytes(2, "little") + packet[6:51] + packet[59:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def train(stages: int, section: dict[str, Any], more: dict[str, Any], steps: int, folder: str) -> dict[str, Any]:
    import pipecomp

    if section.get("activations", {}).get("method") == "aqsgd":
        section = {**section, "store": {"path": folder, "run": "golden", **section.get("store", {})}}
    engine = pipecomp.initialize(
        gpt2(), num_stages=stages, config=ds_config(section, **more), training_data=samples(12)
    )
    heard = listen(engine)
    losses = [float(engine.train_batch()).hex() for _ in range(steps)]
    packets = {link: hashlib.sha256(" ".join(found).encode()).hexdigest()[:32] for link, found in heard.items()}
    groups = {name: (g["bytes_raw"], g["bytes_sent"]) for name, g in engine.comm_stats()["groups"].items()}
    groups.pop("weights", None)  # counted only since golden.json was recorded
    found = {
        "losses": losses,
        "weights": digest(*engine.stage.parameters()),
        "packets": packets,
        "messages": messages(engine),
        "groups": groups,
    }
    engine.close()
    return found


def three_by_two(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    gradients = {"method": "global_qsgd"}
    return {
        "aqsgd": train(3, {"activations": LINKS, "gradients": gradients}, {}, 6, f"{folder}/a"),
        "stochastic, m8": train(
            3, {"activations": STOCHASTIC, "gradients": gradients, "store": {"bits": 8}}, {}, 6, f"{folder}/b"
        ),
    }


def two_by_two(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    found = {name: train(2, {"gradients": g}, more, 4, folder) for name, (g, more) in IN_ENGINE.items()}
    found["direct, top-k"] = train(2, {"activations": TOP_K}, {}, 3, folder)
    return found


def gradient_methods(rank: int, world: int, note: Any) -> dict[str, Any]:
    """Means, error-feedback residuals and what is sent of a state of each method, without an engine."""
    import torch.distributed as dist

    from pipecomp.allreduce import State, allreduce_mean
    from pipecomp.allreduce.group import Group

    dist.init_process_group("gloo")
    exchange, gather = Group.exchange, Group.gather

    def heard_exchange(self: Any, outgoing: list[torch.Tensor], *args: Any) -> Any:
        sent.update(b"".join(x.numpy().tobytes() for x in outgoing))
        return exchange(self, outgoing, *args)

    def heard_gather(self: Any, outgoing: torch.Tensor, *args: Any) -> Any:
        sent.update(outgoing.numpy().tobytes())
        return gather(self, outgoing, *args)

    Group.exchange, Group.gather = heard_exchange, heard_gather  # type: ignore[method-assign]
    out = {}
    for name, options in METHODS.items():
        sent = hashlib.sha256()
        state = State(**{"method": name, "seed": 3, **options})
        draw = torch.Generator().manual_seed(100 + rank)
        means = []
        for _ in range(4):
            x = torch.randn(61, 83, generator=draw) * torch.rand(61, 1, generator=draw)
            means.append(allreduce_mean(state, x.to(torch.bfloat16) if name == "nuqsgd" else x, key="x"))
        stats = state.stats()
        out[name] = {
            "means": digest(*means),
            "sent": sent.hexdigest()[:32],
            "bytes": [stats["bytes_raw"], stats["bytes_sent"]],
            "residual": float(state.memory.norm()).hex(),
        }
        state.close()
    dist.destroy_process_group()
    return out


def old_run(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Train three steps and save, as the code that recorded did."""
    engine = _resumable(folder)
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(f"{folder}/checkpoints")
    engine.close()
    return {}


def resumed(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Go on for three steps from what `old_run` left, by the same or later code."""
    engine = _resumable(folder)
    held = messages(engine)
    path, _ = engine.load_checkpoint(f"{folder}/checkpoints")
    assert path is not None
    heard = listen(engine)
    losses = [float(engine.train_batch()).hex() for _ in range(3)]
    found = {
        "exact": engine.resumed.exact,
        "held": held,
        "losses": losses,
        "weights": digest(*engine.stage.parameters()),
        "packets": heard,
        "messages": messages(engine),
    }
    engine.close()
    return found


def _resumable(folder: str) -> Any:
    import pipecomp

    torch.manual_seed(5)
    section = {
        "activations": LINKS,
        "gradients": {"method": "double_squeeze", "bits": 4, "group_size": 64},
        "store": {"path": f"{folder}/messages", "bits": 8, "in_checkpoints": True},
    }
    return pipecomp.initialize(
        gpt2(2, 16), num_stages=2, config=ds_config(section, micro_batches=1), training_data=samples(8)
    )


def everything() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(
            json.dumps(
                {
                    "environment": environment(),
                    "probe": probe(),
                    "3 stages x 2 replicas": run_ranks(6, three_by_two, folder, timeout_s=HANG_S),
                    "2 stages x 2 replicas": run_ranks(4, two_by_two, folder, timeout_s=HANG_S),
                    "gradient methods": run_ranks(3, gradient_methods, timeout_s=HANG_S),
                    "resumed": _from_old_run(folder),
                }
            )
        )


def _from_old_run(folder: str) -> dict[int, Any]:
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(folder, filter="data")
    return run_ranks(4, resumed, f"{folder}/old_run", timeout_s=HANG_S)


def pack_old_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(4, old_run, f"{folder}/old_run", timeout_s=HANG_S)
        shutil.rmtree(f"{folder}/old_run/messages/__pycache__", ignore_errors=True)
        with tarfile.open(OLD_RUN, "w:xz") as archive:
            archive.add(f"{folder}/old_run", "old_run")


def with_plain_instructions() -> None:
    """Start this program anew where the libraries would take this processor's own instructions: they read it once."""
    if any(os.environ.get(k) != v for k, v in SAME_EVERYWHERE.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SAME_EVERYWHERE})


if __name__ == "__main__":
    with_plain_instructions()
    preload_large_packages()
    if sys.argv[1] == "pack":
        pack_old_run()
    elif sys.argv[1] == "record":
        GOLDEN.write_text(json.dumps(everything(), indent=1) + "\n")
    else:
        Path(sys.argv[2]).write_text(json.dumps(everything(), indent=1) + "\n")
