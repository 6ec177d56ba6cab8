"""The page of constant error: what stands beside what, and bits of each epoch."""

from argparse import Namespace

from benchmarks.constant_error import BASE, CONSTANT, EXACT, PLANNED, SLOWEST, bits_of_epochs, cases, line, results

RAW = 12_000_000  # of three epochs


def row(method: str, loss: float, bytes_: list[tuple[int, int]], **more: object) -> dict[str, object]:
    keys = {"task": "GPT-2", "dropout": "without", "rate": 1.0, "stages": 4, "seed": 0, **more}
    judged = {"train_loss": loss, "eval_loss": loss + 1, "cpu_seconds": 1.0}
    return {**keys, "method": method, **judged, "bytes": bytes_, "raw_bytes": [RAW, RAW]}


ROWS = [
    row(EXACT, 2.0, [(4_000_000, 4_000_000), (8_000_000, 8_000_000), (RAW, RAW)]),
    row(BASE, 2.1, [(1_000_000, 750_000), (1_400_000, 1_500_000), (1_800_000, 2_250_000)]),
    row(CONSTANT, 2.2, [(625_000, 500_000), (1_000_000, 875_000), (1_250_000, 1_000_000)]),
    row(CONSTANT, 2.9, [(625_000, 500_000), (1_000_000, 875_000), (1_250_000, 1_000_000)], rate=3.0),
]


def test_bits_of_each_epoch() -> None:
    assert bits_of_epochs(ROWS[2]) == [(5.0, 4.0), (3.0, 3.0), (2.0, 1.0)]


def test_the_page_compares_runs_of_one_setting() -> None:
    text = "\n".join(results(ROWS))
    line = next(line for line in text.splitlines() if line.startswith(f"| × 1 | without | 4 | {CONSTANT}"))
    assert "| +10.00 % | +4.76 % | 0.556 | 3.2000 | 5.0, 3.0, 2.0 | 4.0, 3.0, 1.0 |" in line
    assert "Over 1 pairs" in text, "the run with another learning rate has none to stand beside"


def test_every_line_is_run_where_the_page_needs_it() -> None:
    given = Namespace(seeds=1, tasks=["GPT-2"], rates=[1.0, 3.0], dropout=["without"], stages=[4, 2], only=[])
    found = cases(given)
    assert len(found) == len(set(found))
    assert sum(case[4] == EXACT for case in found) == 2, "FP32 once for each learning rate"
    assert {case[4] for case in found if case[2] == 3.0} == {EXACT, BASE, CONSTANT}


def test_a_plan_follows_dropout() -> None:
    """As `pipecomp plan` does: three bits or more of a language model's changes, four of a classifier's."""
    most = {"GPT-2": (2, 3), "QNLI": (2, 4), "Llama": (2, 2)}
    for task, bits in most.items():
        for dropout, fewest in zip(("without", "with"), bits, strict=True):
            assert line(SLOWEST, task, dropout)["forward_bits"] == fewest
            assert line(SLOWEST, task, dropout)["backward_bits"] == {"error": 0.1, "min": 2, "max": 4}
            assert line(PLANNED, task, dropout)["forward_bits"] == {"error": 0.025, "min": fewest, "max": 8}


def test_nothing_to_compare() -> None:
    assert "pairs" not in "\n".join(results(ROWS[:1]))
