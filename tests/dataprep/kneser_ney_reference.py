"""Interpolated modified Kneser-Ney smoothing (Chen & Goodman 1999) in plain Python, for
tests that need an ARPA file and its scores.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

Gram = tuple[str, ...]
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Discounts if the counts of counts are insufficient (lmplz --discount_fallback)."""


def sentences_of(texts: Sequence[str]) -> list[Gram]:
    lines = [line.split() for text in texts for line in text.split("\n")]
    return [("<s>", *line, "</s>") for line in lines if line]


class PlainModel:
    """Interpolated modified Kneser-Ney as Chen & Goodman write it: dictionaries, one
    probability at a time.
    """

    def __init__(self, texts: Sequence[str], order: int) -> None:
        self.order = order
        raw: list[Counter[Gram]] = [Counter() for _ in range(order)]
        for sentence in sentences_of(texts):
            for size in range(1, order + 1):
                raw[size - 1].update(
                    sentence[at : at + size] for at in range(len(sentence) - size + 1)
                )
        self.counts: list[dict[Gram, int]] = []
        for size in range(1, order + 1):
            if size == order:
                self.counts.append(dict(raw[size - 1]))
                continue
            before = Counter(gram[1:] for gram in raw[size])
            self.counts.append(
                {
                    gram: raw[size - 1][gram] if gram[0] == "<s>" else before[gram]
                    for gram in raw[size - 1]
                }
            )
        self.vocabulary = {gram[0] for gram in raw[0]} - {"<s>"} | {"<unk>"}
        del self.counts[0][("<s>",)]
        self.discounts = [self.discount(counts) for counts in self.counts]
        self.followers: defaultdict[Gram, list[Gram]] = defaultdict(list)
        for counts in self.counts:
            for gram in counts:
                self.followers[gram[:-1]].append(gram)

    @staticmethod
    def discount(counts: dict[Gram, int]) -> tuple[float, ...]:
        n1, n2, n3, n4 = (
            sum(count == k for count in counts.values()) for k in (1, 2, 3, 4)
        )
        if n1 and n2 and n3 and n4:
            y = n1 / (n1 + 2 * n2)
            discounts = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
            if all(0 <= d <= k for k, d in enumerate(discounts, 1)):
                return discounts
        return FALLBACK_DISCOUNTS

    def backoff(self, context: Gram) -> float:
        grams = self.followers.get(context, [])
        if not grams:
            return 1.0
        counts, discounts = self.counts[len(context)], self.discounts[len(context)]
        return sum(discounts[min(counts[gram], 3) - 1] for gram in grams) / sum(
            counts[gram] for gram in grams
        )

    def probability(self, word: str, context: Gram) -> float:
        if word not in self.vocabulary:
            word = "<unk>"
        lower = (
            self.probability(word, context[1:]) if context else 1 / len(self.vocabulary)
        )
        grams = self.followers.get(context, [])
        if not grams:
            return lower
        counts, discounts = self.counts[len(context)], self.discounts[len(context)]
        count = counts.get((*context, word), 0)
        taken = count - discounts[min(count, 3) - 1] if count else 0.0
        return (
            taken / sum(counts[gram] for gram in grams) + self.backoff(context) * lower
        )

    def score(self, text: str) -> float:
        total = 0.0
        for sentence in sentences_of([text]):
            for at in range(1, len(sentence)):
                total += math.log10(
                    self.probability(
                        sentence[at], sentence[max(0, at - self.order + 1) : at]
                    )
                )
        return total

    def arpa(self) -> str:
        grams: list[list[Gram]] = [sorted(counts) for counts in self.counts]
        grams[0] = [("<unk>",), ("<s>",), *grams[0]]
        lines = [
            "\\data\\",
            *(f"ngram {size}={len(of_size)}" for size, of_size in enumerate(grams, 1)),
            "",
        ]
        for size, of_size in enumerate(grams, 1):
            lines.append(f"\\{size}-grams:")
            for gram in of_size:
                log = (
                    -99.0
                    if gram == ("<s>",)
                    else math.log10(self.probability(gram[-1], gram[:-1]))
                )
                backoff = (
                    f"\t{math.log10(self.backoff(gram)):.8f}"
                    if size < self.order
                    else ""
                )
                lines.append(f"{log:.8f}\t{' '.join(gram)}{backoff}")
            lines.append("")
        return "\n".join([*lines, "\\end\\", ""])
