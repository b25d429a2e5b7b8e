"""Speed of language identification and classification, against fastText's own
prediction of lines of the same text.

The model of languages and its texts (English prose; translations of the Universal
Declaration of Human Rights, as documents and line by line) lie in
`checkout.data_folder`; code and documentation are on every machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fasttext
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.judges import (
    PIECE_CHARACTERS,
    headline_lists,
    read_good,
    read_headlines,
)
from benchmarks.dataprep.language import read_declarations
from benchmarks.dataprep.stage_runs import shard_name, write_shard
from benchmarks.dataprep.texts import library_texts
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row, text_megabytes
from benchmarks.public_data import language_model
from gristmill.dataprep.fasttext.fasttext_files import read_model
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256
from gristmill.dataprep.fasttext.fasttext_predict import Predictor
from gristmill.dataprep.langid.langid import identify_shard, measure, view
from gristmill.dataprep.quality.classifier import as_line, score_texts
from gristmill.dataprep.runners.tasks import Task
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.quality import Classifier

DOCUMENTS, REPEATS = 2000, 5
LANGUAGE_FLOOR, CLASSIFIER_FLOOR = 6, 3
"""Least ratio to fastText's own prediction, with words in the cache."""
SHARD_TIMES = 4
CLASSIFIERS: dict[str, RawSection] = {
    "": {"loss": "softmax"},
    ", hs": {"loss": "hs"},
    ", 2 million buckets": {"bucket": 2_000_000, "dim": 64},
}
"""Differences from the classifiers that the stage `quality` trains: 32 dimensions, word
bigrams, softmax.
"""


