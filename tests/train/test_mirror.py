"""Local copies of a training folder in a store: fetched checkpoints, removed ones, and
disk space.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.core.files import as_path, read_json, write_json
from gristmill.train import store_sync
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    MARKER,
    checksums,
    damaged_files,
    is_complete,
)
from gristmill.train.store_sync import Mirror, sizes_below, work_here

STEPS = (2, 4, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A training folder in a store, with three complete checkpoints and a torn one."""
    remote = as_path("memory://mirrored/pretrain/one")
    for step in (*STEPS, 8):
        local = tmp_path / f"step-{step}"
        local.mkdir()
        (local / "__0_0.distcp").write_bytes(bytes([step]) * 100)
        if step in STEPS:
            write_json(
                local / MARKER, {"step": step, "files": checksums(local), "state": {}}
            )
        for path in local.iterdir():
            (
                remote / "work" / CHECKPOINTS / f"step-{step:08d}" / path.name
            ).write_bytes(path.read_bytes())
    (remote / "work" / "metrics.jsonl").write_bytes(b"{}\n")
    yield remote
    remote.fs.rm(remote.path, recursive=True)  # type: ignore[attr-defined]


def describe(folder: Path, cache: Path, **engine: Any) -> None:
    write_json(
        folder / "stage.json",
        {
            "config": engine.pop("config", {}),
            "inputs": [],
            "engine": {
                "keep_checkpoints": 2,
                "stream": {"cache_folder": str(cache)},
                **engine,
            },
        },
    )


def steps_below(work: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (work / CHECKPOINTS).iterdir()
    )


def follow(here: Path, folder: Path) -> list[int]:
    """Send `work/` to the store, and return the steps in the store afterwards."""
    following = Mirror(here, folder, store_sync.Stream(), [].append)
    shutil.rmtree(here / "work" / CHECKPOINTS / "step-00000008")
    following.send("work")
    return sorted(
        {
            int(name.split("/")[1].removeprefix("step-"))
            for name in sizes_below(folder / "work")
            if name.startswith(CHECKPOINTS)
        }
    )


@pytest.mark.parametrize(
    ("engine", "fetched", "stay"),
    [
        ({}, [6, 8], [6]),
        ({"keep_checkpoints": 3}, [4, 6, 8], [4, 6]),
        ({"permanent_every": 4}, [6, 8], [4, 6]),
    ],
)
def test_needed_checkpoints_are_fetched_and_outdated_ones_removed(
    folder: Path,
    tmp_path: Path,
    engine: dict[str, Any],
    fetched: list[int],
    stay: list[int],
) -> None:
    describe(folder, tmp_path / "cache", **engine)
    here = work_here(folder)
    assert steps_below(here / "work") == fetched, (
        "only the torn one and the needed ones are fetched"
    )
    assert (here / "work" / "metrics.jsonl").read_bytes() == b"{}\n"
    assert follow(here, folder) == stay


def test_damaged_checkpoint_makes_an_older_one_be_fetched(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "work" / CHECKPOINTS / "step-00000006" / "__0_0.distcp").write_bytes(
        b"x" * 100
    )
    describe(folder, tmp_path / "cache")
    assert steps_below(work_here(folder) / "work") == [4, 6, 8]


def test_files_of_another_host_are_kept_with_the_checkpoint_and_fetched_when_missing(
    folder: Path, tmp_path: Path
) -> None:
    describe(folder, tmp_path / "cache", nodes=2, ranks=2)
    here = {name: tmp_path / name for name in ("leads", "joins")}
    for name, host in here.items():
        shutil.copytree(work_here(folder, leads=name == "leads"), host)
    assert steps_below(here["leads"] / "work") == [6, 8]
    assert not (here["joins"] / "work" / CHECKPOINTS).exists(), (
        "the leader decides which one to resume from"
    )
    leads, joins = (
        Mirror(host, folder, store_sync.Stream(), [].append) for host in here.values()
    )
    step = Path("work", CHECKPOINTS, "step-00000010")
    for name, content in (("leads", b"a"), ("joins", b"b")):
        (here[name] / step).mkdir(parents=True)
        (here[name] / step / f"__{name}.distcp").write_bytes(content)
    joins.add(here["joins"] / step)
    files = {**checksums(here["leads"] / step), **checksums(here["joins"] / step)}
    write_json(
        here["leads"] / step / MARKER, {"files": files, "elsewhere": ["__joins.distcp"]}
    )
    leads.saved(here["leads"] / step, ["__joins.distcp"])
    assert is_complete(here["leads"] / step)
    assert damaged_files(here["leads"] / step) == ["__joins.distcp"], (
        "files of the other host are missing"
    )
    for name, mirror in (("leads", leads), ("joins", joins)):
        shutil.rmtree(here["joins"] / step, ignore_errors=True)
        mirror.fetch(here[name] / step)
        assert damaged_files(here[name] / step) == []
    leads.send("work")
    assert {path.name for path in (folder / step).iterdir()} == {
        "__leads.distcp",
        "__joins.distcp",
        MARKER,
    }
    shutil.rmtree(here["leads"] / step)
    leads.send("work")
    assert sizes_below(folder / step) == {}


def test_lack_of_disk_space_is_rejected_with_the_bytes_needed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(folder, tmp_path / "cache")
    monkeypatch.setattr(
        store_sync.shutil, "disk_usage", lambda disk: SimpleNamespace(free=250)
    )
    monkeypatch.setattr(
        store_sync,
        "sizes_below",
        lambda location: {
            f"{CHECKPOINTS}/step-00000006/__0_0.distcp": 3_000_000_000,
            "metrics.jsonl": 1_000_000_000,
        },
    )
    with pytest.raises(
        OSError,
        match=r"9\.000 GB \(3\.000 .* 6\.000 .* 0\.000 .*engine\.stream\.cache_folder",
    ):
        work_here(folder)


def test_local_copy_lists_outdated_files_of_the_store(
    folder: Path, tmp_path: Path
) -> None:
    describe(folder, tmp_path / "cache")
    here = work_here(folder)
    stage_file = read_json(here / "stage.json")
    assert stage_file["fetched"] == {}
    assert sorted(stage_file["outdated"]) == [
        f"work/{CHECKPOINTS}/step-0000000{step}/{name}"
        for step in (2, 4)
        for name in ("__0_0.distcp", MARKER)
    ]
