"""Span corruption (Raffel et al. 2020, section 3.1.4), and the mixture of denoisers of
UL2 (Tay et al. 2022).

Each hidden span of a row is replaced by a sentinel; the targets are the sentinels, each
followed by its span, and an end of text. Hidden tokens are drawn as in T5's code
(random_spans_noise_mask of its preprocessors, as in transformers' run_t5_mlm_flax.py):
a fixed number of a row's tokens is cut into a fixed number of random spans, and the
remaining tokens are cut likewise between them. A denoiser of UL2 is a density and a
mean span length, drawn uniformly for each row, with a mode token in front; a single
span at the end is prefix language modelling.

An encoder-decoder encodes the corrupted row and decodes the targets; a decoder reads
the former as a prefix of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from gristmill.tokenize.shuffle import order_key
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws


class NoSentinelsError(ValueError):
    """A tokenizer has too few sentinels, or no mode tokens."""


@dataclass(frozen=True)
class Corruption:
    """Layout that hides spans behind sentinels (see `Layout`).

    Attributes:
        denoisers: one is drawn for each row.
        modes: ids of their mode tokens; empty without modes.
        seed: of the draws.
        sentinels: ids in order.
        eos: id at the end of encoder inputs and of targets.
        pad: id of padding, which also starts the decoder.
        joined: true if a decoder reads inputs and targets in one row, false for an
            encoder-decoder.
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
        """Inputs and targets of rows in a step; see `Layout`."""
        length = read.tokens.shape[1]
        sizes = (read.positions >= 0).sum(axis=1)
        drawn = draws(self.key("denoiser", step), read.rows, read.first)
        denoiser_numbers: np.ndarray = (drawn * len(self.denoisers)).astype(np.int64)
        widths = [length, length]
        if not self.joined:
            hidden, spans = np.array(
                [spans_of(length, denoiser) for denoiser in self.denoisers]
            ).T
            widths = [
                length + int((spans - hidden).max()) + 1 + bool(self.modes),
                int((hidden + spans).max()) + 1,
            ]
        inputs = np.full((len(sizes), widths[0]), self.pad)
        targets, places = (
            np.full((len(sizes), widths[1]), fill) for fill in (IGNORED, -1)
        )
        input_lengths = np.zeros(len(sizes), dtype=np.int64)
        for size, number in {
            *zip(sizes.tolist(), denoiser_numbers.tolist(), strict=True)
        }:
            rows = np.flatnonzero((sizes == size) & (denoiser_numbers == number))
            row_inputs, row_targets, row_places = self._corrupted(
                read, rows, int(size), int(number), step
            )
            s = row_inputs.shape[1]
            t = row_targets.shape[1]
            input_lengths[rows] = s
            inputs[rows, :s] = row_inputs
            first = 0
            if self.joined:
                # The last input token predicts the first target.
                first = s - 1
                inputs[rows, s : s + t] = row_targets
            targets[rows, first : first + t] = row_targets
            places[rows, first : first + t] = row_places
        is_seen = np.arange(widths[0]) < input_lengths[:, None]
        if self.joined:
            return Laid(inputs, targets, prefix=is_seen, places=places)
        shifted_targets = np.concatenate(
            (np.full((len(sizes), 1), self.pad), targets[:, :-1]), axis=1
        )
        decoder_ids = np.where(shifted_targets == IGNORED, self.pad, shifted_targets)
        positions = (
            None
            if is_seen.all()
            else np.where(is_seen, np.arange(widths[0]), -1).astype(np.int32)
        )
        return Laid(
            inputs, targets, decoder_ids=decoder_ids, places=places, positions=positions
        )

    def key(self, name: str, step: int) -> int:
        """64-bit key of the named draws in a step."""
        return order_key(self.seed, "spans", name, step)

    def _corrupted(
        self, read: Read, rows: np.ndarray, size: int, number: int, step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs (g, s), targets and their places (g, t), -1 for none, of rows of
        `size` tokens corrupted by a denoiser; for a decoder they are
        truncated to fit.
        """
        denoiser = self.denoisers[number]
        if self.joined:
            size = tokens_that_fit(read.tokens.shape[1], size, denoiser)
        tokens = read.tokens[rows, :size].astype(np.int64)
        group = len(rows)
        front = np.tile(
            np.array(self.modes[number : number + 1], dtype=np.int64), (group, 1)
        )
        end = np.full((group, 1), self.eos)
        if size < 2:  # too short to hide a span
            nothing = np.zeros((group, 0), dtype=np.int64)
            return np.concatenate((front, tokens, end), axis=1), nothing, nothing
        hidden = self._mask(read, rows, size, denoiser, step)
        starts = hidden.copy()
        starts[:, 1:] &= ~hidden[:, :-1]
        sentinels = self.sentinels[starts.cumsum(axis=1) - 1]
        # A sentinel replaces its span in the inputs, and precedes it in the targets.
        inputs = np.where(hidden, sentinels, tokens)[~hidden | starts].reshape(
            group, -1
        )
        is_target = np.stack((starts, hidden), axis=2).reshape(group, -1)
        numbers = np.broadcast_to(np.arange(size), tokens.shape)
        targets, places = (
            np.stack(pair, axis=2).reshape(group, -1)[is_target].reshape(group, -1)
            for pair in ((sentinels, tokens), (np.full_like(tokens, -1), numbers))
        )
        parts = (front, inputs) if self.joined else (front, inputs, end)
        return (
            np.concatenate(parts, axis=1),
            np.concatenate((targets, end), axis=1),
            np.concatenate((places, np.full((group, 1), -1)), axis=1),
        )

    def _mask(
        self, read: Read, rows: np.ndarray, size: int, denoiser: Denoiser, step: int
    ) -> np.ndarray:
        """Mask of the hidden tokens (g, size) (random_spans_noise_mask)."""
        hidden, spans = spans_of(size, denoiser)
        if denoiser.mean_length is None:
            return np.broadcast_to(
                np.arange(size) >= size - hidden, (len(rows), size)
            ).copy()
        lengths = []
        for name, items in (("left", size - hidden), ("hidden", hidden)):
            drawn = draws(
                self.key(name, step),
                np.repeat(read.rows[rows, None], items - 1, axis=1),
                read.first[rows, None] + np.arange(items - 1),
            )
            # Segments start at the items with the least numbers.
            starts = 1 + np.argsort(drawn, axis=1, kind="stable")[:, : spans - 1]
            is_start = np.zeros((len(rows), items), dtype=bool)
            is_start[:, 0] = True
            np.put_along_axis(is_start, starts, True, axis=1)
            places = np.nonzero(is_start)[1].reshape(len(rows), spans)
            lengths.append(np.diff(places, axis=1, append=items))
        ends = np.stack(lengths, axis=2).reshape(len(rows), -1).cumsum(axis=1)[:, :-1]
        begins = np.zeros((len(rows), size), dtype=np.int64)
        np.put_along_axis(begins, ends, 1, axis=1)
        return begins.cumsum(axis=1) % 2 == 1


def corruption_of(
    section: SpanCorruption | Ul2, tokenizer: TextTokenizer, seed: int, length: int
) -> Corruption:
    """Layout of a manifest's section.

    Args:
        section: density and lengths of spans.
        tokenizer: has sentinels, and for UL2 mode tokens.
        seed: of the draws.
        length: tokens of the longest row.

    Raises:
        NoSentinelsError: the tokenizer has too few of them.
    """
    ids = tokenizer.special_ids
    problem = lacking(section, length, ids.__contains__)
    if problem is not None:
        raise NoSentinelsError(
            f"the tokenizer lacks special tokens: pretrain {problem}"
        )
    sentinels = np.array(
        [ids[SENTINEL.format(number)] for number in range(most_spans(section, length))],
        dtype=np.int64,
    )
    names = mode_names(ids.__contains__) if isinstance(section, Ul2) else None
    modes = (
        ()
        if names is None
        else tuple(ids[names[denoiser.mode]] for denoiser in section.denoisers)
    )
    return Corruption(
        section.denoisers,
        modes,
        seed,
        sentinels,
        tokenizer.eos,
        tokenizer.pad,
        isinstance(section, Ul2) and section.shape == "decoder",
    )
