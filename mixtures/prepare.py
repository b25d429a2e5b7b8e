"""The lists `prepare`: the stages that judge and edit documents, or examples of tuning, in their order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails

from gristmill.mixtures.base import Judging, Section
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge_pairs import JudgePairs
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.own_steps import Annotate

NAME = "name"
STEP_NAME_PATTERN = r"^[a-z][a-z0-9_-]*$"
STEP_SECTIONS: dict[str, type[Judging]] = {}
"""Name of a stage -> the model of its settings, of all that may stand in `prepare`; see `register_step`."""
_ENTRIES: dict[str, type[Step]] = {}
"""Name of a stage -> the model of an entry of `prepare` that holds it."""


class Step(Section):
    """One entry of `prepare:`: one stage with its settings, such as `dedup: {exact: true}`, or its name alone."""

    name: Annotated[str, Field(pattern=STEP_NAME_PATTERN)] | None = None
    """Names the step, beside the stage: `{filter: {...}, name: strict}`. If absent it is called like its stage, and
    from the second one on `filter-2`, `filter-3`."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_stage(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        if cls is not Step or isinstance(value, Step):
            return handler(value)
        entry = take_bare_name(value)
        stages = [key for key in entry if key in _ENTRIES] if isinstance(entry, Mapping) else []
        if not isinstance(entry, Mapping) or len(stages) > 1 or not entry.keys() - {NAME}:
            raise ValueError(f"one stage per entry, one of {', '.join(_ENTRIES)}")
        unknown = [key for key in entry if key not in (*_ENTRIES, NAME)]
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [InitErrorDetails(type="extra_forbidden", loc=(key,), input=entry[key]) for key in unknown],
            )
        return _ENTRIES[stages[0]].model_validate(entry)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if cls is not Step:
            return super().__get_pydantic_json_schema__(schema, handler)
        entries = [entry.described(handler(entry.__pydantic_core_schema__), handler) for entry in _ENTRIES.values()]
        return {"anyOf": [{"enum": list(_ENTRIES), "type": "string"}, *entries]}

    @property
    def stage(self) -> str:
        """The stage's name."""
        return next(name for name in type(self).model_fields if name != NAME)

    @property
    def config(self) -> Judging:
        """The stage's settings."""
        config: Judging = getattr(self, self.stage)
        return config


def register_step(stage: str, section: type[Judging]) -> None:
    """Let a stage stand in `prepare`, with settings of this model. What is registered later takes its place."""
    STEP_SECTIONS[stage] = section
    _ENTRIES[stage] = create_model(
        f"{section.__name__}Step", __base__=Step, __doc__=section.__doc__, **{stage: (section, Field())}
    )  # type: ignore[call-overload]


def step_fields() -> dict[str, FieldInfo]:
    """What an entry of `prepare` may have: one of the stages, and a name."""
    sections = {stage: FieldInfo(annotation=section, default=None) for stage, section in STEP_SECTIONS.items()}
    return {**sections, **Step.model_fields}


def unregister_step(stage: str) -> None:
    """Take a stage out of `prepare` again."""
    del STEP_SECTIONS[stage], _ENTRIES[stage]


