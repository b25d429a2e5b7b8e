"""The step `judge`: scores and reasons are columns, thresholds decide, kills and faults lose nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import QuarantineError, add_counts
from gristmill.dataprep.llm import judge, llm_client
from gristmill.dataprep.llm.agreement import agreement, count_pairs
from gristmill.dataprep.llm.llm_client import BudgetSpentError
from gristmill.dataprep.llm.prompt_templates import PromptTemplate, TemplateProblemError
from gristmill.mixtures.steps.judge import Judge
from tests.chat_endpoint import Cut, Does, Drop, Endpoint, Raw, Refuse
from tests.dataprep.own_steps import TEXTS, write_documents, written

TEXT = re.compile(r"<text>\n(.*)\n</text>", re.DOTALL)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(llm_client, "MOST_WAIT_SECONDS", 0.002)


def scored(prompt: str, before: int = 0) -> str:
    """A judge that counts words."""
    found = TEXT.search(prompt)
    number = len((found[1] if found else prompt).split())
    return json.dumps({"score": min(number, 5), "reason": f"it has {number} words"})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(scored) as serving:
        yield serving


Ran = Callable[..., tuple[dict[str, Any], list[Any]]]


@pytest.fixture
def ran(endpoint: Endpoint, tmp_path: Path, make_context: Callable[..., Context]) -> Ran:
    """Judge documents: (shards, copies, name of the work folder, **settings) -> summary, rows."""

    def run(shards: int = 2, copies: int = 1, work: str = "out/work", **settings: Any) -> tuple[dict[str, Any], list]:
        documents = tmp_path / f"ingest-{shards}-{copies}"
        if not documents.exists():
            write_documents(documents, shards, copies)
        config = {"model": {"endpoint": endpoint.url, "model": "small"}, **settings}
        out = tmp_path / work / "data"
        summary = judge.run(
            {"ingest": documents},
            Judge.model_validate(config).model_dump(mode="json"),
            out,
            make_context(work, stage="judge"),
        )
        return summary, written(out)

    return run


def test_scores_and_reasons_are_columns_and_thresholds_decide(ran: Ran) -> None:
    summary, rows = ran(min={"judge_score": 3}, max={"judge_score": 4})
    words = [len(text.split()) for text in TEXTS]
    assert [row["judge_score"] for row in rows] == [float(min(number, 5)) for number in words] * 2
    assert [row["judge_reason"] for row in rows] == [f"it has {number} words" for number in words] * 2
    assert [row["reason"] for row in rows] == [
        "judge/min_judge_score" if number < 3 else "judge/max_judge_score" if number > 4 else None for number in words
    ] * 2
    assert summary["counts"]["read"] == 10
    assert sum(summary["counts"]["dropped"].values()) + summary["counts"]["kept"] == 10
    assert sum(summary["histograms"]["judge_score"]["counts"]) == 10
    assert [summary["asked"][0][key] for key in ("asked", "unusable")] == [5, 0]


def test_a_template_and_a_schema_of_ones_own_ask_and_answer_otherwise(
    ran: Ran, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "mine.j2").write_text("{{ source }} at {{ metadata.place }}: {{ text|upper }} {{ url }}")
    endpoint.behaviour = lambda asked, before: json.dumps({"is_loud": asked.isupper(), "first": asked[:3], "n": 1})
    answer = {
        "type": "object",
        "required": ["is_loud"],
        "properties": {"is_loud": {"type": "boolean"}, "first": {"type": "string"}, "n": {"type": "integer"}},
    }
    summary, rows = ran(template=str(tmp_path / "mine.j2"), answer=answer, max={"judge_is_loud": 0}, characters=7)
    asked = [{"role": "user", "content": "web at 0: XYZZY A https://example.org/0/0/0"}]
    assert asked in [body["messages"] for body in endpoint.bodies]
    assert (rows[0]["judge_is_loud"], rows[0]["judge_first"], rows[0]["judge_n"]) == (False, "web", 1.0)
    assert summary["counts"]["kept"] == 10


def test_a_document_without_a_usable_answer_is_quarantined_or_passes(ran: Ran, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: (
        "I cannot say." if "nothing here" in asked or "cannot" in asked else (scored(asked))
    )
    with pytest.raises(
        QuarantineError,
        match=r"2 of 10 records .* there is no JSON object in it \(after one repair\): "
        r"I cannot say",
    ):
        ran(work="one/work")
    summary, rows = ran(max_quarantined=0.5)
    assert [row["reason"] for row in rows].count("quarantine") == 2
    assert (summary["counts"]["quarantined"], summary["counts"]["kept"], summary["unusable"]) == (2, 8, 2)
    summary, rows = ran(work="two/work", unusable="pass", min={"judge_score": 0})
    assert (summary["counts"]["quarantined"], summary["counts"]["kept"], summary["unusable"]) == (0, 10, 2)
    assert [row["judge_score"] for row in rows].count(None) == 2


def test_two_judges_are_asked_about_the_same_documents_and_their_agreement_is_measured(
    ran: Ran, endpoint: Endpoint
) -> None:
    def strict(asked: str, before: int) -> str:
        less = endpoint.bodies[-1]["model"] == "strict"
        return json.dumps({"score": max(0, json.loads(scored(asked))["score"] - less)})

    endpoint.behaviour = strict
    summary, rows = ran(second={"endpoint": endpoint.url, "model": "strict"}, max={"second_score": 3})
    assert [row["second_score"] for row in rows] == [max(row["judge_score"] - 1, 0) for row in rows]
    found = summary["agreement"]["score"]
    assert (found["documents"], found["same"], found["difference"]) == (10, 0.0, 1.0)
    assert found["correlation"] == pytest.approx(1.0)
    assert [one["model"] for one in summary["asked"]] == ["small", "strict"]


def test_agreement_is_that_of_the_textbook_whatever_the_parts_in_which_it_was_counted() -> None:
    """Cohen (1960): po 0.7, pe 0.5 -> kappa 0.4; scores of 0 and 1, so that the weighted one is the same."""
    first = np.array([1.0] * 25 + [0.0] * 25)
    second = np.array([1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15)
    whole = agreement(count_pairs(first, second))
    assert whole["kappa"] == pytest.approx(0.4)
    assert whole["weighted_kappa"] == pytest.approx(0.4)
    assert whole["correlation"] == pytest.approx(float(np.corrcoef(first, second)[0, 1]))
    parts = [count_pairs(first[at::3], second[at::3]) for at in range(3)]
    assert agreement(add_counts(parts)) == pytest.approx(whole)
    with_nan = count_pairs(np.append(first, np.nan), np.append(second, 1.0))
    assert agreement(with_nan) == pytest.approx(whole)
    assert agreement(count_pairs(np.ones(3), np.ones(3)))["kappa"] is None
    assert agreement(count_pairs(np.zeros(0), np.zeros(0)))["documents"] == 0


def test_a_stage_that_its_budget_ends_resumes_with_more_of_it(ran: Ran, endpoint: Endpoint) -> None:
    model = {"endpoint": endpoint.url, "model": "small", "concurrency": 1}
    with pytest.raises(BudgetSpentError, match="judge: the budget of 3 requests does not cover one more"):
        ran(model={**model, "budget": {"requests": 3}})
    summary, _ = ran(model={**model, "budget": {"requests": 5}})
    assert summary["counts"]["kept"] == 10
    assert set(endpoint.answered.values()) == {1}


def unreliable(seed: int) -> Callable[[str, int], Does]:
    draw = random.Random(seed)

    def behave(asked: str, before: int) -> Does:
        faults: list[Does] = [Drop(), Refuse(500), Refuse(429), Cut("half"), Raw(b"oops"), '{"score": ', "nonsense"]
        return draw.choice(faults) if draw.random() < 0.3 else json.dumps({"score": 3})

    return behave


@pytest.mark.parametrize(
    "kills",
    [
        12,
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)]),
    ],
)
def test_kills_and_faults_lose_nothing_ask_nothing_twice_and_the_counts_balance(
    ran: Ran, endpoint: Endpoint, tmp_path: Path, kills: int
) -> None:
    """Killed between any two requests: what was answered is not asked again, but for what was on its way."""
    at_once, copies = 4, max(4, kills // 8)
    behave, draw = unreliable(kills), random.Random(kills)
    (tmp_path / "own.j2").write_text("{{ locator }}: {{ text }}")
    distinct = {
        "model": {"endpoint": endpoint.url, "model": "small", "concurrency": at_once},
        "template": str(tmp_path / "own.j2"),
        "max_quarantined": 1.0,
    }
    child = 0
    left = [0]

    def deadly(asked: str, before: int) -> Does:
        left[0] -= 1
        if left[0] == 0 and child:
            os.kill(child, signal.SIGKILL)
        return behave(asked, before)

    endpoint.behaviour = deadly
    done = 0
    for _ in range(kills):
        left[0] = draw.randint(1, 6)
        child = os.fork()
        if child == 0:
            try:
                ran(6, copies, **distinct)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        done += os.WIFSIGNALED(status)
    child = 0
    summary, rows = ran(6, copies, **distinct)
    counts = summary["counts"]
    assert counts["read"] == len(rows) == 30 * copies == counts["kept"] + counts["quarantined"]
    assert counts["quarantined"] == summary["unusable"]
    assert done > kills // 4
    assert len(endpoint.answered) >= 30 * copies
    twice = sum(number - 1 for number in endpoint.answered.values())
    assert twice <= at_once * done


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min": {"judge_scor": 3}}, "did you mean 'judge_score'"),
        ({"min": {"second_score": 3}}, "'second_score' is not a measured column of numbers"),
        ({"answer": {"type": "array"}}, "give a JSON schema with `type: object` and `properties`"),
        ({"answer": {"type": "object", "properties": {"score": {}}}}, r"answer.properties.score: give it a `type`"),
        ({"model": {"model": "m"}}, "give `endpoint`, or `folder`"),
        ({"model": {"endpoint": "localhost:8000", "model": "m"}}, "'localhost:8000' is not an address"),
        ({"model": {"endpoint": "http://h/v1"}}, "give `model`, the endpoint's name of the model"),
        (
            {"model": {"folder": "m", "server_options": ["--port"]}},
            "`server_options`; remove it, or add `server: vllm`",
        ),
        ({"model": {"folder": "m", "body": {"stop": "."}}}, "`body`; remove it, or add `server: vllm`"),
        ({"model": {"folder": "m", "response_format": "json_schema"}}, "`response_format`; remove it"),
        (
            {"model": {"endpoint": "http://h/v1", "model": "m", "budget": {"money": 3}}},
            "budget.money needs `prompt_price`",
        ),
        ({"model": {"endpoint": "http://h/v1", "model": "m", "body": {"n": 2}}}, "body.n is set by other keys"),
        ({"model": {"endpoint": "http://h/v1", "model": "m", "api_key_env": "sk-1"}}, "String should match pattern"),
    ],
)
def test_what_a_judge_cannot_be_is_said_before_any_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Judge.model_validate({"model": {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}, **settings})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ txt }}", r"mine.j2: there is no 'txt', did you mean 'text'\?; templates get text"),
        ("a\n{% if %}", "mine.j2, line 2: Expected an expression"),
        ("{{ metadata.nothing }}", "UndefinedError: 'dict object' has no attribute 'nothing'"),
        ("{{ text.__class__.__mro__ }}", "SecurityError|UndefinedError"),
        ("{{ metadata.update({}) }}", "SecurityError"),
    ],
)
def test_a_template_is_checked_and_sandboxed(text: str, said: str) -> None:
    template = PromptTemplate("mine.j2", text)

    def use() -> None:
        template.check(judge.GIVEN)
        template.fill(dict.fromkeys(judge.GIVEN, "") | {"metadata": {}})

    with pytest.raises(TemplateProblemError, match=said):
        use()
