"""Parsers of an endpoint's replies: completions, error messages, and Retry-After."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NotRequired, TypedDict

from gristmill.core.secrets import mask_text
from gristmill.dataprep.llm.prompting import shorten

if TYPE_CHECKING:
    import httpx


class Completion(TypedDict):
    """Chat completion of an endpoint.

    Attributes:
        finish: reason of its end; `length` if it was cut.
        of: in the store: id of the first document that its prompt is about, in
            hexadecimal.
    """

    text: str
    finish: str
    prompt_tokens: int
    answer_tokens: int
    of: NotRequired[str]


def read_completion(response: httpx.Response) -> Completion | str:
    """Parse a chat completion, or return its problem; the text of a completion with
    `prompt_logprobs` is their JSON.
    """
    try:
        body = response.json()
        choice = body["choices"][0]
        scores = choice.get("prompt_logprobs")
        text = json.dumps(scores) if scores else choice["message"].get("content") or ""
        usage = body.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError(f"content is {type(text).__name__}")
        return {
            # a lone surrogate becomes U+FFFD, so that the text can be encoded as UTF-8
            "text": text.encode("utf-16-le", "surrogatepass").decode(
                "utf-16-le", "replace"
            ),
            "finish": str(choice.get("finish_reason") or "stop"),
            "prompt_tokens": int(usage.get("prompt_tokens") or 0),
            "answer_tokens": int(usage.get("completion_tokens") or 0),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return mask_text(
            f"its response is not a chat completion ({type(error).__name__}: "
            f"{shorten(str(error))}): {shorten(response.text)!r}"
        )


def read_refusal(response: httpx.Response) -> str:
    """Error message in an endpoint's reply."""
    try:
        error = response.json()
        for key in ("error", "message"):
            error = error.get(key, error) if isinstance(error, Mapping) else error
        text = str(error)
    except (ValueError, RecursionError):
        text = response.text
    return mask_text(shorten(text)) or response.reason_phrase


def read_retry_after(value: str | None) -> float:
    """Seconds to wait by a Retry-After header: a number, or a date (RFC 9110,
    10.2.3).
    """
    for parse in (
        float,
        lambda text: parsedate_to_datetime(text).timestamp() - time.time(),
    ):
        with suppress(ValueError, TypeError):
            return max(0.0, parse(value or ""))
    return 0.0
