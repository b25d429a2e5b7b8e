"""All documents with what the steps said of them, read lazily: the right columns, in the order of the corpus."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.dataprep.corpus import Corpus, UnknownColumnError, UnknownDocumentError, hex_ids, url_of
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    annotate,
    document_id,
    read_documents,
    read_shard,
    shard_names,
    write_table,
)
from gristmill.dataprep.edits import edits_array
from gristmill.dataprep.where_sql import ExpressionError

METADATA = [
    {"url": "https://a.example/1", "license": "CC0-1.0"},
    {},
    {"uri": "http://b.example", "licence": 5},
    {"note": "url"},
]
"""Of the first documents of a shard."""
KINDS = {"twin": pa.binary(16)}


def write_documents(folder: Path, shard: int, texts: list[str]) -> None:
    rows = [
        {
            "id": b"\xab" + document_id("web", f"{shard}#{row}", text)[1:],
            "source": "web" if row % 2 else "books",
            "locator": f"{shard}#{row}" if row else f"https://c.example/{shard}",
            "text": text,
            "metadata": json.dumps(METADATA[row] if row < len(METADATA) else {}),
        }
        for row, text in enumerate(texts)
    ]
    write_table(folder / f"part-{shard:05d}.parquet", pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA))


def judge(
    inputs: dict[str, Path],
    step: str,
    folder: Path,
    drop: Callable[[str], str | None],
    error: str = "",
    edit: Callable[[str], list[tuple[int, int, str]]] | None = None,
    **measures: Callable[[str], Any],
) -> None:
    """Write a step's annotations: what it drops, measures and edits of each text that it sees."""
    for shard in shard_names(inputs["ingest"]):
        read = read_shard(inputs, shard)
        texts = read.documents["text"].take(pa.array(read.rows)).to_pylist()
        errors = [error if error and text.startswith("bad") else None for text in texts]
        columns: dict[str, Any] = {
            name: pa.array(
                [None if failed else of(text) for text, failed in zip(texts, errors, strict=True)], KINDS.get(name)
            )
            for name, of in measures.items()
        }
        if edit is not None:
            columns["edits"] = edits_array([edit(text) for text in texts])
        table, _ = annotate(read.documents, read.rows, read.rows, [drop(text) for text in texts], columns, errors)
        write_table(folder / step / shard, table)
    inputs[step] = folder / step


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two shards; `filter` drops what is short, `clean` puts X before each text, `filter-2` fails on what is bad."""
    for shard, texts in enumerate((["a b c", "d", "bad e f", "g h"], ["i j k l", "m", "n o"])):
        write_documents(tmp_path / "ingest", shard, texts)
    inputs = {"ingest": tmp_path / "ingest"}
    judge(
        inputs,
        "filter",
        tmp_path,
        lambda text: "short" if " " not in text else None,
        words=lambda text: len(text.split()),
    )
    judge(
        inputs,
        "clean",
        tmp_path,
        lambda text: None,
        edit=lambda text: [(0, 0, "" if text[0] == "b" else "X")],
        twin=lambda text: text.encode().ljust(16)[:16],
    )
    judge(
        inputs,
        "filter-2",
        tmp_path,
        lambda text: None,
        error="KeyError: 1",
        words=lambda text: 10 * len(text.split()),
        score=lambda text: len(text) / 8,
    )
    return Corpus(inputs, {"web": "CC-BY-4.0"})


def rows_of(corpus: Corpus, *columns: str, **options: Any) -> list[tuple[Any, ...]]:
    found = pa.Table.from_batches(corpus.batches(columns, **options), CorpusDataset.of(corpus, columns).schema)
    return list(zip(*(found[name].to_pylist() for name in columns), strict=True))


def test_a_document_comes_with_its_fate_and_all_that_was_measured_of_it(corpus: Corpus) -> None:
    assert corpus.schema.names == [
        "id",
        "source",
        "locator",
        "url",
        "licence",
        "text",
        "metadata",
        "kept",
        "dropped_by",
        "reason",
        "error",
        "filter_words",
        "twin",
        "filter_2_words",
        "score",
        "original_text",
    ]
    assert rows_of(
        corpus, "text", "kept", "dropped_by", "reason", "error", "filter_words", "filter_2_words", kept=None
    ) == [
        ("Xa b c", True, None, None, None, 3, 30),
        ("d", False, "filter", "short", None, 1, None),
        ("bad e f", False, "filter-2", "quarantine", "KeyError: 1", 3, None),
        ("Xg h", True, None, None, None, 2, 20),
        ("Xi j k l", True, None, None, None, 4, 40),
        ("m", False, "filter", "short", None, 1, None),
        ("Xn o", True, None, None, None, 2, 20),
    ]
    assert rows_of(corpus, "original_text", "text") == [
        ("a b c", "Xa b c"),
        ("g h", "Xg h"),
        ("i j k l", "Xi j k l"),
        ("n o", "Xn o"),
    ]
    assert rows_of(corpus, "text", kept=False) == [("d",), ("bad e f",), ("m",)]


def test_addresses_and_licences_are_the_documents_own_before_the_sources(corpus: Corpus) -> None:
    found = rows_of(corpus, "url", "licence", "source", kept=None)
    assert found[:4] == [
        ("https://a.example/1", "CC0-1.0", "books"),
        (None, "CC-BY-4.0", "web"),
        ("http://b.example", None, "books"),
        (None, "CC-BY-4.0", "web"),
    ]
    assert url_of("https://x.example/p#0123abcd-0123-0123-0123-0123456789ab", "{}") == "https://x.example/p"
    assert (url_of("a.jsonl#3", None), url_of("a.jsonl#3", '{"URL": "x://y"}')) == (None, "x://y")


def test_ids_are_those_of_the_documents_in_hexadecimal(corpus: Corpus) -> None:
    ids = [one.hex() for shard in corpus.shards for one in read_documents(corpus.inputs, shard)["id"].to_pylist()]
    assert [one for (one,) in rows_of(corpus, "id", kept=None)] == ids
    assert rows_of(corpus, "twin", kept=None)[1:3] == [(None,), (b"bad e f         ".hex(),)]
    some = pa.array([b"\x00\xff", None, b"\x0a\xb0"], pa.binary(2))
    assert hex_ids(some).to_pylist() == ["00ff", None, "0ab0"]
    assert hex_ids(some.slice(2)).to_pylist() == ["0ab0"]
    assert hex_ids(some.slice(0, 0)).to_pylist() == []


@contextmanager
def columns_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Remembers which column of which folder is read meanwhile."""
    read: list[tuple[str, str]] = []
    real = pq.ParquetFile.read

    def remember(self: Any, columns: Any = None, **options: Any) -> pa.Table:
        table = real(self, columns, **options)
        read.extend((str(len(table)), name) for name in table.column_names)
        return table

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "read", remember)
        yield read


