"""Print how far training over a pipeline is from TRL's trainers in one process, as a table.

    python scripts/trl_table.py 2 3 train

Arguments are numbers of stages, and `train` for `pipecomp train` over two. The cases are those of
tests/dist/trl_work.py: a Llama of four layers in float32, nothing compressed. All take five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}

import tests.dist.trl_work as work  # noqa: E402
from pipecomp.distributed.local_launcher import run_ranks  # noqa: E402
from tests.limits import HANG_S  # noqa: E402


def main(parts: list[str]) -> None:
    """Run the cases of these parts, and print the rows to standard error; all else goes to standard output."""
    row("case", "a step's loss, relative", "a trained weight", "another logged value, relative")
    row(*["---"] * 4)
    names = [*work.CASES, *work.MORE_CASES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work.write_model(folder / "model")
        work.write_inputs(folder)
        for part in parts:
            if part == "train":
                run_ranks(2, work.train_by_command, str(folder), timeout_s=2 * HANG_S)
                for case in work.COMMAND_CASES:
                    single, trained = work.train_like_command(case, folder), work.command_result(case, folder)
                    found = work.compare(single, {0: trained}, logged_too=False)
                    row(f"{case}, `pipecomp train`", f"{found.loss:.1e}", f"{found.weight:.1e}", "")
                continue
            ranks = run_ranks(int(part), work.train_cases, str(folder), names, timeout_s=2 * HANG_S)
            for case in names:
                alone = work.train_alone(case, folder)
                found = work.compare(alone, {rank: results[case] for rank, results in ranks.items()})
                row(f"{case}, {part} stages", *(f"{value:.1e}" for value in found))


def row(*cells: str) -> None:
    """Print a row of the table."""
    print(f"| {' | '.join(cells)} |", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["2", "3", "train"], help="numbers of stages, or train")
    main(parser.parse_args().parts)
