"""Model folders named on the command line: an exported folder, a training stage's
folder, or a manifest's last model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gristmill.core.files import as_path, find_json
from gristmill.core.stage_context import read_inputs
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER as TOKENIZER_STAGE

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PLACES = ("", "model", "data", "data/model")
"""Places of a model in a folder: of an export, in a training's data, in a stage's
folder.
"""


class ModelNotFoundError(ValueError):
    """A folder or manifest without a model, or a model without a tokenizer."""


@dataclass(frozen=True)
class ModelFolders:
    """Folders of a model and of the tokenizer that it was trained with."""

    weights: Path
    tokenizer: Path


def find_model(model: str, tokenizer: str | None) -> ModelFolders:
    """Find the model in a folder, and its tokenizer.

    Args:
        model: an exported folder, one that transformers wrote, or a training stage's
            folder (or its `data`).
        tokenizer: a folder with tokenizer.json; beside the model, or that of the
            training, if absent.

    Raises:
        ModelNotFoundError: the message names the places that were searched.
    """
    root = as_path(model)
    folder = next(
        (root / place for place in PLACES if (root / place / CONFIG).exists()), None
    )
    if folder is None:
        raise ModelNotFoundError(
            f"{root / CONFIG} does not exist, nor does it in {root}/model or "
            f"{root}/data; a model is a folder with config.json and model.safetensors, "
            "the folder of a training stage, or a manifest (*.yaml)"
        )
    if tokenizer is not None:
        return ModelFolders(folder, _given_tokenizer(tokenizer))
    if (folder / TOKENIZER).exists():
        return ModelFolders(folder, folder)
    for parent in list(folder.parents)[:2]:
        record = find_json(parent / "stage.json")
        inputs = read_inputs(record) if record else {}
        if TOKENIZER_STAGE in inputs:
            recorded = inputs[TOKENIZER_STAGE]
            # in the same store, if that was moved
            name = recorded.parent.name
            moved = parent.parent.parent / TOKENIZER_STAGE / name / "data"
            for candidate in (recorded, moved):
                if (candidate / TOKENIZER).exists():
                    return ModelFolders(folder, candidate)
    raise ModelNotFoundError(
        f"{folder} has no {TOKENIZER}, and no record of the stage that trained the "
        "model; copy its tokenizer's files there, or name their folder with --tokenizer"
    )


def find_trained(session: Session, tokenizer: str | None) -> ModelFolders:
    """Find the last model that a manifest has trained.

    Raises:
        ModelNotFoundError: the manifest trains no model, none is committed yet, or the
            given tokenizer does not exist.
    """
    if session.manifest.pretrain is None and session.manifest.model is None:
        raise ModelNotFoundError(
            f"{session.manifest_file} has no `pretrain:` section and no `model:`, so "
            "it has no model; name a model's folder, or a manifest that trains one"
        )
    outputs = [
        session.committed(name)
        for name, node in session.plan.items()
        if node.stage.output == "model"
    ]
    trained = next((output for output in reversed(outputs) if output), None)
    own_tokenizer = session.committed(TOKENIZER_STAGE)
    if trained is None or own_tokenizer is None:
        raise ModelNotFoundError(
            f"{session.manifest_file}: no model is trained yet; "
            f"run: {session.command('run')}"
        )
    folder = own_tokenizer.data if tokenizer is None else _given_tokenizer(tokenizer)
    return ModelFolders(trained.data / "model", folder)


def _given_tokenizer(folder: str) -> Path:
    """Folder of a tokenizer named on the command line.

    Raises:
        ModelNotFoundError: it has none.
    """
    path = as_path(folder)
    if not (path / TOKENIZER).exists():
        raise ModelNotFoundError(
            f"{path} has no {TOKENIZER}; give the folder that holds one, or "
            "leave --tokenizer out for the model's own"
        )
    return path
