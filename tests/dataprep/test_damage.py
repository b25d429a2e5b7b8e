"""Truncated files: the lost records are estimated, reported, and count against the
quarantine limit.
"""

import bz2
import gzip
import io
import json
import random
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import QuarantineError
from gristmill.dataprep.readers import compression, ingest
from gristmill.dataprep.readers.document_shards import Damaged, lost_records
from gristmill.dataprep.readers.readers import read_file
from gristmill.dataprep.readers.records import Ended, Reading
from tests.dataprep.archive_files import make_tar, make_zip
from tests.dataprep.source_files import files_of
from tests.dataprep.warc_records import record

MakeContext = Callable[..., Context]
RunIngest = Callable[..., ingest.IngestSummary]
DOCUMENTS = 400


def texts(file: int) -> list[str]:
    rng = random.Random(file)
    return [
        f"document {file} {number} " + rng.randbytes(60).hex()
        for number in range(DOCUMENTS)
    ]


def jsonl(file: int) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(file)).encode()


def csv(file: int) -> bytes:
    return (
        "text,n\n"
        + "".join(f"{text},{number}\n" for number, text in enumerate(texts(file)))
    ).encode()


def warc(file: int, member: Callable[[bytes], bytes] = bytes) -> bytes:
    numbered = enumerate(texts(file), start=1000 * file)
    return b"".join(
        member(record("conversion", text.encode(), number)) for number, text in numbered
    )


def members(file: int) -> dict[str, bytes]:
    return {
        f"{file}/{number:04d}.txt": text.encode()
        for number, text in enumerate(texts(file))
    }


def parquet(file: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts(file)}), buffer)
    return buffer.getvalue()


def arrow(file: int, stream: bool = True) -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"text": texts(file)})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(
        buffer, table.schema
    ) as writer:
        for batch in table.to_batches(max_chunksize=20):
            writer.write_batch(batch)
    return buffer.getvalue()


FORMS: dict[str, Callable[[int], bytes]] = {
    ".jsonl": jsonl,
    ".jsonl.gz": lambda file: gzip.compress(jsonl(file)),
    ".jsonl.bz2": lambda file: bz2.compress(jsonl(file), 1),
    ".jsonl.zst": lambda file: zstandard.ZstdCompressor().compress(jsonl(file)),
    ".csv": csv,
    ".csv.gz": lambda file: gzip.compress(csv(file)),
    ".warc": warc,
    ".warc.gz": lambda file: warc(file, gzip.compress),
    ".warc.zst": lambda file: warc(file, zstandard.ZstdCompressor().compress),
    ".tar": lambda file: make_tar(members(file)),
    ".tar.gz": lambda file: gzip.compress(make_tar(members(file))),
    ".zip": lambda file: make_zip(members(file)),
    ".parquet": parquet,
    ".arrow": arrow,
}


def write_corpus(folder: Path, extension: str, keep: float) -> Path:
    """Write five files of DOCUMENTS documents; the third is truncated to the share
    `keep`.
    """
    folder.mkdir()
    for file in range(5):
        content = FORMS[extension](file)
        (folder / f"{file}{extension}").write_bytes(
            content[: int(len(content) * keep)] if file == 2 else content
        )
    return folder


def configure(folder: Path, **section: Any) -> dict[str, Any]:
    return {"sources": {"web": {"path": str(folder)}}, "ingest": section}


@pytest.mark.parametrize(
    "extension", [".jsonl", ".jsonl.gz", ".warc.gz", ".zip", ".parquet"]
)
def test_stage_fails_if_truncated_files_lose_too_many_records(
    tmp_path: Path, make_context: MakeContext, extension: str
) -> None:
    folder = write_corpus(tmp_path / "corpus", extension, 0.1)
    events: list[dict[str, Any]] = []
    with pytest.raises(QuarantineError, match="lost"):
        ingest.run(
            {},
            configure(folder),
            tmp_path / "out",
            replace(make_context("work"), emit=events.append),
        )
    messages = [event.get("message", "") for event in events]
    assert any(f"source 'web': 2{extension} " in message for message in messages)


@pytest.mark.parametrize("extension", FORMS)
def test_lost_records_are_estimated_from_intact_files(
    tmp_path: Path, extension: str, run_ingest: RunIngest
) -> None:
    folder = write_corpus(tmp_path / "corpus", extension, 0.5)
    summary = run_ingest(configure(folder, max_quarantined=0.5))
    (damaged,) = summary.damaged
    assert (damaged.source, damaged.file) == ("web", f"2{extension}")
    assert damaged.records + damaged.lost == DOCUMENTS
    assert damaged.records == summary.counts["read"] - 4 * DOCUMENTS
    assert summary.lost == summary.sources["web"].lost == damaged.lost


@pytest.mark.slow
def test_intact_files_lose_nothing(tmp_path: Path, run_ingest: RunIngest) -> None:
    for extension in FORMS:
        folder = write_corpus(tmp_path / extension, extension, 1.0)
        summary = run_ingest(configure(folder), f"out{extension}")
        assert (summary.lost, summary.damaged, summary.counts["kept"]) == (
            0,
            [],
            5 * DOCUMENTS,
        ), extension


