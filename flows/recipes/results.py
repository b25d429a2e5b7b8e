"""The recipes of what is made of a trained model: its evaluation, and the folder that others load."""

from __future__ import annotations

from gristmill.flows.recipes.sections import Recipe, dump, name_outside_files, reads_of, seed_of
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.mix import uses_own_weights


def evaluate(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, and what turns preferences into rewards."""
    section = manifest.evaluate
    if section is None:
        return None
    beta = {} if manifest.dpo is None else {"beta": manifest.dpo.beta}
    reads = reads_of(manifest) if section.memorisation is not None or section.contamination is not None else {}
    recipe = {**dump(section), "seed": seed_of(section, manifest), **beta, **reads}
    return name_outside_files(recipe, section, verify), {"tasks": recipe["tasks"]}


def export(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, and what the model card says."""
    if manifest.export is None:
        return None
    return {**dump(manifest.export), "lineage": _lineage(manifest)}, {}


def _lineage(manifest: Manifest) -> Recipe:
    """What the model card says of the data: the sources with their licences, and the weights that counted."""
    mix = {} if manifest.mix is None else dump(manifest.mix)
    own = uses_own_weights(mix)
    sources = {name: {**({"weight": source.weight} if own else {}), "licence": source.licence}
               for name, source in manifest.sources.items()}
    asked = {key: mix[key] for key in ("weights", "stages") if mix.get(key)}
    return {"name": manifest.name, "sources": sources, **({"mix": asked} if asked else {})}
