"""Exported documents: each selected one once, in the order of the corpus, with the same
bytes for any workers.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.corpus import Corpus, UnknownColumnError
from gristmill.dataprep.exporting import export_documents as exporting
from gristmill.dataprep.exporting.dataset_card import (
    Exported,
    data_type,
    hub_licence,
    size_category,
)
from gristmill.dataprep.exporting.export_documents import (
    LIST,
    export_documents,
    plan_files,
    write_tasks,
)
from gristmill.mixtures.schema.evaluation import Documents
from tests.dataprep.document_shards import MakeContext
from tests.dataprep.test_corpus import judge, write_documents

ABOUT: dict[str, Any] = {
    "name": "small",
    "sources": [
        {"name": "web", "licence": "CC-BY-4.0"},
        {"name": "books", "licence": None},
    ],
    "steps": [
        {"name": "filter", "stage": "filter", "settings": [["rules.x.min_words", 2]]}
    ],
    "manifest": "name: small\n",
    "code": [],
}
SEED = 7


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Six shards of up to 30 documents; `filter` drops texts without an e, in shard 2
    all of them.
    """
    rng = random.Random(SEED)
    for shard in range(6):
        texts = [
            "".join(rng.choices("aé e|\n", k=rng.randint(0, 60)))
            for _ in range(rng.randint(1, 30))
        ]
        write_documents(
            tmp_path / "ingest", shard, ["aa", "bb"] if shard == 2 else texts
        )
    inputs = {"ingest": tmp_path / "ingest"}
    judge(
        inputs,
        "filter",
        tmp_path,
        lambda text: None if "e" in text else "no_e",
        edit=lambda text: [(0, 0, "X")],
        score=lambda text: len(text) / 7 if len(text) % 5 else float("inf"),
        language=lambda text: "en" if len(text) % 2 else "de",
    )
    return Corpus(inputs, {"web": "CC-BY-4.0"})


Export = Callable[..., Exported]


@pytest.fixture
def export(corpus: Corpus, tmp_path: Path, make_context: MakeContext) -> Export:
    """Export the corpus: (section, folder, **settings of BeamEngine) -> listing."""
    return lambda section, out="out", **settings: export_documents(
        corpus,
        section,
        ABOUT,
        tmp_path / out,
        make_context(f"work-{out}", **settings),
    )


def written(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def rows_in(out: Path, listed: Exported) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in listed.files:
        if name.endswith(".parquet"):
            rows += pq.read_table(out / name).to_pylist()
        else:
            text = (
                zstandard.ZstdDecompressor()
                .stream_reader((out / name).open("rb"))
                .read()
                .decode()
            )
            rows += [json.loads(line) for line in text.split("\n")[:-1]]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        Documents(shard_bytes=700),
        Documents(format="jsonl", shard_bytes=300, dropped=True),
        Documents(
            format="hf",
            shard_bytes=10**6,
            columns=("text", "original_text", "score"),
            where="language = 'de'",
        ),
        Documents(columns=("id", "source"), where="false"),
        Documents(format="jsonl", where="score > 1e9"),
    ],
)
def test_selected_documents_are_written_in_the_order_of_the_corpus(
    export: Export, corpus: Corpus, tmp_path: Path, section: Documents
) -> None:
    listing = export(section)
    columns = section.columns or corpus.columns
    dataset = CorpusDataset.of(corpus, columns, not section.dropped, section.where)
    expected = dataset.to_table().to_pylist()
    if section.format == "jsonl":
        expected = [
            {**row, "score": None if row["score"] == float("inf") else row["score"]}
            for row in expected
        ]
    assert rows_in(tmp_path / "out", listing) == expected
    assert listing.documents == len(expected)
    if "text" in columns:
        assert listing.text_bytes == sum(len(row["text"].encode()) for row in expected)
    for name, entry in listing.files.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
    assert json.loads((tmp_path / "out" / LIST).read_bytes())["files"] == listing.files


