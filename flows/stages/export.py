"""`export`: writes the last model as a folder that other tools load."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.core.files import as_path
from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import (
    Configured,
    Library,
    MeasuredColumns,
    Problems,
    Stage,
)
from gristmill.flows.stages.trainings import model_before
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.mix import uses_own_weights


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the facts of the model card."""
    if manifest.export is None:
        return None
    mix = {} if manifest.mix is None else dump(manifest.mix)
    has_own_weights = uses_own_weights(mix)
    licences = manifest.licences
    sources = {}
    for name, source in manifest.sources.items():
        weight = {"weight": source.weight} if has_own_weights else {}
        sources[name] = {**weight, "licence": licences.get(name, source.licence)}
    mix_settings = {key: mix[key] for key in ("weights", "phases") if mix.get(key)}
    lineage: Recipe = {"name": manifest.name, "sources": sources}
    if mix_settings:
        lineage["mix"] = mix_settings
    return {**dump(manifest.export), "lineage": lineage}, {}


def needs(manifest: Manifest) -> list[str]:
    """Return the last model that the manifest trains, and its tokenizer."""
    return ["tokenizer", model_before(STAGE.name, manifest)]


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield reasons why a GGUF file cannot be written, which would otherwise appear
    only after the trainings.
    """
    if manifest.export is None or not manifest.export.gguf:
        return
    from tokenizers import Tokenizer

    from gristmill.tokenize.encoding.llama_cpp_vocabulary import (
        NotForLlamaCppError,
        llama_cpp_vocabulary,
    )

    place = (STAGE.name, "gguf")
    section, model = manifest.tokenizer, manifest.model
    path: str | None = None if section is None else section.path
    if section is None and model is not None:
        path = f"{model.path}/tokenizer.json"
    try:
        if path is not None and as_path(path).exists():
            text = as_path(path).read_text(encoding="utf-8")
            llama_cpp_vocabulary(Tokenizer.from_str(text), size=0)
    except NotForLlamaCppError as error:
        yield (
            place,
            f"llama.cpp does not support this tokenizer: {error}; remove it, or "
            "choose another tokenizer",
        )


def libraries(manifest: Manifest) -> Iterator[Library]:
    """Yield the library that writes GGUF files."""
    if manifest.export is not None and manifest.export.gguf:
        yield Library("gguf", "export.gguf")


STAGE = Stage(
    "export",
    3,
    "gristmill.train.stages.export:run",
    configure,
    needs,
    preflight=preflight,
    torch=True,
    libraries=libraries,
)
