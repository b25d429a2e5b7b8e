"""Which documents of each source are taken, in which order, and which of their tokens fill which row.

A source is a virtual token stream: its documents in drawn order, pass after pass, each followed by an end of text.
Nothing is written: a stream is three arrays from which any run's pieces are computed. Rows are made of runs of it.

`stream` takes the stream as it is, row after row: no padding, but a document is cut wherever a row ends. `best_fit`
keeps every document of at most a row whole (`best_fit.py`); a longer one is first cut into whole rows and a rest (Ding
et al. 2024, section 3); what a row has left over is padding.

With `aligned` document starts, every row begins with the beginning of a document (as nanochat's loader crops): what
does not fit into the row that a document begins in is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.document_sampling import draw, ordered_by
from gristmill.tokenize.mixing.best_fit import MOST_DOCUMENTS, best_fit_decreasing, by_bin
from gristmill.tokenize.mixing.candidates import VALIDATION_KEY, Candidates
from gristmill.tokenize.mixing.quotas import MixError, Quotas, exact
from gristmill.tokenize.order import order_key


@dataclass(frozen=True)
class PackedSource:
    """A source's documents, packed into rows.

    Attributes:
        pass_tokens: tokens of one pass over its documents, ends of text and repeats counted.
        stream: the documents that are taken.
        end: up to where in it.
        layout: the rows that they are packed into, phase after phase.
        rows_per_phase: how many of them each phase has.
    """

    pass_tokens: int
    stream: TokenStream
    end: int
    layout: Layout
    rows_per_phase: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.layout.rows

    @property
    def tokens(self) -> int:
        """Tokens of documents in them."""
        return self.layout.tokens

    def tokens_per_phase(self) -> list[int]:
        """Tokens of documents in the rows of each phase."""
        passed = np.concatenate([[0], np.cumsum(self.layout.length, dtype=np.int64)])
        borders = passed[self.layout.first[np.cumsum([0, *self.rows_per_phase])]]
        tokens: list[int] = np.diff(borders).tolist()
        return tokens


def packing_of(section: Mix) -> Packing:
    """How a section packs its training rows."""
    return Packing(section.sequence_length, section.packing == "best_fit", section.document_starts == "aligned")


def pack_training(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], section: Mix, quotas: Quotas, seed: int
) -> dict[str, PackedSource]:
    """Fill every source's rows with its training documents.

    Args:
        candidates: all documents.
        sources: name -> its keys of the mixture, in order.
        section: the mixture.
        quotas: rows of each source, phase by phase.
        seed: of the draws.

    Raises:
        MixError: rows that begin with a document drop so much that a source's documents do not fill its quota.
    """
    key = order_key(seed, "mix", "documents")
    packed = {}
    for number, (name, source) in enumerate(sources.items()):
        pass_tokens = candidates.pass_tokens(number)
        most = int(exact(source["max_epochs"]) * pass_tokens)
        wanted = [rows[number] * section.sequence_length for rows in quotas.rows]
        chosen = candidates.training(number)
        packed[name] = _pack(candidates, chosen, name, key, wanted, most, packing_of(section), pass_tokens)
    return packed


def _pack(
    candidates: Candidates, chosen: np.ndarray, name: str, key: int, quotas: Sequence[int], most: int,
    packing: Packing, pass_tokens: int,
) -> PackedSource:
    """Pack a source's documents until each phase has its quota of tokens in rows, reading `most` at the most."""
    least = sum(quotas)
    while True:
        stream = _stream(candidates, chosen, key, min(least, most), candidates.repeats)
        ends = _ends_of_phases(stream, quotas, packing)
        if ends is not None and ends[-1] <= most:
            break
        if least >= most:
            raise MixError(_describe_short(name, sum(quotas), most, packing))
        least *= 2  # A longer stream begins as the shorter one does.
    layouts = [lay_out(stream, begin, end, packing) for begin, end in zip([0, *ends], ends, strict=False)]
    rows = tuple(layout.rows for layout in layouts)
    return PackedSource(pass_tokens, upto(stream, ends[-1]), ends[-1], join_layouts(layouts), rows)


def _ends_of_phases(stream: TokenStream, quotas: Sequence[int], packing: Packing) -> list[int] | None:
    """Up to where in a stream each phase goes; None if the stream is too short for the last one."""
    ends: list[int] = []
    for quota in quotas:
        end = end_of(stream, ends[-1] if ends else 0, quota, packing)
        if end is None:
            return None
        ends.append(end)
    return ends


