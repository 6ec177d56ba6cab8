"""Fine-tune Llama, or another causal language model, with LoRA adapters over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

from pipecomp.recipes import language, lora, run, text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what language modelling and LoRA add."""
    parser = run.arguments("llama_lora", "Fine-tune Llama with LoRA on text over compressed pipeline links.")
    text.add_arguments(parser)
    lora.add_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    lora.check_arguments(args)
    language.fine_tune(args, text.read, documents=False, load=lora.causal_model, meanings=lora.meanings)


if __name__ == "__main__":
    run.run(main, arguments())
