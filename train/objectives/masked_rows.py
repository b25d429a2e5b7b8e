"""Masked language modelling (Devlin et al. 2019, section 3.1): selection and
replacement of tokens of packed rows.

Each token, or with whole words each word, is selected with the same probability. A
selected token is predicted; its input is the mask token, a uniformly drawn id, or the
token itself. Special tokens and padding are never selected. This follows transformers'
DataCollatorForLanguageModeling, with random numbers that depend only on the seed, the
step, the row and the place in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.mixtures.objectives.token_objectives import MASK_TOKENS, Masked
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, word_edges
from gristmill.tokenize.shuffle import order_key
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws


class NoMaskTokenError(ValueError):
    """A tokenizer has no mask token."""


@dataclass(frozen=True)
class Masking:
    """Layout that masks tokens (see `Layout`).

    Attributes:
        section: masking rate and replacement shares.
        seed: of the draws.
        mask: id of the mask token.
        vocab_size: number of ids to draw replacements from.
        special: (vocab,) bool, ids that are never selected.
        edges: (vocab,) bool each, ids that begin and that end a word, from
            `word_edges`; None masks single tokens.
    """

    section: Masked
    seed: int
    mask: int
    vocab_size: int
    special: np.ndarray
    edges: tuple[np.ndarray, np.ndarray] | None

    ahead = 0

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs and targets of rows in a step; see `Layout`."""
        ids = read.tokens.astype(np.int64)
        is_candidate: np.ndarray = ~self.special[ids] & (read.positions >= 0)
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        if self.edges is not None:
            begins, ends = self.edges
            starts = is_candidate.copy()
            starts[:, 1:] &= (
                begins[ids[:, 1:]] | ends[ids[:, :-1]] | ~is_candidate[:, :-1]
            )
            # All tokens of a word share the draw of its first token.
            places = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        places = places + read.first[:, None]
        numbers = np.broadcast_to(read.rows[:, None], ids.shape)
        is_selected = is_candidate & (
            draws(self.key("chosen", step), numbers, places) < self.section.rate
        )
        row, place = np.nonzero(is_selected)
        at = read.rows[row], place + read.first[row]
        kind = draws(self.key("kind", step), *at)
        drawn = (draws(self.key("drawn", step), *at) * self.vocab_size).astype(np.int64)
        to_mask = self.section.mask_share
        inputs = ids.copy()
        original_ids = ids[is_selected]
        inputs[is_selected] = np.where(
            kind < to_mask,
            self.mask,
            np.where(kind < to_mask + self.section.random_share, drawn, original_ids),
        )
        return Laid(inputs, np.where(is_selected, ids, IGNORED))

    def key(self, name: str, step: int) -> int:
        """64-bit key of the named draws in a step."""
        return order_key(self.seed, "masked", name, step)


def masking_of(section: Masked, tokenizer: TextTokenizer, seed: int) -> Masking:
    """Layout of a manifest's section.

    Raises:
        NoMaskTokenError: the tokenizer has no known mask token.
    """
    special = np.zeros(tokenizer.vocab_size, dtype=bool)
    special[list(tokenizer.special_ids.values())] = True
    edges = word_edges(tokenizer.tokenizer) if section.whole_words else None
    return Masking(
        section,
        seed,
        tokenizer.special_ids[mask_token(tokenizer)],
        tokenizer.vocab_size,
        special,
        edges,
    )


def mask_token(tokenizer: TextTokenizer) -> str:
    """Mask token of a tokenizer.

    Raises:
        NoMaskTokenError: the tokenizer has none.
    """
    token = next((name for name in MASK_TOKENS if name in tokenizer.special_ids), None)
    if token is None:
        raise NoMaskTokenError(
            "pretrain.masked: the tokenizer has no special token that stands for a "
            f"masked one; it needs {', '.join(MASK_TOKENS[:-1])} or {MASK_TOKENS[-1]} "
            "(tokenizer.special_tokens)"
        )
    return token
