"""From labels to a classifier: `quality` with `distil` against a plain program over the
same embeddings.

Documents are paragraphs of documentation with a judge's score in their metadata: longer
words, more points. The plain program embeds the sample, fits scikit-learn's logistic
regression, embeds all documents and takes their probabilities; it holds all texts and
vectors and writes nothing. The vectors are means of word vectors, so that the network,
which is the same on both sides (`annotators`), does not hide all other work. Both
compute with one thread, times are of the processor, and the note has the share of
documents with the same verdict.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.dataprep.meaning import write_word_vectors
from benchmarks.dataprep.stage_runs import shard_name, stage_runs, write_shard
from benchmarks.installed_texts import CORPUS, paragraphs
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.documents import read_table
from gristmill.dataprep.encoders.distil_classifier import HELD_OUT, MOST_ITERATIONS
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.labelled_examples import draw, split_draws
from gristmill.mixtures.schema.encoder_settings import ReadingModel

DOCUMENTS, SAMPLE, WORDS_PER_DOCUMENT, AT_LEAST = 20_000, 5_000, 30, 3.0
REPEATS = 3
SEED = 1


def rows(repeats: int = REPEATS) -> Iterator[Row]:
    """Measure documents per second."""
    from threadpoolctl import threadpool_limits

    with (
        tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place,
        threadpool_limits(1),
    ):
        folder = Path(place)
        texts, scores = judged_texts(DOCUMENTS)
        model = write_word_vectors(folder / "model", texts)
        write_shard(
            folder / "ingest",
            0,
            texts,
            [json.dumps({"score": score}) for score in scores],
        )
        ids = read_table(folder / "ingest" / shard_name(0), ["id"])["id"].to_pylist()
        config = {
            "judge": {"metadata": "score", "at_least": AT_LEAST},
            "sample": SAMPLE,
            "seed": SEED,
            "distil": "embedding+linear",
            "embedding": {"path": str(model)},
            "min_quality": 0.5,
        }
        stage = stage_runs(quality.run, {"ingest": folder / "ingest"}, config, folder)
        is_good = dict[str, np.ndarray]()

        def ours() -> None:
            table = read_table(stage().out / shard_name(0))
            is_good["ours"] = table["quality"].to_numpy() >= 0.5

        def plain() -> None:
            is_good["plain"] = plain_distil(model, texts, np.array(scores), ids) >= 0.5

        our_seconds, plain_seconds = fastest(
            repeats, ours, plain, clock=time.process_time
        )
        agreement = (is_good["ours"] == is_good["plain"]).mean()
        yield row(
            "distil_vs_plain_scikit_learn",
            DOCUMENTS / our_seconds,
            DOCUMENTS / plain_seconds,
            "documents/s",
            f"a sample of {SAMPLE:,} of {DOCUMENTS:,}; both say the same of "
            f"{100 * agreement:.1f} % of them; {CORPUS}",
            floor=0.65,  # 0.81 of 4,000 documents, 2026-11-24, 2 busy cores
        )


def judged_texts(documents: int) -> tuple[list[str], list[float]]:
    """Return paragraphs of equally many words, and scores of 0 to 5 by their ranks in
    characters.
    """
    texts = paragraphs(documents, WORDS_PER_DOCUMENT)
    ranks = np.argsort(np.argsort([len(text) for text in texts], kind="stable"))
    return texts, (5 * ranks / documents).round(1).tolist()


def plain_distil(
    model: Path, texts: list[str], scores: np.ndarray, ids: list[bytes]
) -> np.ndarray:
    """Learn from the documents that the stage learns from, and score all."""
    from sklearn.linear_model import LogisticRegression

    embedder = load_embedder(ReadingModel.model_validate({"path": str(model)}))
    draws = draw(ids, SEED)
    chosen = np.argsort(draws[:, 1], kind="stable")[:SAMPLE]
    good = scores >= AT_LEAST
    classes = (chosen[good[chosen]], chosen[~good[chosen]])
    learnt = np.concatenate(
        [places[split_draws(draws[places], HELD_OUT, SAMPLE)[0]] for places in classes]
    )
    linear = LogisticRegression(max_iter=MOST_ITERATIONS)
    linear.fit(embedder.embed([texts[place] for place in learnt]), good[learnt])
    probabilities: np.ndarray = linear.predict_proba(embedder.embed(texts))[:, 1]
    return probabilities
