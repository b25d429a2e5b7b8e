"""Duplicates in meaning, and clusters: the stage `dedup_semantic` against SemDeDup as a plain program of NumPy and
scikit-learn, the stage `cluster` against scikit-learn's k-means and words by their weights.

The vectors are means of word vectors (384 numbers), so that the network, which is the same on both sides
(`annotators`), does not hide the rest. The plain program holds all texts and vectors in memory, and writes nothing; as
SemDeDup's own it learns from all vectors, sorts each cluster, and drops what is alike to any before it; clusters are
named by the words of the largest mean TF-IDF. Texts are paragraphs of documentation, of which every third is an
earlier one in another order. Both compute with one thread; times are of the processor.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataprep.own_steps import write_shard
from benchmarks.installed_texts import CORPUS, paragraphs
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.semantic import cluster, dedup_semantic
from gristmill.dataprep.semantic.cluster_names import WORDS_OF_A_NAME
from gristmill.mixtures.encoder_settings import ReadingModel

DOCUMENTS, WORDS_PER_DOCUMENT, DIM, CLUSTERS = 20_000, 30, 384, 20
THRESHOLD = 0.95
REPEATS = 3


def rows(documents: int = DOCUMENTS, repeats: int = REPEATS) -> Iterator[Row]:
    """Documents per second; the note says how many each side drops."""
    from threadpoolctl import threadpool_limits

    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place, threadpool_limits(1):
        folder = Path(place)
        texts = texts_with_copies(documents)
        model = write_word_vectors(folder / "model", texts)
        write_shard(folder / "ingest", 0, texts)
        found: dict[str, Any] = {}
        numbers = itertools.count()

        def ours(stage: Any, settings: dict[str, Any]) -> None:
            work = folder / f"work{next(numbers)}"
            work.mkdir()
            found["ours"] = stage.run(
                {"ingest": folder / "ingest"},
                {"model": str(model), **settings},
                work / "out",
                Context(work=work, stage="bench", mode="memory", emit=lambda event: None),
            )
            shutil.rmtree(work)

        def plain(program: Callable[[Path, list[str]], Any]) -> None:
            found["plain"] = program(model, texts)

        taken, peer = fastest(
            repeats,
            partial(ours, dedup_semantic, {"threshold": THRESHOLD, "clusters": CLUSTERS}),
            partial(plain, plain_semdedup),
            clock=time.process_time,
        )
        dropped = found["ours"]["counts"]["dropped"]["semantic_duplicate"]
        yield row(
            "dedup_semantic_vs_plain_semdedup",
            documents / taken,
            documents / peer,
            "documents/s",
            f"{dropped:,} and {found['plain']:,} of {documents:,} documents are dropped; {CORPUS}",
        )
        taken, peer = fastest(
            repeats, partial(ours, cluster, {"k": CLUSTERS}), partial(plain, plain_clusters), clock=time.process_time
        )
        sizes = sorted(one["documents"] for one in found["ours"]["domains"])
        yield row(
            "cluster_vs_scikit_learn",
            documents / taken,
            documents / peer,
            "documents/s",
            f"{CLUSTERS} clusters of {sizes[0]:,} to {sizes[-1]:,}, and of {min(found['plain']):,} to "
            f"{max(found['plain']):,} documents; ours learns from {found['ours']['sample']:,} of them, and draws "
            "a map",
        )


def plain_semdedup(model: Path, texts: list[str]) -> int:
    """How many documents SemDeDup drops, the longest of each group kept."""
    from sklearn.cluster import MiniBatchKMeans

    vectors = load_embedder(ReadingModel.model_validate({"path": str(model)})).embed(texts)
    labels = MiniBatchKMeans(CLUSTERS, batch_size=4096, n_init=1, random_state=1).fit_predict(vectors)
    lengths, dropped = np.array([len(text) for text in texts]), 0
    for label in range(CLUSTERS):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(-lengths[members], kind="stable")]
        cosines = np.triu(vectors[members] @ vectors[members].T, 1)
        dropped += int((cosines.max(axis=0, initial=0.0) >= THRESHOLD).sum())
    return dropped


def plain_clusters(model: Path, texts: list[str]) -> list[int]:
    """How many documents each cluster has; they are named besides."""
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = load_embedder(ReadingModel.model_validate({"path": str(model)})).embed(texts)
    labels = MiniBatchKMeans(CLUSTERS, batch_size=4096, n_init=1, random_state=1).fit_predict(vectors)
    counted = TfidfVectorizer(binary=True)
    weights = counted.fit_transform(texts)
    words = counted.get_feature_names_out()
    for label in range(CLUSTERS):
        typical = np.asarray(weights[np.flatnonzero(labels == label)].mean(axis=0)).ravel()
        assert len(" ".join(words[np.argsort(-typical)[:WORDS_OF_A_NAME]]))
    return [int(size) for size in np.bincount(labels, minlength=CLUSTERS)]


def texts_with_copies(documents: int) -> list[str]:
    """Paragraphs of documentation, every third an earlier one in another order."""
    draw, originals = random.Random(6), iter(paragraphs(documents, WORDS_PER_DOCUMENT))
    texts: list[str] = []
    for number in range(documents):
        words = draw.choice(texts).split() if number % 3 == 2 else next(originals).split()
        texts.append(" ".join(draw.sample(words, len(words)) if number % 3 == 2 else words))
    return texts


def write_word_vectors(folder: Path, texts: Sequence[str]) -> Path:
    """A model of model2vec with drawn vectors of the words of some texts."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    words = dict.fromkeys(["[UNK]", *(word for text in texts for word in text.split())])
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(3).normal(size=(len(words), DIM)).astype(np.float32)
    save_file({"embeddings": vectors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec"}))
    return folder
