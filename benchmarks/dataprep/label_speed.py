"""How fast languages and classes are told, against fastText's own prediction of ready-made lines on the same text.

The model of languages and its texts (English prose; translations of the Universal Declaration of Human Rights, as
documents and line by line) lie in the folder that `checkout.data_folder` names; code and drawn words are everywhere.
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
from benchmarks.dataprep.judges import PIECE_CHARACTERS, read_good, read_headlines
from benchmarks.dataprep.language import read_declarations
from benchmarks.dataprep.texts import library_texts
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.dataprep.fasttext.fasttext_backend import KernelPredictor, Predictor
from gristmill.dataprep.fasttext.fasttext_files import read_model
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256, find_model
from gristmill.dataprep.jobs.tasks import Task
from gristmill.dataprep.langid.check_languages import wanted_languages
from gristmill.dataprep.langid.langid import identify_shard, measure, view
from gristmill.dataprep.quality.classifier import as_line, score_texts
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.quality import Classifier

DOCUMENTS, REPEATS = 2000, 5
LANGUAGE_FLOOR, CLASSIFIER_FLOOR = 6, 3
"""How many times as fast as fastText's own prediction languages and classes are to be identified; first texts aside."""
SHARD, SHARD_TIMES = "part-00000.parquet", 4
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "": {"loss": "softmax"},
    ", hs": {"loss": "hs"},
    ", 2 million buckets": {"bucket": 2_000_000, "dim": 64},
}
"""What differs from the classifiers that the stage `quality` trains: 32 dimensions, word bigrams, softmax."""


