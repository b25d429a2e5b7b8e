"""Answers of `gristmill trace`, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from gristmill.flows.pages.addresses import address
from gristmill.flows.pages.document_elements import (
    document_entry,
    example_link,
    numbered_links,
)
from gristmill.flows.pages.page_elements import (
    ByName,
    Entry,
    Fields,
    Heading,
    Inline,
    Link,
    Listing,
    Note,
    Parts,
    Span,
    Text,
    table,
    value_text,
)
from gristmill.flows.pages.terminal_pages import Answer, print_parts
from gristmill.flows.planning.quantities import counted
from gristmill.flows.questions.explain import KEPT, NOT_DRAWN, Judgement
from gristmill.flows.questions.training_reads import Use
from gristmill.flows.stages.registry import MIX
from gristmill.mixtures.yaml_text import join_first
from gristmill.train.rl.rollout_tables import AnswerRow

MOST_SHOWN = 200
"""Documents, examples or steps that are listed; JSON has all."""


@dataclass(frozen=True, kw_only=True)
class TracedDocument:
    """Origin and measurements of a document in training rows.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        url: its address, if it has one.
        quality: measured scores, by name.
        language: language code, if measured.
        cluster: id of its cluster of duplicates, if searched.
        cluster_size: number of documents in the cluster.
    """

    id: str
    source: str
    locator: str
    url: str | None = None
    quality: dict[str, float] = field(default_factory=dict)
    language: str | None = None
    cluster: str | None = None
    cluster_size: int | None = None

    @property
    def address(self) -> str:
        """Its URL, or its locator without one."""
        return self.url or self.locator


@dataclass(frozen=True, kw_only=True)
class RowDocument(TracedDocument):
    """A document in some rows: its tokens there, the rows, and the numbers of its
    copies.
    """

    tokens: int
    rows: list[int]
    copies: list[int]


@dataclass(frozen=True)
class StepTrace(Answer):
    """Rows and documents of a training step.

    Attributes:
        stage: the training.
        step: step, counted from 1.
        use: `read` or `will read`.
        rows: rows of the packed set, or of the examples.
        checkpoints_after: steps of checkpoints whose training read these rows.
        tokens: tokens of the documents; None in fine-tuning.
        documents: documents in the rows, most tokens first.
        examples: ids of the examples read by fine-tuning.
        rows_of_examples: row of each example.
        answers: answers of reinforcement learning to the prompts
            (`train.rl.rollout_tables`); None for other trainings.
    """

    stage: str
    step: int
    use: Use
    rows: list[int]
    checkpoints_after: list[int]
    tokens: int | None = None
    documents: list[RowDocument] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    rows_of_examples: list[int] = field(default_factory=list)
    answers: list[AnswerRow] | None = None

    def parts(self, beginnings: ByName[str] = MappingProxyType({})) -> list[Parts]:
        """Return the rows and their contents as parts of a page.

        Args:
            beginnings: example -> beginning of its text.
        """
        rows = dict(zip(self.examples, self.rows_of_examples, strict=False))
        examples = list(dict.fromkeys(self.examples))
        contents = f"rows with {len(examples):,} examples"
        listed: Parts = Listing(
            "",
            [
                Entry(
                    example_link(example),
                    beginnings.get(example, ""),
                    f"row {rows[example]}" if example in rows else "",
                )
                for example in examples[:MOST_SHOWN]
            ],
        )
        if self.answers is not None:
            contents = "prompts"
            listed = _prompts(self.answers) or [
                "Their answers are not drawn yet.",
                listed,
            ]
        elif self.tokens is not None:
            documents = f"{len(self.documents):,} documents"
            contents = f"rows with {self.tokens:,} tokens of {documents}"
            listed = [
                numbered_links(
                    "rows", self.rows, lambda row: address("rows", MIX, row)
                ),
                Listing("", list(map(_document_entry, self.documents[:MOST_SHOWN]))),
            ]
        verb = "It read" if self.use == "read" else "It will read"
        checkpoints = ", ".join(map(str, self.checkpoints_after))
        suffix = f"; checkpoints at {checkpoints} know them." if checkpoints else "."
        number = len(self.documents) or len(examples)
        return [
            Note(f"{verb} {len(self.rows):,} {contents}{suffix}", "plain"),
            listed,
            f"The first ones of {number:,} are shown." if number > MOST_SHOWN else None,
        ]


def _document_entry(document: RowDocument) -> Entry:
    """A document of a step: its address, tokens, source, measured values and id."""
    facts = [f"{document.tokens:,} tokens", document.source]
    for name, value in document.quality.items():
        facts.append(f"{name} {value_text(value)}")
    facts += [document.language] if document.language else []
    if document.cluster_size:
        facts.append(f"{document.cluster_size - 1} duplicates")
    return document_entry(document.id, document.address, facts)


def _prompts(answers: Sequence[AnswerRow]) -> list[Parts]:
    """The prompts of a step of reinforcement learning, each with its answers."""
    parts: list[Parts] = []
    columns = {"reward": ">", "advantage": ">", "tokens": ">", "answer": ""}
    meanings = {"reward": "of the answer, weighted", "tokens": "of the answer"}
    for example, group in groupby(answers, key=lambda answer: answer["id"]):
        rows = []
        for answer in group:
            calls: list[Inline] = []
            for call in answer.get("used") or ():
                name = Span(f"{call['name']} {call['arguments']}", "code")
                calls += [name, f" → {call['answer']} "]
            values = [value_text(answer["reward"]), value_text(answer["advantage"])]
            tokens = f"{answer['tokens']:,}{'' if answer['ended'] else ', cut'}"
            rows.append([*values, tokens, [*calls, answer["answer"]]])
        parts += [Heading(example_link(example)), Text([Span(answer["prompt"])])]
        if answer["right"] is not None:
            parts.append(Note([f"right: {answer['right']}"]))
        parts.append(table(columns, rows, meanings))
    return parts


@dataclass(frozen=True)
class StepUse:
    """A training step, counted from 1, that has read (`read`) or `will read` a row."""

    stage: str
    step: int
    use: Use


@dataclass(frozen=True)
class StepReads(StepUse):
    """A training step and the rows that it reads."""

    rows: list[int]


@dataclass(frozen=True)
class CheckpointStep:
    """A checkpoint of a training, and its step."""

    stage: str
    step: int


@dataclass(frozen=True)
class DocumentTrace:
    """Training steps that read a document, or an example of fine-tuning.

    Attributes:
        kind: `document` or `example`.
        id: id of the document or example.
        outcome: `kept` or `trained`, or the stage and rule that dropped it.
        steps: steps that read it.
        checkpoints_after: checkpoints whose training read it.
        source, locator, shard, row: origin and place of a document.
        use, reason, tokens, copies, rows: its use by the mixture, as in `MixtureUse`;
            None without a mixture.
        stages: verdicts of the stages, without a mixture.
        parents: ids of the documents that it was generated from.
        children: ids of the documents generated from it.
    """

    kind: Literal["document", "example"]
    id: str
    outcome: str
    steps: list[StepReads]
    checkpoints_after: list[CheckpointStep]
    source: str | None = None
    locator: str | None = None
    shard: str | None = None
    row: int | None = None
    use: str | None = None
    reason: str | None = None
    tokens: int | None = None
    copies: int | None = None
    rows: list[int] | None = None
    stages: list[Judgement] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print the trace like `gristmill trace --document`."""
        origin = "example"
        if self.kind == "document":
            origin = f"{self.source}  {self.locator}"
        print_parts(
            Note([Span(self.id, "strong"), f"  {origin}"], "plain"), self.parts()
        )

    def parts(self) -> list[Parts]:
        """Return the outcome, the steps and the checkpoints as parts of a page."""
        relatives = {"parents": self.parents, "children": self.children}
        rows = [
            [
                step.stage,
                Link(str(step.step), address("training", step.stage, step.step)),
                step.use,
                join_first(step.rows),
            ]
            for step in self.steps[:MOST_SHOWN]
        ]
        after = ", ".join(
            f"{saved.stage} {saved.step}" for saved in self.checkpoints_after
        )
        number = len(self.steps)
        return [
            Note(self.describe_outcome(), "plain"),
            [judgement.parts() for judgement in self.stages[-1:]],
            Fields([(name, join_first(ids)) for name, ids in relatives.items() if ids]),
            table({"stage": "", "step": ">", "": "", "rows": ""}, rows),
            f"The first ones of {number:,} are shown." if number > MOST_SHOWN else None,
            f"Checkpoints that know it: {after or 'none is kept'}." if rows else None,
        ]

    def describe_outcome(self) -> str:
        """Describe the use by training in a sentence."""
        if self.use == "not drawn":
            return (
                f"not drawn: {NOT_DRAWN.get(self.reason, self.reason)}; no step "
                "reads it"
            )
        if self.use == "held out":
            return (
                f"held out, never trained: {self.tokens} tokens in validation "
                f"rows {join_first(self.rows or [])}"
            )
        if self.outcome not in (KEPT, "trained"):
            return f"{self.outcome}; no step reads it"
        if not self.steps:
            return "no step reads it"
        num_read = sum(step.use == "read" for step in self.steps)
        return f"{num_read} steps have read it, {len(self.steps) - num_read} will"


