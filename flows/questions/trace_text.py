"""Which passages of a text stand word for word in the training rows, from which documents, and who read them.

The text is encoded as documents are, by the run's own tokenizer, in several ways: as it is given, with a blank before
it, and each without the white space at its end, as the tokens at its borders depend on what stood there in a document.
OLMoTrace (Liu et al. 2025) shows the same of OLMo: maximal passages, longest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.trace import describe_reading
from gristmill.flows.questions.training_reads import TraceError, reading_of
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN, TEXT_INDEX, TOKENIZER
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.tokenize.text_index import OpenIndex

MOST_SPANS, MOST_PLACES = 20, 3
"""Passages that are described, the longest ones, and places of each, those in the first rows."""


@dataclass(frozen=True)
class Span:
    """A passage: characters [begin, end) of the text, its tokens, and where it stands (row x L + start)."""

    begin: int
    end: int
    tokens: int
    places: np.ndarray


def trace_text(session: Session, text: str) -> dict[str, Any]:
    """The longest passages of a text that stand in the training rows.

    Args:
        session: the opened manifest.
        text: as a model wrote it, say.

    Returns:
        `characters` of the text; `covered`: how many of them are in a passage; `shortest_span`; `found`: how many
        passages there are, none within another one; `spans`: the MOST_SPANS longest, each with `begin` and `end` (in
        characters), `tokens`, `text`, `count` of its places, and the first `places`: what is known of the document,
        `row`, `start`, `offset` (of the passage within the document, in tokens), `copy` and `steps`.

    Raises:
        TraceError: there is no index.
    """
    inputs = committed_inputs(session, session.plan)
    if TEXT_INDEX not in session.plan:
        raise TraceError(
            f"{session.manifest_file} indexes no training rows; add the section `text_index: {{}}` behind "
            f"`mix:`, and run: {session.command('run', '--until', TEXT_INDEX)}"
        )
    if TEXT_INDEX not in inputs:
        raise TraceError(f"the training rows are not indexed yet; run: {session.command('run', '--until', TEXT_INDEX)}")
    packed = PackedSet(inputs[MIX])
    index = OpenIndex(inputs[TEXT_INDEX], packed)
    spans = find_spans(index, load(inputs[TOKENIZER]).tokenizer, text)
    covered = np.zeros(len(text), bool)
    for span in spans:
        covered[span.begin : span.end] = True
    spans.sort(key=lambda span: (-span.tokens, span.begin))
    shown = spans[:MOST_SPANS]
    first = [first_places(span.places) for span in shown]
    known = _describe_places(session, packed, inputs, sorted({place for places in first for place in places}))
    return {
        "characters": len(text),
        "covered": int(covered.sum()),
        "shortest_span": index.shortest,
        "found": len(spans),
        "spans": [
            {
                "begin": span.begin,
                "end": span.end,
                "tokens": span.tokens,
                "text": text[span.begin : span.end],
                "count": len(span.places),
                "places": [known[place] for place in places],
            }
            for span, places in zip(shown, first, strict=True)
        ],
    }


def find_spans(index: OpenIndex, tokenizer: Any, text: str) -> list[Span]:
    """The passages of a text, however it is encoded, none within another one, in their order."""
    found: dict[tuple[int, int], Span] = {}
    ways = {blank + one: len(blank) for one in (text, text.rstrip()) for blank in ("", " ")}
    for written, ahead in ways.items():
        encoding = tokenizer.encode(written, add_special_tokens=False)
        offsets = np.maximum(np.array(encoding.offsets, np.int64).reshape(-1, 2) - ahead, 0)
        for passage in index.passages(np.array(encoding.ids, np.int64)):
            begin, end = int(offsets[passage.begin, 0]), int(offsets[passage.begin + passage.tokens - 1, 1])
            same = found.get((begin, end))
            places = passage.places if same is None else np.union1d(same.places, passage.places)
            found[begin, end] = Span(begin, end, max(passage.tokens, 0 if same is None else same.tokens), places)
    kept = list[Span]()
    for span in sorted(found.values(), key=lambda span: (span.begin, -span.end)):
        if not kept or span.end > kept[-1].end:
            kept.append(span)
    return kept


def first_places(places: np.ndarray) -> list[int]:
    """The lowest MOST_PLACES of some places, ascending."""
    if len(places) > MOST_PLACES:
        places = np.partition(places, MOST_PLACES)[:MOST_PLACES]
    ascending: list[int] = np.sort(places).tolist()
    return ascending


def _describe_places(
    session: Session, packed: PackedSet, inputs: Mapping[str, Any], places: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Place -> the document that stands there, as far as it is known, and the steps that read the row."""
    if not places:
        return {}
    numbers, starts = np.divmod(np.array(places, np.int64), packed.sequence_length)
    rows = np.unique(numbers)
    packed.tokens(rows)  # a row that is not what was written is an error
    pieces = packed.pieces(rows).to_pylist()
    documents = describe_documents(packed, inputs, {piece["id"] for piece in pieces})
    steps = dict[int, list[dict[str, Any]]]()
    if PRETRAIN in session.plan:
        for step in describe_reading(reading_of(session), rows.tolist())["steps"]:
            for row in step["rows"]:
                steps.setdefault(row, []).append({key: step[key] for key in ("stage", "step", "use")})
    described = {}
    for place, row, start in zip(places, numbers.tolist(), starts.tolist(), strict=True):
        piece = next(
            one for one in pieces if one["row"] == row and one["start"] <= start < one["start"] + one["length"]
        )
        described[place] = {
            **documents[piece["id"]],
            "row": row,
            "start": start,
            "offset": piece["offset"] + start - piece["start"],
            "copy": piece["copy"],
            "steps": steps.get(row, []),
        }
    return described
