"""Documents rearranged so that a model learns to fill in their middle (Bavarian et al. 2022, "FIM").

A document of n tokens is cut at two places, drawn evenly from 0 to n, into prefix, middle and suffix, any of which may
be empty. It becomes one of (the second is the paper's variant 2 of suffix-prefix-middle)

    <prefix> prefix <suffix> suffix <middle> middle <end of text>        prefix-suffix-middle, PSM
    <prefix> <suffix> suffix <middle> prefix middle <end of text>        suffix-prefix-middle, SPM

where names in brackets are special tokens. This happens before documents are packed into rows, as in the paper's
"document level". Whether a document is rearranged depends on (seed, its id) alone, so that every pass over a source has
equally many tokens; where it is cut, and which of the two it becomes, is drawn again in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.mixtures.mix import FIM_TOKENS, FillInMiddle
from gristmill.tokenize.document_sampling import draw, drawn_below
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.order import order_key

ADDED = 3
"""Special tokens of a rearranged document."""
RUNS = 4
"""A rearranged document is so many runs of its tokens, each with a special token or the end of text behind it."""


class Runs(NamedTuple):
    """Parts of pieces: tokens of a document that follow one another, perhaps with a token behind them; each (r,).

    Attributes:
        piece: int64, number of the piece, ascending.
        offset: int64, first token within the rearranged document.
        length: int64, tokens with the one behind.
        source: int64, first token within the document as it was read.
        text: int64, tokens without the one behind.
        end: int32, id of the token behind.
    """

    piece: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    source: np.ndarray
    text: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Rearranging:
    """Which documents of a mixture are rearranged, and how.

    Attributes:
        rates: of each source, the share of its documents.
        spm_rate: share of these that become suffix-prefix-middle.
        key: 64 bits, of all draws.
        prefix, suffix, middle, eos: ids.
    """

    rates: tuple[float, ...]
    spm_rate: float
    key: int
    prefix: int
    suffix: int
    middle: int
    eos: int

    def chosen(self, source: np.ndarray, words: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Which entries (bool) are rearranged; `time` says which one of a document in a pass it is."""
        found = np.zeros(len(words), dtype=bool)
        for number in np.unique(source).tolist():
            for one in np.unique(time[source == number]).tolist():
                own = (source == number) & (time == one)
                key, rate = order_key(self.key, "chosen", one), self.rates[number]
                found[own] = drawn_below(words[own], key, rate) if rate < 1 else True
        return found

    def cuts(
        self, words: np.ndarray, time: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where documents of so many tokens are cut in a pass: begin and end of the middle (int64), whether SPM."""
        drawn = np.empty((3, len(words)), dtype=np.uint64)
        for one in np.unique(time).tolist():
            own = time == one
            for which, name in enumerate(("first", "second", "form")):
                drawn[which, own] = draw(words[own], order_key(self.key, name, number, one))
        # The upper halves: an even number below n + 1 without a division, exact for documents below 2^32 tokens.
        both = np.sort(((drawn[:2] >> np.uint64(32)) * (tokens + 1).astype(np.uint64)) >> np.uint64(32), axis=0)
        spm = (drawn[2] >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.spm_rate
        return both[0].astype(np.int64), both[1].astype(np.int64), spm

    def runs(self, begin: np.ndarray, end: np.ndarray, spm: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """What rearranged documents are made of, run by run.

        Args:
            begin, end, spm: see `cuts`.
            tokens: int64 of shape (n,), of the documents as they were read.

        Returns:
            of shape (n, RUNS) each: first token within the document, tokens without the one behind, id of that.
        """
        none = np.zeros_like(begin)
        source = np.stack([none, none, end, np.where(spm, 0, begin)], axis=1)
        text = np.stack([none, np.where(spm, 0, begin), tokens - end, np.where(spm, end, end - begin)], axis=1)
        ends = np.array([self.prefix, self.suffix, self.middle, self.eos], dtype=np.int32)
        return source, text, np.broadcast_to(ends, text.shape)

    def cut_pieces(
        self,
        rearranged: np.ndarray,
        words: np.ndarray,
        time: np.ndarray,
        number: int,
        tokens: np.ndarray,
        offset: np.ndarray,
        length: np.ndarray,
    ) -> Runs:
        """The runs of pieces of documents, rearranged and others.

        Args:
            rearranged: bool of shape (p,), whether the document of each piece is.
            words, time: of its document, see `chosen`.
            number: of the pass.
            tokens: int64, of its document as it was read.
            offset, length: int64, first token within the (rearranged) document, tokens with the end of text.
        """
        source, text = np.zeros((len(tokens), RUNS), np.int64), np.zeros((len(tokens), RUNS), np.int64)
        ends, has_end = np.full(text.shape, self.eos, dtype=np.int32), np.zeros(text.shape, dtype=bool)
        text[:, 0], has_end[:, 0] = tokens, True
        own = np.flatnonzero(rearranged)
        cuts = self.cuts(words[own], time[own], number, tokens[own])
        source[own], text[own], ends[own] = self.runs(*cuts, tokens[own])
        has_end[own] = True
        behind = np.cumsum(text + has_end, axis=1)
        begin = behind - text - has_end
        low, high = np.maximum(begin, offset[:, None]), np.minimum(behind, (offset + length)[:, None])
        piece, run = np.nonzero(high > low)
        low, high, begin, behind = (array[piece, run] for array in (low, high, begin, behind))
        return Runs(
            piece,
            low,
            high - low,
            source[piece, run] + low - begin,
            np.minimum(high, behind - 1) - low,
            ends[piece, run],
        )


def rearranging(
    section: FillInMiddle | None, sources: Sequence[str], seed: int, special_ids: Mapping[str, int], eos: int
) -> Rearranging | None:
    """What a mixture asks for; None where nothing is rearranged.

    Args:
        section: `mix.fim`.
        sources: names by number.
        seed: of the mixture.
        special_ids: of the tokenizer.
        eos: the end of text.

    Raises:
        MixError: the tokenizer has none of the known triples of special tokens.
    """
    if section is None:
        return None
    found = next((names for names in FIM_TOKENS if set(names) <= special_ids.keys()), None)
    if found is None:
        raise MixError(
            "mix.fim: the tokenizer has no special tokens for prefix, suffix and middle; it needs "
            f"{' or '.join(', '.join(names) for names in FIM_TOKENS)} (tokenizer.special_tokens)"
        )
    prefix, suffix, middle = (special_ids[name] for name in found)
    return Rearranging(
        tuple(section.rates.get(name, 0.0) for name in sources),
        section.spm_rate,
        order_key(seed, "mix", "fim"),
        prefix,
        suffix,
        middle,
        eos,
    )
