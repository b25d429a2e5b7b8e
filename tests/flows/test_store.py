"""The store decides everything: a commit is complete or absent, and damage is found."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from gristmill.core.files import (
    TEMPORARY_MARK,
    atomic_write,
    create_exclusively,
    read_json_lines,
    write_json_lines,
)
from gristmill.core.store import CorruptError, StageFolder, Store


def committed(folder: StageFolder) -> StageFolder:
    folder.begin({"stage": "toy"})
    (folder.data / "sub").mkdir()
    (folder.data / "a.bin").write_bytes(b"aaaa")
    (folder.data / "sub" / "b.bin").write_bytes(b"bb")
    (folder.work / "spill").write_bytes(b"x")
    folder.commit({"stage": "toy", "started": 1.0, "seconds": 1.0}, {"n": 3})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> StageFolder:
    return Store.at(tmp_path).folder("toy", "demo", "f" * 64)


def test_a_folder_is_missing_then_unfinished_then_committed(
    folder: StageFolder,
) -> None:
    assert folder.state() == "missing"
    folder.begin({"stage": "toy"})
    assert folder.state() == "unfinished"
    folder.commit({"stage": "toy"}, {})
    assert folder.state() == "committed"


def test_the_manifest_lists_every_file_with_size_and_checksum(
    folder: StageFolder,
) -> None:
    manifest = committed(folder).manifest()
    assert manifest["summary"] == {"n": 3}
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {
        "a.bin": 4,
        "sub/b.bin": 2,
    }
    # SHA-256 of b"aaaa".
    assert (
        manifest["files"]["a.bin"]["sha256"]
        == "61be55a8e2f6b4e172338bddf184d6dbee29c98853e0a0485ecee7f27b9af0b4"
    )


def test_temporary_files_are_removed_by_the_commit(
    folder: StageFolder,
) -> None:
    assert list(committed(folder).work.iterdir()) == []


def test_a_truncated_or_deleted_file_makes_the_commit_corrupt(
    folder: StageFolder,
) -> None:
    committed(folder)
    (folder.data / "a.bin").write_bytes(b"aaa")
    assert folder.state() == "corrupt"
    assert list(folder.damage()) == [
        f"{folder.data / 'a.bin'} has 3 bytes, committed were 4"
    ]
    (folder.data / "a.bin").unlink()
    assert list(folder.damage()) == [f"{folder.data / 'a.bin'} is gone"]


def test_deep_verification_detects_a_flipped_byte(folder: StageFolder) -> None:
    committed(folder)
    (folder.data / "a.bin").write_bytes(b"aaab")
    assert folder.state() == "committed"
    assert len(list(folder.damage(deep=True))) == 1


def test_edited_output_manifest_is_rejected(folder: StageFolder) -> None:
    committed(folder)
    (folder.path / "manifest.json").write_text('{"files": {}}')
    assert folder.state() == "corrupt"
    with pytest.raises(CorruptError):
        folder.manifest()


def test_restart_moves_a_damaged_commit_aside_and_removes_partial_files(
    folder: StageFolder,
) -> None:
    committed(folder)
    (folder.data / "a.bin").unlink()
    (folder.data / f"c.bin{TEMPORARY_MARK}1-2").write_bytes(b"half")
    folder.begin({"stage": "toy"})
    assert folder.state() == "unfinished"
    assert sorted(path.name for path in folder.data.iterdir()) == ["sub"]
    assert (
        folder.path / "_CORRUPT.0"
    ).read_text() == f"{folder.data / 'a.bin'} is gone\n"


def test_partial_files_of_other_hosts_stay_until_the_commit_and_are_excluded(
    folder: StageFolder,
) -> None:
    folder.begin({"stage": "toy"})
    for name in ("a.bin", f"b.bin{TEMPORARY_MARK}1-2"):
        (folder.data / name).write_bytes(b"half")
    folder.begin({"stage": "toy"}, shared=True)
    assert len([*folder.data.iterdir()]) == 2
    folder.commit({}, {})
    assert list(folder.manifest()["files"]) == ["a.bin"]
    assert [path.name for path in folder.data.iterdir()] == ["a.bin"]


def test_commit_is_unaffected_by_hosts_still_writing_to_the_work_folder(
    folder: StageFolder,
) -> None:
    """A host keeps sending heartbeats by a file that it creates, renames and removes,
    and by a folder that it creates.
    """
    folder.begin({"stage": "toy"})
    writing, ended = threading.Event(), threading.Event()

    def write() -> None:
        while not ended.is_set():
            beat = folder.work / "offers" / "hosts" / "b.beat"
            with suppress(OSError), atomic_write(beat, durable=False) as sink:
                sink.write(b"1")
            beat.unlink(missing_ok=True)
            writing.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        assert writing.wait(60)
        for _ in range(50):
            (folder.work / "result.json").write_text("{}")
            folder.clean_work()
            assert not (folder.work / "result.json").exists()
    finally:
        ended.set()
        writer.join()


def test_folders_are_identified_by_fingerprint_not_name(tmp_path: Path) -> None:
    store = Store.at(tmp_path)
    committed(store.folder("toy", "demo", "f" * 64))
    assert store.folder("toy", "another-name", "f" * 64).state() == "committed"
    assert store.folder("toy", "demo", "e" * 64).state() == "missing"


def test_interrupted_write_leaves_no_file(
    tmp_path: Path,
) -> None:
    target = tmp_path / "x.bin"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_write(target) as sink:
            sink.write(b"new but incomplete")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_exclusive_creation_succeeds_once(tmp_path: Path) -> None:
    assert create_exclusively(tmp_path / "m", b"first")
    assert not create_exclusively(tmp_path / "m", b"second")
    assert (tmp_path / "m").read_bytes() == b"first"


def test_the_store_works_on_an_fsspec_url() -> None:
    folder = Store.at("memory://store-test").folder("toy", "demo", "a" * 64)
    folder.begin({"stage": "toy"})
    with atomic_write(folder.data / "a.bin") as sink:
        sink.write(b"aaaa")
    folder.commit({"stage": "toy", "started": 1.0, "seconds": 1.0}, {"n": 3})
    assert folder.state() == "committed"
    assert folder.manifest()["files"]["a.bin"]["bytes"] == 4


def test_listed_work_files_survive_the_commit(tmp_path: Path) -> None:
    folder = StageFolder(tmp_path / "pretrain" / "x--0")
    folder.begin({})
    for name in (
        "checkpoints/step-1/a",
        "checkpoints/step-2/a",
        "tensorboard/events",
        "other/b",
        "c",
    ):
        (folder.work / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.work / name).write_text("")
    (folder.work / "kept.json").write_text('["checkpoints/step-2"]')
    folder.commit({}, {})
    remaining = sorted(
        path.relative_to(folder.work).as_posix()
        for path in folder.work.rglob("*")
        if path.is_file()
    )
    assert remaining == ["checkpoints/step-2/a", "tensorboard/events"]


def test_json_lines_keep_line_separators_of_unicode_inside_records(
    tmp_path: Path,
) -> None:
    records = [{"reason": f"a{chr(code)}b"} for code in (0x0B, 0x0C, 0x85, 0x2028)]
    write_json_lines(tmp_path / "lines", records)
    assert read_json_lines(tmp_path / "lines") == records
