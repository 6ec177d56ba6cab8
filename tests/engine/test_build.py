"""Limits of a link's packets, from the model and the batch that the ranks have agreed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipecomp.codecs import wire
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.config import Config
from pipecomp.engine.build import bounds_of, check_elementwise
from pipecomp.errors import ConfigError, WireError
from pipecomp.stages import build_stage, modules, plan
from pipecomp.stages.link.endpoint import LinkReceiver, Position
from pipecomp.stages.link.layout import Boundary
from pipecomp.stages.link.packet import EVALUATED, PacketLimits
from pipecomp.stages.link.transport import loopback_pair
from tests.models import LENGTH, gpt2

MICRO_BATCH, MICRO_BATCHES = 3, 4
CHANGED = 10 * MICRO_BATCH * MICRO_BATCHES  # every 10 steps both ends compare
AQSGD = {"activations": {"method": "aqsgd"}, "store": {"backend": "memory", "drift_check": 5}}


def engine(stage: Any, section: dict[str, Any]) -> Any:
    return SimpleNamespace(
        stage=stage,
        pipecomp_config=Config.from_dict(section),
        micro_batch_size=MICRO_BATCH,
        micro_batches=MICRO_BATCHES,
    )


def cut(model: nn.Sequential, shape: tuple[int, ...], **options: Any) -> Any:
    source = modules(model, shape, **options)
    return build_stage(source, plan(source, None, [0, 1]), 0)


@pytest.mark.parametrize(
    ("model", "shape", "options", "rows", "width"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), (6,), {}, 1, 5),
        (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), (7, 6), {}, 7, 5),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), (3, 8, 9), {}, 8, 4 * 9),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), (3, 8, 9), {"margin": 2}, 8, 4 * 9),
    ],
)
def test_plain_modules_have_samples_of_one_shape(model, shape, options, rows, width):
    stage = cut(model, shape, **options)
    assert bounds_of(engine(stage, {}), stage.crossing(0)) == PacketLimits(MICRO_BATCH, rows, width, CHANGED)


def test_a_few_bytes_that_announce_gigabytes_of_plain_modules():
    stage = cut(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), (6,))
    ends = loopback_pair(timeout_s=1.0)
    down = LinkReceiver(0, Config.from_dict({}), ends[1], None)
    bounds = bounds_of(engine(stage, {}), stage.crossing(0))
    assert bounds is not None
    down.set_limits(bounds, torch.float32)
    huge = wire.PacketHeader(
        kind=wire.PacketKind.ACTIVATION, method=wire.PayloadMethod.CAST, link=0, step=0, micro_batch=0,
        tokens=1 << 20, hidden=4096, samples=(wire.Sample(0, wire.Form.PLAIN, 0, 0),),
    )  # fmt: skip
    ends[0].send(wire.encode(huge, torch.zeros(0, dtype=torch.uint8).numpy()))
    with pytest.raises(WireError, match="1048576 rows of a sample; the agreed model and batch: at most 1"):
        down.recv_activation(Position(0, 0))


def test_language_models_have_positions_or_no_bounds():
    stage = SimpleNamespace(config=gpt2(1, 16).config)
    crossing = Boundary(width=16, settings={})
    expected = PacketLimits(MICRO_BATCH, 2 * LENGTH, 16, CHANGED, documents=MICRO_BATCH * MICRO_BATCHES)
    assert bounds_of(engine(stage, {}), crossing) == expected
    assert bounds_of(engine(SimpleNamespace(config=SimpleNamespace()), {}), crossing) is None


@pytest.mark.parametrize(("backward", "entries"), [("direct", 1), ("delta", 2)])
def test_all_entries_of_the_samples_between_two_checks_are_counted(backward, entries):
    section = {**AQSGD, "activations": {"method": "aqsgd", "backward_method": backward}}
    bounds = bounds_of(engine(SimpleNamespace(config=gpt2(1, 16).config), section), Boundary(width=1, settings={}))
    assert bounds is not None
    changed = entries * 5 * MICRO_BATCH * MICRO_BATCHES
    assert bounds.changed == changed
    many = bounds._replace(changed=1000 * changed)  # so that the table is longer than packets of a micro-batch
    most = many.max_bytes(LinkCodecs(Config.from_dict(section).activations, 0), torch.float32)
    assert 1000 * changed * 20 <= most - wire.packet_bytes(0, 0)


def test_evaluation_has_as_many_samples_as_are_allowed():
    codecs = LinkCodecs(Config.from_dict({}).activations, 0)
    bounds = PacketLimits(MICRO_BATCH, 8, 16)
    assert (bounds.max_samples, bounds._replace(samples=99).max_samples) == (EVALUATED, 99)
    more = bounds._replace(evaluated=128)
    assert more.max_samples == 128
    assert more.max_bytes(codecs, torch.float32) >= wire.packet_bytes(128, 128 * 8 * 16 * 4)
    every = tuple(wire.Sample(i, wire.Form.PLAIN, 0, 1) for i in range(128))
    header = wire.PacketHeader(
        kind=wire.PacketKind.EVAL_ACTIVATION, method=wire.PayloadMethod.CAST, link=0, step=0, micro_batch=0,
        tokens=8, hidden=16, samples=every,
    )  # fmt: skip
    more.check(header, 8)
    with pytest.raises(WireError, match="128 samples; the agreed model and batch: at most 64"):
        bounds.check(header, 8)


class _ByRows(torch.optim.SGD):
    """Divides each row of a matrix's gradient by its norm, as Muon's kind does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2:
                    p.grad /= p.grad.norm(dim=1, keepdim=True)
        return super().step(closure)


class _Modes(torch.optim.SGD):
    def train(self):
        """Put the weights for training in place."""

    def eval(self):
        """Put the weights for evaluation in place."""


@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        (torch.optim.AdamW, True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
        (torch.optim.RMSprop, True),
        (lambda p: torch.optim.LBFGS(p), True),  # takes no step without a closure, in any precision
        (torch.optim.Adafactor, False),
        (torch.optim.Adagrad, False),  # has states from the start
        (lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]), False),
        (lambda p: _ByRows(p, lr=0.1), False),
        (lambda p: _Modes(p, lr=0.1), False),
    ],
)
def test_flattened_parameters_take_only_optimizers_without_shapes(make, accepted):
    if accepted:
        check_elementwise(make)
    else:
        with pytest.raises(ConfigError, match="float32 without ZeRO"):
            check_elementwise(make)
