"""Small configurations: the same architecture and settings with few blocks, narrow layers and a small vocabulary.

Only sizes shrink. Settings that select code paths (activations, norms, scales, window and rope types, dropout) stay.
"""

from __future__ import annotations

import copy
import math
from typing import Any

VOCABULARY = 128
TOKENS = 12
"""Tokens of a sample: more than WINDOW, so that a window cuts something off."""
WINDOW = 8
HEADS, HEAD_SIZE = 4, 16
_MOST_BLOCKS = 10

_WIDTHS = (
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "ff_dim", "n_inner", "inner_dim", "d_ff", "hidden_dim"),
    *("lru_width", "d_inner", "mamba_d_ssm", "mamba_intermediate", "attention_hidden_size", "expert_dim"),
)
_MODEL_WIDTHS = (
    "hidden_size",
    "d_model",
    "embedding_size",
    "word_embed_proj_dim",
    "n_embd",
    "pooler_hidden_size",
    "embedding_dim",
)
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "local_attention")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts"),
    *("num_routed_experts", "zero_expert_num"),
)
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "num_selected_experts")
_PERIODS = ("period", "interval", "_freq", "frequency", "_step", "every", "offset", "pattern", "first_k_dense")
_HEAD_COUNTS = ("n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")


def small_configs(config: Any) -> list[Any]:
    """Return small copies of a model's configuration, the smallest first; a model may not accept the first ones.

    All have few blocks and a small vocabulary. The first has heads of HEAD_SIZE, the second fewer heads, of their own
    size; the last has the widths of the original. Raises what the configuration's class raises if it makes none.
    """
    made: list[Any] = []
    errors: list[Exception] = []
    for heads, head_size in ((True, True), (True, False), (False, False)):
        try:
            made.append(_small_config(config, heads=heads, head_size=head_size))
        except Exception as error:  # raised by the configuration's class
            errors.append(error)
    if not made:
        raise errors[-1]
    return made


def _small_config(config: Any, *, heads: bool, head_size: bool) -> Any:
    kept_out = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "model_type")
    settings = {key: value for key, value in copy.deepcopy(config.to_dict()).items() if key not in kept_out}
    keys = {
        key: config.attribute_map.get(key, key)
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    }
    _reduce_vocabulary(settings, keys["vocab_size"])
    if isinstance(settings.get(keys["num_hidden_layers"]), int):
        _reduce_blocks(settings, keys["num_hidden_layers"])
    if heads:
        _reduce_widths(settings, keys["hidden_size"], keys["num_attention_heads"], head_size)
    _reduce_experts(settings)
    for key in _WINDOWS:
        if isinstance(settings.get(key), int) and not isinstance(settings[key], bool) and settings[key] > WINDOW:
            settings[key] = WINDOW
    made = type(config)(**settings)
    if getattr(config, "_attn_implementation", None) in ("eager", "sdpa"):
        made._attn_implementation = config._attn_implementation
    return made


def _reduce_vocabulary(settings: dict[str, Any], vocabulary: str) -> None:
    for key in (vocabulary, "vocab_size_per_layer_input", "vocab_size", "decoder_vocab_size"):
        if isinstance(settings.get(key), int):
            settings[key] = min(settings[key], VOCABULARY)
    low = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for key, value in settings.items():
        if not (key.endswith(("_token_id", "_token_ids", "_token_index", "_idx"))) or value is None:
            continue
        if isinstance(value, int) and value >= VOCABULARY:
            settings[key] = low.get(key, 3)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, int) and v >= VOCABULARY for v in value):
            settings[key] = [low.get(key, 3)] if key in low else [3 for _ in value]


