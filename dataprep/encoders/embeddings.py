"""Sentence embeddings: a vector of length 1 for each text, from a model's folder.

embedder = load_embedder(ReadingModel(path="models/all-MiniLM-L6-v2"))
vectors = embedder.embed(["a text", "another one"])  # float32 of shape (2, 384)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from gristmill.dataprep.encoders.batched_inference import Read, TextReader
from gristmill.dataprep.encoders.forward_backends import load_network, network_packages
from gristmill.dataprep.encoders.model_folders import (
    check_installed,
    is_static,
    model_folder,
    token_pooling,
)
from gristmill.dataprep.encoders.token_windows import WindowTokenizer
from gristmill.mixtures.schema.encoder_settings import ReadingModel


class Embedder:
    """Embedding model whose vectors have length 1, so that dot products are cosines.
    Threads may share it.

    Attributes:
        dim: dimension of the vectors.
    """

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self.dim = reader.read([""]).rows.shape[1]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed n texts: float32 of shape (n, dim), each row of length 1, or all zeros
        for a text without tokens.

        The batching of texts into calls changes an element by less than 1e-5 (in
        float32).
        """
        return (
            self.read(texts).rows if len(texts) else np.zeros((0, self.dim), np.float32)
        )

    def read(self, texts: Sequence[str]) -> Read:
        """Embed n texts, n > 0, and report the tokens and windows read of each."""
        texts_read = self._reader.read(texts)
        lengths = np.sqrt(
            np.einsum("nd,nd->n", texts_read.rows, texts_read.rows, dtype=np.float64)
        )
        rows = texts_read.rows / np.where(lengths > 0, lengths, 1.0)[:, None]
        return texts_read._replace(rows=rows.astype(np.float32))


def check_embedder(section: ReadingModel) -> None:
    """Raise ModelFolderError if the folder is not an embedding model or packages are
    missing, without loading it.
    """
    folder = model_folder(section.path)
    if not is_static(folder):
        token_pooling(folder)
    check_installed(*network_packages(folder, section))


@lru_cache(maxsize=2)
def load_embedder(section: ReadingModel, sha256: str = "") -> Embedder:
    """Load a model of sentence embeddings, once per process.

    Args:
        section: settings with a folder in the format of transformers,
            sentence-transformers or model2vec.
        sha256: hash of the folder (`model_folders.folder_sha256`), so that a different
            model at the same path is loaded again.

    Raises:
        gristmill.dataprep.encoders.model_folders.ModelFolderError: a file or a package
            is missing, or the folder is not an embedding model.
    """
    folder = model_folder(section.path)
    network = load_network(folder, section, "embedding")
    return Embedder(TextReader(WindowTokenizer(folder, section), network, section.pool))
