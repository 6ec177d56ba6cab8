"""Peak memory of each rank that loads its stage of a Llama with a billion random weights from disk.

    python -m benchmarks load_memory [--stages 4] [--layers 20] [--folder /tmp] [--out FOLDER] [--redraw]
    python -m benchmarks load_memory --quantized [--stages 2]

Writes a checkpoint of 4 GB in three files into a new folder below --folder, and deletes it at the end. Then every rank,
a process of its own, all at the same time, loads its stage from there; once the stage alone, once with `initialize`.
Target: the peak (VmHWM of Linux) is within 1.25 × the stage's own weights, plus the interpreter: what the same process
needed for a small model before.

With --quantized the checkpoint is a Llama of 3.4 billion weights in BF16 (6.9 GB), which every rank quantizes to 4 bits
(NF4, scales quantized, too) while it reads its stage; `initialize` adds LoRA of rank 16 in all linear layers and trains
one step. The page says by how much the peak of loading exceeds the stage's own weights, the largest tensor on disk and
the interpreter.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, digest
from pipecomp.distributed.local_launcher import run_ranks

TARGET = 1.25
GB = 1e9
FILES = 3  # of the checkpoint, which has no reason to be cut as the stages are
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 32000}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 64}
LAYERS_3B = 26
SIZES_3B = {"hidden_size": 3200, "intermediate_size": 8640, "num_attention_heads": 32}
SIZES_3B |= {"num_key_value_heads": 32, "vocab_size": 32000}
TOKENS = 64  # of the samples of the first step
BF16 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000_000},
    "data_types": {"grad_accum_dtype": "fp32"},
    "pipeline": {"activation_checkpoint_interval": 1},
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "steps_per_print": 10**9,
}


def config(layers: int, sizes: dict[str, int], dtype: str = "float32") -> Any:
    """A Llama's configuration with its own output embedding."""
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=False, dtype=dtype, **sizes)


def write(rank: int, world: int, note: Any, folder: str, files: int, layers: int, sizes: dict[str, int]) -> int:
    """Write a checkpoint without ever holding more than a file; returns its parameters."""
    from pipecomp.stages import build_stage, plan, write_index, write_shard

    described = config(layers, sizes)
    cut = plan(described, num_stages=files)
    for index in range(files):
        stage = build_stage(described, cut, index)
        write_shard(stage, folder)
        if index < files - 1:
            del stage
    write_index(stage, folder)
    return sum(cut.parameters)


