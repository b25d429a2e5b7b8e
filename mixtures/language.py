"""The section `langid`: which languages are wanted."""

from __future__ import annotations

from gristmill.mixtures.section import Fraction, Judging, OutsidePath, Positive


class LanguageId(Judging):
    """fastText lid.176 at document level."""

    keep: tuple[str, ...] = ("en",)
    threshold: Fraction = 0.65
    """Least score of the top language (FineWeb, CCNet: 0.65)."""
    max_characters: Positive = 2000
    """Only the first so many characters are looked at."""
    model: OutsidePath | None = None
    """Path of lid.176.ftz; otherwise environment, cache, publisher, PyPI wheel, in that order."""
