"""`import_tokens`: reads tokens that another tool has written, as sources of the
mixture.
"""

from __future__ import annotations

from gristmill.flows.stages.ingest import MIXTURE_KEYS, NOTE_KEYS
from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import (
    Configured,
    Stage,
    only,
)
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the sources of tokens, with the listings of their files."""
    sources = {
        name: dump(source, *MIXTURE_KEYS, *NOTE_KEYS)
        for name, source in manifest.token_sources.items()
    }
    if not sources:
        return None
    from gristmill.tokenize.importing.token_files import token_listing

    recipes = {}
    arguments = {}
    for name, source in sources.items():
        listing = token_listing(name, manifest.token_sources[name], verify)
        settings = {key: value for key, value in source.items() if key != "tokens"}
        recipes[name] = {**settings, "listing": listing}
        arguments[name] = {**source, "listing": listing}
    # The stage compares the listing with the files that it finds: files that changed in
    # the meantime are an error.
    return {"sources": recipes}, {"sources": arguments}


STAGE = Stage(
    "import_tokens",
    1,
    "gristmill.tokenize.importing.import_tokens:run",
    configure,
    only("tokenizer"),
)