def peak() -> int:
    """VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def stage_alone(rank: int, world: int, note: Any, small: str, large: str) -> dict[str, int]:
    """Peaks of one rank that loads a stage and does nothing else."""
    from pipecomp.stages import build_stage, plan

    build_stage(small, plan(small, num_stages=world), rank)
    interpreter = peak()
    stage = build_stage(large, plan(large, num_stages=world), rank)
    return {"own": _bytes(stage), "interpreter": interpreter, "peak": peak()}


def engine(rank: int, world: int, note: Any, small: str, large: str) -> dict[str, int]:
    """Peaks of one rank of an engine in float32, before the first step makes gradients and optimizer states."""
    import pipecomp

    pipecomp.initialize(small, num_stages=world, config=CONFIG).close()
    interpreter = peak()
    made = pipecomp.initialize(large, num_stages=world, config=CONFIG)
    memory = {"own": _bytes(made.stage), "interpreter": interpreter, "peak": peak()}
    made.close()
    return memory


def write_blocks(rank: int, world: int, note: Any, folder: str, layers: int, sizes: dict[str, int]) -> int:
    """Write a checkpoint in BF16, a file for each block; returns its parameters.

    All blocks have the same random weights: to draw them for every block takes minutes.
    """
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    path = Path(folder)
    path.mkdir(parents=True)
    described = config(layers, sizes, "bfloat16")
    described.architectures = ["LlamaForCausalLM"]
    described.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config(1, sizes)).named_parameters()}
    drawn = {name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05) for name, shape in shapes.items()}
    block = {name: value for name, value in drawn.items() if ".layers.0." in name}
    files = {"model-ends.safetensors": {name: value for name, value in drawn.items() if name not in block}}
    for layer in range(layers):
        own = {name.replace(".layers.0.", f".layers.{layer}."): value for name, value in block.items()}
        files[f"model-{layer}.safetensors"] = own
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    for file, tensors in files.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(value.numel() for tensors in files.values() for value in tensors.values())


def _four_bits(folder: str) -> Any:
    import peft
    from transformers import BitsAndBytesConfig

    from pipecomp.stages import pretrained

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    )
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    return pretrained(folder, lora=adapter, quantization_config=four_bits)


def quantized_engine(rank: int, world: int, note: Any, small: str, large: str) -> dict[str, Any]:
    """As `engine`, in 4 bits with LoRA and activation checkpointing, and after the first step."""
    import torch

    import pipecomp

    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 60, (TOKENS,), generator=draw) for _ in range(2)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = {"num_stages": world, "config": CONFIG | BF16, "training_data": data}
    made = pipecomp.initialize(_four_bits(small), **given)
    made.train_batch()
    made.close()
    interpreter, began = peak(), time.perf_counter()
    made = pipecomp.initialize(_four_bits(large), **given)
    found: dict[str, Any] = {"own": _bytes(made.stage), "interpreter": interpreter, "peak": peak()}
    found["seconds"] = time.perf_counter() - began
    made.train_batch()
    found |= {"step_peak": peak(), "step_seconds": time.perf_counter() - began}
    made.close()
    return found


def _bytes(stage: Any) -> int:
    from pipecomp.stages.partition.quantization import state_tensors

    return sum(p.numel() * p.element_size() for p in [*stage.parameters(), *state_tensors(stage)])


def measure_quantized(stages: int, layers: int, folder: Path) -> Row:
    """An engine of LoRA on a base model in 4 bits, and its first step."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        small, large = f"{made}/small", f"{made}/large"
        run_ranks(1, write_blocks, small, stages, SMALL, timeout_s=600)
        parameters = run_ranks(1, write_blocks, large, layers, SIZES_3B, timeout_s=1800)[0]
        found = run_ranks(stages, quantized_engine, small, large, timeout_s=3600)
    ranks = [{"rank": rank, **found[rank]} for rank in sorted(found)]
    largest = 2 * SIZES_3B["vocab_size"] * SIZES_3B["hidden_size"]
    return {"stages": stages, "layers": layers, "parameters": parameters, "largest": largest, "ranks": ranks}


def excess(row: Row, rank: Row) -> float:
    """GB that loading needed beyond the interpreter, the stage's own weights and the largest tensor."""
    return (rank["peak"] - rank["interpreter"] - rank["own"] - row["largest"]) / GB


def quantized_results(rows: list[Row]) -> list[str]:
    """The page of --quantized."""
    (row,) = rows
    worst = max(excess(row, rank) for rank in row["ranks"])
    text = f"""
        # Memory of loading in 4 bits

        `python -m benchmarks load_memory --quantized`, on {page.machine(rows)}.

        A Llama of {row["parameters"]:,} random weights (the same in every block), {2 * row["parameters"] / GB:.2f} GB
        in BF16, in {row["layers"] + 1} safetensors files that all ranks read at the same time. Each quantizes its
        stage's linear layers to NF4, scales included, one weight at a time; embedding, head and norms stay BF16.
        `initialize` adds LoRA of rank 16 in all linear layers, and trains a step of two samples of {TOKENS} tokens with
        activation checkpointing. Peak: VmHWM of the process; interpreter: the same after a small model was loaded in
        the same way. The seconds are of a machine that ran other programs, too.

        The aim is a peak of own weights + the largest tensor on disk ({row["largest"] / GB:.3f} GB) + interpreter.
        Loading takes up to {worst:.3f} GB more than that; what takes them, such as the adapters' copies in float32, was
        not measured apart.
    """
    cells = {
        "rank": lambda rank: rank["rank"],
        "own weights, GB": lambda rank: f"{rank['own'] / GB:.3f}",
        "interpreter, GB": lambda rank: f"{rank['interpreter'] / GB:.3f}",
        "peak of loading, GB": lambda rank: f"{rank['peak'] / GB:.3f}",
        "peak with the first step, GB": lambda rank: f"{rank['step_peak'] / GB:.3f}",
        "loaded after, s": lambda rank: f"{rank['seconds']:.0f}",
        "first step after, s": lambda rank: f"{rank['step_seconds']:.0f}",
    }
    return [*prose(text), *page.columns(cells, row["ranks"])]


