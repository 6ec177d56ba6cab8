"""A frozen lower half beside a model that trains whole, over a slow link: seconds and bytes of a step.

    python -m benchmarks frozen [--pairs 6] [--only NAME ...] [--out FOLDER] [--redraw]

Two engines with the model of `throughput.py` live in the same processes and make a step in turn, as in `paired.py`. One
trains all parameters, the other those of the last stage: no gradient crosses the link. Needs root, or the software
limit of the network lab.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import page
from benchmarks.page import Row, prose
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import reference_compute
from pipecomp.bench.training import Model, aqsgd, rate_for, untied_gpt2

MODEL, STAGES, R, MICRO_BATCHES = Model(), 2, 5.8, 8
REFERENCES, WARM_UP = 3, 5
SECTIONS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "BF16 packets": {"activations": {"method": "bf16"}},
    "AQ-SGD fw3 bw6": aqsgd(3, 6, "memory"),
}
SIDES = ("all", "upper half")


def run(name: str, compute_s: float, pairs: int) -> Row:
    """Steps of both engines in turn. compute_s: of a micro-batch on a stage, which r counts in."""
    from pipecomp.netlab import Lab

    rate = rate_for(MODEL, R, compute_s)
    with Lab(nodes=STAGES, bandwidth=f"{rate}bit") as lab:
        ranks = lab.run(one_rank, name, pairs, timeout_s=3600)
    steps = [
        [max(end) for end in zip(*both, strict=True)] for both in zip(*(r[0] for r in ranks.values()), strict=True)
    ]
    return {"name": name, "pairs": steps, "bytes": ranks[0][1], "compute_s": compute_s, "rate": rate}


def one_rank(rank: int, world: int, note: Any, name: str, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of both steps of each pair, and of each side the bytes of a step forward and back."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engines = [_engine(name, f"{folder}/{side}", frozen=side != SIDES[0]) for side in SIDES]

        def step(side: int) -> float:
            dist.barrier()
            began = time.perf_counter()
            engines[side].train_batch()
            dist.barrier()
            return time.perf_counter() - began

        for side in range(len(SIDES)):
            for _ in range(WARM_UP):
                step(side)
        before = [_sent(engine) for engine in engines]
        timed = []
        for number in range(pairs):
            seconds = {side: step(side) for side in ((0, 1) if number % 2 == 0 else (1, 0))}
            timed.append([seconds[0], seconds[1]])
        pairs_of_bytes = zip(before, map(_sent, engines), strict=True)
        sent = [[(b - a) / pairs for a, b in zip(*both, strict=True)] for both in pairs_of_bytes]
        for engine in engines:
            engine.close()
    return timed, sent


def _engine(name: str, folder: str, *, frozen: bool) -> Any:
    import torch

    import pipecomp

    model, cut = untied_gpt2(MODEL), MODEL.blocks // STAGES
    upper = tuple(f"transformer.h.{block}." for block in range(cut, MODEL.blocks))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or parameter_name.startswith((*upper, "transformer.ln_f", "lm_head")))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocabulary, (MODEL.samples, MODEL.tokens), generator=draw)
    config = {
        "train_micro_batch_size_per_gpu": MODEL.samples // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "pipecomp": {"tie": False, **SECTIONS[name]},
    }
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return pipecomp.initialize(model, cuts=[0, cut, MODEL.blocks], config=config, training_data=data)


def _sent(engine: Any) -> list[int]:
    (link,) = engine.comm_stats()["links"].values()
    return [link[way]["bytes_sent"] for way in ("forward", "backward")]


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # A frozen lower half

        `python -m benchmarks frozen`, on {page.machine(rows)}. Two engines in the same processes make a step in turn:
        one trains all {MODEL.blocks} blocks, the other the blocks of the last of {STAGES} stages. The model and the
        meaning of r = {R} are those of [throughput.md](throughput.md); a stage computes
        {1000 * rows[0]["compute_s"]:.0f} ms on a micro-batch. The first {WARM_UP} steps of each do not count. The ratio
        is the median over pairs of steps, with the quarters of pairs below and above. The link carries both directions
        at once, so that a step is shorter by the waits for gradients and by the lower stage's backward.
    """
    by_name = {row["name"]: row for row in rows}

    def ratio(name: str, number: int) -> str:
        pairs = by_name[name]["pairs"]
        return f"{statistics.quantiles([frozen / whole for whole, frozen in pairs], n=4)[number]:.3f}"

    def both(name: str) -> str:
        return " and ".join(f"{statistics.median(side):.2f}" for side in zip(*by_name[name]["pairs"], strict=True))

    def sent(name: str, side: int) -> str:
        return " + ".join(f"{size / 1e6:.2f}" for size in by_name[name]["bytes"][side])

    cells = {
        "packets": lambda name: name,
        "s a step, all and upper half": both,
        "ratio": lambda name: f"**{ratio(name, 1)}**",
        "a quarter below": lambda name: ratio(name, 0),
        "a quarter above": lambda name: ratio(name, 2),
        "MB a step forward + back, all": lambda name: sent(name, 0),
        "upper half": lambda name: sent(name, 1),
    }
    return [*prose(text), *page.columns(cells, [name for name in SECTIONS if name in by_name])]


def _line(row: Row) -> str:
    ratio = statistics.median(frozen / whole for whole, frozen in row["pairs"])
    return f"{ratio:.3f}  {' '.join(f'{frozen:.2f}/{whole:.2f}' for whole, frozen in row['pairs'])} s"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(6, "of steps"))
    runs = Runs(given, "frozen", digest([asdict(MODEL), SECTIONS, WARM_UP]), ("name",))
    cases = [(name,) for name in chosen(SECTIONS, given.only)]
    compute_s = float(runs.rows[0]["compute_s"]) if runs.rows else reference_compute(MODEL, STAGES, REFERENCES)
    runs.complete(run, cases, compute_s, given.pairs, line=_line, page=results)
