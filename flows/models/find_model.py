"""What a MODEL on the command line means: an exported folder, a training stage's, or a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.files import as_path, read_json
from gristmill.core.stage_context import read_inputs
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER as TOKENIZER_STAGE
from gristmill.tokenize.encoding.chat_formatters import FORMATTER_FILE

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PLACES = ("", "model", "data", "data/model")
"""Below the folder that is given, where a model may lie: an export, a training's data, or the folder of a stage."""


class ModelNotFoundError(ValueError):
    """There is no model, or no tokenizer for it."""


@dataclass(frozen=True)
class ModelFolders:
    """Where a model is, and the tokenizer that it was trained with."""

    weights: Path
    tokenizer: Path


def name_of(model: str) -> str:
    """What a model is called where nobody names it: as its manifest, its folder, or the run whose stage made it."""
    given = Path(model).resolve()
    named = next((place for place in (given, *given.parents) if place.name not in PLACES), given)
    # A manifest has a suffix; a folder's name may hold any dots.
    return named.stem if named.suffix in (".yaml", ".yml") else named.name.partition("--")[0]


def find_model(model: str, tokenizer: str | None) -> ModelFolders:
    """The folders of a model that is a folder.

    Args:
        model: an exported folder, one that transformers wrote, or a training stage's folder (or its `data`).
        tokenizer: a folder with tokenizer.json; beside the model, or that of the training, if absent.

    Raises:
        ModelNotFoundError: with where was looked.
    """
    given = as_path(model)
    folder = next((given / place for place in PLACES if (given / place / CONFIG).exists()), None)
    if folder is None:
        raise ModelNotFoundError(
            f"{given / CONFIG} does not exist, nor does it in {given}/model or {given}/data; a "
            "model is a folder with config.json and model.safetensors, the folder of a training "
            "stage, or a manifest (*.yaml)"
        )
    if tokenizer is not None:
        chosen = as_path(tokenizer)
        if not (chosen / TOKENIZER).exists():
            raise ModelNotFoundError(f"{chosen} has no {TOKENIZER}")
        return ModelFolders(folder, _without_code(chosen))
    for candidate in (folder, *_of_its_stage(folder)):
        if (candidate / TOKENIZER).exists():
            return ModelFolders(folder, _without_code(candidate))
    raise ModelNotFoundError(
        f"{folder} has no {TOKENIZER}, and no stage is recorded that made it; give the folder of "
        "its tokenizer with --tokenizer"
    )


def _without_code(tokenizer: Path) -> Path:
    """A tokenizer's folder, unless it holds code: a folder may be anybody's, a manifest names the code that it runs.

    Raises:
        ModelNotFoundError: a function writes its conversations.
    """
    if (tokenizer / FORMATTER_FILE).exists():
        function = read_json(tokenizer / FORMATTER_FILE)["use"]["function"]
        raise ModelNotFoundError(
            f"{tokenizer}: a function writes the conversations of this model ({function}), and "
            "code runs only where a manifest names it; give the manifest instead of the folder, "
            "or export the model"
        )
    return tokenizer


def find_trained(session: Session, tokenizer: str | None) -> ModelFolders:
    """The last model that a manifest has trained.

    Raises:
        ModelNotFoundError: none is committed yet, or none ever will, or the named tokenizer is not there.
    """
    if session.manifest.pretrain is None and session.manifest.model is None:
        raise ModelNotFoundError(
            f"{session.manifest_file} has no `pretrain:` section and no `model:`, so it has no "
            "model; name a model's folder, or a manifest that trains one"
        )
    makers = [name for name, node in session.plan.items() if node.stage.makes_model]
    trained = next((folder for name in reversed(makers) if (folder := session.committed(name)) is not None), None)
    made = session.committed(TOKENIZER_STAGE)
    if trained is None or made is None:
        raise ModelNotFoundError(f"{session.manifest_file}: no model is trained yet; run: {session.command('run')}")
    if tokenizer is not None and not (as_path(tokenizer) / "tokenizer.json").is_file():
        raise ModelNotFoundError(
            f"{tokenizer} has no tokenizer.json; give the folder that holds one, or leave "
            "--tokenizer out for the model's own"
        )
    return ModelFolders(trained.data / "model", made.data if tokenizer is None else _without_code(as_path(tokenizer)))


def _of_its_stage(folder: Path) -> Iterator[Path]:
    """The tokenizer's folder as the stage that made a model recorded it, or in the same store if that was moved."""
    for parent in list(folder.parents)[:2]:
        record = parent / "stage.json"
        recorded = read_inputs(read_json(record)).get(TOKENIZER_STAGE) if record.exists() else None
        if recorded is not None:
            yield recorded
            yield parent.parent.parent / TOKENIZER_STAGE / recorded.parent.name / "data"
