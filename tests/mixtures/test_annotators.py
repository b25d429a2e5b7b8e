"""Presets of `annotate` and `judge`: settings, missing keys, and files of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.llm.prompting import pattern_problem, read_pattern_answer
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.annotators import read_annotators
from gristmill.mixtures.loader import ManifestError, parse_manifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def step_of(text: str, folder: Path) -> Any:
    manifest = f"name: a\nsources: {{a: {{path: a.txt}}}}\nprepare:\n  - {text}\n"
    return parse_manifest(manifest, str(folder / "m.yaml")).steps


def settings_of(name: str, model: Any) -> dict[str, Any]:
    """A step's settings with a preset, and every key that it asks for."""
    annotator = read_annotators()[name]
    settings: dict[str, Any] = {"preset": name, "model": model}
    for key in annotator.give:
        settings["model"] = {**model, key: "the text"}
    return settings


@pytest.mark.parametrize("name", read_annotators())
def test_every_preset_is_a_valid_step_with_its_columns(
    name: str, tmp_path: Path
) -> None:
    annotator = read_annotators()[name]
    if annotator.weights is None:
        entry: Any = {annotator.step: annotator.settings}
    else:
        model = f"hf://{annotator.weights}@{COMMIT}"
        settings = settings_of(name, {"folder" if annotator.answers else "path": model})
        entry = {annotator.step: settings}
    (step,) = step_of(str(entry), tmp_path).values()
    if annotator.step == "annotate":
        assert step.config.model.name in annotator.labels
        assert step.config.model.window_tokens == annotator.tokens
        return
    described = STAGES[annotator.step].step
    assert described is not None
    assert set(annotator.labels) <= set(described.columns(step.config))
    if annotator.step == "judge":
        assert set(annotator.labels) == set(step.config.measured)
        assert step.config.pattern is None or not pattern_problem(
            step.config.pattern, step.config.answer
        )


def test_own_settings_take_precedence(tmp_path: Path) -> None:
    step = step_of(
        f"annotate: {{preset: fineweb-edu, model: {{path: {tmp_path}, name: e}}, "
        "min: {e: 3}}",
        tmp_path,
    )["annotate"]
    assert (step.config.model.name, step.config.model.window_tokens) == ("e", 512)
    assert step.config.min == {"e": 3}
    short = step_of(f"annotate: {{preset: fineweb-edu, model: {tmp_path}}}", tmp_path)[
        "annotate"
    ]
    plain = step_of(
        f"annotate: {{model: {{path: {tmp_path}, name: edu, window_tokens: 512}}}}",
        tmp_path,
    )["annotate"]
    assert short == plain


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("annotate: {preset: fineweb-edu}", "HuggingFaceFW/fineweb-edu-classifier"),
        ("annotate: {preset: fineweb-edo, model: m}", "fineweb-edu"),
        ("annotate: {preset: propella-1, model: m}", "nvidia-domain"),
        ("judge: {preset: propella-1, model: {folder: m}}", "model.system"),
        ("judge: {preset: 'none.yaml#mine', model: {folder: m}}", "none.yaml"),
    ],
)
def test_missing_and_unknown_facts_are_named(
    text: str, facts: str, tmp_path: Path
) -> None:
    with pytest.raises(ManifestError) as caught:
        step_of(text, tmp_path)
    problem = caught.value.problems[0]
    assert problem.line == 4
    assert facts in problem.message


def test_files_of_users_have_presets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "mine: {about: of mine, step: annotate, settings: {model: {name: taste}}}\n"
    )
    text = f"annotate: {{preset: 'mine.yaml#mine', model: {tmp_path}}}"
    assert step_of(text, tmp_path)["annotate"].config.model.name == "taste"
    (tmp_path / "mine.yaml").write_text("other: {step: annotate, settings: {}}\n")
    read_annotators.cache_clear()
    with pytest.raises(ManifestError, match=r"mine\.yaml: other\.about"):
        step_of(text, tmp_path)


@pytest.mark.parametrize(
    ("name", "answer", "values"),
    [
        ("llama-guard-3", "safe", {"verdict": "safe"}),
        (
            "llama-guard-3",
            "\n\nunsafe\nS1,S10",
            {"verdict": "unsafe", "hazards": "S1,S10"},
        ),
        (
            "eai-distill",
            "512.5,skip\n2,3\n3,skip\n3,skip\n0,skip\n4,1\n10,skip\n3,4\n-1,skip\n2,skip",
            {
                "fdc": "512.5",
                "bloom_process": 2,
                "bloom_knowledge": 3,
                "document_type_v1": 3,
                "extraction_artifacts": 0,
                "missing_content": 4,
                "document_type_v2": 10,
                "reasoning_depth": 3,
                "technical_correctness": -1,
                "education_level": 2,
            },
        ),
    ],
)
def test_answers_of_published_models_are_read(
    name: str, answer: str, values: dict[str, Any]
) -> None:
    settings: Any = read_annotators()[name].settings
    schema = settings["answer"]
    assert read_pattern_answer(answer, settings["pattern"], schema) == (values, None)
    read, problem = read_pattern_answer("maybe", settings["pattern"], schema)
    assert read is None
    assert problem is not None
