"""A path on which small packets pass and large ones vanish, between two namespaces: named by doctor, start and run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipecomp.errors import PipecompError
from pipecomp.netlab import Lab
from pipecomp.utils.sockets import BLACK_HOLE
from tests.dist.lab_ranks import WITH_FILTERS, run_in_lab
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples
from tests.tls.meshes import keys_for

pytestmark = [mark for mark in WITH_FILTERS if mark.name != "soak"]
RULES = """table inet hole {
  chain input {
    type filter hook input priority 0
    meta l4proto { tcp, udp } meta length > 600 drop
  }
}
"""


def drop_large_packets(lab: Lab) -> None:
    for node in range(2):
        command = ["ip", "netns", "exec", f"{lab.name}-n{node}", "nft", "-f", "-"]
        subprocess.run(command, input=RULES, text=True, check=True)


def examined(rank: int, world: int, note: Any) -> list[tuple[str, ...]]:
    from pipecomp.doctor import Finding, examination

    verdict = Finding("machine", "ok", "as it should be. " * 100)  # more than a packet
    examination.machine_findings = lambda launch, *more: [verdict]
    told: list[Any] = []
    examination.examine(told.extend, store=Path("messages"), limit_s=HANG_S)
    return [tuple(finding) for finding in told]


def starts(rank: int, world: int, note: Any, keys: str | None) -> str:
    import pipecomp

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    with pytest.raises(PipecompError) as caught:
        pipecomp.initialize(gpt2(), 2, ds_config(), samples())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_doctor_and_start() -> None:
    with Lab(nodes=2) as lab:
        drop_large_packets(lab)
        found = run_in_lab(lab, examined, timeout_s=HANG_S)
        errors = run_in_lab(lab, starts, None, timeout_s=HANG_S)
    by_check = {check: (verdict, text) for check, verdict, text, *_ in found[0]}
    assert by_check["ranks 0 and 1"][0] == "problem"
    assert BLACK_HOLE in by_check["ranks 0 and 1"][1]
    assert by_check["MTU 0–1"][1].startswith("576 bytes come through whole, the interface takes 1500")
    assert "rank 1 on" in " ".join(by_check), "findings come over the same path, in pieces"
    for error in errors.values():
        assert f"(rank 1) and 198.18.0.1 (rank 0) {BLACK_HOLE}" in error


def test_a_start_over_tls(tmp_path: Path) -> None:
    keys_for(tmp_path, 2)
    with Lab(nodes=2) as lab:
        drop_large_packets(lab)
        errors = run_in_lab(lab, starts, str(tmp_path), timeout_s=HANG_S)
    for error in errors.values():
        assert error.startswith("LinkError: between ")
        assert f"(rank 1) and 198.18.0.1 (rank 0) {BLACK_HOLE}" in error


def trains(rank: int, world: int, note: Any, keys: str | None) -> str:
    import pipecomp

    if keys is not None:
        os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    engine = pipecomp.initialize(gpt2(), 2, ds_config({"transport": {"timeout_s": 12}}), samples())
    engine.train_batch()
    note(rank)
    with pytest.raises(PipecompError) as caught:
        [engine.train_batch() for _ in range(10_000)]
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("over_tls", [False, True], ids=["gloo", "tls"])
def test_a_run(tmp_path: Path, over_tls: bool) -> None:
    if over_tls:
        keys_for(tmp_path, 2)
    noted: list[int] = []
    with Lab(nodes=2) as lab:

        def on_note(rank: int, value: Any) -> None:
            noted.append(rank)
            if len(noted) == 2:
                drop_large_packets(lab)

        keys = str(tmp_path) if over_tls else None
        errors = run_in_lab(lab, trains, keys, timeout_s=HANG_S, on_note=on_note)
    told = [BLACK_HOLE in error for error in errors.values()]
    # Over gloo a rank learns the other's reason from the store, which ends with rank 0.
    assert all(told) if over_tls else any(told), errors