def test_only_what_is_asked_for_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.schema  # noqa: B018 - known before
    with columns_read(monkeypatch) as read:
        assert corpus.count_rows() == 4
        assert {name for _, name in read} == {"id", "source", "keep"}
        read.clear()
        assert rows_of(corpus, "score", where="filter_2_words > 25", kept=None) == [(6 / 8,), (1.0,)]
        assert {name for _, name in read} == {"id", "keep", "words", "score"}
        read.clear()
        assert rows_of(corpus, "source", kept=None)[:2] == [("books",), ("web",)]
        assert {name for _, name in read} == {"id", "source"}
        read.clear()
        assert rows_of(corpus, "text", where="filter_words = 4") == [("Xi j k l",)]
        assert [size for size, name in read if name == "text"] == ["3"]  # of the second shard alone


@pytest.mark.slow
def test_a_condition_is_over_the_columns_and_null_is_not_met(corpus: Corpus) -> None:
    assert rows_of(corpus, "original_text", where="score < 2", kept=None) == [
        ("a b c",),
        ("g h",),
        ("i j k l",),
        ("n o",),
    ]
    assert rows_of(corpus, "original_text", where="dropped_by = 'filter'", kept=None) == [("d",), ("m",)]
    found = rows_of(corpus, "text", where="text LIKE 'Xg%' OR url IS NOT NULL")
    assert found == [("Xa b c",), ("Xg h",), ("Xi j k l",), ("Xn o",)]
    assert corpus.count_rows(kept=None, where="true") == 7
    assert corpus.count_rows(where="false") == 0
    with pytest.raises(ExpressionError, match=r"'wrods > 1': there is no column 'wrods' \(columns: .*filter_2_words"):
        corpus.count_rows(where="wrods > 1")
    with pytest.raises(ExpressionError, match="a sub-query is not allowed"):
        corpus.count_rows(where="(SELECT count(*) FROM read_text('/etc/passwd')) > 0")
    with pytest.raises(UnknownColumnError, match="no column 'language'; there are id, source"):
        list(corpus.batches(["language"]))


