"""The work of `gristmill rate` between its options and its pages: have prompts
answered, listen, serve.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.models.generate import PromptsError, read_prompts
from gristmill.flows.pages.page_server import PortError, listen_locally, serve_pages
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
