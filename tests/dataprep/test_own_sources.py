"""Readers and listings that users write keep every promise of the built-in ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.reading import document_shards, ingest
from gristmill.dataprep.reading.own_sources import OwnProcess
from gristmill.dataprep.reading.records import Reading, Record
from gristmill.dataprep.reading.sources import SourceError, find_files, listing
from gristmill.mixtures.sources import OwnReader
from gristmill.mixtures.user_code import OwnFunction, take_code

MakeContext = Callable[..., Context]
READER = """
import json
from pathlib import Path
from typing import BinaryIO, Iterator

def read_notes(path: Path, skip: str = "-") -> Iterator[dict]:
    for line in path.read_text().splitlines():
        print("noise on the standard output")
        if line == "bad":
            yield ValueError("a note without a text")
        elif line == "torn":
            raise RuntimeError("torn in two")
        elif line == "number":
            yield {"text": 3}
        elif line == "list":
            yield ["text"]
        elif line != skip:
            yield {"text": line, "length": len(line)}

def read_stream(stream: BinaryIO):
    for number, line in enumerate(stream):
        yield {"text": line.decode().strip(), "key": f"k{number}", "url": "https://example.org/"}
"""


def code(folder: Path, source: str, written: str, **options: Any) -> dict[str, Any]:
    (folder / "code.py").write_text(source)
    return {"use": take_code(OwnFunction(f"./code.py:{written}"), folder).by_value(), "with": options}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.note").write_text(text)
    return folder


def run(folder: Path, source: dict[str, Any], context: Context, **section: Any) -> dict[str, Any]:
    planned = {**source, "listing": listing("notes", source)}
    return ingest.run(
        {}, {"sources": {"notes": planned}, "ingest": {"max_quarantined": 1.0, **section}}, folder, context
    )


def rows(out: Path, folder: str = "") -> list[dict[str, Any]]:
    if folder:
        return [row for path in sorted((out / folder).glob("*")) for row in read_table(path).to_pylist()]
    return [row for shard in shard_names(out) for row in read_table(out / shard).to_pylist()]


@pytest.mark.slow
def test_what_a_reader_yields_is_treated_like_lines_of_jsonl(tmp_path: Path, make_context: MakeContext) -> None:
    files = write(tmp_path / "notes", a="one\nbad\ntwo\nnumber\nlist\n\nthree", b="four")
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    summary = run(tmp_path / "out", source, make_context("work"))
    found = rows(tmp_path / "out")
    assert [(row["locator"], row["text"], json.loads(row["metadata"])) for row in found] == [
        ("a.note#1", "one", {"length": 3}),
        ("a.note#3", "two", {"length": 3}),
        ("a.note#7", "three", {"length": 5}),
        ("b.note#1", "four", {"length": 4}),
    ]
    assert [(row["record"], row["error"]) for row in rows(tmp_path / "out", "quarantine")] == [
        (2, "ValueError: a note without a text (code.py, line 10)"),
        (4, "code.py, line 14: field 'text' must be a string, not a number"),
        (5, "code.py, line 16: a record is a mapping with 'text', not a list (['text'])"),
    ]
    counts = summary["counts"]
    assert (counts["read"], counts["kept"], counts["quarantined"], counts["dropped"]) == (8, 4, 3, {"extract/empty": 1})


@pytest.mark.slow
def test_a_reader_that_raises_loses_the_rest_of_its_file_as_a_damaged_one_does(
    tmp_path: Path, make_context: MakeContext
) -> None:
    files = write(tmp_path / "notes", a="one\ntwo\ntorn\nlost", b="1\n2\n3\n4\n5\n6", c="1\n2\n3\n4\n5\n6")
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    summary = run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in rows(tmp_path / "out")][:3] == ["a.note#1", "a.note#2", "b.note#1"]
    (damage,) = summary["damaged"]
    # 17 bytes of a source whose 22 other bytes hold 12 records: 10, of which 3 were read.
    assert (damage["file"], damage["records"], damage["lost"]) == ("a.note", 3, 7)
    assert damage["error"] == "RuntimeError: torn in two (code.py, line 12)"


@pytest.mark.slow
def test_a_stream_comes_decompressed_and_its_damage_is_that_of_a_built_in_reader(
    tmp_path: Path, make_context: MakeContext
) -> None:
    packed = gzip.compress("".join(f"line {number} {number * 7919}\n" for number in range(2000)).encode())
    files = write(tmp_path / "notes")
    (files / "a.note.gz").write_bytes(packed)
    (files / "b.note.gz").write_bytes(packed[: len(packed) // 2])
    source = {
        "path": str(files),
        "read": code(tmp_path, READER, "read_stream"),
        "id_field": "key",
        "on_repeat": "keep_first",
    }
    summary = run(tmp_path / "out", source, make_context("work"))
    found = rows(tmp_path / "out")
    assert found[0]["locator"] == "k0"
    assert json.loads(found[0]["metadata"]) == {"url": "https://example.org/"}
    (damage,) = summary["damaged"]
    assert damage["file"] == "b.note.gz"
    assert "the file is cut off" in damage["error"]
    assert 700 < damage["lost"] < 1300
    # What the damaged copy repeats is dropped like any repeated record; its torn line is another text.
    assert summary["counts"]["dropped"]["ingest/repeated"] == damage["records"] - 2


def test_a_function_of_paths_gets_a_file_of_this_machine_for_every_url(tmp_path: Path) -> None:
    files = write(tmp_path / "notes", a="one")
    MemoryFileSystem().pipe("/notes/b.note", b"two")
    own = OwnReader.model_validate(code(tmp_path, READER, "read_notes"))
    for path, text in ((f"file://{files}/a.note", "one"), ("memory://notes/b.note", "two")):
        (file,) = find_files("notes", {"path": path, "read": own.model_dump()}).files
        with OwnProcess(own) as process:
            record, _ = ingest.own_records(process, file, Reading())
        assert isinstance(record, Record)
        assert (record.locator, record.text) == (f"{path[-6:]}#1", text)


@pytest.mark.slow
def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path: Path, make_context: MakeContext) -> None:
    files = write(tmp_path / "notes", **{f"n{number}": f"text {number}\nbad\nmore" for number in range(12)})
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    for workers in (1, 2):
        run(tmp_path / f"out{workers}", source, make_context(f"work{workers}", workers=workers), shard_bytes=40)
    contents = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "out1", tmp_path / "out2")
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 4


@pytest.mark.slow
def test_an_interrupted_attempt_is_continued_to_the_same_bytes(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path / "notes", **{f"n{number}": f"text {number}\nmore {number}" for number in range(12)})
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    expected = run(tmp_path / "whole", source, make_context("work1"), shard_bytes=40)
    original, written = document_shards.write_table, []

    def failing(path: Path, table: Any) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(document_shards, "write_table", failing)
        with pytest.raises(Exception, match="No space left"):
            run(tmp_path / "out", source, make_context("work2"), shard_bytes=40)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-00000-*")}
    assert run(tmp_path / "out", source, make_context("work2"), shard_bytes=40) == expected
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.parquet")
    }


CRASHES = """
import os, time, itertools
def crash(path):
    yield {"text": "before"}
    if path.name == "b.note":
        os.kill(os.getpid(), 11)