def _describe_short(name: str, quota: int, most: int, packing: Packing) -> str:
    return (f"sources.{name}: {most} tokens may be read (max_epochs), but rows that begin with a document drop what "
            f"does not fit into them, so these do not fill {quota} tokens ({quota // packing.sequence_length} rows of "
            f"{packing.sequence_length}); raise its max_epochs, lower its weight or mix.tokens, or set "
            + ("mix.document_starts to any" if packing.best_fit else "mix.packing to best_fit"))


def pack_validation(candidates: Candidates, sources: Sequence[str], section: Mix) -> dict[str, PackedSource]:
    """Fill rows with the held-out documents of every source, once each, whatever seed, weights and packing are."""
    packed = {}
    for number, name in enumerate(sources):
        chosen = np.flatnonzero(candidates.held_out & (candidates.source == number))
        tokens = int(candidates.documents.tokens[chosen].sum()) + len(chosen)
        rows = min(section.max_validation_rows, tokens // section.sequence_length)
        end = rows * section.sequence_length
        stream = _stream(candidates, chosen, VALIDATION_KEY, end)
        layout = lay_out(stream, 0, end, Packing(section.sequence_length))
        packed[name] = PackedSource(tokens, stream, end, layout, (rows,))
    return packed


def _stream(
    candidates: Candidates, chosen: np.ndarray, key: int, least_tokens: int, repeats: np.ndarray | None = None
) -> TokenStream:
    documents = candidates.documents
    return make_stream(chosen, documents.words[chosen], documents.tokens[chosen], key, least_tokens,
                       None if repeats is None else repeats[chosen])


@dataclass(frozen=True)
class TokenStream:
    """Documents back to back.

    Attributes:
        starts: int64 of shape (k + 1,): where each begins, its end of text being its last token; then the length.
        document: int64 of shape (k,): number of the document.
        copy: int32 of shape (k,): which pass over the source this is, from 0.
    """

    starts: np.ndarray
    document: np.ndarray
    copy: np.ndarray

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])


@dataclass(frozen=True)
class Pieces:
    """TokenParts of documents in rows, ordered by row and start; all int64 of shape (p,).

    Attributes:
        place: number of the row among those asked for.
        start: first token within the row.
        length: tokens, the end of text counted.
        entry: number of the document in the stream.
        offset: first token within the document.
    """

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    entry: np.ndarray
    offset: np.ndarray


def make_stream(
    documents: np.ndarray, words: np.ndarray, tokens: np.ndarray, key: int, least_tokens: int,
    repeats: np.ndarray | None = None,
) -> TokenStream:
    """Lay out whole passes over some documents until at least `least_tokens` tokens are there.

    Args:
        documents: int64 of shape (n,): their numbers.
        words: (n, 2) id words (`document_sampling.id_words`); the order depends on these and the key alone.
        tokens: int64 of shape (n,), without ends of text.
        key: 64 bits; every pass draws again.
        least_tokens: where to stop; documents that begin after it are left out.
        repeats: int64 of shape (n,): how often each document is in a pass, all of them in one drawn order; once if
            None. The k-th of at most r in pass p is copy p r + k.
    """
    entries, repeat = _entries(len(documents), repeats)
    most, size = int(repeat.max(initial=0)) + 1, int((tokens[entries] + 1).sum())
    orders, copies, total = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)], 0
    while len(entries) and total < least_tokens:
        drawn = _drawn_pass(words, key, len(orders) - 1, entries, repeat)
        orders.append(entries[drawn])
        copies.append(((len(copies) - 1) * most + repeat[drawn]).astype(np.int32))
        total += size
    order = np.concatenate(orders)
    starts = np.concatenate([[0], np.cumsum(tokens[order] + 1)]).astype(np.int64)
    used = int(np.searchsorted(starts[:-1], least_tokens))
    return TokenStream(starts[: used + 1], documents[order[:used]], np.concatenate(copies)[:used])


