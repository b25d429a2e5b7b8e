"""Archives as folders of files: members, locators, damage."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from identify.vendor.licenses import LICENSES

from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import (
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    Skipped,
)
from gristmill.dataprep.readers.sources import SourceError
from tests.dataprep.archive_files import make_tar, make_zip
from tests.dataprep.source_files import files_of, find, read, texts

MEMBERS = {
    "b.txt": b"plain",
    "in/a.jsonl.gz": gzip.compress(b'{"text": "x"}\n{bad\n{"text": "y"}\n'),
    "p.html": b"<p>",
}


PACK = {
    "a.tar": make_tar,
    "a.tar.gz": lambda members: gzip.compress(make_tar(members)),
    "a.tgz": lambda members: gzip.compress(make_tar(members)),
    "a.tar.zst": lambda members: zstandard.ZstdCompressor().compress(make_tar(members)),
    "a.zip": make_zip,
}


def errors(records: list[Read]) -> list[tuple[str, int, str]]:
    return [
        (item.part, item.number, item.error)
        for item in records
        if isinstance(item, Rejected)
    ]


@pytest.mark.parametrize("name", PACK)
def test_members_are_read_like_files_with_the_archive_in_their_locator(
    tmp_path: Path, name: str
) -> None:
    records = read(tmp_path / name, PACK[name](MEMBERS))
    assert [item for item in records if not isinstance(item, Rejected)] == [
        Record(1, f"{name}/b.txt", "plain", "{}"),
        Record(1, f"{name}/in/a.jsonl.gz#1", "x", "{}"),
        Record(3, f"{name}/in/a.jsonl.gz#3", "y", "{}"),
        Page(1, f"{name}/p.html", b"<p>", part="p.html"),
    ]
    ((part, number, error),) = errors(records)
    assert (part, number) == ("in/a.jsonl.gz", 2)
    assert error.startswith("not valid JSON")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip"])
def test_text_members_have_the_licence_of_the_nearest_folder(
    tmp_path: Path, name: str
) -> None:
    licences = {spdx: text.encode() for spdx, text in LICENSES}
    members = {
        "x/a.txt": b"plain",
        "x/a.jsonl": b'{"text": "x"}',
        "x/y/LICENSE": licences["ISC"],
        "x/y/b.txt": b"plain",
        "x/LICENSE": licences["MIT"],
        "c.txt": b"plain",
    }
    assert {
        item.locator: json.loads(item.metadata).get("licence")
        for item in read(tmp_path / name, PACK[name](members))
        if isinstance(item, Record)
    } == {
        f"{name}/x/a.txt": "MIT",
        f"{name}/x/a.jsonl#1": None,
        f"{name}/x/y/b.txt": "ISC",
        f"{name}/c.txt": None,
    }


def test_folders_links_hidden_and_unknown_members_are_skipped(tmp_path: Path) -> None:
    records = read(
        tmp_path / "a.zip",
        make_zip(
            {
                "dir/": b"",
                ".git/x.txt": b"h",
                "__MACOSX/x.txt": b"m",
                "i.png": b"i",
                "t.parquet": b"x",
                "a.txt": b"a",
            }
        ),
    )
    assert [item.reason for item in records if isinstance(item, Skipped)] == [
        "folder or link in an archive",
        "hidden member of an archive",
        "hidden member of an archive",
        "member of an archive with extension .png",
        "member of an archive with extension .parquet",
    ]
    assert texts(records) == ["a"]


def test_format_selects_members(tmp_path: Path) -> None:
    members = {"a.txt": b"a", "b.png": b"b", "c": b"c", "d.html": b"d"}
    expected = {"text": ["a", "b", "c", "d"], "jsonl": [], "auto": ["a"]}
    for format, expected_texts in expected.items():
        records = read(tmp_path / "a.tar", make_tar(members), format=format)
        assert texts(records) == expected_texts
    records = read(tmp_path / "a.tar", make_tar(members), format="html")
    assert [item.locator for item in records if isinstance(item, Page)] == [
        "a.tar/c",
        "a.tar/d.html",
    ]


def test_repeated_member_names_get_distinct_locators(tmp_path: Path) -> None:
    records = read(tmp_path / "a.tar", make_tar({"a.txt": b"same"}, ["a.txt", "a.txt"]))
    assert [item.locator for item in records if isinstance(item, Record)] == [
        "a.tar/a.txt",
        "a.tar;2/a.txt",
    ]


@pytest.mark.parametrize(
    ("keep", "expected_texts"),
    [
        (514, []),
        (1024, ["one"]),
        (1324, ["one"]),
        (2048, ["one", "two"]),
        (2058, ["one", "two"]),
    ],
)
def test_truncated_tar_yields_the_members_before_the_damage(
    tmp_path: Path, keep: int, expected_texts: list[str]
) -> None:
    records = read(
        tmp_path / "a.tar", make_tar({"a.txt": b"one", "b.txt": b"two"})[:keep]
    )
    assert texts(records) == expected_texts
    assert len(errors(records)) == 1


def test_gzip_stream_truncated_after_the_last_member_is_reported(
    tmp_path: Path,
) -> None:
    packed = gzip.compress(make_tar({"a.txt": b"one"}))[:-4]
    (document, damage) = read(tmp_path / "b.tar.gz", packed)
    assert isinstance(document, Record)
    assert isinstance(damage, Rejected)
    assert ".gz" in damage.error
    assert "cut off" in damage.error


@pytest.mark.parametrize("content", [b"", b"this is no archive", bytes(100)])
def test_invalid_archive_is_one_quarantined_record(
    tmp_path: Path, content: bytes
) -> None:
    for name in ("a.tar", "a.zip"):
        ((part, number, error),) = errors(read(tmp_path / name, content))
        assert (part, number) == ("", 1)
        assert "archive is damaged" in error


def test_damaged_or_encrypted_zip_member_costs_only_itself(tmp_path: Path) -> None:
    content = bytearray(
        make_zip({"a.txt": b"first " * 50, "b.txt": b"second", "c.txt": b"third"})
    )
    content[40] ^= 0xFF
    central = content.index(b"PK\x01\x02")
    second_header = content.index(b"PK\x01\x02", central + 4)
    content[second_header + 8] |= 1  # the directory says that b.txt is encrypted
    local = content.index(b"PK\x03\x04", 4)
    content[local + 6] |= 1
    records = read(tmp_path / "a.zip", bytes(content))
    assert texts(records) == ["third"]
    (damaged, encrypted) = errors(records)
    assert damaged[:2] == ("a.txt", 1)
    assert "damaged" in damaged[2]
    assert encrypted[:2] == ("b.txt", 1)
    assert "encrypted" in encrypted[2]


@pytest.mark.parametrize("member", ["b.csv", "b.tsv.gz", "b.jsonl", "b.warc"])
def test_unreadable_zip_member_of_any_format_costs_only_itself(
    tmp_path: Path, member: str
) -> None:
    content = bytearray(make_zip({"a.txt": b"first", member: b"x", "c.txt": b"third"}))
    second_header = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 4)
    content[second_header + 8] |= 1  # encrypted
    content[content.index(b"PK\x03\x04", 4) + 6] |= 1
    records = read(tmp_path / "a.zip", bytes(content))
    assert texts(records) == ["first", "third"]
    ((name, number, error),) = errors(records)
    assert (name, number) == (member, 1)
    assert "encrypted" in error


def test_damaged_lzma_member_of_a_zip_costs_only_itself(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.txt", bytes(range(32, 127)) * 9)
        archive.writestr("b.txt", b"last")
    content = bytearray(buffer.getvalue())
    begin = 30 + len("a.txt") + 9  # the local header, the name, and LZMA's properties
    content[begin : begin + 40] = b"\xff" * 40
    records = read(tmp_path / "a.zip", bytes(content))
    assert texts(records) == ["last"]
    ((name, number, error),) = errors(records)
    assert (name, number) == ("a.txt", 1)
    assert "damaged" in error


def test_damaged_zip_member_of_rows_costs_only_itself(tmp_path: Path) -> None:
    content = bytearray(make_zip({"a.csv": b"text\none\ntwo\n", "b.txt": b"last"}))
    central = content.index(b"PK\x01\x02")
    content[central + 16] ^= 0xFF  # checksum of a.csv
    records = read(tmp_path / "a.zip", bytes(content))
    assert texts(records) == ["last"]
    (damaged,) = (item for item in records if isinstance(item, Rejected))
    assert damaged.part == "a.csv"
    assert damaged.lost is None
    assert "CRC" in damaged.error


def test_archives_are_read_from_any_store_and_url_chains_are_rejected() -> None:
    from upath import UPath

    root = UPath("memory://archive-test")
    root.mkdir(parents=True, exist_ok=True)
    (root / "a.zip").write_bytes(make_zip({"a.txt": b"far"}))
    (file,) = files_of("memory://archive-test/a.zip")
    assert list(read_records(file, Reading())) == [
        Record(1, "a.zip/a.txt", "far", "{}")
    ]
    with pytest.raises(SourceError, match=r"zip://.*chain of URLs"):
        find("zip://*.txt::memory://archive-test/a.zip")


def test_parquet_members_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(make_zip({}))
    with pytest.raises(SourceError, match=r"a\.zip: parquet .*unpack"):
        find(tmp_path / "a.zip", format="parquet")


def test_damaged_tar_header_costs_only_its_member(tmp_path: Path) -> None:
    content = bytearray(make_tar({"a.txt": b"one", "b.txt": b"two", "c.txt": b"three"}))
    content[1024 + 150] ^= 0xFF  # in the checksum of the second member
    records = read(tmp_path / "a.tar", bytes(content))
    assert texts(records) == [
        "one",
        "three",
    ]
    assert [(part, number) for part, number, _ in errors(records)] == [("", 2)]


def test_damaged_headers_of_all_members_of_a_tar_are_reported(tmp_path: Path) -> None:
    content = make_tar({"a.txt": b"one", "b.txt": b"two"})
    records = read(tmp_path / "a.tar", bytes(13) + content[:-13])
    assert [(item.number, item.lost) for item in records] == [(1, None)]


@pytest.mark.slow
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_damage_never_loses_a_member_silently(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    members = {f"{number}.txt": b"text %d " % number * 40 for number in range(3)}
    name, pack = data.draw(st.sampled_from([("d.tar", make_tar), ("d.zip", make_zip)]))
    content = bytearray(pack(members))
    limit = 3 * 1024 if name == "d.tar" else len(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, limit - 1))
        content[at : at + data.draw(st.integers(0, 30))] = data.draw(
            st.binary(max_size=30)
        )
    records = read(tmp_path_factory.getbasetemp() / name, bytes(content))
    reports = [item for item in records if isinstance(item, Rejected | Skipped)]
    assert reports or len(records) == 3 or name == "d.zip"


def test_empty_members_are_counted_as_skipped(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(300):
            archive.addfile(tarfile.TarInfo(f"{number}.txt"))
        member = tarfile.TarInfo("last.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    (file,) = files_of(tmp_path)
    records = list(read_records(file, Reading()))
    skipped = [record for record in records if isinstance(record, Skipped)]
    assert skipped == [Skipped("empty member of an archive")] * 300
    assert texts(records) == ["text"]
    assert len(records) == 301
