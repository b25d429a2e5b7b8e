"""Processor time of a chain's kernels alone, on texts in memory, in one thread.

Each kernel gets the texts that it got in the chain: those that all steps before it
kept. The remaining time of a whole chain is reading and writing, hashing, starting,
scheduling, merging and recording.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import orjson
import pyarrow as pa

from benchmarks.chain.our_chain import Chain, Models
from benchmarks.chain.pages import Corpus
from gristmill.core.files import sha256_file
from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import shingle_sets
from gristmill.dataprep.documents import read_shard, shard_names
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256
from gristmill.dataprep.fasttext.fasttext_predict import load_model
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
from gristmill.tokenize.encoding.encode import encode_batch
from gristmill.tokenize.encoding.tokenizer import load


def seconds_per_mb(
    chain: Chain, corpus: Corpus, models: Models, settings: RawSection
) -> dict[str, float]:
    """Return seconds of processor time per MB of raw text by kernel, on all files of a
    corpus and all shards of a finished run over it: copies and lists are not spread
    evenly.
    """
    inputs = committed_inputs(chain.session())
    shards = shard_names(inputs[INGEST])
    rules = Filter.model_validate(settings["filter"]).rules
    section = Dedup.model_validate(settings["dedup"]).minhash
    languages = LanguageId(model=str(models.language))  # type: ignore[arg-type]
    classifier = Classifier(model=str(models.classifier))  # type: ignore[arg-type]
    assert section is not None
    assert list(settings) == ["filter", "dedup", "langid", "quality"]
    language_model = load_model(str(models.language), MODEL_SHA256)
    classifier_model = load_model(
        str(models.classifier), sha256_file(models.classifier)
    )
    tokenizer = load(models.tokenizer.parent)

    def kept_before(shard: str, *steps: str) -> pa.Table:
        folders = {step: inputs[step] for step in (INGEST, *steps)}
        read = read_shard(folders, shard, ["text", "language"])
        return read.judged_documents.select(["text", "language"])

    def sketch(texts: pa.Array) -> None:
        sets = shingle_sets(texts, section.ngram)
        band_keys(
            signatures(sets, section.bands * section.rows, section.seed),
            section.bands,
            section.rows,
        )

    def works_on(shard: str) -> dict[str, Callable[[], object]]:
        raw, *kept = (
            kept_before(shard, *list(settings)[:number])
            for number in range(len(settings) + 1)
        )
        ruled, single, english, good = (
            table["text"].combine_chunks() for table in kept
        )
        return {
            "rules": partial(measure_rules, raw, rules),
            "MinHash": partial(sketch, ruled),
            "language": partial(langid.measure, language_model, languages, single),
            "classifier": partial(score_texts, classifier_model, english, classifier),
            "tokens": partial(encode_batch, tokenizer, *text_buffers(good)),
        }

    for work in works_on(shards[0]).values():
        work()  # loads what it needs
    seconds = defaultdict[str, float](float)
    for file in corpus.folder.glob("*.jsonl"):
        lines = file.read_bytes().splitlines()
        seconds["JSON"] += processor_seconds(
            partial(deque, map(orjson.loads, lines), 0)
        )
    for shard in shards:
        for kernel, work in works_on(shard).items():
            seconds[kernel] += processor_seconds(work)
    megabytes = corpus.text_bytes / 1e6
    return {kernel: total / megabytes for kernel, total in seconds.items()}


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start