def measure(stages: int, layers: int, folder: Path) -> Row:
    """Both ways to load, each by all ranks at the same time."""
    ranks: list[Row] = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        small, large = f"{made}/small", f"{made}/large"
        run_ranks(1, write, small, FILES, max(FILES, stages), SMALL, timeout_s=600)
        parameters = run_ranks(1, write, large, FILES, layers, SIZES, timeout_s=1800)[0]
        for name, load in (("build_stage", stage_alone), ("initialize", engine)):
            by_rank = run_ranks(stages, load, small, large, timeout_s=1800)
            ranks += [{"by": name, "rank": rank, **by_rank[rank]} for rank in sorted(by_rank)]
    return {"stages": stages, "layers": layers, "parameters": parameters, "ranks": ranks}


def ratio(rank: Row) -> float:
    """Return the memory of loading beyond the interpreter, over the stage's own weights."""
    return (rank["peak"] - rank["interpreter"]) / rank["own"]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    (row,) = rows
    worst = max(map(ratio, row["ranks"]))
    text = f"""
        # Memory of loading

        `python -m benchmarks load_memory`, on {page.machine(rows)}.

        A Llama of {row["parameters"]:,} random weights, {4 * row["parameters"] / GB:.2f} GB in float32, in {FILES}
        files. All ranks load at the same time, each its stage. Peak: VmHWM of the process; interpreter: the same after
        a small model was loaded in the same way.

        Target: peak within {TARGET} × own weights + interpreter. Reached: {worst:.3f} × at
        most{"" if worst <= TARGET else ", which misses the target"}.
    """
    cells = {
        "loaded by": lambda rank: rank["by"],
        "rank": lambda rank: rank["rank"],
        "own weights, GB": lambda rank: f"{rank['own'] / GB:.3f}",
        "interpreter, GB": lambda rank: f"{rank['interpreter'] / GB:.3f}",
        "peak, GB": lambda rank: f"{rank['peak'] / GB:.3f}",
        "(peak − interpreter) / own weights": lambda rank: f"{ratio(rank):.3f}",
    }
    return [*prose(text), *page.columns(cells, row["ranks"])]


def main(argv: Sequence[str]) -> None:
    """Exit status 1 if the target is missed."""
    own = {"stages": (4, "ranks"), "layers": (20, "of 44 million weights each")}
    folder = (Path(tempfile.gettempdir()), "where the checkpoint is written for a while")
    four_bits = (False, "load a Llama of 3 billion weights in 4 bits, over two stages unless --stages says otherwise")
    given = arguments(argv, __doc__, **own, folder=folder, quantized=four_bits)
    if given.quantized:
        stages = given.stages if given.stages != own["stages"][0] else 2
        setup = digest([stages, LAYERS_3B, SIZES_3B, TOKENS, BF16])
        runs = Runs(given, "load_memory_4bit", setup, ("stages", "layers"))
        runs.complete(
            measure_quantized,
            [(stages, LAYERS_3B)],
            given.folder,
            line=lambda row: f"{max(excess(row, rank) for rank in row['ranks']):+.3f} GB",
            page=quantized_results,
        )
        return
    setup = digest([given.stages, given.layers, FILES, SIZES])
    runs = Runs(given, "load_memory", setup, ("stages", "layers"))
    case = (given.stages, given.layers)
    runs.complete(
        measure, [case], given.folder, line=lambda row: f"{max(map(ratio, row['ranks'])):.3f} ×", page=results
    )
    raise SystemExit(any(ratio(rank) > TARGET for row in runs.rows for rank in row["ranks"]))
