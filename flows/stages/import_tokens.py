"""`import_tokens`: reads tokens that another tool has made, as sources of the mixture beside our own."""

from __future__ import annotations

from gristmill.flows.stages.ingest import MIXTURE_KEYS, NOTE_KEYS
from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import Recipe, Stage, only
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The sources of tokens, as they are read, and their files."""
    sources = {name: dump(source, *MIXTURE_KEYS, *NOTE_KEYS) for name, source in manifest.token_sources.items()}
    if not sources:
        return None
    from gristmill.tokenize.importing.token_files import token_listing

    listings = {name: token_listing(name, source, verify) for name, source in sources.items()}
    named = {
        name: {**{key: value for key, value in source.items() if key != "tokens"}, "listing": listings[name]}
        for name, source in sources.items()
    }
    # The stage compares the listing with what it finds: files that changed meanwhile are an error.
    return {"sources": named}, {
        "sources": {name: {**source, "listing": listings[name]} for name, source in sources.items()}
    }


STAGE = Stage("import_tokens", 1, "gristmill.tokenize.importing.import_tokens:run", configure, only("tokenizer"))
