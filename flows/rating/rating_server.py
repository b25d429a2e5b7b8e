"""`gristmill rate`: pages in which people compare blinded answers, on the loopback address alone.

Nothing on a page says whose an answer is. Pages of other sites can neither read one nor rate: what is sent must hold a
token that only a page of this server has.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gristmill.core.secrets import mask_known
from gristmill.flows.browse.data_server import HEADERS, HOSTS, STYLE, Guarded, style_sheet
from gristmill.flows.rating.answer_pairs import AnswerPair
from gristmill.flows.rating.ratings import Verdict, add_rating, read_ratings, write_settled
from gristmill.flows.report.page_elements import environment

if TYPE_CHECKING:
    from jinja2 import Environment

RATER = re.compile(r"[\w .@+-]{1,60}")
"""What raters may be called."""
SCRIPT = "/keys.js"
MOST_BYTES = 10_000
"""Of what a form sends."""
CHOICES = ("left", "right", "tie", "both_bad")
FOLDER = Path(__file__).parent / "templates"
RATING_HEADERS = {
    **HEADERS,
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "default-src 'none'", "default-src 'none'; script-src 'self'"
    ),
}


class RatingPages:
    """The pages of a set of pairs.

    Args:
        pairs: what is rated.
        ratings: the file to which ratings are added.
        settled: the file of the pairs that are settled, which is written anew with each rating.
        results: the command that prints the results.
    """

    def __init__(self, pairs: Sequence[AnswerPair], ratings: Path, settled: Path, results: str) -> None:
        self._pairs = {pair.id: pair for pair in pairs}
        self._ratings, self._settled, self._results = ratings, settled, results
        self._token, self._lock = secrets.token_urlsafe(24), threading.Lock()
        self._rated: dict[str, dict[str, Verdict]] = {}
        for one in read_ratings(ratings):
            if one["pair"] in self._pairs:
                self._rated.setdefault(one["rater"], {})[one["pair"]] = one["verdict"]

    def app(self) -> Guarded:
        """What answers."""
        style = style_sheet("rate.css.jinja", FOLDER)
        script = (FOLDER / "keys.js").read_text(encoding="utf-8")
        return Guarded(
            Starlette(
                routes=[
                    Route("/", self._page, methods=["GET"]),
                    Route("/rate", self._rate, methods=["POST"]),
                    Route(STYLE, lambda request: PlainTextResponse(style, media_type="text/css"), methods=["GET"]),
                    Route(
                        SCRIPT, lambda request: PlainTextResponse(script, media_type="text/javascript"), methods=["GET"]
                    ),
                ],
                middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
            ),
            RATING_HEADERS,
        )

    def _page(self, request: Request) -> Response:
        """The next pair of a rater, one of before, or the question who rates."""
        rater = request.query_params.get("rater", "").strip()
        if not rater:
            return _html("who.html.jinja", raters=sorted(self._rated), problem="")
        if not RATER.fullmatch(rater):
            return _html(
                "who.html.jinja",
                HTTPStatus.BAD_REQUEST,
                raters=sorted(self._rated),
                problem=("A name has letters, digits, blanks and . _ @ + -, 60 at the most."),
            )
        rated = self._rated.get(rater, {})
        order = sorted(self._pairs.values(), key=lambda pair: pair.place(rater))
        asked = self._pairs.get(request.query_params.get("pair", ""))
        pair = asked or next((one for one in order if one.id not in rated), None)
        done = sum(one.id in rated for one in order)
        before = _before(order, rated, pair)
        told: dict[str, Any] = {
            "rater": rater,
            "done": done,
            "total": len(order),
            "before": None if before is None else "/?" + urlencode({"rater": rater, "pair": before.id}),
        }
        if pair is None:
            return _html("done.html.jinja", **told, results=self._results)
        answers = pair.answers[::-1] if pair.is_swapped(rater) else pair.answers
        turns = [{"role": "", "content": pair.prompt}] if isinstance(pair.prompt, str) else pair.prompt
        return _html(
            "rate.html.jinja",
            **told,
            pair=pair.id,
            turns=turns,
            answers=answers,
            token=self._token,
            again=_shown(pair, rater, rated.get(pair.id)),
        )

    async def _rate(self, request: Request) -> Response:
        """Keep a rating; leads to the next pair."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return PlainTextResponse("too much", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        sent = {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
        if not hmac.compare_digest(sent.get("token", "").encode(), self._token.encode()):
            return PlainTextResponse(
                "This page is of a server that has ended, or of another site. Open / again; all "
                "that was rated is kept.",
                HTTPStatus.FORBIDDEN,
            )
        pair, rater, choice = self._pairs.get(sent.get("pair", "")), sent.get("rater", ""), sent.get("choice", "")
        if pair is None or not RATER.fullmatch(rater) or choice not in CHOICES:
            return PlainTextResponse("no such pair, rater or choice", HTTPStatus.BAD_REQUEST)
        verdict = verdict_of(pair, rater, choice)
        with self._lock:
            add_rating(self._ratings, pair, rater, verdict)
            self._rated.setdefault(rater, {})[pair.id] = verdict
            write_settled(read_ratings(self._ratings), self._settled)
        return RedirectResponse("/?" + urlencode({"rater": rater}), HTTPStatus.SEE_OTHER)


def verdict_of(pair: AnswerPair, rater: str, choice: str) -> Verdict:
    """What a choice of a side says of the two models."""
    if choice == "tie":
        return "tie"
    if choice == "both_bad":
        return "both_bad"
    return "second" if (choice == "left") == pair.is_swapped(rater) else "first"


def _shown(pair: AnswerPair, rater: str, verdict: Verdict | None) -> str | None:
    """The choice that led to a verdict."""
    return next(
        (choice for choice in CHOICES if verdict is not None and verdict_of(pair, rater, choice) == verdict), None
    )


def _before(order: Sequence[AnswerPair], rated: Mapping[str, Verdict], pair: AnswerPair | None) -> AnswerPair | None:
    """The last rated pair before this one in the rater's order."""
    until = len(order) if pair is None else order.index(pair)
    return next((one for one in reversed(order[:until]) if one.id in rated), None)


def _html(template: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
    return HTMLResponse(mask_known(_templates().get_template(template).render(**values)), status)


@cache
def _templates() -> Environment:
    return environment(FOLDER)
