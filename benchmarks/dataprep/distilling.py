"""From labels to a classifier: `quality` with `distil` against a plain program over the same embeddings.

The judge's scores are in the documents' metadata, which are paragraphs of documentation: longer words, more points. The plain program embeds the sample, fits scikit-learn's logistic
regression, embeds all documents and takes their probabilities; it holds all texts and vectors and writes nothing. The
vectors are means of word vectors, so that the network, which is the same on both sides (`annotators`), does not hide
the rest. Both compute with one thread, times are of the processor, and the note says of how many documents they say the same.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.dataprep.meaning import write_word_vectors
from benchmarks.dataprep.own_steps import write_shard
from benchmarks.installed_texts import CORPUS, paragraphs
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.encoders.distil_classifier import HELD_OUT, MOST_ITERATIONS
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.labelled_examples import draw, split_draws
from gristmill.mixtures.encoder_settings import ReadingModel

DOCUMENTS, SAMPLE, WORDS_PER_DOCUMENT, AT_LEAST = 20_000, 5_000, 30, 3.0
REPEATS = 3
SEED = 1


def rows(documents: int = DOCUMENTS, sample: int = SAMPLE, repeats: int = REPEATS) -> Iterator[Row]:
    """Documents per second."""
    from threadpoolctl import threadpool_limits

    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place, threadpool_limits(1):
        folder = Path(place)
        texts, scores = judged_texts(documents)
        model = write_word_vectors(folder / "model", texts)
        shard = folder / "ingest" / "part-00000.parquet"
        write_shard(folder / "ingest", 0, texts)
        table = read_table(shard)
        said = pa.array([json.dumps({"score": score}) for score in scores], table.schema.field("metadata").type)
        write_table(shard, table.set_column(table.schema.get_field_index("metadata"), "metadata", said))
        config = {
            "judge": {"metadata": "score", "at_least": AT_LEAST},
            "sample": sample,
            "seed": SEED,
            "distil": "embedding+linear",
            "embedding": {"path": str(model)},
            "min_quality": 0.5,
        }
        numbers, found = itertools.count(), dict[str, np.ndarray]()

        def ours() -> None:
            work = folder / f"work{next(numbers)}"
            work.mkdir()
            quality.run(
                {"ingest": folder / "ingest"},
                config,
                work / "out",
                Context(work=work, stage="quality", mode="memory", emit=lambda event: None),
            )
            found["ours"] = read_table(work / "out" / shard.name)["quality"].to_numpy()
            shutil.rmtree(work)

        def plain() -> None:
            found["plain"] = plain_distil(model, texts, np.array(scores), table["id"].to_pylist(), sample)

        taken, peer = fastest(repeats, ours, plain, clock=time.process_time)
        same = ((found["ours"] >= 0.5) == (found["plain"] >= 0.5)).mean()
        yield row(
            "distil_vs_plain_scikit_learn",
            documents / taken,
            documents / peer,
            "documents/s",
            f"a sample of {sample:,} of {documents:,}; both say the same of {100 * same:.1f} % of them; {CORPUS}",
            floor=0.65,  # 0.81 of 4,000 documents, 2026-11-24, 2 busy cores
        )


def judged_texts(documents: int) -> tuple[list[str], list[float]]:
    """Paragraphs of one number of words, and scores of 0 to 5 by their ranks in characters."""
    texts = paragraphs(documents, WORDS_PER_DOCUMENT)
    ranks = np.argsort(np.argsort([len(text) for text in texts], kind="stable"))
    return texts, (5 * ranks / documents).round(1).tolist()


def plain_distil(model: Path, texts: list[str], scores: np.ndarray, ids: list[bytes], sample: int) -> np.ndarray:
    """What one would write: learn from the documents that the stage learns from, and score all."""
    from sklearn.linear_model import LogisticRegression

    embedder = load_embedder(ReadingModel.model_validate({"path": str(model)}))
    draws = draw(ids, SEED)
    chosen = np.argsort(draws[:, 1], kind="stable")[:sample]
    good = scores >= AT_LEAST
    learnt = np.concatenate(
        [
            places[split_draws(draws[places], HELD_OUT, sample)[0]]
            for places in (chosen[good[chosen]], chosen[~good[chosen]])
        ]
    )
    linear = LogisticRegression(max_iter=MOST_ITERATIONS)
    linear.fit(embedder.embed([texts[place] for place in learnt]), good[learnt])
    found: np.ndarray = linear.predict_proba(embedder.embed(texts))[:, 1]
    return found
