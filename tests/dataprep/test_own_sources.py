"""User readers and listings keep the promises of the built-in ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gristmill.core.stage_context import Context
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.readers.own_sources import OwnProcess
from gristmill.dataprep.readers.records import Reading, Record
from gristmill.dataprep.readers.sources import SourceError, listing
from gristmill.mixtures.schema.sources import OwnReader, Source
from gristmill.mixtures.user_code import OwnFunction, take_code
from tests.dataprep.document_shards import file_contents
from tests.dataprep.own_steps import written
from tests.dataprep.source_files import files_of

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
    return {
        "use": take_code(OwnFunction(f"./code.py:{written}"), folder).by_value(),
        "with": options,
    }


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.note").write_text(text)
    return folder


def run(
    folder: Path, source: dict[str, Any], context: Context, **section: Any
) -> dict[str, Any]:
    planned = {**source, "listing": listing("notes", Source.model_validate(source))}
    return ingest.run(
        {},
        {"sources": {"notes": planned}, "ingest": {"max_quarantined": 1.0, **section}},
        folder,
        context,
    )


@pytest.mark.slow
def test_yielded_records_are_treated_like_json_lines(
    tmp_path: Path, make_context: MakeContext
) -> None:
    files = write(
        tmp_path / "notes", a="one\nbad\ntwo\nnumber\nlist\n\nthree", b="four"
    )
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    summary = run(tmp_path / "out", source, make_context("work"))
    documents = written(tmp_path / "out")
    assert [
        (row["locator"], row["text"], json.loads(row["metadata"])) for row in documents
    ] == [
        ("a.note#1", "one", {"length": 3}),
        ("a.note#3", "two", {"length": 3}),
        ("a.note#7", "three", {"length": 5}),
        ("b.note#1", "four", {"length": 4}),
    ]
    raised, number, not_mapping = written(tmp_path / "out" / "quarantine", "*")
    assert [raised["record"], number["record"], not_mapping["record"]] == [2, 4, 5]
    assert raised["error"] == "ValueError: a note without a text (code.py, line 10)"
    assert number["error"].startswith("code.py, line 14: ")
    assert "'text'" in number["error"]
    assert not_mapping["error"].startswith("code.py, line 16: ")
    assert "['text']" in not_mapping["error"]
    counts = summary.counts
    assert (
        counts["read"],
        counts["kept"],
        counts["quarantined"],
        counts["dropped"],
    ) == (8, 4, 3, {"extract/empty": 1})


@pytest.mark.slow
def test_reader_that_raises_loses_the_rest_of_its_file(
    tmp_path: Path, make_context: MakeContext
) -> None:
    files = write(
        tmp_path / "notes",
        a="one\ntwo\ntorn\nlost",
        b="1\n2\n3\n4\n5\n6",
        c="1\n2\n3\n4\n5\n6",
    )
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    summary = run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in written(tmp_path / "out")][:3] == [
        "a.note#1",
        "a.note#2",
        "b.note#1",
    ]
    (damage,) = summary.damaged
    # 17 bytes of a source whose 22 other bytes hold 12 records: 10, of which 3 were
    # read.
    assert (damage.file, damage.records, damage.lost) == ("a.note", 3, 7)
    assert damage.error == "RuntimeError: torn in two (code.py, line 12)"


@pytest.mark.slow
def test_stream_reader_gets_decompressed_bytes_and_reports_damage(
    tmp_path: Path, make_context: MakeContext
) -> None:
    packed = gzip.compress(
        "".join(f"line {number} {number * 7919}\n" for number in range(2000)).encode()
    )
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
    documents = written(tmp_path / "out")
    assert documents[0]["locator"] == "k0"
    assert json.loads(documents[0]["metadata"]) == {"url": "https://example.org/"}
    (damage,) = summary.damaged
    assert damage.file == "b.note.gz"
    assert ".gz" in damage.error
    assert 700 < damage.lost < 1300
    # Records that the damaged copy repeats are dropped like any others; its torn line
    # is another text.
    assert summary.counts["dropped"]["ingest/repeated"] == damage.records - 2


def test_path_reader_gets_a_local_file_for_every_url(tmp_path: Path) -> None:
    files = write(tmp_path / "notes", a="one")
    MemoryFileSystem().pipe("/notes/b.note", b"two")
    reader = OwnReader.model_validate(code(tmp_path, READER, "read_notes"))
    for path, text in (
        (f"file://{files}/a.note", "one"),
        ("memory://notes/b.note", "two"),
    ):
        (file,) = files_of(path, read=reader.model_dump())
        with OwnProcess(reader) as process:
            record, _ = ingest.own_records(process, file, Reading())
        assert isinstance(record, Record)
        assert (record.locator, record.text) == (f"{path[-6:]}#1", text)


@pytest.mark.slow
def test_workers_do_not_change_a_byte(
    tmp_path: Path, make_context: MakeContext
) -> None:
    files = write(
        tmp_path / "notes",
        **{f"n{number}": f"text {number}\nbad\nmore" for number in range(12)},
    )
    source = {"path": str(files), "read": code(tmp_path, READER, "read_notes")}
    for workers in (1, 2):
        run(
            tmp_path / f"out{workers}",
            source,
            make_context(f"work{workers}", workers=workers),
            shard_bytes=40,
        )
    assert file_contents(tmp_path / "out1") == file_contents(tmp_path / "out2")
    assert len(file_contents(tmp_path / "out1")) > 4


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
    ("name", "facts"),
    [
        ("crash", ["code.py, line 3: crash ", "signal 11"]),
        ("leave", ["code.py, line 7: leave ", "status 3"]),
        ("hang", ["code.py, line 11: hang ", "0.5 s", "`time_limit_seconds`"]),
        ("ask", ["EOFError", "code.py, line 18"]),
    ],
)
def test_reader_that_ends_its_process_loses_one_file(
    tmp_path: Path, make_context: MakeContext, name: str, facts: list[str]
) -> None:
    files = write(tmp_path / "notes", a="", b="", c="")
    source = {
        "path": str(files),
        "read": {**code(tmp_path, CRASHES, name), "time_limit_seconds": 0.5},
    }
    summary = run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in written(tmp_path / "out")] == [
        "a.note#1",
        "b.note#1",
        "c.note#1",
    ]
    (damage,) = summary.damaged
    assert damage.file == "b.note"
    for fact in facts:
        assert fact in damage.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "facts"),
    [
        (
            "def read(path):\n    return 'text'",
            r"code\.py, line 1: read .*string \('text'\)",
        ),
        ("def read(path):\n    pass", r"code\.py, line 1: read "),
        ("def read(file): ...", r"code\.py, line 1: .*'file'.*`path`"),
        ("def read(): ...", r"code\.py, line 1: read\(\) .*path or stream"),
        ("1 / 0\ndef read(path): ...", r"ZeroDivisionError: .*\(code\.py, line 1\)"),
        ("import os\nos._exit(1)\ndef read(path): ...", r"code\.py "),
    ],
)
def test_uncallable_reader_is_rejected_before_reading(
    tmp_path: Path, make_context: MakeContext, source: str, facts: str
) -> None:
    section = {
        "path": str(write(tmp_path / "notes", a="x")),
        "read": code(tmp_path, source, "read"),
    }
    with pytest.raises(SourceError, match=f"source 'notes': read: .*{facts}"):
        run(tmp_path / "out", section, make_context("work"))


@pytest.mark.slow
def test_nondeterministic_reader_is_warned_about(
    tmp_path: Path, make_context: MakeContext
) -> None:
    source = "import os\ndef read(path):\n    yield {'text': os.urandom(8).hex()}"
    section = {
        "path": str(write(tmp_path / "notes", a="x")),
        "read": code(tmp_path, source, "read"),
    }
    (warning,) = run(tmp_path / "out", section, make_context("work")).warnings
    assert warning.startswith("source 'notes': code:read ")
    assert "a.note" in warning


LISTING = """
def shards(path, month):
    return [line for line in (path / "index.txt").read_text().split() if month in line]
