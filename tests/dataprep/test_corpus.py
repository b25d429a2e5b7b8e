"""All documents with the annotations of their steps, read lazily in the order of the
corpus.
"""

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

from gristmill.core.arrays import hex_ids
from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.dataprep.corpus import (
    Corpus,
    UnknownColumnError,
    url_of,
)
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
    write_table(
        folder / f"part-{shard:05d}.parquet",
        pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
    )


def judge(
    inputs: dict[str, Path],
    step: str,
    folder: Path,
    drop: Callable[[str], str | None],
    error: str = "",
    edit: Callable[[str], list[tuple[int, int, str]]] | None = None,
    **measures: Callable[[str], Any],
) -> None:
    """Write a step's annotations: drops, measures and edits of each text that it
    sees.
    """
    for shard in shard_names(inputs["ingest"]):
        read = read_shard(inputs, shard)
        texts = read.documents["text"].take(pa.array(read.rows)).to_pylist()
        errors = [error if error and text.startswith("bad") else None for text in texts]
        columns: dict[str, Any] = {
            name: pa.array(
                [
                    None if failed else measure(text)
                    for text, failed in zip(texts, errors, strict=True)
                ],
                KINDS.get(name),
            )
            for name, measure in measures.items()
        }
        if edit is not None:
            columns["edits"] = edits_array([edit(text) for text in texts])
        table, _ = annotate(
            read.documents,
            read.rows,
            read.rows,
            [drop(text) for text in texts],
            columns,
            errors,
        )
        write_table(folder / step / shard, table)
    inputs[step] = folder / step


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two shards: `filter` drops short texts, `clean` puts X before each text,
    `filter-2` fails on bad ones.
    """
    for shard, texts in enumerate(
        (["a b c", "d", "bad e f", "g h"], ["i j k l", "m", "n o"])
    ):
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
    table = CorpusDataset.of(corpus, columns, **options).to_table()
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def test_document_comes_with_its_verdict_and_measures(corpus: Corpus) -> None:
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
        corpus,
        "text",
        "kept",
        "dropped_by",
        "reason",
        "error",
        "filter_words",
        "filter_2_words",
        kept=None,
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


def test_urls_and_licences_of_documents_override_those_of_sources(
    corpus: Corpus,
) -> None:
    rows = rows_of(corpus, "url", "licence", "source", kept=None)
    assert rows[:4] == [
        ("https://a.example/1", "CC0-1.0", "books"),
        (None, "CC-BY-4.0", "web"),
        ("http://b.example", None, "books"),
        (None, "CC-BY-4.0", "web"),
    ]
    assert (
        url_of("https://x.example/p#0123abcd-0123-0123-0123-0123456789ab", "{}")
        == "https://x.example/p"
    )
    assert (url_of("a.jsonl#3", None), url_of("a.jsonl#3", '{"URL": "x://y"}')) == (
        None,
        "x://y",
    )


def test_ids_are_hexadecimal(corpus: Corpus) -> None:
    ids = []
    for shard in corpus.shards:
        ids += [
            document.hex()
            for document in read_documents(corpus.inputs, shard)["id"].to_pylist()
        ]
    assert rows_of(corpus, "id", kept=None) == [(document,) for document in ids]
    assert rows_of(corpus, "twin", kept=None)[1:3] == [
        (None,),
        (b"bad e f         ".hex(),),
    ]
    binary_ids = pa.array([b"\x00\xff", None, b"\x0a\xb0"], pa.binary(2))
    assert hex_ids(binary_ids).to_pylist() == ["00ff", None, "0ab0"]
    assert hex_ids(binary_ids.slice(2)).to_pylist() == ["0ab0"]
    assert hex_ids(binary_ids.slice(0, 0)).to_pylist() == []


@contextmanager
def columns_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Record the (rows, name) of each column that is read meanwhile."""
    read: list[tuple[str, str]] = []
    read_table = pq.ParquetFile.read

    def remember(self: Any, columns: Any = None, **options: Any) -> pa.Table:
        table = read_table(self, columns, **options)
        read.extend((str(len(table)), name) for name in table.column_names)
        return table

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "read", remember)
        yield read


