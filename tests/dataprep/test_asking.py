"""LLM requests: no answer is lost or requested twice, whatever the endpoint does, and
spending is bounded.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.llm import client as llm_client
from gristmill.dataprep.llm.answer_store import KeptAnswers, forget_answers
from gristmill.dataprep.llm.client import Asking, AskingError, BudgetSpentError
from gristmill.dataprep.llm.local_endpoint import ServerError
from gristmill.dataprep.llm.prompting import Answer, Request, prompt, read_json_answer
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.steps.asked_model import AskedModel
from tests.chat_endpoint import Cut, Does, Drop, Ended, Endpoint, Late, Raw, Refuse
from tests.dataprep.document_shards import MakeContext

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 5}},
    "required": ["score"],
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(llm_client, "MOST_WAIT_SECONDS", 0.002)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        yield server


def model_at(endpoint: Endpoint, **settings: Any) -> AskedModel:
    return AskedModel.model_validate(
        {"endpoint": endpoint.url, "model": "small", **settings}
    )


@pytest.fixture
def ask(endpoint: Endpoint, make_context: MakeContext) -> Any:
    """Ask the endpoint, or another model."""

    def asking(
        requests: Sequence[Request],
        model: AskedModel | None = None,
        work: str = "work",
        answers: Any = None,
        total: int | None = None,
        **settings: Any,
    ) -> list[Answer]:
        context = make_context(work, answers=answers)
        model = model or model_at(endpoint, **settings)
        with Asking(model, context, total) as session:
            return list(session.answers(requests))

    return asking


def prompts(number: int, **settings: Any) -> list[Any]:
    return [prompt(f"prompt {place}", **settings) for place in range(number)]


def texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def test_answers_keep_the_order_of_requests_within_the_concurrency_limit(
    ask: Any, endpoint: Endpoint
) -> None:
    answers = ask(prompts(50), concurrency=4)
    assert texts(answers) == [f"answer to prompt {place}" for place in range(50)]
    assert endpoint.most_at_once <= 4


def test_only_changed_prompts_are_requested_again(
    ask: Any, endpoint: Endpoint, tmp_path: Path
) -> None:
    answers = tmp_path / "store" / "answers"
    first = ask(prompts(10), work="one/work", answers=answers)
    changed = [*prompts(9), prompt("another")]
    again = ask(changed, work="two/work", answers=answers)
    assert texts(again) == [*texts(first)[:9], "answer to another"]
    assert endpoint.asked == {f"prompt {place}": 1 for place in range(10)} | {
        "another": 1
    }


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5}, {"model": "large"}, {"seed": 1}, {"system": "Be brief."}],
)
def test_generation_settings_are_part_of_the_key(
    ask: Any, endpoint: Endpoint, settings: dict[str, Any]
) -> None:
    for changes in ({}, settings):
        ask(prompts(2), model_at(endpoint, **changes))
    assert endpoint.asked == {"prompt 0": 2, "prompt 1": 2}


def test_endpoint_and_limits_are_not_part_of_the_key(ask: Any) -> None:
    with Endpoint() as second_endpoint:
        ask(prompts(3))
        moved = model_at(
            second_endpoint,
            concurrency=2,
            timeout_seconds=5,
            prompt_price=1,
            budget={"requests": 9},
        )
        ask(prompts(3), moved)
        assert not second_endpoint.asked


def test_repeated_prompt_is_requested_once_per_answer_number(
    ask: Any, endpoint: Endpoint
) -> None:
    same = [prompt("one", number=number) for number in (0, 1, 0, 2, 1)]
    assert len(ask(same, seed=7)) == 5
    assert sorted(body["seed"] for body in endpoint.bodies) == [7, 8, 9]


FAULTS: list[Does] = [
    Drop(),
    Refuse(500),
    Refuse(503),
    Refuse(429, headers={"retry-after": "0.001"}),
    Cut("half"),
    Raw(b"<html>busy</html>"),
    Raw(b"{}"),
    Raw(b'{"choices": []}'),
    Refuse(408),
]


def test_unreliable_endpoint_loses_and_repeats_no_answer(
    ask: Any, endpoint: Endpoint
) -> None:
    draw = random.Random(18)

    def unreliable(text: str, before: int) -> Does:
        return draw.choice(FAULTS) if draw.random() < 0.4 else f"answer to {text}"

    endpoint.behaviour = unreliable
    answers = ask(prompts(120))
    assert texts(answers) == [f"answer to prompt {place}" for place in range(120)]
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(120)}
    assert endpoint.asked.total() > 150


def test_request_is_repeated_after_its_timeout(ask: Any, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: (
        Late("late") if before == 0 else "in time"
    )
    answers = ask(prompts(2), timeout_seconds=0.2)
    assert texts(answers) == ["in time", "in time"]


def test_requests_fail_over_to_another_endpoint(ask: Any, endpoint: Endpoint) -> None:
    with Endpoint() as closed:
        closed_url = closed.url
    model = AskedModel(endpoint=(closed_url, endpoint.url), model="small")
    assert len(ask(prompts(10), model)) == 10


def test_retry_after_beyond_the_patience_ends_the_stage(
    ask: Any, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(
        429, headers={"Retry-After": "900"}
    )
    with pytest.raises(AskingError, match=r"stage: .*http://127.* 429 .*900 s.* kept"):
        ask(prompts(1), patience_seconds=60)
    assert endpoint.asked.total() == 1


def test_run_after_an_outage_requests_only_missing_answers(
    ask: Any, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda asked, before: (
        f"answer to {asked}" if asked < "prompt 5" else Refuse(502)
    )
    impatient = model_at(endpoint, patience_seconds=0.05)
    with pytest.raises(AskingError, match=r"http://127.* 502 .* kept"):
        ask(prompts(10), impatient)
    endpoint.behaviour = lambda asked, before: f"answer to {asked}"
    assert len(ask(prompts(10), impatient)) == 10
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(10)}


def test_unanswered_request_can_be_quarantined(ask: Any, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: (
        Refuse(500, "out of memory") if asked == "prompt 1" else "good"
    )
    model = model_at(endpoint, patience_seconds=0.05, unanswered="quarantine")
    first, second, third = ask(prompts(3), model)
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert "500 out of memory" in second.error


def test_client_error_fails_only_its_request_without_a_retry(
    ask: Any, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda asked, before: (
        Refuse(400, "too long") if asked == "prompt 1" else "good"
    )
    answers = ask(prompts(3))
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert "400 too long" in str(answers[1].error)
    assert endpoint.asked["prompt 1"] == 1


@pytest.mark.parametrize(
    ("status", "facts"),
    [
        (401, "401 .*key"),
        (404, "404 .*address.*model 'small'"),
        (301, "301 .*`endpoint`"),
    ],
)
def test_error_that_concerns_all_requests_ends_the_stage_at_once(
    ask: Any, endpoint: Endpoint, status: int, facts: str
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(status)
    with pytest.raises(AskingError, match=facts):
        ask(prompts(100), concurrency=2)
    assert endpoint.asked.total() <= 2


def test_api_key_comes_from_the_environment_and_is_never_written(
    ask: Any, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(endpoint, api_key_env="A_KEY_OF_MINE")
    monkeypatch.delenv("A_KEY_OF_MINE", raising=False)
    with pytest.raises(AskingError, match=r"\$A_KEY_OF_MINE.* not set"):
        ask(prompts(1), model)
    monkeypatch.setenv("A_KEY_OF_MINE", "sk-0123456789abcdef")
    ask(prompts(1), model)
    assert endpoint.headers["authorization"] == "Bearer sk-0123456789abcdef"
    endpoint.behaviour = lambda asked, before: Refuse(
        401, "the key sk-0123456789abcdef is unknown"
    )
    with pytest.raises(AskingError) as refused:
        ask([prompt("another")], model)
    assert "the key *** is unknown" in str(refused.value)
    assert "$A_KEY_OF_MINE" in str(refused.value)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-0123456789abcdef" not in path.read_bytes()


def test_request_budget_counts_all_attempts_and_keeps_answers(
    ask: Any, endpoint: Endpoint
) -> None:
    limited = model_at(endpoint, budget={"requests": 7})
    for _ in range(2):
        with pytest.raises(
            BudgetSpentError,
            match=r"stage: .*7 of 20 requests with 42 tokens.*`budget.requests`",
        ):
            ask(prompts(20), limited, work="out/work", total=20)
    assert endpoint.answered.total() == 7
    raised = model_at(endpoint, budget={"requests": 20})
    assert len(ask(prompts(20), raised, work="out/work", total=20)) == 20
    assert set(endpoint.answered.values()) == {1}


@pytest.mark.parametrize(
    ("budget", "prices"),
    [
        ({"tokens": 2000}, {}),
        ({"money": 0.004}, {"prompt_price": 2.0, "answer_price": 2.0}),
    ],
)
def test_token_or_money_budget_is_never_exceeded(
    endpoint: Endpoint,
    make_context: MakeContext,
    budget: dict[str, float],
    prices: dict[str, float],
) -> None:
    endpoint.behaviour = lambda asked, before: "word " * 40
    model = model_at(endpoint, budget=budget, max_tokens=50, **prices)
    with pytest.raises(BudgetSpentError), Asking(model, make_context("work")) as asking:
        list(asking.answers(prompts(200)))
    assert 1500 < asking.tally.spent.tokens <= 2000
    assert asking.tally.spent.requests == endpoint.answered.total()


def test_invalid_answer_is_repaired_once_and_then_quarantined(
    ask: Any, endpoint: Endpoint
) -> None:
    def forgetful(text: str, before: int) -> Does:
        if text.startswith("This answer cannot be used"):
            return (
                '{"score": 4}'
                if len(endpoint.bodies[-1]["messages"][0]["content"]) % 2
                else '{"score": 9}'
            )
        return {
            "p0": 'Sure! ```json\n{"score": 3}\n```',
            "p22": '{"score": "high"}',
            "p3": '{"scor',
        }[text]

    endpoint.behaviour = forgetful
    requests = [prompt(text, SCHEMA) for text in ("p0", "p22", "p3")]
    good, mended, bad = ask(requests)
    assert (good.value, good.repaired) == ({"score": 3}, False)
    assert (mended.value, mended.repaired, mended.error) == ({"score": 4}, True, None)
    assert bad.error is not None
    assert bad.error.startswith("$.score: 9 is greater than the maximum of 5")
    number = len(endpoint.bodies)
    assert [answer.error for answer in ask(requests)] == [
        None,
        None,
        bad.error,
    ]
    assert len(endpoint.bodies) == number


def test_truncated_answer_names_max_tokens(ask: Any, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: Ended('{"score": 3, "reason": "because')
    (answer,) = ask([prompt("p", SCHEMA)], max_tokens=9)
    assert "9 tokens (`max_tokens`)" in str(answer.error)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 1}', {"score": 1}),
        ('<think>{"score": 5}</think>{"score": 1}', {"score": 1}),
        ('Here: {"score": 1}. Done', {"score": 1}),
        ('{} then {"score": 1}', {"score": 1}),
        ('{"a": {"score": 1}', {"score": 1}),
        ("score: 1", None),
        ("[1]", None),
        ("", None),
        ("{" * 1000, None),
    ],
)
def test_json_is_extracted_from_surrounding_prose(text: str, value: Any) -> None:
    answer, error = read_json_answer(text, SCHEMA)
    assert answer == value
    assert (error is None) == (value is not None)


def test_response_format_is_sent_as_configured(ask: Any, endpoint: Endpoint) -> None:
    endpoint.behaviour = lambda asked, before: '{"score": 1}'
    for form in ("none", "json_object", "json_schema"):
        ask([prompt("p", SCHEMA)], response_format=form)
    assert [body.get("response_format") for body in endpoint.bodies] == [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    ]


def test_truncated_line_of_kept_answers_is_requested_again(
    ask: Any, endpoint: Endpoint, tmp_path: Path
) -> None:
    ask(prompts(5), concurrency=1)
    (file,) = (tmp_path / "work" / "answers").rglob("*.jsonl")
    os.truncate(file, file.stat().st_size - 9)
    assert texts(ask(prompts(5)))[4] == "answer to prompt 4"
    assert endpoint.asked.total() == 6


def test_answers_are_kept_on_an_object_store(
    ask: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upath import UPath

    from gristmill.dataprep.llm import answer_store

    monkeypatch.setattr(answer_store, "UNSAVED_ANSWERS", 3)
    bucket = UPath("memory://bucket/answers")
    for _ in range(2):
        assert len(ask(prompts(10), answers=bucket)) == 10
    assert endpoint.asked.total() == 10


def test_progress_counts_answered_requests(endpoint: Endpoint, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    context = Context(work=tmp_path / "work", emit=events.append)
    with Asking(model_at(endpoint), context, total=5) as session:
        assert len(list(session.answers(prompts(5)))) == 5
    assert events[-1] == {
        "event": "progress",
        "done": 5,
        "total": 5,
        "unit": "requests",
        "job": "ask",
    }


def test_kept_answer_equals_the_received_one_for_any_characters(
    ask: Any, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda asked, before: Raw(
        b'{"choices": [{"message": {"content": "a\\ud800b\\u0000\\u2028c\\nd"}}]}'
    )
    first, second = (texts(ask(prompts(1))) for _ in range(2))
    assert first == second == ["a\ufffdb\0\u2028c\nd"]


@pytest.mark.slow
def test_vllm_serves_a_model_folder(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    model = AskedModel(
        folder=OutsidePath(tmp_path / "tiny"),
        server="vllm",
        server_options=("--max-model-len", "99"),
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match=r"vLLM.* not installed.*gristmill\[vllm\]'"):
        ask(prompts(1), model)
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    (answer,) = ask(prompts(1), model)
    command = answer.text.split()
    assert command[:3] == ["serve", str(tmp_path / "tiny"), "--host"]
    assert command[-4:] == ["--served-model-name", "tiny", "--max-model-len", "99"]
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no GPU')\n")
    with pytest.raises(ServerError, match=r"tiny .*status 1.*no GPU"):
        ask([prompt("another")], model)


STAND_IN = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"choices": [{"message": {"content": " ".join(sys.argv[1:])}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A program that is called like vLLM, and answers with its own arguments."""


