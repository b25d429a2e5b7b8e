"""The manifest: the schema against which every run is validated before any work.

One YAML file names the sources, how they are prepared and mixed, and what is trained on
them. Each section below configures one stage: nothing else of the manifest reaches that
stage, so that changing a key changes that stage and those after it, and nothing more.
An absent section disables its stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from gristmill.mixtures.base import Location, Name, Part, Section, inside
from gristmill.mixtures.scaling.merging import Merge
from gristmill.mixtures.scaling.size_rules import take_dial
from gristmill.mixtures.schema.engine import Engine
from gristmill.mixtures.schema.evaluation import Documents, Evaluate, Export
from gristmill.mixtures.schema.generated_source import AnySource, GeneratedSource
from gristmill.mixtures.schema.guard import Guard
from gristmill.mixtures.schema.mix import ROW_LENGTH, Mix, TextIndex
from gristmill.mixtures.schema.model import GivenModel
from gristmill.mixtures.schema.posttraining import Dpo, Sft
from gristmill.mixtures.schema.prepare import STEP_SECTIONS, Step, name_steps
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.rl import Reward, Rl
from gristmill.mixtures.schema.sources import INGEST, Ingest, Source, TokenSource
from gristmill.mixtures.schema.tokenizer import Tokenizer
from gristmill.mixtures.spdx import join
from gristmill.mixtures.steps.examples import MadeExamples

EMPTY_ALLOWED = ("documents", "tokenizer", "text_index", "evaluate", "export")
"""Sections that may be empty, which enables their defaults."""


class Manifest(Section):
    """A complete run."""

    name: Name
    """Name of the run and its folders."""
    seed: int = 0
    """Seed from which every random choice is hashed, together with stable ids."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)] = {}  # noqa: RUF012 - pydantic copies it
    """Documents, including those that a language model writes, and tokens that another
    tool has written. Not needed if a run starts from a model.
    """
    ingest: Ingest = Ingest()
    prepare: tuple[SerializeAsAny[Step], ...] = ()
    """Steps that judge and edit documents, in the order in which they run; a stage may
    occur more than once.
    """
    guard: Guard = Guard()
    """Largest loss of a source, domain or language that a step may cause without a
    warning.
    """
    documents: Documents | None = None
    tokenizer: Tokenizer | None = None
    model: GivenModel | None = None
    mix: Mix | None = None
    text_index: TextIndex | None = None
    examples: dict[Name, MadeExamples] = {}  # noqa: RUF012 - as `sources`
    """Examples for tuning that language models write, one set per name: `path:
    examples://NAME` reads it.
    """
    pretrain: Pretrain | None = None
    merge: Merge | None = None
    sft: Sft | None = None
    reward: Reward | None = None
    dpo: Dpo | None = None
    rl: Rl | None = None
    evaluate: Evaluate | None = None
    export: Export | None = None
    engine: Engine = Engine()

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        """Enable the defaults of `evaluate:` and other empty sections, and add the
        settings derived from a size or depth of `pretrain`.
        """
        if not isinstance(value, dict):
            return value
        sections = {
            key: ({} if section is None and key in EMPTY_ALLOWED else section)
            for key, section in value.items()
        }
        if "pretrain" in sections:
            length = inside(sections, "mix").get("sequence_length") or ROW_LENGTH
            sections["pretrain"] = take_dial(sections["pretrain"], length)
        return sections

    def _problems(self) -> Iterator[str]:
        if self.merge is not None and self.pretrain is not None:
            last = self.pretrain.steps
            for step in self.merge.steps:
                if step > last:
                    yield f"merge: steps: {step} is after the last step, {last}"

    @property
    def steps(self) -> dict[str, Step]:
        """Steps of `prepare` by their names, in order."""
        return dict(
            zip(
                name_steps([(step.stage, step.name) for step in self.prepare]),
                self.prepare,
                strict=True,
            )
        )

    @property
    def guards(self) -> dict[str, Guard]:
        """Guards of `ingest` and of each step of `prepare`."""
        steps = {name: step.guard or self.guard for name, step in self.steps.items()}
        return {INGEST: self.guard, **steps}

    def _sources_of(self, kind: type[Part]) -> dict[str, Part]:
        return {
            name: source
            for name, source in self.sources.items()
            if isinstance(source, kind)
        }

    @property
    def document_sources(self) -> dict[str, Source]:
        """Sources that are read as documents, in the manifest's order."""
        return self._sources_of(Source)

    @property
    def generated_sources(self) -> dict[str, GeneratedSource]:
        """Sources whose documents a language model writes, in the manifest's order."""
        return self._sources_of(GeneratedSource)

    @property
    def text_sources(self) -> dict[str, Source | GeneratedSource]:
        """All sources of documents, read or generated, in the manifest's order."""
        return {
            name: source
            for name, source in self.sources.items()
            if not isinstance(source, TokenSource)
        }

    @property
    def licences(self) -> dict[str, str]:
        """Licence of each source of documents that states one; of a generated one
        without its own, the licences of the sources from which it is made.
        """
        licences = {name: self._licences_of(name, ()) for name in self.text_sources}
        return {name: join(stated) for name, stated in licences.items() if stated}

    def _licences_of(self, name: str, above: tuple[str, ...]) -> set[str]:
        source = self.text_sources.get(name)
        if source is None or name in above:
            return set()
        if source.licence is not None or isinstance(source, Source):
            return {source.licence} if source.licence else set()
        parents = source.generate.parents
        return set().union(
            *(self._licences_of(each, (*above, name)) for each in parents)
        )

    @property
    def token_sources(self) -> dict[str, TokenSource]:
        """Sources whose tokens another tool has written, in the manifest's order."""
        return self._sources_of(TokenSource)


