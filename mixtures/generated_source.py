"""A source whose documents a language model writes, from documents of other sources of the same manifest.

sources:
  web:    {path: web.jsonl}
  taught:
    generate: {parents: [web], style: textbook, model: {endpoint: "http://127.0.0.1:8000/v1", model: writer}}
    weight: 0.2
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from gristmill.mixtures.base import Fraction, Judging, OutsidePath, Positive, Section
from gristmill.mixtures.sources import Mixed, Source, TokenSource
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge import Judge
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.steps.quality import Quality

Style = Literal[
    "rephrase", "question_answer", "textbook", "summary", "translate", "continue", "instruction", "answer", "persona"
]


class ParentStep(Section):
    """One step that chooses among the parents, such as `{filter: {...}}`."""

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
        if isinstance(value, dict) and len(value) > 1:  # as it was dumped, with those that it is not
            return {key: item for key, item in value.items() if item is not None}
        return (
            {value: {}}
            if isinstance(value, str)
            else (
                {key: {} if item is None else item for key, item in value.items()} if isinstance(value, dict) else value
            )
        )

    @model_validator(mode="after")
    def _one_that_only_judges(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"one step per entry, one of {', '.join(type(self).model_fields)}")
        if self.config.edits_text:
            raise ValueError(f"{self.stage}: parents are taken whole; let it change no text")
        return self

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> Judging:
        """Its settings."""
        config: Judging = getattr(self, self.stage)
        return config


class Generate(Section):
    """How new documents are made from documents; see docs/judges.md."""

    added: ClassVar[Collection[str]] = ("others",)

    parents: Annotated[tuple[str, ...], Field(min_length=1)]
    """Sources whose documents they are made from. One that is generated itself may be among them."""
    model: AskedModel
    """Who writes."""
    style: Style = "rephrase"
    """`rephrase` says the same in other words; `question_answer` asks about the text and answers; `textbook` and
    `summary`; `translate`, which needs `language`; `continue` goes on where the text is cut; `instruction` is a request
    that the text fulfils, with the text behind it, and `answer` the other way round: a text that fulfils the request
    which the parent is; `persona` lets one of `personas` write about the subject."""
    template: OutsidePath | None = None
    """A file with a prompt of your own instead, as a Jinja template of `text`, `source`, `locator`, `url`, `metadata`,
    `persona`, `language`, `number` (which of several documents of one parent, from 0) and `others`."""
    others: Annotated[int, Field(ge=0)] = 0
    """Further parents of each new document, chosen by the hash of their ids among those of its shard: a template finds
    their texts in the list `others`. All of them are its parents, for `trace`, `takedown` and licences too."""
    per_document: Positive = 1
    """New documents of each parent. A model of temperature 0 writes the same one again, unless the template, or a
    persona, differs."""
    personas: tuple[str, ...] | OutsidePath = ()
    """Who may be writing, one of them by chance for each new document: a list, or a file with one a line."""
    language: str | None = None
    """What `translate` translates into, in words that the model knows: `German`."""
    prepare: tuple[ParentStep, ...] = ()
    """Steps that choose among the parents, with the keys that they have in the manifest's `prepare`; that one judges
    all documents afterwards, the new ones too. All parents count if absent."""
    share: Fraction = 1.0
    """Of the parents, chosen by the hash of their ids."""
    limit: Positive | None = None
    """At most so many parents, chosen in the same way."""
    characters: Positive = 12000
    """Of a parent, from its beginning, that the model reads."""
    shortest: Positive = 1
    """Characters: what is shorter is dropped (`generate/short`)."""
    cut: Literal["drop", "keep"] = "drop"
    """What happens to a text that ended at `model.max_tokens`: it is dropped (`generate/cut`), or kept as it is."""
    max_quarantined: Fraction = 0.05
    """Share of requests that the endpoint may refuse before the stage fails."""
    seed: int | None = None
    """Of the choice of parents and personas; the manifest's if absent."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.template is None and self.style == "translate" and not self.language:
            raise ValueError("style translate needs `language`, such as `language: German`")
        if self.template is None and self.style == "persona" and not self.personas:
            raise ValueError("style persona needs `personas`, a list or a file")
        if self.template is None and self.others:
            raise ValueError("others are for a `template` of your own that shows them; give one, or remove `others`")
        return self


class GeneratedSource(Mixed):
    """One named source of documents that a language model writes."""

    TAG: ClassVar[str] = "(generated)"
    generate: Generate


def _tag_of(value: Any) -> str:
    if isinstance(value, dict):
        return next(
            (tag for key, tag in (("generate", GeneratedSource.TAG), ("tokens", TokenSource.TAG)) if key in value),
            Source.TAG,
        )
    return next((kind.TAG for kind in (GeneratedSource, TokenSource) if isinstance(value, kind)), Source.TAG)


AnySource = Annotated[
    Annotated[Source, Tag(Source.TAG)]
    | Annotated[TokenSource, Tag(TokenSource.TAG)]
    | Annotated[GeneratedSource, Tag(GeneratedSource.TAG)],
    Discriminator(_tag_of),
]
"""A source of documents, with the key `tokens` one of tokens, with the key `generate` one of new documents."""


def generation_order(sources: dict[str, GeneratedSource]) -> list[str]:
    """The generated sources, each behind those that it is made from; a valid manifest has no circles."""
    waiting, placed = dict(sources), list[str]()
    while waiting:
        ready = next(
            name for name, source in waiting.items() if not any(parent in waiting for parent in source.generate.parents)
        )
        placed.append(ready)
        del waiting[ready]
    return placed
