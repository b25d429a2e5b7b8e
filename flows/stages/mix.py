"""`mix`: weights the sources, shuffles their documents and packs them into rows."""

from __future__ import annotations

from gristmill.flows.stages.ingest import MIXTURE_KEYS
from gristmill.flows.stages.sections import dump, name_outside_files, seed_of, without
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    always,
    documents,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.mix import uses_own_weights


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the keys of each source that affect a mixture."""
    if manifest.mix is None:
        return None
    sources = {
        name: source.model_dump(mode="json", include=set(MIXTURE_KEYS))
        for name, source in manifest.sources.items()
    }
    dumped = dump(manifest.mix, "seed")
    mix = name_outside_files(dumped, manifest.mix, verify)
    arguments = {} if mix == dumped else {"mix": dumped}
    recipe = {"mix": mix, "sources": sources, "seed": seed_of(manifest.mix, manifest)}
    if uses_own_weights(manifest.mix.model_dump()):
        return recipe, arguments
    unweighted_sources = {
        name: without(source, "weight") for name, source in sources.items()
    }
    return {**recipe, "sources": unweighted_sources}, {**arguments, "sources": sources}


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield each invalid `where` and `epochs` of the sources, also if it has a column
    that nothing measures.
    """
    expressions = [
        (("sources", source, key), expression)
        for source, section in manifest.sources.items()
        for key in ("where", "epochs")
        if (expression := getattr(section, key)) is not None
    ]
    if not expressions:
        return
    from gristmill.dataprep.where_sql import METADATA, MIXING_COLUMNS, all_names
    from gristmill.tokenize.mixing.quotas import MixError
    from gristmill.tokenize.mixing.source_filters import check_names

    names = [*MIXING_COLUMNS, *all_names(measured)]
    for location, expression in expressions:
        key = ".".join(location)
        of_source = [METADATA] if location[1] in manifest.text_sources else []
        try:
            check_names(key, expression, [*names, *of_source])
        except MixError as error:
            yield location, str(error).removeprefix(f"{key}: ")


STAGE = Stage(
    "mix",
    9,
    "gristmill.tokenize.mixing.mix:run",
    configure,
    documents("tokenizer", "tokenize", "import_tokens"),
    preflight=preflight,
    no_estimate_reason="a sample has too few tokens to be mixed",
    is_parallel=always,
    topics={"packed": "packed.json"},
    report=("gristmill.flows.report.mixture:mixture_section",),
)
