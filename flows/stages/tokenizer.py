"""`tokenizer`: learns byte-level BPE from a sample, or takes the tokenizer that is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.dataprep.files import as_path, sha256_file
from gristmill.flows.stages.sections import dump, dump_only, name_outside_files, seed_of
from gristmill.flows.stages.stage import Location, Memory, Recipe, Stage, documents
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
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


def preflight(
    manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Location, str]]:  # fmt: skip
    """A tokenizer that is none, or a template that is none."""
    from gristmill.tokenize.encoding.chat_templates import CHAT_TEMPLATE
    from gristmill.tokenize.encoding.tokenizer import TokenizerError, check, read_external, read_template

    section, at = manifest.tokenizer, "chat_template_path"
    assert section is not None
    try:
        template = read_template(section)
        at = "path"
        if section.path is not None and as_path(section.path).is_file():
            tokenizer = read_external(as_path(section.path), section.special_tokens, template is not None)
            at = "chat_template"
            check(tokenizer, template or CHAT_TEMPLATE)
    except TokenizerError as error:
        yield (STAGE.name, at), str(error).removeprefix(f"{STAGE.name}.{at}: ")


STAGE = Stage(
    "tokenizer", 3, "gristmill.tokenize.encoding.tokenizer:run", configure, documents(), preflight=preflight,
    memory=Memory(183, "learn it from a part of the sources and give it as tokenizer.path"))
