"""Processor time of a chain's kernels alone, on texts in memory, in one thread.

The remaining time of a whole chain is reading and writing, starting, scheduling,
merging and recording.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.chain.our_chain import Models
from benchmarks.chain.pages import Corpus
from benchmarks.measuring import fastest, text_megabytes
from gristmill.core.files import sha256_file
from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import shingle_sets
from gristmill.dataprep.fasttext.fasttext_backend import load_model
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256
from gristmill.dataprep.filters.rule_sets import measure as measure_rules
from gristmill.dataprep.langid import langid
from gristmill.dataprep.quality.classifier import score_texts
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.quality import Classifier

REPEATS = 2


def seconds_per_mb(corpus: Corpus, models: Models, settings: Any) -> dict[str, float]:
    """Return seconds of processor time per MB of raw text by kernel, on the first file
    of a corpus.
    """
    lines = min(corpus.folder.glob("*.jsonl")).read_bytes().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rows = pa.table(
        {
            "text": pa.array(texts, pa.large_string()),
            "language": pa.nulls(len(texts), pa.string()),
        }
    )
    array = rows["text"].combine_chunks()
    rules, section = (
        Filter.model_validate(settings["filter"]).rules,
        Dedup.model_validate(settings["dedup"]).minhash,
    )
    languages = LanguageId(model=str(models.language))  # type: ignore[arg-type]
    classifier = Classifier(model=str(models.classifier))  # type: ignore[arg-type]
    assert section is not None

    def sketch() -> None:
        sets = shingle_sets(array, section.ngram)
        band_keys(
            signatures(sets, section.bands * section.rows, section.seed),
            section.bands,
            section.rows,
        )

    works: dict[str, Callable[[], object]] = {
        "JSON": lambda: [json.loads(line) for line in lines],
        "rules": partial(measure_rules, rows, rules),
        "MinHash": sketch,
        "language": partial(
            langid.measure,
            load_model(str(models.language), MODEL_SHA256),
            languages,
            array,
        ),
        "classifier": partial(
            score_texts,
            load_model(str(models.classifier), sha256_file(models.classifier)),
            array,
            classifier,
        ),
        "tokens": encoding(models, array),
    }
    seconds = fastest(REPEATS, *works.values(), clock=time.process_time)
    return dict(
        zip(works, (each / text_megabytes(texts) for each in seconds), strict=True)
    )


def encoding(models: Models, texts: pa.Array) -> Callable[[], object]:
    """Return a function that encodes texts as the stage does."""
    from gristmill.tokenize.encoding.encode import encode_batch
    from gristmill.tokenize.encoding.tokenizer import load

    return partial(encode_batch, load(models.tokenizer.parent), *text_buffers(texts))
