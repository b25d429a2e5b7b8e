"""The requests and answers of OpenAI's chat completions API, as far as they are served here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gristmill.core.seeds import content_key

MOST_STOPS = 16
"""Texts that end an answer; each is looked for in every piece of it."""
INVALID, MISSING, FAILED = "invalid_request_error", "not_found_error", "server_error"


class _Strict(BaseModel):
    # A field that would silently do nothing is an error instead.
    model_config = ConfigDict(extra="forbid")


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """What somebody said."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        parts = self.content
        return {"role": self.role, "content": parts if isinstance(parts, str) else "".join(one.text for one in parts)}


class StreamOptions(_Strict):
    """What a stream ends with."""

    include_usage: bool = False


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions; fields that cannot be honoured may only have the value that is kept."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=64)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, value: Any) -> Any:
        """Refuse texts that no UTF-8 stands for, wherever they are."""
        check_characters(value)
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        """Refuse more texts than are looked for."""
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ValueError(f"{len(stop)} texts; give {MOST_STOPS} at most")
        return stop

    @property
    def texts(self) -> list[str]:
        """All that the conversation says."""
        return [text for message in self.messages for text in message.plain.values()]

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_characters(value: Any) -> None:
    """See that all texts of a JSON value are Unicode.

    Raises:
        ValueError: one has half of a character, as JSON may write it.
    """
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("a text has a lone surrogate (\\ud800 to \\udfff); send whole ones")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_characters(key)
            check_characters(inner)
    elif isinstance(value, list):
        for inner in value:
            check_characters(inner)


def json_bytes(value: Any) -> bytes:
    """JSON that can be sent whatever its texts hold."""
    return json.dumps(value).encode()


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several answers to the same request."""
    if choice == 0:
        return seed
    return content_key(seed, choice)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion(
    head: Mapping[str, Any], texts: list[str], finishes: list[str], used: Mapping[str, int]
) -> dict[str, Any]:
    """The whole answer, its head being `id`, `created` and `model`."""
    return {
        **head,
        "object": "chat.completion",
        "usage": dict(used),
        "choices": [
            {
                "index": number,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish,
            }
            for number, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ],
    }


def chunk(head: Mapping[str, Any], index: int, delta: Mapping[str, str], finish: str | None) -> dict[str, Any]:
    """A piece of a streamed answer."""
    return {
        **head,
        "object": "chat.completion.chunk",
        "choices": [{"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": finish}],
    }


def failure(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
