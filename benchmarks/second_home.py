"""Price of the second home: steps while a record is sent beside steps without.

    python -m benchmarks second_home [--pairs 6] [--only NAME ...] [--out FOLDER] [--redraw]

Two stages train the model of `throughput.py` over a slow link. A record is taken after a step; the steps until it has
arrived are timed, and then steps without. Their ratio, and the share of steps in which a record is sent, give the
price. Needs root and a machine that does nothing else.
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
from benchmarks.paired import BY_NAME, MODEL, REFERENCES, STAGES
from benchmarks.runner import Runs, arguments, chosen, digest
from benchmarks.steps import SIXTEEN, reference_compute
from pipecomp.bench.training import rate_for, untied_gpt2

R = 5.8
CASES: dict[str, int | None] = {"LoRA of rank 16": 16, "all weights": None}  # ranks of adapters
WARM_UP = 10  # steps: samples go uncompressed, the number in flight is found
MOST_WITHOUT = 20  # steps of a pair without a record; with all weights one is sent during many more
NEVER = 10**9


def run(name: str, compute_s: float, pairs: int) -> Row:
    """One case: seconds of steps with and without, by pair, and the schedule of records."""
    from pipecomp.netlab import Lab

    rate = rate_for(MODEL, R, compute_s)
    with Lab(nodes=STAGES, bandwidth=f"{rate}bit") as lab, tempfile.TemporaryDirectory() as folder:
        ranks = lab.run(one_rank, name, rate, pairs, folder, timeout_s=3600)
    return {"name": name, "rate": rate, "compute_s": compute_s, **ranks[0]}


def one_rank(rank: int, world: int, note: Any, name: str, rate: int, pairs: int, folder: str) -> Row:
    """Time the steps of one rank; steps are as long as those of the slowest."""
    import torch
    import torch.distributed as dist

    from pipecomp.elastic.schedule import RecordSchedule, record_bytes

    torch.set_num_threads(1)
    engine = _engine(CASES[name], folder)
    home = engine.second_home

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        engine.train_batch()
        dist.barrier()
        return time.perf_counter() - began

    def sending() -> bool:
        flag = torch.tensor(float(not home.wait(0)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    for _ in range(WARM_UP):
        step()
    home.wait()
    pairs_of_steps, lengths = [], []
    for _ in range(pairs):
        home.due = 0  # the record is taken at the end of a step, whose time counts
        with_record = [step()]
        home.due = NEVER
        while sending():
            with_record.append(step())
        lengths.append(len(with_record))
        without = [step() for _ in with_record[:MOST_WITHOUT]]
        pairs_of_steps.append([statistics.fmean(with_record), statistics.fmean(without)])
    home.due = 0
    engine.train_batch()  # agrees on the last schedule
    step_s = statistics.median(without for _, without in pairs_of_steps)
    trained = sum(p.numel() for p in engine.stage.parameters() if p.requires_grad)
    stats, share = home.stats(), engine.pipecomp_config.elastic.line_share
    out = {
        "pairs": pairs_of_steps,
        "sending_steps": lengths,
        "bytes": home.schedule.size_bytes,
        "every_steps": home.schedule.every_steps,
        "arrives_after": home.schedule.sending_steps,
        "lost_steps": home.schedule.lost_steps,
        "ratio": stats["bytes"] / stats["raw_bytes"],
        "planned": asdict(RecordSchedule.predict(record_bytes(trained), rate, step_s, share)),
    }
    home.wait()
    engine.close()
    return out


def _engine(lora: int | None, folder: str) -> Any:
    """Make the engine of the line `SIXTEEN`, whole or with adapters, whose states go to the other rank."""
    import torch

    import pipecomp

    model: Any = untied_gpt2(MODEL)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, target_modules=["c_attn", "c_proj", "c_fc"]))
    line = BY_NAME[SIXTEEN]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocabulary, (MODEL.samples, MODEL.tokens), generator=draw)
    elastic = {"second_home": "next", "path": f"{folder}/records"}
    section = {**line.section, "tie": False, "elastic": elastic}
    if "store" in section:
        section["store"] = {"backend": "memory"}
    config = {
        "train_micro_batch_size_per_gpu": MODEL.samples // line.micro_batches,
        "gradient_accumulation_steps": line.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        "pipecomp": section,
    }
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return pipecomp.initialize(model, num_stages=STAGES, config=config, training_data=data)


def _ratios(row: Row) -> list[float]:
    return [with_record / without for with_record, without in row["pairs"]]


def _ratio(row: Row) -> float:
    """The mean step while a record is sent over the mean step without."""
    with_record, without = (statistics.fmean(side) for side in zip(*row["pairs"], strict=True))
    return with_record / without


def price(row: Row) -> float:
    """Return the mean step with records over that without, as records are sent in some of the steps."""
    return 1 + (_ratio(row) - 1) * min(1.0, statistics.fmean(row["sending_steps"]) / row["every_steps"])


def results(rows: list[Row]) -> list[str]:
    """The page."""
    text = f"""
        # Price of the second home

        `python -m benchmarks second_home`, {STAGES} stages on {page.machine(rows)}, each rank in a network namespace of
        its own, at {rows[0]["rate"] / 1e6:.1f} Mbit/s both ways (r = {R:g}). The model and its packets are those of
        [throughput.md](throughput.md), {SIXTEEN}. A record is taken after a step and sent at lower precedence than
        packets, in slices that take at most a fifth of the line; the steps until it has arrived are compared with as
        many without, {MOST_WITHOUT} at most. The price is that of all steps, as a record is sent in some of them only:
        so often that it takes 5 % of the line. Planned: by `pipecomp plan`, from the rate and the step without.
    """
    cells = {
        "trained": lambda row: row["name"],
        "record": lambda row: f"{row['bytes'] / 1e6:.2f} MB",
        "of its values": lambda row: f"{row['ratio']:.2f}",
        "every": lambda row: f"{row['every_steps']} steps",
        "planned": lambda row: f"{row['planned']['every_steps']} steps",
        "at most lost": lambda row: f"{row['lost_steps']} steps",
        "step while one is sent, over one without": lambda row: f"{_ratio(row):.3f}",
        "of pairs: least, most": lambda row: f"{min(_ratios(row)):.3f}, {max(_ratios(row)):.3f}",
        "price": lambda row: f"**{price(row):.3f}**",
    }
    return [*prose(text), *page.columns(cells, rows)]


def _line(row: Row) -> str:
    schedule = f"{row['bytes'] / 1e6:.2f} MB every {row['every_steps']} steps"
    return f"{_ratio(row):.3f} while sending, price {price(row):.3f}, {schedule}"


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    given = arguments(argv, __doc__, "only", pairs=(6, "of times with and without a record"))
    setup = digest([asdict(MODEL), asdict(BY_NAME[SIXTEEN]), CASES, STAGES, R, WARM_UP, MOST_WITHOUT])
    runs = Runs(given, "second_home", setup, ("name",))
    cases = [(name,) for name in chosen(CASES, given.only)]
    compute_s = 0.0
    if runs.missing(cases):
        compute_s = runs.rows[0]["compute_s"] if runs.rows else reference_compute(MODEL, STAGES, REFERENCES)
    runs.complete(run, cases, compute_s, given.pairs, line=_line, page=results)
