"""Fine-tune GPT-2 on WikiText-2, or any causal language model on any text, over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

from pipecomp.recipes import language, run, text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what language modelling adds."""
    parser = run.arguments("gpt2_wikitext2", "Fine-tune GPT-2 on text over compressed pipeline links.")
    text.add_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    language.fine_tune(args, text.read, documents=False)


if __name__ == "__main__":
    run.run(main, arguments())