def rows() -> Iterator[Row]:
    """Measure, in MB of UTF-8 that the model reads per second."""
    folder = data_folder()
    path = language_model()
    if path is None:
        yield row(
            "langid_vs_fasttext",
            None,
            None,
            "MB/s",
            "there is no language model here, and none can be fetched",
        )
        return
    section = LanguageId()
    texts = {
        "": library_texts(DOCUMENTS // 2) + documentation(DOCUMENTS // 2),
        **more_texts(folder),
    }
    fasttext_model = fasttext.load_model(path)
    for name, corpus in texts.items():
        yield from language_rows(name, corpus, path, fasttext_model, section)
    yield thread_row(texts.get(", English", texts[""]), path, section)
    yield stage_row(texts.get(", English", texts[""]), path, section)
    if (folder / "quality").exists():
        yield from classifier_rows(folder)


def more_texts(folder: Path) -> dict[str, list[str]]:
    """Read English prose and texts of many languages, if they are on this machine."""
    if not (folder / "langid" / "udhr2.zip").exists():
        return {}
    declarations = [
        text for _, text in read_declarations(folder / "langid" / "udhr2.zip")
    ]
    pieces = [
        text[start : start + PIECE_CHARACTERS]
        for text in declarations
        for start in range(0, len(text), PIECE_CHARACTERS)
    ]
    lines = [line for text in declarations for line in text.split("\n") if line.strip()]
    return {
        ", English": read_good(folder / "text")[: 2 * DOCUMENTS],
        ", many languages": pieces,
        ", lines of many languages": lines,
    }


def language_rows(
    name: str, texts: Sequence[str], path: str, fasttext_model: Any, section: LanguageId
) -> Iterator[Row]:
    """Measure documents as `langid` does: with their words in the cache, and with an
    empty cache.
    """
    array = pa.array(texts, pa.large_string())
    lines = [view(text, section.max_characters) for text in texts]
    warm, *fresh = (Predictor(*read_model(Path(path))) for _ in range(REPEATS + 1))
    unused = iter(fresh)
    look(warm, section, array)
    ours, cold, peer = fastest(
        REPEATS,
        lambda: look(warm, section, array),
        lambda: look(next(unused), section, array),
        partial(fasttext_model.predict, lines),
    )
    size = text_megabytes(lines)
    note = f"{len(texts)} texts"
    yield row(
        f"langid_vs_fasttext{name}",
        size / ours,
        size / peer,
        "MB/s",
        note,
        LANGUAGE_FLOOR,
    )
    yield row(
        f"langid_vs_fasttext{name}, empty cache", size / cold, size / peer, "MB/s", note
    )


def look(model: Predictor, section: LanguageId, texts: pa.Array) -> Any:
    """Measure documents as the stage does."""
    return measure(model, section, texts)


def thread_row(texts: Sequence[str], path: str, section: LanguageId) -> Row:
    """Measure two threads against one."""
    array, model = (
        pa.array(texts, pa.large_string()),
        Predictor(*read_model(Path(path))),
    )
    parts = [array.slice(start, 500) for start in range(0, len(array), 500)] * 4
    with ThreadPoolExecutor(2) as threads:
        work = partial(look, model, section)
        list(threads.map(work, parts))
        ours, peer = fastest(
            REPEATS,
            lambda: list(threads.map(work, parts)),
            lambda: list(map(work, parts)),
        )
    size = 4 * text_megabytes(view(text, section.max_characters) for text in texts)
    return row("langid, two threads against one", size / ours, size / peer, "MB/s")


def stage_row(texts: Sequence[str], path: str, section: LanguageId) -> Row:
    """Measure the stage on a shard, reading and writing, against its texts alone; in MB
    of all text.
    """
    all_texts = list(texts) * SHARD_TIMES
    array = pa.array(all_texts, pa.large_string())
    section = section.model_copy(update={"model": path})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shard(folder / "ingest", 0, all_texts)
        stage = partial(
            identify_shard,
            Task(shard_name(0)),
            {"ingest": folder / "ingest"},
            section,
            folder / "out",
            MODEL_SHA256,
        )
        model = Predictor(*read_model(Path(path)))
        stage()
        look(model, section, array)
        ours, peer = fastest(REPEATS, stage, lambda: look(model, section, array))
    size = text_megabytes(all_texts)
    return row(
        "langid_stage_vs_kernel",
        size / ours,
        size / peer,
        "MB/s",
        "one worker; peer: the texts measured alone",
    )


def classifier_rows(folder: Path) -> Iterator[Row]:
    """Measure documents as `quality` does, by classifiers that learnt from prose and
    headlines.
    """
    good, bad = (
        read_good(folder / "text"),
        read_headlines(folder / "quality" / "clickbait_data.gz"),
    )
    section = Classifier(positive=("good",), negative=("bad",))
    texts = good[: 2 * DOCUMENTS]
    lines = [f"__label__positive {as_line(text, section)}\n" for text in good[::2]]
    lines += [
        f"__label__negative {as_line(text, section)}\n"
        for text in headline_lists(bad)[::2]
    ]
    with tempfile.TemporaryDirectory() as work:
        examples, path = Path(work) / "lines.txt", Path(work) / "model.bin"
        examples.write_text("".join(lines), encoding="utf-8")
        for name, options in CLASSIFIERS.items():
            settings = {
                "dim": 32,
                "wordNgrams": 2,
                "bucket": 100_000,
                "epoch": 1,
                **options,
            }
            fasttext.train_supervised(
                str(examples), thread=12, verbose=0, **settings
            ).save_model(str(path))
            yield classifier_row(name, path, texts, section)


def classifier_row(
    name: str, path: Path, texts: Sequence[str], section: Classifier
) -> Row:
    """Measure a classifier."""
    model, fasttext_model = (
        Predictor(*read_model(path)),
        fasttext.load_model(str(path)),
    )
    lines, array = (
        [as_line(text, section) for text in texts],
        pa.array(texts, pa.large_string()),
    )
    score_texts(model, array, section)
    ours, peer = fastest(
        REPEATS,
        lambda: score_texts(model, array, section),
        lambda: fasttext_model.predict(lines, k=2),
    )
    size = text_megabytes(lines)
    return row(
        f"classifier_vs_fasttext{name}",
        size / ours,
        size / peer,
        "MB/s",
        f"{len(texts)} texts",
        CLASSIFIER_FLOOR,
    )
