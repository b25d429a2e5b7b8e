"""Sources: listings of folders, globs, links and remote files."""

import hashlib
import os
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gristmill.core import files
from gristmill.dataprep.readers.sources import (
    SourceError,
    listing,
    outside_listing,
)
from gristmill.mixtures.schema.sources import Source
from tests.dataprep.source_files import files_of, find, listed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Folder with text at two depths, compressed JSONL, a hidden file and a picture."""
    root = tmp_path / "corpus"
    for name, content in {
        "b.txt": b"bb",
        "a/deep/c.md": b"ccc",
        "a/d.jsonl.gz": b"dddd",
        "a/.hidden.txt": b"h",
        "picture.png": b"p",
        "notes.xyz": b"x",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def names(path: object, **keys: str) -> list[str]:
    return [entry["path"] for entry in listed(path, **keys)]


def test_folder_lists_known_extensions_at_any_depth_in_order(tree: Path) -> None:
    assert names(tree) == ["a/d.jsonl.gz", "a/deep/c.md", "b.txt"]
    listed_files = find(tree, format="auto")
    assert [(file.format, file.compression) for file in listed_files.files] == [
        ("jsonl", ".gz"),
        ("text", ""),
        ("text", ""),
    ]
    assert listed_files.ignored == {".png": 1, ".xyz": 1}


def test_format_selects_files_of_a_folder(tree: Path) -> None:
    assert names(tree, format="jsonl") == ["a/d.jsonl.gz"]
    assert names(tree, format="text") == [
        "a/d.jsonl.gz",
        "a/deep/c.md",
        "b.txt",
        "notes.xyz",
        "picture.png",
    ]


def test_glob_names_are_relative_to_its_fixed_part(tree: Path) -> None:
    assert names(tree / "**" / "*.md") == ["a/deep/c.md"]
    assert names(tree / "a" / "**" / "*.md") == ["deep/c.md"]
    assert names(tree / "*.txt") == ["b.txt"]


def test_moved_folder_keeps_its_listing(tree: Path, tmp_path: Path) -> None:
    before = listed(tree)
    tree.rename(tmp_path / "elsewhere")
    assert listed(tmp_path / "elsewhere") == before


def test_single_file_is_named_without_its_folder(tree: Path) -> None:
    (entry,) = listed(tree / "b.txt")
    assert (entry["path"], entry["size"]) == ("b.txt", 2)
    assert entry["stamp"] == str(os.stat(tree / "b.txt").st_mtime_ns)


def test_verified_listing_has_content_hashes(tree: Path) -> None:
    source = {"path": str(tree / "b.txt")}
    before = listing("s", Source.model_validate(source), verify=True)
    assert before[0]["stamp"] == "sha256:" + hashlib.sha256(b"bb").hexdigest()
    os.utime(tree / "b.txt", ns=(1, 1))
    assert listing("s", Source.model_validate(source), verify=True) == before
    assert listing("s", Source.model_validate(source))[0]["stamp"] == "1"
    (tree / "b.txt").write_bytes(b"BB")
    assert listing("s", Source.model_validate(source), verify=True) != before


def test_glob_with_an_unknown_extension_means_text(tree: Path) -> None:
    (file,) = files_of(tree / "*.xyz", format="auto")
    assert file.format == "text"


@pytest.mark.parametrize("path", ["notes.xyz", "*"])
def test_unknown_extension_is_named(tree: Path, path: str) -> None:
    with pytest.raises(SourceError, match=r"source 'web': .*\.(xyz|png).*format"):
        find(tree / path, format="auto", name="web")


@pytest.mark.parametrize("path", ["nowhere", "*.parquet", "a/**/*.py"])
def test_path_without_files_is_an_error_with_source_and_path(
    tree: Path, path: str
) -> None:
    with pytest.raises(SourceError) as raised:
        find(tree / path, name="web")
    assert "'web'" in str(raised.value)
    assert str(tree / path) in str(raised.value)


def test_folder_without_matching_files_is_an_error_with_its_contents(
    tree: Path,
) -> None:
    with pytest.raises(SourceError, match=r"parquet.*1 \.png"):
        find(tree, format="parquet", name="web")


def test_remote_files_are_listed_like_local_ones() -> None:
    from upath import UPath

    root = UPath("memory://listing-test")
    for name in ("b.txt", "a/c.txt", "a/.hidden.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"xyz")
    assert (
        names("memory://listing-test")
        == names("memory://listing-test/**/*.txt")
        == ["a/c.txt", "b.txt"]
    )
    (file,) = files_of("memory://listing-test/b.txt", format="auto")
    assert (file.name, file.size, file.location) == (
        "b.txt",
        3,
        "memory:///listing-test/b.txt",
    )
    assert file.stamp
    with pytest.raises(SourceError, match=r"nowhere\.txt"):
        find("memory://listing-test/nowhere.txt")


def test_name_of_a_signed_link_has_no_signature(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_text('{"text": "x"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with (
        patch.object(SimpleHTTPRequestHandler, "log_message"),
        HTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        link = (
            f"http://me:hunter2@127.0.0.1:{server.server_port}/a%20b.jsonl?sig=hunter2"
        )
        (file,) = files_of(link)
        server.shutdown()
    assert (file.name, file.format, file.location) == ("a b.jsonl", "jsonl", link)


def test_unreachable_store_is_named_with_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*arguments: object, **options: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "info", away)
    with pytest.raises(
        SourceError, match=r"source 's': memory://away/a\.txt .*no route to host"
    ):
        find("memory://away/a.txt")
    with pytest.raises(
        SourceError, match=r"words: memory://away/a\.txt .*no route to host"
    ):
        outside_listing("words", "memory://away/a.txt")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "missing.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    for path in (tmp_path, tmp_path / "*.txt"):
        assert names(path) == [
            "a.txt",
            "link.txt",
        ]
    with pytest.raises(SourceError, match=r"pipe\.txt"):
        find(tmp_path / "pipe.txt")


def test_link_out_of_its_folder_is_an_error_that_names_both(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").symlink_to(tmp_path / "secret.txt")
    for path in (folder, folder / "*.txt"):
        with pytest.raises(
            SourceError, match=r"source 's': .*corpus/a\.txt .*secret\.txt"
        ):
            find(path)
    assert names(folder / "a.txt") == ["a.txt"]
    (tmp_path / "current").symlink_to(folder)
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text("b")
    assert names(tmp_path / "current") == ["b.txt"]


def test_hub_cache_snapshot_can_link_to_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text('{"text": "a"}')
    snapshot = tmp_path / "snapshots" / "4567"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to("../../blobs/0123")
    assert names(snapshot) == ["train.jsonl"]


def test_store_inside_a_source_is_not_read(tmp_path: Path) -> None:
    """A manifest in the folder of the data has its store there as well."""
    for name in (
        "a.txt",
        "deeper/b.txt",
        "gristmill-store/runs/one/c.txt",
        "deeper/gristmill-store/d.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Words.")
    for path in (tmp_path, tmp_path / "**" / "*.txt"):
        assert names(path) == ["a.txt", "deeper/b.txt"]
    inside = find(tmp_path / "gristmill-store" / "**" / "*.txt", name="books")
    assert [file.name for file in inside.files] == ["runs/one/c.txt"]


def test_store_that_refuses_access_is_not_called_a_missing_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError("the key of this account is locked")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    for path in ("memory://shelf/a.jsonl", "memory://shelf", "memory://shelf/*.jsonl"):
        with pytest.raises(SourceError, match="account is locked"):
            find(path, name="a")


def test_sources_in_s3_are_listed_with_the_retries_of_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = pytest.importorskip("gristmill.core.s3")
    stores = []

    def record(store: object, *arguments: object, **options: object) -> None:
        stores.append(type(store))
        raise FileNotFoundError

    for kind in (s3.S3Files, s3.S3FileSystem):
        kind.clear_instance_cache()
        monkeypatch.setattr(kind, "info", record)
    fsspec.register_implementation("s3", s3.S3FileSystem, clobber=True)
    files._use_store.cache_clear()
    with pytest.raises(SourceError):
        find("s3://shelf/a.jsonl", name="a")
    assert stores == [s3.S3Files]


def test_blob_of_the_hugging_face_cache_is_stamped_with_its_name(
    tmp_path: Path,
) -> None:
    """Blobs that several repositories share lie in a folder beside theirs."""
    cache = tmp_path / "hub"
    sha256 = hashlib.sha256(b"text").hexdigest()
    shared = cache / "blobs" / "ab" / ("c" * 64)
    snapshot = cache / "datasets--ann--letters" / "snapshots" / ("1" * 40)
    blob = snapshot.parent.parent / "blobs" / sha256
    for folder in (shared.parent, snapshot / "data", blob.parent):
        folder.mkdir(parents=True)
    shared.write_bytes(b"text")
    blob.symlink_to(f"../../blobs/ab/{shared.name}")
    (snapshot / "data" / "a.txt").symlink_to(f"../../../blobs/{sha256}")
    for path in (snapshot, snapshot / "data", snapshot / "data" / "a.txt"):
        (entry,) = listed(path)
        assert (entry["size"], entry["stamp"]) == (4, sha256)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "mine.txt").write_bytes(b"text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "blobs" / "mine.txt")
    (entry,) = listed(tmp_path / "link.txt")
    assert entry["stamp"] == str(os.stat(tmp_path / "blobs" / "mine.txt").st_mtime_ns)
