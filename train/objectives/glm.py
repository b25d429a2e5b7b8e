"""Autoregressive blank infilling (Du et al. 2022, section 2.1): inputs and targets of
GLM from packed rows.

Spans of a row are hidden, each replaced by a blank: that is part A, with bidirectional
attention. Part B are the spans in random order, each after a begin token; their tokens
and an end token per span are predicted. A decoder reads both parts in one row.

Span lengths are drawn from a zero-truncated Poisson distribution until enough tokens
are hidden, and placed so that blanks do not touch, as in the authors' code
(blocklm_utils.py: generate_blank_data, sample_spans, make_block_data). Positions count
the tokens of both parts consecutively: there is no second position within the span, as
in GLM-4, whose rotary embedding leaves half of the channels alone (docs/objectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
from gristmill.tokenize.shuffle import order_key
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws
from gristmill.train.objectives.span_rows import NoSentinelsError

LONGEST = 40
"""Exclusive upper bound of sampled lengths (blocklm_utils.py: max_block_length)."""
LEAST_LONG_BLANK = 0.5
"""Minimum share of a row that `[gMASK]` hides (Du et al. 2022, section 2.1.2)."""
SENTENCE_ENDS = ".?!;:\n"
"""Characters that end a sentence (blocklm_utils.py: contains_sentence_end)."""
Span = tuple[int, int]
"""Start and end (exclusive)."""
Numbers = Callable[[str, int], np.ndarray]
"""Function from a purpose and a count to that many numbers of a row in [0, 1)."""


@dataclass(frozen=True)
class Blanks:
    """Layout that hides spans behind blanks (see `Layout`).

    Attributes:
        section: density and kinds of spans.
        seed: of the draws.
        ends_sentence: (vocab,) bool, true for tokens that end a sentence.
        blank, long_blank, sentence_blank: ids in place of spans; unused ones equal the
            first.
        begin, end: ids around a span's tokens.
        pad: id of padding.
        eos: id between documents; never part of a sentence.
    """

    section: BlankInfilling
    seed: int
    ends_sentence: np.ndarray
    blank: int
    long_blank: int
    sentence_blank: int
    begin: int
    end: int
    pad: int
    eos: int

    ahead = 0

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs, targets and prefix of rows in a step; see `Layout`.

        Rows are truncated so that their tokens, with two more per blank, fit.
        """
        rows, length = read.tokens.shape
        inputs = np.full((rows, length), self.pad)
        targets = np.full((rows, length), IGNORED)
        places = np.full((rows, length), -1)
        prefix_lengths = np.zeros(rows, dtype=np.int64)
        kinds = draws(self.key("kind", step), read.rows, read.first)
        keys = {
            name: self.key(name, step)
            for name in ("length", "place", "long", "sentence", "order")
        }
        for number, (size, kind) in enumerate(
            zip((read.positions >= 0).sum(axis=1), kinds.tolist(), strict=True)
        ):
            tokens = read.tokens[number, :size].astype(np.int64)
            spans = list[Span]()
            numbers = partial(
                _numbers, keys, int(read.rows[number]), int(read.first[number])
            )
            overflow = 1
            while len(tokens) and overflow > 0:
                spans = self._spans(tokens, kind, numbers)
                if (overflow := len(tokens) + 2 * len(spans) - length) > 0:
                    # Fewer tokens also need fewer blanks.
                    tokens = tokens[
                        : -max(
                            overflow * len(tokens) // (len(tokens) + 2 * len(spans)), 1
                        )
                    ]
                    spans = []
            order = np.argsort(numbers("order", len(spans)), kind="stable")
            blank = self.sentence_blank
            if kind < self.section.document_share:
                blank = self.long_blank
            elif kind >= self._not_short:
                blank = self.blank
            prefix_lengths[number] = self._lay(
                tokens,
                spans,
                order,
                blank,
                inputs[number],
                targets[number],
                places[number],
            )
        return Laid(
            inputs,
            targets,
            prefix=np.arange(length) < prefix_lengths[:, None],
            places=places,
        )

    def key(self, name: str, step: int) -> int:
        """64-bit key of the named draws in a step."""
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
        """Write parts A and B of a row (make_block_data of blocklm_utils.py); returns
        the length of part A.
        """
        at = last = 0
        for start, end in [*spans, (len(tokens), len(tokens))]:
            inputs[at : at + start - last] = tokens[last:start]
            at = at + start - last
            last = end
            if end > start:
                inputs[at] = blank
                at += 1
        prefix_length = at
        for number in order:
            start, end = spans[number]
            size = end - start
            inputs[at] = self.begin
            inputs[at + 1 : at + 1 + size] = tokens[start:end]
            targets[at : at + size] = tokens[start:end]
            targets[at + size] = self.end
            places[at : at + size] = np.arange(start, end)
            at += size + 1
        return prefix_length

    @property
    def _not_short(self) -> float:
        return self.section.document_share + self.section.sentence_share

    def _spans(self, tokens: np.ndarray, kind: float, numbers: Numbers) -> list[Span]:
        """Hidden spans of a row, ascending."""
        size = len(tokens)
        target_count = max(int(self.section.density * len(tokens)), 1)
        if kind < self.section.document_share:
            share = LEAST_LONG_BLANK + (1 - LEAST_LONG_BLANK) * float(
                numbers("long", 1)[0]
            )
            return [(size - max(int(share * size), 1), size)]
        if kind < self._not_short:
            sentences = list[Span]()
            start = 0
            is_end = self.ends_sentence[tokens] | (tokens == self.eos)
            for place in np.flatnonzero(is_end).tolist():
                # An end of text belongs to no sentence.
                end = place if tokens[place] == self.eos else place + 1
                if end > start:
                    sentences.append((start, end))
                start = place + 1
            if start < size:
                sentences.append((start, size))
            sampled = list[Span]()
            hidden = 0
            for number in np.argsort(
                numbers("sentence", len(sentences)), kind="stable"
            ):
                sampled.append(sentences[number])
                hidden += sentences[number][1] - sentences[number][0]
                if hidden >= target_count:
                    break
            return sorted(sampled)
        lengths = 1 + np.searchsorted(
            self._lengths, numbers("length", target_count), side="right"
        )
        sums = lengths.cumsum()
        count = int(np.searchsorted(sums, target_count)) + 1
        lengths = lengths[:count]
        # The last span must leave room for a token between all spans of a short row.
        lengths[-1] = min(
            lengths[-1], size - (count - 1) - (sums[count - 1] - lengths[-1])
        )
        room = size - int(lengths.sum()) - (count - 1)
        starts = np.sort((numbers("place", count) * (room + 1)).astype(np.int64))
        starts += np.concatenate(([0], lengths[:-1].cumsum())) + np.arange(count)
        return [
            (int(start), int(start + length))
            for start, length in zip(starts, lengths, strict=True)
        ]

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Cumulative distribution of span lengths 1, 2, ..."""
        weights = [
            self.section.mean_length**count / math.factorial(count)
            for count in range(1, LONGEST)
        ]
        return np.cumsum(weights) / np.sum(weights)


def _numbers(
    keys: Mapping[str, int], row: int, first: int, name: str, count: int
) -> np.ndarray:
    return draws(keys[name], np.full(count, row), first + np.arange(count))


def blanks_of(
    section: BlankInfilling, tokenizer: TextTokenizer, seed: int, length: int
) -> Blanks:
    """Layout of a manifest's section.

    Raises:
        gristmill.train.objectives.span_rows.NoSentinelsError: the tokenizer lacks a
            special token.
    """
    ids = tokenizer.special_ids
    problem = lacking(section, length, ids.__contains__)
    if problem is not None:
        raise NoSentinelsError(
            f"the tokenizer lacks special tokens: pretrain.blank_infilling {problem}"
        )
    special_ids = {*ids.values()}
    texts = tokenizer.tokenizer.decode_batch(
        [[number] for number in range(tokenizer.vocab_size)]
    )
    ends_sentence = np.array(
        [
            number not in special_ids and any(end in text for end in SENTENCE_ENDS)
            for number, text in enumerate(texts)
        ]
    )
    blank = ids[BLANK]
    return Blanks(
        section,
        seed,
        ends_sentence,
        blank=blank,
        long_blank=ids.get(LONG_BLANK, blank),
        sentence_blank=ids.get(SENTENCE_BLANK, blank),
        begin=ids[BEGIN],
        end=ids[END],
        pad=tokenizer.pad,
        eos=tokenizer.eos,
    )
