"""The pages of packed rows: the documents in each, and its tokens with and without a
loss.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from gristmill.flows.browser.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    Name,
    Number,
    address,
    page_links,
)
from gristmill.flows.pages.document_elements import (
    example_link,
    id_span,
    neighbours,
    step_link,
    tabs,
)
from gristmill.flows.pages.page_elements import (
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
from gristmill.flows.questions.trace import describe_reading
from gristmill.flows.questions.training_reads import TraceError, reading_of
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.train.data.preference_rows import EXAMPLES

ROWS_ON_PAGE = 50
BEGINNING_TOKENS = 48
MOST_TOKENS = 8192
"""Tokens of a row that are shown."""


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
                    f"{stage} holds no rows of {held_out!r} out; sources are", entries
                )
            self.total = int(entries[held_out]["rows"])

    def link(self, *row: int, **parameters: object) -> str:
        """The address of a row, or of all."""
        held_out = self.held_out
        return address("rows", self.stage, *row, held_out=held_out, **parameters)

    def read(self, *bounds: int) -> ReadRows:
        """Read the rows of a range."""
        packed, held_out = self.packed, self.held_out
        rows = np.arange(*bounds, dtype=np.int64)
        masks = None
        if held_out is None:
            tokens, ends = packed.tokens(rows), packed.boundaries(rows)
            sources = [packed.sources[number] for number in packed.source_of(rows)]
            masks = self.run.masks(self.stage)
        else:
            tokens = packed.validation(held_out)[rows]
            ends = packed.validation_boundaries(held_out).of(rows)
            sources = [held_out] * len(rows)
        filled, positions = ends.filled(), np.arange(packed.sequence_length)
        is_trained = (positions > 0) & (positions < filled[:, None])
        if masks is not None:
            is_trained = masks.read(rows)
        return ReadRows(tokens, is_trained, filled, np.diff(ends.offsets) - 1, sources)


def rows_page(
    run: BrowsedRun, stage: Name, held_out: Name | None = None, after: Number = 0
) -> Page:
    """A part of a packed set's rows: source, pieces, tokens, and beginning of each."""
    rows, tokenizer = RowSet(run, stage, held_out), run.tokenizer()
    total = rows.total
    if after and after >= total:
        raise NotThereError(
            f"{stage} has {total:,} rows; there is none behind row {after:,}"
        )
    part = rows.read(after, min(after + ROWS_ON_PAGE, total))
    lines = []
    for index, source in enumerate(part.sources):
        filled = part.filled[index]
        beginning = part.tokens[index, : min(BEGINNING_TOKENS, filled)]
        lines.append(
            [
                Link(str(after + index), rows.link(after + index)),
                source,
                part.pieces[index],
                filled,
                part.is_trained[index].sum(),
                tokenizer.decode(beginning.tolist()),
            ]
        )
    columns = {"pieces": ",", "tokens": ",", "with loss": ",", "begins": ""}
    meanings = {
        "row": "its number",
        "pieces": "documents or parts of them",
        "tokens": "without padding",
    }
    sets: dict[str, str] = {}
    for name in run.packed_sets():
        sets[name] = address("rows", name)
        for source, entry in run.packed(name).manifest["validation"].items():
            if entry["rows"]:
                link = address("rows", name, held_out=source)
                sets[f"{name}, held out of {source}"] = link
    return page_of(
        "Packed rows",
        tabs(sets, stage if held_out is None else f"{stage}, held out of {held_out}"),
        f"{total:,} rows of {rows.packed.sequence_length:,} tokens.",
        table({"row": ">", "source": "", **columns}, lines, meanings),
        page_links(total, after, ROWS_ON_PAGE, lambda row: rows.link(after=row)),
        Form(
            address("rows", stage),
            [Field("after", "from row", is_number=True, is_required=True)],
            "Go",
            {"held_out": held_out} if held_out else {},
        ),
    )


