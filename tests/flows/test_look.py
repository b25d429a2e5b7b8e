"""`gristmill look` describes data in seconds, and writes a manifest for it on
request.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.fasttext.fasttext_models import MODEL_VARIABLE
from gristmill.dataprep.readers.sources import SourceError, find_files
from gristmill.flows.authoring import measured_sample
from gristmill.flows.authoring.look_at_data import (
    BOOK_PARAGRAPHS,
    look_at,
    names_code,
    sample_rows,
)
from gristmill.flows.authoring.measured_sample import (
    Duplicates,
    find_duplicates,
    rule_sets_for,
)
from gristmill.flows.authoring.try_function import take_sample
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.schema.sources import DocumentFiles
from tests.commands import call, finished
from tests.dataprep.warc_records import http, record
from tests.jsonl import write_jsonl

MODEL = (
    Path(__file__).resolve().parents[3]
    / "shared"
    / "data"
    / "langid"
    / "lid176"
    / "lid.176.ftz"
)


def words(seed: int, number: int) -> str:
    """Return a text that passes Gopher's rules."""
    word_numbers = np.random.default_rng(seed).integers(0, 900, number)
    return "The river and the mill have turned with that water. " + " ".join(
        f"word{word:03d}." for word in word_numbers
    )


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    texts = [words(seed, 200) for seed in range(30)]
    near = texts[1].rsplit(" ", 1)[0]
    rows = [
        {"id": f"n{place}", "text": text}
        for place, text in enumerate([*texts, texts[0], near, "too short"])
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "web.jsonl", rows)
    (folder / "more.txt").write_text(words(99, 300))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        MODEL_VARIABLE, str(MODEL) if MODEL.exists() else str(tmp_path / "absent")
    )
    return folder


def look(*arguments: str) -> str:
    result = call("look", *arguments, "--seconds=200")
    return result.stdout


@pytest.mark.slow
def test_look_reports_formats_duplicates_and_kept_shares(data: Path) -> None:
    report = json.loads(look("data", "--json"))
    assert [entry[:2] for entry in report["formats"]] == [["jsonl", 1], ["text", 1]]
    assert report["ignored"] == {".png": 1}
    assert report["sample"]["documents"] == 34
    assert report["duplicates"] == {"exact": 1, "near": 1}
    gopher = next(row for row in report["rules"] if row["name"] == "gopher (dclm)")
    assert gopher["dropped"]["gopher_quality/min_words"] == 1
    assert gopher["documents"] == pytest.approx(33 / 34)
    assert [row["name"] for row in report["rules"]] == list(
        rule_sets_for(is_code=False)
    )
    assert report["not_ready"] == []
    assert len(report["examples"]) == 10
    if MODEL.exists():
        assert report["languages"]["missing"] is None
        assert sum(report["languages"]["found"].values()) == 34
    else:
        assert "which is not a file" in report["languages"]["missing"]


@pytest.mark.slow
def test_manifest_is_written_to_out_with_paths_relative_to_it(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    output = look("data", "--out=recipes/mine.yaml")
    assert "written: recipes/mine.yaml" in output
    text = (tmp_path / "recipes" / "mine.yaml").read_text()
    assert "path: ../data\n" in text
    assert text in output
    source = load_manifest(tmp_path / "recipes" / "mine.yaml").sources["data"]
    assert Path(source.path).resolve() == data


def test_look_fits_a_narrow_terminal(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output = look("data").partition("\nManifest\n")[0]
    assert max(map(len, output.splitlines())) <= 60
    assert "not read: 1 .png" in output


@pytest.mark.slow
def test_look_runs_without_torch(data: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom typer.testing import CliRunner\n"
        "from gristmill.flows.cli.main import app\n"
        "done = CliRunner().invoke(app, ['look', 'data', '--seconds', '0'])\n"
        "print(done.output); assert done.exit_code == 0\n"
        "assert not {'apache_beam', 'prefect'} & set(sys.modules)"
    )
    process = finished([sys.executable, "-c", code], cwd=data.parent)
    assert "10 documents" in process.stdout


@pytest.mark.slow
def test_fine_tuning_rows_get_a_remark(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "p" * 30, "chosen": "c" * 60, "rejected": "r" * 50})
    )
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": []}))
    with pytest.raises(SourceError, match="look like conversations"):
        look_at("a", str(tmp_path / "chats.jsonl"))
    assert (
        "look like preferences: `dpo:"
        in json.loads(look(str(tmp_path / "pairs.jsonl"), "--json"))["remarks"][0]
    )


