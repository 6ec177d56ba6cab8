"""Fine-tune GPT-2 on WikiText-2, or any causal language model on any text, over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp import recipe, recipe_text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what language modelling adds."""
    parser = recipe.arguments("gpt2_wikitext2", "Fine-tune GPT-2 on text over compressed pipeline links.")
    recipe_text.add_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """One rank of the run."""
    recipe_text.check_arguments(args)
    recipe.join(args)
    with recipe.together():
        lines = recipe_text.training_lines(args)
        held_out_lines = recipe_text.held_out_lines(args)
    with recipe.together() as same:
        tokenizer = recipe_text.load_tokenizer(args.tokenizer, lines)
        model, config = recipe_text.causal_model(args, tokenizer)
        size = recipe_text.block_size(args, config)
        training = recipe_text.blocks(tokenizer, lines, size, vocabulary=config.vocab_size)
        held_out = None
        if held_out_lines is not None:
            held_out = recipe_text.blocks(tokenizer, held_out_lines, size, vocabulary=config.vocab_size)
        same("the training data or the tokenizer", training.digest())
        same("the held-out data", None if held_out is None else held_out.digest())
    recipe.train(
        args, model=model, training=training, held_out=held_out, measures=recipe_text.perplexity, tokenizer=tokenizer
    )


if __name__ == "__main__":
    recipe.run(main, arguments())
