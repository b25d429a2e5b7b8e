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
        header = _header(rater, order, verdicts, pair)
        if pair is None:
            thanks = Note(
                "Thank you. Each rating is on disk. What they come to prints:", "plain"
            )
            page = Page(
                "All rated", parts=[thanks, Text([Span(self._results)])], header=header
            )
        else:
            pressed = choice_of(pair, rater, verdicts.get(pair.id))
            page = Page(
                "Which answer is better?",
                parts=self._pair_parts(pair, rater, pressed),
                header=header,
            )
        return page_response(page, has_keys=True)

    def _ask_rater(self, is_wrong: bool) -> Response:
        intro = (
            "You will see pairs of answers, and say which is better. Whose they are is "
            "not told, and the sides are drawn by lot."
        )
        parts: list[Part] = [Note(intro, "plain")]
        if is_wrong:
            parts.append(
                Note(
                    "A name has letters, digits, blanks and . _ @ + -, 60 at the most.",
                    "warning",
                )
            )
        parts.append(
            Form(
                "/",
                [
                    Field(
                        "rater", "Your name", most=60, is_required=True, is_focused=True
                    )
                ],
                [Button("Begin")],
            )
        )
        known = [Link(rater, _rater_page(rater)) for rater in sorted(self._verdicts)]
        parts.append(Links(known, "Go on as"))
        return page_response(
            Page("Who rates?", parts=parts),
            HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.OK,
            has_keys=True,
        )

    def _pair_parts(
        self, pair: AnswerPair, rater: str, pressed: str | None
    ) -> list[Part]:
        """A prompt, its two answers, and the buttons; `pressed` is the choice of an
        earlier rating.
        """
        parts: list[Part] = []
        if pressed:
            parts.append(
                Note("You have rated this one; what you say now counts instead.")
            )
        turns = (
            [{"role": "", "content": pair.prompt}]
            if isinstance(pair.prompt, str)
            else pair.prompt
        )
        for turn in turns:
            parts += [Heading(turn["role"])] if turn["role"] else []
            parts.append(Text([Span(turn["content"])], "prompt"))
        answers = pair.answers[::-1] if pair.is_swapped(rater) else pair.answers
        columns: list[tuple[Inline, Sequence[Part]]] = [
            (side, [Text([Span(answer.strip() or "(nothing)")], "answer")])
            for side, answer in zip(("Left", "Right"), answers, strict=True)
        ]
        buttons = [
            Button(text, "choice", choice, keys, hint, choice == pressed)
            for choice, (text, keys, hint) in CHOICES.items()
        ]
        hidden = {"token": self._form_token, "pair": pair.id, "rater": rater}
        return [
            *parts,
            Sides(columns),
            Form("/rate", [], buttons, hidden, "choices", "post"),
        ]

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
        pair, rater, choice = (
            self._pairs.get(form.get("pair", "")),
            form.get("rater", ""),
            form.get("choice", ""),
        )
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
    done = sum(entry.id in verdicts for entry in order)
    end = len(order) if pair is None else order.index(pair)
    before = next(
        (entry for entry in reversed(order[:end]) if entry.id in verdicts), None
    )
    links: list[Inline] = [Link("Another rater", "/")]
    if before is not None:
        links.insert(
            0,
            Link(
                "Back to the one before",
                _rater_page(rater, pair=before.id),
                keys="u Backspace",
            ),
        )
    return [
        Progress(f"{rater}: {done:,} of {len(order):,} rated", done, len(order)),
        Links(links),
    ]


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
