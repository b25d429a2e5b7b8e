"""The stage `edit`: a user's function changes texts, and what it changed is found by comparing.

The function takes one document and returns its new text, or a batch and returns an array of new texts. What differs is
stored as edits, like those of `clean`, so that documents stay what they are and `explain` shows what was changed.
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

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.documents import annotate, write_table
from gristmill.dataprep.edits import EDITS, Edit, edits_array
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.own.own_documents import (
    BATCH_ROWS,
    SAMPLE_ROWS,
    DocumentFunction,
    JudgedColumns,
    call_on,
    describe_run,
    described,
    known_columns,
    load_document_function,
    read_judged_columns,
)
from gristmill.dataprep.own.time_limits import TimeLimit
from gristmill.mixtures.steps.own_steps import Edit as EditStep

EMPTY = "edit/empty"
REMOVED, ADDED = "bytes_removed", "bytes_added"
MOST_PAIRS = 1_000_000
"""Pairs of lines, or of words, that are compared; of longer differences the whole is one edit."""
MOST_GROWTH_CHARACTERS = 10_000_000
"""By which a function may make a text longer."""
NEAR = 64
"""Characters in which the border of a word is looked for."""
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_WORD_END, _WORD_BEGIN = re.compile(r"\s*\S*\Z"), re.compile(r"\A\S*\s*")
Difference = tuple[int, int, str]
"""Characters `begin` up to `end` of a text, and what takes their place."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Change every kept document by the user's function.

    Writes one annotation table per document shard, with `edits`, and the bytes that they take out and put in. A
    document of which nothing but space is left is dropped: `edit/empty`.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `edit` section (`mixtures.steps.own_steps.Edit`), with the code by value.

    Returns:
        `counts`; `edits`: under the function's name how many `documents` it changed, in how many places (`times`), and
        how many `bytes` it took out; `code`: what ran; `differs`: where two calls gave different results, which.

    Raises:
        OwnCodeError: the function cannot be called, or returned no text.
        ConservationError, QuarantineError: see `counts`.
    """
    section = EditStep.model_validate(config)
    known = known_columns(inputs)
    load_document_function(section, known)  # fails before any work
    tasks = shard_tasks(inputs["ingest"])
    process = partial(edit_shard, inputs=dict(inputs), config=section.model_dump(mode="json"), out=out, known=known)
    results = run_tasks("edit", tasks, process, context, holds_gil=True)
    return {
        "counts": balance(results, section.max_quarantined, context.stage, errors=out),
        "edits": {section.use.name: add_counts(result["edits"] for result in results)},
        **describe_run(section, results, context),
    }


def edit_shard(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path, known: Sequence[str]) -> Done:
    """Edit one document shard and write its annotations."""
    section = EditStep.model_validate(config)
    function = load_document_function(section, known)
    read = read_judged_columns(inputs, task.name, section.sources, function.reads)
    with TimeLimit(section.time_limit_seconds) as limit:
        made, errors = edit_texts(function, read.given, limit)
        differs = compare_calls(function, read, made, limit)
    edits, errors = compare_texts(read.documents["text"].take(pa.array(read.judged)), made, errors)
    reasons = [EMPTY if text is not None and not text.strip() else None for text in made]
    removed = [sum(end - begin for begin, end, _ in of_one) for of_one in edits]
    added = [sum(len(text.encode()) for *_, text in of_one) for of_one in edits]
    failed = np.array([error is not None for error in errors], bool)
    columns = {
        EDITS: edits_array(edits),
        REMOVED: pa.array(removed, pa.int64(), mask=failed),
        ADDED: pa.array(added, pa.int64(), mask=failed),
    }
    table, counts = annotate(read.documents, read.rows, read.judged, reasons, columns, errors)
    write_table(out / task.name, table)
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "differs": differs,
            "edits": {"documents": sum(map(bool, edits)), "times": sum(map(len, edits)), "bytes": sum(removed)},
        },
    )


def edit_texts(
    function: DocumentFunction, given: pa.Table, limit: TimeLimit
) -> tuple[list[str | None], list[str | None]]:
    """The new texts of n documents, None of those that raised; and their errors, None of the others.

    Raises:
        OwnCodeError: the function returned something else than text.
    """
    made: list[str | None] = []
    errors: list[str | None] = []
    for start in range(0, len(given), BATCH_ROWS):
        for returned in call_on(function, given.slice(start, BATCH_ROWS), limit):
            errors += [returned.error] * returned.rows
            made += [None] if returned.error is not None else _texts(function, returned.value, returned.rows)
    return made, errors


def _texts(function: DocumentFunction, value: Any, rows: int) -> list[str]:
    """The texts that one call returned."""
    if function.batch is None:
        if not isinstance(value, str):
            raise function.wrong(f"returned {described(value)}; return the new text")
        return [value]
    found = (
        value.to_pylist()
        if isinstance(value, pa.Array | pa.ChunkedArray)
        else (list(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else None)
    )
    if found is None:
        raise function.wrong(f"returned {described(value)}; return an array of the new texts")
    if len(found) != rows:
        raise function.wrong(f"returned {len(found):,} texts for {rows:,} documents; return one for each")
    strange = next((text for text in found if not isinstance(text, str)), "")
    if strange != "":
        raise function.wrong(f"returned {described(strange)} among the new texts; return a text for each document")
    return [str(text) for text in found]


def compare_calls(
    function: DocumentFunction, read: JudgedColumns, made: Sequence[str | None], limit: TimeLimit
) -> str | None:
    """Call a function once more on the first documents that did not raise; what differs, in words, or None."""
    good = [row for row, text in enumerate(made) if text is not None][:SAMPLE_ROWS]
    again, errors = edit_texts(function, read.given.take(pa.array(good, pa.int64())), limit)
    for row, text, error in zip(good, again, errors, strict=True):
        if error is not None:
            return f"of two calls with document {read.shown(row)} the second one raised {error}"
        if text != made[row]:
            return f"two calls with document {read.shown(row)} gave different texts"
    return None


def compare_texts(
    texts: pa.ChunkedArray, made: Sequence[str | None], errors: Sequence[str | None]
) -> tuple[list[list[Edit]], list[str | None]]:
    """What edits make the new texts of the old ones; and per document its error, where it cannot be done too."""
    edits: list[list[Edit]] = []
    found = list(errors)
    for row, after in enumerate(made):
        edits.append([])
        if after is None:
            continue
        try:
            before = texts[row].as_py()
            if len(after) - len(before) > MOST_GROWTH_CHARACTERS:
                found[row] = (
                    f"the new text is {len(after) - len(before):,} characters longer; at most "
                    f"{MOST_GROWTH_CHARACTERS:,} are allowed"
                )
            else:
                edits[-1] = list(derive_edits(before, after))
        except UnicodeError as error:  # half of a surrogate pair, or a document that is not UTF-8
            found[row] = f"{type(error).__name__}: {error}"
    return edits, found


def derive_edits(before: str, after: str) -> Iterator[Edit]:
    """The edits, in bytes, that make one text of another: of lines first, and within lines of words.

    Raises:
        UnicodeEncodeError: a text cannot be written as UTF-8.
    """
    at, size = 0, 0
    for begin, end, text in differences(before, after):
        text.encode()
        first = size + len(before[at:begin].encode())
        at, size = end, first + len(before[begin:end].encode())
        yield first, size, text


@dataclass(frozen=True)
class Cut:
    """A way to cut a text into pieces that are compared.

    Attributes:
        pieces: a text -> its pieces, in their order.
        head: what two texts begin with alike -> the length of it that ends between two pieces.
        tail: what they end with alike -> how much of it is left out, so that it begins between two pieces.
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
    found = pattern.search(text)
    assert found is not None  # both patterns match the empty text
    return found


