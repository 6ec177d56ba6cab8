"""Seconds of a step, bytes and hit rate with packing, beside padded batches, on lengths that vary as chats' do.

Two processes on this machine, a stage each, joined by gloo over 127.0.0.1 without a simulated network: packing saves
computation. Every round trains each variant, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import columns, machine, prose, this_machine
from pipecomp.distributed.local_launcher import run_ranks

PADDED, BY_LENGTH, PACKED = "padded", "padded, group_by_length", "packing"
VARIANTS = (PADDED, BY_LENGTH, PACKED)
SAMPLES, MICRO_BATCH, ACCUMULATION, EPOCHS = 96, 8, 4, 2
MEDIAN, SIGMA, MAX_LENGTH, VOCABULARY = 100, 0.8, 512, 4096
SECTION = {
    "activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8},
    "store": {"backend": "memory"},
}


def documents() -> list[dict[str, list[int]]]:
    """Random tokens of log-normal lengths."""
    draw = torch.Generator().manual_seed(1)
    lengths = (torch.randn(SAMPLES, generator=draw) * SIGMA).exp().mul(MEDIAN).long().clamp(8, MAX_LENGTH).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()} for n in lengths]


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest."""
    longest = max(len(s["input_ids"]) for s in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        n = len(sample["input_ids"])
        tokens[row, :n], mask[row, :n] = torch.tensor(sample["input_ids"]), 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def model() -> Any:
    """A Llama of 5.3 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=MAX_LENGTH, **sizes))


def train(rank: int, world: int, note: Any, variant: str, folder: str) -> dict[str, Any]:
    """Train a variant on one of two ranks."""
    from transformers import TrainerCallback, TrainingArguments

    from pipecomp import PipelineTrainer

    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            times.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *args: Any, **more: Any) -> None:
            began = times.pop()
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))

    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=EPOCHS,
        train_sampling_strategy="group_by_length" if variant == BY_LENGTH else "random",
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    packing = {"packing": True, "max_length": MAX_LENGTH} if variant == PACKED else {}
    collate = None if variant == PACKED else pad
    trainer = PipelineTrainer(
        model(), args, collate, documents(), callbacks=[Clock()], pipecomp=SECTION, report=False, **packing
    )
    trainer.train()
    ends = list(trainer.engine.links)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    out = {
        "seconds": [wall for wall, _ in times],
        "cpu_seconds": [cpu for _, cpu in times],
        "losses": [line["loss"] for line in logs],
        "hit_rates": [line["store_hit_rate"] for line in logs],
        "bytes": sum(end.stats.forward.bytes_sent + end.stats.backward.bytes_sent for end in ends),
    }
    trainer.end()
    return out


def measure(rounds: int) -> dict[str, Any]:
    """Train all variants in each round; returns values by variant and the machine."""
    found: dict[str, list[dict[int, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                found[variant].append(run_ranks(2, train, variant, folder, timeout_s=3600))
            steps = statistics.median(found[variant][-1][0]["seconds"])
            print(f"round {number + 1} of {rounds}, {variant}: {steps:.2f} s a step", flush=True)
    rows = []
    for variant, runs in found.items():
        each = len(runs[0][0]["losses"]) // EPOCHS
        pairs = [zip(run[0]["cpu_seconds"][1:], run[1]["cpu_seconds"][1:], strict=True) for run in runs]
        rows.append(
            {
                "variant": variant,
                "seconds": [second for run in runs for second in run[0]["seconds"][1:]],
                "cpu_seconds": [sum(both) for steps in pairs for both in steps],
                "bytes": sum(runs[0][rank]["bytes"] for rank in (0, 1)),
                "later_hit_rates": sorted(set(runs[0][0]["hit_rates"][each:])),
                "losses": runs[0][0]["losses"],
            }
        )  # fmt: skip
    return {"rows": rows, "rounds": rounds, "machine": this_machine(), "load": os.getloadavg()[0]}


def page(found: dict[str, Any]) -> str:
    """Return the page of a measurement."""
    rows = found["rows"]
    by_name = {row["variant"]: row for row in rows}
    median = {name: statistics.median(row["seconds"]) for name, row in by_name.items()}
    cpu = {name: statistics.median(row["cpu_seconds"]) for name, row in by_name.items()}
    sizes = sorted(len(sample["input_ids"]) for sample in documents())
    apart = max(
        abs(a / b - 1)
        for a, b in zip(by_name[PACKED]["losses"], by_name[PADDED]["losses"], strict=True)
    )  # fmt: skip
    lines = ["# Packing beside padding", "", f"`python -m benchmarks packing`, {machine([found])}.", ""]
    lines += prose(f"""
        {SAMPLES} samples of random tokens, their lengths log-normal (median {MEDIAN}, σ {SIGMA}, at most {MAX_LENGTH}):
        {sizes[0]} to {sizes[-1]} tokens, {sum(sizes) / len(sizes):.0f} on the average. A Llama of 4 blocks, width 256,
        over two stages, a thread each, AQ-SGD of 4 and 8 bits with a store in memory, gloo over 127.0.0.1. A step has
        {ACCUMULATION} micro-batches of {MICRO_BATCH} samples; {EPOCHS} epochs, {found["rounds"]} rounds of all variants
        in turn. Seconds are medians over all steps but the first of each run; CPU seconds are of both processes, and
        depend less on what else runs. Load average at the end: {found["load"]:.1f} on {os.cpu_count()} cores, of which
        this benchmark takes 2: other programs ran at the same time.

        Targets: at least 1.5 times fewer seconds a step than padded, bytes within 2 %, hit rate 1.0 from the second
        epoch on. Reached: {median[PADDED] / median[PACKED]:.2f} times fewer seconds
        ({cpu[PADDED] / cpu[PACKED]:.2f} times fewer CPU seconds), bytes
        {100 * (by_name[PACKED]["bytes"] / by_name[PADDED]["bytes"] - 1):+.2f} %, hit rate
        {min(by_name[PACKED]["later_hit_rates"]):.1f}.
    """)
    lines += columns(
        {
            "batches": lambda row: row["variant"],
            "seconds of a step": lambda row: f"{median[row['variant']]:.2f}",
            "CPU seconds": lambda row: f"{cpu[row['variant']]:.2f}",
            "padded / this": lambda row: f"{median[PADDED] / median[row['variant']]:.2f}",
            "MB on the link": lambda row: f"{row['bytes'] / 1e6:.2f}",
            "hit rate, later epochs": lambda row: f"{min(row['later_hit_rates']):.1f}",
            "loss of the last step": lambda row: f"{row['losses'][-1]:.4f}",
        },
        rows,
    )
    lines += prose(f"""
        With packing each step has the samples that it has when padded; losses differ by at most {100 * apart:.2g} %,
        because 4-bit codes turn differences of float arithmetic into other roundings. `group_by_length` pads less, but
        its steps have other samples.
    """)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or with --redraw only write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--redraw", action="store_true", help="write the page from the kept measurement")
    args = parser.parse_args(argv)
    kept = Path(args.out, "packing.json")
    if not args.redraw:
        kept.write_text(json.dumps(measure(args.rounds)) + "\n")
    Path(args.out, "packing.md").write_text(page(json.loads(kept.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
