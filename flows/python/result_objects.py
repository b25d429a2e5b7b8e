"""Answers to questions about a run: plain objects, each of which prints like its
command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from gristmill.flows.questions import explain as explaining
from gristmill.flows.questions import search as searching
from gristmill.flows.questions import trace_tables
from gristmill.flows.questions import whatif as replaying


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Base of the answers to questions about a run.

    Attributes:
        found: the answer as plain data, as printed by the command line with `--json`.
    """

    found: dict[str, Any] = field(repr=False, compare=False)


Kind = TypeVar("Kind", bound=Answer)


def answer(kind: type[Kind], found: Mapping[str, Any], **converted: Any) -> Kind:
    """Build an answer from plain data.

    Args:
        kind: class of the answer.
        found: values by field name; missing fields have defaults.
        converted: fields computed from the data.
    """
    names = {field_.name for field_ in fields(kind)}
    values = {name: value for name, value in found.items() if name in names}
    return kind(**{**values, **converted, "found": dict(found)})


@dataclass(frozen=True, kw_only=True)
class Judgement(Answer):
    """Verdict of one stage on a document.

    Attributes:
        stage: name of the stage.
        keep: True if the document passed.
        reason: rule that dropped it.
        values: column -> measured value.
        threshold: value in the manifest of the rule that dropped it.
        error: reason of its quarantine.
        edits: edits of its text: `number`, `bytes_removed`, `bytes_added` and the
            `first` few.
    """

    stage: str
    keep: bool
    reason: str | None
    values: dict[str, Any]
    threshold: Any = None
    error: str | None = None
    edits: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation(Answer):
    """A document's history.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        outcome: `kept`, or the stage and rule that dropped it.
        metadata: other fields of its record.
        characters: length of its text as read.
        excerpt: beginning of its text.
        stages: verdict of each stage, up to the one that dropped it.
        mix: its use by the mixture (`use`, `reason`, `rows`, `tokens`, `copies`,
            `steps`); None without a mixture.
        text: if requested, the whole text in pieces: `text`, `edit` (removed, added or
            None) and `stage`.
    """

    id: str
    source: str
    locator: str
    outcome: str
    metadata: dict[str, Any]
    characters: int
    excerpt: str
    stages: list[Judgement]
    mix: dict[str, Any] | None = None
    text: list[dict[str, Any]] | None = None

    @property
    def kept(self) -> bool:
        """True if all stages kept the document."""
        return self.outcome == "kept"

    def show(self) -> None:
        """Print the history like `gristmill explain`."""
        explaining.print_history(self.found)


@dataclass(frozen=True, kw_only=True)
class StepTrace(Answer):
    """Rows and documents of a training step.

    Attributes:
        stage: the training.
        step: step, counted from 1.
        use: `read` or `will read`.
        rows: rows of the packed set, or of the examples.
        documents: documents in the rows, most tokens first: `id`, `source`, `locator`,
            `tokens`, `rows`.
        tokens: tokens of these documents.
        examples: ids of the examples read by fine-tuning.
        checkpoints_after: steps of checkpoints whose training read these rows.
    """

    stage: str
    step: int
    use: str
    rows: list[int]
    documents: list[dict[str, Any]] = field(default_factory=list)
    tokens: int | None = None
    examples: list[str] = field(default_factory=list)
    checkpoints_after: list[int] = field(default_factory=list)

    def show(self) -> None:
        """Print the trace like `gristmill trace --step`."""
        trace_tables.print_step(self.found)


@dataclass(frozen=True, kw_only=True)
class DocumentTrace(Answer):
    """Training steps that read a document, or an example of fine-tuning.

    Attributes:
        kind: `document` or `example`.
        id: id of the document or example.
        outcome: `kept` or `trained`, or the stage and rule that dropped it.
        steps: steps that read it: `stage`, `step`, `use` (read, or will read) and
            `rows`.
        checkpoints_after: checkpoints whose training read it: `stage` and `step`.
    """

    kind: str
    id: str
    outcome: str
    steps: list[dict[str, Any]]
    checkpoints_after: list[dict[str, Any]]

    def show(self) -> None:
        """Print the trace like `gristmill trace --document`."""
        trace_tables.print_document(self.found)