def _reduce_blocks(settings: dict[str, Any], blocks_key: str) -> None:
    """Keep the first blocks, as many as show each kind of block, and lists with an entry a block as long as them."""
    whole = settings[blocks_key]
    per_block = {key: value for key, value in settings.items() if _is_per_block(value, whole)}
    kept = 4
    for key, value in settings.items():
        whole_number = isinstance(value, int) and not isinstance(value, bool)
        if whole_number and any(part in key for part in _PERIODS) and 1 < value < _MOST_BLOCKS:
            kept = max(kept, value + 1)
    chosen = list(range(min(whole, kept)))
    kinds = [tuple(str(value[i]) for value in per_block.values()) for i in range(whole)]
    if len(set(kinds)) <= _MOST_BLOCKS:  # not lists of sizes that all differ
        for i, kind in enumerate(kinds):
            if kind not in {kinds[j] for j in chosen}:
                chosen.append(i)
        if len(chosen) == min(whole, kept) and len(set(kinds)) > 1 and len(chosen) < whole:
            first = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
            if first + 1 < _MOST_BLOCKS and first + 2 > len(chosen):
                chosen = list(range(first + 2))
    for key, value in per_block.items():
        settings[key] = [value[i] for i in chosen]
    for key, value in settings.items():
        if isinstance(value, dict) and value and all(str(number).isdigit() for number in value):  # by block
            settings[key] = {chosen.index(int(i)): one for i, one in value.items() if int(i) in chosen}
    for key, value in settings.items():
        if key in per_block or key == blocks_key:
            continue
        numbers = isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value)
        if numbers and "layer" in key and max(value) < whole:
            reduced = [v for v in value if v < len(chosen)]
            settings[key] = reduced or [1]
    for key in ("num_kv_shared_layers", "max_window_layers", "num_hidden_layers_with_dense"):
        if isinstance(settings.get(key), int) and settings[key] > len(chosen) // 2:
            settings[key] = len(chosen) // 2
    settings[blocks_key] = len(chosen)
    for key in ("num_hidden_layers", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
        if isinstance(settings.get(key), int) and settings[key] == whole:
            settings[key] = len(chosen)


def _is_per_block(value: Any, blocks: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == blocks and blocks > 3


def _reduce_widths(settings: dict[str, Any], width_key: str, heads_key: str, head_size: bool) -> None:
    """Divide the number of heads and what grows with it by one factor; with `head_size`, heads by another."""
    heads, width = settings.get(heads_key), settings.get(width_key)
    if not isinstance(heads, int):
        heads_key = next((key for key in _HEAD_COUNTS if isinstance(settings.get(key), int)), heads_key)
        heads = settings.get(heads_key, 1)
    if not isinstance(heads, int) or not isinstance(width, int):
        return
    counts = [settings[key] for key in _MAMBA_HEADS if isinstance(settings.get(key), int)]
    common = math.gcd(heads, width, *counts)
    fewer = max((f for f in range(1, common + 1) if common % f == 0 and heads // f >= HEADS), default=1)
    if fewer == 1 and heads > 2 * HEADS and not counts and width % heads == 0:
        fewer = heads  # a prime number of heads
    narrower = 1
    size = settings.get("head_dim") or width // heads // (HEADS if heads == 1 else 1)
    if head_size and isinstance(size, int) and size > HEAD_SIZE and size % HEAD_SIZE == 0:
        narrower = size // HEAD_SIZE
        if width // fewer % narrower:
            return
        for key, value in settings.items():
            if key.endswith(("head_dim", "lora_rank")) and isinstance(value, int) and value % narrower == 0:
                settings[key] = max(2, value // narrower)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
            if name in settings and "qk_head_dim" in settings:
                settings["qk_head_dim"] = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
        rope: Any = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        for key, value in rope.items():
            if key.endswith("_factor") and isinstance(value, list):
                rope[key] = value[: len(value) // narrower]
    factor = fewer * narrower
    for key in {heads_key, *_HEAD_COUNTS, *_MAMBA_HEADS} - {width_key}:
        if isinstance(settings.get(key), int) and settings[key] >= fewer:
            settings[key] //= factor if key in _MAMBA_HEADS and settings[key] % factor == 0 else fewer
    for key in {width_key, *_MODEL_WIDTHS}:
        if isinstance(settings.get(key), int) and settings[key] % factor == 0:
            settings[key] = _divide(settings[key], factor) if settings.get("head_dim") else settings[key] // factor
    for key in _GROUPS:
        for count in _MAMBA_HEADS + _HEAD_COUNTS:
            if isinstance(settings.get(key), int) and isinstance(settings.get(count), int):
                settings[key] = math.gcd(settings[key], settings[count])
    for key in _KV_HEADS:
        value = settings.get(key)
        if isinstance(value, int):
            settings[key] = _fitting(max(1, value // fewer if value != heads else heads // fewer), heads // fewer)
    for key, value in settings.items():
        if isinstance(value, bool) or not key.endswith(_WIDTHS):
            continue
        if isinstance(value, int):
            settings[key] = _divide(value, factor)
        elif isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
            settings[key] = [_divide(v, factor) for v in value]


def _divide(value: int, factor: int) -> int:
    if value <= 32:
        return value
    return value // factor if value % factor == 0 and value // factor >= 16 else max(16, value // factor // 16 * 16)


def _fitting(count: int, heads: int) -> int:
    """Return the largest number up to `count` that divides the heads."""
    return max(n for n in range(1, count + 1) if heads % n == 0)


def _reduce_experts(settings: dict[str, Any]) -> None:
    groups = settings.get("n_group") or settings.get("num_expert_group") or 1
    for key in _CHOSEN:
        if isinstance(settings.get(key), int) and settings[key] > 4:
            settings[key] = 4
    for key in _EXPERTS:
        value = settings.get(key)
        if isinstance(value, int) and value > 8 and isinstance(groups, int):
            settings[key] = max(8, 2 * groups)
