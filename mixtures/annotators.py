"""Presets of the steps `annotate`, `judge` and `filter`: annotators.yaml, and files of
users in the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from gristmill.mixtures.base import Section
from gristmill.mixtures.yaml_text import read_yaml, unknown_name

SHIPPED = Path(__file__).with_name("annotators.yaml")
PRESET = "preset"


class Annotator(Section):
    """A preset, and what is published about it; absent facts are unknown.

    Attributes:
        weights: repository of the Hub.
        agreement: with people or other models, as in `source`.
        parameters, tokens: number of weights, and of tokens read of a document.
        documents_per_second: by GPU.
        give: keys of `model` that the manifest has to give -> their source.
        labels: column -> its values.
        step: the step that it is a preset of.
        settings: of the step.
    """

    about: str
    weights: str | None = None
    licence: str | None = None
    languages: str | int | None = None
    agreement: str | None = None
    source: str | None = None
    parameters: int | None = None
    tokens: int | None = None
    documents_per_second: dict[str, float] = Field(default_factory=dict)
    give: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    step: str
    settings: dict[str, object]

    @property
    def answers(self) -> bool:
        """True for a language model that is asked."""
        return "prompt" in self.settings

    @property
    def cost(self) -> str:
        """Cost of a million documents, as far as it is known."""
        hours = [
            f"{1e6 / 3600 / rate:,.0f} {gpu}-hours"
            for gpu, rate in self.documents_per_second.items()
        ]
        if not hours and self.parameters and self.tokens:
            operations = 2 * self.parameters * self.tokens * 1e6
            return f"at most {operations / 1e18:,.2g} EFLOP"
        return " or ".join(hours)


@cache
def read_annotators(file: Path = SHIPPED) -> dict[str, Annotator]:
    """Read a file of presets.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        return TypeAdapter(dict[str, Annotator]).validate_python(read_yaml(file))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {place}: {first['msg']}") from error


def expand_presets(
    raw: Any, folder: Path, at: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Replace every `preset` in a manifest's content, in place, by its settings, and
    yield problems by location.

    Args:
        raw: content, or a part of it.
        folder: base of relative paths.
        at: location of the part.
    """
    items = raw.items() if isinstance(raw, dict) else enumerate(raw)
    for key, value in list(items):
        if not isinstance(value, dict | list):
            continue
        here = (*at, key)
        if isinstance(value, dict) and PRESET in value:
            try:
                raw[key] = with_preset(str(key), value, folder)
            except ValueError as error:
                yield (*here, PRESET), str(error)
                continue
        yield from expand_presets(raw[key], folder, here)


def with_preset(step: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings of a step with those of its preset, which they take precedence over.

    Raises:
        ValueError: there is no such preset, or it lacks a key.
    """
    file, _, name = str(settings[PRESET]).rpartition("#")
    presets = read_annotators(folder / file if file else SHIPPED)
    known = [key for key, annotator in presets.items() if annotator.step == step]
    if name not in known:
        raise ValueError(
            f"there is no annotator {unknown_name(name, known, 'presets are')}"
        )
    annotator = presets[name]
    own = {key: value for key, value in settings.items() if key != PRESET}
    if isinstance(own.get("model"), str):
        own["model"] = {"path": own["model"]}
    merged = merge(annotator.settings, own)
    model = merged.get("model") or {}
    if not model.keys() & {"path", "folder", "endpoint"}:
        raise ValueError(
            f"{name} needs a `model`: hf://{annotator.weights}@COMMIT, or a folder of it"
            f"{', or an endpoint that serves it' if annotator.answers else ''}"
        )
    for key, origin in annotator.give.items():
        if key not in model:
            raise ValueError(f"{name} needs model.{key}: {origin}")
    return merged


def merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with defaults, which nested mappings complete."""
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = merge(defaults[key], own[key])
    return merged
