"""Chats, and prompts with completions: the samples that TRL's SFTTrainer makes, and errors for what it cannot learn."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pipecomp.data import DataOptions, TrainingData, load_data
from pipecomp.errors import ConfigError, DataError, PipecompError
from tests.data import tokenizers_for_tests as made

trl = pytest.importorskip("trl")

WORDS = "the cat sat on a mat and saw what it was user assistant system " * 50
MARKED = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'system', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if tools %}TOOLS{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TURNS = [
    {"role": "user", "content": "what\n  sat "},
    {"role": "assistant", "content": " the cat\n\n"},
    {"role": "user", "content": "where"},
    {"role": "assistant", "content": "on a mat"},
]
CHATS = {
    "messages": [{"messages": TURNS}, {"messages": [{"role": "system", "content": "sit"}, *TURNS[:2]]}],
    "prompt and completion": [{"prompt": "the cat", "completion": " sat on a"}, {"prompt": "a", "completion": " mat"}],
    "chat prompt": [{"prompt": TURNS[:3], "completion": TURNS[3:]}, {"prompt": TURNS[:1], "completion": TURNS[1:2]}],
    "text": [{"text": "the cat\n\n sat"}, {"text": "a mat "}],
}


@pytest.fixture
def tokenizer():
    own = copy.deepcopy(made.split(WORDS))
    own.chat_template = MARKED
    return own


@pytest.fixture
def load(tmp_path, tokenizer):
    def call(rows: list[dict] | str, **options) -> TrainingData:
        path = tmp_path / "a.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        return load_data(str(path), tokenizer, DataOptions(**options), cache=tmp_path / "cache")

    return call


def samples(data: TrainingData) -> list[dict[str, list[int]]]:
    return [{key: value.tolist() for key, value in data.training[i].items()} for i in range(len(data.training))]


def learned(tokenizer, data: TrainingData, index: int = 0) -> str:
    sample = data.training[index]
    return tokenizer.decode(sample["input_ids"][sample["labels"] >= 0].tolist(), clean_up_tokenization_spaces=False)


def trained_by_trl(rows: list[dict], tokenizer: Any, folder: str, **settings: Any) -> list[dict[str, list[int]]]:
    """Return the samples that SFTTrainer makes of rows."""
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(tokenizer), n_positions=64))
    arguments = trl.SFTConfig(output_dir=folder, use_cpu=True, report_to=[], bf16=False, **settings)
    own = copy.deepcopy(tokenizer)
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=own)
    return [{key: row[key] for key in ("input_ids", "labels")} for row in trainer.train_dataset]


@pytest.mark.parametrize(
    ("rows", "loss", "settings"),
    [
        ("messages", "assistant", {"assistant_only_loss": True}),
        ("messages", "all", {}),
        ("prompt and completion", None, {}),
        ("prompt and completion", "all", {"completion_only_loss": False}),
        ("chat prompt", None, {}),
        ("chat prompt", "assistant", {"assistant_only_loss": True}),
        ("chat prompt", "all", {"completion_only_loss": False}),
        ("text", None, {}),
    ],
)
@pytest.mark.parametrize("length", [1000, 30])
def test_samples_are_those_of_trl(load, tokenizer, tmp_path, rows, loss, settings, length):
    wanted = trained_by_trl(CHATS[rows], tokenizer, str(tmp_path / "trl"), max_length=length, **settings)
    assert samples(load(CHATS[rows], loss=loss, max_length=length, overflow="cut")) == wanted


def test_templates_that_trl_knows_are_marked_by_it(load, tokenizer, tmp_path):
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer.chat_template = qwen2_5_chat_template
    wanted = trained_by_trl(CHATS["messages"], tokenizer, str(tmp_path / "trl"), assistant_only_loss=True)
    data = load(CHATS["messages"])
    assert samples(data) == wanted
    assert "on a mat" in learned(tokenizer, data)
    assert tokenizer.chat_template == qwen2_5_chat_template


def test_the_assistant_is_learned_by_default(load, tokenizer):
    data = load(CHATS["messages"])
    assert learned(tokenizer, data) == " the cat\n\n<|end|>on a mat<|end|>"
    assert data.loss == "assistant"


def test_sharegpt_and_alpaca_are_the_same_chats(load):
    wanted = samples(load([{"messages": TURNS[2:]}]))
    sharegpt = [{"from": "human", "value": "where"}, {"from": "gpt", "value": "on a mat"}]
    assert samples(load([{"conversations": sharegpt, "id": 1}])) == wanted
    assert samples(load([{"conversations": TURNS[2:]}])) == wanted
    assert samples(load([{"instruction": "where", "output": "on a mat"}], loss="assistant")) == wanted
    assert samples(load([{"chat": TURNS[2:]}], columns=["chat=messages"])) == wanted
    assert samples(load([{"messages": [{**turn, "tool_calls": None} for turn in TURNS[2:]]}])) == wanted


def test_tools_and_template_settings_reach_the_template(load, tokenizer):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ([tool], json.dumps([tool])):
        data = load([{"messages": TURNS, "tools": tools}])
        assert "TOOLS" in tokenizer.decode(data.training[0]["input_ids"])
    assert "TOOLS" not in tokenizer.decode(load([{"messages": TURNS, "tools": []}]).training[0]["input_ids"])


def test_a_template_from_a_file(load, tokenizer, tmp_path):
    tokenizer.chat_template = None
    (tmp_path / "chat.jinja").write_text(MARKED)
    data = load(CHATS["messages"], chat_template=str(tmp_path / "chat.jinja"))
    assert samples(data) == samples(load(CHATS["messages"], chat_template=MARKED))
    assert tokenizer.chat_template == MARKED


def test_other_templates_make_other_tokens(load, tokenizer):
    first = load(CHATS["messages"])
    assert first.digest() != load(CHATS["messages"], chat_template=MARKED.replace("<|", "<<")).digest()


def test_an_end_of_turn_that_is_not_learned_is_said(load):
    template = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
    assert any("learn to stop" in line for line in load(CHATS["messages"], chat_template=template).describe())
    assert not any("learn to stop" in line for line in load(CHATS["messages"], chat_template=MARKED).describe())


def test_a_prompt_that_ends_within_a_token_is_said(load):
    data = load([{"prompt": "the ca", "completion": "t sat"}])
    assert any("prompt alone" in line for line in data.notes)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"messages": [*TURNS[:1], {"role": "assistant", "content": " \n"}]}, ["message 2", "empty"]),
        ({"messages": [*TURNS[:1], {"role": "assistant", "content": None}]}, ["message 2", "empty"]),
        ({"messages": TURNS[:1]}, ["no token would be learned"]),
        ({"messages": [{"role": "robot", "content": "a"}, *TURNS]}, ["robot", "template refuses", "unknown role"]),
        ({"messages": []}, ["empty list"]),
        ({"messages": "hello"}, ["str"]),
        ({"messages": ["hello"]}, ["message 1"]),
        ({"messages": [{"content": "a"}]}, ["message 1", "role"]),
        ({"messages": [{"role": "user", "content": 7}]}, ["message 1", "int"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["message 1", "image"]),
        ({"messages": TURNS, "tools": "{"}, ["tools", "JSON"]),
        ({"messages": TURNS, "tools": {"a": 1}}, ["tools", "list"]),
        ({"text": "a"}, ["text", "messages"]),
    ],
)
def test_a_wrong_chat_has_one_line_with_its_place(load, row, parts):
    with pytest.raises(DataError) as caught:
        load([{"messages": TURNS}, row])
    assert "\n" not in str(caught.value)
    for part in ("a.jsonl, line 2", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("template", "options", "key"),
    [
        (None, {}, "--chat-template"),
        (UNMARKED, {}, "--chat-template"),
        (MARKED, {"chat_template": "{% for m in messages %}"}, "--chat-template"),
        (MARKED, {"chat_template": "none.jinja"}, "--chat-template"),
        (MARKED, {"loss": "completion"}, "--loss"),
        (MARKED, {"blocks": 8}, "--blocks"),
    ],
)
def test_settings_that_a_chat_cannot_have(load, tokenizer, template, options, key):
    tokenizer.chat_template = template
    with pytest.raises(ConfigError) as caught:
        load(CHATS["messages"], **options)
    assert caught.value.key == key


def test_a_template_without_marks_takes_the_loss_of_all_tokens(load, tokenizer):
    tokenizer.chat_template = UNMARKED
    assert load(CHATS["messages"], loss="all").counts.samples == 2
    assert learned(tokenizer, load(CHATS["chat prompt"])).startswith("on a mat<|end|>")


def test_without_trl_the_extra_is_named(load, monkeypatch):
    import builtins

    known = builtins.__import__

    def without(name, *args, **more):
        if name.split(".")[0] == "trl":
            raise ImportError(name)
        return known(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PipecompError, match=r"pipecomp\[chat\]"):
        load(CHATS["messages"])
