"""Ratings of people: a file of JSON lines to which each is added, on disk before its
rater sees the next pair.

A rating that prefers one answer holds `prompt`, `chosen` and `rejected`, as `dpo` reads
them; one that prefers neither holds `answers`. A rater who rates a pair again adds a
line, and the last one counts. A second file has the settled pairs, those of which more
raters prefer one answer than the other.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from gristmill.core.files import write_text
from gristmill.dataprep.examples.conversations import Message
from gristmill.flows.rating.answer_pairs import AnswerPair

Verdict = Literal["first", "second", "tie", "both_bad"]
VERDICTS: tuple[Verdict, ...] = ("first", "second", "tie", "both_bad")


class Rating(TypedDict):
    """A line of the file of ratings.

    Attributes:
        pair: id of the rated pair.
        rater: name.
        verdict: on both models.
        first, second: the models' labels.
        left: the model whose answer was on the left.
        prompt: a text, or messages.
        time: ISO 8601, in UTC.
        chosen, rejected: answers, if one is preferred.
        answers: both, if neither is preferred.
    """

    pair: str
    rater: str
    verdict: Verdict
    first: str
    second: str
    left: Verdict
    prompt: str | list[Message]
    time: str
    chosen: NotRequired[str]
    rejected: NotRequired[str]
    answers: NotRequired[list[str]]


SettledPair = TypedDict(
    "SettledPair",
    {
        "prompt": str | list[Message],
        "chosen": str,
        "rejected": str,
        "pair": str,
        "for": int,
        "against": int,
    },
)
"""A preference of more raters than are against it, and their numbers."""


SUFFIX = ".ratings.jsonl"


@dataclass(frozen=True)
class RatingFiles:
    """Files of ratings, of the pairs that they settle, and of the compared answers."""

    ratings: Path
    settled: Path
    answers: Path


def rating_files(ratings: Path | None, manifest: str) -> RatingFiles:
    """The files of ratings; those beside a manifest if `ratings` is None."""
    path = ratings or Path(manifest).with_suffix(SUFFIX)
    stem = path.name.removesuffix(SUFFIX) if path.name.endswith(SUFFIX) else path.stem
    return RatingFiles(
        path,
        path.with_name(f"{stem}.pairs.jsonl"),
        path.with_name(f"{stem}.answers.json"),
    )


class RatingsError(ValueError):
    """A file of ratings cannot be read."""


def add_rating(path: Path, pair: AnswerPair, rater: str, verdict: Verdict) -> None:
    """Add a rating; it is on disk when this returns."""
    rating: Rating = {
        "pair": pair.id,
        "rater": rater,
        "verdict": verdict,
        "first": pair.first,
        "second": pair.second,
        "left": "second" if pair.is_swapped(rater) else "first",
        "prompt": pair.prompt,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if verdict in ("first", "second"):
        chosen, rejected = pair.answers if verdict == "first" else pair.answers[::-1]
        rating["chosen"], rating["rejected"] = chosen, rejected
    else:
        rating["answers"] = list(pair.answers)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        # A torn last line is of an ended process, whose rater was told nothing.
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(rating, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_ratings(path: Path) -> list[Rating]:
    """All ratings that count: the last one of each rater and pair, in the order of the
    first ones.

    Raises:
        RatingsError: a line is not a rating, with its number. An incomplete last line
            is left out.
    """
    ratings: dict[tuple[str, str], Rating] = {}
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rating = json.loads(line)
            key = rating["pair"], rating["rater"]
            if rating["verdict"] not in VERDICTS or not {"first", "second"} <= {
                *rating
            }:
                raise ValueError(
                    f"verdict {rating['verdict']!r}, keys {', '.join(rating)}"
                )
            ratings[key] = rating
        except (ValueError, KeyError, TypeError) as error:
            raise RatingsError(
                f"{path}, line {number}: not a rating: {type(error).__name__}: {error}"
            ) from error
    return list(ratings.values())


def settled_pairs(ratings: Iterable[Rating]) -> list[SettledPair]:
    """The preferences of pairs of which more raters prefer one answer."""
    by_pair: dict[str, list[Rating]] = {}
    for rating in ratings:
        by_pair.setdefault(rating["pair"], []).append(rating)
    settled: list[SettledPair] = []
    for pair, ratings_of_pair in by_pair.items():
        votes = Counter(rating["verdict"] for rating in ratings_of_pair)
        lead = votes["first"] - votes["second"]
        winner = "first" if lead > 0 else "second"
        if lead:
            example = next(
                rating for rating in ratings_of_pair if rating["verdict"] == winner
            )
            settled.append(
                {
                    "prompt": example["prompt"],
                    "chosen": example["chosen"],
                    "rejected": example["rejected"],
                    "pair": pair,
                    "for": max(votes["first"], votes["second"]),
                    "against": min(votes["first"], votes["second"]),
                }
            )
    return settled


def write_settled(ratings: Iterable[Rating], path: Path) -> None:
    """Write the settled pairs as JSON lines, whole or not at all."""
    pairs = settled_pairs(ratings)
    lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs]
    write_text(path, "".join(lines))
