"""Compare the simulation of `pipecomp plan` with measured steps, and predict larger runs.

    python -m benchmarks simulation [--measured FILE] [--out FOLDER]

FILE: what `throughput.py` keeps (its default).

1. Every line that they measured with pipecomp's engine, predicted from its own counters (seconds of forward, backward,
   encoding and decoding, bytes, micro-batches in flight) and from those of the same line without a slow link. Nothing
   is fitted.
2. GPT2-1.5B on 8 stages at the bandwidths of the AQ-SGD paper, beside what it measured; Llama-8B over 4 sites.

K stages, M micro-batches.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import constant_error, page
from benchmarks.constant_error import BASE, CONSTANT, bits_of_epochs
from benchmarks.convergence import BACK, CHANGES_BACK, quantized
from benchmarks.page import Row, prose
from benchmarks.runner import RESULTS, arguments, read_rows
from benchmarks.steps import mean_bits
from benchmarks.throughput import summaries
from pipecomp.config import Config
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.plan.prediction import StepPrediction, TrainingJob, best_in_flight, predict
from pipecomp.plan.profile import balanced, count, without_weights
from pipecomp.plan.simulation import (
    TCP_SHARE,
    LinkNetwork,
    StageCosts,
    StepSpec,
    measured_costs,
    measured_end,
    simulate_step,
    uniform,
)
from pipecomp.schedule import in_flight_counts
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.units import MAX_DELAY_S, parse_time

KEPT, KEPT_BITS = RESULTS / "throughput.jsonl", RESULTS / "constant_error.jsonl"
MBIT = (10_000, 1_000, 500, 300, 100)
METHODS = {
    "FP32": {"method": "none"},
    "BF16": {"method": "bf16"},
    "AQ-SGD fw4 bw8": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8},
    "AQ-SGD fw3 bw6": {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6},
    "AQ-SGD fw2 bw4": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4},
    **{f"AQ-SGD fw{b} bw{b}{BACK}": quantized("aqsgd", b, b) | CHANGES_BACK for b in (3, 2)},
}

# arXiv:2206.01299, Table 2 (sequences a second, by Mbit/s) and Table 3 (seconds of a micro-batch on one of 8 stages).
PAPER = {
    "FP32": dict(zip(MBIT, (3.8, 3.2, 2.7, 1.8, 0.5), strict=True)),
    "AQ-SGD fw4 bw8": dict(zip(MBIT, (4.0, 3.9, 3.9, 3.8, 3.0), strict=True)),
    "AQ-SGD fw3 bw6": dict(zip(MBIT, (4.0, 4.0, 3.9, 3.8, 3.4), strict=True)),
}
GPT2_FORWARD_S, GPT2_BACKWARD_S, GPT2_STAGES, GPT2_BATCH = 0.045, 0.135, 8, 32
GPT2_TOKENS, GPT2_HIDDEN = 1024, 1600
# What the paper's quantized runs at 10 Gbit/s (4.05 a second) take beyond that.
GPT2_UPDATE_S = GPT2_BATCH / 4.05 - (GPT2_BATCH + GPT2_STAGES - 1) * (GPT2_FORWARD_S + GPT2_BACKWARD_S)

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False}
SITES, SITE_FLOPS, SITE_DELAY_S, LLAMA_BATCH, LLAMA_TOKENS = 4, 100e12, 0.02, 32, 2048


# -- 1. what was measured


def step_of(row: Row, counters: Sequence[Row]) -> StepSpec:
    """A row's step: seconds from `counters` (of each rank, see `bench_pipeline.counted`), bytes and order from the row.

    Of replicas the slowest counts.
    """
    K, M = row["stages"], row["micro_batches"]
    stats = [{"seconds": rank["seconds"], "links": rank["links"], "steps": 1} for rank in counters]
    every = [(rank["stage"], measured_costs(s, M)) for rank, s in zip(counters, stats, strict=True)]
    stages = []
    for k in range(K):
        mine = [costs for stage, costs in every if stage == k]
        names = ("forward_s", "backward_s", "encode_s", "decode_s")
        stages.append(StageCosts(**{name: max(getattr(c, name) for c in mine) for name in names}))

    def size(k: int, way: str) -> float:
        return max(rank["links"][f"{k}->{k + 1}"][way] for rank in row["ranks"] if rank["stage"] == k) / M

    return StepSpec(
        stages=stages,
        micro_batches=M,
        together_s=measured_end(stats),
        forward_bytes=[size(k, "forward") for k in range(K - 1)],
        backward_bytes=[size(k, "backward") for k in range(K - 1)],
        in_flight=[max(rank["in_flight"] for rank in row["ranks"] if rank["stage"] == k) for k in range(K)],
    )


def network_of(row: Row) -> LinkNetwork:
    """The lab's links: nominal rates and delays, as they were set."""
    rate = math.inf if row["bits_per_s"] is None else row["bits_per_s"] * TCP_SHARE
    delay = row.get("delay")
    return uniform(row["stages"], rate, 0.0 if delay is None else parse_time("delay", delay, MAX_DELAY_S))