def row_page(
    run: BrowsedRun,
    stage: Name,
    row: Number,
    held_out: Name | None = None,
) -> Page:
    """A row: its pieces with their documents, and its tokens as text."""
    rows = RowSet(run, stage, held_out)
    if row >= rows.total:
        raise NotThereError(
            f"{stage} has {rows.total:,} rows, counted from 0; there is no row {row:,}"
        )
    read, packed = rows.read(row, row + 1), rows.packed
    filled = int(read.filled[0])
    padding = packed.sequence_length - filled
    has_masks = run.masks(stage) is not None
    place = f"held out of {held_out}"
    steps, is_excluded = None, False
    sentence = ""
    if held_out is None:
        place = packed.shards_of(np.array([row]))[0]
        steps = _reads(run, stage, row)
        if (packed.folder / EXAMPLES).exists():
            # Each row of a preference set is one of the two answers of a pair.
            answer = "rejected" if row % 2 else "chosen"
            sentence = f" It is the {answer} answer of its pair."
        is_excluded = row in packed.withheld.tolist()
    counts = f"{filled:,} tokens, {int(read.is_trained.sum()):,} of them with a loss"
    suffix = f", and {padding:,} of padding." if padding else "."
    legend: list[Inline] = ["Every token that is not grey has a loss."]
    if has_masks:
        legend = [Span("Green", "trained"), " has a loss, grey does not."]
    padded = Span(f"{padding:,} tokens of padding, without a loss.", "masked")
    excluded = "A document that lay in this row is excluded, so that no step reads it."
    begin = row // ROWS_ON_PAGE * ROWS_ON_PAGE
    return page_of(
        f"Row {row} of {stage}",
        neighbours(
            "row",
            row,
            range(rows.total),
            Link("all rows", rows.link(after=begin)),
            rows.link,
        ),
        Note(excluded, "warning") if is_excluded else None,
        Note([f"{read.sources[0]}, {place}: {counts}{suffix}{sentence}"]),
        steps,
        Note(legend),
        _piece_texts(rows, row, read, "trained" if has_masks else "plain"),
        "The rest of this long row is left out." if filled > MOST_TOKENS else None,
        Note([padded], "plain") if padding else None,
    )


def _piece_texts(rows: RowSet, row: int, read: ReadRows, trained: Mark) -> list[Part]:
    """The pieces of a row, each below a link to its document, or to its example."""
    packed, run = rows.packed, rows.run
    if rows.held_out is None:
        pieces = packed.pieces(np.array([row], dtype=np.int64))
    else:
        pieces = packed.validation_pieces(rows.held_out)
        pieces = pieces.filter(pc.equal(pieces["row"], row))
    origins = {}
    if packed.has_ledger and run.corpora():
        ids = set(pieces["id"].to_pylist())
        origins = describe_documents(packed, run.inputs(), ids)
    texts: list[Part] = []
    for piece in pieces.to_pylist():
        start, id_ = piece["start"], piece["id"].hex()
        if start >= MOST_TOKENS:
            continue
        title = example_link(id_)
        if packed.has_ledger:
            origin = origins.get(piece["id"])
            text: Inline = id_span(id_)
            if origin is not None:
                text = origin.get("url", origin["locator"])
            title = Link(text, address(DOCUMENTS, id_))
        end = start + piece["length"]
        offset = f", from token {piece['offset']:,} of it" if piece["offset"] else ""
        copy = f", copy {piece['copy'] + 1}" if piece["copy"] else ""
        part = slice(start, min(end, MOST_TOKENS))
        tokenizer = run.tokenizer()
        has_loss = read.is_trained[0, part]
        ends = np.flatnonzero(np.diff(has_loss)) + 1
        spans = []
        for token_ids, losses in zip(
            np.split(read.tokens[0, part], ends), np.split(has_loss, ends), strict=True
        ):
            mark: Mark = trained if losses.any() else "masked"
            spans.append(Span(tokenizer.decode(token_ids.tolist()), mark))
        texts += [
            Heading([title, f" tokens {start} to {end - 1}{offset}{copy}"]),
            Text(spans),
        ]
    return texts


def _reads(run: BrowsedRun, stage: str, row: int) -> Links:
    """The steps that read a row of the mixture, of every training that reads it in the
    set's own order.
    """
    links: list[Inline] = []
    for name, node in run.session.plan.items():
        if node.stage.row_kind == "documents" and stage in node.inputs:
            with suppress(TraceError):
                steps, _ = describe_reading(reading_of(run.session, name), [row])
                links += [step_link(name, step.step, step.use) for step in steps]
    return Links(links, "Steps:")
