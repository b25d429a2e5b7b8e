"""Who answers a prompt: a client of OpenAI's chat completions API that asks many at a time, and nothing twice.

    for answer in ask(requests, model, context):   # in the order of the requests
        ...

What fails on the way is sent again: 408, 409, 425, 429 and 5xx, timeouts, dropped connections, bodies that are no
completion. Between two tries of a request lie FIRST_WAIT_SECONDS, twice as long each time up to MOST_WAIT_SECONDS, of
which a random part is waited ("full jitter": Brooker 2015, AWS Architecture Blog), and no less than Retry-After says,
which all requests to that endpoint respect. What an endpoint refuses for good (400, 413, 422) is the error of that
request. A stage that ends early, by an outage or by its budget, has kept every answer that it was given.

Memory: up to WINDOW requests and as many answers are held per request on its way, and the index of the kept answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from gristmill.dataprep.asking.answer_store import KeptAnswers, key_of
from gristmill.dataprep.asking.prompting import Answer, Message, Request, read_json_answer, repair_messages, shorten
from gristmill.dataprep.asking.replies import read_completion, read_refusal, read_retry_after
from gristmill.dataprep.asking.served_folder import served
from gristmill.dataprep.asking.spending import Spending, exceeded, most_spent, spending_of
from gristmill.dataprep.context import Context
from gristmill.dataprep.files import canonical_json
from gristmill.dataprep.secrets import mask_text, remember_secrets
from gristmill.mixtures.steps.asked_model import AskedModel, Budget

if TYPE_CHECKING:
    import httpx

WINDOW = 16
"""Requests that are begun before the oldest is answered, for each that may be on its way: one slow answer does not keep
all others waiting."""
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.5, 60.0
CONNECT_SECONDS = 10.0
AGAIN = (408, 409, 425, 429)
"""Answers that may be others a moment later, beside 5xx: timeout, conflict, too early, too many requests."""
REFUSED = (400, 413, 422)
"""The request is wrong, too large, or cannot be processed: all others may be answered."""
PROGRESS_SECONDS = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


NO_BUDGET = Budget()


class AskingError(RuntimeError):
    """Answers cannot be had, with what to do; all that were given are kept."""


class BudgetSpentError(AskingError):
    """The budget does not cover one more request."""


class _RefusedError(Exception):
    """The endpoint refuses this one request for good."""


def ask(requests: Iterable[Request], model: AskedModel, context: Context, total: int | None = None) -> Iterator[Answer]:
    """Answer requests, in their order.

    Args:
        requests: as many as there are; they are taken a few at a time.
        model: who answers.
        context: where answers are kept, and who is told how far it is.
        total: how many requests there are, where that is known.

    Raises:
        AskingError: the endpoint does not answer, or refuses all requests; the budget is spent.
    """
    with Asking(model, context, total) as asking:
        yield from asking.answers(requests)


@dataclass
class _Endpoint:
    """An address, how many requests it has, and until when it wants no others."""

    url: Any
    shown: str
    on_their_way: int = 0
    closed_until: float = 0.0


@dataclass
class Tally:
    """What asking came to: `asked` of the endpoint, `kept` from before, sent again, asked to repair, refused."""

    asked: int = 0
    kept: int = 0
    retried: int = 0
    repaired: int = 0
    unusable: int = 0
    spent: Spending = field(default_factory=Spending)

    def as_json(self, model: AskedModel) -> dict[str, Any]:
        """For a summary."""
        money = {"money": round(self.spent.money(model), 6)} if model.prompt_price or model.answer_price else {}
        return {
            "model": model.called,
            "asked": self.asked,
            "kept": self.kept,
            "retried": self.retried,
            "repaired": self.repaired,
            "unusable": self.unusable,
            "prompt_tokens": self.spent.prompt_tokens,
            "answer_tokens": self.spent.answer_tokens,
            **money,
        }


class Asking:
    """A model that is being asked; its event loop runs in a thread of its own.

    Args:
        model: who answers.
        context: where answers are kept, and who is told how far it is.
        total: how many requests there are, where that is known.
        identity: what tells the model from another one of the same name: its files.
    """

    def __init__(self, model: AskedModel, context: Context, total: int | None = None, identity: Any = None) -> None:
        self.model, self.tally = model, Tally()
        self._context, self._total, self._done, self._told = context, total, 0, 0.0
        self._identity = identity if identity is not None or model.folder is None else _identify(model)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            served_model = opened.enter_context(served(self.model, self._context))
            self._key = _api_key(served_model)
            self._kept = KeptAnswers(
                self._context.answers or self._context.work / "answers",
                settings_of(self.model, self._identity),
                self._owner(),
            )
            opened.callback(self._kept.close)
            self.tally.spent = spending_of(self._kept.spent)
            self._named = canonical_json({"model": self.model.called, "identity": self._identity})
            self._endpoints = [_endpoint(url) for url in served_model.endpoints]
            self._loop = asyncio.new_event_loop()
            self._slots = asyncio.Semaphore(self.model.concurrency)
            self._flying: dict[str, asyncio.Task[dict[str, Any]]] = {}
            self._reserved: dict[str, Spending] = {}
            self._settled = asyncio.Condition()
            self._ended: AskingError | None = None
            self._end = asyncio.Event()
            thread = threading.Thread(target=self._loop.run_forever, name="asking", daemon=True)
            thread.start()
            opened.callback(self._stop, thread)
            asyncio.run_coroutine_threadsafe(self._open_client(), self._loop).result()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    async def _open_client(self) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.model.concurrency)
        timeout = httpx.Timeout(
            self.model.timeout_seconds, connect=min(CONNECT_SECONDS, self.model.timeout_seconds), pool=None
        )
        # A proxy of the environment does not know this machine's own addresses.
        here = all(one.url.host in LOOPBACK for one in self._endpoints)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=not here)
        headers = {"content-type": "application/json", "accept": "application/json", "user-agent": "gristmill"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        self._headers = httpx.Headers(headers)

    def _stop(self, thread: threading.Thread) -> None:
        async def close() -> None:
            tasks = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def _owner(self) -> str:
        """The output that is being made, by which its spending is known over all attempts."""
        work = self._context.work
        own = next((one for one in (work, *work.parents) if one.name == "work"), work)  # perhaps of a step inside
        return own.parent.name.replace("~", "-") or self._context.stage

    def _body(self, messages: Sequence[Message], request: Request) -> bytes:
        model = self.model
        wanted: dict[str, Any] = {}
        if request.schema is not None and model.response_format != "none":
            of_schema = {"json_schema": {"name": "answer", "schema": request.schema}}
            wanted = {
                "response_format": {
                    "type": model.response_format,
                    **(of_schema if model.response_format == "json_schema" else {}),
                }
            }
        system = [] if model.system is None else [{"role": "system", "content": model.system}]
        return canonical_json(
            {"model": model.called, "messages": [*system, *messages], **_drawn(model, request.number), **wanted}
        )

    def expect(self, requests: int) -> None:
        """So many more requests will come: progress, and messages about the budget, are out of all of them."""
        self._total = (self._total or 0) + requests

    def answers(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Answer requests, in their order.

        Raises:
            AskingError: see `ask`.
        """
        window: deque[Future[Answer] | Answer] = deque()
        most, waiting = WINDOW * self.model.concurrency, iter(requests)
        try:
            while True:
                while len(window) < most and (request := next(waiting, None)) is not None:
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
            # What is on its way has been asked for: it is waited for and kept.
            for one in window:
                if isinstance(one, Future):
                    one.exception()
            raise

    def _begin(self, request: Request) -> Future[Answer] | Answer:
        """The answer where it is kept, else what will give it."""
        body = self._body(request.messages, request)
        key = key_of(self._named, body, request.number)
        found = self._kept.find(key)
        if found is not None:
            answer, error = self._usable(request, found)
            if error is None:
                self.tally.kept += 1  # in this thread alone
                if news := _news(found, request):
                    self._loop.call_soon_threadsafe(self._kept.note, key, news)
                return answer
        return asyncio.run_coroutine_threadsafe(self._settle(request, body), self._loop)

    def _usable(self, request: Request, found: Mapping[str, Any]) -> tuple[Answer, str | None]:
        """An answer, and what is wrong with its form."""
        text, finish = found["text"], found["finish"]
        if request.schema is None:
            return Answer(text, finish=finish), None
        value, error = read_json_answer(text, request.schema)
        if error is not None and finish == "length":
            error = f"it was cut at {self.model.max_tokens} tokens (`max_tokens`): {error}"
        return Answer(text, value, finish=finish), error

    async def _settle(self, request: Request, body: bytes) -> Answer:
        """Ask, and where the answer has not the form that is wanted, once more."""
        try:
            answer, error = self._usable(request, await self._answer(body, request))
            if error is None:
                return answer
            assert request.schema is not None
            again = self._body(repair_messages(request.messages, answer.text, error, request.schema), request)
            answer, error = self._usable(request, await self._answer(again, request))
        except _RefusedError as refused:
            return Answer("", error=str(refused))
        problem = None if error is None else f"{error} (after one repair): {shorten(answer.text)}"
        return replace(answer, error=problem, repaired=True)

    async def _answer(self, body: bytes, request: Request) -> dict[str, Any]:
        """The answer to a body: kept, on its way for another request, or asked for now."""
        key = key_of(self._named, body, request.number)
        found = self._kept.find(key)
        if found is None:
            task = self._flying.get(key)
            if task is None:
                task = self._flying[key] = asyncio.create_task(self._ask(key, body, request.about))
                task.add_done_callback(lambda done: self._flying.pop(key, None))
            found = await asyncio.shield(task)
        self._kept.note(key, _news(found, request))
        return found

    async def _ask(self, key: str, body: bytes, about: str | None) -> dict[str, Any]:
        async with self._slots:
            try:
                await self._reserve(key, body)
                found = self._kept.keep(key, await self._insist(body), about)
                self.tally.asked += 1
                self.tally.spent += Spending(1, found["prompt_tokens"], found["answer_tokens"])
                return found
            except AskingError as error:
                self._give_up(error)
                raise
            finally:
                if self._reserved.pop(key, None) is not None:
                    async with self._settled:
                        self._settled.notify_all()

    def _give_up(self, error: AskingError) -> None:
        self._ended = self._ended or error
        self._end.set()

    async def _reserve(self, key: str, body: bytes) -> None:
        """Wait until the budget covers a request, whatever it may cost, beside all that are on their way.

        Raises:
            BudgetSpentError: it does not, with none on its way.
        """
        most = most_spent(self.model, body)
        while True:
            if self._ended is not None:
                raise self._ended
            if self.model.budget == NO_BUDGET:
                return
            held = sum(self._reserved.values(), self.tally.spent + most)
            spent = exceeded(self.model, held)
            if spent is None:
                self._reserved[key] = most
                return
            if not self._reserved:
                raise BudgetSpentError(self._of_budget(spent))
            async with self._settled:
                await self._settled.wait()

    def _of_budget(self, key: str) -> str:
        spent, limit = self.tally.spent, getattr(self.model.budget, key)
        of = f" of {self._total:,}" if self._total else ""
        money = f" for {spent.money(self.model):,.6g}" if key == "money" else ""
        return (
            f"{self._context.stage}: the budget of {limit:,} {key} does not cover one more request: "
            f"{spent.requests:,}{of} requests with {spent.tokens:,} tokens{money} are answered, and kept; raise "
            f"`budget.{key}` and run again, which asks only for the others"
        )

    async def _insist(self, body: bytes) -> dict[str, Any]:
        """Send a request until it is answered.

        Raises:
            _RefusedError: it is refused for good.
            AskingError: it is not answered in time, or all requests would be refused.
        """
        begun, wait, tried = time.monotonic(), FIRST_WAIT_SECONDS, list[_Endpoint]()
        while True:
            endpoint = self._choose(tried)
            if (closed := endpoint.closed_until - time.monotonic()) > 0:
                await self._pause(closed)
            problem, least = await self._try(endpoint, body)
            if isinstance(problem, dict):
                return problem
            self.tally.retried += 1
            tried = [endpoint]
            pause = max(least, random.uniform(0, wait))
            if time.monotonic() + pause - begun > self.model.patience_seconds:
                self._fail(endpoint, problem, time.monotonic() - begun, least)
            wait = min(2 * wait, MOST_WAIT_SECONDS)
            await self._pause(pause)

    def _fail(self, endpoint: _Endpoint, problem: str, seconds: float, least: float) -> None:
        said = f"no answer from {endpoint.shown} within {seconds:,.0f} s: {problem}"
        if least > self.model.patience_seconds:
            said += f", which wants to be asked again in {least:,.0f} s"
        if self.model.unanswered == "quarantine":
            raise _RefusedError(said)
        raise AskingError(
            f"{self._context.stage}: {said}; all answers so far are kept: see that it runs, and run "
            "again, which asks only for the others (or give it more `patience_seconds`)"
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, unless asking has ended.

        Raises:
            AskingError: why it has.
        """
        try:
            await asyncio.wait_for(self._end.wait(), seconds)
        except TimeoutError:
            return
        assert self._ended is not None
        raise self._ended

    def _choose(self, but: Sequence[_Endpoint]) -> _Endpoint:
        """The endpoint that is free first, and has the fewest requests; not the last one where there are others."""
        others = [one for one in self._endpoints if one not in but] or self._endpoints
        now = time.monotonic()
        return min(others, key=lambda one: (max(one.closed_until, now), one.on_their_way))

    async def _try(self, endpoint: _Endpoint, body: bytes) -> tuple[dict[str, Any] | str, float]:
        """The answer, or why there is none yet and the seconds until it may be asked for again."""
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
            return f"a try took more than {self.model.timeout_seconds:g} s (`timeout_seconds`)", 0.0
        except httpx.HTTPError as error:
            return mask_text(f"{type(error).__name__}: {shorten(str(error)) or 'the connection was dropped'}"), 0.0
        finally:
            endpoint.on_their_way -= 1
        if response.status_code == httpx.codes.OK:
            return read_completion(response), 0.0
        return self._refusal(endpoint, response)

    def _refusal(self, endpoint: _Endpoint, response: httpx.Response) -> tuple[str, float]:
        """What a status says that is not 200.

        Raises:
            _RefusedError: this request is refused for good.
            AskingError: all requests would be.
        """
        status, said = response.status_code, read_refusal(response)
        if status in AGAIN or status >= 500:
            least = read_retry_after(response.headers.get("retry-after"))
            endpoint.closed_until = max(endpoint.closed_until, time.monotonic() + least)
            return f"{status} {said}", least
        if status in REFUSED:
            raise _RefusedError(f"{endpoint.shown} refuses the request: {status} {said}")
        key = self.model.api_key_env
        what = {
            401: f"correct the key in ${key}" if key else "name the variable of a key (`api_key_env`)",
            403: f"the key in ${key} may not ask this model" if key else "it wants a key (`api_key_env`)",
            404: f"see that the address is right, and that it has a model {self.model.called!r}",
        }
        raise AskingError(
            f"{self._context.stage}: {endpoint.shown} refuses all requests: {status} {said}; "
            f"{what.get(status, 'correct `endpoint`')}"
        )

    def _progress(self, at_end: bool = False) -> None:
        self._done += not at_end
        now = time.monotonic()
        if at_end or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self._context.progress(self._done, max(self._total or 0, self._done), "requests", job="ask")


def settings_of(model: AskedModel, identity: Any) -> dict[str, Any]:
    """What answers are kept under: the model, what tells it from another of its name, and how answers are drawn."""
    return {"model": model.called, "identity": identity, **_drawn(model, 0)}


def _drawn(model: AskedModel, number: int) -> dict[str, Any]:
    """The part of a request's body that is the same for all prompts."""
    seed = {} if model.seed is None else {"seed": model.seed + number}
    return {
        **model.body,
        "temperature": model.temperature,
        "top_p": model.top_p,
        "max_tokens": model.max_tokens,
        **seed,
    }


def _news(found: Mapping[str, Any], request: Request) -> str:
    """The documents of a request, but that which its kept answer was first given for."""
    return " ".join(one for one in (request.about or "").split() if one != found.get("of"))


def _endpoint(url: str) -> _Endpoint:
    import httpx

    parsed = httpx.URL(url.rstrip("/") + "/chat/completions")
    return _Endpoint(parsed, mask_text(url))


def _api_key(model: AskedModel) -> str | None:
    """The key, which is masked from now on wherever this process writes.

    Raises:
        AskingError: there is none.
    """
    if model.api_key_env is None:
        return None
    key = os.environ.get(model.api_key_env, "").strip()
    if not key:
        raise AskingError(
            f"`api_key_env` names ${model.api_key_env}, which is not set here; set it in the environment "
            "of `gristmill run`"
        )
    remember_secrets({"api_key": key})
    return key


def _identify(model: AskedModel) -> Any:
    """What tells the files of a folder from others."""
    from gristmill.dataprep.reading.sources import outside_listing

    return outside_listing("folder", str(model.folder))