def test_a_document_is_found_by_the_beginning_of_its_id(corpus: Corpus) -> None:
    wanted = next(one for one, text in rows_of(corpus, "id", "original_text", kept=None) if text == "bad e f")
    found = corpus.document(wanted[:12].upper())
    assert (found["id"], found["original_text"], found["dropped_by"]) == (wanted, "bad e f", "filter-2")
    assert found["steps"] == [
        {"step": "filter", "keep": True, "reason": None, "error": None, "values": {"words": 3}},
        {"step": "clean", "keep": True, "reason": None, "error": None, "values": {"twin": b"bad e f         ".hex()}},
        {"step": "filter-2", "keep": False, "reason": "quarantine", "error": "KeyError: 1", "values": {}},
    ]
    with pytest.raises(UnknownDocumentError, match=r"^7 documents have an id that begins"):
        corpus.document("Ab")
    with pytest.raises(UnknownDocumentError, match=r"^no documents have an id that begins"):
        corpus.document("b")
    for wanted in ("", "zz", "0" * 33):
        with pytest.raises(UnknownDocumentError, match=f"^'{wanted}' is no id: 1 to 32 hexadecimal digits"):
            corpus.document(wanted)


def test_as_a_dataset_it_is_read_as_often_as_asked_and_only_in_part(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CorpusDataset.of(corpus, kept=None)
    assert dataset.schema.names == corpus.columns
    assert (dataset.count_rows(), CorpusDataset.of(corpus).count_rows()) == (7, 4)
    assert dataset.count_rows(filter=pc.field("filter_words") > 2) == 3
    assert dataset.head(2, columns=["text"]).to_pylist() == [{"text": "Xa b c"}, {"text": "d"}]
    some = dataset.to_table(columns=["text"], filter=(pc.field("filter_words") == 1) & (pc.field("source") == "web"))
    assert some.to_pylist() == [{"text": "d"}, {"text": "m"}]
    assert dataset.to_table(columns={"double": pc.field("filter_words") * 2})["double"].to_pylist()[:2] == [6, 2]
    assert sum(len(batch) for batch in dataset.to_batches()) == 7
    with duckdb.connect() as connection:
        connection.register("documents", dataset)
        with columns_read(monkeypatch) as read:
            found = connection.execute(
                "SELECT a.source, b.filter_words FROM documents a JOIN documents b ON a.id = b.id "
                "WHERE b.filter_words > 2 AND a.kept ORDER BY 2"
            ).fetchall()
        assert found == [("books", 3), ("books", 4)]
        assert "text" not in {name for _, name in read}
        connection.unregister("documents")


@pytest.mark.parametrize("seed", range(3))
def test_any_columns_of_any_documents_are_those_of_the_whole_table(seed: int, corpus: Corpus) -> None:
    random_ = random.Random(seed)
    names = corpus.schema.names
    whole = pa.Table.from_batches(corpus.batches(names, kept=None), corpus.schema)
    for _ in range(10):
        columns, kept = random_.sample(names, random_.randint(1, 6)), random_.choice([None, True, False])
        mask = np.ones(len(whole), bool) if kept is None else whole["kept"].to_numpy() == kept
        expected = whole.filter(pa.array(mask)).select(columns).to_pylist()
        found = [row for batch in corpus.batches(columns, kept) for row in batch.to_pylist()]
        assert found == expected, (seed, columns, kept)
