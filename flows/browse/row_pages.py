"""The pages of packed rows: the documents in each, and its tokens with and without a
loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from gristmill.flows.browse.browse_elements import id_span
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
    Table,
    Text,
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


def rows_page(run: BrowsedRun, query: Rows) -> Page:
    """A part of a packed set's rows: source, pieces, tokens, and beginning of each."""
    packed = run.packed(query.stage)
    total = _number_of_rows(packed, query.stage, query.held_out)
    if query.after and query.after >= total:
        raise NotThereError(
            f"{query.stage} has {total:,} rows; there is none behind "
            f"row {query.after:,}"
        )
    rows = np.arange(
        query.after, min(query.after + ROWS_ON_PAGE, total), dtype=np.int64
    )
    tokens, bounds, sources = _read(packed, rows, query.held_out)
    filled = bounds.filled()
    num_pieces = np.diff(bounds.offsets) - 1
    num_trained = _trained(run, query.stage, packed, rows, filled, query.held_out).sum(
        axis=1
    )
    tokenizer = run.tokenizer()
    lines: list[list[Inline]] = []
    for index, (row, source) in enumerate(zip(rows.tolist(), sources, strict=True)):
        link = Link(
            str(row), address(ROWS_PAGE, query.stage, row, held_out=query.held_out)
        )
        counts = [f"{counts[index]:,}" for counts in (num_pieces, filled, num_trained)]
        beginning = tokenizer.decode(
            tokens[index, : min(BEGINNING_TOKENS, int(filled[index]))].tolist()
        )
        lines.append([link, source, *counts, beginning])

    def link_after(after: int) -> str:
        return address(ROWS_PAGE, query.stage, held_out=query.held_out, after=after)

    meanings = {
        "row": "its number",
        "pieces": "documents or parts of them",
        "tokens": "without padding",
    }
    parts: list[Part] = [
        Links(_sets(run, query)),
        Note(f"{total:,} rows of {packed.sequence_length:,} tokens."),
        Table(
            ["row", "source", "pieces", "tokens", "with loss", "begins"],
            lines,
            {0, 2, 3, 4},
            meanings,
        ),
        page_links(total, query.after, ROWS_ON_PAGE, link_after),
        Form(
            address(ROWS_PAGE, query.stage),
            [Field("after", "from row", is_number=True, is_required=True)],
            [Button("Go")],
            {"held_out": query.held_out} if query.held_out else {},
        ),
    ]
    return Page("Packed rows", parts=parts)


def _sets(run: BrowsedRun, query: Rows) -> list[Inline]:
    """Links to all sets of rows; the current one is text."""
    links: list[Inline] = []
    for stage in run.packed_sets():
        sets: dict[str | None, str] = {None: stage}
        for source, entry in run.packed(stage).manifest["validation"].items():
            if entry["rows"]:
                sets[source] = f"{stage}, held out of {source}"
        for held_out, title in sets.items():
            is_current = (stage, held_out) == (query.stage, query.held_out)
            links.append(
                title
                if is_current
                else Link(title, address(ROWS_PAGE, stage, held_out=held_out))
            )
    return links


def _number_of_rows(packed: PackedSet, stage: str, held_out: str | None) -> int:
    if held_out is None:
        return packed.rows
    entries = packed.manifest["validation"]
    if held_out not in entries:
        raise NotThereError(
            f"{stage} holds no rows of {held_out!r} out; sources are "
            f"{', '.join(entries) or 'none'}"
        )
    return int(entries[held_out]["rows"])


def _read(
    packed: PackedSet, rows: np.ndarray, held_out: str | None
) -> tuple[np.ndarray, Any, list[str]]:
    """Tokens (n, L), boundaries and names of the sources of some rows."""
    if held_out is not None:
        bounds = packed.validation_boundaries(held_out).of(rows)
        return packed.validation(held_out)[rows], bounds, [held_out] * len(rows)
    sources = [packed.sources[number] for number in packed.source_of(rows).tolist()]
    return packed.tokens(rows), packed.boundaries(rows), sources


def _trained(
    run: BrowsedRun,
    stage: str,
    packed: PackedSet,
    rows: np.ndarray,
    filled: np.ndarray,
    held_out: str | None,
) -> np.ndarray:
    """Tokens of some rows that have a loss: (n, L) bool. Without masks all but the
    first of a row and padding.
    """
    masks = run.masks(stage) if held_out is None else None
    if masks is not None:
        return masks.read(rows)
    positions = np.arange(packed.sequence_length)
    trained: np.ndarray = (positions > 0) & (positions < filled[:, None])
    return trained


