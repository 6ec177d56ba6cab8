"""Fine-tune Llama, or another causal language model, with LoRA adapters over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp import recipe, recipe_language, recipe_lora, recipe_text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what language modelling and LoRA add."""
    parser = recipe.arguments("llama_lora", "Fine-tune Llama with LoRA on text over compressed pipeline links.")
    recipe_text.add_arguments(parser)
    recipe_lora.add_arguments(parser)
    return parser


def read(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """Training and held-out text, line by line."""
    return recipe_text.training_lines(args), recipe_text.held_out_lines(args)


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    recipe_lora.check_arguments(args)
    recipe_language.fine_tune(
        args, read, documents=False, load=recipe_lora.causal_model, meanings=recipe_lora.meanings
    )


if __name__ == "__main__":
    recipe.run(main, arguments())
