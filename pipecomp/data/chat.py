"""Tokens and loss masks of chats and of prompts with completions, as TRL's SFTTrainer makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipecomp.data.formats import ALPACA, CHAT, PROMPT, TEXT
from pipecomp.data.sources import first_line, read_text
from pipecomp.errors import ConfigError, DataError, require

ALL, COMPLETION, ASSISTANT = "all", "completion", "assistant"
LOSSES = (ASSISTANT, COMPLETION, ALL)


def choose_loss(loss: str | None, kind: str, *, conversational: bool, key: str = "--loss") -> str:
    """Return what the loss counts: the given choice, or the format's default.

    Args:
        loss: "all", "completion", "assistant", or None: the assistant's tokens of messages, the completion of
            prompts, all tokens of text.
        kind: the format, from `detect_format`.
        conversational: prompts and completions are messages.
        key: the setting's name, for errors.

    Raises:
        ConfigError: the choice does not apply to the format.
    """
    if loss is None:
        return {TEXT: ALL, CHAT: ASSISTANT}.get(kind, COMPLETION)
    require(loss in LOSSES, key, loss, ", ".join(LOSSES))
    if kind == TEXT:
        require(loss == ALL, key, loss, ALL, "Text has neither prompts nor an assistant's turns")
    if kind == CHAT:
        hint = "Messages have no column 'completion': the assistant's turns are what is learned"
        require(loss != COMPLETION, key, loss, f"{ASSISTANT}, {ALL}", hint)
    if kind in (PROMPT, ALPACA) and not conversational:
        require(loss != ASSISTANT, key, loss, f"{COMPLETION}, {ALL}", "Prompts without roles have no assistant")
    return loss


def set_chat_template(tokenizer: Any, template: str | None, key: str = "--chat-template") -> None:
    """Give the tokenizer a chat template: a Jinja file, or the template itself; None leaves the tokenizer's own.

    Raises:
        ConfigError: there is no such file, or it is no Jinja template.
    """
    if template is None:
        return
    text = template
    if "{%" not in template and "{{" not in template:
        require(Path(template).is_file(), key, template, "a file with a Jinja template, or the template itself")
        text = read_text(template)
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension

    class Generation(Extension):
        """Parses {% generation %} blocks, which transformers adds to Jinja."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            from jinja2 import nodes

            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    try:
        Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(key, template, f"a Jinja template (line {error.lineno}: {error.message})") from error
    tokenizer.chat_template = text


class ExampleTokenizer:
    """Converts examples with prompts or messages to tokens and a mask of what is learned.

    Attributes:
        loss: "all", "completion" or "assistant".
        warnings: sentences for the reader.
        left_out: samples whose prompt alone has other last tokens than before the completion.
        template: TRL's template with marks in place of the tokenizer's, or None.
    """

    def __init__(self, tokenizer: Any, loss: str, *, conversational: bool) -> None:
        """Check the tokenizer's template.

        Args:
            tokenizer: a tokenizer with its chat template set.
            loss: from `choose_loss`.
            conversational: examples are messages.

        Raises:
            ConfigError: TRL is missing, or the template cannot tell the assistant's tokens.
        """
        self.loss, self.left_out = loss, 0
        self.warnings: list[str] = []
        self._tokenizer = tokenizer
        self.template: str | None = None
        self._end = tokenizer.eos_token_id
        if not conversational:
            return
        trl = _trl()
        chat = "a chat template (Jinja), as instruction-tuned models have"
        hint = "The tokenizer has no chat template"
        require(tokenizer.chat_template, "--chat-template", None, chat, hint)
        if loss != ASSISTANT:
            return
        if not trl.has_generation_markers(tokenizer.chat_template):
            try:
                self.template = trl.get_training_chat_template(tokenizer)
            except Exception as error:  # ValueError, and what a template raises at TRL's probe
                marks = "a chat template with {% generation %} and {% endgeneration %} around the assistant's text"
                hint = (
                    "The tokenizer's template does not mark what the assistant says, and TRL has no marked version of "
                    "it. --loss all (or completion, for prompts) needs no marks"
                )
                raise ConfigError("--chat-template", None, marks, hint) from error
        if not trl.is_chat_template_stop_token_trained(tokenizer, chat_template=self.template):
            self.warnings.append(
                "The chat template leaves the token that ends the assistant's turn out of the loss: the model may not "
                "learn to stop. Put it before {% endgeneration %}."
            )

    def __call__(self, example: Mapping[str, Any], where: str) -> tuple[list[int], list[int] | None]:
        """Tokenize an example.

        Args:
            example: from `example_of`.
            where: file and line, for errors.

        Returns:
            Token ids, and 1 for each token that is learned; None if all are.

        Raises:
            DataError: the template refuses the messages, or no token is learned.
        """
        if "messages" in example:
            ids, learned = self._chat(example["messages"], example, where)
        elif isinstance(example["prompt"], str):
            ids, learned = self._prompt(example["prompt"], example["completion"])
        else:
            ids, learned = self._prompt_chat(example, where)
        if learned is not None and 1 not in learned:
            reason = "" if self.loss != ASSISTANT else ": no turn of the assistant, or its template marks none"
            raise DataError(f"{where}: no token would be learned{reason}")
        return ids, learned

    def _chat(
        self, messages: list[dict], example: Mapping[str, Any], where: str, **more: Any
    ) -> tuple[list[int], list[int] | None]:
        masked = self.loss == ASSISTANT and not more
        settings = {"chat_template": self.template, **example.get("chat_template_kwargs", {}), **more}
        try:
            made = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=masked,
                tools=example.get("tools"),
                **settings,
            )
        except Exception as error:  # what the template raises, and Jinja for values of a wrong type
            roles = ", ".join(message["role"] for message in messages[:6]) + (", …" if len(messages) > 6 else "")
            raise DataError(f"{where}: the chat template refuses messages of {roles}: {first_line(error)}") from error
        return made["input_ids"], made["assistant_masks"] if masked else None

    def _prompt_chat(self, example: Mapping[str, Any], where: str) -> tuple[list[int], list[int] | None]:
        prompt, completion = example["prompt"], example["completion"]
        whole, assistant = self._chat([*prompt, *completion], example, where)
        if self.loss == ALL:
            return whole, None
        head, _ = self._chat(prompt, example, where, add_generation_prompt=True)
        learned = self._after(head, whole)
        if assistant is not None:
            learned = [a & b for a, b in zip(learned, assistant, strict=True)]
        return whole, learned

    def _prompt(self, prompt: str, completion: str) -> tuple[list[int], list[int] | None]:
        whole = self._tokenizer(prompt + completion, verbose=False)["input_ids"]
        if not whole or whole[-1] != self._end:
            whole = [*whole, self._end]
        if self.loss == ALL:
            return whole, None
        return whole, self._after(self._tokenizer(prompt, verbose=False)["input_ids"], whole)

    def _after(self, head: list[int], whole: list[int]) -> list[int]:
        """Return 1 for each token after those that the prompt alone has in common with the whole."""
        count = 0
        for one, other in zip(head, whole, strict=False):
            if one != other:
                break
            count += 1
        if count < len(head):
            self.left_out += 1
        return [0] * count + [1] * (len(whole) - count)


def _trl() -> Any:
    """Return TRL's functions for chat templates. Raises ConfigError without TRL."""
    try:
        from trl import chat_template_utils
    except ImportError as error:
        hint = "Chats need TRL: pip install 'pipecomp[chat]'"
        raise ConfigError("--data", "messages", "text, or prompt and completion as text", hint) from error
    return chat_template_utils
