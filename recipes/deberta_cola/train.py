"""Fine-tune DeBERTa on CoLA, or another encoder on any sentences, over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

from pipecomp.recipes import classify, encoder, run

TASK = classify.COLA


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what classification adds."""
    parser = run.arguments("deberta_cola", "Classify sentences over compressed pipeline links.")
    classify.add_arguments(parser, TASK)
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    encoder.fine_tune(args, TASK)


if __name__ == "__main__":
    run.run(main, arguments())
