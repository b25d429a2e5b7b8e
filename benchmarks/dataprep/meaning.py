"""Duplicates in meaning, and clusters: the stage `dedup_semantic` against SemDeDup as a
plain program of NumPy and scikit-learn, the stage `cluster` against scikit-learn's
k-means and words by their weights.

The vectors are means of word vectors (384 numbers), so that the network, which is the
same on both sides (`annotators`), does not hide all other work. The plain program holds
all texts and vectors in memory, and writes nothing; like SemDeDup's code it learns from
all vectors, sorts each cluster, and drops documents that are similar to any before
them; clusters are named by the words of the largest mean TF-IDF. Texts are paragraphs
of documentation, every third an earlier one in another order. Both compute with one
thread; times are of the processor.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.dataprep.stage_runs import stage_runs, write_shard
from benchmarks.installed_texts import CORPUS, paragraphs
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.dedup import semantic as dedup_semantic
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.semantic import cluster
from gristmill.dataprep.semantic.cluster_names import WORDS_OF_A_NAME
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.encoder_settings import ReadingModel

DOCUMENTS, WORDS_PER_DOCUMENT, DIM, CLUSTERS = 20_000, 30, 384, 20
THRESHOLD = 0.95
REPEATS = 3


class Comparison(NamedTuple):
    """Documents per second of both sides, the stage's summary, and the plain program's
    result.
    """

    ours: float
    plain: float
    summary: Any
    plain_result: Any


def rows(repeats: int = REPEATS) -> Iterator[Row]:
    """Measure both stages."""
    from threadpoolctl import threadpool_limits

    with (
        tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place,
        threadpool_limits(1),
    ):
        folder = Path(place)
        texts = texts_with_copies(DOCUMENTS)
        model = write_word_vectors(folder / "model", texts)
        write_shard(folder / "ingest", 0, texts)

        def compare(
            stage: ModuleType,
            config: RawSection,
            program: Callable[[Path, list[str]], Any],
        ) -> Comparison:
            results = dict[str, object]()
            config = {"model": str(model), **config}
            run_stage = stage_runs(
                stage.run,
                {"ingest": folder / "ingest"},
                config,
                folder / stage.__name__,
            )

            def ours() -> None:
                results["ours"] = run_stage().summary

            def plain() -> None:
                results["plain"] = program(model, texts)

            our_seconds, plain_seconds = fastest(
                repeats, ours, plain, clock=time.process_time
            )
            return Comparison(
                DOCUMENTS / our_seconds,
                DOCUMENTS / plain_seconds,
                results["ours"],
                results["plain"],
            )

        dedup = compare(
            dedup_semantic,
            {"threshold": THRESHOLD, "clusters": CLUSTERS},
            plain_semdedup,
        )
        dropped = dedup.summary.counts["dropped"]["semantic_duplicate"]
        note = (
            f"{dropped:,} and {dedup.plain_result:,} of {DOCUMENTS:,} documents "
            f"are dropped; {CORPUS}"
        )
        # 0.80, and 1.28 below, 2026-11-28, 2 cores
        yield row(
            "dedup_semantic_vs_plain_semdedup",
            dedup.ours,
            dedup.plain,
            "documents/s",
            note,
            floor=0.7,
        )
        clusters = compare(cluster, {"k": CLUSTERS}, plain_clusters)
        sizes = [domain["documents"] for domain in clusters.summary.domains]
        yield row(
            "cluster_vs_scikit_learn",
            clusters.ours,
            clusters.plain,
            "documents/s",
            f"{CLUSTERS} clusters of {min(sizes):,} to {max(sizes):,}, and of "
            f"{min(clusters.plain_result):,} to {max(clusters.plain_result):,} "
            f"documents; ours learns from {clusters.summary.sample:,} of them, and "
            "draws a map",
            floor=1.0,
        )


def plain_semdedup(model: Path, texts: list[str]) -> int:
    """Count the documents that SemDeDup drops; the longest of each group is kept."""
    from sklearn.cluster import MiniBatchKMeans

    vectors = load_embedder(ReadingModel.model_validate({"path": str(model)})).embed(
        texts
    )
    labels = MiniBatchKMeans(
        CLUSTERS, batch_size=4096, n_init=1, random_state=1
    ).fit_predict(vectors)
    lengths, dropped = np.array([len(text) for text in texts]), 0
    for label in range(CLUSTERS):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(-lengths[members], kind="stable")]
        cosines = np.triu(vectors[members] @ vectors[members].T, 1)
        dropped += int((cosines.max(axis=0, initial=0.0) >= THRESHOLD).sum())
    return dropped


def plain_clusters(model: Path, texts: list[str]) -> list[int]:
    """Name clusters; returns the number of documents of each."""
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = load_embedder(ReadingModel.model_validate({"path": str(model)})).embed(
        texts
    )
    labels = MiniBatchKMeans(
        CLUSTERS, batch_size=4096, n_init=1, random_state=1
    ).fit_predict(vectors)
    counted = TfidfVectorizer(binary=True)
    weights = counted.fit_transform(texts)
    words = counted.get_feature_names_out()
    for label in range(CLUSTERS):
        typical = np.asarray(
            weights[np.flatnonzero(labels == label)].mean(axis=0)
        ).ravel()
        assert len(" ".join(words[np.argsort(-typical)[:WORDS_OF_A_NAME]]))
    return [int(size) for size in np.bincount(labels, minlength=CLUSTERS)]


def texts_with_copies(documents: int) -> list[str]:
    """Return paragraphs of documentation, every third an earlier one in another
    order.
    """
    draw, originals = random.Random(6), iter(paragraphs(documents, WORDS_PER_DOCUMENT))
    texts: list[str] = []
    for number in range(documents):
        words = (
            draw.choice(texts).split() if number % 3 == 2 else next(originals).split()
        )
        texts.append(
            " ".join(draw.sample(words, len(words)) if number % 3 == 2 else words)
        )
    return texts


def write_word_vectors(folder: Path, texts: Sequence[str]) -> Path:
    """Write a model2vec model with drawn vectors of the words of some texts."""
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
