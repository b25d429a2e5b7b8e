"""Stage `export`: the final model as a folder that transformers loads, with a model
card that states its lineage.

Output: config.json, model.safetensors (or its shards and their index),
generation_config.json, the tokenizer's files, README.md; on request GGUF files for
llama.cpp and a Modelfile for Ollama.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from gristmill.core.files import copy_file, read_json, write_json, write_text
from gristmill.core.stage_context import Context
from gristmill.mixtures.manifest import TUNINGS
from gristmill.mixtures.schema.evaluation import Export
from gristmill.tokenize.chat_template import PROBE, as_plain_jinja
from gristmill.tokenize.encoding.llama_cpp_vocabulary import llama_cpp_vocabulary
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.tokenize.encoding.tokenizer import read_prompt_tokenizer
from gristmill.train.data.conversation_tokens import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Chat,
)
from gristmill.train.models.gguf_model import GgufError, Labels, write_gguf
from gristmill.train.models.hf_configs import family_of, hf_config, planned_for_hf
from gristmill.train.models.model_config import Shape, StoredShape, TransformersShape
from gristmill.train.models.ollama import go_template, modelfile
from gristmill.train.models.tensor_files import (
    WEIGHTS_FILE,
    Planned,
    TensorFile,
    write_model,
)
from gristmill.train.models.transformers_decoder import (
    CAUSAL_LM,
    GENERATION_FILE,
    auto_class_of,
    write_module,
)
from gristmill.train.models.weights import load_model, read_shape
from gristmill.train.objectives.masked_rows import mask_token
from gristmill.train.stages.stage_inputs import MODEL, Inputs, last_model
from gristmill.train.stages.trained_models import MODEL_AVERAGE

DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
MODELFILE = "Modelfile"
PREFIX_NOTE = [
    "## Prefixes",
    "",
    "This model was trained to read a prefix in both directions (prefix language "
    "modelling). transformers reads a prompt from left to right, and its `generate` "
    "cannot do otherwise: for a forward pass as in training, give it an "
    "`attention_mask` of shape (rows, 1, tokens, tokens) that is true where a token "
    "stands before another or in the prefix. `gristmill chat` and `generate` read "
    "prompts in both directions.",
    "",
]
START_NOTE = (
    "Texts begin with `{start}`, which `tokenizer(text)` adds; the chat template writes "
    "the beginning of a conversation itself."
)


class CardSource(TypedDict, total=False):
    """Source in a model card."""

    weight: int | float | None
    licence: str | None


class CardLineage(TypedDict, total=False):
    """Lineage in a model card: the run's name, its sources, and settings of the mixture
    that weigh them.
    """

    name: str
    sources: dict[str, CardSource]
    mix: dict[str, object]


class ExportSummary(TypedDict):
    """Summary of the stage.

    Attributes:
        model: stage of the exported model.
        parameters: number of its weights.
        dtype: of the weights.
        vocab_size: number of ids.
        bytes: size of the files with weights.
        gguf: size of each GGUF file, by name.
    """

    model: str
    parameters: int
    dtype: str
    vocab_size: int
    bytes: int
    gguf: NotRequired[dict[str, int]]


def run(
    inputs: Inputs,
    config: Mapping[str, Any],
    out: Path,
    context: Context,
) -> ExportSummary:
    """Write the folder; one plain process."""
    lineage: CardLineage = config.get("lineage", {})
    section = Export.model_validate(
        {key: value for key, value in config.items() if key != "lineage"}
    )
    stage = last_model(inputs)
    source = weights_folder(inputs[stage], stage, section)
    tokenizer = inputs["tokenizer"]
    shape, parameters, size = write_folder(source, tokenizer, section, out)
    chat = Chat(tokenizer)
    added = read_prompt_tokenizer(tokenizer, shape.follows_end).encode("").ids
    write_text(
        out / "README.md",
        model_card(
            lineage,
            stage,
            shape,
            parameters,
            section.dtype,
            chat.decode(added, special=True),
        ),
    )
    sizes = write_gguf_files(
        source,
        shape,
        chat,
        section,
        out,
        lineage.get("name", stage),
        context,
        added,
        is_tuned=stage in TUNINGS,
    )
    summary: ExportSummary = {
        "model": stage,
        "parameters": parameters,
        "dtype": section.dtype,
        "vocab_size": shape.vocab_size,
        "bytes": size,
    }
    if sizes:
        summary["gguf"] = sizes
    return summary


def write_folder(
    source: Path, tokenizer: Path, section: Export, out: Path
) -> tuple[StoredShape, int, int]:
    """Write everything except the model card.

    Args:
        source: folder of a trained model.
        tokenizer: folder of its tokenizer.
        section: dtype and size of shards.
        out: target folder.

    Returns:
        shape of the model, its number of parameters, and the bytes of its files.
    """
    shape = read_shape(source)
    chat = Chat(tokenizer)
    name, dtype = DTYPES[section.dtype]
    if isinstance(shape, TransformersShape):
        parameters = shape.parameters
        size = write_module(
            load_model(source, kind=None),
            dtype,
            chat.stops,
            {
                "eos_token_id": chat.end_of_text,
                "pad_token_id": chat.pad,
                "decoder_start_token_id": chat.pad,
            },
            section.max_shard_bytes,
            out,
        )
    else:
        bos: int | None = chat.start_of_text
        eos = sorted(chat.stops)
        if shape.published is not None:
            bos = shape.published.bos
            eos = sorted(chat.stops.union(shape.published.eos))
        tensors = exported_tensors(source, shape, dtype)
        parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
        write_json(out / "config.json", hf_config(shape, name, eos, chat.pad, bos))
        write_json(
            out / GENERATION_FILE,
            {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": chat.pad},
        )
        size = write_model(out, tensors, section.max_shard_bytes)
    prompt_tokenizer = read_prompt_tokenizer(tokenizer, shape.follows_end)
    write_text(out / TOKENIZER_FILE, prompt_tokenizer.to_str(pretty=True))
    if shape.kind == "decoder":
        copy_file(tokenizer / TEMPLATE_FILE, out / TEMPLATE_FILE)
    tokenizer_config = read_json(tokenizer / TOKENIZER_CONFIG_FILE)
    mask = (
        {"mask_token": mask_token(load_tokenizer(tokenizer))}
        if shape.kind == "encoder"
        else {}
    )
    write_json(
        out / TOKENIZER_CONFIG_FILE,
        {**tokenizer_config, **mask, "model_max_length": shape.sequence_length},
    )
    return shape, parameters, size


def write_gguf_files(
    source: Path,
    shape: StoredShape,
    chat: Chat,
    section: Export,
    out: Path,
    name: str,
    context: Context,
    added: Sequence[int],
    is_tuned: bool,
) -> dict[str, int]:
    """Write the GGUF files of the section and a Modelfile; returns bytes by kind of
    file.

    llama.cpp puts the ids `added` before texts also in front of conversations, unless
    their template begins with them. So the files of a model that `is_tuned` on another
    template add none.

    Raises:
        gristmill.tokenize.encoding.llama_cpp_vocabulary.NotForLlamaCppError: llama.cpp
            would encode text differently.
        gristmill.train.models.gguf_model.GgufError: llama.cpp would compute
            differently.
    """
    if not section.gguf:
        return {}
    if isinstance(shape, TransformersShape):
        raise GgufError(
            f"export.gguf is not written for {shape.family}, whose layers are those of "
            "transformers; convert the exported folder with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    template = (chat.folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    start = chat.decode(added, special=True)
    if is_tuned and not chat.text(PROBE[1:2]).startswith(start):
        added, start = (), ""
    labels = Labels(
        name,
        llama_cpp_vocabulary(chat.tokenizer, shape.vocab_size),
        added[0] if added else chat.start_of_text,
        bool(added),
        chat.end_of_text,
        chat.pad,
        next(iter(sorted(chat.stops - {chat.end_of_text})), None),
        as_plain_jinja(template),
    )
    context.work.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {
        kind: write_gguf(
            out / f"model-{kind}.gguf",
            source / WEIGHTS_FILE,
            shape,
            kind,
            labels,
            context.work,
        )
        for kind in section.gguf
    }
    go_chat_template = go_template(chat, start)
    if go_chat_template is None:
        context.warn(
            "the Modelfile has no TEMPLATE: the chat template writes a message in a "
            "way that depends on those around it, which Ollama's templates cannot say "
            "here; write one by hand before `ollama create`"
        )
    write_text(
        out / MODELFILE,
        modelfile(
            f"model-{section.gguf[0]}.gguf",
            chat,
            shape.sequence_length,
            go_chat_template,
        ),
    )
    return sizes


def weights_folder(training: Path, stage: str, section: Export) -> Path:
    """Folder of the weights that the section exports.

    Raises:
        ValueError: the section exports an average, but the training kept none.
    """
    if section.weights == "raw":
        return training / MODEL
    if not (training / MODEL_AVERAGE).exists():
        raise ValueError(
            f"export.weights is `average`, but {stage} kept no running mean of its "
            f"weights; set {stage}.average, or export.weights: raw"
        )
    return training / MODEL_AVERAGE


def exported_tensors(
    source: Path, shape: Shape, dtype: torch.dtype
) -> dict[str, Planned]:
    """Tensors of a trained model for the export, read lazily."""
    file = TensorFile(source / WEIGHTS_FILE)
    sizes = {name: file.shape(name) for name in sorted(file.names())}
    # A tensor that is split into several, such as a layer's experts, is read once for
    # all of them.
    read = lru_cache(maxsize=1)(file.read)
    return planned_for_hf(sizes, read, shape, dtype)


def model_card(
    lineage: CardLineage,
    stage: str,
    shape: StoredShape,
    parameters: int,
    dtype: str,
    start: str,
) -> str:
    """README of the exported folder: description of the model, sources, loading, the
    tokens that `start` a text, and lineage.
    """
    name = lineage.get("name", "gristmill model")
    rows = [
        f"| {source} | {facts.get('weight', '')} | "
        f"{facts.get('licence') or 'not stated'} |"
        for source, facts in lineage.get("sources", {}).items()
    ]
    kind = shape.kind.replace("_", "-")
    if isinstance(shape, TransformersShape):
        family, width = shape.family, shape.config.get("hidden_size", "of its config")
        auto_class = auto_class_of(shape.config)
    else:
        family, width = family_of(shape), shape.width
        auto_class = CAUSAL_LM
    sources = (
        [
            "## Sources",
            "",
            "| source | weight | licence |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
        if rows
        else []
    )
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"pipeline_tag: {auto_class.task}",
            "---",
            "",
            f"# {name}",
            "",
            f"A {family} {kind} of {parameters:,} parameters ({shape.layers} "
            f"layers, width {width}, vocabulary {shape.vocab_size:,}, "
            f"{shape.sequence_length} tokens of context), trained by gristmill; last "
            f"stage: {stage}; weights in {dtype}.",
            "",
            "```python",
            f"from transformers import {auto_class.name}, AutoTokenizer",
            "",
            f'model = {auto_class.name}.from_pretrained("path/to/this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            "```",
            "",
            *([START_NOTE.format(start=start), ""] if start else []),
            *(PREFIX_NOTE if shape.prefix_lm else []),
            *sources,
            "## Lineage",
            "",
            "```json",
            json.dumps(lineage, indent=1, ensure_ascii=False, sort_keys=True),
            "```",
            "",
        ]
    )
