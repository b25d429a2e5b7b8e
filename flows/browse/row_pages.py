"""The pages of packed rows: what each holds, of whom, and which of its tokens have a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table
from gristmill.flows.browse.addresses import DOCUMENTS, OneRow, Rows, address
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.questions.training_reads import TraceError, reading_of
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.train.data.preference_rows import EXAMPLES

ROWS_ON_PAGE = 50
BEGINNING_TOKENS = 48
MOST_TOKENS = 8192
"""Of a row; longer ones are shown up to here."""
MOST_UNIT = 8
"""Tokens of one character, at the most: four bytes, and as many that are not UTF-8."""
EXAMPLES_PAGE = "examples"
ROWS_PAGE, TRAINING_PAGE = "rows", "training"
Span = tuple[str, bool]
"""Some text, and whether it has a loss."""


def rows_page(run: BrowsedRun, asked: Rows) -> dict[str, Any]:
    """A part of a packed set's rows: of which source each is, how many pieces and tokens it has, and how it begins."""
    packed = run.packed(asked.stage)
    total = _number_of_rows(packed, asked.stage, asked.held_out)
    if asked.after and asked.after >= total:
        raise NotThereError(f"{asked.stage} has {total:,} rows; there is none behind row {asked.after:,}")
    rows = np.arange(asked.after, min(asked.after + ROWS_ON_PAGE, total), dtype=np.int64)
    tokens, bounds, sources = _read(packed, rows, asked.held_out)
    filled, pieces = bounds.filled(), np.diff(bounds.offsets) - 1
    trained = _trained(run, asked.stage, packed, rows, filled, asked.held_out).sum(axis=1)
    tokenizer = run.tokenizer()
    return {
        "stage": asked.stage,
        "held_out": asked.held_out,
        "total": total,
        "asked": asked,
        "sets": _sets(run),
        "rows": [
            {
                "row": row,
                "link": address(ROWS_PAGE, asked.stage, row, held_out=asked.held_out),
                "source": source,
                "pieces": int(pieces[place]),
                "tokens": int(filled[place]),
                "trained": int(trained[place]),
                "begins": tokenizer.decode(tokens[place, : min(BEGINNING_TOKENS, int(filled[place]))].tolist()),
            }
            for place, (row, source) in enumerate(zip(rows.tolist(), sources, strict=True))
        ],
        "before": None
        if not asked.after
        else address(ROWS_PAGE, asked.stage, held_out=asked.held_out, after=max(0, asked.after - ROWS_ON_PAGE)),
        "next": None
        if rows[-1:].tolist() in ([], [total - 1])
        else address(ROWS_PAGE, asked.stage, held_out=asked.held_out, after=int(rows[-1]) + 1),
        "sequence_length": packed.sequence_length,
    }


def _sets(run: BrowsedRun) -> list[dict[str, Any]]:
    """What rows there are, with a link to each."""
    found = []
    for stage in run.packed_sets():
        packed = run.packed(stage)
        found.append(
            {"title": stage, "stage": stage, "held_out": None, "rows": packed.rows, "link": address(ROWS_PAGE, stage)}
        )
        found += [
            {
                "title": f"{stage}, held out of {source}",
                "stage": stage,
                "held_out": source,
                "rows": entry["rows"],
                "link": address(ROWS_PAGE, stage, held_out=source),
            }
            for source, entry in packed.manifest["validation"].items()
            if entry["rows"]
        ]
    return found


def _number_of_rows(packed: PackedSet, stage: str, held_out: str | None) -> int:
    if held_out is None:
        return packed.rows
    entries = packed.manifest["validation"]
    if held_out not in entries:
        raise NotThereError(f"{stage} holds no rows of {held_out!r} out; sources are {', '.join(entries) or 'none'}")
    return int(entries[held_out]["rows"])


def _read(packed: PackedSet, rows: np.ndarray, held_out: str | None) -> tuple[np.ndarray, Any, list[str]]:
    """Tokens (n, L), boundaries and names of the sources of some rows."""
    if held_out is not None:
        bounds = packed.validation_boundaries(held_out).of(rows)
        return packed.validation(held_out)[rows], bounds, [held_out] * len(rows)
    sources = [packed.sources[number] for number in packed.source_of(rows).tolist()]
    return packed.tokens(rows), packed.boundaries(rows), sources


def _trained(
    run: BrowsedRun, stage: str, packed: PackedSet, rows: np.ndarray, filled: np.ndarray, held_out: str | None
) -> np.ndarray:
    """Which tokens of some rows have a loss: (n, L) bool. Without masks all but the first of a row and padding."""
    masks = run.masks(stage) if held_out is None else None
    if masks is not None:
        return masks.read(rows)
    places = np.arange(packed.sequence_length)
    trained: np.ndarray = (places > 0) & (places < filled[:, None])
    return trained


