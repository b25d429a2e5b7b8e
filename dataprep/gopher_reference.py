"""The definitions of `gopher.py` and `repetition.py` in the plainest Python, one document at a time.

What the kernels must agree with exactly, and what `bench` measures them against. Nothing else uses it.
"""

from __future__ import annotations

import re
from collections import Counter

from gristmill.dataprep.gopher import BULLETS, STOP_WORDS
from gristmill.dataprep.repetition import DUPLICATE_NGRAMS, TOP_NGRAMS


def quality(text: str) -> dict[str, float]:
    """`gopher.quality_statistics` of one text."""
    words = text.split()
    lines = segments(text, "\n")
    return {
        "words": len(words),
        "mean_word_length": share(sum(map(len, words)), len(words)),
        "symbol_word_ratio": share(sum(text.count(symbol) for symbol in ("#", "...", "…")), len(words)),
        "bullet_line_ratio": share(sum(line.startswith(BULLETS) for line in lines), len(lines)),
        "ellipsis_line_ratio": share(sum(line.endswith(("...", "…")) for line in lines), len(lines)),
        "alpha_word_ratio": share(sum(any(map(str.isalpha, word)) for word in words), len(words)),
        "stop_words": sum(word.lower() in STOP_WORDS for word in words),
    }


def repetition(text: str) -> dict[str, float]:
    """`gopher.repetition_statistics` of one text."""
    words = text.split()
    measured: dict[str, float] = {}
    for name, parts in (("line", segments(text, "\n")), ("paragraph", segments(text, "\n\n+"))):
        counts = Counter(parts)
        repeated = [part for part in parts if counts[part] > 1]
        measured[f"duplicate_{name}_ratio"] = share(len(repeated), len(parts))
        measured[f"duplicate_{name}_char_ratio"] = share(sum(map(len, repeated)), sum(map(len, parts)))
    for n in TOP_NGRAMS:
        measured[f"top_{n}gram_char_ratio"] = share(top_ngram_chars(words, n), sum(map(len, words)))
    for n in DUPLICATE_NGRAMS:
        measured[f"duplicate_{n}gram_char_ratio"] = share(duplicate_ngram_chars(words, n), sum(map(len, words)))
    return measured


def top_ngram_chars(words: list[str], n: int) -> int:
    """Count times code points of the most frequent n-gram, the longest of them; 0 if none occurs twice."""
    counts = Counter(zip(*(words[start:] for start in range(n))))
    most = max(counts.values(), default=0)
    if most < 2:
        return 0
    return most * max(sum(map(len, ngram)) for ngram, count in counts.items() if count == most)


def duplicate_ngram_chars(words: list[str], n: int) -> int:
    """Code points of the words that n-grams which occur twice or more cover."""
    ngrams = list(zip(*(words[start:] for start in range(n))))
    counts = Counter(ngrams)
    covered = {at + step for at, ngram in enumerate(ngrams) if counts[ngram] > 1 for step in range(n)}
    return sum(len(words[at]) for at in covered)


def segments(text: str, separator: str) -> list[str]:
    """The parts of a text between separators, stripped; without those of whitespace only."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def share(part: float, whole: float) -> float:
    """Part / whole; 0 of nothing."""
    return part / whole if whole else 0.0