def row_page(run: BrowsedRun, query: OneRow) -> Page:
    """A row: its pieces with their documents, and its tokens as text."""
    packed = run.packed(query.stage)
    total = _number_of_rows(packed, query.stage, query.held_out)
    if query.row >= total:
        raise NotThereError(
            f"{query.stage} has {total:,} rows, counted from 0; "
            f"there is no row {query.row:,}"
        )
    rows = np.array([query.row], dtype=np.int64)
    tokens, bounds, (source,) = _read(packed, rows, query.held_out)
    filled = int(bounds.filled()[0])
    trained = _trained(run, query.stage, packed, rows, bounds.filled(), query.held_out)[
        0
    ]
    has_masks = run.masks(query.stage) is not None
    padding = packed.sequence_length - filled
    is_trained_set = query.held_out is None
    parts: list[Part] = [Links(_neighbours(query, total))]
    if is_trained_set and query.row in packed.withheld.tolist():
        parts.append(
            Note(
                "A document that lay in this row is excluded, so that no step reads it.",
                "warning",
            )
        )
    place = f", {packed.shards_of(rows)[0]}" if is_trained_set else ""
    sentence: list[Inline] = [
        f"{source}{place}: {filled:,} tokens, "
        f"{int(trained.sum()):,} of them with a loss"
    ]
    sentence.append(f", and {padding:,} of padding." if padding else ".")
    if is_trained_set:
        parts += [Note([*sentence, *_preference(packed, query)]), _reads(run, query)]
    else:
        parts.append(Note(sentence))
    legend: list[Inline] = ["All but what is grey has a loss. "]
    if has_masks:
        legend = [Span("Green", "trained"), " has a loss, grey none. "]
    other_view = None if query.tokens else "true"
    link = address(
        ROWS_PAGE, query.stage, query.row, held_out=query.held_out, tokens=other_view
    )
    parts.append(
        Note([*legend, Link("As text" if query.tokens else "Token by token", link)])
    )
    trained_mark: Mark = "trained" if has_masks else "plain"
    for piece in _pieces(run, packed, query):
        if piece["start"] < MOST_TOKENS:
            spans = _spans(
                run.tokenizer(), tokens[0], trained, piece, query.tokens, trained_mark
            )
            parts += [
                Heading(_piece_title(piece)),
                Text(spans, "tokens" if query.tokens else ""),
            ]
    if filled > MOST_TOKENS:
        parts.append(Note("The rest of this long row is left out."))
    if padding:
        parts.append(
            Note(
                [Span(f"{padding:,} tokens of padding, without a loss.", "masked")],
                "plain",
            )
        )
    suffix = "" if is_trained_set else f", held out of {query.held_out}"
    return Page(f"Row {query.row} of {query.stage}{suffix}", parts=parts)


def _neighbours(query: OneRow, total: int) -> list[Inline]:
    def link(row: int) -> str:
        tokens = "true" if query.tokens else None
        return address(
            ROWS_PAGE, query.stage, row, held_out=query.held_out, tokens=tokens
        )

    begin = query.row // ROWS_ON_PAGE * ROWS_ON_PAGE
    links: list[Inline] = [
        Link(
            "all rows",
            address(ROWS_PAGE, query.stage, held_out=query.held_out, after=begin),
        )
    ]
    if query.row > 0:
        links.insert(0, Link(f"← row {query.row - 1}", link(query.row - 1), "prev"))
    if query.row + 1 < total:
        links.append(Link(f"row {query.row + 1} →", link(query.row + 1), "next"))
    return links


def _pieces(run: BrowsedRun, packed: PackedSet, query: OneRow) -> list[dict[str, Any]]:
    """The pieces of a row, each with a link to its document, and its origin, or to its
    example.
    """
    table = packed.pieces(np.array([query.row], dtype=np.int64))
    if query.held_out is not None:
        table = packed.validation_pieces(query.held_out)
        table = table.filter(pc.equal(table["row"], query.row))
    pieces: list[dict[str, Any]] = table.to_pylist()
    origins: Mapping[bytes, Mapping[str, Any]] = {}
    if packed.has_ledger and run.corpora():
        origins = describe_documents(
            packed, run.inputs(), {piece["id"] for piece in pieces}
        )
    page = DOCUMENTS if packed.has_ledger else EXAMPLES_PAGE
    for piece in pieces:
        origin = origins.get(piece["id"], {})
        piece["origin"] = origin.get("url") or origin.get("locator")
        piece["link"] = address(page, piece["id"].hex())
    return pieces


def _piece_title(piece: Mapping[str, Any]) -> list[Inline]:
    tokens = f" tokens {piece['start']} to {piece['start'] + piece['length'] - 1}"
    offset = f", from token {piece['offset']:,} of it" if piece["offset"] else ""
    copy = f", copy {piece['copy'] + 1}" if piece["copy"] else ""
    link = Link(piece["origin"] or id_span(piece["id"].hex()), piece["link"])
    return [link, f"{tokens}{offset}{copy}"]


def _spans(
    tokenizer: TextTokenizer,
    tokens: np.ndarray,
    trained: np.ndarray,
    piece: Mapping[str, Any],
    by_token: bool,
    trained_mark: Mark,
) -> list[Span]:
    """A piece's text in spans with and without a loss, or token by token with their ids
    as titles.
    """
    end = min(piece["start"] + piece["length"], MOST_TOKENS)
    ids, has_loss = tokens[piece["start"] : end], trained[piece["start"] : end]
    if by_token:
        groups: list[Any] = list(_units(tokenizer, ids.tolist()))
    else:
        groups = np.split(
            np.arange(len(ids)), np.flatnonzero(np.diff(has_loss.astype(np.int8))) + 1
        )
    spans = []
    for group in groups:
        if len(group):
            title = " ".join(map(str, ids[group].tolist())) if by_token else ""
            mark: Mark = trained_mark if has_loss[group[0]] else "masked"
            spans.append(Span(tokenizer.decode(ids[group].tolist()), mark, title))
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
    table = read_table(packed.folder / EXAMPLES, ["row", "rows", "label"])
    begins_before = pc.less_equal(table["row"], query.row)
    example = (
        table.filter(begins_before)
        .slice(pc.sum(begins_before).as_py() - 1, 1)
        .to_pylist()[0]
    )
    if example["rows"] == 1:
        return [f" It is labelled {'good' if example['label'] else 'bad'}."]
    is_chosen = query.row == example["row"]
    own, other = ("chosen", "rejected") if is_chosen else ("rejected", "chosen")
    link = Link(
        f"the {other} one", address(ROWS_PAGE, query.stage, example["row"] + is_chosen)
    )
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
