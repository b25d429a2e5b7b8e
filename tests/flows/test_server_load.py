"""A served model under load: many requests at once, more than there is room for, and what is counted."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from gristmill.flows.models.limits import Limits
from gristmill.flows.models.protocol import choice_seed
from gristmill.flows.models.server import make_app
from gristmill.mixtures.model import Model
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.generation.language_model import LanguageModel, open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler, complete
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, save_model
from tests.servers import serving

WORDS = "red blue one two sky grass rose".split()
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("served")
    write_tokenizer(train(TokenizerSample({"all": [f"{' '.join(WORDS)} " * 20]}, {}), 300), folder / "tokenizer")
    shape = shape_of(Model(layers=2, width=32, heads=4, kv_heads=2), 300, 96)
    with torch.device("meta"):
        parameters = {name: one.shape for name, one in Llama(shape).named_parameters()}
    save_model(
        folder / "model",
        shape,
        {name: drawn(shape, 0)(name, size) * (6.0 if len(size) > 1 else 1.0) for name, size in parameters.items()},
    )
    return open_language_model(folder / "model", folder / "tokenizer")


@pytest.fixture
def serve(language: LanguageModel) -> Iterator[Serve]:
    """Serves the model with some limits in this process; returns the address."""
    with ExitStack() as servers:
        yield lambda **limits: servers.enter_context(
            serving(make_app(language, Scheduler(language.model, 16), "tiny", 8, "127.0.0.1", Limits(**limits)))
        )


def bodies(number: int) -> list[dict[str, Any]]:
    """Requests of many kinds, half of them sampled."""
    return [
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": " ".join(WORDS[(k + place) % len(WORDS)] for place in range(1 + k % 5))}
            ],
            "max_tokens": 3 + k % 6,
            "temperature": k % 2,
            "seed": k,
        }
        for k in range(number)
    ]


def post(url: str, body: Any) -> tuple[int, dict[str, Any], Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=200) as found:
            return found.status, dict(found.headers), json.loads(found.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.loads(error.read())


def alone(language: LanguageModel, asked: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Text and tokens of each answer, generated with nobody else in the batch."""
    found = []
    for body in asked:
        prompt = language.chat_prompt(body["messages"])
        sampling = Sampling(float(body["temperature"]), 1.0, choice_seed(body["seed"], 0))
        (ids,) = complete(Scheduler(language.model, 1), [Request(prompt, body["max_tokens"], language.stops, sampling)])
        found.append((language.decode(ids), len(ids)))
    return found


def metrics_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as found:
        assert found.headers["content-type"].startswith("text/plain")
        lines = found.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_two_hundred_requests_at_once_get_the_tokens_that_each_gets_alone(
    serve: Serve, language: LanguageModel
) -> None:
    url, asked = serve(answers=200, requests=400), bodies(200)
    gate = threading.Barrier(200)

    def ask(body: dict[str, Any]) -> Any:
        gate.wait()
        return post(url, body)

    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(ask, asked))
    assert [status for status, _, _ in found] == [200] * 200
    answers = [(one["choices"][0]["message"]["content"], one["usage"]["completion_tokens"]) for _, _, one in found]
    assert answers == alone(language, asked)
    counted = metrics_of(url)
    assert counted['gristmill_requests_total{status="200"}'] == 200
    assert counted["gristmill_completion_tokens_total"] == sum(tokens for _, tokens in answers)
    assert counted["gristmill_prompt_tokens_total"] == sum(one["usage"]["prompt_tokens"] for _, _, one in found)
    assert counted["gristmill_request_seconds_count"] >= 200
    assert counted["gristmill_first_token_seconds_count"] == sum(tokens > 0 for _, tokens in answers)
    assert counted["gristmill_answers_limit"] == 200
    assert counted["gristmill_answers"] == counted["gristmill_answers_running"] == 0
    assert counted["gristmill_answers_waiting"] == 0


def test_what_is_beyond_the_limit_is_refused_at_once_and_answered_when_asked_again(
    serve: Serve, language: LanguageModel
) -> None:
    url, asked = serve(answers=4, requests=400), bodies(40)
    refused: list[str] = []

    def ask_until_answered(body: dict[str, Any]) -> Any:
        while True:
            status, headers, found = post(url, body)
            if status == 200:
                return found["choices"][0]["message"]["content"]
            assert status == 429
            assert {name.lower(): value for name, value in headers.items()}["retry-after"] == "1"
            refused.append(found["error"]["message"])

    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(ask_until_answered, asked))
    assert found == [text for text, _ in alone(language, asked)]
    assert refused
    assert all(re.fullmatch(r"this server has 4 of 4 answers at work; ask again later", one) for one in refused)
    counted = metrics_of(url)
    assert counted['gristmill_requests_total{status="429"}'] == len(refused)
    assert counted['gristmill_requests_total{status="200"}'] == 40
