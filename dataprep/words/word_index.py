"""An index of the words of some texts in memory, for many questions: BM25 as `by_words.py` has it, without its scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gristmill.dataprep.words.by_words import K1, B, all_terms, terms_of


class WordIndex:
    """Finds which of some texts have the words of a question.

    Memory: the texts, and 8 bytes for each word of each text, counted once a text.

    Args:
        texts: in their order.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        lengths = np.array([len(text.encode()) for text in self.texts], np.float64)
        self._length = lengths / max(lengths.mean() if len(lengths) else 0.0, 1.0)
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, text in enumerate(self.texts):
            for term, often in Counter(all_terms(text)).items():
                places, counts = found.setdefault(term, ([], []))
                places.append(number)
                counts.append(often)
        self._found = {
            term: (np.array(places, np.int32), np.array(counts, np.int32)) for term, (places, counts) in found.items()
        }

    def search(self, question: str, most: int) -> list[tuple[int, float]]:
        """The places of the best texts with their scores, the best first, equal ones in their order; none without a
        word of the question."""
        scores = np.zeros(len(self.texts))
        for term in self.terms(question):
            if term not in self._found:
                continue
            places, counts = self._found[term]
            idf = np.log1p((len(self.texts) - len(places) + 0.5) / (len(places) + 0.5))
            scores[places] += idf * counts * (K1 + 1) / (counts + K1 * (1 - B + B * self._length[places]))
        best = np.argsort(-scores, kind="stable")[:most]
        return [(int(one), float(scores[one])) for one in best if scores[one] > 0.0]

    @staticmethod
    def terms(question: str) -> Sequence[str]:
        """What is looked for; quotes mean nothing here, for the index knows single words."""
        return terms_of(question.replace('"', " "))
