"""Data sets and models of the Hugging Face Hub, at a commit, from a stand-in."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from gristmill.core.files import as_path
from gristmill.core.hub import HubFiles, at_commit, snapshot
from gristmill.dataprep.examples.kept_examples import set_names
from gristmill.dataprep.examples.read_examples import examples_listing
from gristmill.dataprep.readers.sources import (
    SourceError,
    find_files,
    listing,
    outside_listing,
)
from gristmill.flows.authoring.new_manifest import source_name
from gristmill.flows.cli.data import anchored
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.schema.sources import Source
from tests.commands import GRISTMILL, call
from tests.flows.hub_stand_in import Hub, file_info, serve_hub

TOKEN = "hf_thetokenofthesetests"
ROWS = [{"text": f"Letter {number} about the old river house."} for number in range(6)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS[:4]).encode()
EDITED = JSONL.replace(b"Letter 0", b"Note 0")


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS[4:]), sink)
    return sink.getvalue()


LETTERS = {
    ".gitattributes": b"",
    "README.md": b"# Letters\n",
    "data/a.jsonl": JSONL,
    "data/b.parquet": parquet(),
    "other/c.jsonl": JSONL,
}
MODEL = {
    "README.md": b"# Model\n",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process and its children ask, with an empty cache of its own."""
    cache = tmp_path / "cache"
    with serve_hub() as hub:
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }.items():
            monkeypatch.setenv(name, value)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        for cached in (snapshot, at_commit):
            cached.cache_clear()
        HubFiles.clear_instance_cache()
        yield hub


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a command in a process of its own; returns its exit code and output."""
    process = subprocess.run(
        [*GRISTMILL, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def test_glob_of_a_data_set_lists_its_files_with_the_hashes_of_their_content(
    hub: Hub,
) -> None:
    commit = hub.push("ann/letters", LETTERS)
    source = Source.model_validate(
        {"path": f"hf://datasets/ann/letters@{commit}/**/*.jsonl"}
    )
    assert listing("letters", source) == [
        {"path": path, "size": len(JSONL), "stamp": file_info(path, JSONL)["oid"]}
        for path in ("data/a.jsonl", "other/c.jsonl")
    ]
    folder = f"hf://datasets/ann/letters@{commit}/data"
    assert [file["path"] for file in examples_listing(folder)] == [
        "a.jsonl",
        "b.parquet",
    ]
    assert set_names([f"hf://datasets/ann/letters@{commit}", folder]) == [
        "letters",
        "data",
    ]
    files = find_files("letters", Source.model_validate({"path": folder})).files
    assert [as_path(file.location).read_bytes() for file in files] == [
        JSONL,
        LETTERS["data/b.parquet"],
    ]
    assert hub.tokens == {TOKEN}


def test_files_stay_those_of_the_commit_when_the_branch_moves(hub: Hub) -> None:
    first = hub.push("ann/letters", LETTERS)
    second = hub.push("ann/letters", {**LETTERS, "data/a.jsonl": EDITED})
    texts = {
        commit: as_path(f"hf://datasets/ann/letters@{commit}/data/a.jsonl").read_bytes()
        for commit in (first, second)
    }
    assert texts == {first: JSONL, second: EDITED}


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", "@0123abc"])
@pytest.mark.parametrize("prefix", ["sources: {a: {path", "model: {path"])
def test_revision_that_is_not_a_commit_is_refused_with_the_command_that_writes_one(
    prefix: str, revision: str
) -> None:
    name = "hf://datasets/ann/letters" if "sources" in prefix else "hf://ann/model"
    with pytest.raises(ManifestError) as refusal:
        parse_manifest(
            f"name: m\n{prefix}: {name}{revision}{'}' * prefix.count('{')}\n", "m.yaml"
        )
    (problem,) = refusal.value.problems
    assert (problem.line, problem.key.endswith(".path")) == (2, True)
    assert "gristmill lock MANIFEST" in problem.message


def test_lock_writes_commits_for_branches_and_tags_and_nothing_else(
    hub: Hub, tmp_path: Path
) -> None:
    newest = hub.push("ann/letters", LETTERS)
    tagged = hub.push("ann/model", MODEL, "v1.0")
    converted = hub.push("ann/books", LETTERS, "refs/convert/parquet")
    text = """\