def leave(path):
    yield {"text": "before"}
    if path.name == "b.note":
        os._exit(3)
def hang(path):
    yield {"text": "before"}
    while path.name == "b.note":
        pass
def ask(path):
    yield {"text": "before"}
    if path.name == "b.note":
        input()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crash", "code.py, line 3: crash crashed (signal 11)"),
        ("leave", "code.py, line 7: leave ended its process (status 3)"),
        ("hang", "code.py, line 11: hang took more than 0.5 s of processor time for one record (`time_limit_seconds`)"),
        ("ask", "EOFError: EOF when reading a line (code.py, line 18)"),
    ],
)
def test_a_reader_that_ends_its_process_loses_one_file(
    tmp_path: Path, make_context: MakeContext, name: str, says: str
) -> None:
    files = write(tmp_path / "notes", a="", b="", c="")
    source = {"path": str(files), "read": {**code(tmp_path, CRASHES, name), "time_limit_seconds": 0.5}}
    summary = run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in rows(tmp_path / "out")] == ["a.note#1", "b.note#1", "c.note#1"]
    assert [(one["file"], one["error"]) for one in summary["damaged"]] == [("b.note", says)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "def read(path):\n    return 'text'",
            r"code.py, line 1: read gives a string \('text'\), not records one by one",
        ),
        ("def read(path):\n    pass", "code.py, line 1: read gives nothing, not records one by one"),
        ("def read(file): ...", "code.py, line 1: the first parameter of read is called 'file'; call it `path`"),
        ("def read(): ...", r"code.py, line 1: read\(\) cannot be called with \(path or stream\)"),
        ("1 / 0\ndef read(path): ...", r"code.py cannot be loaded: ZeroDivisionError: .*\(code.py, line 1\)"),
        ("import os\nos._exit(1)\ndef read(path): ...", "code.py ended its process .* while it was loaded"),
    ],
)
def test_a_reader_that_cannot_be_called_fails_before_anything_is_read(
    tmp_path: Path, make_context: MakeContext, source: str, says: str
) -> None:
    section = {"path": str(write(tmp_path / "notes", a="x")), "read": code(tmp_path, source, "read")}
    with pytest.raises(SourceError, match=f"source 'notes': read: {says}"):
        run(tmp_path / "out", section, make_context("work"))


