"""Local steps of a rank: what goes on from a checkpoint in which others have their weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipecomp.engine import local_steps
from pipecomp.engine.local_steps import LocalTraining, TrafficPriority
from pipecomp.engine.reduction import ReplicaExchanges
from pipecomp.gradient_config import Gradients
from pipecomp.stages import build_stage, modules, plan
from tests.local_steps.test_outer_steps import Meeting

LOCAL = {
    "local_steps": 3,
    "overlap": 2,
    "second_moments": "own",
    "outer": {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5},
}


def rank(stages: int, stage: int, replica: int, meeting: Meeting) -> LocalTraining:
    torch.manual_seed(0)
    source = modules(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (3,))
    built = build_stage(source, plan(source, stages), stage)
    context: Any = SimpleNamespace(
        stage=built,
        stage_id=stage,
        replica=replica,
        replicas=2,
        settings=SimpleNamespace(gradients=Gradients(method="none", **LOCAL)),
    )
    outer: Any = meeting.of(replica)
    return LocalTraining(context, torch.optim.SGD(built.parameters(), lr=0.1), ReplicaExchanges(outer=outer))


def weights(training: LocalTraining) -> dict[str, torch.Tensor]:
    """By name, of the stage's own."""
    return {name: p.detach().clone() for name, p in training._context.stage.named_parameters()}


def test_another_pipeline_goes_on_from_the_mean_of_all_replicas_of_all_stages(tmp_path: Path) -> None:
    """As if what was on its way had arrived: weights, and the outer momentum."""
    meetings = [Meeting(2), Meeting(2)]
    ranks = [[rank(2, stage, replica, meetings[stage]) for replica in (0, 1)] for stage in (0, 1)]
    draw = torch.Generator().manual_seed(1)
    for step in range(7):  # sent after 3, arrived after 5; sent after 6
        for each in (each for stage in ranks for each in stage):
            each.outer.start(step)
            for p in each._context.stage.parameters():
                p.data += torch.randn(p.shape, generator=draw)
        for each in (each for stage in ranks for each in stage):
            each.outer.after_step(step + 1)
    whole = rank(1, 0, 0, Meeting(2))
    for stage in ranks:
        for each in stage:
            each.save(tmp_path)
        with stage[0].outer.common_weights():
            for name, common in weights(stage[0]).items():
                whole._context.stage.get_parameter(name).data.copy_(common)
    whole.load(tmp_path, {"cuts": [0, 1, 2], "replicas": 2}, 7, same=False, with_optimizer=True)
    found, momentum = weights(whole), whole.outer.state_dict()["shared"]["momentum"]
    assert len(found) == len(momentum) == 4
    for stage in ranks:
        for each in stage:
            each.outer.after_step(8)  # it arrives, and nothing has moved
        for name, p in weights(stage[0]).items():
            torch.testing.assert_close(found[name], (p + weights(stage[1])[name]) / 2)
        for name, m in stage[0].outer.state_dict()["shared"]["momentum"].items():
            torch.testing.assert_close(momentum[name], m)


class Line:
    """A transport that sends until it is told that it has."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.over = threading.Event()

    def sending(self) -> bool:
        self.asked.set()
        return not self.over.is_set()


def test_a_message_waits_until_every_packet_has_left(monkeypatch):
    monkeypatch.setattr(local_steps, "MAX_WAIT_S", 1e6)
    lines = [Line(), Line()]
    gate = TrafficPriority(lines)
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    for line in lines:
        assert line.asked.wait(60), "not asked"
        assert waiting.is_alive(), "a packet was leaving"
        line.over.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert gate.waited_s > 0


def test_a_link_that_is_never_free_does_not_hold_it_up_for_ever(monkeypatch):
    monkeypatch.setattr(local_steps, "MAX_WAIT_S", 0.05)
    gate = TrafficPriority([Line()])
    began = time.monotonic()
    gate.wait()
    assert time.monotonic() - began >= 0.05


def test_nothing_waits_without_packets():
    gate = TrafficPriority([])
    gate.wait()
    assert gate.waited_s < local_steps.MAX_WAIT_S
