"""Hugging Face datasets on disk and in the hub's layout: splits, damage, incomplete
folders.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.readers.dataset_hf import DatasetError, data_files
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import Reading, Record
from gristmill.dataprep.readers.sources import (
    DatasetFolder,
    SourceError,
    StoredFile,
)
from tests.dataprep.source_files import files_of, find


def folder_of(files: Mapping[str, str]) -> DatasetFolder:
    """Folder with these texts in memory."""

    class Folder(DatasetFolder):
        def read(self, name: str) -> bytes:
            if name not in files:
                raise FileNotFoundError(name)
            return files[name].encode()

    return Folder("", {name: StoredFile(name, name, 0, "") for name in files})


def split(files: Mapping[str, str], name: str = "train") -> list[str]:
    return data_files(folder_of(files), name)


def save_to_disk(folder: Path, texts: list[str], shards: int = 2) -> None:
    """Write a folder like `datasets.Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    for n, name in enumerate(names):
        shard_texts = texts[n::shards]
        batches = [
            pa.record_batch(
                {
                    "text": shard_texts[at : at + 2],
                    "meta": [{"url": text} for text in shard_texts[at : at + 2]],
                }
            )
            for at in range(0, len(shard_texts), 2)
        ]
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, batches[0].schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_split": "train",
        "_format_type": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def texts_of(path: Path, reading: Reading | None = None, **keys: str) -> list[str]:
    files = files_of(path, format="hf", **keys)
    records = [
        record for file in files for record in read_records(file, reading or Reading())
    ]
    return [
        record.text if isinstance(record, Record) else repr(record)
        for record in records
    ]


def test_saved_dataset_is_read_from_its_arrow_streams(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", ["a", "b", "c", "d", "e"])
    assert texts_of(tmp_path / "set") == ["a", "c", "e", "b", "d"]
    assert texts_of(tmp_path / "set", Reading(text="meta.url")) == [
        "a",
        "c",
        "e",
        "b",
        "d",
    ]
    with pytest.raises(SourceError, match=r"source 's': .*'test'.*train"):
        texts_of(tmp_path / "set", split="test")


def test_saved_dataset_dict_has_a_folder_per_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set/train", ["a"], 1)
    save_to_disk(tmp_path / "set/test", ["b"], 1)
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert (texts_of(tmp_path / "set"), texts_of(tmp_path / "set", split="test")) == (
        ["a"],
        ["b"],
    )
    with pytest.raises(SourceError, match=r"'dev'.*train, test"):
        texts_of(tmp_path / "set", split="dev")
    (tmp_path / "set/train/data-00000-of-00001.arrow").unlink()
    with pytest.raises(SourceError, match=r"data-00000-of-00001\.arrow"):
        texts_of(tmp_path / "set")


def test_hub_splits_follow_from_file_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")
    (tmp_path / "load.py").write_text("raise SystemExit('code of a dataset was run')")
    for name, text in (
        ("train-00000-of-00002", "a"),
        ("train-00001-of-00002", "b"),
        ("validation-00000", "c"),
    ):
        pq.write_table(pa.table({"text": [text]}), tmp_path / f"data/{name}.parquet")
    assert texts_of(tmp_path) == ["a", "b"]
    assert texts_of(tmp_path, split="validation") == ["c"]
    with pytest.raises(SourceError, match=r"'test'.*train, validation"):
        texts_of(tmp_path, split="test")


def test_split_words_need_punctuation_around_them() -> None:
    files = dict.fromkeys(
        ["a/trainer.jsonl", "dev.jsonl", "my-training_1.jsonl", "train2.csv", "x.py"],
        "",
    )
    assert split(files) == ["my-training_1.jsonl", "train2.csv"]
    assert split(files, "validation") == ["dev.jsonl"]
    assert split(dict.fromkeys(["b.jsonl", "a.jsonl"], "")) == ["a.jsonl", "b.jsonl"]


def test_readme_can_assign_files_to_splits() -> None:
    card = """---
configs:
- config_name: small
  data_files: s.jsonl
- config_name: large
  default: true
  data_files:
  - {split: train, path: ["one/*.jsonl", "two.jsonl"]}
  - {split: test, path: none.jsonl}
---
"""
    files = {
        "README.md": card,
        "s.jsonl": "",
        "one/a.jsonl": "",
        "one/b.csv": "",
        "two.jsonl": "",
    }
    assert split(files) == ["one/a.jsonl", "two.jsonl"]
    with pytest.raises(DatasetError, match=r"'dev'.*README\.md.*train, test"):
        split(files, "dev")
    with pytest.raises(DatasetError, match=r"'test'.*none\.jsonl"):
        split(files, "test")
    assert split({**files, "README.md": "---\nconfigs:\n- data_files: s.*\n---\n"}) == [
        "s.jsonl"
    ]
    by_split = "---\nconfigs:\n- data_files: {train: two.jsonl, dev: [s.jsonl]}\n---\n"
    assert split({**files, "README.md": by_split}, "dev") == ["s.jsonl"]
    for odd in ("[3]", "7", "[{data_files: [{split: train}]}]", "[{data_files: 7}]"):
        with pytest.raises(DatasetError, match="hub"):
            split({**files, "README.md": f"---\nconfigs: {odd}\n---\n"})
    with pytest.raises(DatasetError, match=r"README\.md.*YAML"):
        split({**files, "README.md": "---\n[\n---\n"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no data"),
        ({"picture.png": ""}, "no data"),
        ({"state.json": "{"}, r"state\.json"),
        ({"state.json": "[]"}, "JSON object"),
        ({"state.json": "{}"}, "incomplete"),
        ({"dataset_dict.json": '{"splits": ["train"]}'}, r"train/state\.json"),
    ],
)
def test_folder_that_is_not_a_dataset_is_rejected_with_the_reason(
    files: dict[str, str], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        split(files)


def test_dataset_path_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match="folder"):
        find(tmp_path / "a.parquet", format="hf")


def test_dataset_is_read_from_any_store() -> None:
    from upath import UPath

    root = UPath("memory://hf-test/set")
    (root / "data").mkdir(parents=True)
    (root / "data" / "train.jsonl").write_bytes(b'{"text": "far"}\n')
    files = files_of(root, format="hf")
    assert [file.name for file in files] == ["data/train.jsonl"]
    (record,) = read_records(files[0], Reading())
    assert isinstance(record, Record)
    assert record.text == "far"
