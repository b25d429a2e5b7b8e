"""`ingest`: reads the sources into immutable documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import Location, Recipe, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_signatures import misfit
from gristmill.mixtures.sources import GENERATE, INGEST

MIXTURE_KEYS = ("weight", "max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that only the mixture reads; all others belong to its reading."""
NOTE_KEYS = ("licence",)
"""Keys of a source that change nothing."""
OWN_KEYS = ("list", "read")
"""Keys of a source that recipes have where they are given."""


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The sources of documents, as they are read, and their files; those that are generated lie in the stage before."""
    if not manifest.text_sources:
        return None
    recipe, told = read_sources(manifest, verify, list(manifest.document_sources))
    generated = {"generated": list(manifest.generated_sources)} if manifest.generated_sources else {}
    return {**recipe, **generated}, told


def needs(manifest: Manifest) -> list[str]:
    """What writes the generated sources, where there are any."""
    return [GENERATE] if manifest.generated_sources else []


def read_sources(manifest: Manifest, verify: bool, names: Sequence[str]) -> tuple[Recipe, Recipe]:
    """Some sources as they are read, with their files: the recipe, and what the stage gets besides."""
    from gristmill.dataprep.reading.sources import listing

    dumped = {
        name: dump(source, *MIXTURE_KEYS, *NOTE_KEYS, *(key for key in OWN_KEYS if getattr(source, key) is None))
        for name, source in manifest.document_sources.items()
        if name in names
    }
    read = {name: {key: value for key, value in source.items() if key != "path"} for name, source in dumped.items()}
    listings = {name: listing(name, source, verify=verify) for name, source in dumped.items()}
    recipe = {
        "ingest": dump(manifest.ingest),
        "sources": {name: {**read[name], "listing": listings[name]} for name in dumped},
    }
    # The stage compares the listing with what it finds: files that changed meanwhile are an error.
    return recipe, {"sources": {name: {**source, "listing": listings[name]} for name, source in dumped.items()}}


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """What the source of a reader shows to be wrong, without running it."""
    for source, section in manifest.document_sources.items():
        if section.read is not None and (wrong := misfit(section.read, num_positional=1)) is not None:
            yield ("sources", source, "read"), wrong


STAGE = Stage(
    INGEST,
    3,
    "gristmill.dataprep.reading.ingest:run",
    configure,
    needs,
    parallel=True,
    preflight=preflight,
    report=(
        "gristmill.flows.report.document_sections:damaged_files",
        "gristmill.flows.report.document_sections:skipped_records",
    ),
)
