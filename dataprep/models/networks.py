"""The forward pass of a model, by torch, by ONNX Runtime or, for vectors of tokens alone, by NumPy.

A network takes windows of tokens and gives a row of numbers for each. Every network computes with one thread for each
thread that calls it: workers are many, and a product that is cut for more threads is added up otherwise.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from gristmill.dataprep.models.model_folders import (
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    ModelFolderError,
    find_file,
    is_static,
    needed,
    token_pooling,
)
from gristmill.mixtures.reading_model import ReadingModel

Task = Literal["classes", "embedding"]
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 2_048, 65_536
"""On a CPU a network of 22M parameters reads 5,800 tokens/s at 512 to 4,096 tokens a batch, and 4,700 at 8,192."""


class Network(Protocol):
    """A model's forward pass. Threads may share it."""

    batch_tokens: int
    """Tokens that are well read at once."""

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """A row of numbers for each of n windows: float32 of shape (n, k).

        Args:
            ids: int64 of shape (n, tokens), filled up at the ends.
            mask: the same of 1 for a token and 0 for filling.
        """


def network_packages(folder: Path, section: ReadingModel) -> tuple[str, ...]:
    """What must be installed to compute with the model of a folder."""
    if is_static(folder):
        return ()
    return ("torch", "transformers") if section.onnx is None else ("onnxruntime",)


def load_network(folder: Path, section: ReadingModel, task: Task, static: bool) -> Network:
    """Load a model.

    Raises:
        ModelFolderError: a file or a package is missing, or they do not fit.
    """
    if static:
        return TokenVectors(folder)
    pooling = token_pooling(folder) if task == "embedding" else None
    if section.onnx is not None:
        return OnnxNetwork(folder, section.onnx, section, pooling)
    return TorchNetwork(folder, section, pooling)


class TokenVectors:
    """A vector for each token, and of a text their mean (model2vec): unknown tokens have none."""

    batch_tokens = CPU_BATCH_TOKENS

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        tensors = load_file(find_file(folder, WEIGHTS_FILE))
        if "embeddings" not in tensors:
            raise ModelFolderError(
                f"{folder / WEIGHTS_FILE} has {', '.join(sorted(tensors))}, and no `embeddings`; "
                "model2vec's save_pretrained writes them"
            )
        vectors = tensors["embeddings"].astype(np.float32)
        if "mapping" in tensors:
            vectors = vectors[tensors["mapping"]]
        if "weights" in tensors:
            vectors = vectors * tensors["weights"].astype(np.float32)[:, None]
        tokenizer = Tokenizer.from_file(str(find_file(folder, TOKENIZER_FILE)))
        unknown = getattr(tokenizer.model, "unk_token", None)
        if unknown is not None and tokenizer.token_to_id(unknown) is not None:
            vectors[tokenizer.token_to_id(unknown)] = 0.0
        self._vectors = vectors

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Network. A mean is of all tokens, known or not: its length means nothing."""
        summed: np.ndarray = np.einsum("ntd,nt->nd", self._vectors[ids], mask.astype(np.float32))
        return summed / np.maximum(mask.sum(1), 1)[:, None].astype(np.float32)


class TorchNetwork:
    """A network of transformers: one for classes, or one whose last layer's vectors of tokens are pooled."""

    def __init__(self, folder: Path, section: ReadingModel, pooling: str | None) -> None:
        # Packages that transformers imports are told there of changes in torch that are no concern of who runs this.
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        transformers, self._torch = needed("transformers"), needed("torch")
        on_gpu = section.device == "gpu"
        if on_gpu and not self._torch.cuda.is_available():
            raise ModelFolderError(f"{section.path}: `device: gpu`, and torch finds none; set `device: cpu`")
        self.batch_tokens = section.batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)
        self._device = "cuda" if on_gpu else "cpu"
        dtype = section.dtype or ("bfloat16" if on_gpu else "float32")
        self._pooling = pooling
        self._of_thread = threading.local()
        kind = transformers.AutoModel if pooling else transformers.AutoModelForSequenceClassification
        transformers.utils.logging.disable_progress_bar()
        try:
            model = kind.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, dtype=getattr(self._torch, dtype)
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelFolderError(f"{folder}: transformers cannot load its model: {error}") from error
        self._model = model.eval().to(self._device)

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Network."""
        torch = self._torch
        if not hasattr(self._of_thread, "set"):
            torch.set_num_threads(1)
            self._of_thread.set = True
        with torch.inference_mode():
            given = {
                "input_ids": torch.from_numpy(ids).to(self._device),
                "attention_mask": torch.from_numpy(mask).to(self._device),
            }
            found = self._model(**given)
            if self._pooling is None:
                return found.logits.float().cpu().numpy()
            states = found.last_hidden_state.float().cpu().numpy()
        return pool_tokens(states, mask, self._pooling)


class OnnxNetwork:
    """The same by ONNX Runtime, on a CPU."""

    def __init__(self, folder: Path, file: str, section: ReadingModel, pooling: str | None) -> None:
        runtime = needed("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = runtime.InferenceSession(
            str(find_file(folder, file)), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._pooling = pooling
        self.batch_tokens = section.batch_tokens or CPU_BATCH_TOKENS

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Network."""
        known: dict[str, np.ndarray] = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        found: Any = self._session.run(None, {name: known[name] for name in self._inputs})[0]
        return found if self._pooling is None else pool_tokens(found, mask, self._pooling)


def pool_tokens(states: np.ndarray, mask: np.ndarray, how: str) -> np.ndarray:
    """The vectors of tokens put together: float32 of shape (n, d).

    Args:
        states: float32 of shape (n, tokens, d).
        mask: int64 of shape (n, tokens), 1 for a token.
        how: `mean`, `max`, `cls` (the first token's) or `last`.
    """
    if how == "cls":
        return states[:, 0]
    if how == "last":
        return states[np.arange(len(states)), mask.sum(1) - 1]
    if how == "max":
        found: np.ndarray = np.where(mask[:, :, None] > 0, states, -np.inf).max(1).astype(np.float32)
        return found
    summed: np.ndarray = np.einsum("ntd,nt->nd", states, mask.astype(np.float32))
    return summed / np.maximum(mask.sum(1), 1)[:, None].astype(np.float32)