@pytest.mark.parametrize("form", ["parquet", "jsonl", "hf"])
def test_workers_and_tasks_do_not_change_the_bytes(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    section = Documents(format=form, shard_bytes=400)
    for name, workers, task_bytes in (
        ("one", 1, 10**9),
        ("many", 3, 1),
        ("some", 2, 1000),
    ):
        monkeypatch.setattr(exporting, "TASK_BYTES", task_bytes)
        export(section, name, workers=workers, mode="threads")
    assert len(written(tmp_path / "one")) > 5
    assert (
        written(tmp_path / "one")
        == written(tmp_path / "many")
        == written(tmp_path / "some")
    )


def test_interrupted_export_is_resumed_and_writes_its_listing_last(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, calls = Documents(shard_bytes=400), list[str]()
    export(section, "whole")
    monkeypatch.setattr(exporting, "TASK_BYTES", 1)
    write_file = exporting._write_file

    def failing(path: Path, *arguments: Any) -> dict[str, Any]:
        calls.append(path.name)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write_file(path, *arguments)

    monkeypatch.setattr(exporting, "_write_file", failing)
    with pytest.raises(OSError, match="No space left"):
        export(section)
    assert not (tmp_path / "out" / LIST).exists()
    export(section)
    # each file once, the failed one twice
    assert sorted(calls) == sorted([*set(calls), calls[2]])
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_lost_document_is_an_error(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = exporting._pieces
    monkeypatch.setattr(
        exporting, "_pieces", lambda cut, shard: list(pieces(cut, shard))[1:]
    )
    with pytest.raises(
        ConservationError, match=r"documents-00000-of-00001\.parquet .*\d+ documents"
    ):
        export(Documents())
    assert not (tmp_path / "out" / LIST).exists()
    with pytest.raises(UnknownColumnError, match="'langauge'"):
        export(Documents(columns=("langauge",)), "other")


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=6), st.integers(1, 40)
)
def test_files_hold_consecutive_documents_up_to_the_shard_size(
    lengths: list[list[int]], shard_bytes: int
) -> None:
    cuts = plan_files((np.array(shard, np.int64) for shard in lengths), shard_bytes)
    flat = [
        (number, place)
        for number, shard in enumerate(lengths)
        for place in range(len(shard))
    ]
    tables = [
        pa.table({"shard": [number] * len(shard), "place": range(len(shard))})
        for number, shard in enumerate(lengths)
    ]
    written_places: list[tuple[int, int]] = []
    for cut in cuts:
        places = [
            (row["shard"], row["place"])
            for piece in exporting._pieces(cut, tables.__getitem__)
            for row in piece.to_pylist()
        ]
        sizes = [lengths[shard][place] for shard, place in places]
        assert (cut.documents, cut.text_bytes) == (len(places), sum(sizes))
        assert sum(sizes) <= shard_bytes or len(places) == 1 or sum(sizes[1:]) == 0
        written_places += places
    assert written_places == flat
    assert all(cut.documents for cut in cuts) or (len(cuts) == 1 and not flat)
    assert [cut for task in write_tasks(cuts) for cut in task.payload["cuts"]] == [
        vars(cut) for cut in cuts
    ]


def test_card_and_metadata_describe_the_export(
    export: Export, corpus: Corpus, tmp_path: Path
) -> None:
    listing, out = export(Documents(format="hf", shard_bytes=500)), tmp_path / "out"
    card = (out / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["license"] == ["cc-by-4.0", "cc0-1.0", "unknown"]
    assert set(header["language"]) == {"de", "en"}
    assert header["size_categories"] == ["n<1K"]
    assert header["configs"][0]["data_files"] == [
        {"split": "train", "path": "data/train-*.parquet"}
    ]
    total, kept = corpus.count_rows(kept=None), corpus.count_rows()
    assert f"| filter | {total} | {kept} | no_e {total - kept} |" in card
    assert "   - `rules.x.min_words`: `2`" in card
    assert "Duplicates were not looked for" in card
    assert "Languages were not determined" not in card
    assert "```yaml\nname: small\n```" in card
    metadata = json.loads((out / "croissant.json").read_bytes())
    assert metadata["conformsTo"] == [
        "http://mlcommons.org/croissant/1.0",
        "http://mlcommons.org/croissant/RAI/1.0",
    ]
    unknown = {
        row.source: row.share for row in listing.sources if row.licence == "unknown"
    }
    assert metadata["license"] == [
        "https://spdx.org/licenses/CC-BY-4.0",
        "https://spdx.org/licenses/CC0-1.0",
        "unknown",
    ]
    (preprocessing,) = metadata["rai:dataPreprocessingProtocol"]
    assert preprocessing == (
        f"filter (rules.x.min_words: 2): {total} documents read, {kept} kept; dropped "
        f"by no_e {total - kept}"
    )
    limit = f"{sum(unknown.values()):.1%} of the text has no known licence."
    assert limit in metadata["rai:dataLimitations"]
    assert f"- {limit}" in card
    assert "rai:dataCollection" not in metadata
    assert_valid_croissant(out / "croissant.json")
    assert {
        item["@id"]: item["sha256"]
        for item in metadata["distribution"]
        if item["@type"] == "cr:FileObject"
    } == {name: entry["sha256"] for name, entry in listing.files.items()}
    assert [
        item["name"] for item in metadata["recordSet"][0]["field"]
    ] == corpus.columns


def assert_valid_croissant(path: Path) -> None:
    """Assert that the validator of MLCommons finds no error, and reads the fields of
    responsible AI.
    """
    mlcroissant = pytest.importorskip("mlcroissant")
    dataset = mlcroissant.Dataset(path)
    assert not dataset.metadata.ctx.issues.errors
    assert dataset.metadata.data_preprocessing_protocol
    assert dataset.metadata.data_limitations


def test_hub_folder_loads_with_datasets(
    export: Export, corpus: Corpus, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    export(Documents(format="hf", shard_bytes=500))
    loaded = datasets.load_dataset(
        str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")
    )
    texts = CorpusDataset.of(corpus, ["text"]).to_table()["text"]
    assert loaded["text"][:] == texts.to_pylist()
    assert loaded.column_names == corpus.columns


def test_licences_sizes_and_types_use_standard_vocabularies() -> None:
    assert [
        hub_licence(value)
        for value in (
            "CC-BY-4.0",
            "ODC-By-1.0",
            "GPL-3.0-only",
            "LicenseRef-my-own",
            "MIT AND Apache-2.0",
            "unknown",
        )
    ] == [
        "cc-by-4.0",
        "odc-by",
        "gpl-3.0",
        "other",
        "other",
        "unknown",
    ]
    assert [size_category(value) for value in (0, 999, 1000, 5 * 10**6, 10**13)] == [
        "n<1K",
        "n<1K",
        "1K<n<10K",
        "1M<n<10M",
        "n>1T",
    ]
    kinds = [
        pa.int8(),
        pa.uint64(),
        pa.float64(),
        pa.float16(),
        pa.bool_(),
        pa.large_string(),
    ]
    assert [data_type(str(value)) for value in kinds] == [
        "sc:Integer",
        "sc:Integer",
        "sc:Float",
        "sc:Float",
        "sc:Boolean",
        "sc:Text",
    ]
