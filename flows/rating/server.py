"""`gristmill rate`: pages in which people compare blinded answers, on the loopback
address.

No page shows which model gave an answer. Pages of other sites can neither read a page
nor rate: a form must contain a token that only pages of this server have.
"""

from __future__ import annotations

import hmac
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.models.generate import PromptsError, read_prompts
from gristmill.flows.pages.page_elements import (
    Button,
    Field,
    Form,
    Heading,
    Inline,
    Link,
    Links,
    Note,
    Page,
    Part,
    Progress,
    Sides,
    Span,
    Text,
    page_of,
)
from gristmill.flows.pages.page_server import (
    GuardedApp,
    PortError,
    listen_locally,
    page_app,
    page_response,
    serve_pages,
)
from gristmill.flows.rating.answer_pairs import AnswerPair, make_pairs, models_to_rate
from gristmill.flows.rating.ratings import (
    VERDICTS,
    RatingFiles,
    Verdict,
    add_rating,
    read_ratings,
    write_settled,
)
from gristmill.flows.running.session import Session
from gristmill.train.generation.sampling import Sampling, SamplingError

RATER = re.compile(r"[\w .@+-]{1,60}")
"""Allowed names of raters."""
MOST_BYTES = 10_000
"""Maximum size of a submitted form."""
CHOICES = {
    "left": ("Left is better", "ArrowLeft 1", "←"),
    "tie": ("Tie", "ArrowUp t 0", "t"),
    "both_bad": ("Both bad", "ArrowDown b", "b"),
    "right": ("Right is better", "ArrowRight 2", "→"),
}
"""Choice -> text of its button, keys that press it, and the key that is shown."""


