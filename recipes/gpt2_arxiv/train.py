"""Fine-tune GPT-2 on arXiv abstracts, or a causal language model on any documents, over pipeline stages. See README."""

from __future__ import annotations

import argparse
from functools import partial

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

from pipecomp.recipes import language, run, text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what language modelling on documents adds."""
    parser = run.arguments("gpt2_arxiv", "Fine-tune GPT-2 on abstracts over compressed pipeline links.")
    text.add_arguments(parser)
    language.add_document_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    language.fine_tune(args, partial(language.read_documents, join=True), documents=True)


if __name__ == "__main__":
    run.run(main, arguments())
