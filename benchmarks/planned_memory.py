"""Planned memory of each stage beside the peak of the process that trains it, for six models of 16 M to 1.1 B weights.

    python -m benchmarks planned_memory [--only NAME ...] [--stages 2 3] [--folder /tmp] [--out FOLDER] [--redraw]

Planned is what `pipecomp plan --stages K` prints; measured is the peak (VmHWM of Linux) of each rank after three steps
with AQ-SGD and LMDB on this machine. Weights are random; those of LoRA's bases are read from a folder in BF16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.load_memory import GB, peak
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.distributed.local_launcher import run_ranks

TARGET = 0.25
STEPS = 3


@dataclass(frozen=True)
class Model:
    """A model and its batch: a transformers class, sizes of its config, samples, micro-batches, tokens, LoRA's rank."""

    name: str
    model_class: str
    sizes: dict[str, Any]
    samples: int
    micro_batches: int
    tokens: int
    lora: int | None = None


LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
TINY = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
MODELS = [
    Model("GPT-2, 16 M", "GPT2LMHeadModel", {"n_layer": 4, "n_embd": 256, "n_head": 4}, 4, 4, 128),
    Model("GPT-2, 124 M", "GPT2LMHeadModel", {}, 2, 4, 256),
    Model("BERT classifier, 109 M", "BertForSequenceClassification", {}, 8, 2, 128),
    Model("Llama, 335 M, LoRA", "LlamaForCausalLM", LLAMA | {"vocab_size": 32000}, 2, 4, 512, 16),
    Model(
        "Qwen 3, 596 M, LoRA",
        "Qwen3ForCausalLM",
        QWEN | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        1,
        4,
        256,
        16,
    ),
    Model(
        "Llama, 1.1 B, LoRA",
        "LlamaForCausalLM",
        TINY | {"num_key_value_heads": 4, "vocab_size": 32000},
        1,
        2,
        1024,
        16,
    ),
]


def described(model: Model) -> Any:
    """The model's configuration."""
    import transformers

    model_class = getattr(transformers, model.model_class)
    return model_class.config_class(**model.sizes, architectures=[model.model_class])


def write(rank: int, world: int, note: Any, name: str, folder: str) -> None:
    """Write random weights in BF16."""
    import torch
    import transformers

    model = next(m for m in MODELS if m.name == name)
    with torch.device("meta"):
        made = getattr(transformers, model.model_class)(described(model)).to(torch.bfloat16)
    made = made.to_empty(device="cpu")
    made.tie_weights()
    for weight in made.parameters():
        weight.data.uniform_(-0.02, 0.02)
    made.save_pretrained(folder)


def train(rank: int, world: int, note: Any, name: str, folder: str) -> int:
    """Train some steps; return the peak."""
    import torch

    import pipecomp
    from pipecomp.stages import pretrained

    torch.set_num_threads(1)
    model = next(m for m in MODELS if m.name == name)
    source = described(model)
    if model.lora:
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=model.lora, target_modules="all-linear")
        source = pretrained(f"{folder}/model", lora=adapter)
    classifies = "Classification" in model.model_class
    draw = torch.Generator().manual_seed(0)
    data = []
    for index in range(2 * model.samples * model.micro_batches):
        ids = torch.randint(0, 1000, (model.tokens,), generator=draw)
        data.append({"input_ids": ids, "labels": torch.tensor(index % 2) if classifies else ids})
    config = {
        "train_micro_batch_size_per_gpu": model.samples,
        "gradient_accumulation_steps": model.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        # Note: in_flight is fixed at what sizes are planned for; "auto" takes more where memory allows it.
        "pipecomp": {
            "activations": {"method": "aqsgd"},
            "in_flight": world,
            "store": {"path": f"{folder}/store-{rank}"},
        },
    }
    engine = pipecomp.initialize(source, num_stages=world, config=config, training_data=data)
    for _ in range(STEPS):
        engine.train_batch()
    engine.close()
    return peak()


def plan(rank: int, world: int, note: Any, name: str, stages: int) -> list[float]:
    """Bytes of each stage by `pipecomp plan`."""
    from rich.console import Console

    from pipecomp.plan.command import run_plan
    from pipecomp.plan.options import PlanOptions

    model = next(m for m in MODELS if m.name == name)
    batch = model.samples * model.micro_batches
    options = PlanOptions(
        model=described(model),
        stages=stages,
        batch=batch,
        micro_batch=model.samples,
        tokens=model.tokens,
        lora=model.lora,
    )
    made = run_plan(Console(quiet=True), options)
    assert made is not None
    found: list[float] = made["memory_bytes"]
    return found


def measure(name: str, stages: int, folder: Path) -> Row:
    """Plan one model, and train it."""
    model = next(m for m in MODELS if m.name == name)
    planned = run_ranks(1, plan, name, stages, timeout_s=600)[0]
    with tempfile.TemporaryDirectory(dir=folder) as made:
        if model.lora:
            run_ranks(1, write, name, f"{made}/model", timeout_s=1800)
        peaks = run_ranks(stages, train, name, made, timeout_s=3600)
    return {"model": name, "stages": stages, "planned": planned, "measured": [peaks[rank] for rank in sorted(peaks)]}


def errors(row: Row) -> list[float]:
    """Planned over measured, less 1, of each stage."""
    return [planned / measured - 1 for planned, measured in zip(row["planned"], row["measured"], strict=True)]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    everything = [error for row in rows for error in errors(row)]
    outside = sum(abs(error) > TARGET for error in everything)
    text = f"""
        # Planned memory

        `python -m benchmarks planned_memory`, on {page.machine(rows)}.

        Planned is what `pipecomp plan --stages K` prints for each stage; measured is the peak of that stage's process
        (VmHWM) after {STEPS} steps in float32 with AQ-SGD and LMDB, one thread a rank. Of {len(everything)} stages
        {outside} are planned more than {100 * TARGET:.0f} % beside what they take; the differences go from
        {100 * min(everything):+.0f} to {100 * max(everything):+.0f} %.
    """

    def listed(values: Sequence[float], form: str) -> str:
        return ", ".join(form.format(value) for value in values)

    by_name = {model.name: model for model in MODELS}
    cells = {
        "model": lambda row: row["model"],
        "samples × tokens": lambda row: f"{by_name[row['model']].samples} × {by_name[row['model']].tokens}",
        "stages": lambda row: row["stages"],
        "planned, GB": lambda row: listed([size / GB for size in row["planned"]], "{:.2f}"),
        "measured, GB": lambda row: listed([size / GB for size in row["measured"]], "{:.2f}"),
        "difference, %": lambda row: listed([100 * error for error in errors(row)], "{:+.0f}"),
    }
    order = [model.name for model in MODELS]
    return [
        *prose(text),
        *page.columns(cells, sorted(rows, key=lambda row: (order.index(row["model"]), row["stages"]))),
    ]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    folder = (Path(tempfile.gettempdir()), "where weights and stores are written for a while")
    given = arguments(argv, __doc__, "only", stages=([2, 3], "K"), folder=folder)
    names = chosen([model.name for model in MODELS], given.only)
    setup = digest([[model.name, model.sizes, model.samples, model.micro_batches, model.tokens] for model in MODELS])
    Runs(given, "planned_memory", setup, ("model", "stages")).complete(
        measure,
        [(name, stages) for name in names for stages in given.stages],
        given.folder,
        line=lambda row: ", ".join(f"{100 * error:+.0f} %" for error in errors(row)),
        page=results,
        workers=0,
    )
