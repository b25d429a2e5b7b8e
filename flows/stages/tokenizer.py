"""`tokenizer`: learns a vocabulary from a sample, or uses an existing tokenizer."""

from __future__ import annotations

from typing import Any

from gristmill.core.files import as_path, sha256_file
from gristmill.flows.stages.sections import dump, name_outside_files, seed_of
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    documents,
)
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.tokenizer import Tokenizer

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '\\n' -}}{%- endif -%}
{%- endfor -%}
"""
"""Chat template without special tokens of roles, which an encoder does not know."""


def tokenizer_of(manifest: Manifest) -> Tokenizer | None:
    """Return the section, completed from the folder of the section `model`, if there is
    one.
    """
    section = manifest.tokenizer
    if manifest.model is None or (section is not None and section.path is not None):
        return section
    from gristmill.tokenize.encoding.tokenizer import (
        TOKENIZER_FILE,
        configured_tokens,
        published_template,
    )

    section, folder = section or Tokenizer(), as_path(manifest.model.path)
    values: dict[str, Any] = {"path": OutsidePath(folder / TOKENIZER_FILE)}
    if not (section.chat_template or section.chat_template_path):
        values["chat_template"] = published_template(folder)
        if manifest.sft is not None and manifest.sft.kind != "decoder":
            tokens = configured_tokens(folder)
            end = tokens.get("eos_token") or tokens.get("sep_token")
            values["end_of_text"] = section.end_of_text or end
            values["chat_template"] = values["chat_template"] or PLAIN_TEMPLATE
    return section.model_copy(update=values)


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings of the training, or the checksum of an existing tokenizer."""
    section = tokenizer_of(manifest)
    if section is None:
        return None
    if section.path is not None:
        from gristmill.tokenize.encoding.tokenizer import configured_tokens

        path, pretrain = as_path(section.path), manifest.pretrain
        is_published = manifest.model is not None or (
            pretrain is not None and pretrain.model.init_from is not None
        )
        external = {"sha256": sha256_file(path)}
        if is_published and (start := configured_tokens(path.parent).get("bos_token")):
            external["bos_token"] = start
        pinned = name_outside_files(dump(section), section, verify)
        keys = ("special_tokens", "chat_template", "chat_template_path", "end_of_text")
        chat = {key: pinned[key] for key in keys}
        return (
            {"external": external, "published": is_published, **chat},
            {"tokenizer": dump(section), "sources": [], "seed": 0},
        )
    dumped = dump(section, "seed", "path", "end_of_text")
    return {
        "tokenizer": name_outside_files(dumped, section, verify),
        "sources": list(manifest.text_sources),
        "seed": seed_of(section, manifest),
    }, {"tokenizer": dumped}


def needs(manifest: Manifest) -> list[str]:
    """Return the documents, if a vocabulary is learnt from them."""
    section = tokenizer_of(manifest)
    return documents()(manifest) if section is not None and section.path is None else []


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an invalid tokenizer, and an invalid template."""
    from gristmill.tokenize.chat_template import CHAT_TEMPLATE
    from gristmill.tokenize.encoding.tokenizer import (
        TokenizerError,
        check,
        read_external,
        read_template,
    )

    section = tokenizer_of(manifest)
    at = "chat_template_path"
    assert section is not None
    if section.end_of_text is not None and section.path is None:
        yield (
            (STAGE.name, "end_of_text"),
            "a tokenizer that is trained here has its own end of text; leave it out",
        )
    try:
        template = read_template(section)
        at = "path"
        if section.path is not None and as_path(section.path).is_file():
            at = "path" if section.end_of_text is None else "end_of_text"
            tokenizer = read_external(
                as_path(section.path),
                section.special_tokens,
                template is not None,
                section.end_of_text,
            )
            at = "chat_template"
            check(tokenizer, template or CHAT_TEMPLATE, section)
    except TokenizerError as error:
        yield (STAGE.name, at), str(error).removeprefix(f"{STAGE.name}.{at}: ")


STAGE = Stage(
    "tokenizer",
    5,
    "gristmill.tokenize.encoding.tokenizer:run",
    configure,
    needs,
    preflight=preflight,
    preload=lambda settings: ["tokenizers"],
    is_parallel=lambda recipe: "external" not in recipe,
)