MODELS = ("model", "pretrain", "merge", "sft", "dpo", "rl")
"""Sections and stages that give a model that writes text, in training order; a run
begins with one of the first two.
"""
TUNINGS = ("sft", "reward", "dpo", "rl")
"""Sections that train a model further on examples, with their own row length."""
CONTINUING = ("pretrain", "merge")
"""Members of `MODELS` that continue a text, and were never taught to answer."""


def beyond_context(stage: str, length: int, trained: int) -> str:
    """Return a warning about a tuning whose rows are longer than all before."""
    return (
        f"{stage}: its rows have {length} tokens, but the model was trained on at most "
        f"{trained}: the rotary positions after those are new to it, and a short "
        "tuning may not teach them; check long answers, lower "
        f"{stage}.sequence_length, or stretch positions with "
        "pretrain.model.rope_scaling"
    )


def context_warnings(manifest: Manifest, trained: int) -> dict[str, str]:
    """Return stage -> warning, for each tuning whose rows are longer than those that
    its model was trained on.

    Args:
        manifest: the manifest of the run.
        trained: context of the model from which the run starts.
    """
    contexts = {"pretrain" if manifest.model is None else "model": trained}
    warnings: dict[str, str] = {}
    for stage in TUNINGS:
        section = getattr(manifest, stage)
        if section is None:
            continue
        start = next(name for name in reversed(MODELS) if name in contexts)
        if stage == "rl" and section.start_from in contexts:
            start = section.start_from
        length = section.sequence_length or 0
        if length > contexts[start]:
            warnings[stage] = beyond_context(stage, length, contexts[start])
        contexts[stage] = max(contexts[start], length)
    return warnings


def known_keys(location: Location) -> list[str]:
    """Return the keys that the schema has at a location."""
    models: list[Any] = [Manifest]
    for part in location:
        if isinstance(part, int) or not models:
            continue
        if models[0] is Step and part in STEP_SECTIONS:
            models = [STEP_SECTIONS[part]]
            continue
        field = models[0].model_fields.get(part)
        if field is not None:
            models = models_in(field.annotation)
        else:
            # A part that is not a key is the kind that pydantic names for one of
            # several models.
            kinds = [
                model
                for model in models
                if part == getattr(model, "TAG", None)
                or (
                    "kind" in model.model_fields
                    and part in get_args(model.model_fields["kind"].annotation)
                )
            ]
            models = kinds or models
    if not models:
        return []
    return sorted(
        [*models[0].model_fields, *(STEP_SECTIONS if models[0] is Step else ())]
    )


def all_keys(model: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of a section, and of the sections inside it; a recursive section
    is expanded once.
    """
    for name, field in model.model_fields.items():
        yield (name,)
        for inner in models_in(field.annotation):
            if inner not in (*above, model):
                yield from ((name, *key) for key in all_keys(inner, (*above, model)))


def dotted(location: Location) -> str:
    """Return a location as messages name it: `mix.phases[0].end`; empty for the whole
    manifest.
    """
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else str(part)
    return key


def models_in(annotation: Any) -> list[Any]:
    """Return the sections that a key's type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for inner in get_args(annotation) for model in models_in(inner)]
