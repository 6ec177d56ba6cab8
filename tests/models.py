"""Small models with random weights, data for them, and DeepSpeed configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 97, 24


def gpt2(layers: int = 4, width: int = 32, *, tied: bool = True, seed: int = 0, **sizes: Any) -> Any:
    """Build a GPT-2 without dropout. sizes: other keys of its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel  # here and below: takes seconds, which every process would pay

    config = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": tied, **sizes}
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, **config))


def llama(*, tied: bool = True) -> Any:
    """Build a Llama of four layers, for sequences as GPT-2's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


def samples(count: int = 24, length: int = LENGTH, *, seed: int = 1) -> list[dict[str, Tensor]]:
    """Random tokens, their own labels."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": (x := torch.randint(0, VOCABULARY, (length,), generator=draw)), "labels": x} for _ in range(count)
    ]


def train_alone(
    model: Any, steps: int, rate: float, *, micro_batch: int, micro_batches: int, max_norm: float | None = 0.5
) -> list[float]:
    """Train on `samples()` by plain torch in this process, in the engine's order; losses of the steps."""
    from pipecomp.data import ShardedSampler

    data = samples()
    sampler = ShardedSampler(len(data), micro_batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    out = []
    for step in range(steps):
        total = 0.0
        for i in range(micro_batches):
            x = torch.stack([data[j]["input_ids"] for j in sampler.batch(step * micro_batches + i)])
            loss = model(input_ids=x, labels=x).loss
            (loss / micro_batches).backward()
            total += float(loss.detach()) / micro_batches
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        out.append(total)
    return out


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


# -- one small model of every architecture

TOKENS, PAD = 61, 0
COMMON = {"vocab_size": TOKENS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_head": 4, "n_positions": 40, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_dropout": 0.0,
    "pooler_hidden_size": 32,
}
DEBERTA_V2 = {**DEBERTA_V3, "conv_kernel_size": 3, "type_vocab_size": 2, "position_biased_input": True}

# name: (class, config class, settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-by-layer": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-classes": ("GPT2ForSequenceClassification", "GPT2Config", {**GPT2, "num_labels": 3}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "llama-classes": ("LlamaForSequenceClassification", "LlamaConfig", {**LLAMA, "num_labels": 3}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, **SLIDING}),
    "qwen2-classes": ("Qwen2ForSequenceClassification", "Qwen2Config", {**LLAMA, "num_labels": 3}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, **SLIDING, "head_dim": 8}),
    "qwen3-classes": ("Qwen3ForSequenceClassification", "Qwen3Config", {**LLAMA, "num_labels": 3, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 3}),
    "mistral-classes": ("MistralForSequenceClassification", "MistralConfig", {**LLAMA, "num_labels": 3}),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}),
    "bert-masked": ("BertForMaskedLM", "BertConfig", BERT),
    "roberta-classes": ("RobertaForSequenceClassification", "RobertaConfig", {**BERT, "num_labels": 3}),
    "roberta-masked": ("RobertaForMaskedLM", "RobertaConfig", BERT),
    "deberta-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", {**BERT, **DEBERTA_V2, "num_labels": 3}),
    "deberta-v3": ("DebertaV2ForSequenceClassification", "DebertaV2Config", {**BERT, **DEBERTA_V3, "num_labels": 2}),
    "deberta-masked": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**BERT, **DEBERTA_V2, "embedding_size": 16}),
    "deberta-masked-new": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**BERT, **DEBERTA_V3, "legacy": False}),
}


def make_config(name: str, blocks: int = 4, **changes: Any) -> Any:
    """Build the configuration of one of MODELS."""
    import transformers

    _, config_class, settings = MODELS[name]
    attention = changes.pop("attention", None)
    config = getattr(transformers, config_class)(**{**COMMON, **settings, "num_hidden_layers": blocks, **changes})
    if attention is not None:
        config._attn_implementation = attention
    return config


def make_model(name: str, blocks: int = 4, **changes: Any) -> Any:
    """Build one of MODELS, for training."""
    import transformers

    config = make_config(name, blocks, **changes)
    torch.manual_seed(7)
    return disturbed(getattr(transformers, MODELS[name][0])(config)).train()


def disturbed(model: Any) -> Any:
    """Change every weight: a fresh model's biases are 0 and its norms 1, a stage could lose them unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch(name: str, padding: str, *, sizes: Sequence[int] = (9, 5, 7)) -> dict[str, Tensor]:
    """Build inputs of one of MODELS. padding: "none", "left" or "right"; sizes: tokens of each sample."""
    generator = torch.Generator().manual_seed(3)
    ids_BS = torch.randint(3, TOKENS, (len(sizes), max(sizes)), generator=generator)
    inputs: dict[str, Tensor] = {"input_ids": ids_BS}
    if padding != "none":
        mask_BS = torch.ones_like(ids_BS)
        for row, size in enumerate(sizes):
            mask_BS[row, slice(size, None) if padding == "right" else slice(0, max(sizes) - size)] = 0
        inputs |= {"input_ids": ids_BS.masked_fill(mask_BS == 0, PAD), "attention_mask": mask_BS}
    if "bert" in name and "roberta" not in name and MODELS[name][2]["type_vocab_size"]:
        inputs["token_type_ids"] = (torch.arange(max(sizes)) % 2).repeat(len(sizes), 1)
    return inputs


def attention_of(name: str) -> str:
    """The default attention of one of MODELS."""
    return "eager" if "deberta" in name else "sdpa"  # DeBERTa has no other


# -- texts and tokenizers, as files


def write_text(path: Path, lines: int = 300) -> Path:
    """Lines that repeat, so that a few steps learn something."""
    path.write_text("".join(f"line {i} of {i * i} , as {i % 7} is to {i % 11} .\n" for i in range(lines)))
    return path


def made_up_text(sentences: int, seed: int) -> str:
    """Random sentences of few words."""
    draw = random.Random(seed)
    subjects, verbs = ["the river", "a small model", "every stage", "the link"], ["sends", "keeps", "finds", "repeats"]
    objects = ["the same message", "an old song", "what it was given", "more than before"]
    lines = [f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)} ." for _ in range(sentences)]
    return "\n".join(lines) + "\n"


def byte_pairs(texts: Sequence[str]) -> Any:
    """Train a byte-level BPE of up to 300 tokens."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    return bpe


def tokenizer_for(texts: Sequence[str], **special: str) -> Any:
    """Train a tokenizer of transformers. special: other special tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = {"eos_token": "<|endoftext|>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_pairs(texts).to_str()), **tokens)


def save_model(folder: Path, text: Path) -> Path:
    """Save a GPT-2 and its tokenizer for `from_pretrained`."""
    gpt2(2, vocab_size=300, n_positions=32, n_head=2).save_pretrained(folder)
    byte_pairs(text.read_text().splitlines(keepends=True)).save_model(str(folder))
    return folder


def save_qwen3(folder: Path, chats: Sequence[Any]) -> None:
    """Save a small Qwen3 with its own chat template, which has no marks for what is learned."""
    import transformers
    import trl

    tokenizer = tokenizer_for([json.dumps(chat) for chat in chats], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)


def metrics(run: Path, file: str = "metrics.jsonl") -> list[dict]:
    """Read a run's metrics."""
    return [json.loads(line) for line in (run / file).read_text().splitlines()]
