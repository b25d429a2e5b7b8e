"""Sentence embeddings: a vector of length 1 for each text, from a model's folder.

embedder = load_embedder(ReadingModel(path="models/all-MiniLM-L6-v2"))
vectors = embedder.embed(["a text", "another one"])  # float32 of shape (2, 384)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gristmill.dataprep.models.model_folders import check_installed, is_static, model_folder, token_pooling
from gristmill.dataprep.models.networks import load_network, network_packages
from gristmill.dataprep.models.read_texts import Read, TextReader
from gristmill.dataprep.models.token_windows import WindowTokenizer
from gristmill.mixtures.reading_model import ReadingModel


class Embedder:
    """Gives texts vectors whose products are their cosines. Threads may share it.

    Attributes:
        dim: numbers of a vector.
    """

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self.dim = reader.read([""]).rows.shape[1]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of n texts: float32 of shape (n, dim), each of length 1; of zeros where a text has no token.

        How the texts are spread over calls changes a number by less than 1e-5 (in float32).
        """
        return self.read(texts).rows if len(texts) else np.zeros((0, self.dim), np.float32)

    def read(self, texts: Sequence[str]) -> Read:
        """The same of n texts, n > 0, with what was read of each."""
        found = self._reader.read(texts)
        lengths = np.sqrt(np.einsum("nd,nd->n", found.rows, found.rows, dtype=np.float64))
        return replace(found, rows=(found.rows / np.where(lengths > 0, lengths, 1.0)[:, None]).astype(np.float32))


def check_embedder(section: ReadingModel) -> None:
    """Raise ModelFolderError where the files of a folder, or what is installed, show that it gives no vectors; nothing
    is loaded."""
    folder = model_folder(section.path)
    if not is_static(folder):
        token_pooling(folder)
    check_installed(*network_packages(folder, section))


@lru_cache(maxsize=2)
def load_embedder(section: ReadingModel, sha256: str = "") -> Embedder:
    """Load a model of sentence embeddings, once per process.

    Args:
        section: a folder of transformers' or of sentence-transformers' format, or one of model2vec's.
        sha256: what it holds (`model_folders.folder_sha256`), so that another model at the same place is not taken
            for it.

    Raises:
        gristmill.dataprep.models.model_folders.ModelFolderError: a file or a package is missing, or it is no such
            model.
    """
    folder = model_folder(section.path)
    network = load_network(folder, section, "embedding", is_static(folder))
    return Embedder(TextReader(WindowTokenizer(folder, section), network, section.pool))
