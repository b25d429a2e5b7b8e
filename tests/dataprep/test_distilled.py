"""`quality: {judge: ..., distil: ...}`: a small classifier learns from scores of a sample, and scores all."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.encoders.distil_classifier import calibrate, count_confusion
from gristmill.dataprep.llm.llm_client import BudgetSpentError
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.labelled_examples import QualityError
from gristmill.dataprep.user_code import annotate
from gristmill.flows.report.document_sections import agreement
from gristmill.flows.report.llm_sections import judges
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.load import ManifestError
from gristmill.mixtures.steps.quality import Quality
from tests.chat_endpoint import Endpoint
from tests.dataprep.own_steps import step, written
from tests.dataprep.test_embeddings import write_static

JUDGED = 240
JUDGE = "def step(text: str) -> dict:\n    return {'edu': None if 'w39' in text else 1.0 * text.count('w1 ')}\n"
"""A judge that says nothing of some documents; good ones have a word that others have not."""
Run = Callable[..., tuple[dict[str, Any], list[Mapping[str, Any]]]]


def texts() -> list[str]:
    draw = np.random.default_rng(2)
    bad, good = [f"w{number}" for number in range(20, 38)], [f"w{number}" for number in range(2, 20)]
    found = []
    for number in range(JUDGED):
        words = list(draw.choice(good if number % 3 == 0 else bad, 30))
        found.append(" ".join([*(["w1"] * 3 if number % 3 == 0 else []), *words, "end"]))
    return [*found, *(f"{text} w39" for text in found[:60])]


@pytest.fixture
def ran(tmp_path: Path, write_ingest: Callable[..., Path], make_context: Callable[..., Context]) -> Run:
    """Run a judge and then `quality`: (settings, number of shards, fields of the context) -> summary, rows."""
    numbers = iter(range(100))

    def run(settings: Mapping[str, Any], shards: int = 2, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
        number = next(numbers)
        documents = [("web", str(place), text) for place, text in enumerate(texts())]
        inputs = {"ingest": write_ingest(f"ingest{number}", [documents[shard::shards] for shard in range(shards)])}
        judged = tmp_path / f"judged{number}"
        annotate.run(inputs, step(tmp_path / f"code{number}", JUDGE), judged, make_context(f"annotate{number}"))
        config = Quality.model_validate({"seed": 4, **settings}).model_dump(mode="json")
        context = replace(make_context(f"work{number}"), stage="quality", **fields)
        summary = quality.run({**inputs, "annotate": judged}, config, tmp_path / f"out{number}", context)
        return summary, written(tmp_path / f"out{number}")

    return run


@pytest.fixture
def forms(tmp_path: Path) -> Mapping[str, dict[str, Any]]:
    """The settings of both kinds of classifiers, which are small here."""
    judge = {"judge": {"column": "edu", "at_least": 3}}
    embedding = {"path": str(write_static(tmp_path / "static")), "pool": "tokens"}
    return {
        "embedding+linear": {**judge, "distil": "embedding+linear", "embedding": embedding},
        "fasttext": {**judge, "distil": "fasttext"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["embedding+linear", "fasttext"])
def test_a_classifier_learns_from_scores_and_scores_all(
    ran: Run, forms: Mapping[str, dict[str, Any]], form: str
) -> None:
    summary, rows = ran({**forms[form], "min_quality": 0.5})
    found = summary["distilled"]
    assert (found["sample"], found["good"]) == (JUDGED, JUDGED // 3)
    assert found["learnt"] + found["held_out"] == JUDGED
    assert 8 <= found["held_out"] <= 50
    assert found["auc"] > 0.95
    assert found["at_cut"]["cut"] == 0.5
    said = found["confusion"]
    assert sum(said.values()) == found["held_out"] == sum(row["documents"] for row in found["calibration"])
    assert said["good_kept"] / (said["good_kept"] + said["good_dropped"]) == found["at_cut"]["recall"]
    good = [number % 3 == 0 for number in range(JUDGED)]
    ids = {str(place): text for place, text in enumerate(texts())}
    assert len(rows) == len(ids) == 300
    right = np.mean([row["keep"] == (row["quality"] >= 0.5) for row in rows])
    assert right == 1.0
    kept = sum(row["keep"] for row in rows)
    assert abs(kept - (sum(good) + 20)) <= 12  # those that the judge said nothing of are scored, too
    assert summary["counts"]["dropped"] == {"quality/min_quality": 300 - kept}
    note, confusion, calibration = agreement(found)
    assert f"On {found['held_out']} held out" in str(note)
    assert f"{said['good_kept']:,}" in str(confusion)
    assert str(calibration).count("from ") == len(found["calibration"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["embedding+linear", "fasttext"])
def test_shards_and_workers_change_nothing(ran: Run, forms: Mapping[str, dict[str, Any]], form: str) -> None:
    one, alone = ran({**forms[form], "sample": 150}, shards=1)
    other, together = ran({**forms[form], "sample": 150}, shards=5, mode="threads", workers=2)
    assert one["distilled"]["sample"] == 150
    assert one["distilled"] == other["distilled"]
    assert {row["id"]: row["quality"] for row in alone} == {row["id"]: row["quality"] for row in together}


def answer(asked: str, before: int) -> str:
    """A judge that counts, and says of every tenth document nothing that can be used."""
    found = re.search(r"<text>\n(.*)\n</text>", asked, re.DOTALL)
    text = found[1] if found else ""
    if not text or zlib.crc32(text.encode()) % 10 == 0:
        return "no idea"
    return json.dumps({"score": min(text.count("w1 "), 5)})


@pytest.mark.slow
def test_a_model_is_asked_about_the_sample_alone_and_nothing_twice(ran: Run, tmp_path: Path) -> None:
    with Endpoint(answer) as endpoint:
        model = {"endpoint": endpoint.url, "model": "small", "max_tokens": 50}
        settings = {
            "judge": {"model": model, "second": {**model, "model": "other"}, "at_least": 3},
            "sample": 120,
            "distil": "fasttext",
            "min_quality": 0.5,
        }
        summary, rows = ran(settings, answers=tmp_path / "answers")
        unusable = summary["unusable"]
        assert 1 < unusable < 30
        first, second = summary["asked"]
        assert (first["model"], second["model"]) == ("small", "other")
        assert first["asked"] == 120 + unusable  # a repair request for each of these
        assert summary["agreement"]["score"]["same"] == 1.0
        assert summary["agreement"]["score"]["documents"] == 120 - unusable
        assert summary["distilled"]["sample"] == 120 - unusable
        assert summary["distilled"]["auc"] > 0.9
        assert len(rows) == 300
        assert np.mean([row["quality"] is not None for row in rows]) == 1.0

        number = endpoint.asked.total()
        again, same = ran(settings, shards=5, answers=tmp_path / "answers", mode="threads", workers=2)
        assert endpoint.asked.total() == number
        assert [one["asked"] for one in again["asked"]] == [0, 0]
        assert again["distilled"] == summary["distilled"]
        assert {row["id"]: row["quality"] for row in same} == {row["id"]: row["quality"] for row in rows}
    (section, *_) = judges({"summaries": {"quality": summary}}, "quality").parts
    assert [row[0] for row in section.rows] == ["small", "other"]


@pytest.mark.slow
def test_a_spent_budget_ends_the_step_and_the_next_attempt_asks_only_for_the_others(ran: Run, tmp_path: Path) -> None:
    with Endpoint(lambda asked, before: json.dumps({"score": min(asked.count("w1 "), 5)})) as endpoint:
        model = {"endpoint": endpoint.url, "model": "small", "max_tokens": 50}
        settings = {"sample": 90, "distil": "fasttext"}
        with pytest.raises(BudgetSpentError, match="50 of 90 requests"):
            ran(
                {**settings, "judge": {"model": {**model, "budget": {"requests": 50}}, "at_least": 3}},
                answers=tmp_path / "answers",
            )
        assert endpoint.answered.total() == 50
        summary, _ = ran({**settings, "judge": {"model": model, "at_least": 3}}, answers=tmp_path / "answers")
    (asked,) = summary["asked"]
    assert (asked["asked"], asked["kept"], endpoint.answered.total()) == (40, 50, 90)


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"column": "edu", "rubric": "toxicity"}, "rubric: only for a `model`"),
        ({"column": "edu", "model": {"endpoint": "http://127.0.0.1:1/v1", "model": "x"}}, "give one of them"),
        ({"model": {"endpoint": "http://127.0.0.1:1/v1", "model": "x"}, "score": "scor"}, "did you mean 'score'"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judge: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Quality.model_validate({"judge": {**judge, "at_least": 3}, "distil": "fasttext"})


def test_a_column_that_no_step_measures_is_said_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "m.yaml").write_text("""
name: judged
sources: {web: {path: web.jsonl}}
prepare:
  - judge: {model: {endpoint: "http://127.0.0.1:1/v1", model: x}}
  - quality: {judge: {column: judge_scor, at_least: 3}, distil: fasttext}
