"""The step `judge`: scores and reasons are columns, thresholds decide, and no answer is
lost to kills or faults.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.dataprep.conservation import QuarantineError
from gristmill.dataprep.llm import client as llm_client
from gristmill.dataprep.llm import judge
from gristmill.dataprep.llm.client import BudgetSpentError
from gristmill.dataprep.llm.prompt_templates import PromptTemplate, TemplateProblemError
from gristmill.mixtures.annotators import read_annotators
from gristmill.mixtures.steps.judge import Judge
from tests.chat_endpoint import Cut, Does, Drop, Endpoint, Raw, Refuse
from tests.dataprep.document_shards import MakeContext
from tests.dataprep.own_steps import TEXTS, write_documents, written

TEXT = re.compile(r"<text>\n(.*)\n</text>", re.DOTALL)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(llm_client, "MOST_WAIT_SECONDS", 0.002)


def scored(prompt: str, before: int = 0) -> str:
    """Answer with the number of words, as a judge that counts them."""
    match = TEXT.search(prompt)
    number = len((match[1] if match else prompt).split())
    return json.dumps({"score": min(number, 5), "reason": f"it has {number} words"})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(scored) as server:
        yield server


RunJudge = Callable[..., tuple[dict[str, Any], list[Any]]]


@pytest.fixture
def run_judge(
    endpoint: Endpoint, tmp_path: Path, make_context: MakeContext
) -> RunJudge:
    """Judge documents: (shards, copies, name of the work folder, **settings) ->
    summary, rows.
    """

    def run(
        shards: int = 2, copies: int = 1, work: str = "out/work", **settings: Any
    ) -> tuple[dict[str, Any], list]:
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


def test_scores_and_reasons_are_columns_and_thresholds_decide(
    run_judge: RunJudge,
) -> None:
    summary, rows = run_judge(min={"judge_score": 3}, max={"judge_score": 4})
    words = [len(text.split()) for text in TEXTS]
    assert [row["judge_score"] for row in rows] == [
        float(min(number, 5)) for number in words
    ] * 2
    assert [row["judge_reason"] for row in rows] == [
        f"it has {number} words" for number in words
    ] * 2
    assert [row["reason"] for row in rows] == [
        "judge/min_judge_score"
        if number < 3
        else "judge/max_judge_score"
        if number > 4
        else None
        for number in words
    ] * 2
    assert summary.counts["read"] == 10
    assert sum(summary.counts["dropped"].values()) + summary.counts["kept"] == 10
    assert sum(summary.histograms["judge_score"]["counts"]) == 10
    assert [summary.asked[0][key] for key in ("asked", "unusable")] == [5, 0]


def test_custom_template_and_answer_schema(
    run_judge: RunJudge, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "mine.j2").write_text(
        "{{ source }} at {{ metadata.place }}: {{ text|upper }} {{ url }}"
    )
    endpoint.behaviour = lambda asked, before: json.dumps(
        {"is_loud": asked.isupper(), "first": asked[:3], "n": 1}
    )
    answer = {
        "type": "object",
        "required": ["is_loud"],
        "properties": {
            "is_loud": {"type": "boolean"},
            "first": {"type": "string"},
            "n": {"type": "integer"},
        },
    }
    summary, rows = run_judge(
        template=str(tmp_path / "mine.j2"),
        answer=answer,
        max={"judge_is_loud": 0},
        characters=7,
    )
    messages = [
        {"role": "user", "content": "web at 0: XYZZY A https://example.org/0/0/0"}
    ]
    assert messages in [body["messages"] for body in endpoint.bodies]
    assert (rows[0]["judge_is_loud"], rows[0]["judge_first"], rows[0]["judge_n"]) == (
        False,
        "web",
        1.0,
    )
    assert summary.counts["kept"] == 10


def test_answers_of_a_classifier_match_a_pattern(
    run_judge: RunJudge, endpoint: Endpoint
) -> None:
    answers = iter(["safe", "unsafe\nS1,S10", "perhaps", "safe", "safe"])
    endpoint.behaviour = lambda asked, before: next(answers)
    settings = read_annotators()["llama-guard-3"].settings
    model = {"endpoint": endpoint.url, "model": "guard", "concurrency": 1}
    summary, rows = run_judge(shards=1, unusable="pass", **{**settings, "model": model})
    assert [row["judge_verdict"] for row in rows] == [
        "safe",
        "unsafe",
        None,
        "safe",
        "safe",
    ]
    assert rows[1]["judge_hazards"] == "S1,S10"
    assert summary.unusable == 1
    assert len(endpoint.bodies) == 5  # no answer is asked for again


def test_arrays_are_joined(run_judge: RunJudge, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: json.dumps({"kinds": ["a", "b"]})
    answer = {
        "type": "object",
        "properties": {"kinds": {"type": "array", "items": {"type": "string"}}},
    }
    _, rows = run_judge(prompt="<{{ text }}>", answer=answer)
    assert {row["judge_kinds"] for row in rows} == {"a,b"}
    assert endpoint.bodies[0]["messages"][0]["content"].startswith("<")


def test_document_without_a_usable_answer_is_quarantined_or_passes(
    run_judge: RunJudge, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda asked, before: (
        "I cannot say."
        if "nothing here" in asked or "cannot" in asked
        else (scored(asked))
    )
    with pytest.raises(QuarantineError, match=r"2 of 10 .*JSON object.*I cannot say"):
        run_judge(work="one/work")
    summary, rows = run_judge(max_quarantined=0.5)
    assert [row["reason"] for row in rows].count("quarantine") == 2
    assert (
        summary.counts["quarantined"],
        summary.counts["kept"],
        summary.unusable,
    ) == (2, 8, 2)
    summary, rows = run_judge(work="two/work", unusable="pass", min={"judge_score": 0})
    assert (
        summary.counts["quarantined"],
        summary.counts["kept"],
        summary.unusable,
    ) == (0, 10, 2)
    assert [row["judge_score"] for row in rows].count(None) == 2


def test_stage_resumes_with_a_larger_budget(
    run_judge: RunJudge, endpoint: Endpoint
) -> None:
    model = {"endpoint": endpoint.url, "model": "small", "concurrency": 1}
    with pytest.raises(BudgetSpentError, match=r"judge: .*3 requests"):
        run_judge(model={**model, "budget": {"requests": 3}})
    summary, _ = run_judge(model={**model, "budget": {"requests": 5}})
    assert summary.counts["kept"] == 10
    assert set(endpoint.answered.values()) == {1}


def unreliable(seed: int) -> Callable[[str, int], Does]:
    rng = random.Random(seed)

    def behave(asked: str, before: int) -> Does:
        faults: list[Does] = [
            Drop(),
            Refuse(500),
            Refuse(429),
            Cut("half"),
            Raw(b"oops"),
            '{"score": ',
            "nonsense",
        ]
        return rng.choice(faults) if rng.random() < 0.3 else json.dumps({"score": 3})

    return behave


@pytest.mark.parametrize(
    "kills",
    [
        12,
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)]),
    ],
)
def test_kills_and_faults_lose_and_repeat_no_answer(
    run_judge: RunJudge, endpoint: Endpoint, tmp_path: Path, kills: int
) -> None:
    """Killed between any two requests: only requests in flight are repeated."""
    concurrency, copies = 4, max(4, kills // 8)
    behave, rng = unreliable(kills), random.Random(kills)
    (tmp_path / "own.j2").write_text("{{ locator }}: {{ text }}")
    distinct = {
        "model": {
            "endpoint": endpoint.url,
            "model": "small",
            "concurrency": concurrency,
        },
        "template": str(tmp_path / "own.j2"),
        "max_quarantined": 1.0,
    }
    child = 0
    requests_until_kill = [0]

    def deadly(asked: str, before: int) -> Does:
        requests_until_kill[0] -= 1
        if requests_until_kill[0] == 0 and child:
            os.kill(child, signal.SIGKILL)
        return behave(asked, before)

    endpoint.behaviour = deadly
    killed_runs = 0
    for _ in range(kills):
        requests_until_kill[0] = rng.randint(1, 6)
        child = os.fork()
        if child == 0:
            try:
                run_judge(6, copies, **distinct)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        killed_runs += os.WIFSIGNALED(status)
    child = 0
    summary, rows = run_judge(6, copies, **distinct)
    counts = summary.counts
    assert (
        counts["read"]
        == len(rows)
        == 30 * copies
        == counts["kept"] + counts["quarantined"]
    )
    assert counts["quarantined"] == summary.unusable
    assert killed_runs > kills // 4
    assert len(endpoint.answered) >= 30 * copies
    repeated = sum(number - 1 for number in endpoint.answered.values())
    assert repeated <= concurrency * killed_runs


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"min": {"judge_scor": 3}}, "did you mean 'judge_score'"),
        ({"answer": {"type": "array"}}, "`type: object` and `properties`"),
        (
            {"answer": {"type": "object", "properties": {"score": {}}}},
            r"answer\.properties\.score: .*`type`",
        ),
        ({"model": {"model": "m"}}, "`endpoint`.*`folder`"),
        ({"model": {"endpoint": "localhost:8000", "model": "m"}}, "'localhost:8000'"),
        ({"model": {"endpoint": "http://h/v1"}}, "`model`"),
        (
            {"model": {"folder": "m", "server_options": ["--port"]}},
            "`server_options`.*`server: vllm`",
        ),
        ({"model": {"folder": "m", "body": {"stop": "."}}}, "`body`.*`server: vllm`"),
        (
            {"model": {"folder": "m", "response_format": "json_schema"}},
            "`response_format`",
        ),
        (
            {
                "model": {
                    "endpoint": "http://h/v1",
                    "model": "m",
                    "budget": {"money": 3},
                }
            },
            r"budget\.money .*`prompt_price`",
        ),
        (
            {"model": {"endpoint": "http://h/v1", "model": "m", "body": {"n": 2}}},
            r"body\.n",
        ),
        (
            {"model": {"endpoint": "http://h/v1", "model": "m", "api_key_env": "sk-1"}},
            "api_key_env",
        ),
    ],
)
def test_invalid_judge_settings_are_rejected(
    settings: dict[str, Any], facts: str
) -> None:
    with pytest.raises(ValidationError, match=facts):
        Judge.model_validate(
            {"model": {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}, **settings}
        )


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("{{ txt }}", r"mine.j2: .*'txt', did you mean 'text'\?"),
        ("a\n{% if %}", "mine.j2, line 2: Expected an expression"),
        (
            "{{ metadata.nothing }}",
            "UndefinedError: 'dict object' has no attribute 'nothing'",
        ),
        ("{{ text.__class__.__mro__ }}", "SecurityError|UndefinedError"),
        ("{{ metadata.update({}) }}", "SecurityError"),
    ],
)
def test_template_is_checked_and_sandboxed(text: str, facts: str) -> None:
    template = PromptTemplate("mine.j2", text)

    def use() -> None:
        template.check(judge.GIVEN)
        template.fill(dict.fromkeys(judge.GIVEN, "") | {"metadata": {}})

    with pytest.raises(TemplateProblemError, match=facts):
        use()
