"""`export`: writes the last model as a folder that others load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from gristmill.core.files import as_path
from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import Recipe, Stage
from gristmill.flows.stages.trainings import model_before
from gristmill.mixtures.manifest import Location, Manifest
from gristmill.mixtures.mix import uses_own_weights


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, and what the model card says."""
    if manifest.export is None:
        return None
    return {**dump(manifest.export), "lineage": _lineage(manifest)}, {}


def _lineage(manifest: Manifest) -> Recipe:
    """What the model card says of the data: the sources with their licences, and the weights that counted."""
    mix = {} if manifest.mix is None else dump(manifest.mix)
    own = uses_own_weights({} if manifest.mix is None else manifest.mix.model_dump())
    licences = manifest.licences
    sources = {
        name: {**({"weight": source.weight} if own else {}), "licence": licences.get(name, source.licence)}
        for name, source in manifest.sources.items()
    }
    asked = {key: mix[key] for key in ("weights", "phases") if mix.get(key)}
    return {"name": manifest.name, "sources": sources, **({"mix": asked} if asked else {})}


def needs(manifest: Manifest) -> list[str]:
    """The last model that the manifest trains, and held-out text where its rounding is measured."""
    measured = ["mix"] if manifest.export is not None and manifest.export.int8 else []
    return ["tokenizer", *measured, model_before(STAGE.name, manifest)]


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """What keeps a GGUF file from being written, which would be found after the trainings otherwise."""
    if manifest.export is None or not manifest.export.gguf:
        return
    place = (STAGE.name, "gguf")
    if find_spec("gguf") is None:
        yield place, "needs gguf, which is not installed; install it with: pip install 'gristmill[gguf]', or remove it"
    if (reason := _why_not_for_llama_cpp(manifest)) is not None:
        yield place, f"llama.cpp cannot take this tokenizer: {reason}; remove it, or choose another tokenizer"


def _why_not_for_llama_cpp(manifest: Manifest) -> str | None:
    from tokenizers import Tokenizer

    from gristmill.tokenize.encoding.llama_cpp_vocabulary import (
        NotForLlamaCppError,
        llama_cpp_vocabulary,
        refuse_other_models,
    )

    section, given = manifest.tokenizer, manifest.model
    path: str | None = None if section is None else section.path
    if section is None and given is not None:
        path = f"{given.path}/tokenizer.json"
    try:
        if path is None and section is not None:
            refuse_other_models({"bpe": "BPE"}.get(section.model, section.model), byte_fallback=False)
        elif path is not None and as_path(path).exists():
            llama_cpp_vocabulary(Tokenizer.from_str(as_path(path).read_text(encoding="utf-8")), size=0)
    except NotForLlamaCppError as error:
        return str(error)
    return None


STAGE = Stage(
    "export",
    2,
    "gristmill.train.stages.export:run",
    configure,
    needs,
    needs_torch=True,
    preflight=preflight,
    facts="gristmill.flows.report.report_facts:exported",
    report=("gristmill.flows.report.finetuning:rounding",),
)
