"""Both orders of ranks on two machines with two processes each: seconds of a step, and what the plan chooses.

    python -m benchmarks layouts [--pairs 6] [--only NAME ...] [--out FOLDER] [--redraw]

Two machines are joined by a line of 1/50 of the rate within them. A plan of the measured ranks chooses a layout; then
engines of both layouts, uncompressed and with the plan's settings, live in the same processes and make a step in turn,
as in `paired.py`. Needs root, for the network lab.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from pipecomp.rank_layout import LAYOUTS, RankLayout

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
STAGES, MACHINES, PROCESSES = 2, 2, 2
BATCH, TOKENS, RANK = 16, 64, 4
INNER_MBIT, RATIO = 1000, 50
WEIGHTS: dict[str, int | None] = {"LoRA": RANK, "all weights": None}
SETTINGS = ("uncompressed", "as planned")
WARM_UP = 3
NEARLY = 1.02  # a plan keeps the usual layout unless the other one is faster by this


def run(name: str, pairs: int) -> Row:
    """Plan and train in a lab. name: of WEIGHTS."""
    from pipecomp.netlab import Lab

    with Lab(nodes=MACHINES, bandwidth=f"{INNER_MBIT // RATIO}mbit") as lab, tempfile.TemporaryDirectory() as folder:
        limit = f"tc qdisc add dev lo root tbf rate {INNER_MBIT}mbit burst 256kb latency 100ms"
        for node in range(MACHINES):
            subprocess.run(lab.network.wrap(node, limit.split()), check=True)
        ranks = lab.run(one_rank, name, folder, pairs, procs_per_node=PROCESSES, timeout_s=3600)
    plans = ranks[0][0]
    steps = {
        key: [max(row) for row in zip(*(found[1][key] for found in ranks.values()), strict=True)] for key in ranks[0][1]
    }
    return {"name": name, "plans": plans, "steps": steps}


def one_rank(rank: int, world: int, note: Any, name: str, folder: str, pairs: int) -> tuple[Any, dict[str, Any]]:
    """The plans, and the seconds of steps by settings and layout."""
    import torch
    import torch.distributed as dist

    from pipecomp.distributed.rendezvous import start_processes

    torch.set_num_threads(1)
    start_processes()
    plans = _plans(name, f"{folder}/plan{rank}")
    keys = [(settings, layout) for settings in SETTINGS for layout in LAYOUTS]
    engines = {key: _engine(name, *key, plans) for key in keys}

    def step(key: tuple[str, str]) -> float:
        dist.barrier()
        began = time.perf_counter()
        engines[key].train_batch()
        dist.barrier()
        return time.perf_counter() - began

    for key in keys:
        for _ in range(WARM_UP):
            step(key)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    for number in range(pairs):
        for key in keys if number % 2 == 0 else keys[::-1]:
            seconds[key].append(step(key))
    for engine in engines.values():
        engine.close()
    return plans, {", ".join(key): found for key, found in seconds.items()}


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**MODEL, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)


def _plans(name: str, folder: str) -> Any:
    """Predicted seconds and configurations by settings and layout, and the layout that a plan chooses; of all ranks."""
    import math
    from dataclasses import replace

    from pipecomp.distributed.collectives import broadcast
    from pipecomp.netlab.software import throttle_to
    from pipecomp.plan import report
    from pipecomp.plan.command import model_size, plan, resolve_request
    from pipecomp.plan.measure import survey_ranks
    from pipecomp.plan.options import AUTO, PlanOptions

    model = Path(folder)
    _config().save_pretrained(model)
    options = PlanOptions(
        model=str(model), stages=STAGES, batch=BATCH, tokens=TOKENS, lora=WEIGHTS[name], measure=True, store=model
    )
    survey = survey_ranks(*model_size(options), 1, options.store, stages=STAGES, pacer_to=throttle_to)
    if survey is None:
        return broadcast(None)
    assert survey.lines is not None
    lines = survey.lines
    request = resolve_request(options, {"measured": ((math.inf,), 0.0)}, MACHINES * PROCESSES)
    request = replace(request, slowdowns=survey.slowdowns, shared_cores=survey.shared_cores, lines=(lines,))

    def planned(**more: Any) -> Any:
        wanted = replace(request, options=replace(options, **more))
        return plan(wanted, survey.profile, survey.speeds, lambda ranks, position: lines.network(ranks), 1)

    found: dict[str, Any] = {"inner": lines.inner.bits_per_s, "between": lines.out[0].bits_per_s}
    for layout in LAYOUTS:
        plain, best = planned(layout=layout, gradients="none").choice, planned(layout=layout).choice
        alone = report.configuration(replace(plain, prediction=plain.plain))
        found[f"{SETTINGS[0]}, {layout}"] = [plain.plain.step_s, alone]
        found[f"{SETTINGS[1]}, {layout}"] = [best.taken.step_s, report.configuration(best)]
    chosen_plan = planned(layout=AUTO)
    found["chosen"] = chosen_plan.choice.prediction.job.layout
    found["why"] = report.describe_layouts(chosen_plan)
    return broadcast(found)


def _engine(name: str, settings: str, layout: str, plans: Any) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    import pipecomp

    torch.manual_seed(0)
    model = LlamaForCausalLM(_config())
    if WEIGHTS[name] is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=WEIGHTS[name], target_modules="all-linear"))
    config = dict(plans[f"{settings}, {layout}"][1])
    section = dict(config["pipecomp"])
    if section.get("activations", {}).get("method") == "aqsgd":
        section["store"] = {"backend": "memory", **section.get("store", {})}
    config |= {"pipecomp": section, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "steps_per_print": 10**9}
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL["vocab_size"], (BATCH, TOKENS), generator=draw)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    engine = pipecomp.initialize(model, num_stages=STAGES, config=config, training_data=data)
    place = engine.stage_id, engine.grid.data_parallel_id
    assert place == RankLayout(STAGES, 2, layout).place(engine.global_rank)
    return engine


def _choice(row: Row, settings: str) -> str:
    """The layout that a plan takes with these settings."""
    if settings == SETTINGS[1]:
        return str(row["plans"]["chosen"])
    usual, other = (row["plans"][f"{settings}, {layout}"][0] for layout in LAYOUTS)
    return LAYOUTS[0] if usual <= NEARLY * other else LAYOUTS[1]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    rates = [f"{row['plans']['between'] / 1e6:.1f} and {row['plans']['inner'] / 1e6:.0f}" for row in rows]
    steps = len(next(iter(rows[0]["steps"].values())))
    text = f"""
        # What crosses the line between machines

        `python -m benchmarks layouts`, on {page.machine(rows)}, which other programs used at the same time.
        {MACHINES} machines with {PROCESSES} processes each train {STAGES} stages × 2 replicas of a Llama with
        {MODEL["hidden_size"]} channels and {MODEL["num_hidden_layers"]} blocks on {BATCH} samples of {TOKENS} tokens a
        step: LoRA of rank {RANK} in all linear layers, or all weights. The line between machines has
        {INNER_MBIT // RATIO} Mbit/s, that within one {INNER_MBIT}; the plans measured {"; ".join(rates)} Mbit/s. With
        `stages-across` activations cross it, with `replicas-across` gradients. "As planned": with the bits and the
        gradient method that the plan takes for each layout.

        Seconds of a step: predicted, and the median of {steps} measured ones. Engines of both layouts and settings make
        a step in turn; the first {WARM_UP} do not count. The ratio is the median over pairs.
    """
    cases = [(row, settings) for row in rows for settings in SETTINGS]

    def predicted(case: tuple[Row, str]) -> str:
        return " and ".join(f"{case[0]['plans'][f'{case[1]}, {layout}'][0]:.2f}" for layout in LAYOUTS)

    def seconds(case: tuple[Row, str]) -> list[list[float]]:
        return [case[0]["steps"][f"{case[1]}, {layout}"] for layout in LAYOUTS]

    def ratio(case: tuple[Row, str]) -> float:
        return statistics.median(other / usual for usual, other in zip(*seconds(case), strict=True))

    cells = {
        "trained": lambda case: case[0]["name"],
        "settings": lambda case: case[1],
        "predicted s, stages-across and replicas-across": predicted,
        "measured s": lambda case: " and ".join(f"{statistics.median(found):.2f}" for found in seconds(case)),
        "replicas-across / stages-across": lambda case: f"**{ratio(case):.2f}**",
        "the plan takes": lambda case: _choice(*case),
        "faster": lambda case: LAYOUTS[ratio(case) < 1],
    }
    return [*prose(text), *page.columns(cells, cases)]


def _line(row: Row) -> str:
    medians = {key: f"{statistics.median(found):.2f}" for key, found in row["steps"].items()}
    return f"takes {row['plans']['chosen']}; {medians} s"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(6, "of steps"))
    settings = [MODEL, STAGES, MACHINES, PROCESSES, BATCH, TOKENS, WEIGHTS, INNER_MBIT, RATIO, WARM_UP]
    runs = Runs(given, "layouts", digest(settings), ("name",))
    cases = [(name,) for name in chosen(WEIGHTS, given.only)]
    runs.complete(run, cases, given.pairs, line=_line, page=results)