@pytest.mark.slow
def test_a_reader_that_is_not_deterministic_is_warned_of(tmp_path: Path, make_context: MakeContext) -> None:
    source = "import os\ndef read(path):\n    yield {'text': os.urandom(8).hex()}"
    section = {"path": str(write(tmp_path / "notes", a="x")), "read": code(tmp_path, source, "read")}
    (warning,) = run(tmp_path / "out", section, make_context("work"))["warnings"]
    assert warning.startswith("source 'notes': code:read is not deterministic: called twice on a.note")


LISTING = """
def shards(path, month):
    return [line for line in (path / "index.txt").read_text().split() if month in line]
def everything():
    return ["b.txt", {"path": "a.txt", "name": "first"}]
def remote():
    return [{"path": "https://example.org/x/a.jsonl?token=1", "size": 7}]
"""


def listed(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    for file in ("a", "b", "may-1", "may-2", "june-1"):
        (tmp_path / f"{file}.txt").write_text(file)
    (tmp_path / "index.txt").write_text("may-2.txt june-1.txt may-1.txt")
    return {"path": str(tmp_path), "list": code(tmp_path, LISTING, name, **options)}


@pytest.mark.slow
def test_a_listing_names_the_files_in_its_order(tmp_path: Path, make_context: MakeContext) -> None:
    source = listed(tmp_path, "shards", month="may")
    assert [(one["path"], one["size"]) for one in listing("notes", source)] == [("may-2.txt", 5), ("may-1.txt", 5)]
    run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in rows(tmp_path / "out")] == ["may-2.txt", "may-1.txt"]
    assert [one["path"] for one in listing("notes", listed(tmp_path, "everything"))] == ["b.txt", "first"]


def test_a_listed_url_with_a_size_is_not_looked_at_and_loses_its_query(tmp_path: Path) -> None:
    assert listing("notes", listed(tmp_path, "remote")) == [{"path": "example.org/x/a.jsonl", "size": 7, "stamp": ""}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "def files():\n    return 'a.txt'",
            r"code.py, line 1: files gives a string \('a.txt'\), not paths one by one",
        ),
        ("def files():\n    yield 3", r"code.py, line 1: entry 1 of files is a number \(3\); each is a path or URL"),
        ("def files():\n    raise KeyError('x')", r"KeyError: 'x' \(code.py, line 2\)"),
        ("def files():\n    return []", "code:files lists no files"),
        ("def files():\n    return ['a.txt', './a.txt', 'a.txt']", "code:files lists a.txt twice"),
        ("def files():\n    return ['gone.txt']", "gone.txt is not there"),
        (
            "def files(month): ...",
            r"code.py, line 1: files\(month\) cannot be called with: missing a required argument",
        ),
        (
            "def files():\n    while True: pass",
            "code.py, line 1: files (took more than 0.3 s of processor time for its|gave nothing for 1.8 s)",
        ),
    ],
)
def test_a_wrong_listing_is_said_in_a_sentence(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    section = {"path": str(tmp_path), "list": {**code(tmp_path, source, "files"), "time_limit_seconds": 0.3}}
    with pytest.raises(SourceError, match=f"source 'notes': list: .*{says}"):
        listing("notes", section)


@pytest.mark.slow
def test_a_listing_that_changes_between_plan_and_run_is_refused(tmp_path: Path, make_context: MakeContext) -> None:
    source = listed(tmp_path, "shards", month="may")
    planned = {**source, "listing": listing("notes", source)}
    (tmp_path / "index.txt").write_text("may-1.txt may-2.txt")
    with pytest.raises(ingest.ChangedInputError, match="code:shards lists its files in another order"):
        ingest.run({}, {"sources": {"notes": planned}}, tmp_path / "out", make_context("work"))
