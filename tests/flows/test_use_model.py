"""Models in use: `chat`, `generate`, `verify`, and the server of model folders."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.local_endpoint import ServerError
from gristmill.dataprep.llm.prompting import prompt
from gristmill.flows.models.find_model import ModelNotFoundError, find_model
from gristmill.flows.models.generate import read_prompts
from gristmill.flows.models.model_server import ModelServer
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.generation.language_model import LanguageModel, open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Progress, Request, Scheduler, complete
from gristmill.train.generation.scheduler_thread import Engine
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, save_model
from gristmill.train.stages.export import write_folder
from tests.commands import call
from tests.jsonl import read_jsonl

API_KEY = "key-of-the-tests"
DEADLINE_SECONDS = 120.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a training stage in a store that also has its tokenizer."""
    store = tmp_path_factory.mktemp("store")
    stage, tokenizer = (
        store / "sft" / "tiny--12",
        store / "tokenizer" / "tiny--34" / "data",
    )
    write_tokenizer(
        train(
            TokenizerSample({"all": ["red blue one two sky grass rose " * 20]}, {}), 300
        ),
        tokenizer,
    )
    shape = shape_of(Model(layers=2, width=32, heads=4, kv_heads=2), 300, 96)
    with torch.device("meta"):
        parameters = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        stage / "data" / "model",
        shape,
        {
            name: drawn(shape, 0)(name, size) * (6.0 if len(size) > 1 else 1.0)
            for name, size in parameters.items()
        },
    )
    write_json(
        stage / "stage.json",
        {"inputs": [{"stage": "tokenizer", "folder": str(tokenizer)}]},
    )
    return stage


@pytest.fixture(scope="module")
def exported(stage: Path) -> Path:
    """The same model as `export` writes it."""
    model, folder = find_model(str(stage), None), stage.parent / "exported"
    write_folder(model.weights, model.tokenizer, Export(dtype="fp32"), folder)
    return folder


def test_models_are_found_in_folders_of_stages_and_exports(
    stage: Path, exported: Path
) -> None:
    for folder in (stage, stage / "data", stage / "data" / "model"):
        assert find_model(str(folder), None).weights == stage / "data" / "model"
        assert (
            find_model(str(folder), None).tokenizer
            == stage.parent.parent / "tokenizer" / "tiny--34" / "data"
        )
    assert find_model(str(exported), None).tokenizer == exported
    with pytest.raises(ModelNotFoundError, match=r"config\.json does not exist"):
        find_model(str(stage.parent), None)


def test_prompts_may_hold_line_separators_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}', "utf-8")
    assert read_prompts(path) == {1: {"prompt": "a\u2028b\x85c"}, 3: {"prompt": "d"}}


def generated(
    model: Path, prompts: str, *options: str
) -> tuple[Result, list[dict[str, Any]]]:
    """The result of `generate` with the lines of a file of prompts, and its answers."""
    folder = model.parent
    (folder / "prompts.jsonl").write_text(prompts)
    out = folder / "out.jsonl"
    arguments = [str(model), str(folder / "prompts.jsonl"), f"--out={out}", *options]
    result = call("generate", *arguments, code=None)
    return result, read_jsonl(out)


@pytest.mark.slow
def test_completions_depend_on_the_seed_but_not_on_folder_or_batch(
    stage: Path, exported: Path
) -> None:
    records = (
        {"id": 1, "prompt": "red"},
        {"id": 2, "messages": [{"role": "user", "content": "red blue"}]},
        {"id": 3, "prompt": "sky grass rose one two"},
    )
    prompts = "\n".join(map(json.dumps, records))

    def lines(model: Path, *options: str) -> list[dict[str, Any]]:
        result, answers = generated(model, prompts, "--max-new-tokens=12", *options)
        assert result.exit_code == 0, result.output
        return answers

    greedy = lines(stage)
    assert [line["id"] for line in greedy] == [1, 2, 3]
    assert all(
        line["finish_reason"] in ("stop", "length")
        and 0 < line["completion_tokens"] <= 12
        for line in greedy
    )
    assert lines(exported) == greedy
    assert lines(stage, "--batch=2") == greedy
    sampled = lines(stage, "--temperature=1.5", "--seed=3")
    assert sampled != greedy
    assert lines(stage, "--temperature=1.5", "--seed=3", "--batch=1") == sampled
    text = greedy[0]["completion"]
    cut = lines(stage, "--stop", text[3:5])[0]
    assert cut["completion"] == text[: text.index(text[3:5])]
    assert cut["finish_reason"] == "stop"


