"""`ingest`: reads the sources into immutable documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gristmill.flows.stages.sections import dump, without
from gristmill.flows.stages.stage import (
    Configured,
    Library,
    Stage,
    always,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.sources import GENERATE, INGEST

MIXTURE_KEYS = ("weight", "max_epochs", "where", "epochs")
"""Keys of a source that only the mixture reads; all others affect its reading."""
NOTE_KEYS = ("licence",)
"""Keys of a source that do not change any document."""
OWN_KEYS = ("list", "read")
"""Keys of a source that recipes contain only if they are set."""


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the sources of documents, with the listings of their files, and the names
    of generated sources.
    """
    if not manifest.text_sources:
        return None
    recipe, arguments = read_sources(manifest, verify, list(manifest.document_sources))
    if manifest.generated_sources:
        recipe = {**recipe, "generated": list(manifest.generated_sources)}
    return recipe, arguments


def needs(manifest: Manifest) -> list[str]:
    """Return the stage that writes the generated sources, if there are any."""
    return [GENERATE] if manifest.generated_sources else []


def read_sources(manifest: Manifest, verify: bool, names: Sequence[str]) -> Configured:
    """Return the recipe of some sources, with the listings of their files, and the
    further arguments of the stage.
    """
    from gristmill.dataprep.readers.sources import listing

    sources = manifest.document_sources
    dumped = {
        name: dump(
            source,
            *MIXTURE_KEYS,
            *NOTE_KEYS,
            *(key for key in OWN_KEYS if getattr(source, key) is None),
        )
        for name, source in sources.items()
        if name in names
    }
    # The stage compares the listing with the files that it finds: files that changed in
    # the meantime are an error.
    listed = {
        name: {**source, "listing": listing(name, sources[name], verify=verify)}
        for name, source in dumped.items()
    }
    recipes = {name: without(source, "path") for name, source in listed.items()}
    recipe = {"ingest": dump(manifest.ingest), "sources": recipes}
    return recipe, {"sources": listed}


def libraries(manifest: Manifest) -> Iterator[Library]:
    """Yield the libraries that extractors need; the stage itself asks for those of the
    formats that it finds.
    """
    for name, source in manifest.document_sources.items():
        key = f"sources.{name}"
        if source.extract == "readability":
            yield Library("readability", f"{key}.extract")
        if source.extract_options.markdown and source.extract != "trafilatura":
            yield Library("markdownify", f"{key}.extract_options.markdown")


STAGE = Stage(
    INGEST,
    6,
    "gristmill.dataprep.readers.ingest:run",
    configure,
    needs,
    is_parallel=always,
    libraries=libraries,
    report=(
        "gristmill.flows.report.document_sections:damaged_files",
        "gristmill.flows.report.document_sections:skipped_records",
    ),
)
