"""Answers of `gristmill trace`, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.text import Text

from gristmill.flows.pages.page_elements import table, value_text
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.questions.explain import (
    KEPT,
    NOT_DRAWN,
    SHOWN_CHARS,
    Judgement,
    shorten_text,
)
from gristmill.flows.questions.training_reads import Use
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.yaml_text import join_first
from gristmill.train.rl.rollout_tables import AnswerRow

SHOWN_STEPS = 12


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
class StepTrace:
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

    def show(self) -> None:
        """Print the trace like `gristmill trace --step`."""
        console = plain_console()
        contents = f"{len(self.examples)} examples"
        if self.tokens is not None:
            contents = f"{self.tokens} tokens, {len(self.documents)} documents"
        console.print(
            f"{self.stage} step {self.step} {self.use}: "
            f"{len(self.rows)} rows, {contents}",
            style="bold",
        )
        if self.answers is not None:
            print_answers(console, self.examples, self.answers)
        elif self.tokens is None:
            for row, example in zip(self.rows_of_examples, self.examples, strict=True):
                console.print(f"{row:>8}  {example}")
        else:
            _print_documents(console, self.documents)


def _print_documents(console: Console, documents: Sequence[RowDocument]) -> None:
    """Print two lines per document: its facts, and its whole locator, which `explain`
    takes.
    """
    for document in documents:
        facts = [f"{document.tokens:>8} tokens", document.source, document.id[:16]]
        for name, value in document.quality.items():
            facts.append(f"{name} {value_text(value)}")
        if document.cluster_size:
            facts.append(f"{document.cluster_size - 1} duplicates")
        console.print("  ".join(facts), soft_wrap=True)
        console.print(f"{'':8} {document.address}", style="dim", soft_wrap=True)


def print_answers(
    console: Console, prompts: Sequence[str], answers: Sequence[AnswerRow]
) -> None:
    """Print the prompts of a step, each with its answers and their rewards."""
    if not answers:
        for prompt in prompts:
            console.print(f"  {prompt}")
        console.print("their answers are not drawn yet", style="dim")
        return
    for prompt, group in groupby(answers, key=lambda answer: answer["id"]):
        answers_to_prompt = list(group)
        first, right = answers_to_prompt[0], ""
        if first["right"] is not None:
            # The end of a right answer holds its result.
            right = f"  right: {first['right'][-SHOWN_CHARS:]!r}"
        console.print(
            Text.assemble(
                (f"{prompt[:16]}  ", "dim"),
                (shorten_text(first["prompt"]), "bold"),
                (right, "green"),
            )
        )
        rows = []
        for answer in answers_to_prompt:
            lines = [
                f"{call['name']} {call['arguments']} -> {call['answer']}"
                for call in answer.get("used") or ()
            ]
            text = "\n".join(map(shorten_text, [*lines, answer["answer"]]))
            ending = "" if answer["ended"] else "cut"
            figures = answer["reward"], answer["advantage"], answer["tokens"]
            rows.append([*figures, ending, text])
        columns = {"reward": ".4g", "advantage": "+.4g", "tokens": "d", "": ""}
        print_table(console, table({**columns, "answer": ""}, rows))


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
        console = plain_console()
        origin = "example"
        if self.kind == "document":
            origin = f"{self.source}  {self.locator}"
        console.print(Text.assemble((self.id, "bold"), f"  {origin}"))
        console.print(Text.assemble(("outcome  ", "bold"), self.describe_outcome()))
        for judgement in self.stages[-1:]:
            for line in judgement.lines():
                console.print(f"      {line}", style="dim")
        for relation, ids in (("parents", self.parents), ("children", self.children)):
            if ids:
                console.print(Text.assemble((f"{relation}  ", "bold"), join_first(ids)))
        if not self.steps:
            return
        rows = [
            (step.stage, step.step, step.use, join_first(step.rows))
            for step in self.steps[:SHOWN_STEPS]
        ]
        columns = {"stage": "", "step": "d", "": "", "rows": ""}
        print_table(console, table(columns, rows))
        print_hidden(console, len(self.steps))
        after = [f"{saved.stage} {saved.step}" for saved in self.checkpoints_after]
        console.print(
            Text.assemble(
                ("checkpoints that know it  ", "bold"),
                ", ".join(after) or "none is kept",
            )
        )

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
class TextTrace:
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

    def show(self) -> None:
        """Print the passages like `gristmill trace --text`."""
        console = plain_console()
        share = "none"
        if self.characters:
            share = f"{self.covered / self.characters:.0%}"
        console.print(
            f"{self.found} passage{'s' * (self.found != 1)} of {self.shortest_span} "
            f"tokens or more in the training rows, {share} of the text",
            style="bold",
        )
        for span in self.spans:
            console.print(
                f"\n{span.tokens} tokens, characters {span.begin} to {span.end}, "
                f"{span.count:,} place{'s' * (span.count != 1)}",
                style="bold",
            )
            text = span.text
            if len(text) > SPAN_CHARS:
                text = f"{text[: SPAN_CHARS // 2]} ... {text[-(SPAN_CHARS // 2) :]}"
            console.print(f"  {text!r}", soft_wrap=True)
            for place in span.places:
                console.print(
                    f"  {place.id[:16]}  {place.source}  {place.address}",
                    soft_wrap=True,
                )
                readers = "no step reads it"
                if place.steps:
                    numbers = join_first([step.step for step in place.steps])
                    uses = " and ".join(sorted({step.use for step in place.steps}))
                    readers = f"{place.steps[0].stage} steps {numbers} {uses} it"
                console.print(
                    f"    row {place.row} from token {place.start}; {readers}",
                    style="dim",
                )
            if num_hidden := span.count - len(span.places):
                console.print(f"  ... and {num_hidden:,} more", style="dim")
        if num_hidden := self.found - len(self.spans):
            console.print(f"\n... and {num_hidden:,} shorter passages", style="dim")


SPAN_CHARS = 240
"""Characters of a printed passage; longer ones lose their middle."""


def print_hidden(console: Console, number: int) -> None:
    """Print how many entries of a list are not shown."""
    if number > SHOWN_STEPS:
        console.print(
            f"... and {number - SHOWN_STEPS} more (--json has them)", style="dim"
        )
