"""A plan states for every stage the action and its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gristmill.flows.questions.what_changed import (
    UsableCheckpoint,
    differences,
    explain_plan,
)
from gristmill.flows.running.run import Runner
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.sources import Source
from tests.sessions import finish

Make = Callable[..., Runner]


def told(runner: Runner, *force: str) -> list[tuple[str, str]]:
    return [
        (row.action, row.reason)
        for row in explain_plan(runner.session, frozenset(force))
    ]


@pytest.mark.slow
def test_plan_names_the_changed_key_and_its_dependent_stages(
    toy_runner: Make,
) -> None:
    finished = finish(toy_runner(first={"n": 1, "deep": {"epochs": 5}}, second={}))
    assert told(finished) == [("reuse", ""), ("reuse", "")]
    assert told(toy_runner(first={"n": 1, "deep": {"epochs": 10}}, second={})) == [
        ("make", "config changed: deep.epochs 5 -> 10"),
        ("make", "input changed: first; reused if first gives the same bytes"),
    ]


def test_plan_distinguishes_never_made_from_forced(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 1}, second={})
    assert told(runner) == [("make", "never made")] * 2
    runner.run_stage("first")
    assert told(runner, "first") == [("make", "forced"), ("make", "never made")]


@pytest.mark.slow
def test_plan_compares_with_the_nearest_output(
    toy_runner: Make,
) -> None:
    finish(toy_runner(first={"n": 1, "a": 1, "b": 1}))
    finish(toy_runner(first={"n": 9, "a": 9, "b": 9}))
    assert told(toy_runner(first={"n": 1, "a": 1, "b": 2})) == [
        ("make", "config changed: b 1 -> 2")
    ]


def test_output_of_another_manifest_is_compared_only_if_nearly_equal(
    toy_runner: Make,
) -> None:
    finish(toy_runner(first={"n": 1, **dict.fromkeys("abcde", 1)}))

    def told_to_another(**recipe: int) -> str:
        session = replace(
            toy_runner(first=recipe).session,
            manifest=Manifest(name="other", sources={"a": Source(path="x")}),
        )
        return explain_plan(session)[0].reason

    assert (
        told_to_another(n=2, **dict.fromkeys("abcde", 1)) == "config changed: n 1 -> 2"
    )
    assert told_to_another(n=2, **dict.fromkeys("abcde", 2)) == "never made"


def test_reasons_separate_files_keys_and_code(toy_runner: Make) -> None:
    runner = finish(toy_runner(first={"n": 1}))
    manifest = runner.folder("first").manifest()

    def file(path: str, stamp: str = "x") -> dict[str, object]:
        return {"path": path, "size": 1, "stamp": stamp}

    manifest["recipe"] = {
        "gone": 1,
        "sources": {"web": {"listing": [file("a"), file("b"), file("c")]}},
    }
    node = runner.session.plan["first"]
    node = replace(
        node,
        stage=replace(node.stage, version=3),
        recipe={
            "long": ["x" * 99],
            "sources": {
                "web": {"listing": [file("b", "y"), file("c"), file("d"), file("e")]}
            },
        },
    )
    assert differences(manifest, node) == {
        "config": ["gone removed: 1", "long added"],
        "files": ["sources.web (2 new, 1 gone, 1 changed)"],
        "code": ["stage version 1 -> 3"],
        "input": [],
    }


def test_plan_suggests_the_latest_usable_checkpoint(
    toy_runner: Make,
) -> None:
    recipe = {
        "steps": 100,
        "seed": 1,
        "schedule": {"kind": "wsd"},
        "optimizer": {"kind": "adamw", "eps": 0.1},
    }

    def told_to(**changes: object) -> UsableCheckpoint | None:
        session = toy_runner(pretrain={**recipe, **changes}).session
        node = session.plan["pretrain"]
        session.plan["pretrain"] = replace(
            node,
            stage=replace(node.stage, training=Pretrain, row_kind="documents"),
        )
        (row,) = explain_plan(session)
        return row.continue_from

    unfinished = toy_runner(pretrain=recipe).folder("pretrain")
    unfinished.begin({"version": 1, "input_fingerprints": {}, "recipe": recipe})
    for step in (40, 80):
        checkpoint = unfinished.work / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete.json").write_text("{}")
    assert told_to() is None  # an unchanged training resumes by itself
    assert told_to(steps=200, schedule={"kind": "cosine"}) == UsableCheckpoint(
        step=80, checkpoint=str(checkpoint)
    )
    assert told_to(steps=60) == UsableCheckpoint(
        step=40, checkpoint=str(checkpoint.with_name("step-00000040"))
    )
    for changes in (
        {"seed": 2},
        {"optimizer": {"kind": "lion", "eps": 0.1}},
        {"steps": 30},
    ):
        assert told_to(**changes) is None


@pytest.mark.slow
def test_plan_shows_settings_outside_the_fingerprint_of_a_committed_stage(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 1})
    node = runner.session.plan["first"]
    runner.session.plan["first"] = replace(
        node, config={**node.config, "micro_batch_size": 4}
    )
    finish(runner)
    assert runner.folder("first").manifest()["how"] == {"micro_batch_size": 4}
    assert told(runner) == [("reuse", "")]
    runner.session.plan["first"] = replace(
        node, config={**node.config, "micro_batch_size": 2}
    )
    assert told(runner) == [("reuse", "made with micro_batch_size 4")]
