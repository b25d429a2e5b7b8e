"""A trained model in use: in the terminal, over a file, and served to a stage."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.llm.llm_client import Asking
from gristmill.dataprep.llm.local_endpoint import ServerError
from gristmill.dataprep.llm.prompting import prompt
from gristmill.flows.cli.main import app
from gristmill.flows.models.find_model import ModelNotFoundError, find_model
from gristmill.flows.models.model_server import ModelServer
from gristmill.flows.models.referees import REFEREES
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.model import Model
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.generation.language_model import LanguageModel, open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Progress, Request, Scheduler, complete
from gristmill.train.generation.scheduler_thread import Engine
from gristmill.train.models.decoder import Llama
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.weights import drawn, save_model
from gristmill.train.stages.export import exported_tensors

API_KEY = "key-of-the-tests"
DEADLINE_SECONDS = 120.0
SAID = [{"role": "user", "content": "red blue"}]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training's folder in a store, beside the tokenizer's."""
    store = tmp_path_factory.mktemp("store")
    stage, tokenizer = store / "sft" / "tiny--12", store / "tokenizer" / "tiny--34" / "data"
    write_tokenizer(train(TokenizerSample({"all": ["red blue one two sky grass rose " * 20]}, {}), 300), tokenizer)
    shape = shape_of(Model(layers=2, width=32, heads=4, kv_heads=2), 300, 96)
    with torch.device("meta"):
        parameters = {name: one.shape for name, one in Llama(shape).named_parameters()}
    save_model(
        stage / "data" / "model",
        shape,
        {name: drawn(shape, 0)(name, size) * (6.0 if len(size) > 1 else 1.0) for name, size in parameters.items()},
    )
    write_json(stage / "stage.json", {"inputs": [{"stage": "tokenizer", "folder": str(tokenizer)}]})
    return stage


@pytest.fixture(scope="module")
def exported(stage: Path) -> Path:
    """The same model as `export` writes it: without what only trainings need."""
    model, folder = find_model(str(stage), None), stage.parent / "exported"
    language = open_language_model(model.weights, model.tokenizer)
    folder.mkdir()
    write_json(folder / "config.json", hf_config(language.model.shape, "float32", sorted(language.stops), 1))
    write_tensors(folder / "model.safetensors", exported_tensors(model.weights, language.model.shape, torch.float32))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((model.tokenizer / name).read_bytes())
    return folder


def test_a_model_is_found_in_a_stages_folder_its_data_and_an_export(stage: Path, exported: Path) -> None:
    for given in (stage, stage / "data", stage / "data" / "model"):
        assert find_model(str(given), None).weights == stage / "data" / "model"
        assert find_model(str(given), None).tokenizer == stage.parent.parent / "tokenizer" / "tiny--34" / "data"
    assert find_model(str(exported), None).tokenizer == exported
    with pytest.raises(ModelNotFoundError, match=r"config\.json does not exist"):
        find_model(str(stage.parent), None)


def test_a_file_of_prompts_is_completed_and_the_folder_or_a_draft_changes_nothing(
    stage: Path, exported: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps(one) + "\n"
            for one in (
                {"id": 1, "prompt": "red"},
                {"id": 2, "messages": SAID},
                {"id": 3, "prompt": "sky grass rose one two"},
            )
        )
    )

    def lines(model: Path, *options: str) -> list[dict[str, Any]]:
        out = tmp_path / "out.jsonl"
        done = CliRunner().invoke(
            app, ["generate", str(model), str(prompts), "--max-new-tokens", "12", "--out", str(out), *options]
        )
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in out.read_text().splitlines()]

    found = lines(stage)
    assert [line["id"] for line in found] == [1, 2, 3]
    assert all(line["finish_reason"] in ("stop", "length") and 0 < line["completion_tokens"] <= 12 for line in found)
    assert lines(exported) == found
    assert lines(stage, "--draft", str(exported), "--batch", "2") == found
    warm = lines(stage, "--temperature", "1.5", "--seed", "3")
    assert warm != found
    assert lines(stage, "--temperature", "1.5", "--seed", "3", "--batch", "1") == warm
    text = found[0]["completion"]
    cut = lines(stage, "--stop", text[3:5])[0]
    assert cut["completion"] == text[: text.index(text[3:5])]
    assert cut["finish_reason"] == "stop"


