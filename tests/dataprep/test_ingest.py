"""Ingestion of files: documents, quarantine, shards, repeats, limits."""

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

from gristmill.dataprep.conservation import QuarantineError, check_conservation
from gristmill.dataprep.documents import document_id, read_table, shard_names
from gristmill.dataprep.readers import document_shards as sharding
from gristmill.dataprep.readers import duplicate_records, ingest, sources
from gristmill.dataprep.readers.duplicate_records import DuplicateIdError
from gristmill.dataprep.readers.sources import SourceError, listing
from gristmill.mixtures.schema.sources import Source
from tests.dataprep.document_shards import file_contents
from tests.dataprep.own_steps import written

RunIngest = Callable[..., ingest.IngestSummary]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three formats with planted damage: 40 text files, one large JSONL with bad lines,
    one truncated gzip.
    """
    root = tmp_path / "corpus"
    (root / "text").mkdir(parents=True)
    for number in range(40):
        (root / "text" / f"{number:02d}.txt").write_text(
            f"document {number} " * (number + 1)
        )
    (root / "text" / "empty.txt").write_bytes(b"")
    (root / "text" / "latin.txt").write_bytes("é".encode("latin-1"))
    lines = [
        json.dumps({"text": f"record {number} " * 5, "n": number})
        for number in range(300)
    ]
    lines[10], lines[20] = "{not json", json.dumps({"texts": "x"})
    (root / "big.jsonl").write_text("\n".join(lines) + "\n")
    packed = gzip.compress(("\n".join(lines[30:60]) + "\n").encode())
    (root / "cut.jsonl.gz").write_bytes(
        packed + gzip.compress(b'{"text": "last"}\n')[:-4]
    )
    (root / "none.jsonl").write_bytes(b"")
    return root


def configure(corpus: Path, **section: Any) -> dict[str, Any]:
    return {
        "sources": {
            "prose": {"path": str(corpus / "text")},
            "web": {"path": str(corpus / "*.json*")},
        },
        "ingest": {"shard_bytes": 4000, "max_quarantined": 0.5, **section},
    }


def test_every_record_is_kept_or_quarantined_with_its_place(
    corpus: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    out = tmp_path / "out"
    summary = run_ingest(configure(corpus), out)
    counts = summary.counts
    # 42 text files; 300 lines; 31 lines of a file that lacks only its last checksum,
    # which counts as one bad record.
    assert counts["sources"]["prose"]["read"] == 42
    assert counts["sources"]["prose"]["quarantined"] == 2
    assert counts["sources"]["web"]["read"] == 300 + 31 + 1
    assert counts["sources"]["web"]["quarantined"] == 2 + 1
    documents = written(out)
    assert len(documents) == counts["kept"] == 40 + 298 + 31
    assert counts["bytes_kept"] == sum(len(row["text"].encode()) for row in documents)
    bad = [
        row
        for path in sorted((out / "quarantine").iterdir())
        for row in read_table(path).to_pylist()
    ]
    assert len(bad) == counts["quarantined"] == 5
    assert [(row["source"], row["file"], row["record"]) for row in bad] == [
        ("prose", "empty.txt", 1),
        ("prose", "latin.txt", 1),
        ("web", "big.jsonl", 11),
        ("web", "big.jsonl", 21),
        ("web", "cut.jsonl.gz", 32),
    ]
    assert summary.quarantined == [
        {key: row[key] for key in ("source", "file", "record", "error")} for row in bad
    ]
    empty_file, truncated_file = summary.warnings
    assert empty_file.startswith("source 'web': none.jsonl ")
    assert truncated_file.startswith("source 'web': cut.jsonl.gz ")
    assert re.search(r"\b268 records .* record 32$", truncated_file)
    for row in documents:
        assert row["id"] == document_id(row["source"], row["locator"], row["text"])
    assert len({row["id"] for row in documents}) == len(documents)
    assert documents[-1]["locator"] == "cut.jsonl.gz#31"


def test_shards_are_bounded_and_hold_one_source(
    corpus: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    out = tmp_path / "out"
    run_ingest(configure(corpus), out)
    tables = {
        shard: read_table(out / shard, ["source", "text"]).to_pylist()
        for shard in shard_names(out)
    }
    tasks = {shard.split("-")[1] for shard in tables}
    assert len(tables) > len(tasks) > 2
    for table in tables.values():
        assert sum(len(row["text"]) for row in table[:-1]) < 4000
        assert len({row["source"] for row in table}) == 1


def test_workers_and_listing_order_do_not_change_a_byte(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingest: RunIngest
) -> None:
    first_out, second_out = tmp_path / "once", tmp_path / "again"
    first = run_ingest(configure(corpus), first_out, workers=1)
    original = sources.find

    def shuffled(path: str) -> Any:
        kind, files = original(path)
        return kind, random.Random(5).sample(files, len(files))

    monkeypatch.setattr(sources, "find", shuffled)
    second = run_ingest(configure(corpus), second_out, workers=2)
    assert file_contents(first_out) == file_contents(second_out)
    assert first == second


def test_resumed_run_writes_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingest: RunIngest
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    expected = run_ingest(configure(corpus), undisturbed)
    original, written = sharding.write_table, []

    def failing(path: Path, table: Any) -> None:
        if len(written) == 6:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "write_table", failing)
        with pytest.raises(Exception, match="No space left"):
            run_ingest(configure(corpus), out)
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("part-00000-*")}
    assert finished
    assert run_ingest(configure(corpus), out) == expected
    assert file_contents(out) == file_contents(undisturbed)
    assert {
        path.name: path.stat().st_mtime_ns for path in out.glob("part-00000-*")
    } == finished


def test_limit_takes_the_first_documents_of_the_listing(
    corpus: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    config = configure(corpus)
    config["sources"] = {"prose": {"path": str(corpus / "text"), "limit": 7}}
    run_ingest(config, workers=2)
    assert [row["locator"] for row in written(tmp_path / "out")] == [
        f"{number:02d}.txt" for number in range(7)
    ]


def test_limit_counts_documents_and_can_end_within_a_file(
    corpus: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    config = configure(corpus)
    config["sources"] = {"web": {"path": str(corpus / "big.jsonl"), "limit": 12}}
    summary = run_ingest(config)
    assert [row["locator"] for row in written(tmp_path / "out")] == [
        f"big.jsonl#{number}" for number in (*range(1, 11), 12, 13)
    ]
    assert (summary.counts["read"], summary.counts["quarantined"]) == (13, 1)


def test_quarantine_above_the_limit_fails_the_stage_and_names_the_tables(
    corpus: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    with pytest.raises(QuarantineError, match=r"5 of 374 .*268 ") as raised:
        run_ingest(configure(corpus, max_quarantined=0.01))
    assert f"`error` of {tmp_path / 'out' / 'quarantine'}/*.parq" in str(raised.value)
    assert list((tmp_path / "out" / "quarantine").glob("*.parquet"))


REPEATING = [
    {"text": "same", "key": 1},
    {"text": "other", "key": 1},
    {"text": "same", "key": 1},
]


def test_repeated_record_is_dropped_and_counted(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, REPEATING)) + "\n")
    source = {"path": str(tmp_path / "a.jsonl"), "id_field": "key"}
    summary = run_ingest({"sources": {"web": source}})
    assert [(row["locator"], row["text"]) for row in written(tmp_path / "out")] == [
        ("1", "same"),
        ("1", "other"),
    ]
    for counts in (summary.counts, summary.counts["sources"]["web"]):
        assert (counts["read"], counts["kept"], counts["dropped"]) == (
            3,
            2,
            {"ingest/repeated": 1},
        )
        assert (counts["bytes_read"], counts["bytes_kept"]) == (13, 9)
    check_conservation(summary.counts, "ingest")
    (warning,) = summary.warnings
    assert warning.startswith("source 'web': 1 records ")
    assert "'1'" in warning
    assert "`on_repeat: fail`" in warning
    assert read_table(tmp_path / "out/dropped/repeated-00000.parquet").to_pylist() == [
        {
            "source": "web",
            "file": "",
            "record": 0,
            "locator": "1",
            "reason": "ingest/repeated",
        }
    ]


def test_repeated_record_is_an_error_with_on_repeat_fail(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, REPEATING)) + "\n")
    source = {"path": str(tmp_path / "a.jsonl"), "id_field": "key", "on_repeat": "fail"}
    with pytest.raises(DuplicateIdError, match=r"source 'web': 1 records .*'1'"):
        run_ingest({"sources": {"web": source}})


def test_kept_repeat_depends_on_the_listing_alone(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    rng = random.Random(5)
    folder = tmp_path / "corpus"
    folder.mkdir()
    expected = []
    for file in range(6):
        records = [
            {"text": f"text {rng.randrange(60)} " * 9, "file": file} for _ in range(40)
        ]
        for record in records:
            record["key"] = str(record["text"]).split()[1]
            if record["text"] not in [text for _, text in expected]:
                expected.append((file, record["text"]))
        (folder / f"{file}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    # whose shards become empty
    (folder / "7.jsonl").write_bytes((folder / "0.jsonl").read_bytes())
    config = {
        "sources": {
            "web": {"path": str(folder), "id_field": "key", "metadata_fields": ["file"]}
        },
        "ingest": {"shard_bytes": 3000},
    }
    first_out, second_out = tmp_path / "once", tmp_path / "again"
    first = run_ingest(config, first_out, workers=1)
    second = run_ingest(config, second_out, workers=2)
    assert file_contents(first_out) == file_contents(second_out)
    assert first == second
    assert [
        (json.loads(row["metadata"])["file"], row["text"]) for row in written(first_out)
    ] == expected
    assert first.counts["kept"] == len(expected)
    assert first.counts["dropped"] == {"ingest/repeated": 7 * 40 - len(expected)}
    assert first.sources["web"].shards == len(shard_names(first_out))


def test_resumed_dropping_of_repeats_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingest: RunIngest
) -> None:
    for file in range(3):
        (tmp_path / f"{file}.jsonl").write_text(
            "".join(
                json.dumps({"text": f"t {n} " * 40, "key": n}) + "\n"
                for n in range(20 * file, 20 * file + 35)
            )
        )
    config = {
        "sources": {"web": {"path": str(tmp_path / "*.jsonl"), "id_field": "key"}},
        "ingest": {"shard_bytes": 2000},
    }
    expected = run_ingest(config, "undisturbed")
    original, written = duplicate_records.write_table, []

    def failing(path: Path, table: Any) -> None:
        written.extend([path] if path.parent == tmp_path / "out" else [])
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(duplicate_records, "write_table", failing)
        with pytest.raises(OSError, match="No space left"):
            run_ingest(config)
    assert run_ingest(config) == expected
    assert file_contents(tmp_path / "out") == file_contents(tmp_path / "undisturbed")


def test_file_changed_since_the_plan_is_an_error(
    corpus: Path, run_ingest: RunIngest
) -> None:
    config = configure(corpus)
    for name, source in config["sources"].items():
        source["listing"] = listing(name, Source.model_validate(source))
    run_ingest(config)
    (corpus / "text" / "03.txt").write_text("changed")
    with pytest.raises(
        ingest.ChangedInputError, match=r"source 'prose': 1 files .*03\.txt"
    ):
        run_ingest(config, "out2")


def test_remote_sources_and_outputs_are_read_and_written(run_ingest: RunIngest) -> None:
    from upath import UPath

    path = UPath("memory://ingest-test/in/a.jsonl.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b'{"text": "far away"}\n'))
    config = {"sources": {"web": {"path": "memory://ingest-test/in/*.gz"}}}
    out = UPath("memory://ingest-test/out")
    run_ingest(config, out)
    assert [row["text"] for row in written(out)] == ["far away"]


def test_summary_lists_at_most_twenty_quarantined_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingest: RunIngest
) -> None:
    monkeypatch.setattr(sharding, "MAX_QUARANTINE_ROWS", 8)
    lines = ["bad"] * 30 + ['{"text": "good"}'] * 30
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = {
        "sources": {"web": {"path": str(tmp_path / "a.jsonl")}},
        "ingest": {"max_quarantined": 0.5},
    }
    summary = run_ingest(config)
    assert [row["record"] for row in summary.quarantined] == list(range(1, 21))
    bad = [
        row["record"]
        for path in sorted((tmp_path / "out/quarantine").iterdir())
        for row in read_table(path).to_pylist()
    ]
    assert bad == list(range(1, 31))


@pytest.mark.parametrize(
    ("content", "facts"),
    [("", "no records"), ("{}\n[]\n", r"2 of 2 .*a\.jsonl, record 1: .*'text'")],
)
def test_source_without_documents_is_an_error_with_the_first_reason(
    content: str, facts: str, tmp_path: Path, run_ingest: RunIngest
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    path = re.escape(str(tmp_path / "a.jsonl"))
    with pytest.raises(SourceError, match=f"source 'web': .*{path}.*{facts}"):
        run_ingest(
            {
                "sources": {"web": {"path": str(tmp_path / "a.jsonl")}},
                "ingest": {"max_quarantined": 1.0},
            }
        )


def test_bad_bytes_are_replaced_or_quarantined(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    text = b"The mill grinds what the river brings. " * 9
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text + b"\xff")
    (folder / "b.jsonl").write_bytes(
        b'{"text": "%s\xff"}\n{"text": "good"}\n{"text": "bad \xff"}\n' % text
    )
    (folder / "c.csv").write_bytes(b"text,n\n%s\xff,1\ngood,2\nbad \xff,3\n" % text)
    (folder / "d.html").write_bytes(
        b"<meta charset=utf-8><p>" + ("é".encode() + text + b"\xff") * 2
    )
    config = {
        "sources": {"web": {"path": str(folder)}},
        "ingest": {"max_quarantined": 1.0},
    }
    summary = run_ingest(config)
    assert summary.sources["web"].replaced == {"records": 4, "places": 5}
    assert [
        row["locator"]
        for row in written(tmp_path / "out")
        if row["text"].count("\ufffd")
    ] == [
        "a.txt",
        "b.jsonl#1",
        "c.csv#1",
        "d.html",
    ]
    assert [row["file"] for row in summary.quarantined] == ["b.jsonl", "c.csv"]
    (warning,) = summary.warnings
    assert re.search(
        r"source 'web': .*U\+FFFD .*\b5, .*\b4\).*`encoding_errors: strict`", warning
    )
    config["sources"]["web"]["encoding_errors"] = "strict"
    summary = run_ingest(config, "strict")
    assert (summary.counts["kept"], summary.counts["quarantined"]) == (2, 6)
    assert summary.sources["web"].replaced == {"records": 0, "places": 0}


def test_oversized_document_is_quarantined_in_every_format(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    fits, beyond = "é" * 500, "é" * 501  # two bytes each
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(beyond)
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("x", beyond, fits))
    )
    (folder / "c.csv").write_text(f"text\n{fits}\n{beyond}\n")
    pq.write_table(pa.table({"text": [beyond, fits]}), folder / "d.parquet")
    with zipfile.ZipFile(folder / "e.zip", "w") as archive:
        archive.writestr("in/a.txt", beyond)
    (folder / "f.html").write_text("<meta charset=utf-8>" + f"<p>{'é mill ' * 200}</p>")
    config = {
        "sources": {"web": {"path": str(folder)}},
        "ingest": {"max_document_bytes": 1000, "max_quarantined": 1.0},
    }
    out = tmp_path / "out"
    summary = run_ingest(config, out)
    check_conservation(summary.counts, "ingest")
    assert sorted(row["locator"] for row in written(out)) == [
        "b.jsonl#1",
        "b.jsonl#3",
        "c.csv#1",
        "d.parquet#2",
    ]
    assert (summary.counts["read"], summary.counts["quarantined"]) == (10, 6)
    bad = [
        row
        for path in sorted((out / "quarantine").iterdir())
        for row in read_table(path).to_pylist()
    ]
    assert sorted(
        (row["file"], row["record"], row["error"].partition(":")[0]) for row in bad
    ) == [
        ("a.txt", 1, "a.txt"),
        ("b.jsonl", 2, "b.jsonl#2"),
        ("c.csv", 2, "c.csv#2"),
        ("d.parquet", 1, "d.parquet#1"),
        ("e.zip", 1, "e.zip/in/a.txt"),
        ("f.html", 1, "f.html"),
    ]
    assert re.match(
        r"a\.txt: .*1,002 bytes.*ingest\.max_document_bytes = 1,000",
        summary.quarantined[0]["error"],
    )
    assert all(row["excerpt"] for row in bad)
    size = sum(
        int(row["error"].partition("has ")[2].split()[0].replace(",", ""))
        for row in bad
    )
    (warning,) = summary.warnings
    assert re.match(
        rf"source 'web': .*ingest\.max_document_bytes = 1,000: 6, .*{size:,} bytes",
        warning,
    )


def test_small_json_is_read_by_threads_and_anything_else_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingest: RunIngest
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
        run_ingest(config, str(number), workers=workers)
    assert held == [False, True, True, True, True]
