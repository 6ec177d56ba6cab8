"""CompressionCallback in one process: what it refuses, what it logs; memories in files."""

from __future__ import annotations

import itertools
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import pipecomp
from pipecomp.allreduce import State, allreduce_mean
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.config.gradients import LocalSteps
from pipecomp.errors import ConfigError
from pipecomp.trainer.ddp_callback import LocalStepsCallback

CompressionCallback = pipecomp.CompressionCallback


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"method": "none"}, "method"),
        ({"method": "quantized_adam", "freeze_step": 10}, "method"),
        ({"method": "signsgd"}, "gradients.method"),
        ({"method": "global_qsgd", "bits": 5}, "gradients.bits"),
        ({"method": "terngrad", "bits": 2}, "gradients.bits"),
        ({"method": "qsgd", "bit": 4}, "bit"),
        ({"method": "qsgd", "timeout_s": 4.0}, "timeout_s"),
        ({"method": "qsgd", "seed": -1}, "seed"),
        ({"method": "qsgd", "seed": 0.5}, "seed"),
    ],
)
def test_wrong_settings_are_refused_when_it_is_made(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompressionCallback(**arguments)
    assert caught.value.key == key


def test_one_process_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.line(x) - labels).square().mean()}

    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4
    trainer = Trainer(Line(), args, train_dataset=data, callbacks=[CompressionCallback(method="qsgd_mn")])
    with pytest.raises(ConfigError, match=r"one process.*torchrun"):
        trainer.train()


def trainer_like(**differences: Any) -> Any:
    """The part of a Trainer that `find_ddp` reads, on two processes without DDP."""
    values = {"n_gpu": 1, "world_size": 2, "deepspeed": False, "fsdp": False, "model": torch.nn.Linear(1, 1)}
    values |= differences
    return types.SimpleNamespace(
        args=types.SimpleNamespace(n_gpu=values["n_gpu"], world_size=values["world_size"]),
        is_deepspeed_enabled=values["deepspeed"],
        is_fsdp_enabled=values["fsdp"],
        model_wrapped=values["model"],
    )


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ({"n_gpu": 2, "world_size": 1}, "DataParallel"),
        ({"deepspeed": True}, "DeepSpeed"),
        ({"fsdp": True}, "FSDP"),
        ({"world_size": 1}, "one process"),
        ({}, "Linear"),
        ({"model": torch.nn.DataParallel(torch.nn.Linear(1, 1))}, "DataParallel"),
    ],
)
def test_other_ways_to_train_are_refused(differences: dict[str, Any], says: str) -> None:
    from pipecomp.trainer.ddp_callback import find_ddp

    with pytest.raises(ConfigError) as caught:
        find_ddp(trainer_like(**differences))
    assert says in str(caught.value.got)


def test_processes_that_train_alone_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipecomp.trainer.ddp_callback import find_ddp

    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"4 processes.*use_cpu=True"):
        find_ddp(trainer_like(world_size=1))


def test_events_from_elsewhere_are_refused() -> None:
    callback = CompressionCallback(method="fp16")
    with pytest.raises(ConfigError, match="Trainer"):
        callback.on_train_begin(None, None, None)
    assert callback.stats()["calls"] == 0


# -- memories in files

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())
containers = st.recursive(
    plain | st.lists(st.integers(0, 9)).map(torch.tensor),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, also in type; tensors bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=40, deadline=None)
