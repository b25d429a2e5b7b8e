"""Stupid backoff (Brants et al. 2007, "Large Language Models in Machine Translation")
in plain Python, for tests that need an ARPA file and its scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

Gram = tuple[str, ...]
LOG_BACKOFF = math.log10(0.4)
"""Weight of a shorter context, as Brants et al. set it."""
START, UNKNOWN = ("<s>",), ("<unk>",)


def sentences_of(texts: Sequence[str]) -> Iterator[Gram]:
    for text in texts:
        for line in text.split("\n"):
            if words := line.split():
                yield (*START, *words, "</s>")


class BackOffModel:
    """Relative frequencies of the n-grams of some texts, up to an order."""

    def __init__(self, texts: Sequence[str], order: int) -> None:
        self.order = order
        counts = Counter(
            sentence[at : at + size]
            for sentence in sentences_of(texts)
            for size in range(1, order + 1)
            for at in range(len(sentence) - size + 1)
        )
        contexts = Counter[Gram]()
        for gram, count in counts.items():
            contexts[gram[:-1]] += count
        self.logs = {
            gram: math.log10(count / contexts[gram[:-1]])
            for gram, count in counts.items()
        }
        self.logs |= {UNKNOWN: -math.log10(contexts[()]), START: -99.0}

    def log(self, word: str, context: Gram) -> float:
        if (*context, word) in self.logs:
            return self.logs[*context, word]
        if not context:
            return self.logs[UNKNOWN]
        weight = LOG_BACKOFF if context in self.logs else 0.0
        return weight + self.log(word, context[1:])

    def score(self, text: str) -> float:
        return sum(
            self.log(sentence[at], sentence[max(0, at - self.order + 1) : at])
            for sentence in sentences_of([text])
            for at in range(1, len(sentence))
        )

    def arpa(self) -> str:
        sizes = range(1, self.order + 1)
        grams = {
            size: sorted(gram for gram in self.logs if len(gram) == size)
            for size in sizes
        }
        lines = ["\\data\\", *(f"ngram {size}={len(grams[size])}" for size in sizes)]
        for size in sizes:
            lines += ["", f"\\{size}-grams:"]
            for gram in grams[size]:
                line = f"{self.logs[gram]:.8f}\t{' '.join(gram)}"
                is_context = size < self.order and gram != UNKNOWN
                lines.append(f"{line}\t{LOG_BACKOFF:.8f}" if is_context else line)
        return "\n".join([*lines, "", "\\end\\", ""])
