"""Early cutoff: a rebuilt output with an earlier output's bytes takes its identity, so
that later stages are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.core.store import StageFolder, Store
from gristmill.flows.questions.what_changed import explain_plan
from gristmill.flows.report.report import provenance
from gristmill.flows.running.events import StageFinished
from gristmill.flows.running.output_identities import (
    NothingToKeepError,
    alias_of,
    content_digest,
    find_alias,
    keep_output,
    settle_from_store,
)
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.running.run_records import collect
from gristmill.flows.stages.plan import Node, settle_plan
from gristmill.flows.stages.stage import Stage

Make = Callable[..., Runner]
N = 3


@pytest.fixture
def upgraded(toy_runner: Make) -> Callable[..., Runner]:
    """Return a factory for runners of `first` and `second` with other stage versions,
    opened as a command opens a plan.
    """

    def make(**versions: int) -> Runner:
        runner = toy_runner(first={"n": N}, second={})
        session = runner.session
        for name, version in versions.items():
            node = session.plan[name]
            session.plan[name] = replace(
                node, stage=replace(node.stage, version=version)
            )
        session.plan.update(settle_plan(session.plan, lambda node: node))
        session.settle()
        return runner

    return make


def run(runner: Runner) -> list[str]:
    return [runner.run_stage(stage).how for stage in list(runner.session.plan)]


@pytest.mark.slow
def test_later_stages_are_reused_if_a_rebuilt_output_is_equal(
    upgraded: Make,
) -> None:
    original = upgraded()
    assert run(original) == ["Completed", "Completed"]
    rebuilt = upgraded(first=2)
    assert run(rebuilt) == ["Completed", "Cached"]
    assert (
        rebuilt.session.plan["first"].fingerprint
        != original.session.plan["first"].fingerprint
    )
    assert (
        rebuilt.session.plan["first"].identity
        == original.session.plan["first"].fingerprint
    )
    assert (
        rebuilt.session.plan["second"].fingerprint
        == original.session.plan["second"].fingerprint
    )
    assert run(upgraded(first=2)) == ["Cached", "Cached"]
    third = upgraded(first=3)
    assert run(third) == ["Completed", "Cached"]
    assert (
        third.session.plan["first"].identity
        == original.session.plan["first"].fingerprint
    ), "an alias of an alias names the first"


@pytest.mark.slow
def test_later_stages_run_again_if_a_rebuilt_output_differs(
    upgraded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = upgraded()
    run(original)
    monkeypatch.setenv("TOY_END", "\n")
    rebuilt = upgraded(first=2)
    assert run(rebuilt) == ["Completed", "Completed"]
    assert rebuilt.session.plan["first"].alias == ""
    assert (
        rebuilt.session.plan["second"].fingerprint
        != original.session.plan["second"].fingerprint
    )


@pytest.mark.slow
def test_an_interrupted_run_keeps_the_identity_that_was_committed(
    upgraded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(upgraded())
    publish = StageFolder.publish

    def killed(folder: StageFolder, content: bytes) -> bool:
        raise KeyboardInterrupt

    # The commit is decided but its manifest is not yet written: the next run publishes
    # it.
    monkeypatch.setattr(StageFolder, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        upgraded(first=2).run_stage("first")
    monkeypatch.setattr(StageFolder, "publish", publish)
    for lease in upgraded(first=2).folder("first").path.glob("lease/*.done"):
        lease.unlink()
    monkeypatch.setattr("gristmill.core.lease.is_alive", lambda owner: False)
    resumed = upgraded(first=2)
    assert run(resumed) == ["Cached", "Cached"]
    assert resumed.session.plan["first"].alias


@pytest.mark.slow
def test_waiting_host_adopts_the_committed_identity(upgraded: Make) -> None:
    run(upgraded())
    first_host, second_host = upgraded(first=2), upgraded(first=2)
    first_host.run_stage("first")
    assert (
        second_host.session.plan["second"].fingerprint
        != first_host.session.plan["second"].fingerprint
    )
    assert run(second_host) == ["Cached", "Cached"]
    assert (
        second_host.session.plan["second"].fingerprint
        == first_host.session.plan["second"].fingerprint
    )


@pytest.mark.slow
def test_gc_keeps_the_output_that_an_alias_points_to(upgraded: Make) -> None:
    old = upgraded()
    run(old)
    old.session.start_record().save()
    new = upgraded(first=2)
    record = new.session.start_record()
    for stage in list(new.session.plan):
        record.note(StageFinished(new.session.plan[stage], new.run_stage(stage)))
    assert (
        record.content["stages"]["first"]["identity"]
        == old.session.plan["first"].fingerprint
    )
    assert (
        record.content["stages"]["second"]["fingerprint"]
        == old.session.plan["second"].fingerprint
    )
    assert collect(new.session.store, keep_runs=1, delete=True) == []
    assert old.folder("first").state() == "committed"
    run(upgraded_again := upgraded(first=4, second=2))
    upgraded_again.session.start_record().save()
    (removed,) = [
        path
        for path, _ in collect(new.session.store, keep_runs=1, delete=False)
        if path.parent.name == "first"
    ]
    assert removed == new.folder("first").path, (
        "gc removes an alias that no run names, but keeps the output of another alias"
    )


@pytest.mark.slow
def test_record_of_an_unfinished_run_names_outputs_after_a_cutoff(
    upgraded: Make,
) -> None:
    old = upgraded()
    run(old)
    new = upgraded(first=2)
    record = new.session.start_record()
    record.note(StageFinished(new.session.plan["first"], new.run_stage("first")))
    assert record.content["stages"]["second"] == {
        "fingerprint": old.session.plan["second"].fingerprint
    }


@pytest.mark.slow
def test_forced_rerun_with_different_bytes_gets_a_new_identity(
    upgraded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = upgraded()
    run(old)
    new = upgraded(first=2)
    run(new)
    monkeypatch.setenv("TOY_END", "\n")
    old.run_stage("first", force=True)
    assert old.session.plan["first"].identity not in {
        old.session.plan["first"].fingerprint,
        new.session.plan["first"].fingerprint,
    }
    assert old.run_stage("second").how == "Completed"
    assert run(upgraded(first=2)) == ["Cached", "Cached"]


@pytest.mark.slow
def test_plan_names_the_stage_after_which_a_run_may_be_cut_off(upgraded: Make) -> None:
    run(upgraded())
    rows = {row.stage: row for row in explain_plan(upgraded(first=2).session)}
    assert rows["first"].cut_off_after is None
    assert rows["second"].cut_off_after == "first"
    assert all(
        row.cut_off_after is None
        for row in explain_plan(upgraded(first=2, second=2).session)
    )


@pytest.mark.slow
def test_kept_output_survives_a_version_change_until_forced(
    upgraded: Make,
) -> None:
    old = upgraded()
    run(old)
    upgraded(first=2).session.keep(["first"])
    kept = upgraded(first=2)
    assert run(kept) == ["Cached", "Cached"]
    record = kept.session.start_record()
    assert record.content["stages"]["first"] == {
        "fingerprint": old.session.plan["first"].fingerprint,
        "kept": {"version": 1, "instead_of": 2},
    }
    assert explain_plan(kept.session)[0].kept_version == 1
    record.save()
    assert collect(kept.session.store, keep_runs=1, delete=True) == []
    assert run(upgraded(first=2)) == ["Cached", "Cached"]
    (again := upgraded(first=2)).session.forget_kept(["first"])
    assert run(again) == ["Completed", "Cached"]


@pytest.mark.slow
def test_deleted_kept_output_is_rebuilt_by_the_current_version(
    upgraded: Make,
) -> None:
    old = upgraded()
    run(old)
    (kept := upgraded(first=2)).session.keep(["first"])
    (old.folder("first").data / "numbers.txt").unlink()
    with pytest.raises(StageFailedError):
        kept.run_stage("first")
    assert run(upgraded(first=2))[0] == "Completed"


def test_keep_rejects_other_settings_and_the_same_version(
    upgraded: Make, toy_runner: Make
) -> None:
    run(toy_runner(first={"n": N + 1}))
    for version in (1, 2):
        session = upgraded(first=version).session
        with pytest.raises(NothingToKeepError):
            keep_output(session.plan["first"], session.store, "toy")


@pytest.mark.slow
def test_report_names_equal_outputs_and_versions_of_kept_ones(upgraded: Make) -> None:
    old = upgraded()
    run(old)
    run(new := upgraded(first=2))
    node = new.session.plan["first"]
    assert old.session.plan["first"].fingerprint[:16] in provenance(node)
    assert provenance(replace(node, alias="")) == ""
    assert "version 1" in provenance(replace(node, kept_version=1))


def test_digest_of_a_training_ignores_timing_files() -> None:
    training = Stage("pretrain", 1, "m:run", torchrun=True)
    files = {
        name: {"bytes": 1, "sha256": name}
        for name in ("metrics.jsonl", "model/model.safetensors")
    }
    faster = {**files, "metrics.jsonl": {"bytes": 1, "sha256": "faster"}}
    other = {**files, "model/model.safetensors": {"bytes": 1, "sha256": "other"}}
    digest = content_digest(files, training.timed_files)
    assert content_digest(faster, training.timed_files) == digest
    assert content_digest(other, training.timed_files) != digest
    renamed = {
        "weights" if name.startswith("model") else name: entry
        for name, entry in files.items()
    }
    assert content_digest(renamed, training.timed_files) != digest
    assert content_digest(
        faster, Stage("mix", 1, "m:run").timed_files
    ) != content_digest(files, frozenset())


@pytest.mark.parametrize("location", ["{tmp_path}/store", "memory://early-cutoff"])
def test_identities_are_committed_with_the_files_in_any_store(
    location: str, tmp_path: Path
) -> None:
    store = Store.at(location.format(tmp_path=tmp_path))
    nodes = [Node(Stage("first", version, "m:first"), "", {}, {}) for version in (1, 2)]
    nodes = [replace(node, fingerprint=node.own_fingerprint) for node in nodes]
    for node in nodes:
        folder = store.folder("first", "toy", node.fingerprint)
        folder.begin({})
        (folder.data / "a").write_bytes(b"a")
        folder.commit(
            {"fingerprint": node.fingerprint, "started": node.stage.version},
            {},
            find_alias=lambda files, node=node: find_alias(store, node, files),
        )
    folders = [store.folder("first", "toy", node.fingerprint) for node in nodes]
    assert [alias_of(folder) for folder in folders] == ["", nodes[0].fingerprint]
    settled = settle_from_store({"first": nodes[1]}, store, "toy")
    assert settled["first"].identity == nodes[0].fingerprint
