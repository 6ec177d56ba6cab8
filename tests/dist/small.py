"""What the tests of several ranks share: a small GPT-2, its data, and configurations."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH = 97, 24


def gpt2(layers: int = 4, width: int = 32, *, tied: bool = True, seed: int = 0) -> Any:
    """A GPT-2 with random weights and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=tied,
        )
    )


def samples(count: int = 24, length: int = LENGTH, *, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random tokens, their own labels."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": (x := torch.randint(0, VOCABULARY, (length,), generator=draw)), "labels": x} for _ in range(count)
    ]


def ds_config(
    section: dict[str, Any] | None = None, *, micro_batch: int = 2, micro_batches: int = 3, **more: Any
) -> dict:
    """A DeepSpeed configuration with AdamW."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "pipecomp": section or {},
        **more,
    }
