"""Peak memory of each rank that loads its stage of a Llama with a billion random weights from disk.

    python -m benchmarks load_memory [--stages 4] [--layers 20] [--folder /tmp] [--out FOLDER] [--redraw]

Writes a checkpoint of 4 GB in three files into a new folder below --folder, and deletes it at the end. Then every rank,
a process of its own, all at the same time, loads its stage from there; once the stage alone, once with `initialize`.
Target: the peak (VmHWM of Linux) is within 1.25 × the stage's own weights, plus the interpreter: what the same process
needed for a small model before.
"""

from __future__ import annotations

import tempfile
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
    memory = {"own": _bytes(made.stage), "interpreter": interpreter, "peak": peak()}
    made.close()
    return memory


def _bytes(stage: Any) -> int:
    return sum(p.numel() * p.element_size() for p in stage.parameters())


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
    given = arguments(argv, __doc__, **own, folder=folder)
    setup = digest([given.stages, given.layers, FILES, SIZES])
    runs = Runs(given, "load_memory", setup, ("stages", "layers"))
    case = (given.stages, given.layers)
    runs.complete(
        measure, [case], given.folder, line=lambda row: f"{max(map(ratio, row['ranks'])):.3f} ×", page=results
    )
    raise SystemExit(any(ratio(rank) > TARGET for row in runs.rows for rank in row["ranks"]))
