"""Write docs/models.md: which models of the installed transformers are equal to their stages at every cut.

    python scripts/models_page.py [--check]

Each class for causal language modeling and for sequence classification is built small, with random weights, and
compared. --check only tells whether the page is as it would be written.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
KINDS = ("causal language model", "sequence classification")
# What a configuration lacks, or has in a form that its own model does not accept, if it is made without arguments.
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "zamba2": {
        **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"attention_head_dim": 16, "intermediate_size": 64, "mamba_d_state": 8, "n_mamba_heads": 4},
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "mamba_ngroups": 1, "adapter_rank": 4},
    },
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model class. reason: why it is refused; None if it is equal to its stages."""

    model_type: str
    model_class: str
    kind: str
    reason: str | None
    left_padding: bool = True


def classes() -> Iterator[tuple[str, str, str]]:
    """Yield model type, class and kind of all classes of the installed transformers."""
    from transformers.models.auto import modeling_auto

    for kind, names in zip(
        KINDS,
        (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        ),
        strict=True,
    ):
        for model_type, name in names.items():
            yield model_type, name if isinstance(name, str) else name[0], kind


def examine(model_type: str, name: str, kind: str) -> Row:
    """Compare a small model of a class with its stages."""
    import transformers

    from pipecomp.stages.partition.architectures import architecture_of
    from pipecomp.stages.partition.discovery import text_part
    from pipecomp.stages.partition.equality import check_small_copy
    from pipecomp.stages.partition.splitting import split_unchecked

    try:
        config = transformers.CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
        model_class = getattr(transformers, name)
        if kind == KINDS[0] and not isinstance(config, model_class.config_class or object):
            config = config.get_text_config()
        inner = text_part(config) if name.endswith("ForConditionalGeneration") else config
        if inner is not config:
            return Row(
                model_type=model_type, model_class=name, kind=kind, reason=f"its text part is `{inner.model_type}`"
            )
        if kind == KINDS[1] and getattr(config, "pad_token_id", 0) is None:
            config.pad_token_id = 0  # as anyone sets it who classifies more than one sample at a time
        left = check_small_copy(config, model_class, architecture_of(config, model_class), split_unchecked)
    except Exception as error:  # of any kind: the page says it
        return Row(model_type=model_type, model_class=name, kind=kind, reason=_shorten(model_type, error))
    return Row(model_type=model_type, model_class=name, kind=kind, reason=None, left_padding=left)


def _shorten(model_type: str, error: Exception) -> str:
    """Return the reason in an error, without what every such error says."""
    text = " ".join(str(error).split())
    for pattern in (
        r"\. pipecomp\.stages\.register\(.*",
        rf"model_type '{re.escape(model_type)}\w*' has no entry, and ",
        rf"^{re.escape(model_type)}\w*: ",
        r"SplitError: ",
        r"(stages cut at \[[\d, ]*\]) differ from the unsplit \w+: ",
    ):
        text = re.sub(pattern, "", text)
    text = text if len(text) <= 160 else text[:157] + "…"
    return text.replace("|", "\\|")


def page(rows: list[Row]) -> str:
    """Return the page's text."""
    import transformers

    equal = [row for row in rows if row.reason is None]
    types = {kind: sorted({row.model_type for row in equal if row.kind == kind}) for kind in KINDS}
    totals = {kind: len({row.model_type for row in rows if row.kind == kind}) for kind in KINDS}
    every = sorted({row.model_type for row in equal})
    lines = [
        "# Models",
        "",
        f"Made by `python scripts/models_page.py` from transformers {transformers.__version__}. Each class is built",
        "small with random weights and trained one step, whole and cut at every place in turn. **Equal** means: the",
        "same logits, loss and gradients of every parameter, bit for bit (weights that several stages share: to",
        "1e-5, as their sums have another order), and to 1e-5 with padding.",
        "",
        f"**{len(every)} model types are equal at every cut**: {len(types[KINDS[0]])} of {totals[KINDS[0]]} as causal",
        f"language models, {len(types[KINDS[1]])} of {totals[KINDS[1]]} for sequence classification.",
        "",
        "A model that is not among pipecomp's own entries (GPT-2, Llama, Qwen 2 and 3, Mistral, BERT, RoBERTa,",
        "DeBERTa) is compared like this before its first step, with its own settings; the answer is kept in",
        "`~/.cache/pipecomp/architectures`. If it differs, the run ends with an error that names the block. Classes",
        "outside transformers and entries of `pipecomp.stages.register` are compared too.",
        "",
        "- A router's auxiliary loss (`output_router_logits`) is refused: a pipeline's loss has no term for it.",
        "- Of a vision-language model the text part is trained: the class of its text config, on text alone.",
        "- Encoder-decoders (T5, BART for generation) are refused: every block of the decoder reads the encoder's",
        "  output, which does not travel.",
        "",
        "## Equal at every cut",
        "",
        "| type | causal language model | sequence classification | |",
        "|---|---|---|---|",
    ]
    for model_type in every:
        found = {row.kind: row for row in equal if row.model_type == model_type}
        cells = [f"`{found[kind].model_class}`" if kind in found else "" for kind in KINDS]
        note = "" if all(row.left_padding for row in found.values()) else "pad on the right"
        lines.append(f"| {model_type} | {cells[0]} | {cells[1]} | {note} |")
    lines += ["", "## Refused", "", "| type | class | reason |", "|---|---|---|"]
    for row in sorted((row for row in rows if row.reason is not None), key=lambda row: (row.model_type, row.kind)):
        lines.append(f"| {row.model_type} | `{row.model_class}` | {row.reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write docs/models.md.")
    parser.add_argument("--check", action="store_true", help="only compare the page with what it would be")
    args = parser.parse_args()
    logging.getLogger("pipecomp").setLevel(logging.ERROR)
    rows = []
    for given in classes():
        rows.append(examine(*given))
        print(rows[-1].model_type, rows[-1].reason or "equal", flush=True)
    text = page(rows)
    if args.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