def compare(rows: Sequence[Row]) -> list[Row]:
    """For each measured row of pipecomp's engine: seconds measured and predicted, from its own counters ("own") and,
    on a slow link, from those without one ("free"; None where that was not measured, and for replicas, whose averages
    take longer there).
    """
    free = {(row["line"], row["stages"]): row["ranks"] for row in rows if row["bits_per_s"] is None}
    comparisons = []
    for row in rows:
        if any(rank is None for rank in row["ranks"]):
            continue  # stock DeepSpeed
        predicted: Row = {"own": simulate_step(step_of(row, row["ranks"]), network_of(row)).seconds, "free": None}
        without = free.get((row["line"], row["stages"]))
        if row["bits_per_s"] is not None and without is not None and row.get("replicas", 1) == 1:
            predicted["free"] = simulate_step(step_of(row, without), network_of(row)).seconds
        measurement = {key: row[key] for key in ("line", "bits_per_s", "seconds")}
        comparisons.append({**measurement, "bits": mean_bits(row), **predicted})
    return comparisons


def measured_page(compared: Sequence[Row]) -> list[str]:
    """The comparison as Markdown."""
    sentences = []
    for key, name in (("own", "their own counters"), ("free", "those without a slow link")):
        errors = [abs(row[key] / row["seconds"] - 1) for row in compared if row[key]]
        if errors:
            within = sum(error <= 0.1 for error in errors)
            median, most = statistics.median(errors), max(errors)
            sentences.append(
                f"From {name}: {within} of {len(errors)} within 10 %, median {median:.1%}, most {most:.1%}."
            )

    def beside(row: Row, key: str) -> str:
        return f"{row[key]:.2f} ({_off(row[key], row['seconds'])})" if row[key] else ""

    cells = {
        "line": lambda row: row["line"],
        "Mbit/s": lambda row: "unlimited" if row["bits_per_s"] is None else f"{row['bits_per_s'] / 1e6:.1f}",
        "measured s": lambda row: f"{row['seconds']:.2f}",
        **({"bits": lambda row: row["bits"]} if any(row["bits"] for row in compared) else {}),  # older rows do not say
        "from its own counters": lambda row: beside(row, "own"),
        "from those without a slow link": lambda row: beside(row, "free"),
    }
    return [*sentences, "", *page.columns(cells, compared)]


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"


# -- 2. beyond this machine


def gpt2(mbit: int, activations: dict[str, Any], *, first_visit: bool = False) -> float:
    """Sequences a second of GPT2-1.5B on 8 stages, with this project's messages and schedule."""
    config, counts = Config.from_dict({"activations": activations}), [GPT2_TOKENS]
    forward = activation_bytes(config, 0, counts, GPT2_HIDDEN, torch.float32, first_visit=first_visit)
    backward = gradient_bytes(config, 0, counts, GPT2_HIDDEN, torch.float32)
    links = GPT2_STAGES - 1
    step = StepSpec(
        stages=[StageCosts(forward_s=GPT2_FORWARD_S, backward_s=GPT2_BACKWARD_S)] * GPT2_STAGES,
        micro_batches=GPT2_BATCH,
        forward_bytes=[forward] * links,
        backward_bytes=[backward] * links,
        in_flight=in_flight_counts(1, GPT2_STAGES, GPT2_BATCH),
        together_s=GPT2_UPDATE_S,
    )
    return GPT2_BATCH / best_in_flight(step, uniform(GPT2_STAGES, mbit * 1e6 * TCP_SHARE))[1].seconds