@given(value=containers)
def test_any_plain_containers_come_back(value: Any) -> None:
    state: Any = State("none")
    state.state_dict, loaded = lambda: value, []
    state.load_state_dict = lambda found, device: loaded.append(found)
    with tempfile.TemporaryDirectory() as folder:
        state.save(f"{folder}/file")
        state.load(f"{folder}/file")
    assert same(loaded[0], value)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "double_squeeze", "bits": 3, "group_size": 32},
        {"method": "casq", "bits": 3, "interval": 3},
        {"method": "grandk_mn_ts", "bits": [4, 8], "k": 50, "error_feedback": True},
        {"method": "global_qsgd", "norm": [2, "inf"], "levels": "linear"},
    ],
    ids=lambda options: options["method"],
)
def test_a_saved_state_goes_on_alike(tmp_path: Path, options: dict[str, Any]) -> None:
    def work(group: LoopbackGroup) -> bool:
        draw = torch.Generator().manual_seed(group.rank)
        first, second = State(group=group, seed=2, **options), State(group=group, seed=2, **options)
        for _ in range(4):
            allreduce_mean(first, torch.randn(500, generator=draw), "a")
            allreduce_mean(first, torch.randn(7, 5, generator=draw), "b")
        path = tmp_path / f"{group.rank}.safetensors"
        first.save(path)
        second.load(path)
        x = torch.randn(500, generator=draw)
        alike = same(first.state_dict(), second.state_dict())
        return alike and torch.equal(allreduce_mean(first, x, "a"), allreduce_mean(second, x, "a"))

    assert all(run_threads(2, work))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    state, path = State("double_squeeze"), tmp_path / "memories.safetensors"
    allreduce_mean(state, torch.randn(900))
    state.save(path)
    whole = path.read_bytes()
    for broken in (whole[:-5], whole[:40], b""):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match="saved whole"):
            state.load(path)
    path.unlink()
    with pytest.raises(ConfigError, match="saved whole"):
        state.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match="gradient memories 1"):
        state.load(path)


def test_a_file_of_another_method_is_refused(tmp_path: Path) -> None:
    State("double_squeeze", bits=4).save(tmp_path / "m")
    with pytest.raises(ConfigError, match="options"):
        State("double_squeeze", bits=8).load(tmp_path / "m")


def test_parameters_are_numbered_by_the_models_order() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    state = State("double_squeeze")
    state.number_parameters(model.parameters())
    last_first = types.SimpleNamespace(parameters=lambda: list(model.parameters())[::-1])
    assert state._slices(last_first) == ((3, 3), (2, 9), (1, 3), (0, 9))


def test_each_step_begins_with_the_loss_scale() -> None:
    """The scale changes between steps, and a State keeps residuals without it."""
    callback = CompressionCallback("double_squeeze")
    callback.on_step_begin(None, None, None)  # not training yet
    callback._state = State("double_squeeze", group=LoopbackGroup(0, 1, {}))
    callback.on_step_begin(None, None, None)  # without a scaler, as with float32
    assert callback._state.loss_scale == 1.0
    for scale in (65536.0, 32768.0):
        callback._scaler = SimpleNamespace(get_scale=lambda scale=scale: scale)
        callback.on_step_begin(None, None, None)
        assert callback._state.loss_scale == scale


def test_an_evaluation_between_outer_steps_is_of_the_common_weights() -> None:
    """At the end of a step or of an epoch; then the process goes on with its own weights, and waits for no other."""
    model = torch.nn.Linear(2, 2)
    ddp, args = (
        SimpleNamespace(module=model, broadcast_buffers=True, require_backward_grad_sync=True),
        SimpleNamespace(average_tokens_across_devices=True, eval_on_start=True),
    )
    state = State("none", group=LoopbackGroup(0, 1, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback: Any = LocalStepsCallback(LocalSteps(local_steps=4), ddp, state, optimizer, args)  # type: ignore[arg-type]
    assert not ddp.broadcast_buffers
    assert not args.average_tokens_across_devices
    common, own = model.weight.detach().clone(), torch.ones(2, 2)
    at = SimpleNamespace(global_step=0, max_steps=4)
    events = ("on_step_end", "on_epoch_end", "on_log")
    for event, wanted in itertools.product(events, ("should_evaluate", "should_save", "")):
        callback.on_step_begin(args, at, None)
        assert not ddp.require_backward_grad_sync, "DDP would wait for all processes"
        with torch.no_grad():
            model.weight.copy_(own)
        at.global_step = 1
        control = SimpleNamespace(**{name: name == wanted for name in ("should_evaluate", "should_save")})
        getattr(callback, event)(args, at, control)
        assert torch.equal(model.weight, common if wanted else own), (event, wanted)
        callback.on_step_begin(args, at, None)
        assert torch.equal(model.weight, own), (event, wanted)
    callback.on_train_begin(args, at, None)
    assert torch.equal(model.weight, common), "of a training that goes on within an interval, and evaluates first"
    callback.on_train_end(args, at, None)
    assert args.average_tokens_across_devices, "as it was given"
    assert ddp.require_backward_grad_sync
