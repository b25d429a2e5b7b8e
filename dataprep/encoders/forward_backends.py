"""Forward passes of models, by torch, by ONNX Runtime or, for static token vectors, by
NumPy.

A network maps windows of tokens to a row of numbers each. Every calling thread computes
with a single thread: there are many workers, and splitting a matrix product over
threads changes the order of its sums.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from gristmill.dataprep.encoders.model_folders import (
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    ModelFolderError,
    find_file,
    has_first_token_head,
    is_static,
    needed,
    read_config,
    token_pooling,
)
from gristmill.mixtures.schema.encoder_settings import ReadingModel

Task = Literal["classes", "embedding"]
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 2_048, 65_536
"""Tokens per batch. On a CPU a network of 22M parameters reads 5,800 tokens/s with 512
to 4,096 tokens per batch, and 4,700 with 8,192.
"""


class Network(Protocol):
    """Forward pass of a model. Threads may share it."""

    batch_tokens: int
    """Efficient number of tokens per batch."""

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Compute a row of numbers for each of n windows: float32 of shape (n, k).

        Args:
            ids: int64 of shape (n, tokens), padded at the end.
            mask: int64 of shape (n, tokens), 1 for a token and 0 for padding.
        """


def network_packages(folder: Path, section: ReadingModel) -> tuple[str, ...]:
    """Packages required to compute with the model of a folder."""
    if is_static(folder):
        return ()
    return ("torch", "transformers") if section.onnx is None else ("onnxruntime",)


def load_network(folder: Path, section: ReadingModel, task: Task) -> Network:
    """Load a model.

    Raises:
        ModelFolderError: a file or a package is missing, or they do not match.
    """
    if task == "embedding" and is_static(folder):
        return TokenVectors(folder)
    pooling = token_pooling(folder) if task == "embedding" else None
    if section.onnx is not None:
        return OnnxNetwork(folder, section.onnx, section, pooling)
    return TorchNetwork(folder, section, pooling)


class TokenVectors:
    """Static vectors of tokens, averaged per text (model2vec); unknown tokens have zero
    vectors.
    """

    batch_tokens = CPU_BATCH_TOKENS

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        tensors = load_file(find_file(folder, WEIGHTS_FILE))
        if "embeddings" not in tensors:
            raise ModelFolderError(
                f"{folder / WEIGHTS_FILE} has {', '.join(sorted(tensors))}, and no "
                "`embeddings`; model2vec's save_pretrained writes them"
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
        """Implement Network. The mean includes unknown tokens, so its length has no
        meaning.
        """
        return pool_tokens(self._vectors[ids], mask, "mean")


class TorchNetwork:
    """Network of transformers: a sequence classifier, or an encoder whose last hidden
    states are pooled.
    """

    def __init__(
        self, folder: Path, section: ReadingModel, pooling: str | None
    ) -> None:
        # Silence deprecation warnings of torch for packages that transformers imports;
        # the user cannot act on them.
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        transformers = needed("transformers")
        self._torch = needed("torch")
        on_gpu = section.device == "gpu"
        if on_gpu and not self._torch.cuda.is_available():
            raise ModelFolderError(
                f"{section.path}: `device: gpu`, and torch finds "
                "none; set `device: cpu`"
            )
        self.batch_tokens = section.batch_tokens or (
            GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS
        )
        self._device = "cuda" if on_gpu else "cpu"
        dtype = section.dtype or ("bfloat16" if on_gpu else "float32")
        kind = getattr(self._torch, dtype)
        self._pooling = pooling
        self._of_thread = threading.local()
        transformers.utils.logging.disable_progress_bar()
        self._head: Any = None
        try:
            if pooling is None and has_first_token_head(read_config(folder)):
                model = self._load_with_head(folder)
            else:
                model_class = (
                    transformers.AutoModel
                    if pooling
                    else transformers.AutoModelForSequenceClassification
                )
                model = model_class.from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    dtype=kind,
                )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelFolderError(
                f"{folder}: transformers cannot load its model: {error}"
            ) from error
        self._model = model.eval().to(self._device)
        if self._head is not None:
            model.to(kind)
            self._head.to(self._device, kind)

    def _load_with_head(self, folder: Path) -> Any:
        """Load an encoder, and the head of `has_first_token_head`."""
        transformers = needed("transformers")
        tensors = needed("safetensors.torch").load_file(find_file(folder, WEIGHTS_FILE))
        self._head = self._torch.nn.Linear(*tensors["fc.weight"].shape[::-1])
        self._head.load_state_dict(
            {name: tensors.pop(f"fc.{name}") for name in ("weight", "bias")}
        )
        config = transformers.AutoConfig.from_pretrained(str(folder))
        model = transformers.AutoModel.from_config(config)
        loaded = model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
            strict=False,
        )
        if loaded.missing_keys:
            raise KeyError(f"{WEIGHTS_FILE} lacks {loaded.missing_keys[0]}")
        return model

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Network."""
        torch = self._torch
        if not hasattr(self._of_thread, "set"):
            torch.set_num_threads(1)
            self._of_thread.set = True
        with torch.inference_mode():
            inputs = {
                "input_ids": torch.from_numpy(ids).to(self._device),
                "attention_mask": torch.from_numpy(mask).to(self._device),
            }
            output = self._model(**inputs)
            if self._head is not None:
                states = self._head(output.last_hidden_state[:, 0])
            else:
                states = (
                    output.logits if self._pooling is None else output.last_hidden_state
                )
            values = states.float().cpu().numpy()
        return pool_tokens(values, mask, self._pooling)


class OnnxNetwork:
    """Network of ONNX Runtime on a CPU."""

    def __init__(
        self, folder: Path, file: str, section: ReadingModel, pooling: str | None
    ) -> None:
        runtime = needed("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = runtime.InferenceSession(
            str(find_file(folder, file)), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [node.name for node in self._session.get_inputs()]
        self._pooling = pooling
        self.batch_tokens = section.batch_tokens or CPU_BATCH_TOKENS

    def outputs(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See Network."""
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(ids),
        }
        output = self._session.run(None, {name: inputs[name] for name in self._inputs})[
            0
        ]
        return pool_tokens(output, mask, self._pooling)


def pool_tokens(states: np.ndarray, mask: np.ndarray, how: str | None) -> np.ndarray:
    """Pool the vectors of tokens: float32 of shape (n, d).

    Args:
        states: float32 of shape (n, tokens, d).
        mask: int64 of shape (n, tokens), 1 for a token.
        how: `mean`, `max`, `cls` (the first token's) or `last`; None for states that
            are pooled already.
    """
    if how is None:
        return states
    if how == "cls":
        return states[:, 0]
    if how == "last":
        return states[np.arange(len(states)), mask.sum(1) - 1]
    if how == "max":
        return np.where(mask[:, :, None] > 0, states, -np.inf).max(1).astype(np.float32)
    summed: np.ndarray = np.einsum("ntd,nt->nd", states, mask.astype(np.float32))
    return summed / np.maximum(mask.sum(1), 1)[:, None].astype(np.float32)