def take_bare_name(value: Any) -> Any:
    """An entry that is only a name, or has nothing behind it, as one with the defaults."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict):
        return {key: ({} if item is None and key in STEP_SECTIONS else item) for key, item in value.items()}
    return value


def written_steps(steps: Any) -> list[tuple[str, str | None]]:
    """Stage and given name of each entry of a list of steps as it was written; an entry that is none has no stage."""
    entries = [take_bare_name(step) for step in (steps if isinstance(steps, list) else [])]
    return [
        (
            next((key for key in entry if key in STEP_SECTIONS), ""),
            given if isinstance(given := entry.get(NAME), str) else None,
        )
        if isinstance(entry, dict)
        else ("", None)
        for entry in entries
    ]


def name_steps(steps: Sequence[tuple[str, str | None]]) -> list[str]:
    """The names of the steps of `prepare`: those given, or the stage's, with a number from the second one on.

    Args:
        steps: stage, and name where one is given.
    """
    names: list[str] = []
    for stage, given in steps:
        number = 1
        name = given or stage
        while given is None and name in names:
            number += 1
            name = f"{stage}-{number}"
        names.append(name)
    return names


def wrong_step_names(steps: Sequence[tuple[str, str | None]], taken: Sequence[str]) -> dict[int, str]:
    """What is wrong with the names of steps, by their place; their columns are called after them (`column_prefix`).

    Args:
        steps: stage, and name where one is given.
        taken: names that mean something else: other stages, and sections of the manifest.
    """
    found: dict[int, str] = {}
    seen: dict[str, int] = {}
    for place, ((stage, _), name) in enumerate(zip(steps, name_steps(steps), strict=True)):
        if not re.match(STEP_NAME_PATTERN, name):
            continue  # The model says so.
        if name != stage and name in taken:
            found[place] = f"{name!r} means something else in a manifest; take another name"
        elif column_prefix(name) in seen:
            found[place] = (
                f"{name!r} is there already, as entry {seen[column_prefix(name)]} of `prepare`; take another name"
            )
        seen.setdefault(column_prefix(name), place)
    return found


def column_prefix(step: str) -> str:
    """What stands before a column's name where several steps measure it: `filter-2` is `filter_2` in an expression."""
    return step.replace("-", "_")


Judged = Literal["answer", "conversation"]


@dataclass(frozen=True)
class Judges:
    """What of an example a step judges unless `judge` says otherwise."""

    part: Judged


class ExampleStep(Section):
    """One entry of `sft.prepare` or `dpo.prepare`: one of the stages that prepare documents, with the same keys, and
    what it judges. `sources` are the names of sets: their files' without extensions.

    `clean`, `dedup_lines`, `dedup_substrings`, and what cuts texts in the others, are not there: a conversation is
    several messages, and a cut could not be put back into them.
    """

    filter: Annotated[Filter | None, Judges("answer")] = None
    dedup: Annotated[Dedup | None, Judges("conversation")] = None
    langid: Annotated[LanguageId | None, Judges("answer")] = None
    decontaminate: Annotated[Decontaminate | None, Judges("conversation")] = None
    annotate: Annotated[Annotate | None, Judges("answer")] = None
    judge_pairs: Annotated[JudgePairs | None, Judges("conversation")] = None
    judge: Judged | None = None
    """`answer`: what the assistant says, of a pair in the chosen answer; `conversation`: all messages, of a pair the
    prompt and the chosen answer. `dedup` compares the rejected answers of pairs too. If absent, `answer` for `filter`,
    `langid` and `annotate`, `conversation` for `dedup` and `decontaminate`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        named = take_bare_name(value)
        unable = (
            [key for key in named if key in STEP_SECTIONS and key not in cls.model_fields]
            if isinstance(named, dict)
            else []
        )
        if unable:
            raise ValueError(f"{unable[0]} is for documents only; examples have {', '.join(example_steps())}")
        return named

    @model_validator(mode="after")
    def _one_that_only_judges(self) -> Self:
        if len([name for name in example_steps() if name in self.model_fields_set]) != 1:
            raise ValueError(f"one step per entry, one of {', '.join(example_steps())}, beside `judge`")
        if self.decontaminate is not None and self.decontaminate.action != "drop":
            raise ValueError("decontaminate.action cannot be excise: examples are kept whole or dropped; say drop")
        if self.langid is not None and self.langid.cut_other_lines:
            raise ValueError("langid.cut_other_lines cannot be: examples are kept whole or dropped; remove it")
        return self

    @property
    def stage(self) -> str:
        """The name of the stage that judges, or compares."""
        return next(name for name in example_steps() if name in self.model_fields_set)

    @property
    def config(self) -> Judging:
        """Its configuration."""
        config: Judging = getattr(self, self.stage)
        return config

    @property
    def judged(self) -> Judged:
        """What of an example it judges."""
        return self.judge or example_steps()[self.stage]


def example_steps() -> dict[str, Judged]:
    """The steps that examples may have, and what of an example each of them judges unless `judge` says otherwise."""
    return {
        name: one.part
        for name, field in ExampleStep.model_fields.items()
        for one in field.metadata
        if isinstance(one, Judges)
    }


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
