"""Processor time of a chain's kernels alone, on texts in memory, in one thread.

Each kernel gets the texts that it got in the chain: those that all steps before it
kept. The remaining time of a whole chain is reading and writing, hashing, starting,
scheduling, merging and recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import orjson
import pyarrow as pa

from benchmarks.chain.our_chain import Chain, Models
from benchmarks.chain.pages import Corpus
from benchmarks.measuring import fastest, text_megabytes
from gristmill.core.files import sha256_file
from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import shingle_sets
from gristmill.dataprep.documents import read_shard, shard_names
from gristmill.dataprep.fasttext.fasttext_backend import load_model
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256
from gristmill.dataprep.filters.rule_sets import measure as measure_rules
from gristmill.dataprep.langid import langid
from gristmill.dataprep.quality.classifier import score_texts
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.quality import Classifier

REPEATS = 2


def seconds_per_mb(
    chain: Chain, corpus: Corpus, models: Models, settings: RawSection
) -> dict[str, float]:
    """Return seconds of processor time per MB of raw text by kernel, on the first file
    of a corpus and the first shard of a finished run over it.
    """
    lines = min(corpus.folder.glob("*.jsonl")).read_bytes().splitlines()
    line_texts = [orjson.loads(line)["text"] for line in lines]
    inputs = committed_inputs(chain.session())
    shard = shard_names(inputs[INGEST])[0]

    def kept_before(*steps: str) -> pa.Table:
        folders = {step: inputs[step] for step in (INGEST, *steps)}
        read = read_shard(folders, shard, ["text", "language"])
        return read.judged_documents.select(["text", "language"])

    raw, ruled, single, english, good = (
        kept_before(*list(settings)[:number]) for number in range(len(settings) + 1)
    )
    rules = Filter.model_validate(settings["filter"]).rules
    section = Dedup.model_validate(settings["dedup"]).minhash
    languages = LanguageId(model=str(models.language))  # type: ignore[arg-type]
    classifier = Classifier(model=str(models.classifier))  # type: ignore[arg-type]
    assert section is not None
    assert list(settings) == ["filter", "dedup", "langid", "quality"]

    def sketch() -> None:
        sets = shingle_sets(ruled["text"].combine_chunks(), section.ngram)
        band_keys(
            signatures(sets, section.bands * section.rows, section.seed),
            section.bands,
            section.rows,
        )

    language_model = load_model(str(models.language), MODEL_SHA256)
    classifier_model = load_model(
        str(models.classifier), sha256_file(models.classifier)
    )
    works: dict[str, Callable[[], object]] = {
        "JSON": lambda: [orjson.loads(line) for line in lines],
        "rules": partial(measure_rules, raw, rules),
        "MinHash": sketch,
        "language": partial(
            langid.measure, language_model, languages, single["text"].combine_chunks()
        ),
        "classifier": partial(
            score_texts, classifier_model, english["text"].combine_chunks(), classifier
        ),
        "tokens": encoding(models, good["text"].combine_chunks()),
    }
    seconds = fastest(REPEATS, *works.values(), clock=time.process_time)
    megabytes = dict.fromkeys(works, text_megabytes(raw["text"].to_pylist()))
    megabytes["JSON"] = text_megabytes(line_texts)
    return {
        kernel: each / megabytes[kernel]
        for kernel, each in zip(works, seconds, strict=True)
    }


def encoding(models: Models, texts: pa.Array) -> Callable[[], object]:
    """Return a function that encodes texts as the stage does."""
    from gristmill.tokenize.encoding.encode import encode_batch
    from gristmill.tokenize.encoding.tokenizer import load

    return partial(encode_batch, load(models.tokenizer.parent), *text_buffers(texts))