def _entries(number: int, repeats: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A pass before it is drawn: places of documents, and which time each of them is (from 0); both int64."""
    if repeats is None:
        return np.arange(number), np.zeros(number, dtype=np.int64)
    entries = np.repeat(np.arange(number), repeats)
    return entries, np.arange(len(entries)) - np.repeat(np.cumsum(repeats) - repeats, repeats)


def _drawn_pass(words: np.ndarray, key: int, number: int, entries: np.ndarray, repeat: np.ndarray) -> np.ndarray:
    """The order (int64) of a pass: each time of a document has a draw of its own."""
    draws = np.empty(len(entries), dtype=np.uint64)
    for time in range(int(repeat.max(initial=0)) + 1):
        parts = (number, time) if time else (number,)
        chosen = repeat == time
        draws[chosen] = draw(words[entries[chosen]], order_key(key, "pass", *parts))
    return ordered_by(draws, words[entries, 0], words[entries, 1], repeat)


def upto(stream: TokenStream, end: int) -> TokenStream:
    """The documents of a stream that begin before a token."""
    used = int(np.searchsorted(stream.starts[:-1], end))
    return TokenStream(stream.starts[: used + 1], stream.document[:used], stream.copy[:used])


def cut_runs(stream: TokenStream, place: np.ndarray, start: np.ndarray, at: np.ndarray, length: np.ndarray) -> Pieces:
    """The pieces of runs of a stream, which lie in it whole.

    Args:
        stream: the documents.
        place: int64 of shape (n,), number of the row that a run is in.
        start: int64 of shape (n,), first token within the row.
        at: int64 of shape (n,), first token within the stream.
        length: of shape (n,), tokens.
    """
    first = np.searchsorted(stream.starts, at, side="right") - 1
    counts = np.searchsorted(stream.starts, at + length, side="left") - first
    pieces = Pieces(*(np.empty(int(counts.sum()), dtype=np.int64) for _ in range(5)))
    cut(stream.starts, place, start, at, length, first, counts, pieces.place, pieces.start, pieces.length, pieces.entry,
        pieces.offset)
    return pieces


@kernel
def cut(
    starts: np.ndarray, place: np.ndarray, start: np.ndarray, at: np.ndarray, length: np.ndarray, first: np.ndarray,
    counts: np.ndarray, to_place: np.ndarray, to_start: np.ndarray, to_length: np.ndarray, to_entry: np.ndarray,
    to_offset: np.ndarray,
) -> None:  # fmt: skip
    """Fill the columns of `Pieces` (`to_...`), run after run (see `cut_runs`).

    Args:
        starts: of the stream.
        place, start, at, length: of the runs.
        first: int64 of shape (n,), number of the document in the stream that a run begins in.
        counts: int64 of shape (n,), how many documents it goes through.
        to_place, to_start, to_length, to_entry, to_offset: see `Pieces`.
    """
    piece = 0
    for run in range(len(at)):
        for entry in range(first[run], first[run] + counts[run]):
            begin = max(starts[entry], at[run])
            to_place[piece], to_entry[piece] = place[run], entry
            to_start[piece], to_offset[piece] = start[run] + begin - at[run], begin - starts[entry]
            to_length[piece] = min(starts[entry + 1], at[run] + length[run]) - begin
            piece += 1


@dataclass(frozen=True)
class Packing:
    """How rows are made of a stream.

    Attributes:
        sequence_length: tokens per row, L.
        best_fit: whether documents stay whole where that can be.
        aligned: whether every row begins with a document's first token.
    """

    sequence_length: int
    best_fit: bool = False
    aligned: bool = False

    @property
    def name(self) -> str:
        """As the summary names it."""
        return ("best_fit" if self.best_fit else "stream") + ("_aligned" if self.aligned else "")


@dataclass(frozen=True)
class Layout:
    """The runs of the stream that fill each row, one after the other from its beginning.

    Attributes:
        first: int64 of shape (rows + 1,), where each row's runs begin in the other two.
        at: int64 of shape (runs,), first token within the stream.
        length: int32 of shape (runs,), tokens.
    """

    first: np.ndarray
    at: np.ndarray
    length: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self.length.sum(dtype=np.int64))


def end_of(stream: TokenStream, begin: int, tokens: int, packing: Packing) -> int | None:
    """Up to where a stream must be packed, from token `begin` on, so that the rows hold `tokens` tokens of documents.

    Args:
        stream: the documents.
        begin: where to begin.
        tokens: a whole number of rows' worth.
        packing: how.

    Returns:
        the end, exclusive; None if the stream is too short.
    """
    if not packing.aligned:
        return begin + tokens if begin + tokens <= stream.tokens else None
    if not tokens:
        return begin
    if packing.best_fit:
        return _end_of_beginnings(stream, begin, tokens, packing.sequence_length)
    at = aligned_rows(stream.starts, begin, stream.tokens, packing.sequence_length)
    rows = tokens // packing.sequence_length
    end = int(at[rows - 1]) + packing.sequence_length if rows <= len(at) else stream.tokens + 1
    return end if end <= stream.tokens else None


def lay_out(stream: TokenStream, begin: int, end: int, packing: Packing) -> Layout:
    """Make rows of the tokens [begin, end) of a stream; the last one may be padded in any packing."""
    length = packing.sequence_length
    if packing.best_fit:
        return _best_fit(stream, begin, end, packing)
    at = aligned_rows(stream.starts, begin, end, length) if packing.aligned else np.arange(begin, end, length)
    return Layout(np.arange(len(at) + 1, dtype=np.int64), at.astype(np.int64),
                  np.minimum(length, end - at).astype(np.int32))


def join_layouts(layouts: Sequence[Layout]) -> Layout:
    """The rows of several layouts of one stream, one after another."""
    runs = np.cumsum([0, *(len(layout.at) for layout in layouts)])
    firsts = [layout.first[:-1] + before for layout, before in zip(layouts, runs, strict=False)]
    return Layout(np.concatenate([*firsts, runs[-1:]]).astype(np.int64),
                  np.concatenate([layout.at for layout in layouts]),
                  np.concatenate([layout.length for layout in layouts]))


def _parts(stream: TokenStream, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and length (int64) of every document's part of [begin, end)."""
    first = int(np.searchsorted(stream.starts, begin, side="right")) - 1
    last = int(np.searchsorted(stream.starts, end, side="left"))
    at = np.maximum(stream.starts[first:last], begin)
    return at, np.minimum(stream.starts[first + 1 : last + 1], end) - at


def _best_fit(stream: TokenStream, begin: int, end: int, packing: Packing) -> Layout:
    length = packing.sequence_length
    if packing.aligned:
        begin = _next_start(stream, begin, end)
    at, size = _parts(stream, begin, end)
    if packing.aligned:
        size = np.minimum(size, length)
    whole, rest = np.divmod(size, length)
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full = np.repeat(at, whole) + number * length
    left = np.flatnonzero(rest)
    if len(left) > MOST_DOCUMENTS:
        raise ValueError(f"best_fit packs at most {MOST_DOCUMENTS} documents of a source at a time, not {len(left)}; "
                         "split the source, or set mix.packing to stream")
    lengths = rest[left].astype(np.int32)
    bins, used = best_fit_decreasing(lengths, length)
    first = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=used))]).astype(np.int64)
    order = by_bin(bins, first)
    return Layout(
        np.concatenate([np.arange(len(full)), len(full) + first]),
        np.concatenate([full, (at + whole * length)[left][order]]),
        np.concatenate([np.full(len(full), length, dtype=np.int32), lengths[order]]),
    )


