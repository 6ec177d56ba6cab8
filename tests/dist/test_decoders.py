"""Training of a model without an entry over two processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import VOCABULARY, ds_config, samples

pytestmark = pytest.mark.ranks


def gemma2() -> Any:
    """Build a Gemma 2: tied embeddings, which its own code multiplies by sqrt(H), and windows in every second block."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, **sizes, **heads))


def train(rank: int, world: int, note: Any) -> tuple[list[float], bool]:
    from pipecomp import initialize

    engine = initialize(gemma2(), num_stages=world, config=ds_config(), training_data=samples())
    losses = [float(engine.train_batch()) for _ in range(6)]
    tied = bool(engine.stage.tied_parameters())
    engine.close()
    return losses, tied


def test_losses_are_those_of_one_process() -> None:
    (alone, _) = run_ranks(1, train, timeout_s=HANG_S)[0]
    for losses, tied in run_ranks(2, train, timeout_s=HANG_S).values():
        assert tied
        assert losses == pytest.approx(alone, rel=1e-5)
        assert losses[-1] < losses[0]
