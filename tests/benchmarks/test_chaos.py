"""Fuses fire at exactly the configured change; points are drawn by hash and run
once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.chaos import asking_kills, chaos
from benchmarks.chaos.fuse import Act, Fuse, burn_at
from benchmarks.chaos.kills import KILLS, KILLS_IN_CHAIN, chains
from benchmarks.chaos.project import GIVEN_MANIFEST, write_project
from benchmarks.chaos.undisturbed import Undisturbed, gristmill
from gristmill.flows.stages.plan import present_stages
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.loader import parse_manifest

pytestmark = pytest.mark.chaos
WRITES = """
import os, sys, time
from pathlib import Path
for name in "ab":
    (Path(sys.argv[1]) / name).write_text("1")
open(Path(sys.argv[1]) / "a").close()
open(sys.argv[1] + "-elsewhere", "w").close()
if os.fork() == 0:
    os.rename(Path(sys.argv[1]) / "a", Path(sys.argv[1]) / "c")
    os._exit(0)
os.wait()
(Path(sys.argv[1]) / "d").write_text(str(time.time()))
"""
"""Four changes by two processes; reads, and writes outside of the folder, do not
count.
"""


def burn(tmp_path: Path, **fuse: Any) -> tuple[Fuse, int, list[str]]:
    """Run `WRITES` with a fuse; returns the fuse, the exit code and the remaining
    files.
    """
    root = tmp_path / "store"
    root.mkdir()
    new_fuse = Fuse(str(root), str(tmp_path / "changes"), **fuse)
    code = subprocess.run(
        [sys.executable, "-c", WRITES, str(root)], env=burn_at(new_fuse), check=False
    ).returncode
    return new_fuse, code, sorted(path.name for path in root.iterdir())


def test_changes_of_all_processes_are_counted_in_their_order(tmp_path: Path) -> None:
    fuse, code, files = burn(tmp_path)
    assert code == 0
    assert files == ["b", "c", "d"]
    assert fuse.changes() == [
        "flow open a",
        "flow open b",
        "worker rename c",
        "flow open d",
    ]
    assert not fuse.has_burnt()


@pytest.mark.parametrize(
    ("at", "files"), [(1, []), (2, ["a"]), (3, ["a", "b"]), (4, ["b", "c"])]
)
def test_a_kill_comes_before_its_change(
    tmp_path: Path, at: int, files: list[str]
) -> None:
    fuse, code, remaining = burn(tmp_path, at=at, act="kill it and all above")
    assert (code, remaining) == (-9, files)
    assert fuse.has_burnt()


@pytest.mark.parametrize(
    ("act", "options", "code", "files"),
    [
        ("kill it", {"role": "worker"}, 0, ["a", "b", "d"]),
        ("kill the flow", {"before": "open d"}, -9, ["b", "c"]),
        ("terminate the flow", {"before": "open b"}, -15, ["a"]),
    ],
)
def test_who_is_ended_and_at_whose_change_can_be_said(
    tmp_path: Path, act: Act, options: dict[str, Any], code: int, files: list[str]
) -> None:
    assert burn(tmp_path, at=1, act=act, **options)[1:] == (code, files)


def test_the_clock_jumps_back_at_its_change(tmp_path: Path) -> None:
    burn(tmp_path, at=3, act="set the clock back", back_seconds=1e9)
    written = float((tmp_path / "store" / "d").read_text())
    assert (tmp_path / "store" / "d").stat().st_mtime - written == pytest.approx(
        1e9, abs=60
    )


def test_points_are_drawn_by_hash_and_each_way_to_end_a_run_meets_only_stages_that_it_can_end() -> (
    None
):
    change_counts = {
        "ingest": 60,
        "filter": 80,
        "tokenize": 70,
        "pretrain": 100,
        "dpo": 60,
        "export": 20,
    }
    run = cast(
        Undisturbed,
        SimpleNamespace(
            stages=list(change_counts), changes=lambda role="any": change_counts
        ),
    )
    runs = dict.fromkeys(change_counts, run)
    drawn = list(chains(runs, 600, seed=1))
    assert drawn == list(chains(runs, 600, seed=1)) != list(chains(runs, 600, seed=2))
    assert len(drawn) * KILLS_IN_CHAIN == 600
    stages_by_turn = [
        {chain.stage for chain in drawn[turn * 6 : turn * 6 + 6]} for turn in range(16)
    ]
    assert stages_by_turn == [set(change_counts)] * 16, "every stage is drawn"
    stages_by_role = {
        kill.role: {chain.stage for chain in drawn if chain.kill.role == kill.role}
        for kill in KILLS
    }
    assert stages_by_role == {
        "any": set(change_counts),
        "worker": {"filter", "tokenize"},
        "rank": {"pretrain", "dpo"},
    }


def test_points_that_are_written_down_are_not_done_again_and_each_kill_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[str] = []

    def act(name: str, kills: int, wrong: list[str]) -> dict[str, Any]:
        executed.append(name)
        return {
            "fault": KILLS[0].name,
            "stage": "ingest",
            "kills": [{}] * kills,
            "wrong": wrong,
        }

    points = {
        "one": lambda: act("one", 3, []),
        "two": lambda: act("two", 1, ["a file differs"]),
        "disk": lambda: {
            "fault": "the store is read-only",
            "stage": "mix",
            "wrong": [],
            "not_tried": "no mount",
        },
    }
    monkeypatch.setattr(chaos, "all_points", lambda *arguments: points)
    monkeypatch.setattr(chaos, "undisturbed_runs", lambda folder: {})
    for _ in range(2):
        all_kills, flow, disk = chaos.rows(4, 0, tmp_path)
    assert sorted(executed) == ["one", "two"]
    assert (all_kills.name, all_kills.ours, all_kills.ratio) == (
        "identical_after_kill",
        0.75,
        0.75,
    )
    assert (
        flow.happened
        == f"4 points in 1 of {len(chaos.STAGES)} stages, 1 otherwise: ingest: a "
        "file differs"
    )
    assert (disk.ours, disk.happened) == (None, "not tried: no mount")


def test_the_tiny_manifests_have_every_stage_between_them(tmp_path: Path) -> None:
    whole = Undisturbed(
        write_project(tmp_path / "project"), tmp_path / "clean", tmp_path / "changes"
    )
    given_stages = present_stages(
        parse_manifest(GIVEN_MANIFEST, str(tmp_path / "given.yaml"))
    )
    asking_stages = present_stages(
        parse_manifest(asking_kills.MANIFEST, str(tmp_path / "asking.yaml"))
    )
    assert {*asking_stages} >= {*asking_kills.STAGES} == {*asking_kills.ASKED}
    assert {
        name.partition("-")[0]
        for name in (*whole.stages, *given_stages, *asking_stages)
    } == set(STAGES)


def test_a_run_that_is_forked_is_as_one_that_is_started(tmp_path: Path) -> None:
    """Exit codes and outputs agree; `test_survives` compares the files."""
    for arguments, code in ((["schema"], 0), (["run", str(tmp_path / "none.yaml")], 2)):
        forked, started = gristmill(arguments), gristmill(arguments, warmed=False)
        assert (forked.returncode, forked.stdout) == (
            started.returncode,
            started.stdout,
        )
        assert forked.returncode == code
