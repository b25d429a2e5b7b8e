"""Stage `edit`: change texts with a user's function, and derive the edits by
comparison.

The function maps one document to its new text, or a batch to an array of new texts.
Differences are stored as edits, like those of `clean`, so that documents stay unchanged
and `explain` shows the changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs, Remarks, write_table
from gristmill.dataprep.edits import EDITS, Applications, Edit, edits_array
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.user_code.own_documents import (
    BATCH_ROWS,
    DocumentFunction,
    JudgedColumns,
    OwnShard,
    call_on,
    described,
    known_columns,
    load_document_function,
    read_judged_columns,
    warn_of_difference,
)
from gristmill.dataprep.user_code.time_limits import TimeLimit
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.own_steps import Edit as EditStep

EMPTY = "edit/empty"
REMOVED, ADDED = "bytes_removed", "bytes_added"
MOST_PAIRS = 1_000_000
"""Maximum number of compared pairs of lines, or of words; a longer difference becomes
one edit.
"""
MOST_GROWTH_CHARACTERS = 10_000_000
"""Maximum growth of a text by a function."""
NEAR = 64
"""Maximum distance to a word boundary in characters."""
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_WORD_END, _WORD_BEGIN = re.compile(r"\s*\S*\Z"), re.compile(r"\A\S*\s*")
Difference = tuple[int, int, str]
"""Characters `begin` up to `end` of a text, and their replacement."""


@dataclass(frozen=True)
class EditSummary:
    """Summary of a user's edits.

    Attributes:
        counts: documents by outcome.
        edits: name of the function -> its applications.
        code: description of the code.
        differs: different results of two calls, if any.
    """

    counts: Counts
    edits: Mapping[str, Applications]
    code: str
    differs: str | None = None


class EditedShard(OwnShard):
    """Result of editing a shard."""

    edits: Applications


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> EditSummary:
    """Edit every kept document with the user's function.

    Writes one annotation table per document shard, with `edits`, and the numbers of
    removed and added bytes. A document that becomes empty or white space is dropped:
    `edit/empty`.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `edit` section (`mixtures.steps.own_steps.Edit`), with
            the code by value.

    Raises:
        OwnCodeError: the function cannot be called, or did not return text.
        ConservationError, QuarantineError: see `counts`.
    """
    section = EditStep.model_validate(config)
    columns = known_columns(inputs)
    load_document_function(section, columns)  # fail before any work
    tasks = shard_tasks(inputs["ingest"])
    process = partial(
        edit_shard,
        inputs=dict(inputs),
        section=section,
        out=out,
        known=columns,
    )
    results = run_tasks("edit", tasks, process, context, holds_gil=True)
    return EditSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        {section.use.name: add_counts(result["edits"] for result in results)},
        section.use.describe(),
        warn_of_difference(section, results, context),
    )


def edit_shard(
    task: ShardTask,
    inputs: Inputs,
    section: EditStep,
    out: Path,
    known: Sequence[str],
) -> Done[EditedShard]:
    """Edit one document shard and write its annotations."""
    function = load_document_function(section, known)
    judged_columns = read_judged_columns(
        inputs, task.name, section.sources, function.reads
    )
    with TimeLimit(section.time_limit_seconds) as limit:
        new_texts, errors = edit_texts(function, judged_columns.given, limit)
        differs = compare_calls(function, judged_columns, new_texts, errors, limit)
    edits, errors = compare_texts(
        judged_columns.documents["text"].take(pa.array(judged_columns.judged)),
        new_texts,
        errors,
    )
    reasons = [
        EMPTY if text is not None and not text.strip() else None for text in new_texts
    ]
    removed = [
        sum(end - begin for begin, end, _ in document_edits) for document_edits in edits
    ]
    added = [
        sum(len(text.encode()) for *_, text in document_edits)
        for document_edits in edits
    ]
    failed = np.array([error is not None for error in errors], bool)
    columns = {
        EDITS: edits_array(edits),
        REMOVED: pa.array(removed, pa.int64(), mask=failed),
        ADDED: pa.array(added, pa.int64(), mask=failed),
    }
    table, counts = judged_columns.annotate(reasons, columns, errors)
    write_table(out / task.name, table)
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "differs": differs,
            "edits": {
                "documents": sum(map(bool, edits)),
                "times": sum(map(len, edits)),
                "bytes": sum(removed),
            },
        },
    )


def edit_texts(
    function: DocumentFunction, given: pa.Table, limit: TimeLimit
) -> tuple[list[str | None], list[str | None]]:
    """New texts of n documents, None for those that raised; and their errors, None for
    the others.

    Raises:
        OwnCodeError: the function did not return text.
    """
    new_texts: list[str | None] = []
    errors: list[str | None] = []
    for start in range(0, len(given), BATCH_ROWS):
        for returned in call_on(function, given.slice(start, BATCH_ROWS), limit):
            errors += [returned.error] * returned.rows
            new_texts += (
                [None]
                if returned.error is not None
                else _texts(function, returned.value, returned.rows)
            )
    return new_texts, errors


def _texts(function: DocumentFunction, value: Any, rows: int) -> list[str]:
    """Texts returned by one call."""
    if function.batch is None:
        if not isinstance(value, str):
            raise function.wrong(f"returned {described(value)}; return the new text")
        return [value]
    if isinstance(value, pa.Array | pa.ChunkedArray):
        value = value.to_pylist()
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise function.wrong(
            f"returned {described(value)}; return an array of the new texts"
        )
    new_texts = list(value)
    if len(new_texts) != rows:
        raise function.wrong(
            f"returned {len(new_texts):,} texts for {rows:,} "
            "documents; return one for each"
        )
    invalid = next((text for text in new_texts if not isinstance(text, str)), "")
    if invalid != "":
        raise function.wrong(
            f"returned {described(invalid)} among the new texts; "
            "return a text for each document"
        )
    return [str(text) for text in new_texts]


def compare_calls(
    function: DocumentFunction,
    read: JudgedColumns,
    made: Remarks,
    errors: Remarks,
    limit: TimeLimit,
) -> str | None:
    """Call a function again on the first documents that did not raise; returns the
    difference in words, or None.
    """
    good, sample = read.sample(errors)
    again, new_errors = edit_texts(function, sample, limit)
    if (difference := read.raised_again(good, new_errors)) is not None:
        return difference
    for row, text in zip(good, again, strict=True):
        if text != made[row]:
            return f"two calls with document {read.shown(row)} gave different texts"
    return None


def compare_texts(
    texts: pa.ChunkedArray, made: Remarks, errors: Remarks
) -> tuple[list[list[Edit]], list[str | None]]:
    """Edits from the old texts to the new ones; and the errors, including those of the
    comparison.
    """
    edits: list[list[Edit]] = []
    all_errors = list(errors)
    for row, after in enumerate(made):
        edits.append([])
        if after is None:
            continue
        try:
            before = texts[row].as_py()
            growth = len(after) - len(before)
            if growth <= MOST_GROWTH_CHARACTERS:
                edits[-1] = list(derive_edits(before, after))
            else:
                all_errors[row] = (
                    f"the new text is {growth:,} characters longer; at most "
                    f"{MOST_GROWTH_CHARACTERS:,} are allowed"
                )
        except UnicodeError as error:
            # half of a surrogate pair, or a document that is not UTF-8
            all_errors[row] = f"{type(error).__name__}: {error}"
    return edits, all_errors


def derive_edits(before: str, after: str) -> Iterator[Edit]:
    """Derive the edits, in bytes, from one text to another: by lines first, then by
    words within lines.

    Raises:
        UnicodeEncodeError: a text cannot be encoded as UTF-8.
    """
    position, size = 0, 0
    for begin, end, text in differences(before, after):
        text.encode()
        first = size + len(before[position:begin].encode())
        position = end
        size = first + len(before[begin:end].encode())
        yield first, size, text


@dataclass(frozen=True)
class Cut:
    """Segmentation of texts into pieces to compare.

    Attributes:
        pieces: text -> its pieces in order.
        head: common prefix of two texts -> length of its part that ends at a piece
            boundary.
        tail: common suffix -> number of characters to drop so that it starts at a piece
            boundary.
    """

    pieces: Callable[[str], list[str]]
    head: Callable[[str], int]
    tail: Callable[[str], int]


LINES = Cut(
    lambda text: text.splitlines(keepends=True),
    lambda head: head.rfind("\n") + 1,
    lambda tail: tail.find("\n") + 1 or len(tail),
)
WORDS = Cut(
    _WORDS.findall,
    lambda head: max(0, len(head) - NEAR) + _edge(_WORD_END, head[-NEAR:]).start(),
    lambda tail: _edge(_WORD_BEGIN, tail[:NEAR]).end(),
)


def _edge(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.search(text)
    assert match is not None  # both patterns match an empty text
    return match


def differences(
    before: str, after: str, cuts: Sequence[Cut] = (LINES, WORDS), at: int = 0
) -> Iterator[Difference]:
    """Differences between two texts, ascending and separated by equal text; `at` is the
    offset of `before`.
    """
    prefix = common_prefix(before, after)
    suffix = min(
        common_prefix(before[::-1], after[::-1]), min(len(before), len(after)) - prefix
    )
    if prefix == len(before) == len(after):
        return
    if cuts:  # whole words are easier to read than parts of them
        prefix = cuts[0].head(before[:prefix])
        suffix -= cuts[0].tail(before[len(before) - suffix :])
    elif max(len(before), len(after)) <= NEAR:
        prefix = suffix = 0
    before_part = before[prefix : len(before) - suffix]
    after_part = after[prefix : len(after) - suffix]
    at += prefix
    pieces, after_pieces = (
        cuts[0].pieces(text) if cuts else [text] for text in (before_part, after_part)
    )
    if (
        not before_part
        or not after_part
        or not cuts
        or len(pieces) * len(after_pieces) > MOST_PAIRS
    ):
        yield at, at + len(before_part), after_part
        return
    places = np.cumsum([0, *map(len, pieces)]).tolist()
    for first, last, after_first, after_last in _unequal(pieces, after_pieces):
        # With equal numbers of pieces, each is most likely the new form of its
        # counterpart.
        ranges = [(first, last, after_first, after_last)]
        if last - first == after_last - after_first:
            ranges = [
                (place, place + 1, after_place, after_place + 1)
                for place, after_place in zip(
                    range(first, last), range(after_first, after_last), strict=True
                )
            ]
        for begin, end, after_begin, after_end in ranges:
            yield from differences(
                before_part[places[begin] : places[end]],
                "".join(after_pieces[after_begin:after_end]),
                cuts[1:],
                at + places[begin],
            )


def _unequal(
    pieces: Sequence[str], after_pieces: Sequence[str]
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges in which two lists of pieces differ: (first, last) of each list; equal
    ends are cut off first.
    """
    least = min(len(pieces), len(after_pieces))
    head = next((at for at in range(least) if pieces[at] != after_pieces[at]), least)
    tail = next(
        (at for at in range(least - head) if pieces[-1 - at] != after_pieces[-1 - at]),
        least - head,
    )
    matcher = SequenceMatcher(
        None,
        pieces[head : len(pieces) - tail],
        after_pieces[head : len(after_pieces) - tail],
    )
    for kind, first, last, after_first, after_last in matcher.get_opcodes():
        if kind != "equal":
            yield head + first, head + last, head + after_first, head + after_last


def common_prefix(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