name: m  # hf://datasets/ann/letters@main is this week's
sources:
  # letters
  a: {path: 'hf://datasets/ann/letters@main/data/*.jsonl', weight: 0.5}  # half
  b: {path: hf://datasets/ann/letters, weight: 0.25}
  c: {path: hf://datasets/ann/books@refs/convert/parquet/data}
model:
  path: "hf://ann/model@v1.0"
"""
    manifest = tmp_path / "m.yaml"
    manifest.write_text(text)
    hub.refusals = 1
    call("lock", manifest)
    locked = (
        text.replace("letters@main/data", f"letters@{newest}/data")
        .replace("letters,", f"letters@{newest},")
        .replace("refs/convert/parquet", converted)
        .replace("v1.0", tagged)
    )
    assert manifest.read_text() == locked
    hub.push("ann/letters", {**LETTERS, "data/a.jsonl": EDITED})
    hub.requests.clear()
    call("lock", manifest)
    assert (manifest.read_text(), hub.requests) == (locked, [])
    call("lock", tmp_path / "no.yaml", code=2)
    # the paths of `look` and `new`
    tagged_model = anchored("hf://ann/model@v1.0")
    assert tagged_model == f"hf://ann/model@{tagged}"
    assert source_name(tagged_model, []) == "model"


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("hf://datasets/ann/nothing@main", None),
        ("hf://datasets/ann/letters@never", None),
        ("hf://letters@main", None),
        ("hf://datasets/ann/letters@main", "http://127.0.0.1:1"),
    ],
)
def test_lock_leaves_the_manifest_as_it_is_if_a_revision_cannot_be_looked_up(
    path: str,
    address: str | None,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.push("ann/letters", LETTERS)
    monkeypatch.setattr(constants, "ENDPOINT", address or hub.url)
    manifest = tmp_path / "m.yaml"
    manifest.write_text(f"name: m\nsources: {{a: {{path: {path}}}}}\n")
    before = manifest.read_bytes()
    call("lock", manifest, code=2)
    assert manifest.read_bytes() == before


def test_refusals_of_the_rate_limit_are_waited_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    commit = hub.push("ann/letters", LETTERS)
    hub.refusals = 3
    assert at_commit("hf://datasets/ann/letters@main") == (
        f"hf://datasets/ann/letters@{commit}"
    )
    path = f"hf://datasets/ann/letters@{commit}/data/a.jsonl"
    for _ in range(2):  # the look-up of the revision, and the file itself
        hub.refusals = 2
        assert as_path(path).read_bytes() == JSONL
    assert (hub.refusals, len(pauses)) == (0, 7)
    hub.refusals = 2
    model = hub.push("ann/model", MODEL)
    assert as_path(f"hf://ann/model@{model}").is_dir()
    assert hub.refusals == 0


def test_model_is_a_local_folder_of_the_files_that_are_read(hub: Hub) -> None:
    commit = hub.push("ann/model", MODEL)
    folder = as_path(f"hf://ann/model@{commit}")
    read = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: MODEL[name] for name in read
    }
    (folder / "pytorch_model.bin").write_bytes(b"of another program")
    listed = outside_listing("model.path", f"hf://ann/model@{commit}")
    assert {entry["path"] for entry in listed} == read
    requests = len(hub.requests)
    snapshot.cache_clear()
    assert as_path(f"hf://ann/model@{commit}") == folder
    assert len(hub.requests) == requests


def test_data_set_is_downloaded_whole(hub: Hub) -> None:
    commit = hub.push("ann/letters", LETTERS)
    folder = snapshot(f"hf://datasets/ann/letters@{commit}")
    assert (folder / "README.md").read_bytes() == LETTERS["README.md"]
    assert (folder / "data" / "b.parquet").read_bytes() == LETTERS["data/b.parquet"]
    part = snapshot(f"hf://datasets/ann/letters@{commit}/data")
    assert sorted(os.listdir(part)) == ["a.jsonl", "b.parquet"]


def test_file_of_a_model_is_downloaded_alone_and_stamped_with_its_hash(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push("ann/model", MODEL)
    monkeypatch.setattr("gristmill.dataprep.readers.sources.HASHED_BYTES", 0)
    path = f"hf://ann/model@{commit}/model.safetensors"
    (entry,) = outside_listing("rules.model", path)
    assert entry == {
        "path": "model.safetensors",
        "size": len(MODEL["model.safetensors"]),
        "stamp": file_info("model.safetensors", b"weights")["lfs"]["oid"],
    }
    assert os.listdir(as_path(path).parent) == ["model.safetensors"]


def test_missing_name_is_an_error_that_names_it(hub: Hub) -> None:
    hub.push("ann/letters", LETTERS)
    path = f"hf://datasets/ann/letters@{'1' * 40}/data"
    with pytest.raises(SourceError, match="ann/letters"):
        find_files("a", Source.model_validate({"path": path}))
    with pytest.raises(SourceError, match="ann/nothing"):
        outside_listing("model.path", f"hf://ann/nothing@{'1' * 40}")


def test_model_is_read_from_the_cache_offline_and_a_data_set_is_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters, model = hub.push("ann/letters", LETTERS), hub.push("ann/model", MODEL)
    path = f"hf://ann/model@{model}"
    online = outside_listing("model.path", path)
    snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    requests = len(hub.requests)
    assert outside_listing("model.path", path) == online
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        outside_listing("model.path", f"hf://ann/model@{'1' * 40}")
    with pytest.raises(SourceError, match=r"(?i)offline"):
        find_files(
            "a",
            Source.model_validate({"path": f"hf://datasets/ann/letters@{letters}"}),
        )
    assert len(hub.requests) == requests


@pytest.mark.slow
def test_run_reads_a_data_set_and_a_model_and_repeats_offline_without_the_token(
    hub: Hub, tmp_path: Path
) -> None:
    from tests.flows.test_begin_anywhere import write_small_model

    write_small_model(tmp_path)
    hub.push("ann/letters", LETTERS)
    hub.push(
        "ann/small",
        {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()},
    )
    (tmp_path / "data.yaml").write_text(
        "name: letters\n"
        "sources: {letters: {path: 'hf://datasets/ann/letters@main/data'}}\n"
    )
    (tmp_path / "model.yaml").write_text(
        "name: small\nmodel: {path: hf://ann/small@main}\nexport: {}\n"
    )
    outputs = []
    for manifest in ("data.yaml", "model.yaml"):
        for command in (["plan"], ["lock"], ["run", "--no-ui"]):
            code, output = run(tmp_path, command[0], manifest, *command[1:])
            outputs.append(output)
            assert code == (2 if command == ["plan"] else 0), output
    (documents,) = (tmp_path / "gristmill-store" / "ingest").glob("letters--*/data")
    texts = pq.read_table(documents, columns=["text"])["text"].to_pylist()
    assert sorted(texts) == [row["text"] for row in ROWS]
    hub.requests.clear()
    again = ("run", "model.yaml", "--no-ui", "--store", "second")
    code, output = run(tmp_path, *again, HF_HUB_OFFLINE="1")
    outputs.append(output)
    assert (code, hub.requests) == (0, []), output
    first, second = (
        {path.name for path in (tmp_path / store / "model").iterdir()}
        for store in ("gristmill-store", "second")
    )
    assert first == second
    stored = [
        path.read_bytes() for path in tmp_path.rglob("*store*/**/*") if path.is_file()
    ]
    assert stored
    assert hub.tokens == {TOKEN}
    assert TOKEN not in "".join(outputs)
    assert not [content for content in stored if TOKEN.encode() in content]
