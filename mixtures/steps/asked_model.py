"""What is said of a model that is asked: who it is, what its answers are drawn by, and how it is reached.

model: {endpoint: "https://api.example.org/v1", model: some-model, api_key_env: SOME_KEY, max_tokens: 300}
model: {folder: ./exported}                     # a model of this machine, served by gristmill while it is asked
model: {folder: ./qwen, server: vllm}           # the same, served by vLLM
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.base import Fraction, OutsidePath, Positive, PositiveFloat, Section

HOW = (
    "endpoint",
    "server",
    "server_options",
    "api_key_env",
    "concurrency",
    "timeout_seconds",
    "patience_seconds",
    "budget",
    "prompt_price",
    "answer_price",
)
"""Keys that say how a model is reached: no part of a fingerprint, nor of the key of an answer."""
OWN_FIELDS = ("model", "messages", "temperature", "top_p", "max_tokens", "seed", "response_format", "stream", "n")
"""Fields of a request's body that `body` may not replace."""


class Budget(Section):
    """What may be spent on one output of a stage, over all attempts at it. Kept answers cost nothing."""

    requests: Positive | None = None
    """Answers, those to repair requests too. What was not answered is not counted."""
    tokens: Positive | None = None
    """Tokens of prompts and answers together, as the endpoint counts them."""
    money: PositiveFloat | None = None
    """In the currency of `prompt_price` and `answer_price`."""


class AskedModel(Section):
    """A model behind OpenAI's chat completions API: at an address, or in a folder of this machine."""

    endpoint: str | tuple[str, ...] | None = None
    """Address of the API, such as `http://127.0.0.1:8000/v1`, or a list of some that serve the same model: each request
    goes to the one that has the fewest to answer."""
    folder: OutsidePath | None = None
    """A model's folder instead: it is served on the loopback address while it is asked."""
    model: str | None = None
    """What the endpoint calls the model; of a `folder` its own name if absent."""
    server: Literal["gristmill", "vllm"] = "gristmill"
    """What serves a `folder`: `gristmill serve-model`, or `vllm serve` where vLLM is installed."""
    server_options: tuple[str, ...] = ()
    """More arguments for that command: `[--max-model-len, "4096"]`."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable that holds the key; the key itself is never written down."""
    system: str | None = None
    """A system message before every prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """How freely answers are drawn; with 0 the likeliest token each time."""
    top_p: Fraction = 1.0
    """Answers are drawn from the likeliest tokens that together have this probability."""
    max_tokens: Positive = 512
    """Longest answer."""
    seed: int | None = None
    """Sent where it is given; several answers to one prompt have seeds that follow each other."""
    response_format: Literal["none", "json_object", "json_schema"] = "none"
    """How the endpoint is asked for JSON beside the prompt, where answers are to have a schema. Not every server knows
    these; answers are checked either way."""
    body: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, as they are: `{chat_template_kwargs: {enable_thinking: false}}`."""
    unanswered: Literal["stop", "quarantine"] = "stop"
    """What happens to a request that is not answered within `patience_seconds`: the stage stops, and asks on when it is
    run again; or its document is quarantined."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    """Requests on their way at the same time."""
    timeout_seconds: PositiveFloat = 120.0
    """For one try."""
    patience_seconds: PositiveFloat = 600.0
    """For all tries of a request: it is sent again after 408, 409, 425, 429 and 5xx, a timeout and a dropped
    connection, each time later, and no sooner than the endpoint's Retry-After says."""
    prompt_price: Annotated[float, Field(ge=0.0)] = 0.0
    """Of a million tokens of prompts."""
    answer_price: Annotated[float, Field(ge=0.0)] = 0.0
    """Of a million tokens of answers."""
    budget: Budget = Budget()

    @field_validator("endpoint")
    @classmethod
    def _addresses(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for one in (value,) if isinstance(value, str) else value or ():
            if not re.match(r"^https?://[^/\s]", one):
                raise ValueError(f"{one!r} is not an address; give one such as http://127.0.0.1:8000/v1")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (not self.endpoint) == (self.folder is None):
            raise ValueError("give `endpoint`, or `folder`" + (", not both" if self.endpoint else ""))
        if self.endpoint and self.model is None:
            raise ValueError("give `model`, what the endpoint calls it")
        if self.endpoint and (self.server != "gristmill" or self.server_options):
            raise ValueError("`server` and `server_options` are for a `folder`; remove them")
        own = [name for name in self.body if name in OWN_FIELDS]
        if own:
            raise ValueError(f"body.{own[0]} is made from the other keys; remove it")
        if self.budget.money is not None and not (self.prompt_price or self.answer_price):
            raise ValueError("budget.money needs `prompt_price` and `answer_price`, of a million tokens")
        return self

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses."""
        return (self.endpoint,) if isinstance(self.endpoint, str) else self.endpoint or ()

    @property
    def called(self) -> str:
        """What requests call the model."""
        return self.model or PurePath(str(self.folder).rstrip("/")).name