def llama() -> dict[tuple[str, int], StepPrediction]:
    """Llama-8B over 4 sites, by method and Mbit/s."""
    from transformers import LlamaConfig

    config = LlamaConfig(**LLAMA)
    profile = count(config, LLAMA_TOKENS, torch.bfloat16).estimated(SITE_FLOPS).recomputing(torch.bfloat16)
    plan = balanced(without_weights(config, torch.bfloat16), profile, SITES)
    job = TrainingJob(profile=profile, plan=plan, samples=1, micro_batches=LLAMA_BATCH, dtype=torch.bfloat16)
    return {
        (name, mbit): predict(
            job, Config.from_dict({"activations": activations}), uniform(SITES, mbit * 1e6 * TCP_SHARE, SITE_DELAY_S)
        )
        for name, activations in METHODS.items()
        if name != "FP32"  # training in bfloat16 sends bfloat16
        for mbit in MBIT
    }


def bits_taken() -> list[tuple[float, float]]:
    """Mean bits forward and back of a constant error's values, in the first epoch and after it.

    Those of the Llama of `constant_error.py` with LoRA, over 4 stages without dropout: its packets' bytes less what
    packets of fixed bits have beside their values.
    """
    wanted = {"task": "Llama", "dropout": "without", "rate": 1.0, "stages": SITES}
    rows = [row for row in read_rows(KEPT_BITS) if all(row[key] == value for key, value in wanted.items())]
    own, base = ([bits_of_epochs(row) for row in rows if row["method"] == method] for method in (CONSTANT, BASE))

    def taken(way: int, first: bool) -> float:
        epochs = slice(1) if first else slice(1, None)
        bits, fixed = (statistics.mean(e[way] for run in runs for e in run[epochs]) for runs in (own, base))
        return bits - fixed + (constant_error.FIRST_BITS if first and way == 0 else constant_error.MOST[way])

    return [(taken(0, first), taken(1, first)) for first in (True, False)]


def following(
    job: TrainingJob,
    mbit: int,
    activations: dict[str, Any],
    bits: tuple[float, float] | None,
    *,
    first_visit: bool = False,
) -> tuple[float, float]:
    """Seconds of a step whose packets have so many bits on average, and bytes of a micro-batch, both ways.

    As `predict` says, which counts the most bits. bits: forward and back; None where these are numbers anyway.
    """
    config = Config.from_dict({"activations": activations})
    size = ([job.profile.tokens] * job.samples, job.profile.hidden, job.dtype)
    mean_f, mean_b = bits or (None, None)
    forward = activation_bytes(config, 0, *size, first_visit=first_visit, mean_bits=mean_f)
    backward = gradient_bytes(config, 0, *size, first_visit=first_visit, mean_bits=mean_b)
    links = job.plan.num_stages - 1
    step = StepSpec(
        stages=[StageCosts(forward_s=f, backward_s=b) for f, b in job.stage_seconds()],
        micro_batches=job.micro_batches,
        forward_bytes=[forward] * links,
        backward_bytes=[backward] * links,
        together_s=(2 * links + 1) * SITE_DELAY_S,  # summing the norm in a ring, and telling all the loss
    )
    network = uniform(job.plan.num_stages, mbit * 1e6 * TCP_SHARE, SITE_DELAY_S)
    return best_in_flight(step, network)[1].seconds, forward + backward


def gpt2_page() -> list[str]:
    """The first prediction as Markdown."""

    def beside(name: str, mbit: int) -> str:
        rate, paper = gpt2(mbit, METHODS[name]), PAPER.get(name, {}).get(mbit)
        return f"{rate:.2f}" if paper is None else f"{rate:.2f} (paper {paper}, {_off(rate, paper)})"

    rows = [[name, *(beside(name, mbit) for mbit in MBIT)] for name in METHODS]
    first = [f"{gpt2(mbit, METHODS['AQ-SGD fw3 bw6'], first_visit=True):.2f}" for mbit in MBIT]
    rows.append(["AQ-SGD fw3 bw6, first epoch", *first])
    return page.table(["method", *(f"{mbit:,} Mbit/s" for mbit in MBIT)], rows)


