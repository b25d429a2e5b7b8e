"""`quality: {judge: ..., distil: ...}`: a small classifier learns from the judge's
scores of a sample and scores all documents.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.core.files import json_object
from gristmill.dataprep.encoders.distil_classifier import calibrate, count_confusion
from gristmill.dataprep.llm.client import BudgetSpentError
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.labelled_examples import QualityError
from gristmill.dataprep.user_code import annotate
from gristmill.flows.report.document_sections import agreement
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.llm_sections import judges
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.registry import prepare_step
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.steps.quality import Quality
from tests.chat_endpoint import Endpoint
from tests.dataprep.document_shards import MakeContext, WriteIngest
from tests.dataprep.own_steps import step, written
from tests.dataprep.test_embeddings import write_static

JUDGED = 240
JUDGE = (
    "def step(text: str) -> dict:\n    return {'edu': None if 'w39' in text else "
    "1.0 * text.count('w1 ')}\n"
)
"""A judge without a score for some documents; good ones share a word that the others
lack.
"""
EDU = {"column": "edu", "at_least": 3}
MODEL = {"endpoint": "http://127.0.0.1:1/v1", "model": "x"}
Run = Callable[..., tuple[dict[str, Any], list[Mapping[str, Any]]]]


def texts() -> list[str]:
    rng = np.random.default_rng(2)
    bad, good = (
        [f"w{number}" for number in range(20, 38)],
        [f"w{number}" for number in range(2, 20)],
    )
    judged = []
    for number in range(JUDGED):
        words = list(rng.choice(good if number % 3 == 0 else bad, 30))
        judged.append(
            " ".join([*(["w1"] * 3 if number % 3 == 0 else []), *words, "end"])
        )
    return [*judged, *(f"{text} w39" for text in judged[:60])]


@pytest.fixture
def run_stages(
    tmp_path: Path,
    write_ingest: WriteIngest,
    make_context: MakeContext,
) -> Run:
    """Run a judge and then `quality`: (settings, shards, **settings of BeamEngine) ->
    summary, rows.
    """
    numbers = iter(range(100))

    def run(
        settings: Mapping[str, Any], shards: int = 2, **fields: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        number = next(numbers)
        documents = [("web", str(place), text) for place, text in enumerate(texts())]
        inputs = {
            "ingest": write_ingest(
                f"ingest{number}", [documents[shard::shards] for shard in range(shards)]
            )
        }
        judged = tmp_path / f"judged{number}"
        annotate.run(
            inputs,
            step(tmp_path / f"code{number}", JUDGE),
            judged,
            make_context(f"annotate{number}"),
        )
        config = Quality.model_validate({"seed": 4, **settings}).model_dump(mode="json")
        context = make_context(f"work{number}", "quality", **fields)
        summary = quality.run(
            {**inputs, "annotate": judged}, config, tmp_path / f"out{number}", context
        )
        return summary, written(tmp_path / f"out{number}")

    return run


@pytest.fixture
def forms(tmp_path: Path) -> Mapping[str, dict[str, Any]]:
    """Settings of small classifiers of both kinds."""
    embedding = {"path": str(write_static(tmp_path / "static")), "pool": "tokens"}
    return {
        "embedding+linear": {
            "judge": EDU,
            "distil": "embedding+linear",
            "embedding": embedding,
        },
        "fasttext": {"judge": EDU, "distil": "fasttext"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["embedding+linear", "fasttext"])
def test_classifier_learns_from_scores_and_scores_all_documents(
    run_stages: Run, forms: Mapping[str, dict[str, Any]], form: str
) -> None:
    summary, rows = run_stages({**forms[form], "min_quality": 0.5})
    distilled = summary.distilled
    assert (distilled["sample"], distilled["good"]) == (JUDGED, JUDGED // 3)
    assert distilled["learnt"] + distilled["held_out"] == JUDGED
    assert 8 <= distilled["held_out"] <= 50
    assert distilled["auc"] > 0.95
    assert distilled["at_cut"]["cut"] == 0.5
    confusion_counts = distilled["confusion"]
    assert (
        sum(confusion_counts.values())
        == distilled["held_out"]
        == sum(row["documents"] for row in distilled["calibration"])
    )
    assert (
        confusion_counts["good_kept"]
        / (confusion_counts["good_kept"] + confusion_counts["good_dropped"])
        == distilled["at_cut"]["recall"]
    )
    good = [number % 3 == 0 for number in range(JUDGED)]
    ids = {str(place): text for place, text in enumerate(texts())}
    assert len(rows) == len(ids) == 300
    consistent = np.mean([row["keep"] == (row["quality"] >= 0.5) for row in rows])
    assert consistent == 1.0
    kept = sum(row["keep"] for row in rows)
    # those that the judge said nothing of are scored, too
    assert abs(kept - (sum(good) + 20)) <= 12
    assert summary.counts["dropped"] == {"quality/min_quality": 300 - kept}
    note, confusion, calibration = agreement(distilled)
    assert f"On {distilled['held_out']} held out" in str(note)
    assert f"{confusion_counts['good_kept']:,}" in str(confusion)
    assert str(calibration).count("from ") == len(distilled["calibration"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["embedding+linear", "fasttext"])
def test_shards_and_workers_do_not_change_the_scores(
    run_stages: Run, forms: Mapping[str, dict[str, Any]], form: str
) -> None:
    first_summary, first_rows = run_stages({**forms[form], "sample": 150}, shards=1)
    second_summary, second_rows = run_stages(
        {**forms[form], "sample": 150}, shards=5, mode="threads", workers=2
    )
    assert first_summary.distilled["sample"] == 150
    assert first_summary.distilled == second_summary.distilled
    assert {row["id"]: row["quality"] for row in first_rows} == {
        row["id"]: row["quality"] for row in second_rows
    }


def answer(prompt: str, before: int) -> str:
    """A judge that counts, with an unusable answer for every tenth document."""
    match = re.search(r"<text>\n(.*)\n</text>", prompt, re.DOTALL)
    text = match[1] if match else ""
    if not text or zlib.crc32(text.encode()) % 10 == 0:
        return "no idea"
    return json.dumps({"score": min(text.count("w1 "), 5)})


@pytest.mark.slow
def test_model_judges_only_the_sample_and_answers_are_reused(
    run_stages: Run, tmp_path: Path
) -> None:
    with Endpoint(answer) as endpoint:
        model = {"endpoint": endpoint.url, "model": "small", "max_tokens": 50}
        settings = {
            "judge": {"model": model, "at_least": 3},
            "sample": 120,
            "distil": "fasttext",
            "min_quality": 0.5,
        }
        summary, rows = run_stages(settings, answers=tmp_path / "answers")
        unusable = summary.unusable
        assert 1 < unusable < 30
        [asked] = summary.asked
        assert asked["model"] == "small"
        assert asked["asked"] == 120 + unusable  # a repair request for each of these
        assert summary.distilled["sample"] == 120 - unusable
        assert summary.distilled["auc"] > 0.9
        assert len(rows) == 300
        assert np.mean([row["quality"] is not None for row in rows]) == 1.0

        number = endpoint.asked.total()
        again, rows_again = run_stages(
            settings, shards=5, answers=tmp_path / "answers", mode="threads", workers=2
        )
        assert endpoint.asked.total() == number
        assert [model_usage["asked"] for model_usage in again.asked] == [0]
        assert again.distilled == summary.distilled
        assert {row["id"]: row["quality"] for row in rows_again} == {
            row["id"]: row["quality"] for row in rows
        }
    (section, *_) = judges(
        Facts(summaries={"quality": json_object(summary)}), "quality"
    ).parts
    assert [row[0] for row in section.rows] == ["small"]


@pytest.mark.slow
def test_run_after_a_spent_budget_requests_only_missing_answers(
    run_stages: Run, tmp_path: Path
) -> None:
    with Endpoint(
        lambda asked, before: json.dumps({"score": min(asked.count("w1 "), 5)})
    ) as endpoint:
        model = {"endpoint": endpoint.url, "model": "small", "max_tokens": 50}
        settings = {"sample": 90, "distil": "fasttext"}
        with pytest.raises(BudgetSpentError, match="50 of 90 requests"):
            run_stages(
                {
                    **settings,
                    "judge": {
                        "model": {**model, "budget": {"requests": 50}},
                        "at_least": 3,
                    },
                },
                answers=tmp_path / "answers",
            )
        assert endpoint.answered.total() == 50
        summary, _ = run_stages(
            {**settings, "judge": {"model": model, "at_least": 3}},
            answers=tmp_path / "answers",
        )
    (usage,) = summary.asked
    assert (usage["asked"], usage["kept"], endpoint.answered.total()) == (40, 50, 90)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"judge": {**EDU, "rubric": "toxicity"}}, "rubric: .*`model`"),
        ({"judge": {**EDU, "model": MODEL}}, "one of"),
        (
            {"judge": {"model": MODEL, "score": "scor", "at_least": 3}},
            "did you mean 'score'",
        ),
        ({"judge": {"at_least": 3}}, "column"),
        ({"judge": EDU, "distil": None}, "distil"),
        ({"judge": EDU, "distil": "embedding+linear"}, "`embedding`"),
    ],
)
def test_invalid_judge_is_rejected(settings: dict[str, Any], facts: str) -> None:
    with pytest.raises(ValueError, match=facts):
        Quality.model_validate({"distil": "fasttext", **settings})


def test_unknown_judge_column_is_rejected_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "m.yaml").write_text("""
name: judged
sources: {web: {path: web.jsonl}}
prepare:
  - judge: {model: {endpoint: "http://127.0.0.1:1/v1", model: x}}
  - quality: {judge: {column: judge_scor, at_least: 3}, distil: fasttext}
