"""Settings of a language model that a stage asks: the model, sampling of its answers,
and access to it.

A model behind an endpoint, a model of this machine that gristmill serves while the
stage runs, and one that vLLM serves:

    model:
      endpoint: "https://api.example.org/v1"
      model: some-model
      api_key_env: SOME_KEY
      max_tokens: 300

    model: {folder: ./exported}

    model: {folder: ./qwen, server: vllm}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from gristmill.mixtures.base import (
    Fraction,
    NotNegative,
    Options,
    OutsidePath,
    Positive,
    PositiveFloat,
    Section,
)

HOW = tuple(
    (
        "endpoint server server_options api_key_env concurrency timeout_seconds "
        "patience_seconds budget prompt_price answer_price"
    ).split()
)
"""Keys that control access to a model: they are not part of a fingerprint, nor of the
key of an answer.
"""
OWN_FIELDS = tuple(
    "model messages temperature top_p max_tokens seed response_format stream n".split()
)
"""Fields of a request's body that `body` may not replace."""


class Budget(Section):
    """Limits of spending on one output of a stage, over all attempts at it. Stored
    answers cost nothing.
    """

    requests: Positive | None = None
    """Number of answers, including those to repair requests. Unanswered requests do not
    count.
    """
    tokens: Positive | None = None
    """Tokens of prompts and answers together, as the endpoint counts them."""
    money: PositiveFloat | None = None
    """Cost in the currency of `prompt_price` and `answer_price`."""


class AskedModel(Section):
    """A model behind OpenAI's chat completions API: at an address, or in a folder of
    this machine.
    """

    endpoint: str | tuple[str, ...] | None = None
    """Address of the API, such as `http://127.0.0.1:8000/v1`, or a list of several that
    serve the same model: each request goes to the one with the fewest open requests.
    """
    folder: OutsidePath | None = None
    """A model's folder instead: it is served on the loopback address while the stage
    needs it.
    """
    model: str | None = None
    """The endpoint's name of the model; for a `folder` its own name if absent."""
    server: Literal["gristmill", "vllm"] = "gristmill"
    """Server of a `folder`: gristmill's own, or `vllm serve` if vLLM is installed."""
    server_options: tuple[str, ...] = ()
    """Further arguments of `vllm serve`: `[--max-model-len, "4096"]`."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = (
        None
    )
    """Name of the environment variable that holds the key; the key itself is never
    written anywhere.
    """
    system: str | None = None
    """System message before every prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature; 0 takes the most likely token each time."""
    top_p: Fraction = 1.0
    """Nucleus sampling: answers are drawn from the most likely tokens that together
    have this probability.
    """
    max_tokens: Positive = 512
    """Longest answer in tokens."""
    seed: int | None = None
    """Seed of the request, sent if given; several answers to one prompt have
    consecutive seeds.
    """
    response_format: Literal["none", "json_object", "json_schema"] = "none"
    """Request for JSON besides the prompt, if answers must have a schema. Not every
    server supports it; answers are validated in any case.
    """
    body: Options = Field(default_factory=dict)
    """Further fields of the request, passed unchanged: `{chat_template_kwargs:
    {enable_thinking: false}}`.
    """
    unanswered: Literal["stop", "quarantine"] = "stop"
    """Treatment of a request that is not answered within `patience_seconds`: the stage
    stops, and continues when it is run again; or its document is quarantined.
    """
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    """Number of concurrent requests."""
    timeout_seconds: PositiveFloat = 120.0
    """Time limit per attempt."""
    patience_seconds: PositiveFloat = 600.0
    """Time limit for all attempts at a request: it is sent again after 408, 409, 425,
    429 and 5xx, a timeout and a dropped connection, with growing delays, and never
    sooner than the endpoint's Retry-After allows.
    """
    prompt_price: NotNegative = 0.0
    """Price of a million tokens of prompts."""
    answer_price: NotNegative = 0.0
    """Price of a million tokens of answers."""
    budget: Budget = Budget()

    @field_validator("endpoint")
    @classmethod
    def _addresses(
        cls, value: str | tuple[str, ...] | None
    ) -> str | tuple[str, ...] | None:
        for address in (value,) if isinstance(value, str) else value or ():
            if not re.match(r"^https?://[^/\s]", address):
                raise ValueError(
                    f"{address!r} is not an address; give one such as "
                    "http://127.0.0.1:8000/v1"
                )
        return value

    def _problems(self) -> Iterator[str]:
        if (not self.endpoint) == (self.folder is None):
            yield (
                "give `endpoint`, or `folder`" + (", not both" if self.endpoint else "")
            )
        if self.endpoint and self.model is None:
            yield "give `model`, the endpoint's name of the model"
        if self.endpoint and (self.server != "gristmill" or self.server_options):
            yield "`server` and `server_options` are for a `folder`; remove them"
        unsupported = {
            "server_options": self.server_options,
            "body": self.body,
            "response_format": self.response_format != "none",
        }
        for key, is_set in unsupported.items():
            if is_set and self.folder is not None and self.server == "gristmill":
                yield (
                    f"gristmill's own server of a `folder` has no `{key}`; remove "
                    "it, or add `server: vllm`"
                )
        for name in self.body:
            if name in OWN_FIELDS:
                yield f"body.{name} is set by other keys; remove it"
        if self.budget.money is not None and not (
            self.prompt_price or self.answer_price
        ):
            yield (
                "budget.money needs `prompt_price` and `answer_price`, "
                "per million tokens"
            )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses of the API."""
        return (
            (self.endpoint,) if isinstance(self.endpoint, str) else self.endpoint or ()
        )

    @property
    def called(self) -> str:
        """Name of the model in requests."""
        return self.model or PurePath(str(self.folder).rstrip("/")).name
