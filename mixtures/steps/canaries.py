"""The section `canaries`: made-up secrets in documents, to measure memorisation."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.mixtures.base import Judging, Positive, Seeded, repeated


class Canaries(Judging, Seeded):
    """Made-up secrets inserted into documents, so that `evaluate.canaries` can measure
    what a model memorises (Carlini et al. 2019). See docs/how-to/data/privacy.md.

    A secret is a line `The access code of vault QD-0731 is 4821 0937.` The step inserts
    it into as many documents as `copies` says, which are chosen by hash; later steps,
    such as `dedup_lines`, may remove copies.
    """

    copies: tuple[Positive, ...] = (1, 4, 16, 64)
    """Numbers of documents that have the same secret."""
    secrets: Positive = 8
    """Number of secrets for each number of copies."""
    seed: int | None = None
    """Seed of the secrets and of the choice of documents; the manifest's if absent."""

    def _problems(self) -> Iterator[str]:
        if twice := repeated(self.copies):
            yield f"copies: {twice} is given twice; keep one"

    @property
    def edits_text(self) -> bool:
        """True: it inserts lines."""
        return True
