"""The lists `prepare`: the stages that judge and edit documents, or examples of tuning, in their order."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from gristmill.mixtures.clean import Clean
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.dedup import Dedup, DedupLines, DedupSubstrings
from gristmill.mixtures.filter import Filter
from gristmill.mixtures.langid import LanguageId
from gristmill.mixtures.quality import Quality
from gristmill.mixtures.section import Judging, Section

PREPARE_SECTIONS: dict[str, type[Judging]] = {
    "clean": Clean,
    "filter": Filter,
    "dedup": Dedup,
    "dedup_lines": DedupLines,
    "dedup_substrings": DedupSubstrings,
    "langid": LanguageId,
    "quality": Quality,
    "decontaminate": Decontaminate,
}
PREPARE_STAGES = tuple(PREPARE_SECTIONS)
"""The stages that annotate documents, by the names that `prepare:` uses."""


def take_bare_name(value: Any) -> Any:
    """An entry that is only a name, or has nothing behind it, as one with the defaults."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict):
        return {key: ({} if item is None and key in PREPARE_SECTIONS else item) for key, item in value.items()}
    return value


class Step(Section):
    """One entry of `prepare:`: a mapping of one stage name to its configuration."""

    clean: Clean | None = None
    filter: Filter | None = None
    dedup: Dedup | None = None
    dedup_lines: DedupLines | None = None
    dedup_substrings: DedupSubstrings | None = None
    langid: LanguageId | None = None
    quality: Quality | None = None
    decontaminate: Decontaminate | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return take_bare_name(value)

    @model_validator(mode="after")
    def _exactly_one(self) -> Step:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"one stage per entry, one of {', '.join(PREPARE_STAGES)}")
        return self

    @property
    def stage(self) -> str:
        """The stage's name."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> Judging:
        """The stage's configuration."""
        config: Judging = getattr(self, self.stage)
        return config


Judged = Literal["answer", "conversation"]
EXAMPLE_STEPS: dict[str, Judged] = {
    "filter": "answer", "dedup": "conversation", "langid": "answer", "decontaminate": "conversation"}
"""The steps that examples may have, and what of an example each of them judges unless `judge` says otherwise."""


class ExampleStep(Section):
    """One entry of `sft.prepare` or `dpo.prepare`: one of the stages that prepare documents, with the same keys, and
    what it judges. `sources` are the names of sets: their files' without extensions.

    `clean`, `dedup_lines`, `dedup_substrings`, and what cuts texts in the others, are not there: a conversation is
    several messages, and a cut could not be put back into them.
    """

    filter: Filter | None = None
    dedup: Dedup | None = None
    langid: LanguageId | None = None
    decontaminate: Decontaminate | None = None
    judge: Judged | None = None
    """`answer`: what the assistant says, of a pair in the chosen answer; `conversation`: all messages, of a pair the
    prompt and the chosen answer. `dedup` compares the rejected answers of pairs too. If absent, `answer` for `filter`
    and `langid`, `conversation` for `dedup` and `decontaminate`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        named = take_bare_name(value)
        unable = [key for key in named if key in PREPARE_STAGES and key not in EXAMPLE_STEPS] if isinstance(
            named, dict) else []
        if unable:
            raise ValueError(f"{unable[0]} is for documents only; examples have {', '.join(EXAMPLE_STEPS)}")
        return named

    @model_validator(mode="after")
    def _one_that_only_judges(self) -> Self:
        if len([name for name in EXAMPLE_STEPS if name in self.model_fields_set]) != 1:
            raise ValueError(f"one step per entry, one of {', '.join(EXAMPLE_STEPS)}, beside `judge`")
        if self.decontaminate is not None and self.decontaminate.action != "drop":
            raise ValueError("decontaminate.action cannot be excise: examples are kept whole or dropped; say drop")
        if self.langid is not None and self.langid.cut_other_lines:
            raise ValueError("langid.cut_other_lines cannot be: examples are kept whole or dropped; remove it")
        return self

    @property
    def stage(self) -> str:
        """The name of the stage that judges."""
        return next(name for name in EXAMPLE_STEPS if name in self.model_fields_set)

    @property
    def config(self) -> Judging:
        """Its configuration."""
        config: Judging = getattr(self, self.stage)
        return config

    @property
    def judged(self) -> Judged:
        """What of an example it judges."""
        return self.judge or EXAMPLE_STEPS[self.stage]


class Prepared(Section):
    """What is dropped of the examples before they are made into rows."""

    prepare: tuple[ExampleStep, ...] = ()
    """Steps in their order, such as `[{filter: {rules: [bad_words]}, judge: answer}, dedup, {decontaminate: {against:
    evaluation.jsonl}}]`; each one once. Nothing is dropped without any."""

    @model_validator(mode="after")
    def _each_step_once(self) -> Self:
        names = [step.stage for step in self.prepare]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"prepare has {twice[0]} twice; each step runs once")
        return self