def rows() -> Iterator[Row]:
    """Measure, in MB of UTF-8 that the model looks at per second."""
    folder = data_folder()
    local = folder / "langid" / "lid176" / "lid.176.ftz"
    path, section = find_model(str(local) if local.exists() else None), LanguageId()
    texts = {"": library_texts(DOCUMENTS // 2) + documentation(DOCUMENTS // 2), **more_texts(folder)}
    bare = fasttext.load_model(str(path))
    for name, some in texts.items():
        yield from _language_rows(name, some, path, bare, section)
    yield _thread_row(texts.get(", English", texts[""]), path, section)
    yield _stage_row(texts.get(", English", texts[""]), path, section)
    if (folder / "quality").exists():
        yield from _classifier_rows(folder)


def more_texts(folder: Path) -> dict[str, list[str]]:
    """English prose and texts of many languages, where they are at hand."""
    if not (folder / "langid" / "udhr2.zip").exists():
        return {}
    declarations = [text for _, text in read_declarations(folder / "langid" / "udhr2.zip")]
    pieces = [text[at : at + PIECE_CHARACTERS] for text in declarations for at in range(0, len(text), PIECE_CHARACTERS)]
    lines = [line for text in declarations for line in text.split("\n") if line.strip()]
    return {
        ", English": read_good(folder / "text")[: 2 * DOCUMENTS],
        ", many languages": pieces,
        ", lines of many languages": lines,
    }


def _language_rows(name: str, texts: Sequence[str], path: Path, bare: Any, section: LanguageId) -> Iterator[Row]:
    """What `langid` measures of documents: with their words in the cache already, and from an empty one."""
    array = pa.array(texts, pa.large_string())
    lines = [view(text, section.max_characters) for text in texts]
    warm, *fresh = (KernelPredictor(*read_model(path)) for _ in range(REPEATS + 1))
    waiting = iter(fresh)
    look(warm, section, array)
    ours, cold, peer = fastest(
        REPEATS,
        lambda: look(warm, section, array),
        lambda: look(next(waiting), section, array),
        partial(bare.predict, lines),
    )
    size = sum(len(line.encode("utf-8")) for line in lines) / 1e6
    note = f"{len(texts)} texts"
    yield row(f"langid_vs_fasttext{name}", size / ours, size / peer, "MB/s", note, LANGUAGE_FLOOR)
    yield row(f"langid_vs_fasttext{name}, empty cache", size / cold, size / peer, "MB/s", note)


def look(model: Predictor, section: LanguageId, texts: pa.Array) -> Any:
    """What the stage measures of documents."""
    return measure(model, section, wanted_languages(section), texts)


def _thread_row(texts: Sequence[str], path: Path, section: LanguageId) -> Row:
    array, model = pa.array(texts, pa.large_string()), KernelPredictor(*read_model(path))
    parts = [array.slice(at, 500) for at in range(0, len(array), 500)] * 4
    with ThreadPoolExecutor(2) as two:
        work = partial(look, model, section)
        list(two.map(work, parts))
        ours, peer = fastest(REPEATS, lambda: list(two.map(work, parts)), lambda: list(map(work, parts)))
    size = 4 * sum(len(view(text, section.max_characters).encode("utf-8")) for text in texts) / 1e6
    return row("langid, two threads against one", size / ours, size / peer, "MB/s")


def _stage_row(texts: Sequence[str], path: Path, section: LanguageId) -> Row:
    """What the stage does with a shard, reading and writing, against measuring its texts alone; in MB of all text."""
    documents = [(f"{number}", text) for number, text in enumerate(list(texts) * SHARD_TIMES)]
    table = pa.Table.from_pylist(
        [
            {
                "id": document_id("web", locator, text),
                "source": "web",
                "locator": locator,
                "text": text,
                "metadata": "{}",
            }
            for locator, text in documents
        ],
        schema=DOCUMENT_SCHEMA,
    )
    section = section.model_copy(update={"model": str(path)})
    array = table["text"].combine_chunks()
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "ingest" / SHARD, table)
        stage = partial(
            identify_shard,
            Task(SHARD),
            {"ingest": Path(folder) / "ingest"},
            section.model_dump(mode="json"),
            Path(folder) / "out",
            MODEL_SHA256,
        )
        model = KernelPredictor(*read_model(path))
        stage()
        look(model, section, array)
        ours, peer = fastest(REPEATS, stage, lambda: look(model, section, array))
    size = sum(len(text.encode("utf-8")) for _, text in documents) / 1e6
    return row("langid_stage_vs_kernel", size / ours, size / peer, "MB/s", "one worker; peer: the texts measured alone")


def _classifier_rows(folder: Path) -> Iterator[Row]:
    """What `quality` measures of documents by a classifier that learnt from prose and headlines."""
    good, bad = read_good(folder / "text"), read_headlines(folder / "quality" / "clickbait_data.gz")
    lists = ["\n".join(bad[at : at + 20]) for at in range(0, len(bad), 20)]
    learnt = Classifier(positive=("good",), negative=("bad",))
    texts = good[: 2 * DOCUMENTS]
    with tempfile.TemporaryDirectory() as work:
        examples, path = Path(work) / "lines.txt", Path(work) / "model.bin"
        examples.write_text(
            "".join(
                f"__label__{label} {as_line(text, learnt)}\n"
                for label, some in (("positive", good), ("negative", lists))
                for text in some[::2]
            ),
            encoding="utf-8",
        )
        for name, options in CLASSIFIERS.items():
            settings = {"dim": 32, "wordNgrams": 2, "bucket": 100_000, "epoch": 1, **options}
            fasttext.train_supervised(str(examples), thread=12, verbose=0, **settings).save_model(str(path))
            yield _classifier_row(name, path, texts, learnt)


def _classifier_row(name: str, path: Path, texts: Sequence[str], section: Classifier) -> Row:
    model, bare = KernelPredictor(*read_model(path)), fasttext.load_model(str(path))
    lines, array = [as_line(text, section) for text in texts], pa.array(texts, pa.large_string())
    score_texts(model, array, section)
    ours, peer = fastest(REPEATS, lambda: score_texts(model, array, section), lambda: bare.predict(lines, k=2))
    size = sum(len(line.encode("utf-8")) for line in lines) / 1e6
    return row(
        f"classifier_vs_fasttext{name}",
        size / ours,
        size / peer,
        "MB/s",
        f"{len(texts)} texts",
        CLASSIFIER_FLOOR,
    )
