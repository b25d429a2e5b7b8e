"""Canaries: made-up secrets of a fixed form, drawn by hash."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.steps.canaries import Canaries

PATTERN = re.compile(r"The access code of vault [A-Z]{2}-\d{4} is \d{4} \d{4}\.")
"""A line with a secret."""
CODES = 10**8
"""Number of possible secrets behind a beginning."""


@dataclass(frozen=True)
class Canary:
    """A secret.

    Attributes:
        copies: number of documents into which it is inserted; 0 for one that is only
            measured.
        number: of those with as many copies.
        seed: from which it is drawn.
    """

    copies: int
    number: int
    seed: int

    @property
    def beginning(self) -> str:
        """The text before the secret."""
        key = seeded_key(self.seed, "vault", self.copies, self.number)
        letters = chr(ord("A") + key % 26) + chr(ord("A") + key // 26 % 26)
        return f"The access code of vault {letters}-{key // 676 % 10_000:04d} is"

    def code(self, draw: int = 0) -> str:
        """The secret with its blank; with `draw`, another one that nobody inserted."""
        key = seeded_key(self.seed, "code", self.copies, self.number, draw) % CODES
        return f" {key // 10_000:04d} {key % 10_000:04d}"

    @property
    def line(self) -> str:
        """The line that is inserted."""
        return f"{self.beginning}{self.code()}."


def draw_canaries(section: Canaries) -> list[Canary]:
    """Canaries of a section, and as many that are not inserted, which come first."""
    return [
        Canary(copies, number, section.key_seed)
        for copies in (0, *section.copies)
        for number in range(section.secrets)
    ]
