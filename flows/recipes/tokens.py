"""The recipes of the tokenizer, of tokens and of their mixture."""

from __future__ import annotations

from gristmill.dataprep.files import as_path, sha256_file
from gristmill.flows.recipes.documents import MIXTURE_KEYS
from gristmill.flows.recipes.sections import Recipe, dump, dump_only, name_outside_files, seed_of
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.mix import uses_own_weights


def tokenizer(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """How it is learnt, or the checksum of the one that is given."""
    section = manifest.tokenizer
    if section is None:
        return None
    if section.path is not None:
        chat = dump_only(section, verify, "special_tokens", "chat_template", "chat_template_path")
        return ({"external": {"sha256": sha256_file(as_path(section.path))}, **chat},
                {"tokenizer": dump(section), "sources": list(manifest.sources), "seed": 0})
    dumped = dump(section, "seed", "path")
    return {"tokenizer": name_outside_files(dumped, section, verify), "sources": list(manifest.sources),
            "seed": seed_of(section, manifest)}, {"tokenizer": dumped}


def tokenize(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """Nothing but the inputs: documents, and a tokenizer."""
    return None if manifest.tokenizer is None else ({}, {})


def mix(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, with what of each source counts in a mixture."""
    if manifest.mix is None:
        return None
    sources = {name: source.model_dump(mode="json", include=set(MIXTURE_KEYS))
               for name, source in manifest.sources.items()}
    dumped = dump(manifest.mix, "seed")
    mix = name_outside_files(dumped, manifest.mix, verify)
    told = {} if mix == dumped else {"mix": dumped}
    recipe = {"mix": mix, "sources": sources, "seed": seed_of(manifest.mix, manifest)}
    if uses_own_weights(recipe["mix"]):
        return recipe, told
    weighed = {name: {key: value for key, value in source.items() if key != "weight"}
               for name, source in sources.items()}
    return {**recipe, "sources": weighed}, {**told, "sources": sources}
