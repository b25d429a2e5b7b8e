"""The recipes of reading and of preparing documents."""

from __future__ import annotations

from collections.abc import Callable

from gristmill.flows.recipes.sections import Recipe, dump, step_recipe
from gristmill.mixtures.manifest import Manifest

MIXTURE_KEYS = ("weight", "max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that only the mixture reads; all others belong to its reading."""
NOTE_KEYS = ("licence",)
"""Keys of a source that change nothing."""


def ingest(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe]:
    """The sources, as they are read, and their files."""
    from gristmill.dataprep.reading.sources import listing

    dumped = {name: dump(source, *MIXTURE_KEYS, *NOTE_KEYS) for name, source in manifest.sources.items()}
    read = {name: {key: value for key, value in source.items() if key != "path"} for name, source in dumped.items()}
    listings = {name: listing(name, source, verify=verify) for name, source in dumped.items()}
    recipe = {
        "ingest": dump(manifest.ingest),
        "sources": {name: {**read[name], "listing": listings[name]} for name in dumped},
    }
    # The stage compares the listing with what it finds: files that changed meanwhile are an error.
    return recipe, {"sources": {name: {**source, "listing": listings[name]} for name, source in dumped.items()}}


def prepare(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    """The step of `prepare` of this name."""

    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        for step in manifest.prepare:
            if step.stage == name:
                return step_recipe(step.config, manifest, verify)
        return None

    return configure
