"""`tokenizer`: learns a vocabulary from a sample, or takes the tokenizer that is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gristmill.core.files import as_path, read_json, sha256_file
from gristmill.flows.stages.sections import dump, dump_only, name_outside_files, seed_of
from gristmill.flows.stages.stage import Location, Recipe, Stage, documents
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_signatures import misfit, signature_of
from gristmill.mixtures.tokenizer import CHARACTER_COVERAGE, TRANSITION_POINT, Tokenizer

TOKENIZER_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"
"""What a model's folder says of its tokenizer, as transformers names the files."""


def tokenizer_of(manifest: Manifest) -> Tokenizer | None:
    """The section, with what it leaves open taken from the folder of the model that is given, if one is."""
    section = manifest.tokenizer
    if manifest.model is None or (section is not None and section.path is not None):
        return section
    section, folder = section or Tokenizer(), as_path(manifest.model.path)
    given: dict[str, Any] = {"path": OutsidePath(folder / TOKENIZER_FILE)}
    if section.chat_template is None and section.chat_template_path is None and section.chat_formatter is None:
        given |= _template_of(folder)
    return section.model_copy(update=given)


def _template_of(folder: Path) -> dict[str, Any]:
    """The chat template of a model, from a file of its own or from its tokenizer's configuration; nothing if it has
    none."""
    if (folder / TEMPLATE_FILE).exists():
        return {"chat_template_path": OutsidePath(folder / TEMPLATE_FILE)}
    config = folder / TOKENIZER_CONFIG_FILE
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):  # several, by name
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    return {"chat_template": template} if template else {}


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """How it is learnt, or the checksum of the one that is given."""
    section = tokenizer_of(manifest)
    if section is None:
        return None
    where_given = [key for key in ("end_of_text", "chat_formatter") if getattr(section, key) is not None]
    if section.path is not None:
        chat = dump_only(section, verify, "special_tokens", "chat_template", "chat_template_path", *where_given)
        return (
            {"external": {"sha256": sha256_file(as_path(section.path))}, **chat},
            {"tokenizer": dump(section), "sources": [], "seed": 0},
        )
    dumped = {
        **dump(
            section, "seed", "path", "end_of_text", *(() if section.chat_formatter else ("chat_formatter",)), *OF_MODELS
        ),
        **_of_model(section),
    }
    return {
        "tokenizer": name_outside_files(dumped, section, verify),
        "sources": list(manifest.text_sources),
        "seed": seed_of(section, manifest),
    }, {"tokenizer": dumped}


def needs(manifest: Manifest) -> list[str]:
    """The documents, where a vocabulary is learnt from them."""
    section = tokenizer_of(manifest)
    return documents()(manifest) if section is not None and section.path is None else []


OF_MODELS = ("model", "character_coverage", "transition_point")


def _of_model(section: Tokenizer) -> Recipe:
    """The model and its settings; nothing for `bpe`, whose recipes are as they were when it was the only model."""
    if section.model == "bpe":
        return {}
    settings = {
        "sentencepiece_bpe": {"character_coverage": section.character_coverage or CHARACTER_COVERAGE},
        "superbpe": {"transition_point": section.transition_point or TRANSITION_POINT},
    }
    return {"model": section.model, **settings.get(section.model, {})}


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """A tokenizer that is none, or a template that is none."""
    from gristmill.tokenize.encoding.chat_templates import CHAT_TEMPLATE
    from gristmill.tokenize.encoding.tokenizer import TokenizerError, check, read_external, read_template

    section, at = tokenizer_of(manifest), "chat_template_path"
    assert section is not None
    if section.model == "unigram" and section.path is None and find_spec("sentencepiece") is None:
        yield (
            (STAGE.name, "model"),
            (
                "unigram needs sentencepiece, which is not installed; install it with: "
                "pip install 'gristmill[sentencepiece]'"
            ),
        )
    if section.end_of_text is not None and section.path is None:
        yield (STAGE.name, "end_of_text"), "a tokenizer that is trained here has its own end of text; leave it out"
    if section.chat_formatter is not None:
        found = signature_of(section.chat_formatter.use)
        takes_tools = found is not None and "tools" in (*found.required, *found.optional)
        if (wrong := misfit(section.chat_formatter, num_positional=2 if takes_tools else 1)) is not None:
            yield (STAGE.name, "chat_formatter"), wrong
    try:
        template = read_template(section)
        at = "path"
        if section.path is not None and as_path(section.path).is_file():
            has_own = template is not None or section.chat_formatter is not None
            at = "path" if section.end_of_text is None else "end_of_text"
            tokenizer = read_external(as_path(section.path), section.special_tokens, has_own, section.end_of_text)
            at = "chat_template"
            if section.chat_formatter is None:  # code of the user's is not run before the stage is
                check(tokenizer, template or CHAT_TEMPLATE, section.end_of_text)
    except TokenizerError as error:
        yield (STAGE.name, at), str(error).removeprefix(f"{STAGE.name}.{at}: ")


STAGE = Stage(
    "tokenizer",
    3,
    "gristmill.tokenize.encoding.tokenizer:run",
    configure,
    needs,
    parallel=True,
    is_short=lambda recipe: "external" in recipe,
    imports=lambda settings: ["tokenizers"],
    preflight=preflight,
)