@dataclass(frozen=True, kw_only=True)
class TextPlace(TracedDocument):
    """A place of a passage in the training rows, and the document there.

    Attributes:
        row: row of the packed set.
        start: its first token in the row.
        offset: its first token in the document.
        copy: number of the document's copy.
        steps: steps that read the row.
    """

    row: int
    start: int
    offset: int
    copy: int
    steps: list[StepUse]

    def entry(self) -> Entry:
        """Return the place as an entry of a listing."""
        readers = "no step reads it"
        if self.steps:
            numbers = join_first([step.step for step in self.steps])
            uses = " and ".join(sorted({step.use for step in self.steps}))
            readers = f"{self.steps[0].stage} steps {numbers} {uses} it"
        place = f"row {self.row} from token {self.start}"
        return document_entry(self.id, self.address, [self.source, place, readers])


@dataclass(frozen=True)
class TextSpan:
    """A passage of a text.

    Attributes:
        begin, end: its characters, [begin, end).
        tokens: number of its tokens.
        text: the passage.
        count: number of its places in the training rows.
        places: the first of them.
    """

    begin: int
    end: int
    tokens: int
    text: str
    count: int
    places: list[TextPlace]


@dataclass(frozen=True)
class TextTrace(Answer):
    """Passages of a text in the training rows.

    Attributes:
        characters: length of the text.
        covered: number of characters in a passage.
        shortest_span: tokens of the shortest passage searched for.
        found: number of passages, of which none contains another.
        spans: the longest of them.
    """

    characters: int
    covered: int
    shortest_span: int
    found: int
    spans: list[TextSpan]

    def parts(self) -> list[Parts]:
        """Return the passages as parts of a page."""
        share = self.covered / max(self.characters, 1)
        parts: list[Parts] = [
            Note(
                f"{counted(self.found, 'passage')} of {self.shortest_span} tokens or "
                f"more in the training rows, {share:.0%} of the text",
                "plain",
            )
        ]
        for span in self.spans:
            text = span.text
            if len(text) > SPAN_CHARS:
                text = f"{text[: SPAN_CHARS // 2]} ... {text[-(SPAN_CHARS // 2) :]}"
            characters = f"characters {span.begin} to {span.end}"
            hidden = span.count - len(span.places)
            parts += [
                Heading(
                    f"{span.tokens} tokens, {characters}, {counted(span.count, 'place')}"
                ),
                Text([Span(text)]),
                Listing("", [place.entry() for place in span.places]),
                f"and {hidden:,} places more" if hidden else None,
            ]
        hidden = self.found - len(self.spans)
        return [*parts, f"and {hidden:,} shorter passages" if hidden else None]


SPAN_CHARS = 240
"""Characters of a printed passage; longer ones lose their middle."""
