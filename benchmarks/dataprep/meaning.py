"""Duplicates in meaning, and clusters: the stage `dedup_semantic` against SemDeDup as a plain program of NumPy and
scikit-learn, the stage `cluster` against scikit-learn's k-means and words by their weights.

The vectors are means of word vectors (384 numbers), so that the network, which is the same on both sides
(`annotators`), does not hide the rest. The plain program holds all texts and vectors in memory, and writes nothing; as
SemDeDup's own it learns from all vectors, sorts each cluster, and drops what is alike to any before it; clusters are
named by the words of the largest mean TF-IDF. Both compute with one thread; times are of the processor.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataprep.own_steps import write_shard
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.context import Context
from gristmill.dataprep.meaning import cluster, dedup_semantic
from gristmill.dataprep.meaning.cluster_names import WORDS_OF_A_NAME
from gristmill.dataprep.models.embeddings import load_embedder
from gristmill.mixtures.reading_model import ReadingModel

DOCUMENTS, WORDS, WORDS_PER_DOCUMENT, DIM, CLUSTERS = 20_000, 3_000, 60, 384, 20
THRESHOLD = 0.95
REPEATS = 3


def rows(documents: int = DOCUMENTS, repeats: int = REPEATS) -> Iterator[Row]:
    """Documents per second; the note says how many each side drops."""
    from threadpoolctl import threadpool_limits

    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place, threadpool_limits(1):
        folder = Path(place)
        model = write_word_vectors(folder / "model")
        texts = texts_with_copies(documents)
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
            f"{dropped:,} and {found['plain']:,} of {documents:,} documents are dropped",
            floor=0.75,  # 0.80 on an idle machine: the stage reads, writes and records besides
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
            floor=1.2,  # 1.34 on an idle machine
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
    """Texts of drawn words, every third one another in another order."""
    draw = random.Random(6)
    texts: list[str] = []
    for number in range(documents):
        words = (
            draw.choice(texts).split()
            if number % 3 == 2
            else [f"w{draw.randrange(WORDS)}" for _ in range(WORDS_PER_DOCUMENT)]
        )
        texts.append(" ".join(draw.sample(words, len(words))))
    return texts


def write_word_vectors(folder: Path) -> Path:
    """A model of model2vec with drawn vectors of words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, **{f"w{number}": number + 1 for number in range(WORDS)}}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(3).normal(size=(WORDS + 1, DIM)).astype(np.float32)
    save_file({"embeddings": vectors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec"}))
    return folder