""")
    with pytest.raises(ManifestError, match=r"m.yaml:6.*no earlier step measures 'judge_scor'.*'judge_score'"):
        open_session(str(tmp_path / "m.yaml"), [], str(tmp_path / "store"), until="quality")


def test_how_a_judge_is_reached_is_in_no_recipe_and_what_it_is_asked_is() -> None:
    def recipe(**model: Any) -> Any:
        judge = {"model": {"endpoint": "http://127.0.0.1:1/v1", "model": "x", **model}, "at_least": 3}
        section = Quality.model_validate({"judge": judge, "distil": "fasttext", "seed": 1})
        return STAGES["quality"].recipe(section, section.model_dump(mode="json", context="recipe"))["judge"]

    assert recipe() == recipe(endpoint="http://127.0.0.1:2/v1", concurrency=3)
    assert recipe() != recipe(temperature=0.5)
    assert len(recipe()["question"]) == 64


def test_what_nothing_can_be_learnt_from_is_said(ran: Run) -> None:
    with pytest.raises(QualityError, match="0 have at least 99"):
        ran({"judge": {"column": "edu", "at_least": 99}, "distil": "fasttext"})
    with pytest.raises(QualityError, match=r"no step before measures 'edo'.*did you mean 'edu'"):
        ran({"judge": {"column": "edo", "at_least": 3}, "distil": "fasttext"})
    with pytest.raises(QualityError, match="0 documents that the judge scored"):
        ran({"judge": {"metadata": "score", "at_least": 3}, "distil": "fasttext"})
    for settings, message in (
        ({"judge": {"column": "edu", "at_least": 3}}, "set both, or neither"),
        ({"judge": {"column": "edu", "at_least": 3}, "distil": "embedding+linear"}, "`embedding` is the model"),
        ({"judge": {"at_least": 3}, "distil": "fasttext"}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            Quality.model_validate(settings)


def test_calibration_and_confusion_are_counted_as_they_say() -> None:
    good, scores = np.array([True, False, True, True]), np.array([0.95, 0.91, 0.12, 1.0])
    assert calibrate(good, scores) == [
        {"from": 0.1, "documents": 1, "score": 0.12, "good": 1.0},
        {"from": 0.9, "documents": 3, "score": pytest.approx(2.86 / 3), "good": pytest.approx(2 / 3)},
    ]
    assert count_confusion(good, scores, 0.92) == {
        "good_kept": 2,
        "good_dropped": 1,
        "other_kept": 0,
        "other_dropped": 1,
    }


def test_recipes_of_sections_without_a_judge_are_as_they_were() -> None:
    dumped = Quality.model_validate({"judge": {"column": "a", "at_least": 1}, "distil": "fasttext"}).model_dump(
        mode="json", context="recipe"
    )
    assert dumped["judge"] == {"column": "a", "metadata": None, "at_least": 1.0}
    dumped = Quality.model_validate({"heuristics": True}).model_dump(mode="json", context="recipe")
    assert {"judge", "sample", "distil", "embedding"} & dumped.keys() == set()