""")
    with pytest.raises(ManifestError, match=r"m.yaml:6.*'judge_scor'.*'judge_score'"):
        open_session(
            str(tmp_path / "m.yaml"), [], str(tmp_path / "store"), until="quality"
        )


def test_recipe_has_the_question_but_not_the_endpoint() -> None:
    def recipe(**model: Any) -> Any:
        judge = {
            "model": {**MODEL, **model},
            "at_least": 3,
        }
        section = Quality.model_validate(
            {"judge": judge, "distil": "fasttext", "seed": 1}
        )
        return prepare_step("quality").recipe(
            section, section.model_dump(mode="json", context="recipe")
        )["judge"]

    assert recipe() == recipe(endpoint="http://127.0.0.1:2/v1", concurrency=3)
    assert recipe() != recipe(temperature=0.5)
    assert len(recipe()["question"]) == 64


def test_judgements_without_both_classes_are_rejected(run_stages: Run) -> None:
    with pytest.raises(QualityError, match=r"0 .* 99"):
        run_stages({"judge": {"column": "edu", "at_least": 99}, "distil": "fasttext"})
    with pytest.raises(QualityError, match=r"'edo'.*'edu'"):
        run_stages({"judge": {"column": "edo", "at_least": 3}, "distil": "fasttext"})
    with pytest.raises(QualityError, match="0 documents"):
        run_stages(
            {"judge": {"metadata": "score", "at_least": 3}, "distil": "fasttext"}
        )


def test_calibration_and_confusion_counts() -> None:
    good, scores = (
        np.array([True, False, True, True]),
        np.array([0.95, 0.91, 0.12, 1.0]),
    )
    assert calibrate(good, scores) == [
        {"from": 0.1, "documents": 1, "score": 0.12, "good": 1.0},
        {
            "from": 0.9,
            "documents": 3,
            "score": pytest.approx(2.86 / 3),
            "good": pytest.approx(2 / 3),
        },
    ]
    assert count_confusion(good, scores, 0.92) == {
        "good_kept": 2,
        "good_dropped": 1,
        "other_kept": 0,
        "other_dropped": 1,
    }
