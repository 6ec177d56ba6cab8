"""Fine-tune a chat model of 4 bits with LoRA over pipeline stages. See README.md."""

from __future__ import annotations

import argparse

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # for the seconds that the imports below take

from pipecomp.recipes import chat, lora, run, text


def arguments() -> argparse.ArgumentParser:
    """The command line: what all recipes have, and what texts, chats and LoRA add."""
    parser = run.arguments("chat_qlora", "Fine-tune a chat model of 4 bits with LoRA over compressed pipeline links.")
    text.add_arguments(parser)
    chat.add_arguments(parser)
    lora.add_arguments(parser)
    parser.set_defaults(bits=4)
    return parser


if __name__ == "__main__":
    run.run(chat.fine_tune, arguments())
