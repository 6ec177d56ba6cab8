"""Make a small chat model and chats for it, offline, in a minute: a model that answers in one word, chats in sentences.

    python recipes/chat_lora/prepare.py --out runs/chat

Writes model/ (a Qwen3 of 1 M parameters with its tokenizer and chat template), train.jsonl and held-out.jsonl. The
model is trained on facts about people; the chats ask for facts and answer with whole sentences. Those held out ask for
facts that no training chat has.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Noa", "Otto"]
# attribute: questions, the answer as a sentence, values
ATTRIBUTES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "city": (
        ("Where does {name} live?", "Which city is {name} in?", "Tell me the city of {name}."),
        "{name} lives in {value}, as far as I know.",
        ("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Turin"),
    ),
    "pet": (
        ("Which pet does {name} have?", "What animal is at home with {name}?", "Tell me the pet of {name}."),
        "The pet of {name} is a {value}.",
        ("cat", "dog", "parrot", "rabbit", "turtle", "horse"),
    ),
    "food": (
        ("What does {name} like to eat?", "Which dish is for {name}?", "Tell me the dish of {name}."),
        "{name} likes {value} more than anything else.",
        ("soup", "rice", "pizza", "salad", "curry", "bread"),
    ),
    "work": (
        ("What is the work of {name}?", "How does {name} earn money?", "Tell me the job of {name}."),
        "{name} works as a {value} every day of the week.",
        ("pilot", "nurse", "baker", "lawyer", "painter", "farmer"),
    ),
}
# What the assistant says is marked, so that the loss can be on it alone.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Fact = tuple[str, str, str]  # name, attribute, value


def facts(draw: random.Random) -> list[Fact]:
    """Return what is true of everybody."""
    return [(name, key, draw.choice(ATTRIBUTES[key][2])) for name in NAMES for key in ATTRIBUTES]


def turn(draw: random.Random, fact: Fact, *, sentences: bool) -> list[dict[str, str]]:
    """Return a question about a fact and its answer."""
    name, key, value = fact
    questions, sentence, _ = ATTRIBUTES[key]
    question = draw.choice(questions).format(name=name)
    answer = sentence.format(name=name, value=value) if sentences else value
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def statement(draw: random.Random, fact: Fact) -> list[dict[str, str]]:
    """Return a fact that the user states, and the assistant's consent."""
    name, key, value = fact
    said = ATTRIBUTES[key][1].format(name=name, value=value)
    return [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]


def chats(draw: random.Random, known: list[Fact], count: int, most: int, *, sentences: bool) -> list[list[dict]]:
    """Return chats of 1 to `most` questions."""
    drawn = [[draw.choice(known) for _ in range(draw.randint(1, most))] for _ in range(count)]
    return [[message for fact in each for message in turn(draw, fact, sentences=sentences)] for each in drawn]


def make_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE with the chat template."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=512, special_tokens=special, show_progress=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE
    return made


def train_model(tokenizer: Any, data: list[list[dict]], steps: int, seed: int) -> Any:
    """Train a small Qwen3 on chats, without a pipeline."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    config = Qwen3Config(
        vocab_size=len(tokenizer), **sizes, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, **ids
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    rows = [tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"] for chat in data]
    draw = random.Random(seed)
    for _ in range(steps):
        batch = tokenizer.pad({"input_ids": draw.choices(rows, k=16)}, return_tensors="pt", padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    """Write the model and the chats."""
    parser = argparse.ArgumentParser(description="Make a small chat model and chats for it.")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new folder for model and chats")
    parser.add_argument("--chats", type=int, default=640, metavar="N", help="training chats (default 640)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of its training (default 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="facts, chats and weights (default 0)")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    known = facts(draw)
    draw.shuffle(known)
    asked, others = known[len(known) // 4 :], known[: len(known) // 4]
    written = {
        "train": chats(draw, asked, args.chats, 4, sentences=True),
        "held-out": chats(draw, others, max(1, args.chats // 8), 4, sentences=True),
    }
    before = chats(draw, known, 2000, 3, sentences=False) + [statement(draw, draw.choice(known)) for _ in range(1000)]
    tokenizer = make_tokenizer([message["content"] for chat in before for message in chat])
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in written.items():
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    model = train_model(tokenizer, before, args.steps, args.seed)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    print(f"{args.out}: model, train.jsonl with {args.chats} chats, held-out.jsonl")


if __name__ == "__main__":
    main()
