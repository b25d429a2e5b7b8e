"""The pages of packed rows: the documents in each, and its tokens with and without a
loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table
from gristmill.flows.browse.addresses import (
    DOCUMENTS,
    EXAMPLES_PAGE,
    ROWS_PAGE,
    TRAINING_PAGE,
    OneRow,
    Rows,
    address,
    page_links,
)
from gristmill.flows.browse.browse_elements import id_span, neighbours
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.pages.page_elements import (
    Button,
    Field,
    Form,
    Heading,
    Inline,
    Link,
    Links,
    Mark,
    Note,
    Page,
    Part,
    Span,
    Text,
    page_of,
    table,
)
from gristmill.flows.questions.training_reads import TraceError, reading_of
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.train.data.preference_rows import EXAMPLES

ROWS_ON_PAGE = 50
BEGINNING_TOKENS = 48
MOST_TOKENS = 8192
"""Tokens of a row that are shown."""
MOST_UNIT = 8
"""Tokens of one character at most: four bytes, and as many that are not UTF-8."""


@dataclass(frozen=True)
class ReadRows:
    """Some rows of a packed set.

    Attributes:
        tokens: ids, (n, L).
        is_trained: tokens with a loss, (n, L) bool; without masks all but the first of
            a row and padding.
        filled: tokens before the padding, (n,).
        pieces: documents or parts of them, (n,).
        sources: names, n of them.
    """

    tokens: np.ndarray
    is_trained: np.ndarray
    filled: np.ndarray
    pieces: np.ndarray
    sources: list[str]


@dataclass(frozen=True)
class Piece:
    """A document in a row, or a part of it.

    Attributes:
        id: of the document or example.
        start, length: its tokens in the row.
        offset: tokens of the document before it.
        copy: the number of its copy, from 0.
        title: its origin or its id, with a link to it.
    """

    id: bytes
    start: int
    length: int
    offset: int
    copy: int
    title: Link


class RowSet:
    """The rows of a packed set: those of training, or a source's that are held out.

    Raises:
        NotThereError: there is no such set, or it holds no rows of the source out.
    """

    def __init__(self, run: BrowsedRun, stage: str, held_out: str | None) -> None:
        self.run, self.stage, self.held_out = run, stage, held_out
        self.packed = run.packed(stage)
        self.total = self.packed.rows
        if held_out is not None:
            entries = self.packed.manifest["validation"]
            if held_out not in entries:
                raise NotThereError(
                    f"{stage} holds no rows of {held_out!r} out; sources are "
                    f"{', '.join(entries) or 'none'}"
                )
            self.total = int(entries[held_out]["rows"])

    def link(self, *row: int, **parameters: object) -> str:
        """The address of a row, or of all."""
        held_out = self.held_out
        return address(ROWS_PAGE, self.stage, *row, held_out=held_out, **parameters)

    def read(self, rows: np.ndarray) -> ReadRows:
        """Read rows by number, (n,) int64."""
        packed, held_out = self.packed, self.held_out
        masks = None
        if held_out is None:
            tokens, bounds = packed.tokens(rows), packed.boundaries(rows)
            sources = [packed.sources[number] for number in packed.source_of(rows)]
            masks = self.run.masks(self.stage)
        else:
            tokens = packed.validation(held_out)[rows]
            bounds = packed.validation_boundaries(held_out).of(rows)
            sources = [held_out] * len(rows)
        filled, positions = bounds.filled(), np.arange(packed.sequence_length)
        is_trained = (positions > 0) & (positions < filled[:, None])
        if masks is not None:
            is_trained = masks.read(rows)
        pieces = np.diff(bounds.offsets) - 1
        return ReadRows(tokens, is_trained, filled, pieces, sources)


def rows_page(run: BrowsedRun, query: Rows) -> Page:
    """A part of a packed set's rows: source, pieces, tokens, and beginning of each."""
    rows, tokenizer = RowSet(run, query.stage, query.held_out), run.tokenizer()
    after, total = query.after, rows.total
    if after and after >= total:
        raise NotThereError(
            f"{query.stage} has {total:,} rows; there is none behind row {after:,}"
        )
    end = min(after + ROWS_ON_PAGE, total)
    part = rows.read(np.arange(after, end, dtype=np.int64))
    lines = [
        [
            Link(str(after + index), rows.link(after + index)),
            source,
            part.pieces[index],
            part.filled[index],
            part.is_trained[index].sum(),
            tokenizer.decode(
                part.tokens[index, : min(BEGINNING_TOKENS, part.filled[index])].tolist()
            ),
        ]
        for index, source in enumerate(part.sources)
    ]
    columns = {"pieces": ",", "tokens": ",", "with loss": ",", "begins": ""}
    meanings = {
        "row": "its number",
        "pieces": "documents or parts of them",
        "tokens": "without padding",
    }
    return page_of(
        "Packed rows",
        Links(_sets(run, query)),
        Note(f"{total:,} rows of {rows.packed.sequence_length:,} tokens."),
        table({"row": ">", "source": "", **columns}, lines, meanings),
        page_links(total, after, ROWS_ON_PAGE, lambda row: rows.link(after=row)),
        Form(
            address(ROWS_PAGE, query.stage),
            [Field("after", "from row", is_number=True, is_required=True)],
            [Button("Go")],
            {"held_out": query.held_out} if query.held_out else {},
        ),
    )


