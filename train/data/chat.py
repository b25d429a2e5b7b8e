"""Conversations as tokens: the chat template rendered, cut where the assistant speaks, and encoded.

The template is Jinja, as transformers reads it; `{% generation %}` marks enclose what the assistant generates. Each
segment between two marks is encoded on its own, so that a trained token never reaches across the mark, and a prompt
has the same ids in training and in generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from gristmill.dataprep.files import read_json, sha256_file
from gristmill.tokenize.encoding.chat_templates import (
    CLOSE,
    END_OF_TURN,
    OPEN,
    PROBE,
    compile_template,
    render_segments,
)

TEMPLATE_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
SHOWN_CHARACTERS = 40
Message = Mapping[str, Any]


class ChatError(ValueError):
    """A conversation or a template cannot be turned into tokens."""


@dataclass(frozen=True)
class Tokens:
    """A rendered conversation.

    Attributes:
        ids: (t,) int64.
        turns: (t,) int64: 0 where the assistant does not speak, else the number of its turn, from 1.
    """

    ids: np.ndarray
    turns: np.ndarray


class Chat:
    """A tokenizer with a chat template.

    Args:
        folder: output of the tokenizer stage.

    Raises:
        ChatError: there is no chat template, or it marks nothing as generated.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.folder = folder
        if not (folder / TEMPLATE_FILE).exists():
            raise ChatError(f"{folder}: no {TEMPLATE_FILE}; a tokenizer without a chat template cannot be tuned on "
                            "conversations: remove `sft:` and `dpo:`, or use a trained tokenizer")
        self.tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        self._config: dict[str, Any] = read_json(folder / TOKENIZER_CONFIG_FILE)
        self._template = compile_template((folder / TEMPLATE_FILE).read_text(encoding="utf-8"))

    @property
    def digest(self) -> str:
        """Names what conversations are rendered and encoded with."""
        return sha256_file(self.folder / TEMPLATE_FILE) + sha256_file(self.folder / TOKENIZER_FILE)

    @cached_property
    def pad(self) -> int:
        """The id that fills rows up; end of text where there is no padding token."""
        return self._id("pad_token", "eos_token")

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids that end an answer: end of text, end of turn, and the special token that the template ends answers with.
        """
        end = self.tokenizer.token_to_id(END_OF_TURN)
        answers = [text for text, generated in self.segments(PROBE) if generated]
        last = self.tokenizer.encode(answers[-1], add_special_tokens=False).ids[-1:] if answers else []
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number for number in last if number in added and added[number].special}
        return frozenset({self._id("eos_token")} | special | (set() if end is None else {end}))

    def segments(
        self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[tuple[str, bool]]:
        """Render a conversation: (text, whether the assistant generates it), in order; no empty ones.

        Args:
            messages: `role` and `content` each, and perhaps `tool_calls`.
            prompt: end with what invites the assistant to speak.
            tools: descriptions of the tools that may be called.

        Raises:
            ChatError: a content holds a special token, or the template refuses the messages or leaves out a tool.
        """
        told = [message["content"] for message in messages]
        called = [call for message in messages for call in message.get("tool_calls", ())]
        for text in (*told, *(json.dumps(part, ensure_ascii=False) for part in (*called, *tools))):
            if found := self._special.search(text):
                raise ChatError(f"content holds {found.group()!r}, which is no text here")
        try:
            segments = render_segments(self._template, messages, prompt, tools=list(tools) or None,
                                       **self._named_tokens)
        # A template may add what a message has not to a text, or fail as any other expression.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatError(f"{self.folder / TEMPLATE_FILE}: {error}") from error
        self._check_tools(segments, messages, called, tools)
        return segments

    def encode(
        self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Tokens:
        """Tokens of a conversation, and whose they are. Arguments and errors as for `segments`."""
        ids: list[int] = []
        turns: list[int] = []
        turn = 0
        for text, generated in self.segments(messages, prompt, tools):
            turn += generated
            encoded = self.tokenizer.encode(text, add_special_tokens=False).ids
            ids += encoded
            turns += [turn if generated else 0] * len(encoded)
        return Tokens(np.array(ids, dtype=np.int64), np.array(turns, dtype=np.int64))

    def _check_tools(
        self, segments: Sequence[tuple[str, bool]], messages: Sequence[Message],
        called: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
    ) -> None:
        """A template that knows nothing of tools would leave them out without a word."""
        whole = "".join(text for text, _ in segments)
        wanted = [("the tool", tool.get("function", tool).get("name", "")) for tool in tools]
        wanted += [("the call of", call["function"]["name"]) for call in called]
        wanted += [("the answer of a tool", message["content"]) for message in messages if message["role"] == "tool"]
        for what, text in wanted:
            # Templates may write an answer as JSON or trimmed; its first word is in both.
            if text and text.split()[0] not in whole:
                raise ChatError(f"{self.folder / TEMPLATE_FILE} leaves out {what} {text[:SHOWN_CHARACTERS]!r}")

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of some ids, special tokens left out or shown."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    @cached_property
    def _special(self) -> re.Pattern[str]:
        special = [token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special]
        return re.compile("|".join(re.escape(text) for text in (*special, OPEN, CLOSE)))

    @cached_property
    def _named_tokens(self) -> dict[str, str]:
        return {name: text for name in ("bos_token", "eos_token", "pad_token") if (text := self._text_of(name))}

    def _text_of(self, name: str) -> str | None:
        value = self._config.get(name)
        return value["content"] if isinstance(value, dict) else value

    def _id(self, *names: str) -> int:
        for name in names:
            text = self._text_of(name)
            number = None if text is None else self.tokenizer.token_to_id(text)
            if number is not None:
                return int(number)
        raise ChatError(f"{self.folder / TOKENIZER_CONFIG_FILE}: names none of {', '.join(names)} of the vocabulary")
