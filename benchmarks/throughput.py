"""A training step over links of several rates, beside stock DeepSpeed: the lines of `pipecomp bench pipeline`.

    python benchmarks/throughput.py [--rounds 2] [--steps 3] [--settings NAME ...] [--only NAME ...] [--out FOLDER]

Needs root and a machine that does nothing else: a round takes about 70 minutes on two cores. All lines run in turn,
then again in the next round. Finished runs are kept in --out. Writes throughput.md and .png; `simulation.py` compares
its predictions with the same runs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from jobs import chosen, digest, finished, parser, work_off

from pipecomp.bench.configurations import (
    COARSE,
    EIGHT,
    LINES,
    MEMORY,
    RATES,
    REPLICAS,
    SIXTEEN,
    STOCK,
    TWICE,
    UNTHROTTLED,
    Model,
    rate_for,
)
from pipecomp.bench.pipeline import measure

MODEL = Model()
BY_NAME = {line.name: line for line in LINES}
EVERYWHERE = (STOCK, "FP32", SIXTEEN, COARSE)
SOMEWHERE = ("DirectQ fw3 bw6", EIGHT, "FP32, 1F1B's number in flight", MEMORY, "BF16", "DeepSpeed BF16")


@dataclass(frozen=True)
class Setting:
    """Which lines run at which r. delay: one way."""

    stages: int
    lines: dict[str, tuple[float, ...]]
    delay: str | None = None


SETTINGS = {
    "2 stages": Setting(2, {**dict.fromkeys(EVERYWHERE, RATES), **dict.fromkeys(SOMEWHERE, (UNTHROTTLED, 1.0, 5.8))}),
    "2 stages, 20 ms each way": Setting(2, {SIXTEEN: (5.8,), COARSE: (12.0,)}, "20ms"),
    "2 stages, 2 replicas": Setting(2, dict.fromkeys((TWICE, *REPLICAS.values()), (UNTHROTTLED, 5.8))),
    "4 stages": Setting(4, dict.fromkeys(("FP32", STOCK, SIXTEEN), (UNTHROTTLED, 1.0, 5.8))),
}


def run(setting: str, r: float, name: str, turn: int, rate: int | None, steps: int) -> dict[str, Any]:
    """One run of one line."""
    chosen = SETTINGS[setting]
    row = measure(BY_NAME[name], MODEL, chosen.stages, steps, rate, chosen.delay)
    return {"setting": setting, "r": r, "line": name, "turn": turn, "bits_per_s": rate, **row}


def link_rate(runs: list[dict[str, Any]], stages: int, r: float) -> int:
    """bit/s of a link, by what a stage computed in the first run without a limit."""
    free = (x for x in runs if (x["stages"], x["r"], x["line"], x["turn"]) == (stages, UNTHROTTLED, "FP32", 0))
    return rate_for(MODEL, r, next(free)["compute_s"])


def main() -> None:
    """See the top of the file."""
    from throughput_report import write_report

    arguments = _arguments()
    kept = arguments.out / "throughput.jsonl"
    setup = digest([asdict(MODEL), [asdict(line) for line in LINES]])
    runs = finished(kept, setup)

    def work(todo: list[tuple[Any, ...]]) -> None:
        work_off(
            run,
            todo,
            (arguments.steps,),
            runs,
            workers=1,
            kept=kept,
            setup=setup,
            line=_line,
            report=lambda found: write_report(arguments.out, found, list(SETTINGS), LINES),
        )

    done = {(x["setting"], x["r"], x["line"], x["turn"]) for x in runs}
    wanted = [
        (name, r, line, turn)
        for turn in range(arguments.rounds)
        for name in arguments.settings
        for r in sorted({r for rates in SETTINGS[name].lines.values() for r in rates})
        for line in chosen(SETTINGS[name].lines, arguments.only)
        if r in SETTINGS[name].lines[line]
    ]
    stages = sorted({SETTINGS[name].stages for name in arguments.settings})
    first = [(f"{K} stages", UNTHROTTLED, "FP32", 0) for K in stages]  # what `link_rate` looks at
    work([(*job, None) for job in first if job not in done])
    work(
        [
            (*job, None if job[1] == UNTHROTTLED else link_rate(runs, SETTINGS[job[0]].stages, job[1]))
            for job in wanted
            if job not in done and job not in first
        ]
    )


def _line(found: dict[str, Any]) -> str:
    steps = " ".join(f"{s:.2f}" for s in found["steps"])
    return f"{found['setting']:<25} r {found['r']:<4g} {found['line']:<60} {steps} s"


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, "--only")
    add = options.add_argument
    add("--rounds", type=int, default=2, help="how often each line runs (2)")
    add("--steps", type=int, default=3, help="timed steps of a run (3)")
    add("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME", help="some only")
    return options.parse_args()


if __name__ == "__main__":
    main()
