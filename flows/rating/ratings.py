"""Ratings of people: a file of JSON lines to which each is added, on disk, before its rater sees the next pair.

A line of a rating that prefers one answer holds `prompt`, `chosen` and `rejected`, as `dpo` reads them; one that
prefers neither holds `answers`. A rater who rates a pair again adds a line, and the last one counts. Beside it lie the
pairs that are settled: those of which more raters prefer the one answer than the other.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from gristmill.core.files import atomic_write
from gristmill.flows.rating.answer_pairs import AnswerPair

Verdict = Literal["first", "second", "tie", "both_bad"]
VERDICTS: tuple[Verdict, ...] = ("first", "second", "tie", "both_bad")
Rating = Mapping[str, Any]


SUFFIX = ".ratings.jsonl"


@dataclass(frozen=True)
class RatingFiles:
    """Where ratings lie, the pairs that they settle, and the answers that are compared."""

    ratings: Path
    settled: Path
    answers: Path


def rating_files(ratings: Path | None, manifest: str) -> RatingFiles:
    """The files of some ratings; those beside a manifest where none are named."""
    place = ratings or Path(manifest).with_suffix(SUFFIX)
    stem = place.name.removesuffix(SUFFIX) if place.name.endswith(SUFFIX) else place.stem
    return RatingFiles(place, place.with_name(f"{stem}.pairs.jsonl"), place.with_name(f"{stem}.answers.json"))


class RatingsError(ValueError):
    """A file of ratings cannot be read."""


def add_rating(path: Path, pair: AnswerPair, rater: str, verdict: Verdict) -> None:
    """Add a rating; when this returns, it is on disk."""
    said: dict[str, Any] = {
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
        said |= {"chosen": chosen, "rejected": rejected}
    else:
        said["answers"] = list(pair.answers)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _cut_torn_end(file)
        file.write(json.dumps(said, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_end(file: Any) -> None:
    """Remove the beginning of a line that an ended process left: nobody was told that it is rated."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    if whole < size:
        file.truncate(whole)


def read_ratings(path: Path) -> list[Rating]:
    """All ratings that count: of each rater and pair the last, in the order of the first.

    Raises:
        RatingsError: a line is none, with its number. A last line that is not whole is left out.
    """
    found: dict[tuple[str, str], Rating] = {}
    for number, line in _lines(path):
        try:
            value = json.loads(line)
            found[value["pair"], value["rater"]] = value
            wrong = value["verdict"] not in VERDICTS or any(key not in value for key in ("first", "second"))
        except (ValueError, KeyError, TypeError) as error:
            raise RatingsError(f"{path}, line {number}: no rating: {type(error).__name__}: {error}") from error
        if wrong:
            raise RatingsError(f"{path}, line {number}: no rating: verdict {value['verdict']!r} of {', '.join(value)}")
    return list(found.values())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    yield from ((number, line) for number, line in enumerate(whole.split(b"\n"), start=1) if line.strip())


def settled_pairs(ratings: Sequence[Rating]) -> list[dict[str, Any]]:
    """`prompt`, `chosen` and `rejected` of each pair that is settled, and how many raters prefer either answer."""
    by_pair: dict[str, list[Rating]] = {}
    for one in ratings:
        by_pair.setdefault(one["pair"], []).append(one)
    found = []
    for pair, of_pair in by_pair.items():
        votes = Counter(one["verdict"] for one in of_pair)
        if votes["first"] == votes["second"]:
            continue
        winner = "first" if votes["first"] > votes["second"] else "second"
        one = next(one for one in of_pair if one["verdict"] == winner)
        found.append(
            {
                "prompt": one["prompt"],
                "chosen": one["chosen"],
                "rejected": one["rejected"],
                "pair": pair,
                "for": votes[winner],
                "against": votes["second" if winner == "first" else "first"],
            }
        )
    return found


def write_settled(ratings: Sequence[Rating], path: Path) -> None:
    """Write the pairs that are settled as JSON lines, whole or not at all."""
    with atomic_write(path) as sink:
        sink.write("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in settled_pairs(ratings)).encode())
