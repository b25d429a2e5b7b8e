"""Reading takes no more memory than the longest record may, measured in separate
processes.
"""

import bz2
import gzip
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

LIMIT = 16 << 20
UNPACKED = 150 << 20
ALLOWED = 4 * LIMIT
"""A record, its copy, and zstd's steps of 16 MiB."""
READ = """
import json, resource, sys
from pathlib import Path
from gristmill.core.processes import peak_resident_bytes
from gristmill.dataprep.readers import compression, readers
from gristmill.dataprep.readers.records import Reading, Rejected
from gristmill.dataprep.readers.sources import find_files
from gristmill.mixtures.schema.sources import Source
import gristmill.dataprep.readers.warc, pyarrow
compression.MAX_RECORD_BYTES = int(sys.argv[2])
(small,) = find_files("s", Source.model_validate({"path": sys.argv[3]})).files
list(readers.read_records(small, Reading()))
before = peak_resident_bytes()
(file,) = find_files("s", Source.model_validate({"path": sys.argv[1]})).files
errors = [item.error for item in readers.read_records(file, Reading()) if isinstance(item, Rejected)]
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"bytes": peak_resident_bytes() - before, "child": child, "errors": errors}))
"""


def zeros() -> Iterator[bytes]:
    for _ in range(UNPACKED >> 20):
        yield bytes(1 << 20)


def bz2_bomb() -> bytes:
    """Repeat one compressed stream; concatenated streams are one file."""
    return bz2.compress(bytes(50 << 20)) * (UNPACKED // (50 << 20))


def xz_bomb() -> bytes:
    packer = lzma.LZMACompressor(preset=0)
    return b"".join([*map(packer.compress, zeros()), packer.flush()])


def gzip_bomb() -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6) as stream:
        for piece in zeros():
            stream.write(piece)
    return buffer.getvalue()


def zstd_bomb() -> bytes:
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join([*map(packer.compress, zeros()), packer.flush()])


BOMBS: dict[str, Callable[[], bytes]] = {
    ".bz2": bz2_bomb,
    ".xz": xz_bomb,
    ".gz": gzip_bomb,
    ".zst": zstd_bomb,
}


def measure(path: Path, tmp_path: Path) -> dict[str, int]:
    (tmp_path / "small.jsonl").write_text('{"text": "warm"}\n')
    command = [
        sys.executable,
        "-c",
        READ,
        str(path),
        str(LIMIT),
        str(tmp_path / "small.jsonl"),
    ]
    measured: dict[str, int] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    assert measured["errors"], "a bomb is rejected"
    return measured


@pytest.mark.parametrize(
    ("form", "extension"),
    [
        ("jsonl", ".gz"),
        *(
            pytest.param(form, extension, marks=pytest.mark.slow)
            for form, extension in (
                *(("jsonl", extension) for extension in BOMBS if extension != ".gz"),
                ("csv", ".bz2"),
                ("txt", ".zst"),
                ("warc", ".bz2"),
            )
        ),
    ],
)
def test_decompression_bomb_stays_within_the_memory_limit(
    tmp_path: Path, form: str, extension: str
) -> None:
    (tmp_path / f"bomb.{form}{extension}").write_bytes(BOMBS[extension]())
    measured = measure(tmp_path / f"bomb.{form}{extension}", tmp_path)
    assert measured["bytes"] < ALLOWED, measured


@pytest.mark.parametrize(
    "name", ["a.zip", pytest.param("a.tar.bz2", marks=pytest.mark.slow)]
)
def test_archive_members_stay_within_the_memory_limit(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    if name == "a.zip":
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("a.txt", "w") as member,
        ):
            for piece in zeros():
                member.write(piece)
    else:
        with tarfile.open(path, "w:bz2") as archive:
            member = tarfile.TarInfo("a.txt")
            member.size = 150 << 20
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    assert measure(path, tmp_path)["bytes"] < ALLOWED


@pytest.mark.slow
def test_huge_parquet_value_stays_in_the_child_process(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["x" * (150 << 20)]}),
        tmp_path / "a.parquet",
        compression="zstd",
    )
    measured = measure(tmp_path / "a.parquet", tmp_path)
    (error,) = measured["errors"]
    assert "16 MiB" in error
    assert measured["bytes"] < ALLOWED
    assert measured["child"] < 2 << 30


INGEST = """
import json, sys
from pathlib import Path
from gristmill.core.stage_context import Context
from gristmill.core.processes import peak_resident_bytes
from gristmill.dataprep.readers import duplicate_records, ingest
duplicate_records.LIMITS["memory_limit"] = "100MB"
folder, number = Path(sys.argv[1]), int(sys.argv[2])
with open(folder / "a.jsonl", "w") as sink:
    for at in range(number):
        text = f"{at % (number - number // 100)} " + "word " * 38  # one in a hundred repeats
        sink.write(f'{{"text": "{text}", "key": "{text[:9]}"}}\\n')
context = Context(folder / "work", "ingest", emit=lambda event: None)
sources = {"s": {"path": str(folder / "a.jsonl"), "id_field": "key"}}
summary = ingest.run({}, {"sources": sources}, folder / "out", context)
print(json.dumps({"bytes": peak_resident_bytes(), **summary.counts["dropped"]}))
"""


@pytest.mark.slow
def test_ingest_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    """Peaks differ by some 80 MB from run to run; a list of all documents would take 60
    bytes each. DuckDB sorts the ids on disk beyond its limit, lowered here.
    """
    peaks = {}
    for number in (1_000_000, 4_000_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-c", INGEST, str(folder), str(number)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        # DuckDB may draw its progress before it
        measured = json.loads(done.stdout.splitlines()[-1])
        assert measured["ingest/repeated"] == number // 100
        peaks[number] = measured["bytes"]
        shutil.rmtree(folder)
    assert peaks[4_000_000] < peaks[1_000_000] + 3_000_000 * 45 < 1 << 30, peaks
