"""Plain Python reference of the Gopher dialects' repetition statistics, one document at
a time.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.dataprep import word_cuts_reference

TOP_NGRAMS, DUPLICATE_NGRAMS = (2, 3, 4), (5, 6, 7, 8, 9, 10)
NAN = float("nan")


def repetition(
    text: str, dialect: str = "dclm", words: list[str] | None = None, per_word: int = 1
) -> dict[str, Any]:
    """The repetition statistics of one text, on given words or on those of the dialect.

    Args:
        per_word: how many words an n-gram takes for one; more than one in scripts
            without spaces, which then has none.
    """
    if words is None:
        words = {
            "dclm": word_cuts_reference.segmented,
            "datatrove": word_cuts_reference.spacy_english,
            "redpajama": lambda text: word_cuts_reference.normalized(text).split(),
        }.get(dialect, str.split)(text)
    counted = {
        "dclm": dclm,
        "datatrove": datatrove,
        "dolma": dolma,
        "curator": curator,
        "redpajama": redpajama,
    }
    lines, paragraphs, ngrams = counted[dialect](text, words, per_word)
    measured = dict(
        zip(("duplicate_line_ratio", "duplicate_line_char_ratio"), lines, strict=True)
    )
    measured |= zip(
        ("duplicate_paragraph_ratio", "duplicate_paragraph_char_ratio"),
        paragraphs,
        strict=True,
    )
    kinds = [f"top_{n}gram_char_ratio" for n in TOP_NGRAMS]
    kinds += [f"duplicate_{n}gram_char_ratio" for n in DUPLICATE_NGRAMS]
    return measured | dict(zip(kinds, ngrams, strict=True))


Pair = tuple[float, float]
Shares = tuple[Pair, Pair, list[float]]


def dclm(text: str, words: list[str], per_word: int) -> Shares:
    """See `gopher_dclm.py`."""
    total = sum(map(len, words))
    ngrams = [
        share(top_chars(words, n * per_word, longest=True), total) for n in TOP_NGRAMS
    ]
    ngrams += [
        share(covered_chars(words, n * per_word), total) for n in DUPLICATE_NGRAMS
    ]
    return all_copies(segments(text, "\n")), all_copies(segments(text, "\n\n")), ngrams


def redpajama(text: str, words: list[str], per_word: int) -> Shares:
    """See `gopher_redpajama.py`."""
    total = sum(map(len, words))
    ngrams = [
        share(top_chars(words, n * per_word, longest=False), total) for n in TOP_NGRAMS
    ]
    ngrams += [
        share(covered_chars(words, n * per_word), total) for n in DUPLICATE_NGRAMS
    ]
    return (NAN, NAN), (NAN, NAN), [round(value, 8) for value in ngrams]


def dolma(text: str, words: list[str], per_word: int) -> Shares:
    """See `gopher_dolma.py`."""
    if not text:
        return (0.0, 0.0), (NAN, NAN), [0.0] * 9
    total = max(sum(map(len, words)), 1)
    lines = text.split("\n")
    repeated = [line for line in lines if lines.count(line) > 1]
    shares = []
    for n in TOP_NGRAMS + DUPLICATE_NGRAMS:
        counts = Counter(ngrams_of(words, n * per_word))
        mass = {ngram: count * sum(map(len, ngram)) for ngram, count in counts.items()}
        if n in TOP_NGRAMS:
            shares.append(mass[counts.most_common(1)[0][0]] / total if counts else 0.0)
        else:
            shares.append(
                share(
                    sum(mass[ngram] for ngram in counts if counts[ngram] > 1),
                    sum(mass.values()),
                )
            )
    return (
        (len(repeated) / len(lines), sum(map(len, repeated)) / total),
        (NAN, NAN),
        shares,
    )


def curator(text: str, words: list[str], per_word: int) -> Shares:
    """See `gopher_curator.py`."""
    lines = [line for line in text.split("\n") if line.strip()]
    space, shares = " " if per_word == 1 else "", []
    for n in TOP_NGRAMS + DUPLICATE_NGRAMS:
        ngrams = ngrams_of(words, n * per_word)
        if not ngrams:
            shares.append(1.0)
        elif n in TOP_NGRAMS:
            top = space.join(Counter(ngrams).most_common(1)[0][0])
            shares.append((len(text) - len(text.replace(top, ""))) / len(text))
        else:
            shares.append(
                overlap_corrected(ngrams, n * per_word, len(space)) / len(text)
            )
    return (
        later_copies(lines, sum(map(len, lines))),
        later_copies(text.split("\n\n"), len(text.replace("\n\n", ""))),
        shares,
    )


def overlap_corrected(ngrams: list[tuple[str, ...]], n: int, spaces: int) -> int:
    """Characters of repeated n-grams, overlaps counted once, with the spaces inside."""
    earlier_ngrams, total, overlap = set(), 0, 0
    for ngram in ngrams:
        if ngram in earlier_ngrams:
            total += sum(map(len, ngram[overlap:])) + spaces * min(n - overlap, n - 1)
            overlap = n
        earlier_ngrams.add(ngram)
        overlap = max(overlap - 1, 0)
    return total


def datatrove(text: str, words: list[str], per_word: int) -> Shares:
    """See `gopher_datatrove.py`."""
    if not text:
        return (1.0, 1.0), (1.0, 1.0), [1.0] * 9
    lines, paragraphs = re.split(r"\n+", text), re.split(r"\n{2,}", text.strip())
    space, shares = " " if per_word == 1 else "", []
    for n in TOP_NGRAMS:
        most = Counter(
            space.join(ngram) for ngram in ngrams_of(words, n * per_word)
        ).most_common(1)
        shares.append(len(most[0][0]) * most[0][1] / len(text) if most else 0.0)
    shares += [greedy_copies(words, n * per_word) / len(text) for n in DUPLICATE_NGRAMS]
    return later_copies(lines, len(text)), later_copies(paragraphs, len(text)), shares


def greedy_copies(words: list[str], n: int) -> int:
    """Characters of repeated n-grams; the scan jumps over each of them."""
    earlier_ngrams: set[str] = set()
    total, at = 0, 0
    while at + n <= len(words):
        joined = "".join(words[at : at + n])
        total += len(joined) if joined in earlier_ngrams else 0
        at += n if joined in earlier_ngrams else 1
        earlier_ngrams.add(joined)
    return total


def top_chars(words: list[str], n: int, longest: bool) -> int:
    """Count times code points of the most frequent n-gram; 0 if none occurs twice."""
    counts = Counter(ngrams_of(words, n))
    most = max(counts.values(), default=0)
    if most < 2:
        return 0
    lengths = [sum(map(len, ngram)) for ngram, count in counts.items() if count == most]
    return most * (max(lengths) if longest else lengths[0])


def covered_chars(words: list[str], n: int) -> int:
    """Code points of words covered by n-grams that occur at least twice."""
    ngrams = ngrams_of(words, n)
    counts = Counter(ngrams)
    covered = {
        at + step
        for at, ngram in enumerate(ngrams)
        if counts[ngram] > 1
        for step in range(n)
    }
    return sum(len(words[at]) for at in covered)


def ngrams_of(words: list[str], n: int) -> list[tuple[str, ...]]:
    """All n-grams, in order."""
    return list(zip(*(words[start:] for start in range(n))))


def all_copies(parts: list[str]) -> Pair:
    """Shares of the parts that occur more than once, by number and by code points."""
    counts = Counter(parts)
    repeated = [part for part in parts if counts[part] > 1]
    return share(len(repeated), len(parts), 1.0), share(
        sum(map(len, repeated)), sum(map(len, parts)), 1.0
    )


def later_copies(parts: list[str], chars: int) -> Pair:
    """Shares of parts that occurred before, by number and of `chars` code points."""
    later = [part for at, part in enumerate(parts) if part in parts[:at]]
    return share(len(later), len(parts)), share(sum(map(len, later)), chars)


def segments(text: str, separator: str) -> list[str]:
    """Parts of a text between separators, stripped; blank ones are left out."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def share(part: float, whole: float, of_nothing: float = 0.0) -> float:
    """Quotient of `part` and `whole`, or `of_nothing` if `whole` is 0."""
    return part / whole if whole else of_nothing
