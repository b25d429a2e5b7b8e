"""Rearrangement of documents for fill-in-the-middle training (Bavarian et al. 2022,
"FIM").

A document of n tokens is cut at two places, drawn uniformly from 0 to n, into prefix,
middle and suffix, each possibly empty. It becomes one of (the second is the paper's
variant 2 of suffix-prefix-middle)

    prefix-suffix-middle, PSM:
        <prefix> prefix <suffix> suffix <middle> middle <end of text>
    suffix-prefix-middle, SPM:
        <prefix> <suffix> suffix <middle> prefix middle <end of text>

where names in brackets are special tokens. Documents are rearranged before packing, the
paper's "document level". (seed, id) alone decides whether a document is rearranged, so
every pass over a source has the same number of tokens; cuts and form are drawn again in
every pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.mixtures.schema.mix import FIM_TOKENS, FillInMiddle
from gristmill.tokenize.document_sampling import draw, drawn_below
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.shuffle import order_key

ADDED = 3
"""Special tokens of a rearranged document."""
RUNS = 4
"""Number of runs of a rearranged document, each followed by a special token or the end
of text.
"""


class Runs(NamedTuple):
    """Consecutive tokens of a piece's document, with an optional token at the end; each
    array of shape (r,).

    Attributes:
        piece: int64, number of the piece, ascending.
        offset: int64, first token within the rearranged document.
        length: int64, tokens including the end token.
        source: int64, first token within the original document.
        text: int64, tokens without the end token.
        end: int32, id of the end token.
    """

    piece: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    source: np.ndarray
    text: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Rearranging:
    """Selection of the rearranged documents of a mixture, and their forms.

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

    def chosen(
        self, source: np.ndarray, words: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        """Mask (bool) of the rearranged entries; `time` is the repeat of a document
        within a pass.
        """
        mask = np.zeros(len(words), bool)
        for number in np.unique(source).tolist():
            rate = self.rates[number]
            for repeat in np.unique(time[source == number]).tolist():
                selection = (source == number) & (time == repeat)
                key = order_key(self.key, "chosen", repeat)
                mask[selection] = rate >= 1 or drawn_below(words[selection], key, rate)
        return mask

    def cuts(
        self, words: np.ndarray, time: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cuts of documents in a pass: begin and end of the middle (int64), and whether
        the form is SPM.
        """
        drawn = np.empty((3, len(words)), np.uint64)
        for repeat in np.unique(time).tolist():
            selection = time == repeat
            for column, name in enumerate(("first", "second", "form")):
                key = order_key(self.key, name, number, repeat)
                drawn[column, selection] = draw(words[selection], key)
        # Multiplying by the upper halves draws uniformly below n + 1 without division,
        # exact below 2^32 tokens.
        half = np.uint64(32)
        places = (drawn[:2] >> half) * (tokens + 1).astype(np.uint64) >> half
        begin, end = np.sort(places, axis=0).astype(np.int64)
        spm = (drawn[2] >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.spm_rate
        return begin, end, spm

    def runs(
        self, begin: np.ndarray, end: np.ndarray, spm: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Runs of rearranged documents.

        Args:
            begin, end, spm: see `cuts`.
            tokens: int64 of shape (n,), of the original documents.

        Returns:
            of shape (n, RUNS) each: first token within the document, tokens without the
            end token, id of the end token.
        """
        zeros = np.zeros_like(begin)
        prefix = np.where(spm, 0, begin)
        middle = np.where(spm, end, end - begin)
        source = np.stack([zeros, zeros, end, prefix], axis=1)
        text = np.stack([zeros, prefix, tokens - end, middle], axis=1)
        ends = np.array([self.prefix, self.suffix, self.middle, self.eos], np.int32)
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
        """Runs of the pieces of documents, rearranged or not.

        Args:
            rearranged: bool of shape (p,), whether the piece's document is rearranged.
            words, time: of its document, see `chosen`.
            number: of the pass.
            tokens: int64, of its original document.
            offset, length: int64, first token within the (rearranged) document, tokens
                with the end of text.
        """
        source = np.zeros((len(tokens), RUNS), np.int64)
        text = np.zeros((len(tokens), RUNS), np.int64)
        ends = np.full(text.shape, self.eos, np.int32)
        has_end = np.zeros(text.shape, bool)
        text[:, 0] = tokens
        has_end[:, 0] = True
        selection = np.flatnonzero(rearranged)
        cuts = self.cuts(words[selection], time[selection], number, tokens[selection])
        source[selection], text[selection], ends[selection] = self.runs(
            *cuts, tokens[selection]
        )
        has_end[selection] = True
        stop = np.cumsum(text + has_end, axis=1)
        begin = stop - text - has_end
        low = np.maximum(begin, offset[:, None])
        high = np.minimum(stop, (offset + length)[:, None])
        piece, run = np.nonzero(high > low)
        low, high, begin, stop = (
            array[piece, run] for array in (low, high, begin, stop)
        )
        return Runs(
            piece,
            low,
            high - low,
            source[piece, run] + low - begin,
            np.minimum(high, stop - 1) - low,
            ends[piece, run],
        )


def rearranging(
    section: FillInMiddle | None,
    sources: Sequence[str],
    seed: int,
    special_ids: Mapping[str, int],
    eos: int,
) -> Rearranging | None:
    """Rearrangement that a mixture requests; None without `mix.fim`.

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
    special_names = next(
        (names for names in FIM_TOKENS if set(names) <= special_ids.keys()), None
    )
    if special_names is None:
        raise MixError(
            "mix.fim: the tokenizer has no special tokens for prefix, suffix and "
            f"middle; it needs {' or '.join(', '.join(names) for names in FIM_TOKENS)} "
            "(tokenizer.special_tokens)"
        )
    prefix, suffix, middle = (special_ids[name] for name in special_names)
    return Rearranging(
        tuple(section.rates.get(name, 0.0) for name in sources),
        section.spm_rate,
        order_key(seed, "mix", "fim"),
        prefix,
        suffix,
        middle,
        eos,
    )
