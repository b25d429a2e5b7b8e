"""Client of OpenAI's chat completions API: many concurrent requests, and no request
twice.

    with Asking(model, context) as asking:
        for answer in asking.answers(requests):   # in the order of the requests
            ...

Transient failures are retried: 408, 409, 425, 429 and 5xx, timeouts, dropped
connections, bodies that are not a completion. The wait before a retry is a random part
("full jitter": Brooker 2015, AWS Architecture Blog) of FIRST_WAIT_SECONDS, doubled with
each retry up to MOST_WAIT_SECONDS, and at least Retry-After, which applies to all
requests to that endpoint. A permanent refusal (400, 413, 422) is the error of that
request. If a stage ends early, by an outage or its budget, all answers received are
stored.

Memory: up to WINDOW requests and as many answers per concurrent request, and the index
of the stored answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from gristmill.core.files import canonical_json
from gristmill.core.secrets import mask_text, remember_secrets
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.conversations import Message
from gristmill.dataprep.llm.answer_store import (
    KeptAnswers,
    Settings,
    key_of,
)
from gristmill.dataprep.llm.budget import (
    BESIDE_TOKENS,
    Spending,
    exceeded,
    spending_on,
)
from gristmill.dataprep.llm.local_endpoint import served
from gristmill.dataprep.llm.prompting import (
    Answer,
    Request,
    read_json_answer,
    read_pattern_answer,
    shorten,
)
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.llm.response_parsing import (
    Completion,
    read_completion,
    read_refusal,
    read_retry_after,
)
from gristmill.mixtures.steps.asked_model import AskedModel, Budget

if TYPE_CHECKING:
    import httpx

WINDOW = 16
"""Requests per concurrent request that are started before the oldest is answered: a
slow answer does not stall the others.
"""
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.5, 60.0
CONNECT_SECONDS = 10.0
AGAIN = (408, 409, 425, 429)
"""Statuses that a retry may resolve, in addition to 5xx: timeout, conflict, too early,
too many requests.
"""
REFUSED = (400, 413, 422)
"""Statuses of a request that is invalid, too large or unprocessable; other requests may
succeed.
"""
PROGRESS_SECONDS = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


NO_BUDGET = Budget()


class AskingError(RuntimeError):
    """Answers are unavailable. The message says what to do; all answers received are
    stored.
    """


class BudgetSpentError(AskingError):
    """The budget does not cover another request."""


class _RefusedError(Exception):
    """The endpoint permanently refuses one request."""


@dataclass
class _Endpoint:
    """Address, number of open requests, and the time until which it accepts none."""

    url: Any
    masked_url: str
    on_their_way: int = 0
    closed_until: float = 0.0


@dataclass
class Tally:
    """Counts of requests: `asked` of the endpoint, `kept` from the store, retried,
    repaired, unusable.
    """

    asked: int = 0
    kept: int = 0
    retried: int = 0
    repaired: int = 0
    unusable: int = 0
    spent: Spending = field(default_factory=Spending)

    def as_json(self, model: AskedModel) -> RequestCounts:
        """Counts and costs for the summary."""
        counts = RequestCounts(
            model=model.called,
            asked=self.asked,
            kept=self.kept,
            retried=self.retried,
            repaired=self.repaired,
            unusable=self.unusable,
            prompt_tokens=self.spent.prompt_tokens,
            answer_tokens=self.spent.answer_tokens,
        )
        if model.prompt_price or model.answer_price:
            counts["money"] = round(self.spent.money(model), 6)
        return counts


class Asking:
    """Session with a model; its event loop runs in its own thread.

    Args:
        model: the model to ask.
        context: store of answers, and progress.
        total: number of requests, if known.
        path: of all requests behind the endpoint's address.
    """

    def __init__(
        self,
        model: AskedModel,
        context: Context,
        total: int | None = None,
        path: str = "/chat/completions",
    ) -> None:
        self.model, self.tally, self._path = model, Tally(), path
        self._context = context
        self._total = total
        self._done = 0
        self._told = 0.0
        self._identity: object = None
        if model.folder is not None:
            from gristmill.dataprep.readers.sources import outside_listing

            # distinguishes the files of a folder from others
            self._identity = outside_listing("folder", model.folder)
        self._opened = ExitStack()
        self._slots = asyncio.Semaphore(model.concurrency)
        self._in_flight: dict[str, asyncio.Task[Completion]] = {}
        self._reserved: dict[str, Spending] = {}
        self._settled = asyncio.Condition()
        self._ended: AskingError | None = None
        self._end = asyncio.Event()

    def __enter__(self) -> Self:
        import httpx

        with ExitStack() as stack:
            served_model = stack.enter_context(served(self.model, self._context))
            self._key = None
            if (variable := served_model.api_key_env) is not None:
                self._key = os.environ.get(variable, "").strip()
                if not self._key:
                    raise AskingError(
                        f"`api_key_env` names ${variable}, which is not set here; set "
                        "it in the environment of `gristmill run`"
                    )
                remember_secrets({"api_key": self._key})
            work = self._context.work
            # Spending adds up over all attempts at an output, whose name is the
            # answers' owner. A step may run inside another one.
            step_work = next(
                (path for path in (work, *work.parents) if path.name == "work"), work
            )
            self._kept = KeptAnswers(
                self._context.answers or work / "answers",
                settings_of(self.model, self._identity),
                step_work.parent.name.replace("~", "-") or self._context.stage,
            )
            stack.callback(self._kept.close)
            self.tally.spent = self._kept.spent
            self._named = canonical_json(
                {"model": self.model.called, "identity": self._identity}
            )
            self._endpoints = [
                _Endpoint(httpx.URL(url.rstrip("/") + self._path), mask_text(url))
                for url in served_model.endpoints
            ]
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._loop.run_forever, name="asking", daemon=True
            )
            thread.start()
            stack.callback(self._stop, thread)
            asyncio.run_coroutine_threadsafe(self._open_client(), self._loop).result()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    async def _open_client(self) -> None:
        import httpx

        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=self.model.concurrency
        )
        timeout = httpx.Timeout(
            self.model.timeout_seconds,
            connect=min(CONNECT_SECONDS, self.model.timeout_seconds),
            pool=None,
        )
        # Proxies from the environment cannot reach this machine's loopback address.
        is_loopback = all(endpoint.url.host in LOOPBACK for endpoint in self._endpoints)
        self._client = httpx.AsyncClient(
            limits=limits, timeout=timeout, trust_env=not is_loopback
        )
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "user-agent": "gristmill",
        }
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        self._headers = httpx.Headers(headers)

    def _stop(self, thread: threading.Thread) -> None:
        async def close() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def _body(self, messages: Sequence[Message], request: Request) -> bytes:
        model = self.model
        if request.ids:
            scoring = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            return canonical_json(
                {"model": model.called, "prompt": list(request.ids), **scoring}
            )
        body: dict[str, object] = {
            "model": model.called,
            "messages": messages
            if model.system is None
            else [{"role": "system", "content": model.system}, *messages],
            **_drawn(model, request.number),
        }
        if request.schema is not None and model.response_format != "none":
            response_format: dict[str, object] = {"type": model.response_format}
            if model.response_format == "json_schema":
                schema = {"name": "answer", "schema": request.schema}
                response_format["json_schema"] = schema
            body["response_format"] = response_format
        return canonical_json(body)

    def expect(self, requests: int) -> None:
        """Add to the number of expected requests, for progress and messages about the
        budget.
        """
        self._total = (self._total or 0) + requests

    def answers(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Answer requests, in their order.

        Raises:
            AskingError: the endpoint does not answer, or refuses all requests; the
                budget is spent.
        """
        window: deque[Future[Answer] | Answer] = deque()
        window_size = WINDOW * self.model.concurrency
        remaining = iter(requests)
        try:
            while True:
                for request in islice(remaining, window_size - len(window)):
                    window.append(self._begin(request))
                if not window:
                    break
                first = window.popleft()
                answer = first if isinstance(first, Answer) else first.result()
                self.tally.unusable += answer.error is not None
                self.tally.repaired += answer.repaired
                self._progress()
                yield answer
            self._progress(at_end=True)
        except AskingError:
            # Requests in flight are paid for: wait for their answers and store them.
            for pending in window:
                if isinstance(pending, Future):
                    pending.exception()
            raise

    def _begin(self, request: Request) -> Future[Answer] | Answer:
        """The stored answer, or a future of it."""
        body = self._body(request.messages, request)
        key = key_of(self._named, body, request.number)
        stored = self._kept.find(key)
        if stored is not None:
            answer, error = self._checked(request, stored)
            if error is None:
                self.tally.kept += 1  # in this thread alone
                if further := _further_documents(stored, request):
                    self._loop.call_soon_threadsafe(self._kept.note, key, further)
                return answer
        return asyncio.run_coroutine_threadsafe(self._settle(request, body), self._loop)

    def _checked(
        self, request: Request, stored: Completion
    ) -> tuple[Answer, str | None]:
        """Answer, and the problem with its form or None."""
        text = stored["text"]
        finish = stored["finish"]
        if request.schema is None:
            return Answer(text, finish=finish), None
        if request.pattern is not None:
            value, error = read_pattern_answer(text, request.pattern, request.schema)
        else:
            value, error = read_json_answer(text, request.schema)
        if error is not None and finish == "length":
            error = (
                f"it was cut at {self.model.max_tokens} tokens (`max_tokens`): {error}"
            )
        return Answer(text, value, finish=finish), error

    async def _settle(self, request: Request, body: bytes) -> Answer:
        """Ask, and ask again for a repair if the answer has the wrong form."""
        try:
            answer, error = self._checked(request, await self._answer(body, request))
            if error is None:
                return answer
            if request.pattern is not None:  # a classifier has no other answer
                return replace(answer, error=error)
            assert request.schema is not None
            schema = json.dumps(request.schema, sort_keys=True)
            correction = (
                f"This answer cannot be used: {error}. Answer again, with nothing but "
                f"a JSON object of this schema:\n{schema}"
            )
            repair_body = self._body(
                [
                    *request.messages,
                    {"role": "assistant", "content": answer.text or "(nothing)"},
                    {"role": "user", "content": correction},
                ],
                request,
            )
            answer, error = self._checked(
                request, await self._answer(repair_body, request)
            )
        except _RefusedError as refused:
            return Answer("", error=str(refused))
        problem = (
            None
            if error is None
            else f"{error} (after one repair): {shorten(answer.text)}"
        )
        return replace(answer, error=problem, repaired=True)

    async def _answer(self, body: bytes, request: Request) -> Completion:
        """Answer to a body: stored, in flight for another request, or asked for now."""
        key = key_of(self._named, body, request.number)
        stored = self._kept.find(key)
        if stored is None:
            task = self._in_flight.get(key)
            if task is None:
                task = self._in_flight[key] = asyncio.create_task(
                    self._ask(key, body, request.about)
                )
                task.add_done_callback(lambda task: self._in_flight.pop(key, None))
            shielded: asyncio.Future[Completion] = asyncio.shield(task)
            stored = await shielded
        self._kept.note(key, _further_documents(stored, request))
        return stored

    async def _ask(self, key: str, body: bytes, about: str | None) -> Completion:
        async with self._slots:
            try:
                await self._reserve(key, body)
                stored = self._kept.keep(key, await self._ask_with_retries(body), about)
                self.tally.asked += 1
                self.tally.spent += spending_on(stored)
                return stored
            except AskingError as error:
                self._ended = self._ended or error
                self._end.set()
                raise
            finally:
                if self._reserved.pop(key, None) is not None:
                    async with self._settled:
                        self._settled.notify_all()

    async def _reserve(self, key: str, body: bytes) -> None:
        """Wait until the budget covers the largest cost of a request in addition to all
        requests in flight.

        Raises:
            BudgetSpentError: the budget does not cover it, and no request is in flight.
        """
        # a token has at least one byte
        upper_bound = Spending(1, len(body) + BESIDE_TOKENS, self.model.max_tokens)
        while True:
            if self._ended is not None:
                raise self._ended
            if self.model.budget == NO_BUDGET:
                return
            spending = sum(self._reserved.values(), self.tally.spent + upper_bound)
            spent = exceeded(self.model, spending)
            if spent is None:
                self._reserved[key] = upper_bound
                return
            if not self._reserved:
                total = f" of {self._total:,}" if self._total else ""
                money = self.tally.spent.money(self.model)
                cost = f" for {money:,.6g}" if spent == "money" else ""
                raise BudgetSpentError(
                    f"{self._context.stage}: the budget of "
                    f"{getattr(self.model.budget, spent):,} {spent} does not cover one "
                    f"more request: {self.tally.spent.requests:,}{total} requests with "
                    f"{self.tally.spent.tokens:,} tokens{cost} are answered, and kept; "
                    f"raise `budget.{spent}` and run again, which asks only for the "
                    "others"
                )
            async with self._settled:
                await self._settled.wait()

    async def _ask_with_retries(self, body: bytes) -> Completion:
        """Send a request until it is answered.

        Raises:
            _RefusedError: the endpoint permanently refuses it.
            AskingError: no answer within `patience_seconds`, or the endpoint refuses
                all requests.
        """
        start = time.monotonic()
        wait = FIRST_WAIT_SECONDS
        endpoint: _Endpoint | None = None
        while True:
            # The endpoint that opens first and has the fewest requests; not the last
            # one again, unless it is the only one.
            now = time.monotonic()
            last = endpoint
            endpoint = min(
                self._endpoints,
                key=lambda candidate: (
                    candidate is last,
                    max(candidate.closed_until, now),
                    candidate.on_their_way,
                ),
            )
            if (seconds_closed := endpoint.closed_until - time.monotonic()) > 0:
                await self._pause(seconds_closed)
            problem, retry_after = await self._try(endpoint, body)
            if not isinstance(problem, str):
                return problem
            self.tally.retried += 1
            pause = max(retry_after, random.uniform(0, wait))
            seconds = time.monotonic() - start
            if seconds + pause > self.model.patience_seconds:
                problem = f"no answer from {endpoint.masked_url} within {seconds:,.0f} s: {problem}"
                if retry_after > self.model.patience_seconds:
                    problem += (
                        f", which wants to be asked again in {retry_after:,.0f} s"
                    )
                if self.model.unanswered == "quarantine":
                    raise _RefusedError(problem)
                raise AskingError(
                    f"{self._context.stage}: {problem}; all answers so far are kept: "
                    "see that it runs, and run again, which asks only for the others "
                    "(or give it more `patience_seconds`)"
                )
            wait = min(2 * wait, MOST_WAIT_SECONDS)
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Sleep, or raise as soon as asking has failed.

        Raises:
            AskingError: the failure.
        """
        try:
            await asyncio.wait_for(self._end.wait(), seconds)
        except TimeoutError:
            return
        assert self._ended is not None
        raise self._ended

    async def _try(
        self, endpoint: _Endpoint, body: bytes
    ) -> tuple[Completion | str, float]:
        """Response, or a problem and the least seconds before a retry."""
        import httpx

        request = httpx.Request(
            "POST",
            endpoint.url,
            headers=self._headers,
            content=body,
            extensions={"timeout": self._client.timeout.as_dict()},
        )
        endpoint.on_their_way += 1
        try:
            async with asyncio.timeout(self.model.timeout_seconds):
                response = await self._client.send(request)
        except (TimeoutError, httpx.TimeoutException):
            return (
                f"a try took more than {self.model.timeout_seconds:g} s "
                "(`timeout_seconds`)",
                0.0,
            )
        except httpx.HTTPError as error:
            return mask_text(
                f"{type(error).__name__}: "
                f"{shorten(str(error)) or 'the connection was dropped'}"
            ), 0.0
        finally:
            endpoint.on_their_way -= 1
        if response.status_code == httpx.codes.OK:
            return read_completion(response), 0.0
        return self._refusal(endpoint, response)

    def _refusal(
        self, endpoint: _Endpoint, response: httpx.Response
    ) -> tuple[str, float]:
        """Problem of a status other than 200, and the least seconds before a retry.

        Raises:
            _RefusedError: the endpoint permanently refuses this request.
            AskingError: the endpoint refuses all requests.
        """
        status = response.status_code
        message = read_refusal(response)
        if status in AGAIN or status >= 500:
            retry_after = read_retry_after(response.headers.get("retry-after"))
            endpoint.closed_until = max(
                endpoint.closed_until, time.monotonic() + retry_after
            )
            return f"{status} {message}", retry_after
        if status in REFUSED:
            raise _RefusedError(
                f"{endpoint.masked_url} refuses the request: {status} {message}"
            )
        key = self.model.api_key_env
        remedies = {
            401: f"correct the key in ${key}"
            if key
            else "name the variable of a key (`api_key_env`)",
            403: f"the key in ${key} may not ask this model"
            if key
            else "it wants a key (`api_key_env`)",
            404: "see that the address is right, and that it has a model "
            f"{self.model.called!r}",
        }
        raise AskingError(
            f"{self._context.stage}: {endpoint.masked_url} refuses all requests: {status} "
            f"{message}; {remedies.get(status, 'correct `endpoint`')}"
        )

    def _progress(self, at_end: bool = False) -> None:
        self._done += not at_end
        now = time.monotonic()
        if at_end or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self._context.progress(
                self._done, max(self._total or 0, self._done), "requests", job="ask"
            )


def settings_of(model: AskedModel, identity: Any) -> Settings:
    """Settings that stored answers depend on: the model, its identity and its
    sampling.
    """
    return {"model": model.called, "identity": identity, **_drawn(model, 0)}


def _drawn(model: AskedModel, number: int) -> Settings:
    """Part of a request's body that does not depend on the prompt."""
    seed = {} if model.seed is None else {"seed": model.seed + number}
    return {
        **model.body,
        "temperature": model.temperature,
        "top_p": model.top_p,
        "max_tokens": model.max_tokens,
        **seed,
    }


def _further_documents(stored: Completion, request: Request) -> str:
    """Documents of a request other than the one that its stored answer names."""
    return " ".join(
        document
        for document in (request.about or "").split()
        if document != stored.get("of")
    )