def differences(before: str, after: str, cuts: Sequence[Cut] = (LINES, WORDS), at: int = 0) -> Iterator[Difference]:
    """Where two texts differ, ascending and with equal text between; `at` is the place where `before` begins."""
    prefix = common_prefix(before, after)
    suffix = min(common_prefix(before[::-1], after[::-1]), min(len(before), len(after)) - prefix)
    if prefix == len(before) == len(after):
        return
    if cuts:  # whole words are easier to read than parts of them
        prefix = cuts[0].head(before[:prefix])
        suffix -= cuts[0].tail(before[len(before) - suffix :])
    elif max(len(before), len(after)) <= NEAR:
        prefix = suffix = 0
    one, other = before[prefix : len(before) - suffix], after[prefix : len(after) - suffix]
    at += prefix
    pieces, others = (cuts[0].pieces(text) if cuts else [text] for text in (one, other))
    if not one or not other or not cuts or len(pieces) * len(others) > MOST_PAIRS:
        yield at, at + len(one), other
        return
    places = np.cumsum([0, *map(len, pieces)]).tolist()
    for first, last, of_first, of_last in _unequal(pieces, others):
        # As many pieces on both sides are most likely each the new form of one.
        pairs = (
            [
                (first + number, first + number + 1, of_first + number, of_first + number + 1)
                for number in range(last - first)
            ]
            if last - first == of_last - of_first
            else [(first, last, of_first, of_last)]
        )
        for begin, end, of_begin, of_end in pairs:
            yield from differences(
                one[places[begin] : places[end]], "".join(others[of_begin:of_end]), cuts[1:], at + places[begin]
            )


def _unequal(pieces: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Where two lists of pieces differ: (first, last) of the one and of the other; the equal ends are cut off first."""
    least = min(len(pieces), len(others))
    head = next((at for at in range(least) if pieces[at] != others[at]), least)
    tail = next((at for at in range(least - head) if pieces[-1 - at] != others[-1 - at]), least - head)
    matcher = SequenceMatcher(None, pieces[head : len(pieces) - tail], others[head : len(others) - tail])
    for kind, first, last, of_first, of_last in matcher.get_opcodes():
        if kind != "equal":
            yield head + first, head + last, head + of_first, head + of_last


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
