"""The lists `prepare`: stages that judge and edit documents, or tuning examples, in
order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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

from gristmill.mixtures.base import Judging, Section, repeated
from gristmill.mixtures.schema.guard import Guard
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge_pairs import JudgePairs
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.own_steps import Annotate

NAME = "name"
BESIDE = (NAME, "guard")
"""Keys of an entry of `prepare` beside its stage."""
STEP_NAME_PATTERN = r"^[a-z][a-z0-9_-]*$"
STEP_SECTIONS: dict[str, type[Judging]] = {}
"""Stage -> model of its settings, for every stage that may stand in `prepare`; see
`register_step`.
"""
_ENTRIES: dict[str, type[Step]] = {}
"""Stage -> model of an entry of `prepare` that holds it."""


class Step(Section):
    """An entry of `prepare:`: one stage with its settings, such as `dedup: {exact:
    true}`, or only its name.
    """

    name: Annotated[str, Field(pattern=STEP_NAME_PATTERN)] | None = None
    """Name of the step, beside the stage: `{filter: {...}, name: strict}`. If absent,
    the name of its stage, and `filter-2`, `filter-3` from the second one on.
    """
    guard: Guard | None = None
    """Largest loss that this step may cause, beside the stage: `{dedup: {...}, guard:
    {max_loss: 0.99}}`. The manifest's `guard` if absent.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_stage(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        if cls is not Step or isinstance(value, Step):
            return handler(value)
        entry = take_bare_name(value)
        stages = (
            [key for key in entry if key in _ENTRIES]
            if isinstance(entry, Mapping)
            else []
        )
        if (
            not isinstance(entry, Mapping)
            or len(stages) > 1
            or not entry.keys() - {*BESIDE}
        ):
            raise ValueError(f"write one stage per entry, one of {', '.join(_ENTRIES)}")
        unknown = [key for key in entry if key not in (*_ENTRIES, *BESIDE)]
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type="extra_forbidden", loc=(key,), input=entry[key]
                    )
                    for key in unknown
                ],
            )
        return _ENTRIES[stages[0]].model_validate(entry)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if cls is not Step:
            return super().__get_pydantic_json_schema__(schema, handler)
        entries = [
            entry.described(handler(entry.__pydantic_core_schema__), handler)
            for entry in _ENTRIES.values()
        ]
        return {"anyOf": [{"enum": list(_ENTRIES), "type": "string"}, *entries]}

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return next(name for name in type(self).model_fields if name not in BESIDE)

    @property
    def config(self) -> Judging:
        """Settings of the stage."""
        config: Judging = getattr(self, self.stage)
        return config


def register_step(stage: str, section: type[Judging]) -> None:
    """Allow a stage in `prepare`, with this model of its settings."""
    STEP_SECTIONS[stage] = section
    _ENTRIES[stage] = create_model(
        f"{section.__name__}Step",
        __base__=Step,
        __doc__=section.__doc__,
        **{stage: (section, Field())},
    )  # type: ignore[call-overload]


def step_fields() -> dict[str, FieldInfo]:
    """Return the keys of an entry of `prepare`: the stages, and those beside them."""
    sections = {
        stage: FieldInfo(annotation=section, default=None)
        for stage, section in STEP_SECTIONS.items()
    }
    return {**sections, **Step.model_fields}


def take_bare_name(value: Any) -> Any:
    """Expand an entry that is only a name, or has an empty value, to one with the
    defaults.
    """
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict):
        return {
            key: ({} if settings is None and key in STEP_SECTIONS else settings)
            for key, settings in value.items()
        }
    return value


def written_steps(steps: Any) -> list[tuple[str, str | None]]:
    """Return stage and given name of each entry of a list of steps as written; an
    invalid entry has no stage.
    """
    pairs: list[tuple[str, str | None]] = []
    for step in steps if isinstance(steps, list) else []:
        entry = take_bare_name(step)
        if not isinstance(entry, dict):
            pairs.append(("", None))
            continue
        name = entry.get(NAME)
        stage = next((key for key in entry if key in STEP_SECTIONS), "")
        pairs.append((stage, name if isinstance(name, str) else None))
    return pairs


