import hashlib
import os
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gristmill.dataprep.reading.sources import SourceError, check, find_files, listing, outside_listing


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with text at two depths, a compressed JSONL, a hidden file and a picture."""
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
    return [entry["path"] for entry in listing("s", {"path": str(path), **keys})]


def test_a_folder_lists_known_extensions_at_any_depth_in_order(tree: Path) -> None:
    assert names(tree) == ["a/d.jsonl.gz", "a/deep/c.md", "b.txt"]
    found = find_files("s", {"path": str(tree), "format": "auto"})
    assert [(file.format, file.compression) for file in found.files] == [("jsonl", ".gz"), ("text", ""), ("text", "")]
    assert found.ignored == {".png": 1, ".xyz": 1}


def test_a_format_decides_which_files_of_a_folder_count(tree: Path) -> None:
    assert names(tree, format="jsonl") == ["a/d.jsonl.gz"]
    assert names(tree, format="text") == ["a/d.jsonl.gz", "a/deep/c.md", "b.txt", "notes.xyz", "picture.png"]


def test_a_glob_is_relative_to_its_fixed_part(tree: Path) -> None:
    assert names(tree / "**" / "*.md") == ["a/deep/c.md"]
    assert names(tree / "a" / "**" / "*.md") == ["deep/c.md"]
    assert names(tree / "*.txt") == ["b.txt"]


def test_a_moved_folder_keeps_its_listing(tree: Path, tmp_path: Path) -> None:
    before = listing("s", {"path": str(tree)})
    tree.rename(tmp_path / "elsewhere")
    assert listing("s", {"path": str(tmp_path / "elsewhere")}) == before


def test_a_single_file_is_named_without_its_folder(tree: Path) -> None:
    (entry,) = listing("s", {"path": str(tree / "b.txt")})
    assert (entry["path"], entry["size"]) == ("b.txt", 2)
    assert entry["stamp"] == str(os.stat(tree / "b.txt").st_mtime_ns)


def test_verifying_stamps_content_instead_of_time(tree: Path) -> None:
    source = {"path": str(tree / "b.txt")}
    before = listing("s", source, verify=True)
    assert before[0]["stamp"] == "sha256:" + hashlib.sha256(b"bb").hexdigest()
    os.utime(tree / "b.txt", ns=(1, 1))
    assert listing("s", source, verify=True) == before
    assert listing("s", source)[0]["stamp"] == "1"
    (tree / "b.txt").write_bytes(b"BB")
    assert listing("s", source, verify=True) != before


def test_a_glob_that_spells_an_unknown_extension_out_means_text(tree: Path) -> None:
    (file,) = find_files("s", {"path": str(tree / "*.xyz"), "format": "auto"}).files
    assert file.format == "text"


@pytest.mark.parametrize("path", ["notes.xyz", "*"])
def test_an_unknown_extension_is_an_error_that_names_it(tree: Path, path: str) -> None:
    with pytest.raises(SourceError, match=r"source 'web': .*\.(xyz|png).*format"):
        check("web", {"path": str(tree / path), "format": "auto"})


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere", "does not exist"), ("*.parquet", "no file matches"), ("a/**/*.py", "no file matches")],
)
def test_a_path_that_matches_nothing_is_an_error_that_names_source_and_path(
    tree: Path, path: str, message: str
) -> None:
    with pytest.raises(SourceError, match=message) as raised:
        check("web", {"path": str(tree / path)})
    assert "'web'" in str(raised.value)
    assert str(tree / path) in str(raised.value)


def test_a_folder_without_known_files_is_an_error_that_says_what_it_holds(tree: Path) -> None:
    with pytest.raises(SourceError, match=r"nothing of format parquet \(it holds .*1 \.png"):
        check("web", {"path": str(tree), "format": "parquet"})


def test_remote_files_are_listed_like_local_ones() -> None:
    from upath import UPath

    root = UPath("memory://listing-test")
    for name in ("b.txt", "a/c.txt", "a/.hidden.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"xyz")
    assert names("memory://listing-test") == names("memory://listing-test/**/*.txt") == ["a/c.txt", "b.txt"]
    (file,) = find_files("s", {"path": "memory://listing-test/b.txt", "format": "auto"}).files
    assert (file.name, file.size, file.location) == ("b.txt", 3, "memory:///listing-test/b.txt")
    assert file.stamp
    with pytest.raises(SourceError, match="does not exist"):
        check("s", {"path": "memory://listing-test/nowhere.txt"})


def test_the_name_of_a_signed_link_is_that_of_the_file_and_holds_no_signature(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_text('{"text": "x"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with patch.object(SimpleHTTPRequestHandler, "log_message"), HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        link = f"http://me:hunter2@127.0.0.1:{server.server_port}/a%20b.jsonl?sig=hunter2"
        (file,) = find_files("s", {"path": link}).files
        server.shutdown()
    assert (file.name, file.format, file.location) == ("a b.jsonl", "jsonl", link)


def test_a_store_that_cannot_be_reached_is_told_of_with_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: object, **options: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "isfile", away)
    with pytest.raises(SourceError, match=r"source 's': memory://away/a\.txt cannot be listed: no route to host"):
        check("s", {"path": "memory://away/a.txt"})
    with pytest.raises(SourceError, match=r"words: memory://away/a\.txt cannot be listed: no route to host"):
        outside_listing("words", "memory://away/a.txt")


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "missing.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    for path in (tmp_path, tmp_path / "*.txt"):
        assert [file.name for file in find_files("s", {"path": str(path)}).files] == ["a.txt", "link.txt"]
    with pytest.raises(SourceError, match=r"pipe\.txt does not exist"):
        find_files("s", {"path": str(tmp_path / "pipe.txt")})


def test_a_link_to_a_file_outside_of_its_folder_is_an_error_that_names_both(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").symlink_to(tmp_path / "secret.txt")
    for path in (folder, folder / "*.txt"):
        with pytest.raises(SourceError, match=r"source 's': .*corpus/a\.txt links to .*secret\.txt, which lies"):
            find_files("s", {"path": str(path)})
    assert [file.name for file in find_files("s", {"path": str(folder / "a.txt")}).files] == ["a.txt"]
    (tmp_path / "current").symlink_to(folder)
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text("b")
    assert [file.name for file in find_files("s", {"path": str(tmp_path / "current")}).files] == ["b.txt"]


def test_a_snapshot_of_the_hubs_cache_links_to_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text('{"text": "a"}')
    snapshot = tmp_path / "snapshots" / "4567"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to("../../blobs/0123")
    assert [file.name for file in find_files("s", {"path": str(snapshot)}).files] == ["train.jsonl"]


def test_a_store_among_the_files_of_a_source_is_none_of_them(tmp_path: Path) -> None:
    """Who makes a manifest in the folder of the data has the store there, too."""
    for name in ("a.txt", "deeper/b.txt", "gristmill-store/runs/one/c.txt", "deeper/gristmill-store/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Words.")
    for path in (tmp_path, tmp_path / "**" / "*.txt"):
        assert [file.name for file in find_files("books", {"path": str(path)}).files] == ["a.txt", "deeper/b.txt"]
    inside = find_files("books", {"path": str(tmp_path / "gristmill-store" / "**" / "*.txt")})
    assert [file.name for file in inside.files] == ["runs/one/c.txt"]