class RatingPages:
    """The pages of a set of pairs.

    Args:
        pairs: answer pairs to rate.
        ratings: the file to which ratings are added.
        settled: the file of settled pairs, which is rewritten with each rating.
        results: the command that prints the results.
    """

    def __init__(
        self, pairs: Sequence[AnswerPair], ratings: Path, settled: Path, results: str
    ) -> None:
        self._pairs = {pair.id: pair for pair in pairs}
        self._ratings = ratings
        self._settled = settled
        self._results = results
        self._form_token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._verdicts: dict[str, dict[str, Verdict]] = {}
        for rating in read_ratings(ratings):
            if rating["pair"] in self._pairs:
                self._verdicts.setdefault(rating["rater"], {})[rating["pair"]] = rating[
                    "verdict"
                ]

    def app(self) -> GuardedApp:
        """The application that answers."""
        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/rate", self._rate, methods=["POST"]),
        ]
        return page_app(routes, has_keys=True)

    def _page(self, request: Request) -> Response:
        """The next pair of a rater, an earlier one, or the form for the rater's name."""
        rater = request.query_params.get("rater", "").strip()
        if not RATER.fullmatch(rater):
            intro = (
                "You will see pairs of answers, and say which is better. Whose they "
                "are is not told, and the sides are drawn by lot."
            )
            rule = "A name has letters, digits, blanks and . _ @ + -, 60 at the most."
            field = Field(
                "rater", "Your name", most=60, is_required=True, is_focused=True
            )
            raters = [Link(name, _rater_page(name)) for name in sorted(self._verdicts)]
            page = page_of(
                "Who rates?",
                Note(intro, "plain"),
                Note(rule, "warning") if rater else None,
                Form("/", [field], [Button("Begin")]),
                Links(raters, "Go on as"),
            )
            status = HTTPStatus.BAD_REQUEST if rater else HTTPStatus.OK
            return page_response(page, status, has_keys=True)
        verdicts = self._verdicts.get(rater, {})
        order = sorted(self._pairs.values(), key=lambda pair: pair.place(rater))
        unrated = next((pair for pair in order if pair.id not in verdicts), None)
        pair = self._pairs.get(request.query_params.get("pair", "")) or unrated
        end = len(order)
        if pair is None:
            thanks = "Thank you. Each rating is on disk. What they come to prints:"
            results = Text([Span(self._results)])
            page = page_of("All rated", Note(thanks, "plain"), results)
        else:
            end = order.index(pair)
            page = self._pair_page(pair, rater, verdicts.get(pair.id))
        rated = [entry.id for entry in order[:end] if entry.id in verdicts]
        done = sum(entry.id in verdicts for entry in order)
        links: list[Inline] = [Link("Another rater", "/")]
        if rated:
            before = _rater_page(rater, pair=rated[-1])
            links.insert(0, Link("Back to the one before", before, keys="u Backspace"))
        text = f"{rater}: {done:,} of {len(order):,} rated"
        header: list[Part] = [Progress(text, done, len(order)), Links(links)]
        return page_response(replace(page, header=header), has_keys=True)

    def _pair_page(self, pair: AnswerPair, rater: str, verdict: Verdict | None) -> Page:
        """A prompt, its two answers, and the buttons; `verdict` is that of an earlier
        rating.
        """
        again = "You have rated this one; what you say now counts instead."
        turns: list[Part] = []
        if isinstance(pair.prompt, str):
            turns.append(Text([Span(pair.prompt)], "prompt"))
        else:
            for turn in pair.prompt:
                text = Text([Span(turn["content"])], "prompt")
                turns += [Heading(turn["role"]), text]
        is_swapped = pair.is_swapped(rater)
        answers = pair.answers[::-1] if is_swapped else pair.answers
        sides = [
            (side, [Text([Span(answer.strip() or "(nothing)")], "answer")])
            for side, answer in zip(("Left", "Right"), answers, strict=True)
        ]
        buttons = []
        for choice, (label, keys, hint) in CHOICES.items():
            is_pressed = verdict_of(pair, rater, choice) == verdict
            buttons.append(Button(label, "choice", choice, keys, hint, is_pressed))
        hidden = {"token": self._form_token, "pair": pair.id, "rater": rater}
        return page_of(
            "Which answer is better?",
            again if verdict else None,
            turns,
            Sides(sides),
            Form("/rate", [], buttons, hidden, "choices", "post"),
        )

    async def _rate(self, request: Request) -> Response:
        """Keep a rating; leads to the next pair."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return PlainTextResponse(
                    "too much", HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                )
        form = dict(parse_qsl(body.decode("utf-8", "replace")))
        if not hmac.compare_digest(
            form.get("token", "").encode(), self._form_token.encode()
        ):
            return PlainTextResponse(
                "This page is of a server that has ended, or of another site. Open / "
                "again; all that was rated is kept.",
                HTTPStatus.FORBIDDEN,
            )
        pair = self._pairs.get(form.get("pair", ""))
        rater, choice = form.get("rater", ""), form.get("choice", "")
        if pair is None or not RATER.fullmatch(rater) or choice not in CHOICES:
            return PlainTextResponse(
                "no such pair, rater or choice", HTTPStatus.BAD_REQUEST
            )
        verdict = verdict_of(pair, rater, choice)
        with self._lock:
            add_rating(self._ratings, pair, rater, verdict)
            self._verdicts.setdefault(rater, {})[pair.id] = verdict
            write_settled(read_ratings(self._ratings), self._settled)
        return RedirectResponse(_rater_page(rater), HTTPStatus.SEE_OTHER)


def _rater_page(rater: str, **parameters: str) -> str:
    return "/?" + urlencode({"rater": rater, **parameters})


def verdict_of(pair: AnswerPair, rater: str, choice: str) -> Verdict:
    """The verdict on the two models of a choice of a side."""
    for verdict in VERDICTS:
        if choice == verdict:
            return verdict
    return "second" if (choice == "left") == pair.is_swapped(rater) else "first"


class RateProblemError(ValueError):
    """There is nothing to rate, or no page to rate it in."""


def serve_pairs(
    session: Session,
    other: Session | None,
    first: str | None,
    second: str | None,
    prompts: Path,
    files: RatingFiles,
    sampling: tuple[float, float, int],
    max_new_tokens: int,
    port: int,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        session, other, first, second: the compared models; see `models_to_rate`.
        prompts: the file of prompts.
        files: of the ratings.
        sampling: temperature, top_p and seed of the answers.
        max_new_tokens: longest answer.
        port: of the loopback address.

    Raises:
        RateProblemError: with what to do.
        RatingsError: the file of ratings cannot be read.
    """
    read_ratings(files.ratings)
    try:
        prompts_by_line, answer_sampling = read_prompts(prompts), Sampling(*sampling)
        models = models_to_rate(session, other, first, second)
        listening = listen_locally(port)
    except (PromptsError, SamplingError, ModelNotFoundError, PortError) as error:
        raise RateProblemError(str(error)) from error
    try:
        answer_pairs = make_pairs(
            models, prompts_by_line, answer_sampling, max_new_tokens, files.answers
        )
    except (FileNotFoundError, ValueError) as error:
        raise RateProblemError(str(error)) from error
    for number, cause in answer_pairs.failed.items():
        print(f"{prompts}, line {number} is left out: {cause}", file=sys.stderr)
    if answer_pairs.same:
        print(
            f"{answer_pairs.same:,} prompts are left out: both models answer them alike",
            file=sys.stderr,
        )
    if not answer_pairs.pairs:
        raise RateProblemError(
            f"no prompt of {prompts} has two answers that differ; "
            "there is nothing to rate"
        )
    write_settled(read_ratings(files.ratings), files.settled)
    pages = RatingPages(
        answer_pairs.pairs,
        files.ratings,
        files.settled,
        session.command("rate", "--results"),
    )
    purpose = (
        f"asks about {len(answer_pairs.pairs):,} pairs; ratings go to {files.ratings}"
    )
    serve_pages(pages.app(), listening, purpose)