def _end_of_beginnings(stream: TokenStream, begin: int, tokens: int, length: int) -> int | None:
    """Where the first `length` tokens of each document, from `begin` on, are `tokens` tokens together."""
    begin = _next_start(stream, begin, stream.tokens)
    at, size = _parts(stream, begin, stream.tokens)
    total = np.cumsum(np.minimum(size, length))
    last = int(np.searchsorted(total, tokens))
    if last == len(total):
        return None
    return int(at[last] + min(size[last], length) - (total[last] - tokens))


def _next_start(stream: TokenStream, begin: int, end: int) -> int:
    entry = int(np.searchsorted(stream.starts, begin))
    return min(int(stream.starts[entry]), end)


@kernel
def aligned_rows(starts: np.ndarray, begin: int, end: int, length: int) -> np.ndarray:
    """Where rows begin that each take `length` tokens from the next document's beginning on.

    Args:
        starts: int64 of shape (k + 1,), see `TokenStream`.
        begin: no row begins before this token.
        end: nor at or behind this one.
        length: tokens per row.

    Returns:
        int64 of shape (rows,).
    """
    rows = np.empty(max(0, end - begin) // length + 1, dtype=np.int64)
    found, free = 0, begin
    for entry in range(np.searchsorted(starts, begin), len(starts) - 1):
        if starts[entry] >= end:
            break
        if starts[entry] >= free:
            rows[found] = starts[entry]
            found += 1
            free = starts[entry] + length
    return rows[:found]
