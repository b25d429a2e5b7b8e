"""Span corruption (Raffel et al. 2020, section 3.1.4), and the mixture of denoisers of UL2 (Tay et al. 2022).

Spans of a row are hidden: in the place of each stands a sentinel, and what is predicted are the sentinels, each with
what it hides, and an end of text. Which tokens are hidden is what T5's code draws (random_spans_noise_mask of its
preprocessors, as transformers' run_t5_mlm_flax.py has it): so many of a row's tokens, cut into so many spans at random,
and the rest likewise between them. A denoiser of UL2 is a density and a mean length of spans, drawn evenly for each
row, with a mode token in front; a single span at the end is prefix language modelling.

An encoder-decoder encodes what is left and decodes what is hidden; a decoder reads the one as a prefix of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gristmill.mixtures.objectives.span_objectives import (
    SENTINEL,
    Denoiser,
    SpanCorruption,
    Ul2,
    lacking,
    mode_names,
    most_spans,
    spans_of,
    tokens_that_fit,
)
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.tokenize.order import order_key
from gristmill.train.objectives.layout import Laid, Read, draws
from gristmill.train.objectives.losses import IGNORED


class NoSentinelsError(ValueError):
    """A tokenizer has too few sentinels, or no mode tokens."""


class _Corrupted(NamedTuple):
    """Rows of equally many tokens, (g, s) and (g, t) int64; `places`: those of the targets in their rows, or -1."""

    inputs: np.ndarray
    targets: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Corruption:
    """Which spans are hidden, and how rows are laid out then (see layout.Layout).

    Attributes:
        denoisers: of which one is drawn for each row.
        modes: ids of their mode tokens; none if empty.
        seed: of the draws.
        sentinels: ids, the first one first.
        eos: id that ends what is encoded, and what is predicted.
        pad: id of padding, with which the decoder begins.
        joined: whether a decoder reads both in one row; else an encoder-decoder has them apart.
    """

    denoisers: tuple[Denoiser, ...]
    modes: tuple[int, ...]
    seed: int
    sentinels: np.ndarray
    eos: int
    pad: int
    joined: bool = False

    ahead = 0

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs and targets of rows in a step; see layout.Layout."""
        length = read.tokens.shape[1]
        sizes, which = (read.positions >= 0).sum(axis=1), self._drawn(read, step)
        widths = [length, length] if self.joined else self._widths(length)
        inputs = np.full((len(sizes), widths[0]), self.pad)
        targets, places = (np.full((len(sizes), widths[1]), fill) for fill in (IGNORED, -1))
        seen = np.zeros(len(sizes), dtype=np.int64)
        for size, number in {*zip(sizes.tolist(), which.tolist(), strict=True)}:
            rows = np.flatnonzero((sizes == size) & (which == number))
            found = self._corrupted(read, rows, int(size), int(number), step)
            s, t = found.inputs.shape[1], found.targets.shape[1]
            seen[rows] = s
            if not self.joined:
                inputs[rows, :s], targets[rows, :t], places[rows, :t] = found
                continue
            # The last token of what is left predicts the first one of what is hidden.
            inputs[rows, :s], inputs[rows, s : s + t] = found.inputs, found.targets
            at = slice(s - 1, s - 1 + t)
            targets[rows, at], places[rows, at] = found.targets, found.places
        is_seen = np.arange(widths[0]) < seen[:, None]
        if self.joined:
            return Laid(inputs, targets, prefix=is_seen, places=places)
        begun = np.concatenate((np.full((len(sizes), 1), self.pad), targets[:, :-1]), axis=1)
        decoder_ids = np.where(begun == IGNORED, self.pad, begun)
        positions = None if is_seen.all() else np.where(is_seen, np.arange(widths[0]), -1).astype(np.int32)
        return Laid(inputs, targets, decoder_ids=decoder_ids, places=places, positions=positions)

    def key(self, name: str, step: int) -> int:
        """64 bits for the draws of a name in a step."""
        return order_key(self.seed, "spans", name, step)

    def _drawn(self, read: Read, step: int) -> np.ndarray:
        """The number of each row's denoiser."""
        drawn = draws(self.key("denoiser", step), read.rows, read.first)
        numbers: np.ndarray = (drawn * len(self.denoisers)).astype(np.int64)
        return numbers

    def _widths(self, length: int) -> list[int]:
        """Most tokens that are encoded, and decoded, of rows of so many."""
        found = [
            (length - hidden + spans, hidden + spans)
            for hidden, spans in (spans_of(length, one) for one in self.denoisers)
        ]
        return [max(one[0] for one in found) + 1 + bool(self.modes), max(one[1] for one in found) + 1]

    def _corrupted(self, read: Read, rows: np.ndarray, size: int, number: int, step: int) -> _Corrupted:
        """Rows of `size` tokens, corrupted by a denoiser; of a row that is read by a decoder as many as fit in."""
        one = self.denoisers[number]
        if self.joined:
            size = tokens_that_fit(read.tokens.shape[1], size, one)
        tokens, group = read.tokens[rows, :size].astype(np.int64), len(rows)
        front = np.tile(np.array(self.modes[number : number + 1], dtype=np.int64), (group, 1))
        end = np.full((group, 1), self.eos)
        if size < 2:  # nothing can be hidden
            nothing = np.zeros((group, 0), dtype=np.int64)
            return _Corrupted(np.concatenate((front, tokens, end), axis=1), nothing, nothing)
        hidden = self._mask(read, rows, size, one, step)
        starts = hidden.copy()
        starts[:, 1:] &= ~hidden[:, :-1]
        sentinels = self.sentinels[starts.cumsum(axis=1) - 1]
        # A span's sentinel stands where the span begins: in place of it in what is left, before it in what is hidden.
        left = np.where(hidden, sentinels, tokens)[~hidden | starts].reshape(group, -1)
        twice = np.stack((starts, hidden), axis=2).reshape(group, -1)
        told = np.stack((sentinels, tokens), axis=2).reshape(group, -1)[twice].reshape(group, -1)
        numbers = np.broadcast_to(np.arange(size), tokens.shape)
        places = np.stack((np.full_like(tokens, -1), numbers), axis=2).reshape(group, -1)[twice].reshape(group, -1)
        parts = (front, left) if self.joined else (front, left, end)
        return _Corrupted(
            np.concatenate(parts, axis=1),
            np.concatenate((told, end), axis=1),
            np.concatenate((places, np.full((group, 1), -1)), axis=1),
        )

    def _mask(self, read: Read, rows: np.ndarray, size: int, one: Denoiser, step: int) -> np.ndarray:
        """Which tokens (g, size) are hidden (random_spans_noise_mask)."""
        hidden, spans = spans_of(size, one)
        if one.mean_length is None:
            return np.broadcast_to(np.arange(size) >= size - hidden, (len(rows), size)).copy()
        lengths = [
            _segments(
                items,
                spans,
                draws(
                    self.key(name, step),
                    np.repeat(read.rows[rows, None], items - 1, axis=1),
                    read.first[rows, None] + np.arange(items - 1),
                ),
            )
            for name, items in (("left", size - hidden), ("hidden", hidden))
        ]
        ends = np.stack(lengths, axis=2).reshape(len(rows), -1).cumsum(axis=1)[:, :-1]
        begins = np.zeros((len(rows), size), dtype=np.int64)
        np.put_along_axis(begins, ends, 1, axis=1)
        mask: np.ndarray = begins.cumsum(axis=1) % 2 == 1
        return mask


