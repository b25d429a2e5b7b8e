"""A key under its former name is read with a warning that names the present one, and changes no fingerprint."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from gristmill.flows.cli import main
from gristmill.flows.orchestration.reporting import warn_of_renamed
from gristmill.flows.questions.compare import keyed_manifest
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.plan import make_plan
from gristmill.flows.stages.sections import dump
from gristmill.mixtures.load import ManifestError, parse_manifest
from gristmill.mixtures.manifest import RenamedKeyWarning
from gristmill.mixtures.mix import Mix

NOW = """\
name: renamed
sources: {a: {path: a.txt}}
tokenizer: {vocab_size: 300}
mix:
  tokens: 40000
  on_shortfall: redistribute
  phases: [{end: 0.5}, {weights: {a: 1}}]
pretrain:
  steps: 1
  early_stopping: {patience: 2, min_delta: 0.1}
  tasks:
  - {name: quiz, path: quiz.jsonl, kind: cloze, num_fewshot: 2, fewshot_path: solved.jsonl, target_delimiter: "",
     fewshot_delimiter: "\\n"}
sft: {steps: 1, data: [{path: chat.jsonl, max_quarantined: 0.1}]}
evaluate: {bootstrap_samples: 50}
"""
FORMER = {
    "on_shortfall": "short",
    "phases": "stages",
    "end": "until",
    "min_delta": "least_improvement",
    "num_fewshot": "shots",
    "fewshot_path": "shots_path",
    "target_delimiter": "delimiter",
    "fewshot_delimiter": "shot_delimiter",
    "max_quarantined": "max_refused",
    "bootstrap_samples": "resamples",
}


def before() -> str:
    """The same manifest as earlier versions had it."""
    text = NOW
    for new, old in FORMER.items():
        text = text.replace(f"{new}:", f"{old}:")
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "quiz.jsonl", "solved.jsonl", "chat.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def test_former_names_mean_the_same_and_are_warned_of_with_their_lines(folder: Path) -> None:
    file = str(folder / "m.yaml")
    with pytest.warns(RenamedKeyWarning) as told:
        old = parse_manifest(before(), file)
    with warnings.catch_warnings(action="error"):
        new = parse_manifest(NOW, file)
    assert old == new
    said = [str(one.message) for one in told]
    assert len(said) == len(FORMER)
    assert (
        f"{file}:6: mix.short: is now called mix.on_shortfall; the next version does not read the former name"
    ) in said
    assert any(one.startswith(f"{file}:7: mix.phases[0].until: is now called mix.phases[0].end;") for one in said)
    assert {name: node.fingerprint for name, node in make_plan(old).items()} == {
        name: node.fingerprint for name, node in make_plan(new).items()
    }


def test_recipes_keep_the_former_names_and_sections_read_them_back() -> None:
    mix = Mix.model_validate({"tokens": 1000, "on_shortfall": "redistribute", "phases": [{"end": 0.5}, {}]})
    recipe = dump(mix)
    assert (recipe["short"], [phase["until"] for phase in recipe["stages"]]) == ("redistribute", [0.5, None])
    assert "on_shortfall" not in recipe
    assert Mix.model_validate(recipe) == mix
    assert mix.model_dump()["on_shortfall"] == "redistribute"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (NOW, "mix.short=error"),
        (before(), "mix.on_shortfall=error"),
        (before(), "mix.short=error"),
        (NOW, "mix.stages.0.until=0.7"),
    ],
)
def test_a_setting_replaces_a_key_under_either_name(text: str, setting: str) -> None:
    with pytest.warns(RenamedKeyWarning):
        manifest = parse_manifest(text, "m.yaml", [setting])
    mix = manifest.mix
    assert mix is not None
    assert (mix.on_shortfall, mix.phases[0].end) == (("redistribute", 0.7) if "until" in setting else ("error", 0.5))


def test_a_setting_of_a_former_name_is_warned_of_as_a_setting() -> None:
    with pytest.warns(RenamedKeyWarning) as told:
        parse_manifest(NOW, "m.yaml", ["mix.stages.0.until=0.7", "evaluate={resamples: 3}"])
    assert [str(one.message).partition(";")[0] for one in told] == [
        "--set mix.stages.0.until: mix.stages.0.until is now called mix.phases.0.end",
        "--set evaluate: evaluate.resamples is now called evaluate.bootstrap_samples",
    ]


def test_a_key_under_both_names_is_a_mistake_at_its_line() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(NOW.replace("  tokens: 40000\n", "  tokens: 40000\n  short: error\n"), "m.yaml")
    (problem,) = caught.value.problems
    assert str(problem) == (
        "m.yaml:7: mix.short: is the former name of mix.on_shortfall, which is given too; keep mix.on_shortfall"
    )
    with pytest.raises(ValueError, match="short is the former name of on_shortfall"):
        Mix.model_validate({"tokens": 1000, "short": "error", "on_shortfall": "error"})


def test_manifests_of_earlier_runs_are_compared_under_todays_names() -> None:
    assert keyed_manifest({"mix": {"short": "error"}}) == {"mix": {"on_shortfall": "error"}}


def test_the_log_of_a_flow_run_has_the_warnings_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "m.yaml").write_text(
        "name: old\nsources: {a: {path: a.txt}}\ntokenizer: {vocab_size: 300}\nmix: {tokens: 4000, short: error}\n"
    )
    with pytest.warns(RenamedKeyWarning):
        session = open_session(str(folder / "m.yaml"), ["mix.stages=[]"], str(folder / "store"))
    monkeypatch.setattr("prefect.logging.get_run_logger", lambda: logging.getLogger("of the run"))
    warn_of_renamed(session)
    assert [one.message.partition(";")[0] for one in caplog.records if one.name == "of the run"] == [
        f"{folder / 'm.yaml'}:4: mix.short: is now called mix.on_shortfall",
        "--set mix.stages: mix.stages is now called mix.phases",
    ]


def test_the_command_line_shows_the_warning_without_a_place_in_our_code() -> None:
    shown = main.format_warning("m.yaml:6: mix.short: ...", RenamedKeyWarning, "load.py", 1)
    assert shown == "warning: m.yaml:6: mix.short: ...\n"
    assert "load.py:1: UserWarning: other" in main.format_warning("other", UserWarning, "load.py", 1)
