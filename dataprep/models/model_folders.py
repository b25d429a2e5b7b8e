"""What a model's folder holds, read without loading the model: its kind, its classes, how much text it reads."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import as_path, is_local, sha256_file

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
MODULES_FILE = "modules.json"
"""What sentence-transformers writes of the parts of a model."""
MOST_TOKENS = 1_000_000
"""A tokenizer whose `model_max_length` is larger does not know it (transformers writes 10^30)."""
SHOWN_FILES = 8


class ModelFolderError(ValueError):
    """A folder holds no model that can read documents."""


def model_folder(path: str) -> Path:
    """The folder of a model.

    Raises:
        ModelFolderError: there is none on this machine.
    """
    folder = as_path(path)
    if not is_local(folder):
        raise ModelFolderError(f"{path}: a model is read from a folder of this machine; copy it there")
    if not folder.is_dir():
        raise ModelFolderError(f"{path}: there is no such folder; name the one with the model's {CONFIG_FILE}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelFolderError: it is not there, or no JSON object.
    """
    found = _read_json(folder, CONFIG_FILE)
    if not isinstance(found, dict):
        raise ModelFolderError(f"{folder} has no {CONFIG_FILE}, but {_listed(folder)}; name the folder of a model")
    return found


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelFolderError(f"{folder / name} is not JSON: {error}") from error


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:SHOWN_FILES]) or "nothing"


def is_static(folder: Path) -> bool:
    """Whether the model is of model2vec: a vector per token, and nothing else."""
    if read_config(folder).get("model_type") == "model2vec":
        return True
    modules = _read_json(folder, MODULES_FILE) or [{}]
    return str(modules[0].get("type", "")).endswith(".StaticEmbedding")


def find_file(folder: Path, *names: str) -> Path:
    """The first of some files that a folder has.

    Raises:
        ModelFolderError: it has none of them.
    """
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ModelFolderError(f"{folder} has no {' or '.join(names)}, but {_listed(folder)}")
    return found


def class_names(folder: Path) -> tuple[str, ...]:
    """The names of a classifier's outputs, in their order: `id2label` of its config, `score` of one without classes.

    Raises:
        ModelFolderError: the config names none.
    """
    config = read_config(folder)
    named = config.get("id2label")
    if not isinstance(named, Mapping) or not named:
        if config.get("num_labels") == 1:
            return ("score",)
        raise ModelFolderError(f"{folder / CONFIG_FILE} has no `id2label`; a classifier's config names its classes")
    names = tuple(str(named[key]) for key in sorted(named, key=int))
    return ("score",) if len(names) == 1 and names[0].startswith("LABEL_") else names


def most_tokens(folder: Path) -> int:
    """How many tokens a model reads at a time: the least of what its files say, 512 where they say nothing."""
    config = read_config(folder)
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and config.get("model_type") in OFFSET_POSITIONS:
        positions -= 1 + int(config.get("pad_token_id") or 0)
    said = [
        positions,
        (_read_json(folder, "sentence_bert_config.json") or {}).get("max_seq_length"),
        (_read_json(folder, "tokenizer_config.json") or {}).get("model_max_length"),
        config.get("max_length") if is_static(folder) else None,
    ]
    known = [int(number) for number in said if isinstance(number, int | float) and 0 < number <= MOST_TOKENS]
    return min(known, default=512)


OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "data2vec-text", "longformer", "mpnet")
"""Kinds of models that count positions from behind that of padding, so that `max_position_embeddings` has as many more
(transformers, modeling_roberta.py: create_position_ids_from_input_ids)."""
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def token_pooling(folder: Path) -> str:
    """How the vectors of a text's tokens make its own: `mean`, `cls`, `max` or `last`; `mean` where no file says it.

    Raises:
        ModelFolderError: it is made otherwise, or goes through layers besides.
    """
    modules = _read_json(folder, MODULES_FILE) or []
    kinds = {str(module["type"]).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    unknown = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if unknown is not None:
        raise ModelFolderError(
            f"{folder / MODULES_FILE} has a part {unknown!r}; those that are known are Transformer, "
            "Pooling and Normalize"
        )
    settings = _read_json(folder, f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else None
    if settings is None:
        return "mean"
    modes = [how for key, how in POOLING_MODES.items() if settings.get(key)]
    said = settings.get("pooling_mode")
    if isinstance(said, str):
        modes = ["last" if said == "lasttoken" else said]
    if len(modes) != 1 or modes[0] not in POOLING_MODES.values():
        raise ModelFolderError(
            f"{folder}/{kinds['Pooling']}/config.json pools tokens by {settings}; what is known is "
            f"one of {', '.join(sorted(set(POOLING_MODES.values())))}"
        )
    return modes[0]


def needed(module: str) -> Any:
    """A module of the extra `models`.

    Raises:
        ModelFolderError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelFolderError(
            f"reading documents with this model takes {module}, which is not installed ({error}): "
            "pip install 'gristmill[models]'"
        ) from error


def check_installed(*modules: str) -> None:
    """Raise ModelFolderError where one of some modules is not installed; none that is there is imported."""
    for module in modules:
        if find_spec(module) is None:
            needed(module)


def folder_sha256(path: str) -> str:
    """A hash of what a folder, or a file, holds, so that another model at the same place is not taken for it."""
    location = as_path(path)
    if not location.is_dir():
        return sha256_file(location)
    digest = hashlib.sha256()
    for file in sorted(location.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(location).as_posix()} {sha256_file(file)}\n".encode())
    return digest.hexdigest()
