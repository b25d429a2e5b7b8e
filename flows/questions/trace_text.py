"""Passages of a text that occur verbatim in the training rows, with their documents and
the steps that read them.

The text is encoded by the run's own tokenizer in several variants, with and without a
leading space and trailing white space, because tokens at its borders depend on the
surrounding text of a document. OLMoTrace (Liu et al. 2025) shows the same for OLMo:
maximal passages, longest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from gristmill.dataprep.documents import Inputs
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.trace import describe_reading
from gristmill.flows.questions.trace_tables import (
    StepReads,
    StepUse,
    TextPlace,
    TextSpan,
    TextTrace,
)
from gristmill.flows.questions.training_reads import TraceError, reading_of
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN, TEXT_INDEX, TOKENIZER
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.tokenize.text_index import OpenIndex

MOST_SPANS, MOST_PLACES = 20, 3
"""Number of passages described, longest first, and of places of each, first rows
first.
"""


@dataclass(frozen=True)
class Span:
    """A passage: characters [begin, end) of the text, its number of tokens, and its
    places (row * L + start).
    """

    begin: int
    end: int
    tokens: int
    places: np.ndarray


def trace_text(session: Session, text: str) -> TextTrace:
    """Find the longest passages of a text that occur in the training rows.

    Args:
        session: the opened manifest.
        text: any text, such as the output of a model.

    Raises:
        TraceError: the training rows are not indexed.
    """
    inputs = committed_inputs(session)
    if TEXT_INDEX not in session.plan:
        raise TraceError(
            f"{session.manifest_file} does not index training rows; add the section `text_index: {{}}` after "
            f"`mix:`, and run: {session.command('run', '--until', TEXT_INDEX)}"
        )
    if TEXT_INDEX not in inputs:
        raise TraceError(
            "the training rows are not indexed yet; run: "
            f"{session.command('run', '--until', TEXT_INDEX)}"
        )
    packed = PackedSet(inputs[MIX])
    index = OpenIndex(inputs[TEXT_INDEX], packed)
    spans = find_spans(index, load(inputs[TOKENIZER]).tokenizer, text)
    covered = np.zeros(len(text), bool)
    for span in spans:
        covered[span.begin : span.end] = True
    longest = sorted(spans, key=lambda span: (-span.tokens, span.begin))[:MOST_SPANS]
    places_of_spans = [np.sort(span.places)[:MOST_PLACES].tolist() for span in longest]
    places = sorted(set(itertools.chain.from_iterable(places_of_spans)))
    descriptions = _describe_places(session, packed, inputs, places)
    return TextTrace(
        len(text),
        int(covered.sum()),
        index.shortest,
        len(spans),
        [
            TextSpan(
                span.begin,
                span.end,
                span.tokens,
                text[span.begin : span.end],
                len(span.places),
                [descriptions[place] for place in span_places],
            )
            for span, span_places in zip(longest, places_of_spans, strict=True)
        ],
    )


def find_spans(index: OpenIndex, tokenizer: Any, text: str) -> list[Span]:
    """Return the passages of all variants of a text in order, without those contained
    in another.
    """
    spans: dict[tuple[int, int], Span] = {}
    # Variant of the text -> its added leading spaces.
    variants = {text: 0, f" {text}": 1, text.rstrip(): 0, f" {text.rstrip()}": 1}
    for variant, num_added in variants.items():
        encoding = tokenizer.encode(variant, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        offsets = np.maximum(offsets - num_added, 0)
        for passage in index.passages(np.array(encoding.ids, np.int64)):
            begin = int(offsets[passage.begin, 0])
            end = int(offsets[passage.begin + passage.tokens - 1, 1])
            tokens, places = passage.tokens, passage.places
            if (begin, end) in spans:
                previous = spans[begin, end]
                tokens = max(tokens, previous.tokens)
                places = np.union1d(previous.places, places)
            spans[begin, end] = Span(begin, end, tokens, places)
    maximal = list[Span]()
    for span in sorted(spans.values(), key=lambda span: (span.begin, -span.end)):
        if not maximal or span.end > maximal[-1].end:
            maximal.append(span)
    return maximal


def _describe_places(
    session: Session,
    packed: PackedSet,
    inputs: Inputs,
    places: Sequence[int],
) -> dict[int, TextPlace]:
    """Return place -> its document as far as known, and the steps that read the row."""
    if not places:
        return {}
    rows = np.unique(np.array(places, np.int64) // packed.sequence_length)
    packed.tokens(rows)  # verifies the checksums of these rows
    pieces = packed.pieces(rows).to_pylist()
    documents = describe_documents(packed, inputs, {piece["id"] for piece in pieces})
    reads = list[StepReads]()
    if PRETRAIN in session.plan:
        reads, _ = describe_reading(reading_of(session), rows.tolist())
    described = {}
    for place in places:
        row, start = divmod(place, packed.sequence_length)
        begun = (
            piece for piece in pieces if piece["row"] == row and piece["start"] <= start
        )
        piece = max(begun, key=itemgetter("start"))
        described[place] = TextPlace(
            **documents[piece["id"]],
            row=row,
            start=start,
            offset=piece["offset"] + start - piece["start"],
            copy=piece["copy"],
            steps=[
                StepUse(step.stage, step.step, step.use)
                for step in reads
                if row in step.rows
            ],
        )
    return described
