"""A source whose documents a language model writes from documents of other sources of
the same manifest.

    sources:
      web: {path: web.jsonl}
      taught:
        generate:
          parents: [web]
          style: textbook
          model: {endpoint: "http://127.0.0.1:8000/v1", model: writer}
        weight: 0.2
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag, model_validator

from gristmill.mixtures.base import (
    Count,
    Fraction,
    Judging,
    NonEmpty,
    OutsidePath,
    Positive,
    Section,
)
from gristmill.mixtures.schema.sources import MixedSource, Source, TokenSource
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge import Judge
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.steps.quality import Quality

Style = Literal[
    "rephrase",
    "question_answer",
    "textbook",
    "summary",
    "translate",
    "continue",
    "instruction",
    "answer",
    "persona",
]


class ParentStep(Section):
    """One step that selects parents, such as `{filter: {...}}`."""

    filter: Filter | None = None
    dedup: Dedup | None = None
    langid: LanguageId | None = None
    quality: Quality | None = None
    decontaminate: Decontaminate | None = None
    annotate: Annotate | None = None
    judge: Judge | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        # a dump, which also holds the keys of the other steps
        if isinstance(value, dict) and len(value) > 1:
            return {
                key: settings for key, settings in value.items() if settings is not None
            }
        if isinstance(value, dict):
            return {
                key: {} if settings is None else settings
                for key, settings in value.items()
            }
        return {value: {}} if isinstance(value, str) else value

    def _problems(self) -> Iterator[str]:
        if len(self.model_fields_set) != 1:
            yield (
                f"write one step per entry, one of {', '.join(type(self).model_fields)}"
            )
        if self.config.edits_text:
            yield (
                f"{self.stage}: parents are read unedited; remove the "
                "settings that change text"
            )

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> Judging:
        """Settings of the step."""
        config: Judging = getattr(self, self.stage)
        return config


class Generate(Section):
    """Generation of new documents from existing ones; see docs/judges.md."""

    added: ClassVar[Collection[str]] = ("others",)

    parents: NonEmpty[str]
    """Sources of the documents from which new ones are written. A generated source may
    be among them.
    """
    model: AskedModel
    """The model that writes."""
    style: Style = "rephrase"
    """`rephrase` says the same in other words; `question_answer` asks about the text
    and answers; `textbook` and `summary` rewrite it; `translate` needs `language`;
    `continue` continues the cut text; `instruction` writes a request that the text
    fulfils, followed by the text, and `answer` the reverse: a text that fulfils the
    request in the parent; `persona` lets one of `personas` write about the subject.
    """
    template: OutsidePath | None = None
    """A file with your own prompt instead, as a Jinja template of `text`, `source`,
    `locator`, `url`, `metadata`, `persona`, `language`, `number` (index from 0 among
    the new documents of one parent) and `others`.
    """
    others: Count = 0
    """Number of further parents per new document, chosen by the hash of their ids from
    its shard: a template finds their texts in the list `others`. All of them count as
    its parents, also for `trace`, `takedown` and licences.
    """
    per_document: Positive = 1
    """Number of new documents per parent. At temperature 0 a model writes the same
    document again, unless the template or the persona differs.
    """
    personas: tuple[str, ...] | OutsidePath = ()
    """Personas, of which one is drawn for each new document: a list, or a file with one
    per line.
    """
    language: str | None = None
    """Target language of `translate`, in words that the model knows: `German`."""
    prepare: tuple[ParentStep, ...] = ()
    """Steps that select parents, with the same keys as in the manifest's `prepare`,
    which later judges all documents, including the new ones. If absent, all documents
    of `parents` are used.
    """
    share: Fraction = 1.0
    """Share of the parents to use, chosen by the hash of their ids."""
    limit: Positive | None = None
    """Largest number of parents, chosen in the same way."""
    characters: Positive = 12000
    """Characters of a parent that the model reads, from the beginning."""
    shortest: Positive = 1
    """Characters of the shortest new document; shorter ones are dropped
    (`generate/short`).
    """
    cut: Literal["drop", "keep"] = "drop"
    """Treatment of a text that ended at `model.max_tokens`: dropped (`generate/cut`),
    or kept as it is.
    """
    max_quarantined: Fraction = 0.05
    """Share of requests that the endpoint may refuse before the stage fails."""
    seed: int | None = None
    """Seed of the choice of parents and personas; the manifest's if absent."""

    def _problems(self) -> Iterator[str]:
        if self.template is None and self.style == "translate" and not self.language:
            yield "style translate needs `language`, such as `language: German`"
        if self.template is None and self.style == "persona" and not self.personas:
            yield "style persona needs `personas`, a list or a file"
        if self.template is None and self.others:
            yield (
                "`others` needs a `template` of your own that shows "
                "them; give one, or remove `others`"
            )


class GeneratedSource(MixedSource):
    """A named source of documents that a language model writes."""

    TAG: ClassVar[str] = "(generated)"
    generate: Generate


def _tag_of(value: Any) -> str:
    if isinstance(value, dict):
        if "generate" in value:
            return GeneratedSource.TAG
        return TokenSource.TAG if "tokens" in value else Source.TAG
    return next(
        (
            kind.TAG
            for kind in (GeneratedSource, TokenSource)
            if isinstance(value, kind)
        ),
        Source.TAG,
    )


AnySource = Annotated[
    Annotated[Source, Tag(Source.TAG)]
    | Annotated[TokenSource, Tag(TokenSource.TAG)]
    | Annotated[GeneratedSource, Tag(GeneratedSource.TAG)],
    Discriminator(_tag_of),
]
"""A source of documents; with the key `tokens` a source of tokens, with the key
`generate` one of new documents.
"""