def _sets(run: BrowsedRun, query: Rows) -> list[Inline]:
    """Links to all sets of rows; the current one is text."""
    links: list[Inline] = []
    for stage in run.packed_sets():
        sets: dict[str | None, str] = {None: stage}
        for source, entry in run.packed(stage).manifest["validation"].items():
            if entry["rows"]:
                sets[source] = f"{stage}, held out of {source}"
        for held_out, title in sets.items():
            link = Link(title, address(ROWS_PAGE, stage, held_out=held_out))
            is_current = (stage, held_out) == (query.stage, query.held_out)
            links.append(title if is_current else link)
    return links


def row_page(run: BrowsedRun, query: OneRow) -> Page:
    """A row: its pieces with their documents, and its tokens as text."""
    rows, row = RowSet(run, query.stage, query.held_out), query.row
    if row >= rows.total:
        raise NotThereError(
            f"{query.stage} has {rows.total:,} rows, counted from 0; "
            f"there is no row {row:,}"
        )
    numbers = np.array([row], dtype=np.int64)
    read, packed = rows.read(numbers), rows.packed
    filled, num_trained = int(read.filled[0]), int(read.is_trained.sum())
    padding = packed.sequence_length - filled
    has_masks, is_held_out = (
        run.masks(query.stage) is not None,
        query.held_out is not None,
    )
    place = "" if is_held_out else f", {packed.shards_of(numbers)[0]}"
    tokens = f"{filled:,} tokens, {num_trained:,} of them with a loss"
    sentence: list[Inline] = [
        f"{read.sources[0]}{place}: {tokens}",
        f", and {padding:,} of padding." if padding else ".",
        *([] if is_held_out else _preference(packed, query)),
    ]
    is_excluded = not is_held_out and row in packed.withheld.tolist()
    legend: list[Inline] = ["All but what is grey has a loss. "]
    if has_masks:
        legend = [Span("Green", "trained"), " has a loss, grey none. "]
    view = rows.link(row, tokens=None if query.tokens else "true")
    legend.append(Link("As text" if query.tokens else "Token by token", view))
    texts: list[Part] = []
    for piece in _pieces(rows, row):
        if piece.start < MOST_TOKENS:
            mark: Mark = "trained" if has_masks else "plain"
            spans = _spans(run.tokenizer(), read, piece, query.tokens, mark)
            texts += [
                Heading(_piece_title(piece)),
                Text(spans, "tokens" if query.tokens else ""),
            ]
    padded = Span(f"{padding:,} tokens of padding, without a loss.", "masked")
    suffix = f", held out of {query.held_out}" if is_held_out else ""
    excluded = "A document that lay in this row is excluded, so that no step reads it."
    shown_tokens = "true" if query.tokens else None
    begin = row // ROWS_ON_PAGE * ROWS_ON_PAGE
    return page_of(
        f"Row {row} of {query.stage}{suffix}",
        neighbours(
            "row",
            row,
            range(rows.total),
            Link("all rows", rows.link(after=begin)),
            lambda number: rows.link(number, tokens=shown_tokens),
        ),
        Note(excluded, "warning") if is_excluded else None,
        Note(sentence),
        None if is_held_out else _reads(run, query),
        Note(legend),
        texts,
        Note("The rest of this long row is left out.")
        if filled > MOST_TOKENS
        else None,
        Note([padded], "plain") if padding else None,
    )


