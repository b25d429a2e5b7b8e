"""Whatever happens to a run, the same command ends with the same bytes: one point of
each kind of `bench chaos`.

The long form, `gristmill bench chaos`, runs hundreds of random points over all stages.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import surroundings
from benchmarks.chaos.fuse import Act, Fuse, burn_at
from benchmarks.chaos.kills import still_running
from benchmarks.chaos.surroundings import CannotMountError, Scene
from benchmarks.chaos.undisturbed import Undisturbed, gristmill

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed.make(tmp_path_factory.mktemp("chaos"), until="ingest")


@pytest.fixture
def scene(undisturbed: Undisturbed, tmp_path: Path) -> Scene:
    return Scene(undisturbed, tmp_path / "store", "ingest", seed=0, number=1)


def attempt(scene: Scene, change: str, act: Act) -> tuple[Fuse, int]:
    """Run with a fuse that fires before the first change with a prefix; returns the
    fuse and the exit code.
    """
    fuse = replace(scene.fuse(1, act), before=change)
    process = gristmill(scene.run.arguments(scene.store, scene.stage), burn_at(fuse))
    assert fuse.has_burnt(), fuse.changes()
    assert "Traceback" not in process.stdout
    return fuse, process.returncode


def test_run_killed_in_shards_or_around_commits_resumes_to_the_same_bytes(
    scene: Scene,
) -> None:
    folder = scene.run.folder_in(scene.store, "ingest")
    killed = attempt(
        scene, "rename data/part-00001-000.parquet", "kill it and all above"
    )
    assert not (folder.data / "part-00001-000.parquet").exists()
    terminated = attempt(
        scene, "rename data/part-00001-000.parquet", "terminate the flow"
    )
    killed_before_marker = attempt(scene, "open _SUCCESS.tmp-", "kill the flow")
    assert (folder.path / "manifest.json").exists()
    assert folder.state() == "unfinished"
    killed_after_marker = attempt(scene, "remove _SUCCESS.tmp-", "kill the flow")
    assert folder.state() == "committed"
    assert (folder.work / "result.json").exists()
    attempts = [killed, terminated, killed_before_marker, killed_after_marker]
    assert [code for _, code in attempts] == [-9, 130, -9, -9]
    assert scene.goes_on() == []
    assert still_running([fuse.log for fuse, _ in attempts]) == []


def test_deleted_and_truncated_files_are_detected_and_rebuilt(scene: Scene) -> None:
    folder = scene.run.folder_in(scene.store, "ingest")
    shutil.copytree(scene.run.session.folder("ingest").path, folder.path)
    (folder.data / "part-00001-000.parquet").unlink()
    cut = folder.data / "part-00002-000.parquet"
    cut.write_bytes(cut.read_bytes()[:-1])
    assert folder.state() == "corrupt"
    assert scene.goes_on() == []


def test_full_disk_is_reported_and_the_stage_resumes_with_space(scene: Scene) -> None:
    try:
        for number, share in enumerate((0.1, 0.5, 0.9)):
            turn = replace(
                scene, store=scene.store.with_name(f"store-{number}"), number=number
            )
            assert surroundings.fill_the_disk(turn, share) == []
    except CannotMountError as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def test_read_only_store_is_reported_and_unchanged(scene: Scene) -> None:
    try:
        assert surroundings.forbid_writing(scene) == []
    except CannotMountError as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def test_disk_is_replaced_only_after_killed_processes_release_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    try:
        with surroundings.mounted(tmp_path / "disk", 1 << 20) as remount:
            open_file = (tmp_path / "disk" / "held").open("w")
            monkeypatch.setattr(
                surroundings.time,
                "sleep",
                lambda seconds: (waits.append(seconds), open_file.close()),
            )
            remount("ro")
            assert len(waits) == 1
            with pytest.raises(OSError, match="Read-only"):
                (tmp_path / "disk" / "other").touch()
            with pytest.raises(RuntimeError, match="mount -o remount,nonsense"):
                remount("nonsense")
    except CannotMountError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    assert not os.path.ismount(tmp_path / "disk")


def test_concurrent_runs_execute_a_stage_once(scene: Scene) -> None:
    assert surroundings.run_two_at_once(scene, kill_one=False) == []


def test_clock_set_back_has_no_effect(scene: Scene) -> None:
    assert surroundings.set_the_clock_back(scene) == []


def test_store_comparison_detects_lost_duplicate_changed_and_leftover_files(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = undisturbed.folder_in(tmp_path, "ingest")
    shutil.copytree(undisturbed.session.folder("ingest").path, folder.path)
    assert undisturbed.differences(tmp_path, ["ingest"]) == []
    shard = folder.data / "part-00000-000.parquet"
    table = pq.read_table(shard)
    pq.write_table(pa.concat_tables([table.slice(1), table.slice(1, 1)]), shard)
    manifest = folder.manifest()
    for name in ("manifest.json", "_SUCCESS"):
        (folder.path / name).unlink()
    folder.commit({}, {**manifest["summary"], "documents": -1})
    (folder.work / "spill").write_text("")
    assert undisturbed.differences(tmp_path, ["ingest"]) == [
        "ingest: data/part-00000-000.parquet differs",
        "ingest: its summary has another documents",
        "ingest: 1 documents are lost",
        "ingest: 1 documents are double",
        "ingest: work/spill was left behind",
    ]