@dataclass(frozen=True, kw_only=True)
class TextTrace(Answer):
    """Passages of a text in the training rows.

    Attributes:
        characters: length of the text.
        covered: number of characters in a passage.
        shortest_span: tokens of the shortest passage searched for.
        spans: the longest passages: `begin` and `end` in characters, `tokens`, `text`,
            `count` of its places, and the first `places`: the document, its `source`,
            `row` and the `steps` that read it.
    """

    characters: int
    covered: int
    shortest_span: int
    spans: list[dict[str, Any]]

    def show(self) -> None:
        """Print the passages like `gristmill trace --text`."""
        trace_tables.print_spans(self.found)


@dataclass(frozen=True, kw_only=True)
class SearchHits(Answer):
    """Documents about a text.

    Attributes:
        by: methods used: `meaning`, `words`, or both.
        documents: number of documents in the run, kept or not.
        note: reason for not searching by meaning, and the remedy; None if it was used
            or not requested.
        hits: best first, each with `id`, `source`, `locator`, `url`, `score`, `meaning`
            (`rank`, `cosine`) and `words` (`rank`, `bm25`), either of them None,
            `kept`, `dropped_by`, `reason`, `characters` and `snippet`.
    """

    by: list[str]
    documents: int
    note: str | None
    hits: list[dict[str, Any]]

    def show(self) -> None:
        """Print the hits like `gristmill search`."""
        searching.print_hits(self.found)


@dataclass(frozen=True)
class Size:
    """Amount of text: documents, bytes, and tokens (None if unknown)."""

    documents: int
    bytes: int
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class WhatIf(Answer):
    """Documents that other thresholds would keep.

    Attributes:
        now: source -> size kept now.
        then: source -> size that would be kept.
        unseen: source -> size that would be kept but was not seen by later stages,
            which may drop it.
        rules: rule -> `now` and `then`: numbers of documents `failing` it, and failing
            `only` it.
        cuts: per changed threshold its `key`, its bounds `now` and `then`, and the
            documents next to it, `failing` and `passing`.
    """

    now: dict[str, Size]
    then: dict[str, Size]
    unseen: dict[str, Size]
    rules: dict[str, dict[str, dict[str, int]]]
    cuts: list[dict[str, Any]]

    def show(self) -> None:
        """Print the comparison like `gristmill whatif --set`."""
        replaying.print_replay(self.found)


@dataclass(frozen=True, kw_only=True)
class Threshold(Answer):
    """Effect of a threshold.

    Attributes:
        rule: name of the rule.
        key: key of the setting.
        bound: value of the threshold.
        seen: number of documents that the stage judged.
        failing: number of them that fail the rule.
        only: number of them that fail no other rule of the stage.
        looser, stricter: a neighbouring `bound`, and the number of documents `failing`
            it; None if there is none.
    """

    rule: str
    key: str
    bound: Any
    seen: int
    failing: int
    only: int
    looser: dict[str, Any] | None
    stricter: dict[str, Any] | None


def explanation(history: Mapping[str, Any]) -> Explanation:
    """Convert a history (`questions.explain.history`) to an object."""
    metadata = history["metadata"]
    return answer(
        Explanation,
        history,
        stages=[answer(Judgement, verdict) for verdict in history["stages"]],
        metadata=json.loads(metadata) if isinstance(metadata, str) else metadata or {},
    )


def replayed(comparison: Mapping[str, Any]) -> WhatIf:
    """Convert a comparison (`questions.whatif.replay`) to an object."""
    sides: dict[str, dict[str, Size]] = {}
    for side in ("now", "then", "unseen"):
        sizes = {}
        for source, size in comparison[side].items():
            tokens = round(size["tokens"]) if comparison["tokens_known"] else None
            sizes[str(source)] = Size(size["documents"], size["bytes"], tokens)
        sides[side] = sizes
    return answer(WhatIf, comparison, **sides)


def thresholds_of(rows: Sequence[Mapping[str, Any]]) -> list[Threshold]:
    """Convert thresholds (`questions.whatif.thresholds`) to objects."""
    return [answer(Threshold, row) for row in rows]