def everything():
    return ["b.txt", {"path": "a.txt", "name": "first"}]
def remote():
    return [{"path": "https://example.org/x/a.jsonl?token=1", "size": 7}]
"""


def listing_source(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    for file in ("a", "b", "may-1", "may-2", "june-1"):
        (tmp_path / f"{file}.txt").write_text(file)
    (tmp_path / "index.txt").write_text("may-2.txt june-1.txt may-1.txt")
    return {"path": str(tmp_path), "list": code(tmp_path, LISTING, name, **options)}


@pytest.mark.slow
def test_listing_determines_files_and_order(
    tmp_path: Path, make_context: MakeContext
) -> None:
    source = listing_source(tmp_path, "shards", month="may")
    assert [
        (file["path"], file["size"])
        for file in listing("notes", Source.model_validate(source))
    ] == [
        ("may-2.txt", 5),
        ("may-1.txt", 5),
    ]
    run(tmp_path / "out", source, make_context("work"))
    assert [row["locator"] for row in written(tmp_path / "out")] == [
        "may-2.txt",
        "may-1.txt",
    ]
    assert [
        file["path"]
        for file in listing(
            "notes", Source.model_validate(listing_source(tmp_path, "everything"))
        )
    ] == ["b.txt", "first"]


def test_listed_url_with_a_size_is_not_requested_and_loses_its_query(
    tmp_path: Path,
) -> None:
    assert listing(
        "notes", Source.model_validate(listing_source(tmp_path, "remote"))
    ) == [{"path": "example.org/x/a.jsonl", "size": 7, "stamp": ""}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "facts"),
    [
        (
            "def files():\n    return 'a.txt'",
            r"code\.py, line 1: files .*string \('a\.txt'\)",
        ),
        ("def files():\n    yield 3", r"code\.py, line 1: entry 1 .*number \(3\)"),
        (
            "def files():\n    raise KeyError('x')",
            r"KeyError: 'x' \(code\.py, line 2\)",
        ),
        ("def files():\n    return []", "code:files "),
        (
            "def files():\n    return ['a.txt', './a.txt', 'a.txt']",
            r"code:files .*a\.txt twice",
        ),
        ("def files():\n    return ['gone.txt']", r"gone\.txt"),
        (
            "def files(month): ...",
            r"code\.py, line 1: files\(month\) .*missing a required argument",
        ),
        (
            "def files():\n    while True: pass",
            r"code\.py, line 1: files .*(0\.3|1\.8) s",
        ),
    ],
)
def test_invalid_listing_is_rejected_with_its_line(
    tmp_path: Path, source: str, facts: str
) -> None:
    (tmp_path / "a.txt").write_text("a")
    section = {
        "path": str(tmp_path),
        "list": {**code(tmp_path, source, "files"), "time_limit_seconds": 0.3},
    }
    with pytest.raises(SourceError, match=f"source 'notes': list: .*{facts}"):
        listing("notes", Source.model_validate(section))


@pytest.mark.slow
def test_listing_that_changes_after_the_plan_is_rejected(
    tmp_path: Path, make_context: MakeContext
) -> None:
    source = listing_source(tmp_path, "shards", month="may")
    planned = {**source, "listing": listing("notes", Source.model_validate(source))}
    (tmp_path / "index.txt").write_text("may-1.txt may-2.txt")
    with pytest.raises(ingest.ChangedInputError, match=r"code:shards .*order"):
        ingest.run(
            {}, {"sources": {"notes": planned}}, tmp_path / "out", make_context("work")
        )