def _pieces(rows: RowSet, row: int) -> Iterator[Piece]:
    """The pieces of a row, each with a link to its document, or to its example."""
    packed = rows.packed
    if rows.held_out is None:
        pieces = packed.pieces(np.array([row], dtype=np.int64))
    else:
        pieces = packed.validation_pieces(rows.held_out)
        pieces = pieces.filter(pc.equal(pieces["row"], row))
    origins = {}
    if packed.has_ledger and rows.run.corpora():
        ids = set(pieces["id"].to_pylist())
        origins = describe_documents(packed, rows.run.inputs(), ids)
    page = DOCUMENTS if packed.has_ledger else EXAMPLES_PAGE
    keys = ("start", "length", "offset", "copy")
    for piece in pieces.select(["id", *keys]).to_pylist():
        origin, id_ = origins.get(piece["id"]), piece["id"].hex()
        place: Inline = id_span(id_)
        if origin is not None:
            place = origin.get("url", origin["locator"])
        yield Piece(**piece, title=Link(place, address(page, id_)))


def _piece_title(piece: Piece) -> list[Inline]:
    tokens = f" tokens {piece.start} to {piece.start + piece.length - 1}"
    offset = f", from token {piece.offset:,} of it" if piece.offset else ""
    copy = f", copy {piece.copy + 1}" if piece.copy else ""
    return [piece.title, f"{tokens}{offset}{copy}"]


def _spans(
    tokenizer: TextTokenizer,
    read: ReadRows,
    piece: Piece,
    by_token: bool,
    trained: Mark,
) -> list[Span]:
    """A piece's text in spans with and without a loss, or token by token with their ids
    as titles.
    """
    part = slice(piece.start, min(piece.start + piece.length, MOST_TOKENS))
    ids, has_loss = read.tokens[0, part].tolist(), read.is_trained[0, part].tolist()
    if by_token:
        groups = list(_units(tokenizer, ids))
    else:
        changes = groupby(range(len(ids)), key=has_loss.__getitem__)
        groups = [list(group) for _, group in changes]
    spans = []
    for group in groups:
        tokens = ids[group[0] : group[-1] + 1]
        title = " ".join(map(str, tokens)) if by_token else ""
        mark: Mark = trained if has_loss[group[0]] else "masked"
        spans.append(Span(tokenizer.decode(tokens), mark, title))
    return spans


def _units(tokenizer: TextTokenizer, ids: Sequence[int]) -> Iterator[list[int]]:
    """Positions of tokens that are text together: one, or the few that share a
    character.
    """
    begin = 0
    while begin < len(ids):
        end = begin + 1
        while end < min(len(ids), begin + MOST_UNIT) and tokenizer.decode(
            ids[begin:end]
        ).endswith("\ufffd"):
            end += 1
        yield list(range(begin, end))
        begin = end


def _preference(packed: PackedSet, query: OneRow) -> list[Inline]:
    """The answer of a preference that a row is, and the row of the other one; empty for
    any other set.
    """
    if not (packed.folder / EXAMPLES).exists():
        return []
    examples = read_table(packed.folder / EXAMPLES, ["row", "rows", "label"])
    example = examples.filter(pc.less_equal(examples["row"], query.row)).to_pylist()[-1]
    if example["rows"] == 1:
        return [f" It is labelled {'good' if example['label'] else 'bad'}."]
    is_chosen = query.row == example["row"]
    own, other = ("chosen", "rejected") if is_chosen else ("rejected", "chosen")
    row = address(ROWS_PAGE, query.stage, example["row"] + is_chosen)
    link = Link(f"the {other} one", row)
    return [f" It is the {own} answer; ", link, " is beside it."]


def _reads(run: BrowsedRun, query: OneRow) -> Links:
    """The steps that read a row of the mixture, of every training that reads it in the
    set's own order.
    """
    links: list[Inline] = []
    for stage, node in run.session.plan.items():
        if node.stage.row_kind != "documents" or query.stage not in node.inputs:
            continue
        try:
            reading = reading_of(run.session, stage)
        except TraceError:
            continue
        done = reading.steps_done()
        for step in reading.steps_that_read(np.array([query.row], dtype=np.int64)):
            link = Link(f"{stage} {step}", address(TRAINING_PAGE, stage, step))
            links.append(
                [link, " (to come)"] if reading.use(step, done) == "will read" else link
            )
    return Links(links, "Steps:")