def row_page(run: BrowsedRun, asked: OneRow) -> dict[str, Any]:
    """A row: its pieces with their documents, and its tokens as text."""
    packed = run.packed(asked.stage)
    total = _number_of_rows(packed, asked.stage, asked.held_out)
    if asked.row >= total:
        raise NotThereError(f"{asked.stage} has {total:,} rows, counted from 0; there is no row {asked.row:,}")
    rows = np.array([asked.row], dtype=np.int64)
    tokens, bounds, (source,) = _read(packed, rows, asked.held_out)
    filled = int(bounds.filled()[0])
    trained = _trained(run, asked.stage, packed, rows, bounds.filled(), asked.held_out)[0]
    pieces = _pieces(run, packed, asked)
    shown = [
        {**piece, "text": _text(run.tokenizer(), tokens[0], trained, piece, asked.tokens)}
        for piece in pieces
        if piece["start"] < MOST_TOKENS
    ]
    return {
        "stage": asked.stage,
        "row": asked.row,
        "held_out": asked.held_out,
        "total": total,
        "source": source,
        "filled": filled,
        "trained": int(trained.sum()),
        "padding": packed.sequence_length - filled,
        "masked": run.masks(asked.stage) is not None,
        "withheld": asked.row in packed.withheld.tolist() and asked.held_out is None,
        "pieces": shown,
        "cut": filled > MOST_TOKENS,
        "by_token": asked.tokens,
        "file": None if asked.held_out is not None else packed.shards_of(rows)[0],
        "example": _example_of_row(packed, asked) if asked.held_out is None else None,
        "reads": _reads(run, asked) if asked.held_out is None else [],
        "list": address(
            ROWS_PAGE, asked.stage, held_out=asked.held_out, after=asked.row // ROWS_ON_PAGE * ROWS_ON_PAGE
        ),
        "before": _neighbour(asked, asked.row - 1, total),
        "next": _neighbour(asked, asked.row + 1, total),
        "other_view": address(
            ROWS_PAGE, asked.stage, asked.row, held_out=asked.held_out, tokens=None if asked.tokens else "true"
        ),
    }


def _neighbour(asked: OneRow, row: int, total: int) -> str | None:
    inside = 0 <= row < total
    return (
        address(ROWS_PAGE, asked.stage, row, held_out=asked.held_out, tokens="true" if asked.tokens else None)
        if inside
        else None
    )


def _pieces(run: BrowsedRun, packed: PackedSet, asked: OneRow) -> list[dict[str, Any]]:
    """The pieces of a row, each with a link to its document, and where that is from, or to its example."""
    table = packed.pieces(np.array([asked.row], dtype=np.int64))
    if asked.held_out is not None:
        table = packed.validation_pieces(asked.held_out)
        table = table.filter(pc.equal(table["row"], asked.row))
    ids = set(table["id"].to_pylist())
    of_documents = packed.has_ledger
    known = describe_documents(packed, run.inputs(), ids) if of_documents and run.corpora() else {}
    page = DOCUMENTS if of_documents else EXAMPLES_PAGE
    return [
        {
            "start": piece["start"],
            "length": piece["length"],
            "offset": piece["offset"],
            "copy": piece["copy"],
            "id": piece["id"].hex(),
            "link": address(page, piece["id"].hex()),
            "place": known.get(piece["id"], {}).get("url") or known.get(piece["id"], {}).get("locator"),
        }
        for piece in table.to_pylist()
    ]


def _text(
    tokenizer: TextTokenizer, tokens: np.ndarray, trained: np.ndarray, piece: dict[str, Any], by_token: bool
) -> list[dict[str, Any]]:
    """A piece's text in spans that have a loss or have none, or token by token with the ids of each."""
    end = min(piece["start"] + piece["length"], MOST_TOKENS)
    ids, has_loss = tokens[piece["start"] : end], trained[piece["start"] : end]
    spans = (
        list(_units(tokenizer, ids.tolist()))
        if by_token
        else np.split(np.arange(len(ids)), np.flatnonzero(np.diff(has_loss.astype(np.int8))) + 1)
    )
    return [
        {
            "text": tokenizer.decode(ids[span].tolist()),
            "trained": bool(has_loss[span[0]]),
            "ids": " ".join(map(str, ids[span].tolist())) if by_token else "",
        }
        for span in spans
        if len(span)
    ]


def _units(tokenizer: TextTokenizer, ids: Sequence[int]) -> Iterator[list[int]]:
    """Places of tokens that are text together: one, or the few that share a character."""
    begin = 0
    while begin < len(ids):
        end = begin + 1
        while end < min(len(ids), begin + MOST_UNIT) and tokenizer.decode(ids[begin:end]).endswith("\ufffd"):
            end += 1
        yield list(range(begin, end))
        begin = end


def _example_of_row(packed: PackedSet, asked: OneRow) -> dict[str, Any] | None:
    """Which answer of a preference a row is, and where the other one is; None of any other set."""
    if not (packed.folder / EXAMPLES).exists():
        return None
    table = read_table(packed.folder / EXAMPLES, ["row", "rows", "label"])
    after = pc.less_equal(table["row"], asked.row)
    found = table.filter(after).slice(pc.sum(after).as_py() - 1, 1).to_pylist()[0]
    if found["rows"] == 1:
        return {"is": f"labelled {'good' if found['label'] else 'bad'}", "other": None}
    is_chosen = asked.row == found["row"]
    return {
        "is": "the chosen answer" if is_chosen else "the rejected answer",
        "other": {
            "text": "the rejected one" if is_chosen else "the chosen one",
            "link": address(ROWS_PAGE, asked.stage, found["row"] + is_chosen),
        },
    }


def _reads(run: BrowsedRun, asked: OneRow) -> list[dict[str, Any]]:
    """The steps that read a row of the mixture, of every training that reads it in the set's own order."""
    found: list[dict[str, Any]] = []
    for stage, node in run.session.plan.items():
        if node.stage.rows != "documents" or asked.stage not in node.inputs:
            continue
        try:
            reading = reading_of(run.session, stage)
        except TraceError:
            continue
        done = reading.steps_done()
        found += [
            {"stage": stage, "step": step, "use": reading.use(step, done), "link": address(TRAINING_PAGE, stage, step)}
            for step in reading.steps_that_read(np.array([asked.row], dtype=np.int64))
        ]
    return found
