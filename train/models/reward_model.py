"""Reward model: a decoder whose output layer is a single row, which scores a
conversation.

On disk it is Hugging Face's `LlamaForSequenceClassification` (or that of the decoder's
family) with one label: the decoder's tensors and `score.weight` (1, d), without the
vocabulary's output matrix.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.core.files import read_json, write_json
from gristmill.train.models.hf_configs import (
    ARCHITECTURES,
    family_of,
    hf_config,
    is_scorer,
    planned_for_hf,
)
from gristmill.train.models.initialisation import generator_of
from gristmill.train.models.model_config import ConfigJson, Shape
from gristmill.train.models.tensor_files import Tensors, write_tensors
from gristmill.train.models.transformer import Head, Llama, OutputLayer
from gristmill.train.models.weights import (
    SHAPE_FILE,
    WEIGHTS_FILE,
    TensorOf,
    WeightsError,
    fill_from,
    read_shape,
    stored,
)

SCORE = "score.weight"


class RewardModel(Llama):
    """Decoder with `score.weight` (1, d) as its output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if not shape.tied_embeddings:
            del self.lm_head
        self.score = OutputLayer(shape.width, 1, bias=False)

    def predict(self, hidden: Tensor, head: Head) -> Any:
        """Apply a head to hidden states (n, t, d) and the row of score weights."""
        return self.score(hidden, head)


def scores(model: nn.Module, ids: Tensor, pad: int) -> Tensor:
    """Score of each row by a reward model, (n,) float32, differentiable if gradients
    are enabled.

    The score of a row is that of its last token other than `pad`, as in transformers'
    sequence classification.

    Args:
        model: a reward model, sharded or not.
        ids: (n, t) int64, padded on the right.
        pad: the padding id.
    """
    return model(ids, partial(scores_at, places=last_tokens(ids, pad)))


def last_tokens(ids: Tensor, pad: int) -> Tensor:
    """Index of the last token of each row that is not `pad`, (n,) int64; 0 in a row of
    padding.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    return (places * (ids != pad)).amax(dim=1)


def scores_at(hidden: Tensor, matrix: Tensor, places: Tensor) -> Tensor:
    """Scores (n,) float32 at one position per row.

    Args:
        hidden: (n, t, d).
        matrix: (1, d).
        places: (n,) int64.
    """
    last_hidden = hidden[torch.arange(len(hidden), device=hidden.device), places]
    # Not a view, as FSDP attaches its backward hooks to the outputs of a model.
    return last_hidden.float() @ matrix[0].float()


def with_new_score(tensor_of: TensorOf, seed: int) -> TensorOf:
    """Source of the tensors of a new reward model: those of a decoder, and a random
    score row.

    The row is normal with variance 1 / (d + 1) (Stiennon et al. 2020, appendix B.1), so
    that initial scores have a standard deviation of about one.
    """

    def tensor_of_reward_model(name: str, size: torch.Size) -> Tensor:
        if name != SCORE:
            return tensor_of(name, size)
        return torch.empty(size).normal_(
            0.0, 1 / math.sqrt(size[1] + 1), generator=generator_of(seed, name)
        )

    return tensor_of_reward_model


def save_reward_model(
    folder: Path,
    shape: Shape,
    tensors: Tensors,
    stops: list[int],
    pad: int,
) -> None:
    """Write a reward model in float32 in transformers' format.

    Args:
        folder: destination.
        shape: of the decoder.
        tensors: full tensors, by our names.
        stops: ids that end a turn.
        pad: id of padding, from which transformers derives the end of a row.
    """
    architecture = ARCHITECTURES[family_of(shape)].replace(
        "ForCausalLM", "ForSequenceClassification"
    )
    config = hf_config(shape, "float32", stops, pad) | {
        "architectures": [architecture],
        "num_labels": 1,
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }
    sizes = {name: tensors[name].shape for name in sorted(tensors)}
    planned = planned_for_hf(sizes, tensors.__getitem__, shape, torch.float32)
    write_json(folder / SHAPE_FILE, config)
    write_tensors(folder / WEIGHTS_FILE, planned)


def load_reward_model(folder: Path, device: str = "cpu") -> RewardModel:
    """Load a reward model, ours or of transformers, frozen, in one process; see
    `scores`.

    Raises:
        WeightsError: the folder holds a model that writes text, or one with several
            labels.
        gristmill.train.models.hf_configs.UnknownArchitectureError: the decoder does not
            support it.
    """
    config: ConfigJson = read_json(folder / SHAPE_FILE)
    if not is_scorer(config):
        raise WeightsError(
            f"{folder} is not a reward model: {SHAPE_FILE} names "
            f"{config.get('architectures')}, not a "
            "...ForSequenceClassification; the stage `reward` makes one"
        )
    shape = read_shape(folder, "own")
    assert isinstance(shape, Shape)
    with torch.device("meta"):
        model = RewardModel(shape)
    fill_from(model, stored(folder), device)
    return model
