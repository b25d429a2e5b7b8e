"""Asking models: nothing is lost and nothing asked twice, whatever the endpoint does; what is spent is bounded."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.llm import llm_client
from gristmill.dataprep.llm.answer_store import KeptAnswers, forget_answers
from gristmill.dataprep.llm.llm_client import Asking, AskingError, BudgetSpentError, ask
from gristmill.dataprep.llm.local_endpoint import ServerError
from gristmill.dataprep.llm.prompting import Answer, prompt, read_json_answer
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.steps.asked_model import AskedModel
from tests.chat_endpoint import Cut, Does, Drop, Ended, Endpoint, Late, Raw, Refuse

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 5}},
    "required": ["score"],
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(llm_client, "MOST_WAIT_SECONDS", 0.002)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as serving:
        yield serving


def model_at(endpoint: Endpoint, **settings: Any) -> AskedModel:
    return AskedModel.model_validate({"endpoint": endpoint.url, "model": "small", **settings})


def prompts(number: int, **settings: Any) -> list[Any]:
    return [prompt(f"prompt {place}", **settings) for place in range(number)]


def texts(answers: Sequence[Answer]) -> list[str]:
    return [one.text for one in answers]


def test_answers_come_in_the_order_of_the_requests_and_as_many_at_once_as_allowed(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    answers = list(ask(prompts(50), model_at(endpoint, concurrency=4), make_context("work")))
    assert texts(answers) == [f"answer to prompt {place}" for place in range(50)]
    assert endpoint.most_at_once <= 4


def test_kept_answers_are_not_asked_for_again_and_one_changed_prompt_is(
    endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    answers = tmp_path / "store" / "answers"
    first = list(ask(prompts(10), model_at(endpoint), make_context("one/work", answers=answers)))
    changed = [*prompts(9), prompt("another")]
    again = list(ask(changed, model_at(endpoint), make_context("two/work", answers=answers)))
    assert texts(again) == [*texts(first)[:9], "answer to another"]
    assert endpoint.asked == {f"prompt {place}": 1 for place in range(10)} | {"another": 1}


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"model": "large"}, {"seed": 1}, {"system": "Be brief."}])
def test_other_settings_are_other_questions(
    endpoint: Endpoint, make_context: Callable[..., Context], settings: dict[str, Any]
) -> None:
    for changes in ({}, settings):
        list(ask(prompts(2), model_at(endpoint, **changes), make_context("work")))
    assert endpoint.asked == {"prompt 0": 2, "prompt 1": 2}


def test_a_file_of_kept_answers_is_opened_once_however_many_threads_read_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = KeptAnswers(tmp_path, {"model": "small"}, "one")
    first.keep("ab" * 32, {"text": "kept"})
    first.close()
    again = KeptAnswers(tmp_path, {"model": "small"}, "two")
    together, opened, really_open = threading.Barrier(2), list[str](), os.open

    def slow_open(path: Any, *flags: Any) -> int:
        opened.append(str(path))
        with suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)  # a second one would come in here
        return really_open(path, *flags)

    monkeypatch.setattr(os, "open", slow_open)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(again.find, ["ab" * 32] * 2))
    monkeypatch.undo()
    again.close()
    assert [one["text"] for one in found if one is not None] == ["kept", "kept"]
    assert len(opened) == 1


def test_how_a_model_is_reached_is_no_part_of_the_question(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    with Endpoint() as other:
        list(ask(prompts(3), model_at(endpoint), make_context("work")))
        moved = model_at(other, concurrency=2, timeout_seconds=5, prompt_price=1, budget={"requests": 9})
        list(ask(prompts(3), moved, make_context("work")))
        assert not other.asked


def test_one_prompt_is_asked_once_and_several_answers_to_it_are_asked_for_one_by_one(
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


def test_with_an_endpoint_that_drops_refuses_and_talks_nonsense_nothing_is_lost_nor_answered_twice(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    draw = random.Random(18)

    def unreliable(asked: str, before: int) -> Does:
        return draw.choice(FAULTS) if draw.random() < 0.4 else f"answer to {asked}"

    endpoint.behaviour = unreliable
    answers = list(ask(prompts(120), model_at(endpoint), make_context("work")))
    assert texts(answers) == [f"answer to prompt {place}" for place in range(120)]
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(120)}
    assert endpoint.asked.total() > 150


def test_a_slow_answer_is_waited_for_no_longer_than_the_time_limit_and_asked_for_again(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Late("late") if before == 0 else "in time"
    answers = list(ask(prompts(2), model_at(endpoint, timeout_seconds=0.2), make_context("work")))
    assert texts(answers) == ["in time", "in time"]


def test_requests_go_to_another_endpoint_where_one_is_gone(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    with Endpoint() as gone:
        nowhere = gone.url
    model = AskedModel(endpoint=(nowhere, endpoint.url), model="small")
    assert len(list(ask(prompts(10), model, make_context("work")))) == 10


def test_retry_after_holds_back_all_requests_to_that_endpoint(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(429, headers={"Retry-After": "900"})
    with pytest.raises(
        AskingError,
        match=r"stage: no answer from http://127.* 429 no, which wants to be asked again "
        r"in 900 s; all answers so far are kept",
    ):
        list(ask(prompts(1), model_at(endpoint, patience_seconds=60), make_context("work")))
    assert endpoint.asked.total() == 1


def test_an_outage_stops_keeps_what_was_answered_and_the_next_run_asks_only_for_the_rest(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: f"answer to {asked}" if asked < "prompt 5" else Refuse(502)
    impatient = model_at(endpoint, patience_seconds=0.05)
    with pytest.raises(AskingError, match=r"no answer from .* 502 no; all answers so far are kept"):
        list(ask(prompts(10), impatient, make_context("work")))
    endpoint.behaviour = lambda asked, before: f"answer to {asked}"
    assert len(list(ask(prompts(10), impatient, make_context("work")))) == 10
    assert endpoint.answered == {f"prompt {place}": 1 for place in range(10)}


def test_a_request_that_is_never_answered_may_be_set_aside(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(500, "out of memory") if asked == "prompt 1" else "good"
    model = model_at(endpoint, patience_seconds=0.05, unanswered="quarantine")
    first, second, third = ask(prompts(3), model, make_context("work"))
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert "500 out of memory" in second.error


def test_what_is_refused_for_good_is_the_error_of_that_request_alone(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(400, "too long") if asked == "prompt 1" else "good"
    answers = list(ask(prompts(3), model_at(endpoint), make_context("work")))
    assert [one.error is None for one in answers] == [True, False, True]
    assert "refuses the request: 400 too long" in str(answers[1].error)
    assert endpoint.asked["prompt 1"] == 1


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, r"401 no; name the variable of a key"),
        (
            404,
            r"404 no; see that the address is right, and that it has a "
            r"model 'small'",
        ),
        (301, "301 no; correct `endpoint`"),
    ],
)
def test_what_would_refuse_all_requests_ends_at_once(
    endpoint: Endpoint, make_context: Callable[..., Context], status: int, said: str
) -> None:
    endpoint.behaviour = lambda asked, before: Refuse(status)
    with pytest.raises(AskingError, match=said):
        list(ask(prompts(100), model_at(endpoint, concurrency=2), make_context("work")))
    assert endpoint.asked.total() <= 2


def test_a_key_comes_from_the_environment_and_is_written_nowhere(
    endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(endpoint, api_key_env="A_KEY_OF_MINE")
    monkeypatch.delenv("A_KEY_OF_MINE", raising=False)
    with pytest.raises(AskingError, match=r"names \$A_KEY_OF_MINE, which is not set here"):
        list(ask(prompts(1), model, make_context("work")))
    monkeypatch.setenv("A_KEY_OF_MINE", "sk-0123456789abcdef")
    list(ask(prompts(1), model, make_context("work")))
    assert endpoint.headers["authorization"] == "Bearer sk-0123456789abcdef"
    endpoint.behaviour = lambda asked, before: Refuse(401, "the key sk-0123456789abcdef is unknown")
    with pytest.raises(AskingError) as refused:
        list(ask([prompt("another")], model, make_context("work")))
    assert r"the key *** is unknown; correct the key in $A_KEY_OF_MINE" in str(refused.value)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-0123456789abcdef" not in path.read_bytes()


def test_a_budget_of_requests_stops_keeps_what_is_done_and_counts_all_attempts(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    limited = model_at(endpoint, budget={"requests": 7})
    said = (
        r"stage: the budget of 7 requests does not cover one more request: 7 of 20 requests with 42 tokens are "
        r"answered, and kept; raise `budget.requests` and run again, which asks only for the others"
    )
    for _ in range(2):
        with pytest.raises(BudgetSpentError, match=said):
            list(ask(prompts(20), limited, make_context("out/work"), total=20))
    assert endpoint.answered.total() == 7
    raised = model_at(endpoint, budget={"requests": 20})
    assert len(list(ask(prompts(20), raised, make_context("out/work"), total=20))) == 20
    assert set(endpoint.answered.values()) == {1}


@pytest.mark.parametrize(
    ("budget", "prices"), [({"tokens": 2000}, {}), ({"money": 0.004}, {"prompt_price": 2.0, "answer_price": 2.0})]
)
def test_a_budget_of_tokens_or_money_is_never_exceeded(
    endpoint: Endpoint, make_context: Callable[..., Context], budget: dict[str, float], prices: dict[str, float]
) -> None:
    endpoint.behaviour = lambda asked, before: "word " * 40
    model = model_at(endpoint, budget=budget, max_tokens=50, **prices)
    with pytest.raises(BudgetSpentError), Asking(model, make_context("work")) as asking:
        list(asking.answers(prompts(200)))
    assert 1500 < asking.tally.spent.tokens <= 2000
    assert asking.tally.spent.requests == endpoint.answered.total()


def test_an_answer_without_the_wanted_form_is_asked_for_once_more_and_then_set_aside_with_its_error(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    def forgetful(asked: str, before: int) -> Does:
        if asked.startswith("This answer cannot be used"):
            return '{"score": 4}' if len(endpoint.bodies[-1]["messages"][0]["content"]) % 2 else '{"score": 9}'
        return {"p0": 'Sure! ```json\n{"score": 3}\n```', "p22": '{"score": "high"}', "p3": '{"scor'}[asked]

    endpoint.behaviour = forgetful
    asked = [prompt(text, SCHEMA) for text in ("p0", "p22", "p3")]
    good, mended, bad = ask(asked, model_at(endpoint), make_context("work"))
    assert (good.value, good.repaired) == ({"score": 3}, False)
    assert (mended.value, mended.repaired, mended.error) == ({"score": 4}, True, None)
    assert bad.error is not None
    assert bad.error.startswith("$.score: 9 is greater than the maximum of 5 (after one repair)")
    number = len(endpoint.bodies)
    assert [one.error for one in ask(asked, model_at(endpoint), make_context("work"))] == [None, None, bad.error]
    assert len(endpoint.bodies) == number


def test_an_answer_that_was_cut_says_so(endpoint: Endpoint, make_context: Callable[..., Context]) -> None:
    endpoint.behaviour = lambda asked, before: Ended('{"score": 3, "reason": "because')
    (answer,) = ask([prompt("p", SCHEMA)], model_at(endpoint, max_tokens=9), make_context("work"))
    assert "it was cut at 9 tokens (`max_tokens`)" in str(answer.error)


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
def test_json_is_found_between_other_words(text: str, value: Any) -> None:
    found, error = read_json_answer(text, SCHEMA)
    assert found == value
    assert (error is None) == (value is not None)


def test_the_endpoint_is_asked_for_json_where_the_settings_say_so(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: '{"score": 1}'
    for form in ("none", "json_object", "json_schema"):
        list(ask([prompt("p", SCHEMA)], model_at(endpoint, response_format=form), make_context("work")))
    assert [body.get("response_format") for body in endpoint.bodies] == [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    ]


def test_a_line_that_a_crash_has_cut_is_asked_for_again(
    endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    list(ask(prompts(5), model_at(endpoint, concurrency=1), make_context("work")))
    (file,) = (tmp_path / "work" / "answers").rglob("*.jsonl")
    os.truncate(file, file.stat().st_size - 9)
    assert texts(list(ask(prompts(5), model_at(endpoint), make_context("work"))))[4] == "answer to prompt 4"
    assert endpoint.asked.total() == 6


def test_answers_are_kept_on_an_object_store_too(
    endpoint: Endpoint, make_context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    from upath import UPath

    from gristmill.dataprep.llm import answer_store

    monkeypatch.setattr(answer_store, "UNSAVED_ANSWERS", 3)
    bucket = UPath("memory://bucket/answers")
    for _ in range(2):
        assert len(list(ask(prompts(10), model_at(endpoint), make_context("work", answers=bucket)))) == 10
    assert endpoint.asked.total() == 10


def test_progress_says_how_many_are_answered_of_how_many(endpoint: Endpoint, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    list(ask(prompts(5), model_at(endpoint), Context(work=tmp_path / "work", emit=events.append), total=5))
    assert events[-1] == {"event": "progress", "done": 5, "total": 5, "unit": "requests", "job": "ask"}


def test_an_answer_is_the_same_from_the_endpoint_and_kept_whatever_its_characters_are(
    endpoint: Endpoint, make_context: Callable[..., Context]
) -> None:
    endpoint.behaviour = lambda asked, before: Raw(
        b'{"choices": [{"message": {"content": "a\\ud800b\\u0000\\u2028c\\nd"}}]}'
    )
    first, second = (texts(list(ask(prompts(1), model_at(endpoint), make_context("work")))) for _ in range(2))
    assert first == second == ["a\ufffdb\0\u2028c\nd"]


@pytest.mark.slow
def test_vllm_serves_a_folder_where_it_is_installed_and_else_one_sentence_says_what_to_install(
    make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    model = AskedModel(folder=OutsidePath(tmp_path / "tiny"), server="vllm", server_options=("--max-model-len", "99"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match=r"needs vLLM, which is not installed here; .*gristmill\[vllm\]'"):
        list(ask(prompts(1), model, make_context("work")))
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    (answer,) = ask(prompts(1), model, make_context("work"))
    said = answer.text.split()
    assert said[:3] == ["serve", str(tmp_path / "tiny"), "--host"]
    assert said[-4:] == ["--served-model-name", "tiny", "--max-model-len", "99"]
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no GPU')\n")
    with pytest.raises(ServerError, match=r"the server of .*tiny ended \(status 1\): .*no GPU"):
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
"""A program that is called like vLLM, and answers with what it was started with."""


@pytest.mark.parametrize("root", ["here", "memory://forgotten/answers"])
def test_answers_are_forgotten_with_any_document_that_they_are_about(
    root: str, endpoint: Endpoint, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    from upath import UPath

    bucket = tmp_path / "answers" if root == "here" else UPath(root)
    one, other, third = ("1" * 32, "2" * 32, "3" * 32)

    def answer(name: str, *about: tuple[str, str | None]) -> None:
        list(
            ask([prompt(text, about=of) for text, of in about], model_at(endpoint), make_context(name, answers=bucket))
        )

    def forgotten(*documents: str, remove: bool = True) -> tuple[int, int]:
        found = forget_answers(bucket, documents, remove)
        return found["answers"], found["unknown"]

    answer("first", ("same", one), ("same", other), ("its own", one), ("third", third), ("nobody's", None))
    answer("again", ("third", third), ("third", other))
    assert forgotten(one, remove=False) == (2, 1)
    assert forgotten(other, remove=False) == (2, 1)
    assert endpoint.asked.total() == 4
    assert forgotten(one) == (2, 1)
    assert forgotten(one) == (0, 1)
    assert forgotten(other, remove=False) == (1, 1)  # `third`, which is about both
    answer("once more", ("third", third), ("nobody's", third), ("same", other))
    assert endpoint.asked == {"same": 2, "its own": 1, "third": 1, "nobody's": 1}
    assert forgotten(third) == (2, 0)
    assert forgotten(other) == (1, 0)


def test_a_process_that_reads_or_appends_while_answers_are_forgotten_is_not_disturbed(tmp_path: Path) -> None:
    keys = [digit * 64 for digit in "abc"]
    kept = KeptAnswers(tmp_path, {}, "one")
    kept.keep(keys[0], {"text": "first", "prompt_tokens": 1, "answer_tokens": 1}, "1" * 32)
    kept.keep(keys[1], {"text": "second", "prompt_tokens": 1, "answer_tokens": 1}, "2" * 32)
    assert forget_answers(tmp_path, ["1" * 32], remove=True) == {"answers": 1, "unknown": 0}
    kept.keep(keys[2], {"text": "thïrd", "prompt_tokens": 1, "answer_tokens": 1}, "3" * 32)
    kept.note(keys[2], "2" * 32)
    assert kept.find(keys[0]) is None
    assert [kept.find(key)["text"] for key in keys[1:]] == ["second", "thïrd"]
    kept.close()
    later = KeptAnswers(tmp_path, {}, "one")
    assert (len(later), len(later.spent)) == (2, 2)
    assert forget_answers(tmp_path, ["2" * 32], remove=True) == {"answers": 2, "unknown": 0}
    assert [later.find(key) for key in keys] == [None] * 3
    later.close()
