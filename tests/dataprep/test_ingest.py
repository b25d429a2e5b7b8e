import gzip
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import QuarantineError, check_conservation
from gristmill.dataprep.documents import document_id, read_table, shard_names
from gristmill.dataprep.reading import document_shards as sharding
from gristmill.dataprep.reading import duplicate_records, ingest, sources
from gristmill.dataprep.reading.duplicate_records import DuplicateIdError
from gristmill.dataprep.reading.sources import SourceError, listing

MakeContext = Callable[..., Context]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three formats with planted damage: 40 text files, one large JSONL with bad lines, one cut-off gzip."""
    root = tmp_path / "corpus"
    (root / "text").mkdir(parents=True)
    for number in range(40):
        (root / "text" / f"{number:02d}.txt").write_text(f"document {number} " * (number + 1))
    (root / "text" / "empty.txt").write_bytes(b"")
    (root / "text" / "latin.txt").write_bytes("é".encode("latin-1"))
    lines = [json.dumps({"text": f"record {number} " * 5, "n": number}) for number in range(300)]
    lines[10], lines[20] = "{not json", json.dumps({"texts": "x"})
    (root / "big.jsonl").write_text("\n".join(lines) + "\n")
    packed = gzip.compress(("\n".join(lines[30:60]) + "\n").encode())
    (root / "cut.jsonl.gz").write_bytes(packed + gzip.compress(b'{"text": "last"}\n')[:-4])
    (root / "none.jsonl").write_bytes(b"")
    return root


def configure(corpus: Path, **section: Any) -> dict[str, Any]:
    return {
        "sources": {"prose": {"path": str(corpus / "text")}, "web": {"path": str(corpus / "*.json*")}},
        "ingest": {"shard_bytes": 4000, "max_quarantined": 0.5, **section},
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for shard in shard_names(out) for row in read_table(out / shard).to_pylist()]


def test_every_record_is_a_document_or_quarantined_with_file_record_and_reason(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    out = tmp_path / "out"
    summary = ingest.run({}, configure(corpus), out, make_context("work"))
    counts = summary["counts"]
    # 42 text files; 300 lines; 31 lines of a file that lacks only its last checksum, which is one bad record more.
    assert counts["sources"]["prose"]["read"] == 42
    assert counts["sources"]["prose"]["quarantined"] == 2
    assert counts["sources"]["web"]["read"] == 300 + 31 + 1
    assert counts["sources"]["web"]["quarantined"] == 2 + 1
    documents = rows(out)
    assert len(documents) == counts["kept"] == 40 + 298 + 31
    assert counts["bytes_kept"] == sum(len(row["text"].encode()) for row in documents)
    bad = [row for path in sorted((out / "quarantine").iterdir()) for row in read_table(path).to_pylist()]
    assert len(bad) == counts["quarantined"] == 5
    assert [(row["source"], row["file"], row["record"]) for row in bad] == [
        ("prose", "empty.txt", 1),
        ("prose", "latin.txt", 1),
        ("web", "big.jsonl", 11),
        ("web", "big.jsonl", 21),
        ("web", "cut.jsonl.gz", 32),
    ]
    assert summary["quarantined"] == [{key: row[key] for key in ("source", "file", "record", "error")} for row in bad]
    assert summary["warnings"] == [
        "source 'web': none.jsonl holds no records",
        "source 'web': cut.jsonl.gz could not be read to its end: .gz data ends in the middle: the file is cut off; "
        "32 records of it were read, about 268 are lost",
    ]
    for row in documents:
        assert row["id"] == document_id(row["source"], row["locator"], row["text"])
    assert len({row["id"] for row in documents}) == len(documents)
    assert documents[-1]["locator"] == "cut.jsonl.gz#31"


def test_shards_are_bounded_and_a_large_file_fills_several(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    out = tmp_path / "out"
    ingest.run({}, configure(corpus), out, make_context("work"))
    tables = {shard: read_table(out / shard, ["source", "text"]).to_pylist() for shard in shard_names(out)}
    tasks = {shard.split("-")[1] for shard in tables}
    assert len(tables) > len(tasks) > 2
    for table in tables.values():
        assert sum(len(row["text"]) for row in table[:-1]) < 4000
        assert len({row["source"] for row in table}) == 1


def test_neither_workers_nor_the_order_of_the_listing_change_a_byte(
    corpus: Path, tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    first = ingest.run({}, configure(corpus), once, make_context("work1", workers=1))
    original = sources.find

    def shuffled(path: str) -> Any:
        kind, found = original(path)
        return kind, random.Random(5).sample(found, len(found))

    monkeypatch.setattr(sources, "find", shuffled)
    second = ingest.run({}, configure(corpus), again, make_context("work2", workers=2))
    assert contents(once) == contents(again)
    assert first == second


def test_an_interrupted_attempt_is_continued_to_the_same_bytes(
    corpus: Path, tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    expected = ingest.run({}, configure(corpus), undisturbed, make_context("work1"))
    original, written = sharding.write_table, []

    def failing(path: Path, table: Any) -> None:
        if len(written) == 6:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "write_table", failing)
        with pytest.raises(Exception, match="No space left"):
            ingest.run({}, configure(corpus), out, make_context("work2"))
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("part-00000-*")}
    assert done
    assert ingest.run({}, configure(corpus), out, make_context("work2")) == expected
    assert contents(out) == contents(undisturbed)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("part-00000-*")} == done


def test_a_limit_takes_the_first_documents_of_the_listing(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    config = configure(corpus)
    config["sources"] = {"prose": {"path": str(corpus / "text"), "limit": 7}}
    ingest.run({}, config, tmp_path / "out", make_context("work", workers=2))
    assert [row["locator"] for row in rows(tmp_path / "out")] == [f"{number:02d}.txt" for number in range(7)]


def test_a_limit_counts_documents_and_ends_in_the_middle_of_a_file(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    config = configure(corpus)
    config["sources"] = {"web": {"path": str(corpus / "big.jsonl"), "limit": 12}}
    summary = ingest.run({}, config, tmp_path / "out", make_context("work"))
    assert [row["locator"] for row in rows(tmp_path / "out")] == [
        f"big.jsonl#{number}" for number in (*range(1, 11), 12, 13)
    ]
    assert (summary["counts"]["read"], summary["counts"]["quarantined"]) == (13, 1)


def test_a_source_without_documents_is_an_error_that_names_it(tmp_path: Path, make_context: MakeContext) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    config = {"sources": {"web": {"path": str(tmp_path / "a.jsonl")}}}
    with pytest.raises(SourceError, match=r"source 'web': no documents.*a\.jsonl, record 1: no field 'text'"):
        ingest.run({}, config, tmp_path / "out", make_context("work"))


def test_too_much_quarantine_fails_the_stage(corpus: Path, tmp_path: Path, make_context: MakeContext) -> None:
    with pytest.raises(QuarantineError, match=r"5 of 374 records.* about 268 more are lost"):
        ingest.run({}, configure(corpus, max_quarantined=0.01), tmp_path / "out", make_context("work"))


REPEATING = [{"text": "same", "key": 1}, {"text": "other", "key": 1}, {"text": "same", "key": 1}]


def test_a_record_that_repeats_id_and_text_is_dropped_and_counted_with_its_locator(
    tmp_path: Path, make_context: MakeContext
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, REPEATING)) + "\n")
    source = {"path": str(tmp_path / "a.jsonl"), "id_field": "key"}
    summary = ingest.run({}, {"sources": {"web": source}}, tmp_path / "out", make_context("work"))
    assert [(row["locator"], row["text"]) for row in rows(tmp_path / "out")] == [("1", "same"), ("1", "other")]
    for counts in (summary["counts"], summary["counts"]["sources"]["web"]):
        assert (counts["read"], counts["kept"], counts["dropped"]) == (3, 2, {"ingest/repeated": 1})
        assert (counts["bytes_read"], counts["bytes_kept"]) == (13, 9)
    check_conservation(summary["counts"], "ingest")
    assert summary["warnings"] == [
        "source 'web': 1 records repeat the id and the text of one before, first '1'; they "
        "are dropped (`on_repeat: fail` refuses them)"
    ]
    assert read_table(tmp_path / "out/dropped/repeated-00000.parquet").to_pylist() == [
        {"source": "web", "file": "", "record": 0, "locator": "1", "reason": "ingest/repeated"}
    ]


def test_a_record_that_repeats_may_be_an_error(tmp_path: Path, make_context: MakeContext) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, REPEATING)) + "\n")
    source = {"path": str(tmp_path / "a.jsonl"), "id_field": "key", "on_repeat": "fail"}
    with pytest.raises(DuplicateIdError, match=r"source 'web': 1 records repeat.*'1'"):
        ingest.run({}, {"sources": {"web": source}}, tmp_path / "out", make_context("work"))


def test_which_repeat_stays_depends_on_the_listing_alone(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    folder = tmp_path / "corpus"
    folder.mkdir()
    expected = []
    for file in range(6):
        records = [{"text": f"text {draw.randrange(60)} " * 9, "file": file} for _ in range(40)]
        for record in records:
            record["key"] = str(record["text"]).split()[1]
            if record["text"] not in [text for _, text in expected]:
                expected.append((file, record["text"]))
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "7.jsonl").write_bytes((folder / "0.jsonl").read_bytes())  # whose shards become empty
    config = {
        "sources": {"web": {"path": str(folder), "id_field": "key", "metadata_fields": ["file"]}},
        "ingest": {"shard_bytes": 3000},
    }
    once, again = tmp_path / "once", tmp_path / "again"
    first = ingest.run({}, config, once, make_context("work1", workers=1))
    # Ids in many partitions, several tasks that compare them, shards in three groups.
    for name, value in (("SORTED_BYTES", 50 * duplicate_records.NOTE_BYTES), ("MOST_GROUPS", 3)):
        monkeypatch.setattr(duplicate_records, name, value)
    monkeypatch.setattr(duplicate_records, "ROW_GROUP_ROWS", 7)
    monkeypatch.setattr(duplicate_records, "PROCESS_BYTES", 0)
    second = ingest.run({}, config, again, make_context("work2", workers=2))
    assert len(list((tmp_path / "work2" / "repeats-00000").iterdir())) == 280 // 50 + 1
    assert len(list((tmp_path / "work2" / "repeats-00000-dropped").iterdir())) == 3
    ledgers = [folder / "dropped" / "repeated-00000.parquet" for folder in (once, again)]
    assert read_table(ledgers[0]) == read_table(ledgers[1])
    ledgers[1].write_bytes(ledgers[0].read_bytes())  # which has smaller row groups
    assert contents(once) == contents(again)
    assert first == second
    assert [(json.loads(row["metadata"])["file"], row["text"]) for row in rows(once)] == expected
    assert first["counts"]["kept"] == len(expected)
    assert first["counts"]["dropped"] == {"ingest/repeated": 7 * 40 - len(expected)}
    assert first["sources"]["web"]["shards"] == len(shard_names(once))


def test_dropping_repeats_that_was_interrupted_ends_with_the_same_bytes(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in range(3):
        (tmp_path / f"{file}.jsonl").write_text(
            "".join(json.dumps({"text": f"t {n} " * 40, "key": n}) + "\n" for n in range(20 * file, 20 * file + 35))
        )
    config = {
        "sources": {"web": {"path": str(tmp_path / "*.jsonl"), "id_field": "key"}},
        "ingest": {"shard_bytes": 2000},
    }
    expected = ingest.run({}, config, tmp_path / "undisturbed", make_context("work1"))
    original, written = duplicate_records.write_table, []

    def failing(path: Path, table: Any) -> None:
        written.append(path.name)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(duplicate_records, "write_table", failing)
        with pytest.raises(OSError, match="No space left"):
            ingest.run({}, config, tmp_path / "out", make_context("work2"))
    assert ingest.run({}, config, tmp_path / "out", make_context("work2")) == expected
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_files_that_changed_since_the_plan_are_an_error(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    config = configure(corpus)
    for name, source in config["sources"].items():
        source["listing"] = listing(name, source)
    ingest.run({}, config, tmp_path / "out", make_context("work"))
    (corpus / "text" / "03.txt").write_text("changed")
    with pytest.raises(ingest.ChangedInputError, match=r"source 'prose': 1 files changed.*03\.txt"):
        ingest.run({}, config, tmp_path / "out2", make_context("work2"))


def test_remote_sources_and_outputs_are_read_and_written(tmp_path: Path, make_context: MakeContext) -> None:
    from upath import UPath

    path = UPath("memory://ingest-test/in/a.jsonl.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b'{"text": "far away"}\n'))
    config = {"sources": {"web": {"path": "memory://ingest-test/in/*.gz"}}}
    out = UPath("memory://ingest-test/out")
    ingest.run({}, config, out, make_context("work"))
    assert [row["text"] for row in rows(out)] == ["far away"]


def test_the_summary_shows_at_most_twenty_quarantined_records(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "MAX_QUARANTINE_ROWS", 8)
    lines = ["bad"] * 30 + ['{"text": "good"}'] * 30
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = {"sources": {"web": {"path": str(tmp_path / "a.jsonl")}}, "ingest": {"max_quarantined": 0.5}}
    summary = ingest.run({}, config, tmp_path / "out", make_context("work"))
    assert [row["record"] for row in summary["quarantined"]] == list(range(1, 21))
    bad = [
        row["record"]
        for path in sorted((tmp_path / "out/quarantine").iterdir())
        for row in read_table(path).to_pylist()
    ]
    assert bad == list(range(1, 31))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "its files hold no records"),
        ("{}\n[]\n", "2 of 2 records could not be read; the first: a.jsonl, record 1: "),
    ],
)
def test_a_source_that_gives_nothing_is_an_error_that_says_why(
    content: str, why: str, tmp_path: Path, make_context: MakeContext
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SourceError, match=re.escape(f"no documents came out of {tmp_path / 'a.jsonl'}: {why}")):
        ingest.run(
            {},
            {"sources": {"web": {"path": str(tmp_path / "a.jsonl")}}, "ingest": {"max_quarantined": 1.0}},
            tmp_path / "out",
            make_context("work"),
        )


def test_where_too_much_is_quarantined_the_error_says_where_to_look(
    corpus: Path, tmp_path: Path, make_context: MakeContext
) -> None:
    with pytest.raises(QuarantineError, match=re.escape(f"column `error` of {tmp_path / 'out' / 'quarantine'}/*.parq")):
        ingest.run({}, configure(corpus, max_quarantined=0.0), tmp_path / "out", make_context("work"))
    assert list((tmp_path / "out" / "quarantine").glob("*.parquet"))


def test_a_few_bad_bytes_are_replaced_and_counted_or_quarantine_their_record(
    tmp_path: Path, make_context: MakeContext
) -> None:
    text = b"The mill grinds what the river brings. " * 9
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text + b"\xff")
    (folder / "b.jsonl").write_bytes(b'{"text": "%s\xff"}\n{"text": "good"}\n{"text": "bad \xff"}\n' % text)
    (folder / "c.csv").write_bytes(b"text,n\n%s\xff,1\ngood,2\nbad \xff,3\n" % text)
    (folder / "d.html").write_bytes(b"<meta charset=utf-8><p>" + ("é".encode() + text + b"\xff") * 2)
    config = {"sources": {"web": {"path": str(folder)}}, "ingest": {"max_quarantined": 1.0}}
    summary = ingest.run({}, config, tmp_path / "out", make_context("work"))
    assert summary["sources"]["web"]["replaced"] == {"records": 4, "places": 5}
    assert [row["locator"] for row in rows(tmp_path / "out") if row["text"].count("\ufffd")] == [
        "a.txt",
        "b.jsonl#1",
        "c.csv#1",
        "d.html",
    ]
    assert [row["file"] for row in summary["quarantined"]] == ["b.jsonl", "c.csv"]
    assert summary["warnings"] == [
        "source 'web': 4 records had bytes that their encoding does not hold; 5 places have U+FFFD instead "
        "(`encoding_errors: strict` quarantines such records)"
    ]
    config["sources"]["web"]["encoding_errors"] = "strict"
    summary = ingest.run({}, config, tmp_path / "strict", make_context("work2"))
    assert (summary["counts"]["kept"], summary["counts"]["quarantined"]) == (2, 6)
    assert summary["sources"]["web"]["replaced"] == {"records": 0, "places": 0}


def test_a_document_beyond_the_limit_is_quarantined_with_its_locator_whatever_its_format(
    tmp_path: Path, make_context: MakeContext
) -> None:
    fits, beyond = "é" * 500, "é" * 501  # two bytes each
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(beyond)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("x", beyond, fits)))
    (folder / "c.csv").write_text(f"text\n{fits}\n{beyond}\n")
    pq.write_table(pa.table({"text": [beyond, fits]}), folder / "d.parquet")
    with zipfile.ZipFile(folder / "e.zip", "w") as archive:
        archive.writestr("in/a.txt", beyond)
    (folder / "f.html").write_text("<meta charset=utf-8>" + f"<p>{'é mill ' * 200}</p>")
    config = {"sources": {"web": {"path": str(folder)}}, "ingest": {"max_document_bytes": 1000, "max_quarantined": 1.0}}
    out = tmp_path / "out"
    summary = ingest.run({}, config, out, make_context("work"))
    check_conservation(summary["counts"], "ingest")
    assert sorted(row["locator"] for row in rows(out)) == ["b.jsonl#1", "b.jsonl#3", "c.csv#1", "d.parquet#2"]
    assert (summary["counts"]["read"], summary["counts"]["quarantined"]) == (10, 6)
    bad = [row for path in sorted((out / "quarantine").iterdir()) for row in read_table(path).to_pylist()]
    assert sorted((row["file"], row["record"], row["error"].partition(":")[0]) for row in bad) == [
        ("a.txt", 1, "a.txt"),
        ("b.jsonl", 2, "b.jsonl#2"),
        ("c.csv", 2, "c.csv#2"),
        ("d.parquet", 1, "d.parquet#1"),
        ("e.zip", 1, "e.zip/in/a.txt"),
        ("f.html", 1, "f.html"),
    ]
    assert summary["quarantined"][0]["error"] == (
        "a.txt: the text has 1,002 bytes, more than ingest.max_document_bytes = 1,000; split it, or raise that"
    )
    assert all(row["excerpt"] for row in bad)
    size = sum(int(row["error"].partition("has ")[2].split()[0].replace(",", "")) for row in bad)
    assert summary["warnings"] == [
        f"source 'web': quarantined texts longer than ingest.max_document_bytes = 1,000: 6, with {size:,} bytes "
        "in all; split them, or raise that"
    ]


def test_a_source_of_one_document_beyond_the_limit_says_what_to_do(tmp_path: Path, make_context: MakeContext) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    config = {
        "sources": {"web": {"path": str(tmp_path / "a.txt")}},
        "ingest": {"max_document_bytes": 100, "max_quarantined": 1.0},
    }
    with pytest.raises(SourceError, match=r"more than ingest\.max_document_bytes = 100; split it, or raise that"):
        ingest.run({}, config, tmp_path / "out", make_context("work"))


def test_little_json_is_read_by_few_threads_and_all_else_by_processes(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.txt").write_text("a")
    original, held = ingest.run_tasks, []

    def run_tasks(*arguments: Any, holds_gil: bool) -> Any:
        held.append(holds_gil)
        return original(*arguments, holds_gil=holds_gil)

    monkeypatch.setattr(ingest, "run_tasks", run_tasks)
    cases = [
        ("a.jsonl", 4, 1 << 30, {}),
        ("a.jsonl", 5, 1 << 30, {}),
        ("a.jsonl", 4, 9, {}),
        ("a.txt", 4, 1 << 30, {}),
        ("a.jsonl", 4, 1 << 30, {"extract": "resiliparse"}),
    ]
    for number, (name, workers, most, keys) in enumerate(cases):
        monkeypatch.setattr(ingest, "THREAD_BYTES", most)
        config = {"sources": {"s": {"path": str(tmp_path / name), **keys}}}
        ingest.run({}, config, tmp_path / str(number), make_context(f"work{number}", workers=workers))
    assert held == [False, True, True, True, True]
