"""Stage `clean`: edits that improve text instead of dropping it.

The steps and their order are those of `mixtures/steps/clean.py`; each is a function
from texts to edits, and the stage writes their composition. For every rule it writes
the number of its applications to a document (`clean_<rule>`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import Columns, measure_texts
from gristmill.dataprep.cleaning import lines_c4, lines_dclm, masking
from gristmill.dataprep.cleaning.found_pii import (
    PersonalData,
    add_personal_data,
    find_personal_data,
)
from gristmill.dataprep.cleaning.line_pieces import BEGIN, END, line_words, new_rows
from gristmill.dataprep.cleaning.lines_dclm import cap_newlines
from gristmill.dataprep.cleaning.unicode_repair import fix_unicode, normalise
from gristmill.dataprep.conservation import (
    SHARE_EDGES,
    Counted,
    Counts,
    Histograms,
    add_counts,
    add_histograms,
    balance,
    histogram,
)
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.edits import (
    EDITS,
    Applications,
    RuleEdits,
    apply_edits,
    edits_array,
    then,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.clean import Clean

EMPTY = "clean/empty"
REMOVED = "clean/max_removed_word_ratio"
WORDS_LEFT, REMOVED_RATIO = "clean_words", "removed_word_ratio"
RULE_PREFIX = "clean_"
"""Prefix of columns with the number of a rule's applications to a document."""
SIZES = "bytes of "
"""Prefix of columns with the number of bytes that a rule removed or replaced; they are
not stored.
"""
FOUND = "personal data"
"""Column with examples for the report (`masking.FOUND_TYPE`); it is not stored."""


@dataclass(frozen=True)
class Step:
    """One step of cleaning.

    Attributes:
        rules: names of its rules.
        edit: n texts -> edits; per text and rule the number of applications, and of
            bytes (int64 of shape (n, rules), or (n,) for one rule).
    """

    rules: tuple[str, ...]
    edit: Callable[[pa.Array], RuleEdits]


class CleanedShard(Counted):
    """Result of cleaning a shard."""

    edits: dict[str, Applications]
    """Numbers of edits by rule."""
    histograms: Histograms
    personal_data: list[PersonalData]


@dataclass(frozen=True)
class CleanSummary:
    """Summary of the edits.

    Attributes:
        counts: documents by outcome.
        edits: applications of each rule.
        histograms: of `removed_word_ratio`.
        personal_data: masked values by source and kind.
    """

    counts: Counts
    edits: Mapping[str, Applications]
    histograms: Histograms
    personal_data: Sequence[PersonalData] = ()


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> CleanSummary:
    """Edit every kept document by the configured steps.

    Writes one annotation table per document shard, with `edits`; `clean_<rule>` for
    every enabled rule: its applications; `clean_words`: words left (a document with
    none is dropped, `clean/empty`); and `removed_word_ratio` with the rules `dclm`: the
    share of the words that they removed.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `clean` section (`mixtures.steps.clean.Clean`).

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = Clean.model_validate(config)
    results = run_tasks(
        "clean",
        shard_tasks(inputs["ingest"]),
        partial(clean_shard, inputs=inputs, section=section, out=out),
        context,
        holds_gil=section.mask is not None and section.mask.entities is not None,
    )
    return CleanSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["edits"] for result in results),
        add_histograms(result["histograms"] for result in results),
        add_personal_data(row for result in results for row in result["personal_data"]),
    )


def clean_shard(
    task: ShardTask, inputs: Inputs, section: Clean, out: Path
) -> Done[CleanedShard]:
    """Clean one document shard and write its annotations."""
    shard = read_shard(inputs, task.name, ["id", "source", "text"], section.sources)
    measured, errors = measure_texts(
        shard.judged_documents["text"], partial(clean_texts, section=section)
    )
    applications = {
        rule: Applications(
            documents=int(np.count_nonzero(measured[RULE_PREFIX + rule])),
            times=int(measured[RULE_PREFIX + rule].sum()),
            bytes=int(measured.pop(SIZES + rule).sum()),
        )
        for step in steps(section)
        for rule in step.rules
    }
    found = (
        []
        if section.mask is None
        else find_personal_data(
            shard.judged_documents.filter(pa.array([not error for error in errors])),
            measured.pop(FOUND),
        )
    )
    counts = shard.write_measured(
        out / task.name, judge(measured, section), measured, errors
    )
    shapes = {
        name: histogram(measured[name], SHARE_EDGES)
        for name in (REMOVED_RATIO,)
        if name in measured
    }
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "edits": applications,
            "histograms": shapes,
            "personal_data": found,
        },
    )


def steps(section: Clean) -> Iterator[Step]:
    """Yield the configured steps in order."""
    if section.fix_unicode:
        yield Step(("fix_unicode",), fix_unicode)
    if section.normalise != "none":
        yield Step(("normalise",), partial(normalise, form=section.normalise))
    if section.lines is not None and section.lines.c4 is not None:
        yield Step(lines_c4.RULES, partial(lines_c4.c4_lines, options=section.lines.c4))
    if section.lines is not None and section.lines.dclm is not None:
        yield Step(
            lines_dclm.RULES, partial(lines_dclm.dclm_lines, options=section.lines.dclm)
        )
    if section.max_newlines is not None:
        yield Step(("newlines",), partial(cap_newlines, most=section.max_newlines))
    if section.mask is not None:
        yield Step(
            masking.rules(section.mask), partial(masking.mask, options=section.mask)
        )


def clean_texts(texts: pa.Array, section: Clean) -> Columns:
    """Clean n texts; a pure function of each.

    Returns:
        the columns described in `run`, and `SIZES + rule`: the bytes that each rule
        removed or replaced.
    """
    edits = edits_array([()] * len(texts))
    columns: Columns = {}
    for step in steps(section):
        step_edits, counts, sizes, examples = step.edit(texts)
        cleaned = apply_edits(texts, step_edits)
        edits = then(edits, step_edits)
        shape = (len(texts), len(step.rules))
        for rule, count, size in zip(
            step.rules, counts.reshape(shape).T, sizes.reshape(shape).T, strict=True
        ):
            columns[RULE_PREFIX + rule], columns[SIZES + rule] = count, size
        if examples is not None:
            columns[FOUND] = examples
        if step.rules is lines_dclm.RULES:
            before = count_words(texts)
            removed = before - count_words(cleaned)
            columns[REMOVED_RATIO] = removed / np.maximum(before, 1)
        texts = cleaned
    return {EDITS: edits, WORDS_LEFT: count_words(texts), **columns}


def judge(columns: Mapping[str, np.ndarray], section: Clean) -> np.ndarray:
    """Reason to drop each of n documents, or None: objects of shape (n,)."""
    reasons = np.full(len(columns[WORDS_LEFT]), None, object)
    if section.max_removed_word_ratio is not None and REMOVED_RATIO in columns:
        reasons[columns[REMOVED_RATIO] > section.max_removed_word_ratio] = REMOVED
    reasons[columns[WORDS_LEFT] == 0] = EMPTY
    return reasons


def count_words(texts: pa.Array) -> np.ndarray:
    """Number of words (`str.split()`) of n texts: int64 of shape (n,)."""
    return _count_words(*text_buffers(texts), code_point_flags())


@kernel
def _count_words(data: Bytes, offsets: Offsets, flags: Flags) -> np.ndarray:
    counts = np.zeros(len(offsets) - 1, np.int64)
    piece = new_rows()[:1]
    for text in range(len(counts)):
        piece[0, BEGIN], piece[0, END] = offsets[text], offsets[text + 1]
        counts[text] = line_words(data, piece, flags, len(data))
    return counts
