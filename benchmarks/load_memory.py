"""Peak memory of each rank that loads its stage of a Llama with a billion random weights from disk.

    python benchmarks/load_memory.py [--stages 4] [--layers 20] [--folder /tmp] [--markdown FILE] [--json FILE]

Writes a checkpoint of 4 GB in three files into a new folder below --folder, and deletes it at the end. Then every rank,
a process of its own, all at the same time, loads its stage from there; once the stage alone, once with `initialize`.
Target: the peak (VmHWM of Linux) is within 1.25 × the stage's own weights, plus the interpreter: what the same process
needed for a small model before.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pipecomp.cluster.local_ranks import run_ranks

TARGET = 1.25
GB = 1e9
FILES = 3  # of the checkpoint, which has no reason to be cut as the stages are
HEADINGS = ("loaded by", "rank", "own weights, GB", "interpreter, GB", "peak, GB", "(peak − interpreter) / own weights")
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "steps_per_print": 10**9,
}


def config(layers: int, sizes: dict[str, int]) -> Any:
    """A Llama's configuration with its own output embedding."""
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=False, dtype="float32", **sizes)


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
    found = {"own": _bytes(made.stage), "interpreter": interpreter, "peak": peak()}
    made.close()
    return found


def _bytes(stage: Any) -> int:
    return sum(p.numel() * p.element_size() for p in stage.parameters())


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    gigabytes = [f"{row[key] / GB:.3f}" for key in ("own", "interpreter", "peak")]
    return [row["by"], str(row["rank"]), *gigabytes, f"{(row['peak'] - row['interpreter']) / row['own']:.3f}"]


def markdown(rows: list[dict[str, Any]], parameters: int, command: str) -> str:
    """The table, with what it was measured on."""
    worst = max((row["peak"] - row["interpreter"]) / row["own"] for row in rows)
    lines = [
        "# Memory of loading",
        "",
        f"`{command}`, {platform.system()} on {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}.",
        "",
        f"A Llama of {parameters:,} random weights, {4 * parameters / GB:.2f} GB in float32, in {FILES} files. "
        "All ranks load at the same time, each its stage. Peak: VmHWM of the process; interpreter: the same after a "
        "small model was loaded in the same way.",
        "",
        f"Target: peak within {TARGET} × own weights + interpreter. Reached: {worst:.3f} × at most"
        f"{'' if worst <= TARGET else ', which misses the target'}.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run from the command line; exit status 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=20, help="44 million weights each")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        small, large = f"{folder}/small", f"{folder}/large"
        run_ranks(1, write, small, FILES, max(FILES, options.stages), SMALL, timeout_s=600)
        parameters = run_ranks(1, write, large, FILES, options.layers, SIZES, timeout_s=1800)[0]
        for name, load in (("build_stage", stage_alone), ("initialize", engine)):
            ranks = run_ranks(options.stages, load, small, large, timeout_s=1800)
            rows += [{"by": name, "rank": rank, **ranks[rank]} for rank in sorted(ranks)]
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"parameters": parameters, "rows": rows}, indent=1) + "\n")
    if options.markdown:
        command = " ".join(["python benchmarks/load_memory.py", *sys.argv[1:]])
        options.markdown.write_text(markdown(rows, parameters, command))
    return int(any(row["peak"] - row["interpreter"] > TARGET * row["own"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
