"""Planned memory and seconds of a step beside those of training, for six models of 16 M to 1.1 B weights.

    python -m benchmarks planned [--only NAME ...] [--stages 2 3] [--rates 1gbit 100mbit] [--folder /tmp] [--redraw]

All stages are on this machine, a node of a network lab each (as root; --software without), one thread a rank. The ranks
first measure and plan, as `pipecomp train` does; other processes then train with the plan's settings: the peak of each
(VmHWM of Linux) after some steps, and the median seconds of those after the first visits of all samples. Weights are
random; those of LoRA's bases are read from a folder in BF16.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import page
from benchmarks.load_memory import GB, peak
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.netlab.lab import Lab

TARGET = 0.25
STEPS = 3  # the first one, which sees every sample for the first time, and two that are timed
RATES = ["1gbit", "100mbit"]


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
    Model("GPT-2, 16 M", "GPT2LMHeadModel", {"n_layer": 4, "n_embd": 256, "n_head": 4}, 2, 2, 1024),
    Model("GPT-2, 124 M", "GPT2LMHeadModel", {}, 2, 4, 128),
    Model("BERT classifier, 109 M", "BertForSequenceClassification", {}, 4, 2, 64),
    Model("Llama, 335 M, LoRA", "LlamaForCausalLM", LLAMA | {"vocab_size": 32000}, 1, 2, 256, 16),
    Model(
        "Qwen 3, 596 M, LoRA",
        "Qwen3ForCausalLM",
        QWEN | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        1,
        2,
        128,
        16,
    ),
    Model(
        "Llama, 1.1 B, LoRA",
        "LlamaForCausalLM",
        TINY | {"num_key_value_heads": 4, "vocab_size": 32000},
        1,
        2,
        128,
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


def plan(rank: int, world: int, note: Any, name: str, folder: str) -> dict[str, Any] | None:
    """The plan that the ranks measure together, on rank 0."""
    from rich.console import Console

    from pipecomp.netlab.software import throttle_to
    from pipecomp.plan.command import run_plan
    from pipecomp.plan.options import PlanOptions

    model = next(m for m in MODELS if m.name == name)
    options = PlanOptions(
        model=described(model),
        stages=world,
        batch=model.samples * model.micro_batches,
        micro_batch=model.samples,
        tokens=model.tokens,
        lora=model.lora,
        measure=True,
        store=Path(folder),
    )
    return run_plan(Console(quiet=True), options, throttle_to, settings=False)


def train(
    rank: int, world: int, note: Any, name: str, folder: str, cuts: list[int], settings: dict[str, Any]
) -> tuple[int, list[float]]:
    """Train some steps with a plan's settings; return the peak, and the seconds of each step."""
    import torch

    import pipecomp
    from pipecomp.stages import pretrained

    model = next(m for m in MODELS if m.name == name)
    source = described(model)
    if model.lora:
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=model.lora, target_modules="all-linear")
        source = pretrained(f"{folder}/model", lora=adapter)
    classifies = "Classification" in model.model_class
    draw = torch.Generator().manual_seed(0)
    data = []
    for index in range(model.samples * model.micro_batches):  # a batch, which comes back in every step
        ids = torch.randint(0, 1000, (model.tokens,), generator=draw)
        data.append({"input_ids": ids, "labels": torch.tensor(index % 2) if classifies else ids})
    section = dict(settings.get("pipecomp", {}))
    if "activations" in section:
        section["store"] = {"path": f"{folder}/store-{rank}", **section.get("store", {})}
    config = {
        **settings,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "pipecomp": section,
    }
    engine = pipecomp.initialize(source, cuts=cuts, config=config, training_data=data)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.train_batch()
        seconds.append(time.perf_counter() - began)
    engine.close()
    return peak(), seconds


