"""What the shell completes: stages, runs of the store, manifests, and keys of the manifest for --set.

Each function is given what stands before the cursor, and imports only what it needs: a shell waits for the answer.
`gristmill --install-completion` sets a shell up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer

MOST_RUNS = 50
"""The newest so many are offered."""
Offer = tuple[str, str]
"""What may stand there, and a few words on it, which zsh and fish show."""


def complete_manifest(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to them; behind the first letter also the manifests that have names."""
    from gristmill.mixtures.recipes.named_recipes import DEMO, PREFIX, recipe_names

    named = [name for name in (DEMO, *(PREFIX + recipe for recipe in recipe_names())) if name.startswith(incomplete)]
    folder, _, begun = incomplete.rpartition("/")
    place = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return named if incomplete else []
    at = incomplete[: len(incomplete) - len(begun)]
    found = []
    for entry in entries:
        if not entry.name.startswith(begun) or (entry.name.startswith(".") and not begun):
            continue
        if entry.is_dir():
            found.append(f"{at}{entry.name}/")
        elif entry.name.endswith((".yaml", ".yml")):
            found.append(at + entry.name)
    return found + (named if incomplete else [])


def complete_recipe(incomplete: str) -> list[Offer]:
    """Recipes, with what each is for."""
    from gristmill.mixtures.recipes.named_recipes import describe_recipe, recipe_names

    return [(name, describe_recipe(name)) for name in recipe_names() if name.startswith(incomplete)]


def complete_stage(incomplete: str) -> list[str]:
    """Stages, in the order in which they run."""
    from gristmill.flows.stages.registry import STAGES

    return [name for name in STAGES if name.startswith(incomplete)]


def complete_run(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Runs of the store, the newest first, with how they ended."""
    import json

    from gristmill.core.store import StoreLocationError, store_at

    try:
        folder = store_at(ctx.params.get("store")).runs
        names = sorted((path.name for path in folder.iterdir() if path.name.startswith(incomplete)), reverse=True)
    except (OSError, StoreLocationError):
        names = []
    found = [("last", "the newest run")] if "last".startswith(incomplete) else []
    for name in names[:MOST_RUNS]:
        try:
            record = json.loads((folder / name / "run.json").read_text())
        except (OSError, ValueError):  # it is being written, or never was
            continue
        found.append((name, f"{record['state']}, {Path(record['manifest_file']).name}"))
    return found


def complete_setting(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Keys of the manifest, as `--set` takes them; behind an equals sign the values, where they can be counted."""
    key, equals, begun = incomplete.partition("=")
    offers = {**manifest_keys(), **source_keys(ctx.params.get("manifest"))}
    if equals:
        return [(f"{key}={value}", "") for value in offers.get(key, ("", ()))[1] if value.startswith(begun)]
    return [(name, words) for name, (words, _) in offers.items() if name.startswith(incomplete)]


@cache
def manifest_keys() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every key of a manifest, but those below the name of a source: its first sentence, and its possible values."""
    from gristmill.flows.stages.registry import STAGES
    from gristmill.mixtures.load import short_key
    from gristmill.mixtures.manifest import Manifest

    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, stage in STAGES.items():
        if stage.section is not None:
            # The rules have a short form of their own.
            found.update((short_key(key), told) for key, told in _keys(stage.section, f"{name}."))
    found.update({name: told for name, told in _keys(Manifest, "") if not name.startswith(("prepare", "sources"))})
    return found


def source_keys(manifest: str | None) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The keys of the sources that a manifest has; none while it is not written yet, or cannot be read."""
    import yaml

    from gristmill.mixtures.recipes.named_recipes import manifest_file
    from gristmill.mixtures.sources import Source
    from gristmill.mixtures.yaml_text import parse_yaml

    try:
        raw = parse_yaml(manifest_file(manifest or "").read_text())
        names = [str(name) for name in raw["sources"]]
    except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError):
        return {}
    return {f"sources.{name}.{key}": told for name in names for key, told in _keys(Source, "")}


def _keys(model: Any, at: str, around: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """The keys of a section and of those in it; one that holds itself, as what a mixture continues, is not entered."""
    from gristmill.flows.authoring.manifest_reference import alternatives
    from gristmill.mixtures.base import docstrings

    for name, field in model.model_fields.items():
        inner = next((part for part in alternatives(field.annotation) if hasattr(part, "model_fields")), None)
        if inner in (model, *around):
            continue
        if inner is not None and not _is_list(field.annotation):
            yield from _keys(inner, f"{at}{name}.", (*around, model))
            continue
        values = tuple(str(value) for part in alternatives(field.annotation) for value in _values(part))
        yield f"{at}{name}", (_first_sentence(docstrings(model).get(name, "")), values)


def _is_list(annotation: Any) -> bool:
    from gristmill.flows.authoring.manifest_reference import alternatives

    return any(getattr(part, "__origin__", None) in (list, tuple, dict) for part in alternatives(annotation))


def _values(part: Any) -> tuple[Any, ...]:
    if part is bool:
        return ("true", "false")
    return get_args(part) if type(part).__name__ == "_LiteralGenericAlias" else ()


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0]