def test_row_with_two_extensions_is_counted_once() -> None:
    program = {"text": "a", "ext": "py", "extension": ".py"}
    prose = {"text": "b", "ext": "txt", "extension": None}
    assert names_code([program, program, prose])
    assert not names_code([program, prose, prose])


def sample_of(path: Path, documents: int = 1000, most_bytes: float = 1e9) -> int:
    """Return the number of sampled documents."""
    with take_sample(str(path), None, documents, most_bytes) as sample:
        (folder,) = sample.inputs.values()
        return sum(pq.read_metadata(folder / shard).num_rows for shard in sample.shards)


def test_sample_of_small_files_has_the_requested_number_of_documents(
    tmp_path: Path,
) -> None:
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(words(number, 100 + number))
    assert sample_of(tmp_path) == 60
    assert sample_of(tmp_path, documents=25) == 25
    # about 1,100 bytes per file
    assert 20 <= sample_of(tmp_path, most_bytes=25_000.0) <= 30


def test_sample_of_files_with_rows_stops_at_enough_documents(
    tmp_path: Path,
) -> None:
    for number in range(30):
        rows = [json.dumps({"text": words(number * 5 + row, 50)}) for row in range(5)]
        (tmp_path / f"{number:02d}.jsonl").write_text("\n".join(rows))
    assert sample_of(tmp_path) == 150
    assert sample_of(tmp_path, documents=80) == 80
    assert sample_of(tmp_path, documents=20) == 20  # ten files are enough


def test_cells_of_a_table_may_hold_line_separators_of_unicode(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("text,n\none\u2028two\x85three,1\n", "utf-8", newline="")
    (file,) = find_files("a", DocumentFiles(path=str(table), format="csv")).files
    assert sample_rows(file) == [{"text": "one\u2028two\x85three", "n": "1"}]


@pytest.mark.slow
def test_text_of_compressed_files_and_tables_is_measured(
    tmp_path: Path,
) -> None:
    rows = [{"text": words(number, 400)} for number in range(50)]
    size = sum(len(row["text"]) for row in rows)
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    )
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd"
    )
    pq.write_table(
        pa.Table.from_pylist([{"text": "the same text again"}] * 9_000),
        tmp_path / "b.parquet",
    )
    assert look_at("a", str(tmp_path / "a.jsonl.gz")).text_bytes == pytest.approx(
        size, rel=0.01
    )
    assert look_at("a", str(tmp_path / "a.parquet")).text_bytes == pytest.approx(
        size, rel=0.01
    )
    assert look_at("b", str(tmp_path / "b.parquet")).text_bytes == pytest.approx(
        9_000 * 19, rel=0.01
    )


def test_web_pages_are_measured_by_their_text(tmp_path: Path) -> None:
    text = words(1, 300)
    pages = [
        f"<html><body><p>{number} {text}</p>{'<script>x()</script>' * 99}</body></html>"
        for number in range(20)
    ]
    responses = [
        record("response", http(page.encode()), number)
        for number, page in enumerate(pages)
    ]
    (tmp_path / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, responses)))
    plain = [record("conversion", text.encode(), number) for number in range(20)]
    (tmp_path / "a.wet.gz").write_bytes(b"".join(map(gzip.compress, plain)))
    for name in ("a.warc.gz", "a.wet.gz"):
        assert look_at("a", str(tmp_path / name)).text_bytes == pytest.approx(
            20 * len(text), rel=0.05
        )


