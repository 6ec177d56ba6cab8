"""Restart of a run without its lost machines: states and checkpoints that are lost with them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from pipecomp.checkpoint.reshard import PipelineDescription
from pipecomp.distributed.rendezvous import AllRanks
from pipecomp.errors import ConfigError
from pipecomp.recipes import restart


def test_a_state_that_is_lost_ends_the_run_with_what_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(restart.rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(restart.dist, "get_rank", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        restart.check_not_lost(tmp_path, (40, [1, 2]), 0, ["host1", "host2"])
    told = str(caught.value)
    assert "the records of rank 1 on host2, rank 2 after step 40 are on none of these machines" in told
    assert "Bring one of them back, and start the same command again. --overwrite starts over" in told
    restart.check_not_lost(tmp_path, (40, [1]), 30, [])
    said = capfd.readouterr().err
    assert "the records of rank 1 after step 40 are on none of these machines" in said
    assert "goes on from an earlier state, 10 steps before" in said


def test_a_checkpoint_of_which_files_are_on_no_machine_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(restart.rendezvous, "all_ranks", lambda: AllRanks(0, 1, torch.distributed.HashStore()))
    monkeypatch.setattr(restart, "gathered", lambda value: [value])
    assert restart.find_lost_checkpoint(tmp_path) is None, "there is none"
    monkeypatch.setattr(restart, "finished", lambda folder: "30" not in str(folder))
    for step, present in ((10, (0, 1, 2)), (30, (0,)), (20, (0, 2))):
        folder = tmp_path / f"checkpoint-{step}" / restart.DEEPSPEED
        folder.mkdir(parents=True)
        for rank in present:
            restart.rank_file(folder, rank).touch()
        sizes: dict[str, Any] = {"replicas": 1, "micro_batch": 1, "zero": 0, "parameters": []}
        described = PipelineDescription(cuts=[0, 1, 2, 3], model_class="Model", tie=True, precision="fp32", **sizes)
        state = {restart.STATE_KEY: {"pipeline": asdict(described)}}
        torch.save(state, folder / "mp_rank_00_model_states.pt")
    assert restart.find_lost_checkpoint(tmp_path) == (20, [1])
    restart.rank_file(folder, 1).touch()
    assert restart.find_lost_checkpoint(tmp_path) is None
    monkeypatch.setattr(restart, "gathered", lambda value: [value, []])
    assert restart.find_lost_checkpoint(tmp_path) is None, "a machine without checkpoints"
