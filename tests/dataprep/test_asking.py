"""LLM requests: no answer is lost or requested twice, whatever the endpoint does, and
spending is bounded.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def ask(
    requests: Iterable[Request],
    model: AskedModel,
    context: Context,
    total: int | None = None,
) -> Iterator[Answer]:
    with Asking(model, context, total) as asking:
        yield from asking.answers(requests)


def prompts(number: int, **settings: Any) -> list[Any]:
    return [prompt(f"prompt {place}", **settings) for place in range(number)]


def texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.text for answer in answers]


def test_answers_keep_the_order_of_requests_within_the_concurrency_limit(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    answers = list(
        ask(prompts(50), model_at(endpoint, concurrency=4), make_context("work"))
    )
    assert texts(answers) == [f"answer to prompt {place}" for place in range(50)]
    assert endpoint.most_at_once <= 4


def test_only_changed_prompts_are_requested_again(
    endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    answers = tmp_path / "store" / "answers"
    first = list(
        ask(prompts(10), model_at(endpoint), make_context("one/work", answers=answers))
    )
    changed = [*prompts(9), prompt("another")]
    again = list(
        ask(changed, model_at(endpoint), make_context("two/work", answers=answers))
    )
    assert texts(again) == [*texts(first)[:9], "answer to another"]
    assert endpoint.asked == {f"prompt {place}": 1 for place in range(10)} | {
        "another": 1
    }


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5}, {"model": "large"}, {"seed": 1}, {"system": "Be brief."}],
)
def test_generation_settings_are_part_of_the_key(
    endpoint: Endpoint, make_context: Callable[..., Context], settings: dict[str, Any]
) -> None:
    for changes in ({}, settings):
        list(ask(prompts(2), model_at(endpoint, **changes), make_context("work")))
    assert endpoint.asked == {"prompt 0": 2, "prompt 1": 2}


def test_endpoint_and_limits_are_not_part_of_the_key(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    with Endpoint() as second_endpoint:
        list(ask(prompts(3), model_at(endpoint), make_context("work")))
        moved = model_at(
            second_endpoint,
            concurrency=2,
            timeout_seconds=5,
            prompt_price=1,
            budget={"requests": 9},
        )
        list(ask(prompts(3), moved, make_context("work")))
        assert not second_endpoint.asked


def test_repeated_prompt_is_requested_once_per_answer_number(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    same = [prompt("one", number=number) for number in (0, 1, 0, 2, 1)]
    assert len(list(ask(same, model_at(endpoint, seed=7), make_context("work")))) == 5
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
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    draw = random.Random(18)

    def unreliable(text: str, before: int) -> Does:
        return draw.choice(FAULTS) if draw.random() < 0.4 else f"answer to {text}"

    endpoint.behaviour = unreliable
    answers = list(ask(prompts(120), model_at(endpoint), make_context("work")))
    assert texts(answers) == [f"answer to prompt {place}" for place in range(120)]
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(120)}
    assert endpoint.asked.total() > 150


def test_request_is_repeated_after_its_timeout(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: (
        Late("late") if before == 0 else "in time"
    )
    answers = list(
        ask(prompts(2), model_at(endpoint, timeout_seconds=0.2), make_context("work"))
    )
    assert texts(answers) == ["in time", "in time"]


def test_requests_fail_over_to_another_endpoint(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    with Endpoint() as closed:
        closed_url = closed.url
    model = AskedModel(endpoint=(closed_url, endpoint.url), model="small")
    assert len(list(ask(prompts(10), model, make_context("work")))) == 10


def test_retry_after_beyond_the_patience_ends_the_stage(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(
        429, headers={"Retry-After": "900"}
    )
    with pytest.raises(AskingError, match=r"stage: .*http://127.* 429 .*900 s.* kept"):
        list(
            ask(
                prompts(1),
                model_at(endpoint, patience_seconds=60),
                make_context("work"),
            )
        )
    assert endpoint.asked.total() == 1


def test_run_after_an_outage_requests_only_missing_answers(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: (
        f"answer to {asked}" if asked < "prompt 5" else Refuse(502)
    )
    impatient = model_at(endpoint, patience_seconds=0.05)
    with pytest.raises(AskingError, match=r"http://127.* 502 .* kept"):
        list(ask(prompts(10), impatient, make_context("work")))
    endpoint.behaviour = lambda asked, before: f"answer to {asked}"
    assert len(list(ask(prompts(10), impatient, make_context("work")))) == 10
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(10)}


def test_unanswered_request_can_be_quarantined(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: (
        Refuse(500, "out of memory") if asked == "prompt 1" else "good"
    )
    model = model_at(endpoint, patience_seconds=0.05, unanswered="quarantine")
    first, second, third = ask(prompts(3), model, make_context("work"))
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert "500 out of memory" in second.error


def test_client_error_fails_only_its_request_without_a_retry(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: (
        Refuse(400, "too long") if asked == "prompt 1" else "good"
    )
    answers = list(ask(prompts(3), model_at(endpoint), make_context("work")))
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
    endpoint: Endpoint, make_context: Callable[..., Context], status: int, facts: str
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(status)
    with pytest.raises(AskingError, match=facts):
        list(ask(prompts(100), model_at(endpoint, concurrency=2), make_context("work")))
    assert endpoint.asked.total() <= 2


def test_api_key_comes_from_the_environment_and_is_never_written(
    endpoint: Endpoint,
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_at(endpoint, api_key_env="A_KEY_OF_MINE")
    monkeypatch.delenv("A_KEY_OF_MINE", raising=False)
    with pytest.raises(AskingError, match=r"\$A_KEY_OF_MINE.* not set"):
        list(ask(prompts(1), model, make_context("work")))
    monkeypatch.setenv("A_KEY_OF_MINE", "sk-0123456789abcdef")
    list(ask(prompts(1), model, make_context("work")))
    assert endpoint.headers["authorization"] == "Bearer sk-0123456789abcdef"
    endpoint.behaviour = lambda asked, before: Refuse(
        401, "the key sk-0123456789abcdef is unknown"
    )
    with pytest.raises(AskingError) as refused:
        list(ask([prompt("another")], model, make_context("work")))
    assert "the key *** is unknown" in str(refused.value)
    assert "$A_KEY_OF_MINE" in str(refused.value)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-0123456789abcdef" not in path.read_bytes()


def test_request_budget_counts_all_attempts_and_keeps_answers(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    limited = model_at(endpoint, budget={"requests": 7})
    for _ in range(2):
        with pytest.raises(
            BudgetSpentError,
            match=r"stage: .*7 of 20 requests with 42 tokens.*`budget.requests`",
        ):
            list(ask(prompts(20), limited, make_context("out/work"), total=20))
    assert endpoint.answered.total() == 7
    raised = model_at(endpoint, budget={"requests": 20})
    assert len(list(ask(prompts(20), raised, make_context("out/work"), total=20))) == 20
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
    make_context: Callable[..., Context],
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
    endpoint: Endpoint, make_context: Callable[..., Context]
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
    good, mended, bad = ask(requests, model_at(endpoint), make_context("work"))
    assert (good.value, good.repaired) == ({"score": 3}, False)
    assert (mended.value, mended.repaired, mended.error) == ({"score": 4}, True, None)
    assert bad.error is not None
    assert bad.error.startswith("$.score: 9 is greater than the maximum of 5")
    number = len(endpoint.bodies)
    assert [
        answer.error
        for answer in ask(requests, model_at(endpoint), make_context("work"))
    ] == [
        None,
        None,
        bad.error,
    ]
    assert len(endpoint.bodies) == number


def test_truncated_answer_names_max_tokens(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Ended('{"score": 3, "reason": "because')
    (answer,) = ask(
        [prompt("p", SCHEMA)], model_at(endpoint, max_tokens=9), make_context("work")
    )
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


def test_response_format_is_sent_as_configured(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: '{"score": 1}'
    for form in ("none", "json_object", "json_schema"):
        list(
            ask(
                [prompt("p", SCHEMA)],
                model_at(endpoint, response_format=form),
                make_context("work"),
            )
        )
    assert [body.get("response_format") for body in endpoint.bodies] == [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    ]


def test_truncated_line_of_kept_answers_is_requested_again(
    endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    list(ask(prompts(5), model_at(endpoint, concurrency=1), make_context("work")))
    (file,) = (tmp_path / "work" / "answers").rglob("*.jsonl")
    os.truncate(file, file.stat().st_size - 9)
    assert (
        texts(list(ask(prompts(5), model_at(endpoint), make_context("work"))))[4]
        == "answer to prompt 4"
    )
    assert endpoint.asked.total() == 6


def test_answers_are_kept_on_an_object_store(
    endpoint: Endpoint,
    make_context: Callable[..., Context],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from upath import UPath

    from gristmill.dataprep.llm import answer_store

    monkeypatch.setattr(answer_store, "UNSAVED_ANSWERS", 3)
    bucket = UPath("memory://bucket/answers")
    for _ in range(2):
        assert (
            len(
                list(
                    ask(
                        prompts(10),
                        model_at(endpoint),
                        make_context("work", answers=bucket),
                    )
                )
            )
            == 10
        )
    assert endpoint.asked.total() == 10


def test_progress_counts_answered_requests(endpoint: Endpoint, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    list(
        ask(
            prompts(5),
            model_at(endpoint),
            Context(work=tmp_path / "work", emit=events.append),
            total=5,
        )
    )
    assert events[-1] == {
        "event": "progress",
        "done": 5,
        "total": 5,
        "unit": "requests",
        "job": "ask",
    }


def test_kept_answer_equals_the_received_one_for_any_characters(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Raw(
        b'{"choices": [{"message": {"content": "a\\ud800b\\u0000\\u2028c\\nd"}}]}'
    )
    first, second = (
        texts(list(ask(prompts(1), model_at(endpoint), make_context("work"))))
        for _ in range(2)
    )
    assert first == second == ["a\ufffdb\0\u2028c\nd"]


@pytest.mark.slow
def test_vllm_serves_a_model_folder(
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
        list(ask(prompts(1), model, make_context("work")))
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    (answer,) = ask(prompts(1), model, make_context("work"))
    command = answer.text.split()
    assert command[:3] == ["serve", str(tmp_path / "tiny"), "--host"]
    assert command[-4:] == ["--served-model-name", "tiny", "--max-model-len", "99"]
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no GPU')\n")
    with pytest.raises(ServerError, match=r"tiny .*status 1.*no GPU"):
        list(ask([prompt("another")], model, make_context("work")))


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
    root: str, endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    from upath import UPath

    bucket = tmp_path / "answers" if root == "here" else UPath(root)
    first, second, third = ("1" * 32, "2" * 32, "3" * 32)

    def answer(name: str, *about: tuple[str, str | None]) -> None:
        list(
            ask(
                [prompt(text, about=of) for text, of in about],
                model_at(endpoint),
                make_context(name, answers=bucket),
            )
        )

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
    kept.keep(
        keys[0], {"text": "first", "prompt_tokens": 1, "answer_tokens": 1}, "1" * 32
    )
    kept.keep(
        keys[1], {"text": "second", "prompt_tokens": 1, "answer_tokens": 1}, "2" * 32
    )
    assert forget_answers(tmp_path, ["1" * 32], remove=True) == {
        "answers": 1,
        "unknown": 0,
    }
    kept.keep(
        keys[2], {"text": "thïrd", "prompt_tokens": 1, "answer_tokens": 1}, "3" * 32
    )
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