def test_long_and_refused_prompts_are_errors_of_their_lines(stage: Path) -> None:
    good = json.dumps({"id": 1, "prompt": "red"})
    long = json.dumps({"id": 2, "prompt": "red " * 400})
    messages = [{"role": "user", "content": "a <|end|>"}]
    refused = json.dumps({"id": 3, "messages": messages})
    _, alone = generated(stage, good, "--max-new-tokens=6")
    prompts = f"\n{long}\n{good}\n{refused}\n"
    result, lines = generated(stage, prompts, "--max-new-tokens=6")
    assert result.exit_code == 1
    assert "2 of 3 prompts could not be completed" in result.output
    assert "line 2: a prompt has" in " ".join(result.output.split())
    assert [set(line) & {"error", "completion"} for line in lines] == [
        {"error"},
        {"completion"},
        {"error"},
    ]
    assert lines[1:2] == alone
    assert lines[0]["error"].startswith("a prompt has")
    assert "<|end|>" in lines[2]["error"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"text": "a"}', "needs either `prompt`"),
        ('{"prompt": 3}', "needs either `prompt`"),
    ],
)
def test_lines_without_a_prompt_are_named(
    stage: Path, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    result = call("generate", stage, tmp_path / "prompts.jsonl", code=2)
    assert message in result.output


@pytest.mark.slow
def test_chat_remembers_the_conversation_until_it_is_cleared(stage: Path) -> None:
    def chat(*lines: str) -> list[str]:
        result = call(
            "chat",
            stage,
            "--max-new-tokens=8",
            "--temperature=0",
            input="\n".join(lines) + "\n",
        )
        return result.stdout.split("\n")

    once, twice = chat("red"), chat("red", "red", "/exit")
    assert twice[: len(once) - 1] == once[:-1]
    assert twice != [*once[:-1], *once]
    assert chat("red", "/clear", "red") == [*once[:-1], "(started over)", *once]
    assert "not answered: a prompt has" in "\n".join(chat("red " * 300))
    assert chat("/trace", "red", "/trace")[0] == "(no answer yet)"
    assert "(a folder does not record what its model has read;" in "\n".join(
        chat("red", "/trace")
    )


@pytest.fixture
def language(stage: Path) -> LanguageModel:
    model = find_model(str(stage), None)
    return open_language_model(model.weights, model.tokenizer)


@contextmanager
def served(language: LanguageModel, scheduler: Scheduler) -> Iterator[int]:
    """Serve a model in a thread; yields the port."""
    with ModelServer(language, scheduler, 0, API_KEY) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def post(
    port: int,
    body: Any,
    path: str = "/v1/chat/completions",
    authorization: str = f"Bearer {API_KEY}",
) -> tuple[int, Any]:
    """Status and JSON of the answer to a request."""
    with closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
    ) as connection:
        connection.request(
            "POST", path, json.dumps(body), {"authorization": authorization}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def chat_request(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": "tiny",
        "messages": messages,
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 8,
        **fields,
    }


@pytest.mark.slow
def test_concurrent_requests_get_the_answers_that_the_model_gives_each_alone(
    language: LanguageModel,
) -> None:
    texts = ("red", "sky grass", "one two one", "rose", "blue red two")
    requests = [
        chat_request(text, max_tokens=3 + number, temperature=number % 2, seed=number)
        for number, text in enumerate(texts * 8)
    ]
    with (
        served(language, Scheduler(language.model, 16)) as port,
        ThreadPoolExecutor(40) as pool,
    ):
        answers = list(pool.map(lambda request: post(port, request), requests))
    for request, (status, answer) in zip(requests, answers, strict=True):
        prompt = language.chat_prompt(request["messages"])
        sampling = Sampling(request["temperature"], 1.0, request["seed"])
        alone = Request(prompt, request["max_tokens"], language.stops, sampling)
        (ids,) = complete(Scheduler(language.model, 1), [alone])
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == language.decode(ids)
        assert choice["finish_reason"] == (
            "length" if len(ids) == request["max_tokens"] else "stop"
        )
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == len(ids)


def test_requests_without_a_seed_draw_different_answers(
    language: LanguageModel,
) -> None:
    with served(language, Scheduler(language.model, 4)) as port:
        answers = [
            post(port, chat_request("red", temperature=2, max_tokens=20))[1]["choices"]
            for _ in range(3)
        ]
    assert answers[0] != answers[1] or answers[1] != answers[2]


def test_invalid_requests_are_refused_with_the_reason(language: LanguageModel) -> None:
    with served(language, Scheduler(language.model, 4)) as port:
        for request, reason in (
            (chat_request("red", messages=[]), "messages"),
            (chat_request("red", tools=[]), "tools"),
            (chat_request("red", temperature=-1), "temperature is -1"),
            (chat_request("red", max_tokens=0), "max_tokens"),
            (chat_request("red " * 400), "a prompt has"),
            (chat_request("<|endoftext|>"), "special token"),
            (chat_request("a\ud800"), "body: Invalid JSON"),
        ):
            status, answer = post(port, request)
            assert status == 400
            assert reason in answer["error"]["message"]
        assert post(port, chat_request("red"), path="/v1/completions")[0] == 404


@pytest.mark.parametrize(
    "authorization", ["", "Bearer wrong", f"Basic {API_KEY}", "Bearer \xff"]
)
def test_requests_without_the_key_are_refused(
    language: LanguageModel, authorization: str
) -> None:
    with served(language, Scheduler(language.model, 4)) as port:
        assert post(port, chat_request("red"), authorization=authorization)[0] == 403
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as response:
            assert response.status == 200


def test_requests_are_refused_after_generation_has_failed(
    language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(language.model, 2)

    def fail() -> list[Progress]:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(scheduler, "step", fail)
    with served(language, scheduler) as port:
        answers = [post(port, chat_request("red")) for _ in range(2)]
    assert [status for status, _ in answers] == [503, 503]
    assert [answer["error"]["message"] for _, answer in answers] == [
        "no memory is left",
        "no more answers: no memory is left",
    ]


@pytest.mark.slow
def test_generation_stops_when_the_client_disconnects(
    language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(language.model, 1)
    step, cancel = scheduler.step, Engine.cancel
    is_running, may_continue, cancelled = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def step_slowly() -> list[Progress]:
        is_running.set()
        assert may_continue.wait(DEADLINE_SECONDS)
        return step()

    def cancel_and_tell(engine: Engine, ticket: int) -> None:
        cancel(engine, ticket)
        cancelled.set()

    monkeypatch.setattr(scheduler, "step", step_slowly)
    monkeypatch.setattr(Engine, "cancel", cancel_and_tell)
    with served(language, scheduler) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps(chat_request("red", max_tokens=80))
        connection.request(
            "POST", "/v1/chat/completions", body, {"authorization": f"Bearer {API_KEY}"}
        )
        assert is_running.wait(DEADLINE_SECONDS)
        connection.close()
        assert cancelled.wait(DEADLINE_SECONDS)
        may_continue.set()
        assert post(port, chat_request("red"))[0] == 200


@pytest.mark.referee
def test_transformers_agrees_with_a_model_and_disagrees_with_a_damaged_one(
    stage: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from gristmill.flows.models import transformers_check

    result = call("verify", stage, "--json")
    findings = json.loads(result.stdout[result.stdout.index("[\n") :])
    assert [finding["verdict"] for finding in findings] == ["agrees"] * 3
    assert {*findings[0]} == {"measure", "ours", "theirs", "allowed", "gap", "verdict"}
    original = transformers_check.load_model

    def damaged(folder: Path) -> Llama:
        model = original(folder)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)  # type: ignore[union-attr, operator]
        return model

    monkeypatch.setattr(transformers_check, "load_model", damaged)
    result = call("verify", exported, code=1)
    assert "DISAGREES" in result.stdout


@pytest.mark.slow
def test_model_folder_is_served_while_answering_requests(
    exported: Path, tmp_path: Path
) -> None:
    model = AskedModel(folder=OutsidePath(exported), max_tokens=4)
    requests = [prompt(text) for text in ("red blue", "one two", "red blue")]
    for _ in range(2):
        with Asking(
            model, Context(work=tmp_path / "work", emit=lambda event: None)
        ) as asking:
            answers = list(asking.answers(requests))
            assert answers[0] == answers[2]
            assert all(answer.error is None for answer in answers)
    assert (asking.tally.asked, asking.tally.kept, asking.tally.spent.requests) == (
        0,
        3,
        2,
    )


@pytest.mark.slow
def test_unservable_folder_raises_the_reason(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "tiny" / "config.json", {})
    model = AskedModel(folder=OutsidePath(tmp_path / "tiny"))
    context = Context(work=tmp_path / "work", emit=lambda event: None)
    with (
        pytest.raises(
            ServerError,
            match=r"the server of .*tiny ended \(status 1\): .*has no tokenizer\.json",
        ),
        Asking(model, context),
    ):
        pass
