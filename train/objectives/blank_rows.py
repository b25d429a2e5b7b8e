"""Autoregressive blank infilling (Du et al. 2022, section 2.1): what GLM reads of packed rows, and what it fills in.

Spans of a row are hidden, each behind one blank: that is part A, which is read in both directions. Part B are the
spans in an order that is drawn, each behind a token that begins it; what is predicted are their tokens, and one that
ends each. A decoder reads both in one row.

Lengths are drawn from a Poisson distribution without zero until enough tokens are hidden, and places such that blanks
are apart, as in the authors' code (blocklm_utils.py: generate_blank_data, sample_spans, make_block_data). Positions
count what is read, one after the other: GLM's second position, of a token in its span, is not there, as it is not in
GLM-4, whose rotary embedding leaves half of the channels alone (docs/objectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gristmill.mixtures.objectives.span_objectives import (
    BEGIN,
    BLANK,
    END,
    LONG_BLANK,
    SENTENCE_BLANK,
    BlankInfilling,
    lacking,
)
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.tokenize.order import order_key
from gristmill.train.objectives.layout import Laid, Read, draws
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.span_rows import NoSentinelsError

LONGEST = 40
"""Lengths that are drawn are shorter (blocklm_utils.py: max_block_length)."""
LEAST_LONG_BLANK = 0.5
"""Share of a row that `[gMASK]` hides at the least (Du et al. 2022, section 2.1.2)."""
SENTENCE_ENDS = ".?!;:\n"
"""A token that holds one of these ends a sentence (blocklm_utils.py: contains_sentence_end)."""
Span = tuple[int, int]
"""First place, and the one behind the last."""


class Marks(NamedTuple):
    """Ids of special tokens; of those that no share asks for, that of the short blank.

    Attributes:
        blank, long_blank, sentence_blank: what stands for a span.
        begin, end: of its tokens.
        pad: behind rows.
    """

    blank: int
    long_blank: int
    sentence_blank: int
    begin: int
    end: int
    pad: int


@dataclass(frozen=True)
class Blanks:
    """Which spans are hidden, and how rows are laid out then (see layout.Layout).

    Attributes:
        section: how much, and in which way.
        marks: special tokens.
        seed: of the draws.
        ends_sentence: (vocab,) bool, tokens that end a sentence.
        eos: id between documents, at which no sentence begins.
    """

    section: BlankInfilling
    marks: Marks
    seed: int
    ends_sentence: np.ndarray
    eos: int

    ahead = 0

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs, targets and prefix of rows in a step; see layout.Layout.

        Of a row as many tokens are read as fit in together with two more for each blank.
        """
        rows, length = read.tokens.shape
        inputs, targets = np.full((rows, length), self.marks.pad), np.full((rows, length), IGNORED)
        places, seen = np.full((rows, length), -1), np.zeros(rows, dtype=np.int64)
        kinds, keys = (
            draws(self.key("kind", step), read.rows, read.first),
            {name: self.key(name, step) for name in ("length", "place", "long", "sentence", "order")},
        )
        for number, (size, kind) in enumerate(zip((read.positions >= 0).sum(axis=1), kinds, strict=True)):
            tokens, spans = read.tokens[number, :size].astype(np.int64), list[Span]()
            drawn, over = _Draws(keys, int(read.rows[number]), int(read.first[number])), 1
            while len(tokens) and over > 0:
                spans = self._spans(tokens, float(kind), drawn)
                if (over := len(tokens) + 2 * len(spans) - length) > 0:
                    # Blanks become fewer with the tokens.
                    tokens = tokens[: -max(over * len(tokens) // (len(tokens) + 2 * len(spans)), 1)]
                    spans = []
            order = np.argsort(drawn.numbers("order", len(spans)), kind="stable")
            seen[number] = self._lay(
                tokens, spans, order, self._blank_of(float(kind)), inputs[number], targets[number], places[number]
            )
        return Laid(inputs, targets, prefix=np.arange(length) < seen[:, None], places=places)

    def key(self, name: str, step: int) -> int:
        """64 bits for the draws of a name in a step."""
        return order_key(self.seed, "blanks", name, step)

    def _lay(
        self,
        tokens: np.ndarray,
        spans: Sequence[Span],
        order: np.ndarray,
        blank: int,
        inputs: np.ndarray,
        targets: np.ndarray,
        places: np.ndarray,
    ) -> int:
        """Write a row's parts A and B (make_block_data of blocklm_utils.py); returns the tokens of part A."""
        at = last = 0
        for start, end in [*spans, (len(tokens), len(tokens))]:
            inputs[at : at + start - last] = tokens[last:start]
            at, last = at + start - last, end
            if end > start:
                inputs[at] = blank
                at += 1
        seen = at
        for number in order:
            start, end = spans[number]
            size = end - start
            inputs[at], inputs[at + 1 : at + 1 + size] = self.marks.begin, tokens[start:end]
            targets[at : at + size], targets[at + size] = tokens[start:end], self.marks.end
            places[at : at + size] = np.arange(start, end)
            at += size + 1
        return seen

    def _blank_of(self, kind: float) -> int:
        is_long, is_short = kind < self.section.document_share, kind >= self._not_short
        return self.marks.long_blank if is_long else self.marks.blank if is_short else self.marks.sentence_blank

    @property
    def _not_short(self) -> float:
        return self.section.document_share + self.section.sentence_share

    def _spans(self, tokens: np.ndarray, kind: float, drawn: _Draws) -> list[Span]:
        """The hidden spans of a row, in its order."""
        size, wanted = len(tokens), max(int(self.section.density * len(tokens)), 1)
        if kind < self.section.document_share:
            share = LEAST_LONG_BLANK + (1 - LEAST_LONG_BLANK) * float(drawn.numbers("long", 1)[0])
            return [(size - max(int(share * size), 1), size)]
        if kind < self._not_short:
            return _first_that_hide(self._sentences(tokens), wanted, drawn)
        lengths = 1 + np.searchsorted(self._lengths, drawn.numbers("length", wanted), side="right")
        sums = lengths.cumsum()
        count = int(np.searchsorted(sums, wanted)) + 1
        lengths = lengths[:count]
        # The last one may be longer than what is left of a short row, with a token between all of them.
        lengths[-1] = min(lengths[-1], size - (count - 1) - (sums[count - 1] - lengths[-1]))
        room = size - int(lengths.sum()) - (count - 1)
        starts = np.sort((drawn.numbers("place", count) * (room + 1)).astype(np.int64))
        starts += np.concatenate(([0], lengths[:-1].cumsum())) + np.arange(count)
        return [(int(start), int(start + length)) for start, length in zip(starts, lengths, strict=True)]

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Chances that a span has at most 1, 2, ... tokens."""
        weights = [self.section.mean_length**count / math.factorial(count) for count in range(1, LONGEST)]
        chances: np.ndarray = np.cumsum(weights) / np.sum(weights)
        return chances

    def _sentences(self, tokens: np.ndarray) -> list[Span]:
        """Runs of tokens up to one that ends a sentence; ends of text are in none."""
        found, start = list[Span](), 0
        for place in np.flatnonzero(self.ends_sentence[tokens] | (tokens == self.eos)).tolist():
            end = place if tokens[place] == self.eos else place + 1
            if end > start:
                found.append((start, end))
            start = place + 1
        return [*found, (start, len(tokens))] if start < len(tokens) else found


@dataclass(frozen=True)
class _Draws:
    """Numbers in [0, 1) of one row in a step, by what they are for."""

    keys: Mapping[str, int]
    row: int
    first: int

    def numbers(self, name: str, count: int) -> np.ndarray:
        """So many (float64); more of them begin with the same ones."""
        return draws(self.keys[name], np.full(count, self.row), self.first + np.arange(count))


def _first_that_hide(sentences: Sequence[Span], wanted: int, drawn: _Draws) -> list[Span]:
    """Sentences in an order that is drawn, until they have so many tokens; then in their own."""
    chosen, hidden = list[Span](), 0
    for number in np.argsort(drawn.numbers("sentence", len(sentences)), kind="stable"):
        chosen.append(sentences[number])
        hidden += sentences[number][1] - sentences[number][0]
        if hidden >= wanted:
            break
    return sorted(chosen)


def blanks_of(section: BlankInfilling, tokenizer: TextTokenizer, seed: int, length: int) -> Blanks:
    """What a manifest asks for.

    Raises:
        gristmill.train.objectives.span_rows.NoSentinelsError: the tokenizer lacks a special token.
    """
    ids = tokenizer.special_ids
    problem = lacking(section, length, ids.__contains__)
    if problem is not None:
        raise NoSentinelsError(f"the tokenizer lacks special tokens: pretrain.blank_infilling {problem}")
    blank = ids[BLANK]
    marks = Marks(
        blank, ids.get(LONG_BLANK, blank), ids.get(SENTENCE_BLANK, blank), ids[BEGIN], ids[END], tokenizer.pad
    )
    return Blanks(section, marks, seed, sentence_ends(tokenizer), tokenizer.eos)


def sentence_ends(tokenizer: TextTokenizer) -> np.ndarray:
    """Which tokens hold the end of a sentence, (vocab,) bool; special tokens do not."""
    special = {*tokenizer.special_ids.values()}
    texts = tokenizer.tokenizer.decode_batch([[number] for number in range(tokenizer.vocab_size)])
    return np.array(
        [number not in special and any(end in text for end in SENTENCE_ENDS) for number, text in enumerate(texts)]
    )


def read_blanks(section: BlankInfilling, folder: Path, seed: int, length: int) -> Blanks:
    """`blanks_of` the tokenizer of a folder."""
    return blanks_of(section, load_tokenizer(folder), seed, length)