def name_steps(steps: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the names of the steps of `prepare`: the given ones, or the stage's, with
    a number from the second one on.

    Args:
        steps: stage, and name if given.
    """
    names: list[str] = []
    for stage, given_name in steps:
        number = 1
        name = given_name or stage
        while given_name is None and name in names:
            number += 1
            name = f"{stage}-{number}"
        names.append(name)
    return names


def wrong_step_names(
    steps: Sequence[tuple[str, str | None]], taken: Sequence[str]
) -> dict[int, str]:
    """Return the problem with each wrong name of a step, by place; columns are named
    after steps (`column_prefix`).

    Args:
        steps: stage, and name if given.
        taken: names with another meaning: other stages, and sections of the manifest.
    """
    problems: dict[int, str] = {}
    place_of_prefix: dict[str, int] = {}
    for place, ((stage, _), name) in enumerate(
        zip(steps, name_steps(steps), strict=True)
    ):
        if not re.match(STEP_NAME_PATTERN, name):
            continue  # The model reports it.
        if name != stage and name in taken:
            problems[place] = (
                f"{name!r} has another meaning in a manifest; choose another name"
            )
        elif column_prefix(name) in place_of_prefix:
            problems[place] = (
                f"{name!r} is already the name of entry "
                f"{place_of_prefix[column_prefix(name)]} of `prepare`; "
                "choose another name"
            )
        place_of_prefix.setdefault(column_prefix(name), place)
    return problems


def column_prefix(step: str) -> str:
    """Return the prefix of column names that several steps measure: `filter-2` is
    `filter_2` in an expression.
    """
    return step.replace("-", "_")


Judged = Literal["answer", "conversation"]


EXAMPLE_STEPS: dict[str, Judged] = {
    "filter": "answer",
    "dedup": "conversation",
    "langid": "answer",
    "decontaminate": "conversation",
    "annotate": "answer",
    "judge_pairs": "conversation",
}
"""Step for examples -> the part of an example that it judges unless `judge` is set."""


class ExampleStep(Section):
    """An entry of `sft.prepare` or `dpo.prepare`: one of the stages that prepare
    documents, with the same keys, and the part of an example that it judges. `sources`
    are the names of sets: those of their files without extensions.

    `clean`, `dedup_lines`, `dedup_substrings`, and settings of the others that cut
    texts, are not supported: a conversation consists of several messages, and a cut
    could not be mapped back to them.
    """

    filter: Filter | None = None
    dedup: Dedup | None = None
    langid: LanguageId | None = None
    decontaminate: Decontaminate | None = None
    annotate: Annotate | None = None
    judge_pairs: JudgePairs | None = None
    judge: Judged | None = None
    """`answer`: the assistant's messages, in a pair those of the chosen answer;
    `conversation`: all messages, in a pair the prompt and the chosen answer. `dedup`
    also compares the rejected answers of pairs. If absent, `answer` for `filter`,
    `langid` and `annotate`, `conversation` for `dedup` and `decontaminate`.
    """

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        entry = take_bare_name(value)
        stages = entry if isinstance(entry, dict) else {}
        unsupported = [
            key
            for key in stages
            if key in STEP_SECTIONS and key not in cls.model_fields
        ]
        if unsupported:
            raise ValueError(
                f"{unsupported[0]} is for documents only; examples have "
                f"{', '.join(EXAMPLE_STEPS)}"
            )
        return entry

    def _problems(self) -> Iterator[str]:
        if len(EXAMPLE_STEPS.keys() & self.model_fields_set) != 1:
            yield (
                "write one step per entry, one of "
                f"{', '.join(EXAMPLE_STEPS)}, beside `judge`"
            )
        if self.decontaminate is not None and self.decontaminate.action != "drop":
            yield (
                "decontaminate.action cannot be excise: examples are "
                "kept whole or dropped; set drop"
            )

    @property
    def stage(self) -> str:
        """Name of the stage that judges, or compares."""
        return next(name for name in EXAMPLE_STEPS if name in self.model_fields_set)

    @property
    def config(self) -> Judging:
        """Settings of the stage."""
        config: Judging = getattr(self, self.stage)
        return config

    @property
    def judged(self) -> Judged:
        """The part of an example that the step judges."""
        return self.judge or EXAMPLE_STEPS[self.stage]


class Prepared(Section):
    """Selection of examples before they become rows."""

    prepare: tuple[ExampleStep, ...] = ()
    """Steps in order, such as `[{filter: {rules: [bad_words]}, judge: answer}, dedup,
    {decontaminate: {against: evaluation.jsonl}}]`; each at most once. If absent, no
    example is dropped.
    """

    def _problems(self) -> Iterator[str]:
        if twice := repeated([step.stage for step in self.prepare]):
            yield f"prepare has {twice} twice; each step runs once"
