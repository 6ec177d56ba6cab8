"""The losses of heads beside torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PretrainedConfig

from pipecomp.stages import losses


@pytest.mark.parametrize("make", [losses.causal_lm, losses.masked_lm, losses.classification])
def test_labels_that_count(make):
    torch.manual_seed(0)
    config = PretrainedConfig(vocab_size=7, num_labels=7)
    if make is losses.classification:
        logits, labels = torch.randn(5, 7), torch.tensor([1, -100, 3, 0, -100])
        expected = F.cross_entropy(logits, labels)
    else:
        logits, labels = torch.randn(2, 4, 7), torch.tensor([[1, 2, -100, 4], [0, -100, -100, 6]])
        shift = int(make is losses.causal_lm)
        kept = logits[:, : 4 - shift].reshape(-1, 7)
        expected = F.cross_entropy(kept, labels[:, shift:].reshape(-1))
    logits.requires_grad_()
    loss = make(config)(logits, labels)
    assert torch.equal(loss, expected)
    nothing = make(config)(logits, torch.full_like(labels, -100))
    assert nothing == 0
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert torch.equal(gradient, torch.zeros_like(logits))
