"""Stage `model`: an existing model in the format that later stages read.

Output: `model/config.json`, `model/model.safetensors` (float32), as of pre-training, so
that later stages do not depend on whether the run pre-trained.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gristmill.core.files import as_path, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.model import GivenModel
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.train.models.encoder import model_of
from gristmill.train.models.model_config import shape_to_json
from gristmill.train.models.tensor_files import WEIGHTS_FILE, Planned, write_tensors
from gristmill.train.models.weights import (
    SHAPE_FILE,
    WeightsError,
    check_model,
    stored,
    stored_tensors,
)
from gristmill.train.stages.stage_inputs import MODEL, Inputs
from gristmill.train.stages.trained_models import ModelFigures, describe_model


class GivenModelSummary(ModelFigures):
    """Summary of the stage; `path` is the folder that was copied."""

    path: str


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> GivenModelSummary:
    """Copy the model tensor by tensor; one plain process.

    Raises:
        WeightsError: a file is missing or damaged, or the tokenizer has more ids than
            the model.
        gristmill.train.models.hf_configs.UnknownArchitectureError: the architecture is
            not supported.
    """
    given = GivenModel.model_validate(config)
    folder = as_path(given.path)
    shape = check_model(folder, None, given.implementation)
    tokenizer = load(inputs["tokenizer"])
    if tokenizer.vocab_size > shape.vocab_size:
        raise WeightsError(
            f"model.path {folder}: the model has {shape.vocab_size} ids, but the "
            f"tokenizer has {tokenizer.vocab_size}; give its own tokenizer, or where "
            "special tokens of a chat template were added, a template that uses none "
            "but the tokenizer's own (tokenizer.chat_template)"
        )
    read = stored(folder, given.implementation)
    write_tensors(
        out / MODEL / WEIGHTS_FILE,
        {
            name: Planned(
                torch.float32, tuple(tensor.shape), partial(read, name, tensor.shape)
            )
            for name, tensor in stored_tensors(model_of(shape)).items()
        },
    )
    write_json(out / MODEL / SHAPE_FILE, shape_to_json(shape))
    return {**describe_model(shape, shape.sequence_length), "path": str(config["path"])}