def test_a_prompt_that_is_too_long_or_refused_is_an_error_of_its_line(stage: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"id": 1, "prompt": "red"})
    bad = [{"id": 2, "prompt": "red " * 400}, {"id": 3, "messages": [{"role": "user", "content": "a <|end|>"}]}]

    def run(text: str) -> tuple[Any, list[dict[str, Any]]]:
        prompts.write_text(text)
        done = CliRunner().invoke(
            app, ["generate", str(stage), str(prompts), "--max-new-tokens", "6", "--out", str(out)]
        )
        return done, [json.loads(line) for line in out.read_text().splitlines()]

    alone = run(good + "\n")[1]
    done, found = run(f"\n{json.dumps(bad[0])}\n{good}\n{json.dumps(bad[1])}\n")
    assert done.exit_code == 1
    assert "2 of 3 prompts could not be completed" in done.output
    assert "line 2: a prompt has" in " ".join(done.output.split())
    assert [set(line) & {"error", "completion"} for line in found] == [{"error"}, {"completion"}, {"error"}]
    assert found[1:2] == alone
    assert found[0]["error"].startswith("a prompt has")
    assert "<|end|>" in found[2]["error"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("{", "line 1: not JSON"), ('{"text": "a"}', "needs either `prompt`"), ('{"prompt": 3}', "`prompt` must be text")],
)
def test_a_line_that_is_no_prompt_is_named(stage: Path, tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    done = CliRunner().invoke(app, ["generate", str(stage), str(tmp_path / "prompts.jsonl")])
    assert done.exit_code == 2
    assert sentence in done.output


def test_a_conversation_in_the_terminal_remembers_what_was_said_until_it_is_cleared(stage: Path) -> None:
    def said(*lines: str) -> list[str]:
        done = CliRunner().invoke(
            app, ["chat", str(stage), "--max-new-tokens", "8", "--temperature", "0"], input="\n".join(lines) + "\n"
        )
        assert done.exit_code == 0, done.output
        return done.stdout.split("\n")

    alone, twice = said("red"), said("red", "red", "/exit")
    assert twice[: len(alone) - 1] == alone[:-1]
    assert twice != [*alone[:-1], *alone]
    assert said("red", "/clear", "red") == [*alone[:-1], "(started over)", *alone]
    assert "not answered: a prompt has" in "\n".join(said("red " * 300))
    assert said("/trace", "red", "/trace")[0] == "(no answer yet)"
    assert "(a folder does not record what its model has read;" in "\n".join(said("red", "/trace"))


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
        yield server.server_port
        server.shutdown()
        thread.join()


def post(
    port: int, body: Any, path: str = "/v1/chat/completions", authorization: str = f"Bearer {API_KEY}"
) -> tuple[int, Any]:
    """Status and JSON of the answer to a request."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)) as connection:
        connection.request("POST", path, json.dumps(body), {"authorization": authorization})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def chat_request(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "top_p": 1, "max_tokens": 8, **fields}


def test_concurrent_requests_get_the_answers_that_the_model_gives_each_alone(language: LanguageModel) -> None:
    texts = ("red", "sky grass", "one two one", "rose", "blue red two")
    requests = [
        chat_request(text, max_tokens=3 + number, temperature=number % 2, seed=number)
        for number, text in enumerate(texts * 8)
    ]
    with served(language, Scheduler(language.model, 16)) as port, ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda request: post(port, request), requests))
    for request, (status, answer) in zip(requests, answers, strict=True):
        prompt = language.chat_prompt(request["messages"])
        sampling = Sampling(request["temperature"], 1.0, request["seed"])
        alone = Request(prompt, request["max_tokens"], language.stops, sampling)
        (ids,) = complete(Scheduler(language.model, 1), [alone])
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == language.decode(ids)
        assert choice["finish_reason"] == ("length" if len(ids) == request["max_tokens"] else "stop")
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == len(ids)


def test_requests_without_a_seed_draw_different_answers(language: LanguageModel) -> None:
    with served(language, Scheduler(language.model, 4)) as port:
        answers = [post(port, chat_request("red", temperature=2, max_tokens=20))[1]["choices"] for _ in range(3)]
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
            (chat_request("a\ud800"), "surrogate"),
        ):
            status, answer = post(port, request)
            assert status == 400
            assert reason in answer["error"]["message"]
        assert post(port, chat_request("red"), path="/v1/completions")[0] == 404


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", f"Basic {API_KEY}", "Bearer \xff"])
def test_requests_without_the_key_are_refused(language: LanguageModel, authorization: str) -> None:
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


def test_generation_stops_for_a_client_that_leaves(language: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(language.model, 1)
    step, cancel = scheduler.step, Engine.cancel
    is_running, may_continue, cancelled = threading.Event(), threading.Event(), threading.Event()

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
        connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {API_KEY}"})
        assert is_running.wait(DEADLINE_SECONDS)
        connection.close()
        assert cancelled.wait(DEADLINE_SECONDS)
        may_continue.set()
        assert post(port, chat_request("red"))[0] == 200


@pytest.mark.referee
def test_outside_referees_find_what_we_find_and_see_what_is_wrong(
    stage: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from gristmill.flows.models import referees

    done = CliRunner().invoke(app, ["verify", str(stage), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert {one["verdict"] for one in found} <= {"agrees", "is not installed"}
    assert {one["referee"] for one in found} == {"transformers", "lm-evaluation-harness", "TRL"}
    assert len({one["measure"] for one in found if one["referee"] == "transformers"}) == 3
    # A model that computes something else than its folder says is found out; software that is absent is named.
    original = referees.load_model

    def damaged(folder: Path) -> Llama:
        model = original(folder)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)  # type: ignore[union-attr, operator]
        return model

    monkeypatch.setattr(referees, "load_model", damaged)
    monkeypatch.setattr(referees, "_installed", lambda modules: modules == ("transformers",))
    done = CliRunner().invoke(app, ["verify", str(exported)])
    assert done.exit_code == 1
    assert "DISAGREES" in done.stdout
    assert done.stdout.count("is not installed") == 2


def test_trl_which_trains_no_rounded_model_is_not_asked_about_one(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}})
    ask = next(ask for name, _, ask in REFEREES if name == "TRL")
    (found,) = ask(cast(Any, None), tmp_path, tmp_path)
    assert (found.verdict, found.gap) == ("takes no model in 8 bits", None)


def test_a_folder_is_served_for_as_long_as_it_is_asked(exported: Path, tmp_path: Path) -> None:
    model = AskedModel(folder=OutsidePath(exported), max_tokens=4)
    requests = [prompt(text) for text in ("red blue", "one two", "red blue")]
    for _ in range(2):
        with Asking(model, Context(work=tmp_path / "work", emit=lambda event: None)) as asking:
            answers = list(asking.answers(requests))
            assert answers[0] == answers[2]
            assert all(answer.error is None for answer in answers)
    assert (asking.tally.asked, asking.tally.kept, asking.tally.spent.requests) == (0, 3, 2)


def test_a_folder_that_cannot_be_served_is_an_error_with_the_reason(tmp_path: Path) -> None:
    write_json(tmp_path / "tiny" / "config.json", {})
    model = AskedModel(folder=OutsidePath(tmp_path / "tiny"))
    context = Context(work=tmp_path / "work", emit=lambda event: None)
    with (
        pytest.raises(ServerError, match=r"the server of .*tiny ended \(status 1\): .*has no tokenizer\.json"),
        Asking(model, context),
    ):
        pass