def test_workers_and_shards_do_not_change_the_estimate(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    folder = write_corpus(tmp_path / "corpus", ".jsonl.gz", 0.3)
    estimates = [
        run_ingest(
            configure(folder, max_quarantined=0.5, shard_bytes=size),
            f"out{size}",
            workers=workers,
        ).damaged
        for size, workers in ((1000, 2), (10_000_000, 1))
    ]
    assert estimates[0] == estimates[1]


def test_damage_in_the_middle_is_estimated_from_the_bytes_after_it(
    tmp_path: Path,
) -> None:
    # its blocks have checksums
    content = bytearray(bz2.compress(b"".join(map(jsonl, range(60))), 1))
    content[len(content) // 4 : len(content) // 4 + 64] = b"\xff" * 64
    (tmp_path / "a.jsonl.bz2").write_bytes(bytes(content))
    (file,) = files_of(tmp_path)
    ended = [item for item in read_file(file, Reading()) if isinstance(item, Ended)][-1]
    assert ended.lost is None
    lost = lost_records(
        damaged_file(ended.error, ended.records, file.size, ended.read_bytes), {}
    )
    assert ended.records + lost == pytest.approx(60 * DOCUMENTS, rel=0.15)


def damaged_file(error: str, records: int, size: int, read_bytes: int) -> Damaged:
    return {
        "source": "s",
        "file": "a",
        "error": error,
        "records": records,
        "stored_bytes": size,
        "read_bytes": read_bytes,
        "kind": "files",
        "lost": None,
    }


def decoded(path: Path) -> tuple[bytes, str, int]:
    """Decoded content of a gzip file, the error that ends it, and the number of bytes
    read.
    """
    meter, content = compression.Metered(path), b""
    try:
        for chunk in compression.read_chunks(meter, ".gz"):
            content += chunk
    except compression.CorruptFileError as error:
        return content, str(error), meter.read_bytes
    return content, "", meter.read_bytes


@pytest.mark.slow
def test_isal_decoder_finds_the_same_damage_as_zlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_member = io.BytesIO()
    with gzip.GzipFile("name", "wb", fileobj=named_member, mtime=0) as member:
        member.write(b"named member " * 9)
    texts = [b"a first member " * 5, jsonl(1)[:3000]]
    intact_file = b"".join(
        [
            gzip.compress(texts[0], mtime=0),
            bytes(20),
            named_member.getvalue(),
            gzip.compress(texts[1], mtime=0),
        ]
    )
    (tmp_path / "a.gz").write_bytes(intact_file)
    intact, error, _ = decoded(tmp_path / "a.gz")
    assert (intact, error) == (texts[0] + b"named member " * 9 + texts[1], "")
    flipped_files = [
        intact_file[:at]
        + bytes([intact_file[at] ^ 1 << at % 8])
        + intact_file[at + 1 :]
        for at in range(len(intact_file))
    ]
    damaged_files = [
        *(intact_file[:at] for at in range(0, len(intact_file), 7)),
        *flipped_files,
        intact_file + bytes(9),
        intact_file + b"\0\x1f",
        intact_file + intact_file[:9],
    ]
    false_alarms = 0
    for step in (7, 4096):
        monkeypatch.setattr(compression, "FEED_BYTES", step)
        monkeypatch.setattr(compression, "GZIP_BYTES", 2 * step)
        for content in damaged_files if step == 4096 else damaged_files[::9]:
            (tmp_path / "a.gz").write_bytes(content)
            fast = decoded(tmp_path / "a.gz")
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "isal", None)
                careful = decoded(tmp_path / "a.gz")
            assert fast[0].startswith(careful[0])
            # Of codes that zlib refuses and ISA-L uses the checksum says whether they
            # are damage.
            assert fast[1:] == careful[1:] or fast[:2] == (intact, "")
            false_alarms += len(fast[0]) > len(careful[0])
    assert false_alarms < 9


def test_half_of_a_single_truncated_file_counts_as_lost() -> None:
    damaged = damaged_file("cut off", 1000, 5000, 5000)
    assert lost_records(damaged, {}) == 1000
    assert lost_records(damaged, {"number": 2, "records": 20, "bytes": 100_000}) == 1000
    assert (
        lost_records(damaged, {"number": 2, "records": 5000, "bytes": 100_000}) == 1500
    )
    unread = damaged_file("cut off", 0, 5000, 5000)
    assert lost_records(unread, {}) == 1
    assert lost_records(unread, {"number": 4, "records": 40, "bytes": 1000}) == 200


def test_damaged_archive_member_is_estimated_from_the_other_members(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for file in range(5):
            content = gzip.compress(jsonl(file))
            archive.writestr(
                f"{file}.jsonl.gz",
                content[: len(content) // 10] if file == 1 else content,
            )
    summary = run_ingest(configure(folder, max_quarantined=0.5))
    (damaged,) = summary.damaged
    assert damaged.file == "a.zip/1.jsonl.gz"
    assert damaged.records + damaged.lost == DOCUMENTS


def test_unclosed_quote_loses_the_rows_after_it(tmp_path: Path) -> None:
    rows = [f"row {number},{number}" for number in range(100)]
    rows[60] = '"row 60,60'
    (tmp_path / "a.csv").write_text("text,n\n" + "\n".join(rows) + "\n")
    (file,) = files_of(tmp_path)
    (ended,) = [item for item in read_file(file, Reading()) if isinstance(item, Ended)]
    assert (ended.records, ended.lost) == (61, 39)


def test_unusable_header_loses_all_rows(tmp_path: Path, run_ingest: RunIngest) -> None:
    folder = write_corpus(tmp_path / "corpus", ".csv", 1.0)
    (folder / "2.csv").write_bytes(b"text,text\n" + csv(2).partition(b"\n")[2])
    with pytest.raises(QuarantineError, match=f"{DOCUMENTS} .*lost"):
        run_ingest(configure(folder))