@pytest.mark.parametrize("root", ["here", "memory://forgotten/answers"])
def test_answers_are_forgotten_with_any_of_their_documents(
    ask: Any, endpoint: Endpoint, tmp_path: Path, root: str
) -> None:
    from upath import UPath

    bucket = tmp_path / "answers" if root == "here" else UPath(root)
    first, second, third = ("1" * 32, "2" * 32, "3" * 32)

    def answer(name: str, *about: tuple[str, str | None]) -> None:
        ask([prompt(text, about=of) for text, of in about], work=name, answers=bucket)

    def forgotten(*documents: str, remove: bool = True) -> tuple[int, int]:
        counts = forget_answers(bucket, documents, remove)
        return counts["answers"], counts["unknown"]

    answer(
        "first",
        ("same", first),
        ("same", second),
        ("its own", first),
        ("third", third),
        ("nobody's", None),
    )
    answer("again", ("third", third), ("third", second))
    assert forgotten(first, remove=False) == (2, 1)
    assert forgotten(second, remove=False) == (2, 1)
    assert endpoint.asked.total() == 4
    assert forgotten(first) == (2, 1)
    assert forgotten(first) == (0, 1)
    assert forgotten(second, remove=False) == (1, 1)  # `third`, which is about both
    answer("once more", ("third", third), ("nobody's", third), ("same", second))
    assert endpoint.asked == {"same": 2, "its own": 1, "third": 1, "nobody's": 1}
    assert forgotten(third) == (2, 0)
    assert forgotten(second) == (1, 0)


def test_forgetting_answers_does_not_disturb_readers_and_writers(
    tmp_path: Path,
) -> None:
    keys = [digit * 64 for digit in "abc"]
    kept = KeptAnswers(tmp_path, {}, "one")

    def keep(key: str, text: str, about: str) -> None:
        kept.keep(key, {"text": text, "prompt_tokens": 1, "answer_tokens": 1}, about)

    keep(keys[0], "first", "1" * 32)
    keep(keys[1], "second", "2" * 32)
    assert forget_answers(tmp_path, ["1" * 32], remove=True) == {
        "answers": 1,
        "unknown": 0,
    }
    keep(keys[2], "thïrd", "3" * 32)
    kept.note(keys[2], "2" * 32)
    assert kept.find(keys[0]) is None
    assert [kept.find(key)["text"] for key in keys[1:]] == ["second", "thïrd"]
    kept.close()
    later = KeptAnswers(tmp_path, {}, "one")
    assert (len(later), later.spent.requests) == (2, 2)
    assert forget_answers(tmp_path, ["2" * 32], remove=True) == {
        "answers": 2,
        "unknown": 0,
    }
    assert [later.find(key) for key in keys] == [None] * 3
    later.close()
