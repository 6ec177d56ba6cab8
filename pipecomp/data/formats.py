"""Formats of training data, seen from the columns as TRL sees them, and rows as examples of a format.

    text                  {"text": str}
    prompt, completion    {"prompt": str | messages, "completion": str | messages}
    messages              {"messages": messages}, and "tools"

ShareGPT's `conversations` become messages; Alpaca's `instruction`, `input`, `output` become a prompt and a completion.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipecomp.data.sources import SourceRecord
from pipecomp.errors import ConfigError, DataError, require

TEXT, PROMPT, CHAT, ALPACA = "text", "prompt and completion", "messages", "instruction and output"
_ALLOWED = "text; prompt, completion; messages; conversations; instruction, output"
_EXTRAS = ("tools", "chat_template_kwargs", "system")
# The prompts of Stanford's Alpaca, for tokenizers without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "observation": "tool",
}


def parse_columns(columns: Sequence[str], key: str = "--column") -> dict[str, str]:
    """Parse OLD=NEW, or NAME for the text's column.

    Returns:
        New names by old ones.

    Raises:
        ConfigError: a name is missing, or two columns would get the same name.
    """
    renames: dict[str, str] = {}
    for column in columns:
        old, sign, new = column.partition("=")
        require(old and (new or not sign), key, column, "OLD=NEW, or the name of the column with the text")
        renames[old] = new or "text"
    require(len(set(renames.values())) == len(renames), key, list(columns), "a new name for one column each")
    return renames


def rename(record: SourceRecord, renames: Mapping[str, str], key: str = "--column") -> SourceRecord:
    """Rename a row's columns; a column that had the new name before is dropped."""
    if not renames:
        return record
    for old in renames:
        if old not in record.values:
            raise ConfigError(key, old, f"a column of {record.where}: {', '.join(map(str, record.values))}")
    kept = {k: v for k, v in record.values.items() if k not in renames and k not in renames.values()}
    return SourceRecord({**kept, **{new: record.values[old] for old, new in renames.items()}}, record.where)


def detect_format(columns: Iterable[str], where: str) -> str:
    """Return the format of rows with these columns.

    Args:
        columns: names after renaming.
        where: place of the first row, for the error.

    Returns:
        TEXT, PROMPT, CHAT or ALPACA.

    Raises:
        DataError: the columns are of no known format.

    Example:
        >>> detect_format(["prompt", "completion", "source"], "chat.jsonl, line 1")
        'prompt and completion'
    """
    names = set(columns)
    if names & {"messages", "conversations"}:
        return CHAT
    if {"prompt", "completion"} <= names:
        return PROMPT
    if "text" in names:
        return TEXT
    if {"instruction", "output"} <= names:
        return ALPACA
    hint = "rename columns, for example --column question=prompt --column answer=completion, or --column body"
    if {"chosen", "rejected"} <= names:
        hint = "chosen and rejected answers are for training on preferences, not for this command"
    have = ", ".join(map(str, columns))
    raise DataError(f"{where}: has the columns {have}; needed: {_ALLOWED}. Remedy: {hint}")


def unused_columns(columns: Iterable[str], kind: str) -> list[str]:
    """Return the columns that training does not read."""
    used = {
        TEXT: {"text"},
        PROMPT: {"prompt", "completion", *_EXTRAS},
        CHAT: {"messages", "conversations", *_EXTRAS},
        ALPACA: {"instruction", "input", "output", *_EXTRAS},
    }[kind]
    return sorted(map(str, set(columns) - used))


