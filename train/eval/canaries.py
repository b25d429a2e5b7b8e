"""Memorisation of canaries: exposure and extraction of inserted secrets beside those
that were never inserted (Carlini et al. 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from gristmill.dataprep.cleaning.canary_texts import PATTERN, Canary
from gristmill.mixtures.schema.evaluation import CanaryTest
from gristmill.train.eval.intervals import Estimate, mean_with_interval
from gristmill.train.eval.likelihood import Request
from gristmill.train.generation.language_model import LanguageModel
from gristmill.train.loop.rows_read import DecodeRows, RowsRead


class Memorised(TypedDict):
    """Memorisation of the secrets with one number of copies.

    Attributes:
        copies: inserted ones of each secret.
        read: mean number of copies in the rows that pre-training read, each counted
            once, however many epochs there were.
        secrets: number of secrets.
        exposure: in bits, mean over secrets.
        extracted: share of the secrets that the likeliest continuation of their
            beginning is.
        loss: nats per secret.
    """

    copies: int
    read: float
    secrets: int
    exposure: Estimate
    extracted: float
    loss: float


def count_lines(trained: RowsRead, decode: DecodeRows) -> Counter[str]:
    """Number of occurrences of each canary in the rows read; one that a row cuts is not
    found.
    """
    lines: Counter[str] = Counter()
    for texts in trained.texts(trained.first(trained.count), decode):
        for text in texts:
            lines.update(PATTERN.findall(text))
    return lines


def measure_canaries(
    language: LanguageModel,
    canaries: Sequence[Canary],
    lines: Counter[str],
    section: CanaryTest,
    seed: int,
    bootstrap_samples: int,
) -> list[Memorised]:
    """Memorisation by number of copies.

    A secret's rank is its place among `references` random ones behind the same
    beginning, by likelihood; its exposure is log2(references + 1) - log2(rank).
    """
    size = section.references + 1
    scores = language.score(
        [
            _request(language, canary, draw)
            for canary in canaries
            for draw in range(size)
        ]
    )
    logps = np.array([score.logp for score in scores]).reshape(len(canaries), size)
    ranks = 1 + (logps[:, 1:] >= logps[:, :1]).sum(axis=1)
    exposure = np.log2(size) - np.log2(ranks)
    greedy = np.array([score.greedy for score in scores[::size]])
    copies = np.array([canary.copies for canary in canaries])
    read = np.array([lines[canary.line] for canary in canaries])
    return [
        {
            "copies": int(number),
            "read": float(read[chosen].mean()),
            "secrets": int(chosen.sum()),
            "exposure": mean_with_interval(exposure[chosen], seed, bootstrap_samples),
            "extracted": float(greedy[chosen].mean()),
            "loss": float(-logps[chosen, 0].mean()),
        }
        for number in sorted(set(copies.tolist()))
        for chosen in (copies == number,)
    ]


def _request(language: LanguageModel, canary: Canary, draw: int) -> Request:
    """The likelihood of a secret behind its beginning."""
    beginning = language.text_prompt(canary.beginning)
    whole = language.text_prompt(canary.beginning + canary.code(draw))
    return Request(beginning, whole[len(beginning) :])
