"""Stage `export`: the final model as a folder that transformers loads, with a card that says where it is from.

Output: config.json, model.safetensors, generation_config.json, the tokenizer's files, README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import atomic_write, write_json
from gristmill.mixtures.evaluation import Export
from gristmill.train.evaluate import MODELS
from gristmill.train.models.families import family_of, hf_config, split_for_hf
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import WEIGHTS_FILE, read_shape
from gristmill.train.objectives.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Chat
from gristmill.train.pretrain import MODEL, MODEL_AVERAGE

DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Write the folder; one plain process."""
    lineage = config.get("lineage", {})
    section = Export.model_validate({key: value for key, value in config.items() if key != "lineage"})
    stage = next(name for name in reversed(MODELS) if name in inputs)
    source, tokenizer = weights_folder(inputs[stage], stage, section), inputs["tokenizer"]
    shape, chat = read_shape(source), Chat(tokenizer)
    name, dtype = DTYPES[section.dtype]
    eos = sorted(chat.stops)
    tensors = exported_tensors(source, shape, dtype)
    write_json(out / "config.json", hf_config(shape, name, eos, chat.pad))
    write_json(out / "generation_config.json", {"eos_token_id": eos, "pad_token_id": chat.pad})
    write_weights(out / WEIGHTS_FILE, tensors)
    for file in (TOKENIZER_FILE, TEMPLATE_FILE):
        copy_file(tokenizer / file, out / file)
    tokenizer_config = json.loads((tokenizer / TOKENIZER_CONFIG_FILE).read_bytes())
    write_json(out / TOKENIZER_CONFIG_FILE, {**tokenizer_config, "model_max_length": shape.sequence_length})
    parameters = sum(tensor.numel() for tensor in tensors.values())
    with atomic_write(out / "README.md") as sink:
        sink.write(model_card(lineage, stage, shape, parameters, section.dtype).encode())
    return {"model": stage, "parameters": parameters, "dtype": section.dtype, "vocab_size": shape.vocab_size}


def weights_folder(training: Path, stage: str, section: Export) -> Path:
    """The model that the section asks for.

    Raises:
        ValueError: an average is asked for, but the training kept none.
    """
    if section.weights == "raw":
        return training / MODEL
    if not (training / MODEL_AVERAGE).exists():
        raise ValueError(f"export.weights is `average`, but {stage} kept no running mean of its weights; set "
                         f"{stage}.average, or export.weights: raw")
    return training / MODEL_AVERAGE


def exported_tensors(source: Path, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's tensors under Hugging Face's names, in the export's dtype, padding rows cut off."""
    from safetensors.torch import load

    tensors = load((source / WEIGHTS_FILE).read_bytes())
    exported: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = tensor[: shape.vocab_size] if name in VOCABULARY_TENSORS else tensor
        exported |= {inner: part.to(dtype).contiguous() for inner, part in split_for_hf(name, kept, shape).items()}
    return exported


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write model.safetensors; older readers want its metadata to name the framework."""
    from safetensors.torch import save

    with atomic_write(path) as sink:
        sink.write(save(dict(tensors), metadata={"format": "pt"}))


def copy_file(source: Path, target: Path) -> None:
    """Copy a small file, whole or not at all."""
    with atomic_write(target) as sink:
        sink.write(source.read_bytes())


def model_card(lineage: Mapping[str, Any], stage: str, shape: Shape, parameters: int, dtype: str) -> str:
    """The README of the exported folder: what the model is, what it was made from, how to load it."""
    name = lineage.get("name", "gristmill model")
    rows = [f"| {source} | {facts.get('weight', '')} | {facts.get('licence') or 'not stated'} |"
            for source, facts in lineage.get("sources", {}).items()]
    sources = ["## Sources", "", "| source | weight | licence |", "| --- | --- | --- |", *rows, ""] if rows else []
    return "\n".join([
        "---", "library_name: transformers", "pipeline_tag: text-generation", "---", "", f"# {name}", "",
        f"A {family_of(shape)} decoder of {parameters:,} parameters ({shape.layers} layers, width {shape.width}, "
        f"vocabulary {shape.vocab_size:,}, {shape.sequence_length} tokens of context), trained by gristmill; "
        f"last stage: {stage}; weights in {dtype}.", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")', "```", "",
        *sources, "## Lineage", "", "```json", json.dumps(lineage, indent=1, ensure_ascii=False, sort_keys=True),
        "```", "",
    ])