def example_of(record: SourceRecord, kind: str, *, conversational: bool) -> dict[str, Any]:
    """Convert a row to an example in TRL's form.

    Args:
        record: a record with renamed columns.
        kind: from `detect_format`.
        conversational: the tokenizer has a chat template, so that Alpaca's rows become messages.

    Returns:
        {"text": …}, {"prompt": …, "completion": …} or {"messages": …}, with "tools" and "chat_template_kwargs" where
        the row has them.

    Raises:
        DataError: a column is missing or of the wrong type; the error names file and line.
    """
    values, where = record
    if kind == TEXT:
        return {"text": _text(values, "text", where)}
    if kind == ALPACA:
        return _alpaca(record, conversational)
    example: dict[str, Any] = {}
    if kind == CHAT:
        key = "messages" if values.get("messages") is not None else "conversations"
        example["messages"] = _messages(values, key, where)
    else:
        chat = not isinstance(values.get("prompt"), str)
        for key in ("prompt", "completion"):
            example[key] = _messages(values, key, where) if chat else _text(values, key, where)
        if not chat and not example["completion"].strip():
            raise DataError(f"{where}: its completion is empty: there is nothing to learn from it")
    if isinstance(system := values.get("system"), str) and system and not isinstance(example.get("prompt"), str):
        key = next(iter(example))
        if example[key][0]["role"] != "system":
            example[key] = [{"role": "system", "content": system}, *example[key]]
    tools = _decoded(values, "tools", list, where)
    settings = _decoded(values, "chat_template_kwargs", dict, where)
    return {
        **example,
        **({"tools": tools} if tools else {}),
        **({"chat_template_kwargs": settings} if settings else {}),
    }


def _text(values: Mapping[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if isinstance(value, str):
        return value
    has = f"a value of type {type(value).__name__} under {key!r}" if key in values else _columns_of(values)
    raise DataError(f"{where}: has {has}; needed: an object with a text under {key!r}")


def _columns_of(values: Mapping[str, Any]) -> str:
    return f"the keys {', '.join(map(str, values))}" if values else "no keys"


def _messages(values: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """Check and copy messages, in ChatML's form, without keys whose value is None."""
    value = values.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):  # CSV holds JSON
        value = _decoded(values, key, list, where)
    needed = f"needed under {key!r}: messages with role and content"
    if not isinstance(value, list) or not value:
        has = "an empty list" if value == [] else f"a value of type {type(value).__name__}"
        raise DataError(f"{where}: has {has if key in values else _columns_of(values)}; {needed}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {number} is a {type(message).__name__}; {needed}")
        given = {("role" if k == "from" else "content" if k == "value" else k): v for k, v in message.items()}
        role = given.get("role")
        if not isinstance(role, str):
            raise DataError(f"{where}: message {number} has {_columns_of(message)}; {needed}")
        if "from" in message:
            role = _SHAREGPT.get(role, role)
        made = {k: _without_none(v) for k, v in given.items() if v is not None}
        made["role"] = role
        content = made.setdefault("content", "")
        if isinstance(content, list):
            parts = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
            if set(parts) - {"text"}:
                raise DataError(f"{where}: message {number} has parts of type {', '.join(map(str, parts))}; only text")
        elif not isinstance(content, str):
            raise DataError(f"{where}: message {number} has a content of type {type(content).__name__}; {needed}")
        if role == "assistant" and not made.get("tool_calls") and not _has_text(content):
            raise DataError(f"{where}: message {number}, of the assistant, is empty: there is nothing to learn from it")
        messages.append(made)
    return messages


def _has_text(content: Any) -> bool:
    texts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content]
    return any(text.strip() for text in texts)


def _without_none(value: Any) -> Any:
    """Drop keys whose value is None, which Arrow adds where rows have different keys."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _decoded(values: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return a list or mapping that may be given as JSON text, without None."""
    value = values.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: {key!r} is not JSON: {error}") from error
    if value and not isinstance(value, kind):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}; needed: a {kind.__name__}")
    return _without_none(value) if value else None


def _alpaca(record: SourceRecord, conversational: bool) -> dict[str, Any]:
    values, where = record
    instruction, output = _text(values, "instruction", where), _text(values, "output", where)
    given = values.get("input") or ""
    if not isinstance(given, str):
        raise DataError(f"{where}: has a value of type {type(given).__name__} under 'input'; needed: a text")
    if not output.strip():
        raise DataError(f"{where}: its output is empty: there is nothing to learn from it")
    if conversational:
        user = f"{instruction}\n\n{given}" if given else instruction
        system = values.get("system")
        head = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        return {
            "prompt": [*head, {"role": "user", "content": user}],
            "completion": [{"role": "assistant", "content": output}],
        }
    context = ", paired with an input that provides further context" if given else ""
    prompt = _ALPACA.format(context, instruction, f"### Input:\n{given}\n\n" if given else "")
    return {"prompt": prompt, "completion": output}