def _segments(items: int, segments: int, drawn: np.ndarray) -> np.ndarray:
    """Lengths (g, segments) of so many items cut at random: before those whose numbers (g, items - 1) are least."""
    begins = np.zeros((len(drawn), items), dtype=bool)
    begins[:, 0] = True
    np.put_along_axis(begins, 1 + np.argsort(drawn, axis=1, kind="stable")[:, : segments - 1], True, axis=1)
    places = np.nonzero(begins)[1].reshape(len(drawn), segments)
    return np.diff(places, axis=1, append=items)


def corruption_of(section: SpanCorruption | Ul2, tokenizer: TextTokenizer, seed: int, length: int) -> Corruption:
    """What a manifest asks for.

    Args:
        section: what is hidden.
        tokenizer: has sentinels, and for UL2 mode tokens.
        seed: of the draws.
        length: tokens of the longest row.

    Raises:
        NoSentinelsError: it has too few of them.
    """
    ids = tokenizer.special_ids
    problem = lacking(section, length, ids.__contains__)
    if problem is not None:
        raise NoSentinelsError(f"the tokenizer lacks special tokens: pretrain {problem}")
    sentinels = np.array(
        [ids[SENTINEL.format(number)] for number in range(most_spans(section, length))], dtype=np.int64
    )
    names = mode_names(ids.__contains__) if isinstance(section, Ul2) else None
    modes = () if names is None else tuple(ids[names[one.mode]] for one in section.denoisers)
    return Corruption(
        section.denoisers,
        modes,
        seed,
        sentinels,
        tokenizer.eos,
        tokenizer.pad,
        isinstance(section, Ul2) and section.shape == "decoder",
    )


def read_corruption(section: SpanCorruption | Ul2, folder: Path, seed: int, length: int) -> Corruption:
    """`corruption_of` the tokenizer of a folder."""
    return corruption_of(section, load_tokenizer(folder), seed, length)
