"""`gristmill serve-model`: a model behind OpenAI's chat completions API, requests answered together.

Any client of that API works with `base_url="http://127.0.0.1:8000/v1"` and the server's API key. On the loopback address
it also refuses requests that name another host: a web page whose name is made to point here cannot ask.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from gristmill.flows.access_token import AccessToken, SignIn
from gristmill.flows.models.limits import (
    TAKEN,
    Guard,
    Limits,
    Places,
    TooManyError,
    refuse,
)
from gristmill.flows.models.listening import LOOPBACK
from gristmill.flows.models.protocol import (
    FAILED,
    INVALID,
    MISSING,
    ChatRequest,
    choice_seed,
    chunk,
    completion,
    failure,
    json_bytes,
    usage,
)
from gristmill.flows.models.server_metrics import ServerMetrics
from gristmill.train.data.conversation_tokens import ChatError
from gristmill.train.generation import scheduler as generation
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler_thread import Engine, EngineStoppedError

HEALTH = "/health"
"""Answered without the API key, as probes have none."""
DEFAULT_LIMITS = Limits()
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default."""


class Answering:
    """One request on its way: its answers' ids, as text, from the engine's thread to the event loop.

    Args:
        engine, language: what answers.
        asked: the request.
        prompt: its conversation's ids.
        max_new_tokens: longest answer where the request names none.
        metrics: counts its tokens.

    Raises:
        generation.PromptTooLongError, EngineStoppedError: it cannot be answered.
    """

    def __init__(
        self,
        engine: Engine,
        language: LanguageModel,
        asked: ChatRequest,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        metrics: ServerMetrics,
    ) -> None:
        self._engine, self.prompt, self._metrics = engine, prompt, metrics
        self._began = time.perf_counter()
        metrics.prompt_tokens.inc(len(prompt))
        self.choices = asked.n or 1
        self.completion_tokens = 0
        self._texts = [TextStream(language.decode, asked.stops) for _ in range(self.choices)]
        self._arrived: asyncio.Queue[tuple[int, generation.Progress | BaseException]] = asyncio.Queue()
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[int, int] = {}
        for number in range(self.choices):
            sampling = Sampling(
                DEFAULT_TEMPERATURE if asked.temperature is None else asked.temperature,
                1.0 if asked.top_p is None else asked.top_p,
                choice_seed(seed, number),
            )
            most = asked.max_completion_tokens or asked.max_tokens or max_new_tokens
            self._tickets[number] = engine.submit(
                generation.Request(self.prompt, most, language.stops, sampling), self._listener(number)
            )

    def _listener(self, number: int) -> Any:
        def listen(one: generation.Progress | BaseException) -> None:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (number, one))

        return listen

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Choice, some more text, and why it has ended, if it has; ends with the last choice."""
        try:
            while self._tickets:
                number, one = await self._arrived.get()
                if isinstance(one, BaseException):
                    raise EngineStoppedError(str(one)) from one
                if number not in self._tickets:
                    continue
                if self.completion_tokens == 0 and one.tokens:
                    self._metrics.first_token_seconds.observe(time.perf_counter() - self._began)
                self.completion_tokens += len(one.tokens)
                self._metrics.completion_tokens.inc(len(one.tokens))
                stream = self._texts[number]
                text = stream.push(one.tokens)
                finish: str | None = one.finish
                if finish is not None:
                    text += stream.finish()
                if stream.is_stopped:
                    finish = "stop"
                if finish is not None:
                    self._engine.cancel(self._tickets.pop(number))
                yield number, text, finish
        finally:
            self.close()

    def close(self) -> None:
        """Stop what nobody waits for any more."""
        for ticket in self._tickets.values():
            self._engine.cancel(ticket)
        self._tickets.clear()


def make_app(
    language: LanguageModel,
    scheduler: generation.Scheduler,
    name: str,
    max_new_tokens: int,
    host: str,
    limits: Limits = DEFAULT_LIMITS,
) -> FastAPI:
    """The application.

    Args:
        language: the model with its tokenizer.
        scheduler: of that model; the application's from now on.
        name: that clients call it by.
        max_new_tokens: longest answer where a request names none.
        host: address that it listens on.
        limits: what is refused.
    """
    engine, answers, metrics = Engine(scheduler), Places(limits.answers, "answers"), ServerMetrics()
    metrics.watch("answers", "Answers of all requests, running or waiting.", lambda: answers.taken)
    metrics.watch("answers_limit", "Most of them; what is beyond is refused with 429.", lambda: answers.most)
    metrics.watch("answers_running", "Answers that get tokens now.", lambda: scheduler.running)
    metrics.watch("answers_waiting", "Answers that wait for a place in the batch.", lambda: scheduler.waiting)
    # One at a time: a thread of its own, so that nobody else waits, and no more, so that answers keep their cores.
    tokenising = ThreadPoolExecutor(1, "tokenising")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()
        tokenising.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="gristmill", lifespan=lifespan)
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    app.add_middleware(Guard, limits=limits, metrics=metrics)
    _answer_errors(app)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "gristmill"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{wanted}")
    def model(wanted: str) -> dict[str, Any]:
        _check_name(wanted, name)
        return card

    @app.get(HEALTH)
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, asked: ChatRequest) -> dict[str, Any] | StreamingResponse:
        _check_name(asked.model, name)
        length = scheduler.model.shape.sequence_length
        most = limits.prompt_characters_per_token * length
        if (characters := sum(map(len, asked.texts))) > most:
            raise generation.PromptTooLongError(
                f"a prompt has {characters} characters; the model's {length} tokens hold {most} at the most"
            )
        if (asked.n or 1) > limits.answers:
            raise HTTPException(400, f"n: this server makes {limits.answers} answers at a time; ask for fewer")
        taken: ExitStack = request.scope[TAKEN]
        taken.enter_context(answers.take(asked.n or 1))
        prompt = await asyncio.get_running_loop().run_in_executor(
            tokenising, language.chat_prompt, [message.plain for message in asked.messages]
        )
        answering = taken.enter_context(closing(Answering(engine, language, asked, prompt, max_new_tokens, metrics)))
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": None,
        }
        if asked.stream:
            return StreamingResponse(
                _events(answering, asked, head), media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
        texts, finishes = [""] * answering.choices, [""] * answering.choices
        async for number, text, finish in answering.pieces():
            texts[number] += text
            finishes[number] = finish or ""
        return completion(head, texts, finishes, usage(len(answering.prompt), answering.completion_tokens))

    return app


def with_api_key(app: FastAPI, token: AccessToken) -> SignIn:
    """The application for those who send the API key."""
    refusal = refuse("this request has no valid API key; send `Authorization: Bearer KEY`", 403)
    return SignIn(app, token, frozenset({HEALTH}), refusal)


async def _events(answering: Answering, asked: ChatRequest, head: dict[str, Any]) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer."""
    for number in range(answering.choices):
        yield _event(chunk(head, number, {"role": "assistant", "content": ""}, None))
    try:
        async for number, text, finish in answering.pieces():
            if text:
                yield _event(chunk(head, number, {"content": text}, None))
            if finish is not None:
                yield _event(chunk(head, number, {}, finish))
    except EngineStoppedError as error:
        yield _event(failure(str(error), FAILED))
        return
    if asked.stream_options is not None and asked.stream_options.include_usage:
        used = usage(len(answering.prompt), answering.completion_tokens)
        yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": used})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _check_name(wanted: str, name: str) -> None:
    if wanted != name:
        raise HTTPException(404, f"there is no model {wanted!r}; this server has {name!r}")


def _answer_errors(app: FastAPI) -> None:
    """Let every error be JSON of OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        said = "not served here; leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        return _failed(failure(f"{param or 'body'}: {said}", INVALID, param), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        code = "model_not_found" if error.status_code == 404 and "model" in str(error.detail) else None
        kind = MISSING if error.status_code == 404 else INVALID
        return _failed(failure(str(error.detail), kind, None, code), error.status_code)

    @app.exception_handler(ChatError)
    async def no_chat(request: Request, error: ChatError) -> Response:
        return _failed(failure(str(error), INVALID, "messages"), 400)

    @app.exception_handler(generation.PromptTooLongError)
    async def too_long(request: Request, error: generation.PromptTooLongError) -> Response:
        return _failed(failure(str(error), INVALID, "messages", "context_length_exceeded"), 400)

    @app.exception_handler(TooManyError)
    async def too_many(request: Request, error: TooManyError) -> Response:
        return refuse(str(error), 429)

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> Response:
        return _failed(failure(str(error), FAILED), 503)


def _failed(content: dict[str, Any], status: int) -> Response:
    return Response(json_bytes(content), status, media_type="application/json")
