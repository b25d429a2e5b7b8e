"""Shell completion of stages, runs of the store, manifests, and keys of the manifest
for --set.

Each function gets the text before the cursor, and imports only what it needs, because
the shell waits for it. `gristmill --install-completion` sets up a shell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from typer import Context

MOST_RUNS = 50
"""Number of newest runs that are offered."""
Offer = tuple[str, str]
"""A completion and its description, which zsh and fish show."""
KeyInfo = tuple[str, tuple[str, ...]]
"""First sentence of a key's description, and its possible values if they are finitely
many.
"""


def complete_manifest(incomplete: str) -> list[str]:
    """Complete YAML files and folders, and after the first character also named
    manifests.
    """
    from gristmill.mixtures.recipes.named_recipes import DEMO, PREFIX, recipe_names

    named_manifests = []
    if incomplete:
        names = [DEMO, *(PREFIX + recipe for recipe in recipe_names())]
        named_manifests = [name for name in names if name.startswith(incomplete)]
    folder, _, prefix = incomplete.rpartition("/")
    folder_path = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    try:
        entries = sorted(os.scandir(folder_path), key=lambda entry: entry.name)
    except OSError:
        return named_manifests
    folder_prefix = incomplete[: len(incomplete) - len(prefix)]
    completions = []
    for entry in entries:
        if not entry.name.startswith(prefix) or (
            entry.name.startswith(".") and not prefix
        ):
            continue
        if entry.is_dir():
            completions.append(f"{folder_prefix}{entry.name}/")
        elif entry.name.endswith((".yaml", ".yml")):
            completions.append(folder_prefix + entry.name)
    return completions + named_manifests


def complete_recipe(incomplete: str) -> list[Offer]:
    """Complete recipes, with their descriptions."""
    from gristmill.mixtures.recipes.named_recipes import describe_recipe, recipe_names

    return [
        (name, describe_recipe(name))
        for name in recipe_names()
        if name.startswith(incomplete)
    ]


def complete_stage(incomplete: str) -> list[str]:
    """Complete stages, in the order in which they run."""
    from gristmill.flows.stages.registry import STAGES

    return [name for name in STAGES if name.startswith(incomplete)]


def complete_run(ctx: Context, incomplete: str) -> list[Offer]:
    """Complete runs of the store, newest first, with their state and manifest."""
    import json

    from gristmill.core.store import StoreLocationError, store_at

    try:
        folder = store_at(ctx.params.get("store")).runs
        names = sorted(
            (
                path.name
                for path in folder.iterdir()
                if path.name.startswith(incomplete)
            ),
            reverse=True,
        )
    except (OSError, StoreLocationError):
        names = []
    offers = [("last", "the newest run")] if "last".startswith(incomplete) else []
    for name in names[:MOST_RUNS]:
        try:
            record = json.loads((folder / name / "run.json").read_text())
        except (OSError, ValueError):  # the run has just started, or has no record
            continue
        offers.append(
            (name, f"{record['state']}, {Path(record['manifest_file']).name}")
        )
    return offers


def complete_setting(ctx: Context, incomplete: str) -> list[Offer]:
    """Complete keys of the manifest for `--set`; after an equals sign the values of a
    key with finitely many.
    """
    key, equals, prefix = incomplete.partition("=")
    offers = {**manifest_keys(), **source_keys(ctx.params.get("manifest"))}
    if equals:
        _, values = offers.get(key, ("", ()))
        return [(f"{key}={value}", "") for value in values if value.startswith(prefix)]
    return [
        (name, description)
        for name, (description, _) in offers.items()
        if name.startswith(incomplete)
    ]


@cache
def manifest_keys() -> dict[str, KeyInfo]:
    """Return every manifest key except those of a source."""
    from gristmill.flows.stages.registry import STAGES
    from gristmill.mixtures.load import short_key
    from gristmill.mixtures.manifest import Manifest

    keys: dict[str, KeyInfo] = {}
    for name, stage in STAGES.items():
        if stage.step is None:
            continue
        for key, key_info in _keys(stage.step.section, f"{name}."):
            keys[short_key(key)] = key_info  # keys of the rules have a short form
    for key, key_info in _keys(Manifest, ""):
        if not key.startswith(("prepare", "sources")):
            keys[key] = key_info
    return keys


def source_keys(manifest: str | None) -> dict[str, KeyInfo]:
    """Return the keys of the manifest's sources, or nothing if the manifest cannot be
    read.
    """
    import yaml

    from gristmill.mixtures.recipes.named_recipes import manifest_file
    from gristmill.mixtures.sections.sources import Source
    from gristmill.mixtures.yaml_text import parse_yaml

    try:
        raw = parse_yaml(manifest_file(manifest or "").read_text())
        names = [str(name) for name in raw["sources"]]
    except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError):
        return {}
    keys: dict[str, KeyInfo] = {}
    for name in names:
        keys.update(_keys(Source, f"sources.{name}."))
    return keys


def _keys(
    model: Any, prefix: str, ancestors: tuple[Any, ...] = ()
) -> Iterator[tuple[str, KeyInfo]]:
    """Yield the keys of a section and its subsections; a section that contains itself
    is not entered twice.
    """
    from gristmill.flows.authoring.manifest_reference import alternatives
    from gristmill.mixtures.base import docstrings

    for name, field in model.model_fields.items():
        parts = list(alternatives(field.annotation))
        submodel = next((part for part in parts if hasattr(part, "model_fields")), None)
        if submodel in (model, *ancestors):
            continue
        is_list = any(
            getattr(part, "__origin__", None) in (list, tuple, dict) for part in parts
        )
        if submodel is not None and not is_list:
            yield from _keys(submodel, f"{prefix}{name}.", (*ancestors, model))
            continue
        values: list[str] = []
        for part in parts:
            if part is bool:
                values += ["true", "false"]
            elif type(part).__name__ == "_LiteralGenericAlias":
                values += [str(value) for value in get_args(part)]
        text = " ".join(docstrings(model).get(name, "").split())
        yield f"{prefix}{name}", (text.partition(". ")[0], tuple(values))
