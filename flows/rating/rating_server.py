"""`gristmill rate`: pages in which people compare blinded answers, on the loopback
address.

No page says whose an answer is. Pages of other sites can neither read one nor rate: a
form must hold a token that only a page of this server has.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

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
from gristmill.flows.pages.page_server import GuardedApp, page_app, page_response
from gristmill.flows.rating.answer_pairs import AnswerPair
from gristmill.flows.rating.ratings import (
    Verdict,
    add_rating,
    read_ratings,
    write_settled,
)

RATER = re.compile(r"[\w .@+-]{1,60}")
"""Allowed names of raters."""
MOST_BYTES = 10_000
"""Of a sent form."""
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
        settled: the file of settled pairs, which is written anew with each rating.
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
        """The next pair of a rater, an earlier one, or the question who rates."""
        rater = request.query_params.get("rater", "").strip()
        if not RATER.fullmatch(rater):
            return self._ask_rater(is_wrong=bool(rater))
        verdicts = self._verdicts.get(rater, {})
        order = sorted(self._pairs.values(), key=lambda pair: pair.place(rater))
        unrated = next((pair for pair in order if pair.id not in verdicts), None)
        pair = self._pairs.get(request.query_params.get("pair", "")) or unrated
        if pair is None:
            thanks = "Thank you. Each rating is on disk. What they come to prints:"
            results = Text([Span(self._results)])
            page = page_of("All rated", Note(thanks, "plain"), results)
        else:
            pressed = choice_of(pair, rater, verdicts.get(pair.id))
            page = self._pair_page(pair, rater, pressed)
        header = _header(rater, order, verdicts, pair)
        return page_response(replace(page, header=header), has_keys=True)

    def _ask_rater(self, is_wrong: bool) -> Response:
        intro = (
            "You will see pairs of answers, and say which is better. Whose they are is "
            "not told, and the sides are drawn by lot."
        )
        rule = "A name has letters, digits, blanks and . _ @ + -, 60 at the most."
        name = Field("rater", "Your name", most=60, is_required=True, is_focused=True)
        page = page_of(
            "Who rates?",
            Note(intro, "plain"),
            Note(rule, "warning") if is_wrong else None,
            Form("/", [name], [Button("Begin")]),
            Links(
                [Link(rater, _rater_page(rater)) for rater in sorted(self._verdicts)],
                "Go on as",
            ),
        )
        status = HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.OK
        return page_response(page, status, has_keys=True)

    def _pair_page(self, pair: AnswerPair, rater: str, pressed: str | None) -> Page:
        """A prompt, its two answers, and the buttons; `pressed` is the choice of an
        earlier rating.
        """
        again = Note("You have rated this one; what you say now counts instead.")
        turns: list[Part] = []
        if isinstance(pair.prompt, str):
            turns.append(Text([Span(pair.prompt)], "prompt"))
        else:
            for turn in pair.prompt:
                text = Text([Span(turn["content"])], "prompt")
                turns += [Heading(turn["role"]), text]
        answers = pair.answers[::-1] if pair.is_swapped(rater) else pair.answers
        left, right = (
            [Text([Span(answer.strip() or "(nothing)")], "answer")]
            for answer in answers
        )
        buttons = [
            Button(text, "choice", choice, keys, hint, choice == pressed)
            for choice, (text, keys, hint) in CHOICES.items()
        ]
        hidden = {"token": self._form_token, "pair": pair.id, "rater": rater}
        return page_of(
            "Which answer is better?",
            again if pressed else None,
            turns,
            Sides([("Left", left), ("Right", right)]),
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
        form = {
            name: values[0]
            for name, values in parse_qs(body.decode("utf-8", "replace")).items()
        }
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


def _header(
    rater: str,
    order: Sequence[AnswerPair],
    verdicts: Mapping[str, Verdict],
    pair: AnswerPair | None,
) -> list[Part]:
    """The rater's progress, and a link to the rated pair before this one in the rater's
    order.
    """
    end = len(order) if pair is None else order.index(pair)
    before = [entry for entry in order[:end] if entry.id in verdicts]
    done = sum(entry.id in verdicts for entry in order)
    links: list[Inline] = [Link("Another rater", "/")]
    if before:
        page = _rater_page(rater, pair=before[-1].id)
        links.insert(0, Link("Back to the one before", page, keys="u Backspace"))
    text = f"{rater}: {done:,} of {len(order):,} rated"
    return [Progress(text, done, len(order)), Links(links)]


def verdict_of(pair: AnswerPair, rater: str, choice: str) -> Verdict:
    """The verdict on the two models of a choice of a side."""
    if choice == "tie":
        return "tie"
    if choice == "both_bad":
        return "both_bad"
    return "second" if (choice == "left") == pair.is_swapped(rater) else "first"


def choice_of(pair: AnswerPair, rater: str, verdict: Verdict | None) -> str | None:
    """The choice that led to a verdict."""
    return next(
        (choice for choice in CHOICES if verdict_of(pair, rater, choice) == verdict),
        None,
    )