def test_only_needed_columns_and_shards_are_read(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.schema  # noqa: B018 - known before
    with columns_read(monkeypatch) as read:
        assert corpus.count_rows() == 4
        assert {name for _, name in read} == {"id", "source", "keep"}
        read.clear()
        assert rows_of(corpus, "score", where="filter_2_words > 25", kept=None) == [
            (6 / 8,),
            (1.0,),
        ]
        assert {name for _, name in read} == {"id", "keep", "words", "score"}
        read.clear()
        assert rows_of(corpus, "source", kept=None)[:2] == [("books",), ("web",)]
        assert {name for _, name in read} == {"id", "source"}
        read.clear()
        assert rows_of(corpus, "text", where="filter_words = 4") == [("Xi j k l",)]
        # of the second shard alone
        assert [size for size, name in read if name == "text"] == ["3"]


@pytest.mark.slow
def test_condition_uses_the_columns_and_null_fails_it(corpus: Corpus) -> None:
    assert rows_of(corpus, "original_text", where="score < 2", kept=None) == [
        ("a b c",),
        ("g h",),
        ("i j k l",),
        ("n o",),
    ]
    assert rows_of(
        corpus, "original_text", where="dropped_by = 'filter'", kept=None
    ) == [("d",), ("m",)]
    rows = rows_of(corpus, "text", where="text LIKE 'Xg%' OR url IS NOT NULL")
    assert rows == [("Xa b c",), ("Xg h",), ("Xi j k l",), ("Xn o",)]
    assert corpus.count_rows(kept=None, where="true") == 7
    assert corpus.count_rows(where="false") == 0
    with pytest.raises(
        ExpressionError, match=r"'wrods > 1': .*'wrods' .*filter_2_words"
    ):
        corpus.count_rows(where="wrods > 1")
    with pytest.raises(ExpressionError, match="sub-query"):
        corpus.count_rows(where="(SELECT count(*) FROM read_text('/etc/passwd')) > 0")
    with pytest.raises(UnknownColumnError, match=r"'language'.* id, source"):
        CorpusDataset.of(corpus, ["language"])


def test_dataset_is_reread_lazily_and_in_part(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CorpusDataset.of(corpus, kept=None)
    assert dataset.schema.names == corpus.columns
    assert (dataset.count_rows(), CorpusDataset.of(corpus).count_rows()) == (7, 4)
    assert dataset.count_rows(filter=pc.field("filter_words") > 2) == 3
    assert dataset.head(2, columns=["text"]).to_pylist() == [
        {"text": "Xa b c"},
        {"text": "d"},
    ]
    documents = dataset.to_table(
        columns=["text"],
        filter=(pc.field("filter_words") == 1) & (pc.field("source") == "web"),
    )
    assert documents.to_pylist() == [{"text": "d"}, {"text": "m"}]
    assert dataset.to_table(columns={"double": pc.field("filter_words") * 2})[
        "double"
    ].to_pylist()[:2] == [6, 2]
    assert sum(len(batch) for batch in dataset.to_batches()) == 7
    with duckdb.connect() as connection:
        connection.register("documents", dataset)
        with columns_read(monkeypatch) as read:
            rows = connection.execute(
                "SELECT a.source, b.filter_words FROM documents a JOIN documents b ON "
                "a.id = b.id WHERE b.filter_words > 2 AND a.kept ORDER BY 2"
            ).fetchall()
        assert rows == [("books", 3), ("books", 4)]
        assert "text" not in {name for _, name in read}
        connection.unregister("documents")


@pytest.mark.parametrize("seed", range(3))
def test_any_selection_equals_that_of_the_full_table(seed: int, corpus: Corpus) -> None:
    rng = random.Random(seed)
    names = corpus.schema.names
    full_table = CorpusDataset.of(corpus, names, kept=None).to_table()
    for _ in range(10):
        columns, kept = (
            rng.sample(names, rng.randint(1, 6)),
            rng.choice([None, True, False]),
        )
        mask = (
            np.ones(len(full_table), bool)
            if kept is None
            else full_table["kept"].to_numpy() == kept
        )
        expected = full_table.filter(pa.array(mask)).select(columns).to_pylist()
        rows = CorpusDataset.of(corpus, columns, kept).to_table().to_pylist()
        assert rows == expected, (seed, columns, kept)
