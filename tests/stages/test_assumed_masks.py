"""Transformers' questions about masks: the answers change no bit of a forward, and then no tensor is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from pipecomp.stages import split
from pipecomp.stages.partition.stage import assume_masks
from tests.models import batch, make_model

GPU = torch.device("cuda")  # as which a CPU counts here
# Learned positions, rotary ones, windows, both directions, and attention of their own.
NAMES = ("gpt2", "llama", "qwen2", "mistral", "bert-masked", "roberta-masked", "deberta-v2")


class Looks(TorchDispatchMode):
    """Counts, while inside, the values of tensors that become Python's, for each of which a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# Without a mask GPT-2 and DeBERTa look whether samples begin or end with their token for padding, and warn.
@pytest.mark.parametrize(
    ("name", "padding"),
    [
        (name, padding)
        for name in NAMES
        for padding in ("none", "full", "right", "left")
        if padding != "none" or name not in ("gpt2", "deberta-v2")
    ],
)
def test_answers_are_those_that_the_values_give(name: str, padding: str) -> None:
    inputs = batch(name, {"full": "right"}.get(padding, padding), sizes=(9, 9) if padding == "full" else (9, 5, 7))
    stages = split(make_model(name).eval(), num_stages=2)
    expected = stages[1](stages[0](inputs))
    with Looks() as looks, assume_masks(full=padding in ("none", "full"), device=GPU):
        found = stages[1](stages[0](inputs))
    assert looks.count == 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "padding"), [("llama", "none"), ("gpt2", "right"), ("bert-masked", "left")])
def test_without_answers_there_are_looks(name: str, padding: str) -> None:
    stage = split(make_model(name).eval(), num_stages=2)[0]
    with Looks() as looks, assume_masks(full=padding == "none", device=torch.device("cpu")):
        stage(batch(name, padding))
    assert looks.count > 0


def test_transformers_is_as_before_also_after_an_error() -> None:
    before = dict(vars(masking_utils))
    with assume_masks(full=True, device=GPU):
        assert dict(vars(masking_utils)) != before
    assert dict(vars(masking_utils)) == before
    with pytest.raises(ZeroDivisionError), assume_masks(full=True, device=GPU):
        raise ZeroDivisionError
    assert dict(vars(masking_utils)) == before
