"""Folders of models, read without loading the model: its kind, its classes, its maximum
number of tokens.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gristmill.core.files import as_path, find_json, is_local, sha256_file

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
)
MODULES_FILE = "modules.json"
"""File in which sentence-transformers lists the modules of a model."""
MOST_TOKENS = 1_000_000
"""Limit of a valid `model_max_length`; transformers writes 10^30 for an unknown one."""
SHOWN_FILES = 8
ModelConfig = dict[str, Any]
"""Content of a model's config.json, whose keys depend on its architecture."""


class ModelFolderError(ValueError):
    """Error of a folder without a model that can read documents."""


def model_folder(path: str) -> Path:
    """Folder of a model.

    Raises:
        ModelFolderError: the folder is not on this machine.
    """
    folder = as_path(path)
    if not is_local(folder):
        raise ModelFolderError(
            f"{path}: a model is read from a folder of this machine; copy it there"
        )
    if not folder.is_dir():
        raise ModelFolderError(
            f"{path}: there is no such folder; name the one with "
            f"the model's {CONFIG_FILE}"
        )
    return folder


def read_config(folder: Path) -> ModelConfig:
    """Read the model's config.json.

    Raises:
        ModelFolderError: it is missing or not a JSON object.
    """
    config = _read_json(folder, CONFIG_FILE)
    if not isinstance(config, dict):
        raise ModelFolderError(
            f"{folder} has no {CONFIG_FILE}, but "
            f"{_listed(folder)}; name the folder of a model"
        )
    return config


def _read_json(folder: Path, name: str) -> Any:
    try:
        return find_json(folder / name)
    except ValueError as error:
        raise ModelFolderError(f"{folder / name} is not JSON: {error}") from error


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:SHOWN_FILES]) or "nothing"


def is_static(folder: Path) -> bool:
    """Test if the model is static (model2vec): a vector per token without further
    layers.
    """
    if read_config(folder).get("model_type") == "model2vec":
        return True
    modules = _read_json(folder, MODULES_FILE) or [{}]
    return str(modules[0].get("type", "")).endswith(".StaticEmbedding")


def find_file(folder: Path, *names: str) -> Path:
    """Find the first of some files that exists in a folder.

    Raises:
        ModelFolderError: none of them exists.
    """
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ModelFolderError(
            f"{folder} has no {' or '.join(names)}, but {_listed(folder)}"
        )
    return path


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of a classifier's outputs in order: `id2label` of its config, or `score`
    for a model without classes.

    Raises:
        ModelFolderError: the config does not have names.
    """
    config = read_config(folder)
    label_by_id = config.get("id2label")
    if not isinstance(label_by_id, Mapping) or not label_by_id:
        if config.get("num_labels") == 1:
            return ("score",)
        raise ModelFolderError(
            f"{folder / CONFIG_FILE} has no `id2label`; a "
            "classifier's config names its classes"
        )
    names = tuple(str(label_by_id[key]) for key in sorted(label_by_id, key=int))
    return ("score",) if len(names) == 1 and names[0].startswith("LABEL_") else names


def has_first_token_head(config: ModelConfig) -> bool:
    """Test if a model is an encoder with one linear layer on the vector of the first
    token, in the layout of NVIDIA's classifiers (`fc`, beside `model`), which
    transformers has no class for.
    """
    return {"base_model", "fc_dropout", "id2label"} <= config.keys()


def most_tokens(folder: Path) -> int:
    """Maximum number of tokens per window: the smallest limit in the model's files, or
    512 if they have none.
    """
    config = read_config(folder)
    positions = config.get("max_position_embeddings")
    if config.get("position_biased_input") is False:  # DeBERTa: relative positions only
        positions = None
    if isinstance(positions, int) and config.get("model_type") in OFFSET_POSITIONS:
        positions -= 1 + int(config.get("pad_token_id") or 0)
    limits = [
        positions,
        (_read_json(folder, "sentence_bert_config.json") or {}).get("max_seq_length"),
        (_read_json(folder, "tokenizer_config.json") or {}).get("model_max_length"),
        config.get("max_length") if is_static(folder) else None,
    ]
    return min(
        (
            int(number)
            for number in limits
            if isinstance(number, int | float) and 0 < number <= MOST_TOKENS
        ),
        default=512,
    )


OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "data2vec-text",
    "longformer",
    "mpnet",
)
"""Model types that start positions after the padding index, so that
`max_position_embeddings` includes that offset (transformers, modeling_roberta.py:
create_position_ids_from_input_ids).
"""
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def token_pooling(folder: Path) -> str:
    """Pooling of a text's token vectors: `mean`, `cls`, `max` or `last`; `mean` if no
    file sets it.

    Raises:
        ModelFolderError: the pooling is unsupported, or the model has further layers.
    """
    modules = _read_json(folder, MODULES_FILE) or []
    module_paths = {
        str(module["type"]).rpartition(".")[2]: str(module.get("path", ""))
        for module in modules
    }
    for kind in module_paths:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelFolderError(
                f"{folder / MODULES_FILE} has a part {kind!r}; those that are known "
                "are Transformer, Pooling and Normalize"
            )
    if "Pooling" not in module_paths:
        return "mean"
    file = f"{module_paths['Pooling']}/config.json"
    settings = _read_json(folder, file)
    if settings is None:
        return "mean"
    modes = [mode for key, mode in POOLING_MODES.items() if settings.get(key)]
    configured = settings.get("pooling_mode")
    if isinstance(configured, str):
        modes = ["last" if configured == "lasttoken" else configured]
    if len(modes) != 1 or modes[0] not in POOLING_MODES.values():
        raise ModelFolderError(
            f"{folder}/{file} pools tokens by {settings}; supported is "
            f"one of {', '.join(sorted(POOLING_MODES.values()))}"
        )
    return modes[0]


def needed(module: str) -> Any:
    """Import a module of the extra `models`.

    Raises:
        ModelFolderError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelFolderError(
            f"reading documents with this model takes {module}, which is not installed "
            f"({error}): pip install 'gristmill[models]'"
        ) from error


def check_installed(*modules: str) -> None:
    """Raise ModelFolderError if a module is not installed, without importing installed
    ones.
    """
    for module in modules:
        if find_spec(module) is None:
            needed(module)


def folder_sha256(path: str) -> str:
    """Hash of the contents of a folder or file, which distinguishes models at the same
    path.
    """
    location = as_path(path)
    if not location.is_dir():
        return sha256_file(location)
    digest = hashlib.sha256()
    for file in sorted(location.rglob("*")):
        if file.is_file():
            digest.update(
                f"{file.relative_to(location).as_posix()} {sha256_file(file)}\n".encode()
            )
    return digest.hexdigest()
