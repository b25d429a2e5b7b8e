"""What questions about a run are answered with: plain objects, each of which prints as its command does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from gristmill.flows.questions import explain as explaining
from gristmill.flows.questions import search as searching
from gristmill.flows.questions import trace_tables
from gristmill.flows.questions import whatif as replaying


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a question about a run is answered with.

    Attributes:
        found: the same as plain data, as the command line prints it with `--json`.
    """

    found: dict[str, Any] = field(repr=False, compare=False)


Kind = TypeVar("Kind", bound=Answer)


def answer(kind: type[Kind], found: Mapping[str, Any], **made: Any) -> Kind:
    """An answer from plain data.

    Args:
        kind: the class.
        found: by the names of its fields; what is absent there has a default.
        made: fields that are made from it.
    """
    names = {one.name for one in fields(kind)} - {"found"} - made.keys()
    return kind(found=dict(found), **{name: found[name] for name in names if name in found}, **made)


@dataclass(frozen=True, kw_only=True)
class Judgement(Answer):
    """What one stage said of a document.

    Attributes:
        stage: its name.
        keep: whether the document passed.
        reason: the rule that dropped it.
        values: column -> what was measured.
        threshold: what the reason stands for in the manifest.
        error: why it was quarantined.
        edits: what was changed in its text: `number`, `bytes_removed`, `bytes_added` and the `first` few.
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
        source: the name of its source.
        locator: its file and place there.
        outcome: `kept`, or which stage dropped it by which rule.
        metadata: what its record said besides the text.
        characters: of its text as it was read.
        excerpt: how that begins.
        stages: what each stage said of it, up to the one that dropped it.
        mix: what the mixture made of it (`use`, `reason`, `rows`, `tokens`, `copies`, `steps`); None before there is
            one.
        text: where it was asked for, the whole text in pieces: `text`, `edit` (removed, added or None) and `stage`.
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
        """Whether it was kept by all stages."""
        return self.outcome == "kept"

    def show(self) -> None:
        """Print it as `gristmill explain` does."""
        explaining.print_history(self.found)


@dataclass(frozen=True, kw_only=True)
class StepTrace(Answer):
    """What a training step read.

    Attributes:
        stage: the training.
        step: counted from 1.
        use: whether it was read, or will be.
        rows: of the packed set, or of the examples.
        documents: those in the rows, the ones with most tokens first: `id`, `source`, `locator`, `tokens`, `rows`.
        tokens: of these documents.
        examples: ids of what a tuning read.
        checkpoints_after: steps of checkpoints that know these rows.
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
        """Print it as `gristmill trace --step` does."""
        trace_tables.print_step(self.found)


@dataclass(frozen=True, kw_only=True)
class DocumentTrace(Answer):
    """What became of a document, or of an example of a tuning.

    Attributes:
        kind: `document` or `example`.
        id: its id.
        outcome: `kept` or `trained`, or which stage dropped it by which rule.
        steps: those that read it: `stage`, `step`, `use` (read, or will be read) and `rows`.
        checkpoints_after: those that know it: `stage` and `step`.
    """

    kind: str
    id: str
    outcome: str
    steps: list[dict[str, Any]]
    checkpoints_after: list[dict[str, Any]]

    def show(self) -> None:
        """Print it as `gristmill trace --document` does."""
        trace_tables.print_document(self.found)


@dataclass(frozen=True, kw_only=True)
class TextTrace(Answer):
    """Where the passages of a text stand in the training rows.

    Attributes:
        characters: of the text.
        covered: how many of them are in a passage.
        shortest_span: tokens of the shortest passage that is looked for.
        spans: the longest passages: `begin` and `end` in characters, `tokens`, `text`, `count` of its places, and the
            first `places`: the document, its `source`, `row` and the `steps` that read it.
    """

    characters: int
    covered: int
    shortest_span: int
    spans: list[dict[str, Any]]

    def show(self) -> None:
        """Print it as `gristmill trace --text` does."""
        trace_tables.print_spans(self.found)


@dataclass(frozen=True, kw_only=True)
class SearchHits(Answer):
    """The documents that a text is about.

    Attributes:
        by: the ways that were taken: `meaning`, `words`, or both.
        documents: of the run, kept or not.
        note: why nothing was looked for by meaning, and how to get that; None where it was, or was not asked for.
        hits: the best first, each with `id`, `source`, `locator`, `url`, `score`, `meaning` (`rank`, `cosine`) and
            `words` (`rank`, `bm25`), either None, `kept`, `dropped_by`, `reason`, `characters` and `snippet`.
    """

    by: list[str]
    documents: int
    note: str | None
    hits: list[dict[str, Any]]

    def show(self) -> None:
        """Print them as `gristmill search` does."""
        searching.print_hits(self.found)


@dataclass(frozen=True)
class Size:
    """How much text there is: documents, bytes, and tokens where they are known."""

    documents: int
    bytes: int
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class WhatIf(Answer):
    """What other thresholds would keep.

    Attributes:
        now: source -> what is kept.
        then: source -> what would be kept.
        unseen: source -> what would be kept of that which later stages have not seen, so that they may drop it.
        rules: rule -> `now` and `then`: how many documents are `failing` it, and fail `only` it.
        cuts: per changed threshold its `key`, its bounds `now` and `then`, and the documents next to it, `failing` and
            `passing`.
    """

    now: dict[str, Size]
    then: dict[str, Size]
    unseen: dict[str, Size]
    rules: dict[str, dict[str, dict[str, int]]]
    cuts: list[dict[str, Any]]

    def show(self) -> None:
        """Print it as `gristmill whatif --set` does."""
        replaying.print_replay(self.found)


@dataclass(frozen=True, kw_only=True)
class Threshold(Answer):
    """What a threshold drops.

    Attributes:
        rule: its name.
        key: the setting.
        bound: its value.
        seen: documents that were held against it.
        failing: how many of them fail it.
        only: how many of them fail no other rule of the stage.
        looser, stricter: another `bound` on either side, and how many would be `failing` that; None without any.
    """

    rule: str
    key: str
    bound: Any
    seen: int
    failing: int
    only: int
    looser: dict[str, Any] | None
    stricter: dict[str, Any] | None


def explanation(found: Mapping[str, Any]) -> Explanation:
    """A history (`questions.explain.history`) as an object."""
    metadata = found["metadata"]
    return answer(
        Explanation,
        found,
        stages=[answer(Judgement, one) for one in found["stages"]],
        metadata=json.loads(metadata) if isinstance(metadata, str) else metadata or {},
    )


def replayed(found: Mapping[str, Any]) -> WhatIf:
    """A comparison (`questions.whatif.replay`) as an object."""
    whole: Callable[[float], int] | None = round if found["tokens_known"] else None
    sides = {
        side: {
            str(source): Size(size["documents"], size["bytes"], whole(size["tokens"]) if whole else None)
            for source, size in found[side].items()
        }
        for side in ("now", "then", "unseen")
    }
    return answer(WhatIf, found, **sides)


def thresholds_of(rows: Sequence[Mapping[str, Any]]) -> list[Threshold]:
    """Thresholds (`questions.whatif.thresholds`) as objects."""
    return [answer(Threshold, row) for row in rows]