def measure(name: str, stages: int, rate: str, folder: Path, software: bool) -> Row:
    """Plan one model over links of a rate, and train it."""
    model = next(m for m in MODELS if m.name == name)
    with (
        tempfile.TemporaryDirectory(dir=folder) as made,
        Lab(nodes=stages, bandwidth=rate, software=software) as lab,
    ):
        if model.lora:
            run_ranks(1, write, name, f"{made}/model", timeout_s=1800)
        planned = lab.run(plan, name, made, timeout_s=1800)[0]
        ranks = lab.run(train, name, made, planned["cuts"], planned["config"], timeout_s=3600)
    taken = planned["chosen" if planned["pays"] else "plain"]
    return {
        "model": name,
        "stages": stages,
        "rate": rate,
        "lab": "software" if software else "kernel",
        "method": taken["method"],
        "planned": taken["memory_bytes"],
        "measured": [ranks[rank][0] for rank in sorted(ranks)],
        "planned_s": taken["step_s"],
        "planned_range_s": taken["step_range_s"],
        "measured_s": median(ranks[0][1][1:]),
    }


def errors(row: Row) -> list[float]:
    """Planned over measured memory, less 1, of each stage."""
    return [planned / measured - 1 for planned, measured in zip(row["planned"], row["measured"], strict=True)]


def seconds_error(row: Row) -> float:
    """Planned over measured seconds of a step, less 1."""
    return float(row["planned_s"] / row["measured_s"] - 1)


def results(rows: list[Row]) -> list[str]:
    """The page."""
    memory, seconds = [error for row in rows for error in errors(row)], [seconds_error(row) for row in rows]
    outside = [sum(abs(error) > TARGET for error in found) for found in (memory, seconds)]
    text = f"""
        # Planned and measured

        `python -m benchmarks planned`, on {page.machine(rows)}.

        Stages are nodes of a network lab on this machine, one thread each. The plan is what its ranks measured together
        ("planned": `pipecomp train` prints it); measured are the peak of each stage's process (VmHWM) and the median
        seconds of steps that see samples again, in float32 with the plan's settings. Of {len(memory)} stages
        {outside[0]} are planned more than {100 * TARGET:.0f} % beside the memory that they take
        ({100 * min(memory):+.0f} to {100 * max(memory):+.0f} %), of {len(seconds)} runs {outside[1]} beside the seconds
        ({100 * min(seconds):+.0f} to {100 * max(seconds):+.0f} %).
    """

    def listed(values: Sequence[float], form: str) -> str:
        return ", ".join(form.format(value) for value in values)

    by_name = {model.name: model for model in MODELS}
    cells = {
        "model": lambda row: row["model"],
        "samples × tokens": lambda row: f"{by_name[row['model']].samples} × {by_name[row['model']].tokens}",
        "stages": lambda row: row["stages"],
        "line": lambda row: f"{row['rate']}, {row['lab']}",
        "method": lambda row: row["method"],
        "planned, GB": lambda row: listed([size / GB for size in row["planned"]], "{:.2f}"),
        "measured, GB": lambda row: listed([size / GB for size in row["measured"]], "{:.2f}"),
        "difference, %": lambda row: listed([100 * error for error in errors(row)], "{:+.0f}"),
        "planned, s": lambda row: "{:.3g} ({:.2g}–{:.2g})".format(row["planned_s"], *row["planned_range_s"]),
        "measured, s": lambda row: f"{row['measured_s']:.3g}",
        "seconds, %": lambda row: f"{100 * seconds_error(row):+.0f}",
    }
    order = [model.name for model in MODELS]
    ordered = sorted(rows, key=lambda row: (order.index(row["model"]), row["stages"], RATES.index(row["rate"])))
    return [*prose(text), *page.columns(cells, ordered)]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    own: dict[str, tuple[Any, ...]] = {
        "stages": ([2, 3], "K"),
        "rates": (RATES, "rates of the links", RATES),
        "folder": (Path(tempfile.gettempdir()), "where weights and stores are written for a while"),
        "software": (False, "throttle the links in software, which needs no root"),
    }
    given = arguments(argv, __doc__, "only", **own)
    names = chosen([model.name for model in MODELS], given.only)
    setup = digest([STEPS, [[m.name, m.sizes, m.samples, m.micro_batches, m.tokens, m.lora] for m in MODELS]])
    Runs(given, "planned", setup, ("model", "stages", "rate")).complete(
        measure,
        [(name, stages, rate) for name in names for stages in given.stages for rate in given.rates],
        given.folder,
        given.software,
        line=lambda row: ", ".join(f"{100 * error:+.0f} %" for error in [*errors(row), seconds_error(row)]),
        page=results,
        workers=0,
    )
