"""What `gristmill rate` does between its options and its pages: have prompts answered, listen, serve."""

from __future__ import annotations

import sys
from pathlib import Path

from gristmill.flows.access_token import AccessToken, SignIn
from gristmill.flows.local_server import LOOPBACK, listen, serve
from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.models.generate import PromptsError, read_prompts
from gristmill.flows.rating.answer_pairs import make_pairs, models_to_rate
from gristmill.flows.rating.rating_server import RatingPages
from gristmill.flows.rating.ratings import RatingFiles, read_ratings, write_settled
from gristmill.flows.running.session import Session
from gristmill.train.generation.sampling import Sampling, SamplingError


class RateProblemError(ValueError):
    """There is nothing to rate, or no page to rate it in."""


def serve_pairs(
    session: Session,
    other: Session | None,
    first: str | None,
    second: str | None,
    prompts: Path,
    files: RatingFiles,
    drawn: tuple[float, float, int],
    max_new_tokens: int,
    port: int,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        session, other, first, second: whose answers are compared; see `models_to_rate`.
        prompts: the file of prompts.
        files: of the ratings.
        drawn: temperature, top_p and seed of the answers.
        max_new_tokens: longest answer.
        port: of the loopback address.

    Raises:
        RateProblemError: with what to do.
        RatingsError: the file of ratings cannot be read.
    """
    read_ratings(files.ratings)
    try:
        asked, sampling = read_prompts(prompts), Sampling(*drawn)
        models = models_to_rate(session, other, first, second)
        listening = listen(port)
    except (PromptsError, SamplingError, ModelNotFoundError) as error:
        raise RateProblemError(str(error)) from error
    except OSError as error:
        raise RateProblemError(f"cannot listen on port {port}: {error.strerror}; give another --port") from error
    try:
        found = make_pairs(models, asked, sampling, max_new_tokens, files.answers)
    except (FileNotFoundError, ValueError) as error:
        raise RateProblemError(str(error)) from error
    for number, why in found.failed.items():
        print(f"{prompts}, line {number} is left out: {why}", file=sys.stderr)
    if found.same:
        print(f"{found.same:,} prompts are left out: both models answer them alike", file=sys.stderr)
    if not found.pairs:
        raise RateProblemError(f"no prompt of {prompts} has two answers that differ; there is nothing to rate")
    write_settled(read_ratings(files.ratings), files.settled)
    token = AccessToken.fresh(listening.getsockname()[1])
    print(
        f"{token.url(LOOPBACK)} asks about {len(found.pairs):,} pairs; ratings go to {files.ratings}; Ctrl-C ends it",
        flush=True,
    )
    pages = RatingPages(found.pairs, files.ratings, files.settled, session.command("rate", "--results"))
    serve(SignIn(pages.app(), token), listening)