def llama_page() -> list[str]:
    """The second one."""
    predictions = llama()
    job = next(iter(predictions.values())).job
    blocks = [hi - lo for lo, hi in zip(job.plan.cuts, job.plan.cuts[1:], strict=False)]
    seconds = ", ".join(f"{forward + backward:.2f}" for forward, backward in job.profile.stage_seconds(job.plan, 1))
    sentence = f"{'/'.join(map(str, blocks))} blocks on the {SITES} sites, cut at {list(job.plan.cuts)}; a micro-batch "
    rows = []
    for name in dict.fromkeys(name for name, _ in predictions):
        row = [predictions[name, mbit] for mbit in MBIT]
        cells = [f"{p.step_s:.1f} s ({p.job.batch * LLAMA_TOKENS / p.step_s:,.0f} tokens/s)" for p in row]
        rows.append([name, *cells, f"{(row[0].forward_bytes[0] + row[0].backward_bytes[0]) / 1e6:.2f}"])
    first = [f"{predictions['AQ-SGD fw2 bw4', mbit].first_epoch_s:.1f} s" for mbit in MBIT]
    rows.append(["AQ-SGD fw2 bw4, first epoch", *first, ""])
    for bits, first_visit in zip(bits_taken(), (True, False), strict=True):
        steps = [following(job, mbit, constant_error.LINES[CONSTANT], bits, first_visit=first_visit) for mbit in MBIT]
        cells = [f"{seconds:.1f} s ({job.batch * LLAMA_TOKENS / seconds:,.0f} tokens/s)" for seconds, _ in steps]
        name = f"AQ-SGD {CONSTANT}{', first epoch' if first_visit else ''}: {bits[0]:.1f} and {bits[1]:.1f} bits"
        rows.append([name, *cells, f"{steps[0][1] / 1e6:.2f}"])
    headings = ["method", *(f"{mbit:,} Mbit/s" for mbit in MBIT), "MB a micro-batch, both ways"]
    return [f"{sentence}computes {seconds} s on them.", "", *page.table(headings, rows)]


def load(measured: Path) -> list[Row]:
    """Rows of `bench_pipeline` from what it or `throughput.py` wrote."""
    if measured.suffix == ".json":
        return list(json.loads(measured.read_text()))
    return list(summaries(list(read_rows(measured))).values())


def results(measured: Path) -> list[str]:
    """The page."""
    head = f"""
        # The simulation, and what it predicts

        `python -m benchmarks simulation{"" if measured == KEPT else f" --measured {measured.name}"}`;
        `pipecomp/plan/simulation.py` plays the engine's own order of work over given links.

        ## Against measured steps
    """
    of_gpt2 = f"""
        ## GPT2-1.5B on 8 stages: a prediction

        Sequences a second for {GPT2_BATCH} micro-batches of 1 × {GPT2_TOKENS:,} × {GPT2_HIDDEN:,} values. Compute is
        the paper's (arXiv:2206.01299, Table 3: {1e3 * GPT2_FORWARD_S:.0f} and {1e3 * GPT2_BACKWARD_S:.0f} ms a
        micro-batch); {GPT2_UPDATE_S:.2f} s for the update is fitted to its quantized runs at 10 Gbit/s. Packets,
        schedule and micro-batches in flight are this project's: TCP in Ethernet frames, one network card for each
        stage, no latency; kernels and store are taken to be hidden. In brackets what the paper's own system measured
        (Table 2), and how far this is from it. The quantized runs are near. Where FP32's packets are the limit, the
        paper's system was slower than its links allow with this schedule.
    """
    of_llama = f"""
        ## Llama-8B over {SITES} sites: a prediction

        Seconds of a step of {LLAMA_BATCH} micro-batches with {LLAMA_TOKENS:,} tokens each. Assumed, not measured:
        {SITE_FLOPS / 1e12:.0f} TFLOP/s at every site in bfloat16 with activation checkpointing,
        {1e3 * SITE_DELAY_S:.0f} ms one way between sites; kernels and store hidden, the update not counted. Operations
        are counted from the model's code. Bits that follow an error are those of the small Llama with LoRA in
        [constant_error.md](constant_error.md), over four stages without dropout: the means of its first epoch and of
        the five later ones.
    """
    compared = measured_page(compare(load(measured)))
    return [*prose(head), *compared, *prose(of_gpt2), *gpt2_page(), *prose(of_llama), *llama_page()]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, measured=(KEPT, "measured steps"))
    text = "\n".join(results(given.measured))
    print(text)
    atomic_write_text(given.out / "simulation.md", text)
