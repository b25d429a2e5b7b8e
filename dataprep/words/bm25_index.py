"""In-memory word index of texts, for many queries: BM25 as in `bm25_scan.py`, without
its scan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gristmill.dataprep.words.bm25_scan import all_terms, bm25, terms_of


class WordIndex:
    """Index of the words of texts.

    Memory: the texts, and 8 bytes per distinct word of each text.

    Args:
        texts: in order.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        lengths = np.array([len(text.encode()) for text in self.texts], np.float64)
        self._length = lengths / max(lengths.mean() if len(lengths) else 0.0, 1.0)
        postings: dict[str, tuple[list[int], list[int]]] = {}
        for number, text in enumerate(self.texts):
            for term, frequency in Counter(all_terms(text)).items():
                places, counts = postings.setdefault(term, ([], []))
                places.append(number)
                counts.append(frequency)
        self._found = {
            term: (np.array(places, np.int32), np.array(counts, np.int32))
            for term, (places, counts) in postings.items()
        }

    def search(self, question: str, most: int) -> list[tuple[int, float]]:
        """Positions and scores of the best texts, best first, ties in order; only texts
        with a word of the question.
        """
        scores = np.zeros(len(self.texts))
        for term in self.terms(question):
            if term not in self._found:
                continue
            places, counts = self._found[term]
            lengths = self._length[places]
            scores[places] += bm25(len(self.texts), len(places), counts, lengths)
        best = np.argsort(-scores, kind="stable")[:most]
        return [
            (int(place), float(scores[place])) for place in best if scores[place] > 0.0
        ]

    @staticmethod
    def terms(question: str) -> Sequence[str]:
        """Search terms of a question; quotes are ignored, as the index has single words
        only.
        """
        return terms_of(question.replace('"', " "))
