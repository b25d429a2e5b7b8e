"""Scoring of documents by a language model for `quality`, which loads this scorer by
name.

The preparing layer must import and run without torch, and may not import this one. So
`dataprep/quality/scorers.py` holds the name of `load_scorer` as a string, and imports
it only in a task whose manifest has `perplexity.model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gristmill.tokenize.encoding.tokenizer import TOKENIZER_FILE, load
from gristmill.train.eval.held_out import LARGEST_EXPONENT
from gristmill.train.eval.likelihood import Request, score_requests
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import INDEX_FILE, WEIGHTS_FILE, load_model

Scorer = Callable[[Sequence[str]], dict[str, np.ndarray]]
"""A function from n texts to `model_perplexity` and `bits_per_byte`, float64 of shape
(n,), NaN for empty texts.
"""


class ModelFolderError(ValueError):
    """A folder that does not hold a language model for scoring text."""


@lru_cache(maxsize=1)
def load_scorer(folder: str, sha256: str, max_tokens: int) -> Scorer:
    """Load the scorer of a model, once per process.

    Args:
        folder: output of `export`: config.json, model.safetensors and tokenizer.json.
        sha256: of its weights, so that another model in the same folder is loaded.
        max_tokens: most tokens scored per text.

    Raises:
        ModelFolderError: a file is missing, or model and tokenizer do not match.
        gristmill.tokenize.encoding.tokenizer.TokenizerError: it has no token that ends a
            text.
    """
    path = Path(folder)
    weights = INDEX_FILE if (path / INDEX_FILE).is_file() else WEIGHTS_FILE
    missing = [
        name
        for name in ("config.json", weights, TOKENIZER_FILE)
        if not (path / name).is_file()
    ]
    if missing:
        raise ModelFolderError(
            f"{folder} has no {', '.join(missing)}; give the folder that the stage "
            "export wrote"
        )
    # Workers score documents one by one in parallel: threads within a product would
    # only vary its rounding.
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, device)
    tokenizer = load(path)
    token_bytes = tokenizer.token_bytes
    if len(token_bytes) > model.shape.vocab_size:
        raise ModelFolderError(
            f"{folder}: its tokenizer has {len(token_bytes)} tokens, its model "
            f"{model.shape.vocab_size}: they do not belong together"
        )

    def score(texts: Sequence[str]) -> dict[str, np.ndarray]:
        ids = [
            np.array([tokenizer.eos, *encoding.ids[:max_tokens]], np.int64)
            for encoding in tokenizer.encode(texts)
        ]
        nll = np.array([score_document(model, row) for row in ids])
        tokens = np.array([len(row) - 1 for row in ids], np.float64)
        sizes = np.array([token_bytes[row[1:]].sum() for row in ids], np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "model_perplexity": np.exp(np.minimum(nll / tokens, LARGEST_EXPONENT)),
                "bits_per_byte": np.where(sizes > 0, nll / math.log(2) / sizes, np.nan),
            }

    return score


def score_document(model: Llama, ids: np.ndarray) -> float:
    """Negative log-likelihood, in nats, of all tokens except the first.

    Windows of the model's length overlap by one token, so every token is predicted
    once, from at least one other.
    """
    length = model.shape.sequence_length
    windows = [
        ids[start : start + length].tolist()
        for start in range(0, len(ids) - 1, length - 1)
    ]
    requests = [Request((first,), tuple(scored)) for first, *scored in windows]
    return -sum(score.logp for score in score_requests(model, requests))
