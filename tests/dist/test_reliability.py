"""Both ends of every link agree, whatever happened before: stores and runs, resuming, drift, ranks that do not fit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tests.dist.reliability_work as work
from pipecomp.cli import app
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


def test_a_store_belongs_to_its_run(tmp_path):
    ranks = run_ranks(2, work.runs, str(tmp_path), timeout_s=HANG_S)
    for out in ranks.values():
        assert out["id"] == ranks[0]["id"]
        assert f"belongs to run {out['id']}, and this is a new run" in out["another run"]
        for name, word in (
            ("other bits", "forward_bits: 2, stored with 4"),
            ("other store bits", "bits: 8, stored with 32"),
            ("another model", "model: 'GPT2LMHeadModel "),
            ("another cut", "cut: 1, stored with 2"),
        ):
            assert out[name].startswith("StoreError"), (name, out[name])
            assert word in out[name]
        assert f"belongs to run {out['id']}, store.run is mine" in out["other name"]
        assert f"message store in {tmp_path}/m belongs to run {out['id']}" in out["another run's checkpoint"]
        for name in ("another run", "other bits", "other store bits", "other name", "another run's checkpoint"):
            assert "StoreError" in out[name]
            assert "pipecomp store prune" in out[name]
            assert "another store.path" in out[name]
        assert out["moved"] == (out["id"], (False, 0))
        assert out["resumed"] == (out["id"], (True, 0), out["held"])
    assert ranks[0]["held"] == ranks[1]["held"]
    report = tmp_path / "info.json"
    assert CliRunner().invoke(app, ["store", "info", str(tmp_path / "m"), "--json", str(report)]).exit_code == 0
    lines = json.loads(report.read_text())
    assert [line["run"] for line in lines] == [ranks[0]["id"]] * 2
    assert lines[0]["configuration"] == lines[1]["configuration"] != ""
    assert lines[0]["settings"]["dtype"] == "float32"


def test_a_store_that_a_killed_run_left_is_emptied_where_nothing_goes_on_from_it(tmp_path):
    ranks = run_ranks(2, work.follows_a_killed_run, str(tmp_path), timeout_s=HANG_S)
    for out in ranks.values():
        for name, (losses, said) in out["other"].items():
            assert losses == out["fresh"], name
            assert len(said) == 1, name
            assert f"message store in {tmp_path}/{name} is emptied" in said[0]
        run, held = out["taken over"]
        assert run == ranks[0]["taken over"][0]
        assert held == ranks[0]["taken over"][1]


def test_resuming_is_exact_where_the_store_is_the_checkpoints(tmp_path):
    ranks = run_ranks(2, work.exact, str(tmp_path), timeout_s=HANG_S)
    for out in ranks.values():
        for name in ("copied", "stopped"):
            expected, resumed, same, got, _ = out[name]
            assert resumed == (True, 0), name
            assert same, name
            assert got == expected, name
        expected, resumed, same, got, _ = out["not copied"]
        assert resumed == (False, 0)
        assert not same
        assert got != expected
        assert got == pytest.approx(expected, rel=1e-2)
    for name in ranks[0]:
        assert ranks[0][name][-1] == ranks[1][name][-1]


def test_drift_is_noticed_repaired_once_and_then_an_error(tmp_path):
    ranks = run_ranks(2, work.drifts, str(tmp_path / "m"), timeout_s=HANG_S)
    checks = 3
    for rank, out in ranks.items():
        assert out["quiet"] == []
        (first, *_) = out["said"]
        sample = int(first.partition("different cached activations of ")[2].split()[0])
        assert first.startswith("link 0, step 5: this end and rank ")
        assert out["stats"]["drift_checks"] == checks
        assert out["stats"]["drifts"] == out["stats"]["drift_samples"] == 1
        assert out["stats"]["drift_check_bytes"] == checks * 87
        assert sample not in [line[0] for line in out["repaired"][0]]
        assert sample in [line[0] for line in out["same"][0]]
        assert out["same"] == ranks[0]["same"], rank
        assert "DriftError" in out["error"]
        assert "link 0, step 15" in out["error"]
        assert out["steps"] == 3


def test_ranks_that_differ_are_told_in_what(tmp_path):
    ranks = run_ranks(3, work.unlike, str(tmp_path), timeout_s=HANG_S)
    for rank, out in ranks.items():
        for name, words in {
            "bits": "pipecomp.activations.forward_bits is 2 on rank 1, 4 on ranks 0, 2",
            "batch": "gradient_accumulation_steps is 4 on rank 1, 3 on ranks 0, 2",
            "rate": "optimizer.params.lr is 0.5 on rank 1, 0.1 on ranks 0, 2",
            "cut": "cuts of the model is [0, 1, 3, 4] on rank 1, [0, 2, 3, 4] on ranks 0, 2",
            "model": "parameters of its stages is",
            "frozen": "trained parameters of its stages is",
            "length": "length of training_data is 20 on rank 1, 24 on ranks 0, 2",
            "content": "order or content of training_data (digest of 8 samples) is",
            "order": "order of the optimizer's groups of parameters on stage 0 (digest) is",
            "options": "options of the optimizer's groups of parameters on stage 0 is [{",
            "dtype": "bf16.enabled is true on rank 1, not set on ranks 0, 2",
            "schedule": "whether lr_scheduler is given is true on rank 1, false on ranks 0, 2",
            "versions": 'order of bytes is "big" on rank 1, "little" on ranks 0, 2; torch version is "1.0.0" on rank 1',
        }.items():
            assert out[name].startswith("LinkError: the ranks of this run do not fit together"), (name, out[name])
            assert words in out[name], name
        kind = "ConfigError" if rank == 1 else "LinkError: rank 1 could not start: ConfigError"
        assert out["key"].startswith(f"{kind}: no such"), out["key"]
        assert out["alike"] == ""


def test_a_network_interface_that_leads_nowhere():
    for rank, error in run_ranks(2, work.wrong_interface, timeout_s=HANG_S).items():
        assert "GLOO_SOCKET_IFNAME: got 'nowhere0', allowed: interfaces of this machine that are up" in error
        assert error.startswith("ConfigError" if rank == 1 else "LinkError: rank 1 could not start")
    for error in run_ranks(2, work.lonely_interface, timeout_s=HANG_S).values():
        assert error.startswith(
            "LinkError: gloo would use addresses that other machines cannot reach: rank 1 127.0.1.1"
        )