@pytest.mark.slow
def test_a_folder_of_programs_gets_the_rules_for_programs(
    data: Path, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / "data" / f"{number}.py").write_text(
            "import os\n\n\ndef work() -> str:\n    return os.sep\n" * 20
        )
    (data / "web.jsonl").unlink()
    text = json.loads(look("data", "--json"))["manifest"]
    assert "  - filter: {rules: [code]}\n  - dedup" in text
    assert "gopher" not in text


def test_estimated_text_of_a_mixed_folder_is_summed_over_formats(data: Path) -> None:
    """One file of many documents beside files of one document each."""
    rows = [{"text": words(seed, 200)} for seed in range(400)]
    write_jsonl(data / "web.jsonl", rows)
    for number in range(19):
        (data / f"a{number:02d}.txt").write_text(words(number, 100))
    assert sample_of(data, documents=100) < 400
    look = look_at("data", str(data))
    stored_bytes = sum(file.stat().st_size for file in data.glob("*.*[lt]"))
    assert look.text_bytes == pytest.approx(stored_bytes, rel=0.02)
    assert look.remarks == (
        "20 of 21 files hold one text each beside files of rows: separate sources "
        "(`gristmill new --source NAME='GLOB'` for each) can have separate weights "
        "and rules",
        "gristmill has no reader for image files: name a function of yours that "
        "yields the texts, with pytesseract for "
        "example (read: {use: ./readers.py:read_file}, see docs/own-readers.md), or "
        "read it with tesseract",
    )


def test_unreadable_record_is_reported_with_its_file(data: Path) -> None:
    (data / "empty.txt").touch()
    output = look("data")
    assert "unreadable: empty.txt, record 1: empty file" in output
    (data / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}' * 99)[:20])
    outcome = call("look", data / "cut.jsonl.gz", code=2)
    assert "can be read as jsonl: cut.jsonl.gz: .gz data" in " ".join(
        outcome.output.split()
    )
    table = data / "tables" / "cut.parquet"
    table.parent.mkdir()
    table.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(SourceError, match=r"cut\.parquet: .*footer"):
        look_at("tables", str(table.parent))


@pytest.mark.slow
def test_compressed_book_is_recognized(tmp_path: Path) -> None:
    book = "\n\n".join(words(number, 30_000) for number in range(1, 6)).encode()
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(book))
    assert (tmp_path / "book.txt.gz").stat().st_size < 500_000 < len(book)
    book_look = look_at("book", str(tmp_path / "book.txt.gz"))
    assert book_look.split == BOOK_PARAGRAPHS
    assert sample_of(tmp_path / "book.txt.gz") == 5


def test_look_without_a_language_model_reports_the_cause(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measured_sample,
        "find_languages",
        lambda texts, seconds: ([None] * len(texts), "no such file"),
    )
    report = json.loads(look("data", "--json"))
    assert report["languages"] == {"found": {}, "missing": "no such file"}
    assert report["duplicates"] == {"exact": 1, "near": 1}
    assert len(report["rules"]) == len(rule_sets_for(False))


def test_source_without_text_is_rejected_with_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.json").write_text(
        json.dumps({f"w{number}": number for number in range(5000)})
    )
    result = call("look", tmp_path / "vocabulary.json", code=2)
    assert "and 4,980 more; give a path" in " ".join(result.output.split())
    assert len(result.output) < 600


def test_longest_near_duplicate_survives() -> None:
    base = words(3, 200)
    texts = pa.array([base, base + " more.", base, words(4, 200)], pa.large_string())
    assert find_duplicates(texts) == Duplicates(exact=1, near=1)


def test_books_are_split_into_paragraphs(tmp_path: Path) -> None:
    chapter = "The river ran past the mill. " * 5_000
    (tmp_path / "book.txt").write_text("\n\n".join([chapter] * 5))
    (tmp_path / "note.txt").write_text("A note.")
    book_look = look_at("books", str(tmp_path))
    assert book_look.split == BOOK_PARAGRAPHS
    assert book_look.remarks == (
        "1 of 2 files are longer than 500 kB, and are cut into paragraphs",
    )
    note = look_at("note", str(tmp_path / "note.txt"))
    assert (note.split, note.remarks) == (None, ())
