"""A trained model in use: in the terminal, over a file, and behind OpenAI's API."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.llm.llm_client import Asking
from gristmill.dataprep.llm.local_endpoint import API_KEY_VARIABLE
from gristmill.dataprep.llm.prompting import prompt
from gristmill.flows.cli.main import app
from gristmill.flows.models.find_model import ModelNotFoundError, find_model, name_of
from gristmill.flows.models.referees import REFEREES
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.model import Model
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.generation.language_model import open_language_model
from gristmill.train.generation.scheduler import Progress, Request, Scheduler
from gristmill.train.generation.scheduler_thread import Engine, EngineStoppedError
from gristmill.train.models.decoder import Llama
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.weights import drawn, save_model
from gristmill.train.stages.export import exported_tensors
from tests.servers import serving

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


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/mine.yaml", "mine"),
        ("exports/Llama-3.2-1B", "Llama-3.2-1B"),
        ("/data", "data"),
        ("store/export/mine--5910ac452b086a57", "mine"),
        ("store/export/mine--5910ac452b086a57/data", "mine"),
        ("store/sft/mine--5910ac452b086a57/data/model", "mine"),
    ],
)
def test_a_served_model_is_called_by_what_made_it(model: str, name: str) -> None:
    assert name_of(model) == name


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


@pytest.fixture(scope="module")
def server(stage: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gristmill.flows.cli.main",
            "serve-model",
            str(stage),
            "--port",
            "0",
            "--name",
            "tiny",
            "--max-new-tokens",
            "10",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, API_KEY_VARIABLE: API_KEY},
    )
    assert process.stdout is not None
    told = process.stdout.readline().decode()
    assert told.startswith("{"), told + process.stdout.read().decode()
    url = json.loads(told)["base_url"].removesuffix("/v1")
    assert not url.endswith(":0")
    assert API_KEY not in told
    with_key = urllib.request.build_opener()
    with_key.addheaders = [("Authorization", f"Bearer {API_KEY}")]
    urllib.request.install_opener(with_key)
    yield url
    urllib.request.install_opener(urllib.request.build_opener())
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert "Traceback" not in process.stdout.read().decode()


def test_an_address_that_cannot_be_listened_on_is_said_in_one_sentence(server: str, stage: Path) -> None:
    taken = server.rpartition(":")[2]
    for where, why in (
        (["--port", taken], "Address already in use"),
        (["--host", "192.0.2.1"], "Cannot assign requested address"),
    ):  # kept for documentation
        done = subprocess.run(
            [sys.executable, "-m", "gristmill.flows.cli.main", "serve-model", str(stage), *where],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        (line,) = (line for line in done.stderr.splitlines() if "cannot listen" in line)
        assert why in line
        assert "give another --host or --port" in line


def ask(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a chat completion."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_page_of_another_origin_cannot_let_the_model_work(server: str, kind: str) -> None:
    """What a browser sends for a page without asking first has one of these types; JSON it asks for, and is refused."""
    status, found = ask(server, {"model": "tiny", "messages": SAID}, **{"content-type": kind, "origin": "http://a.b"})
    assert status == 400, found
    asked = urllib.request.Request(
        f"{server}/v1/chat/completions",
        method="OPTIONS",
        headers={
            "origin": "http://a.b",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    assert refused.value.code == 405
    with urllib.request.urlopen(urllib.request.Request(f"{server}/v1/models", headers={"origin": "http://a.b"})) as got:
        assert "access-control-allow-origin" not in got.headers


def events(url: str, body: Any) -> list[Any]:
    """What a streamed chat completion sends."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        sent = [line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: ")]
    assert sent[-1] == b"[DONE]"
    return [json.loads(one) for one in sent[:-1]]


def test_a_chat_completion_is_what_the_model_says_with_its_counts(server: str, stage: Path) -> None:
    status, found = ask(server, {"model": "tiny", "messages": SAID, "temperature": 0})
    assert status == 200
    assert (found["object"], found["model"], len(found["choices"])) == ("chat.completion", "tiny", 1)
    model = find_model(str(stage), None)
    language = open_language_model(model.weights, model.tokenizer)
    prompt = language.chat_prompt(SAID)
    from gristmill.train.generation.scheduler import generate

    ids = generate(language.model, [prompt], 10, language.stops)[0]
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": language.decode(ids), "refusal": None}
    assert choice["finish_reason"] == ("length" if len(ids) == 10 else "stop")
    assert found["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
    }


def test_streamed_pieces_are_the_whole_answer(server: str) -> None:
    body = {"model": "tiny", "messages": SAID, "temperature": 1.0, "seed": 4, "n": 2}
    whole = ask(server, body)[1]
    sent = events(server, {**body, "stream_options": {"include_usage": True}})
    assert len({one["id"] for one in sent}) == 1
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"] == whole["usage"]
    deltas = [one["choices"][0] for one in sent[:-1]]
    for number in (0, 1):
        mine = [one for one in deltas if one["index"] == number]
        assert mine[0]["delta"]["role"] == "assistant"
        text = "".join(one["delta"].get("content", "") for one in mine)
        assert text == whole["choices"][number]["message"]["content"]
        assert [one["finish_reason"] for one in mine][-1] == whole["choices"][number]["finish_reason"]
        assert {one["finish_reason"] for one in mine[:-1]} == {None}
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


def test_requests_at_the_same_time_get_what_they_get_alone(server: str) -> None:
    bodies = [
        {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0}
        for text in ("red", "sky grass", "one two one", "rose")
    ]
    alone = [ask(server, body)[1]["choices"] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: ask(server, body)[1]["choices"], bodies))
    assert together == alone


@pytest.mark.parametrize(
    ("change", "status", "param", "sentence"),
    [
        ({"model": "gpt-4"}, 404, None, "there is no model 'gpt-4'"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"tools": []}, 400, "tools", "not served here"),
        ({"messages": [{"role": "user", "content": "red " * 400}]}, 400, "messages", "a prompt has"),
        ({"messages": [{"role": "user", "content": "<|endoftext|>"}]}, 400, "messages", "which is a special token"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "messages", "a prompt has 100004 characters"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 413, None, "the most is 1048576"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, None, "a lone surrogate"),
        ({"\ud800": "a"}, 400, None, "a lone surrogate"),
        ({"model": "\udfff"}, 400, None, "a lone surrogate"),
        ({"n": 65}, 400, "n", "less than or equal to 64"),
        ({"seed": 10**30}, 400, "seed", "less than"),
        ({"stop": ["a"] * 17}, 400, "stop", "give 16 at most"),
    ],
)
def test_errors_have_openais_form(
    server: str, change: dict[str, Any], status: int, param: str | None, sentence: str
) -> None:
    found = ask(server, {"model": "tiny", "messages": SAID, **change})
    assert found[0] == status
    assert set(found[1]["error"]) == {"message", "type", "param", "code"}
    assert found[1]["error"]["param"] == param
    assert sentence in found[1]["error"]["message"]


def test_more_answers_at_once_than_there_are_places_are_asked_for_later(server: str) -> None:
    """Of 6 streams with 64 answers each, 2 have room."""
    body = {"model": "tiny", "messages": SAID, "n": 64, "stream": True, "max_tokens": 200}
    open_streams, refused = [], []
    for _ in range(6):
        asked = urllib.request.Request(
            f"{server}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            open_streams.append(urllib.request.urlopen(asked))
        except urllib.error.HTTPError as error:
            with error:
                refused.append((error.code, error.headers["retry-after"], json.loads(error.read())["error"]["message"]))
    assert refused
    assert set(refused) == {(429, "1", "this server has 128 of 128 answers at work; ask again later")}
    for stream in open_streams:
        stream.close()
    deadline = time.monotonic() + 60
    while (status := ask(server, {"model": "tiny", "messages": SAID, "n": 64})[0]) == 429:
        assert time.monotonic() < deadline, "places of clients that have gone are not given back"
    assert status == 200


def raw(url: str, sent: bytes) -> socket.socket:
    """A connection on which some bytes were sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(sent)
    return connection


def test_half_open_requests_are_closed_and_hold_nobody_up(impatient: str) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    whole = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    half = [raw(impatient, b"") for _ in range(20)] + [raw(impatient, head) for _ in range(20)]
    second = raw(impatient, whole)
    answered = b""
    while not answered.endswith(b"}"):  # the head and the body may arrive one after the other
        answered += second.recv(4096)
    assert b"200 OK" in answered
    second.sendall(b"GET /hea")
    slow = [raw(impatient, head + b"content-length: 100\r\n\r\n{") for _ in range(20)]
    assert urllib.request.urlopen(f"{impatient}/health").status == 200
    for connection in (*half, second):
        assert connection.recv(4096) == b"", "closed"
    for connection in slow:
        assert b"did not come within 0.5 seconds" in read_all(connection)
    announced = raw(impatient, head + b"content-length: 300000000\r\n\r\n")
    assert b"413" in read_all(announced)
    for connection in (*half, second, *slow, announced):
        connection.close()


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.fixture
def impatient(stage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that waits half a second, in this process."""
    from gristmill.flows.models import limits
    from gristmill.flows.models.server import make_app

    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.5)
    model = find_model(str(stage), None)
    language = open_language_model(model.weights, model.tokenizer)
    limited = limits.Limits(body_seconds=0.5)
    with serving(make_app(language, Scheduler(language.model, 2), "tiny", 4, "127.0.0.1", limited)) as address:
        yield address


ODD = (None, True, -1, 0, 2**70, 1e308, "", "\ud800", "\x00\u202e", "\U0001f600" * 40, [], {}, [[[[]]]], {"a": {}}, " ")
BODIES = (
    b"",
    b"{",
    b"null",
    b"[" * 100_000,
    b'{"model": NaN}',
    b"\xff\xfe",
    b'"' + b"a" * 100_000 + b'"',
    b"1" * 10_000,
)


def drawn_value(schema: dict[str, Any], defined: dict[str, Any], random_: random.Random) -> Any:
    """A JSON value that a schema allows, more or less."""
    if random_.random() < 0.02:
        return random_.choice(ODD)
    if "$ref" in schema:
        return drawn_value(defined[schema["$ref"].rpartition("/")[2]], defined, random_)
    if "anyOf" in schema:
        return drawn_value(random_.choice(schema["anyOf"]), defined, random_)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties", {})
        names = [name for name in properties if random_.random() < (0.98 if name in required else 0.2)]
        extra = ["\ud83d", "tools"][: random_.random() < 0.02]
        return {name: drawn_value(properties.get(name, {}), defined, random_) for name in [*names, *extra]}
    if kind == "array":
        return [drawn_value(schema["items"], defined, random_) for _ in range(random_.randint(1, 3))]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = max(low, -9) + random_.random() * 4
        return round(number) if kind == "integer" else number
    return {"boolean": random_.random() < 0.5, "null": None}.get(
        str(kind), " ".join(random_.choices(["red", "blue", "user", "assistant", "one"], k=random_.randint(1, 3)))
    )


def fuzz(url: str, requests: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Send requests drawn from the server's own OpenAPI description; returns statuses, and what is not as promised."""
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        defined = json.load(response)["components"]["schemas"]
    statuses, wrong = Counter[int](), list[str]()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_SECONDS)
    for number in range(requests):
        random_ = random.Random(f"{seed} {number}")
        value = drawn_value(defined["ChatRequest"], defined, random_)
        if isinstance(value, dict) and random_.random() < 0.95:
            value |= {"model": "tiny", "max_tokens": random_.randint(1, 3)}
            value.pop("max_completion_tokens", None)
        body = random_.choice(BODIES) if random_.random() < 0.03 else json.dumps(value).encode()
        method = "POST" if random_.random() < 0.98 else random_.choice(["GET", "PUT", "DELETE"])
        headers = {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
        connection.request(method, "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        content = response.read()
        statuses[response.status] += 1
        if response.status == 200:
            continue
        if not 400 <= response.status < 500 or not json.loads(content)["error"]["message"]:
            wrong.append(f"seed {seed}, request {number}: {response.status} {content[:200]!r} to {body[:300]!r}")
    connection.close()
    return statuses, wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_requests_drawn_from_its_own_description_are_answered_or_refused_with_a_sentence(server: str) -> None:
    statuses, wrong = fuzz(server, requests=10_000 if os.environ.get("GRISTMILL_TEST_EXPLORE") else 1_000, seed=0)
    assert wrong == [], wrong[:3]
    assert min(statuses[200], statuses[400]) > sum(statuses.values()) // 10, statuses


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", f"Basic {API_KEY}"])
def test_requests_without_the_api_key_are_refused_in_openais_form(server: str, authorization: str) -> None:
    status, answer = ask(server, {"model": "tiny", "messages": SAID}, authorization=authorization)
    assert status == 403
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    for path, status in (("/v1/models", 403), ("/metrics", 403), ("/openapi.json", 403), ("/health", 200)):
        connection = raw(server, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        assert read_all(connection).startswith(f"HTTP/1.1 {status} ".encode())
        connection.close()


def test_models_are_listed_and_other_hosts_refused(server: str) -> None:
    with urllib.request.urlopen(f"{server}/v1/models") as response:
        assert [one["id"] for one in json.load(response)["data"]] == ["tiny"]
    request = urllib.request.Request(f"{server}/v1/models", headers={"host": "attacker.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)


def test_an_engine_that_fails_tells_those_who_wait_and_takes_nothing_more(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = find_model(str(stage), None)
    scheduler = Scheduler(open_language_model(model.weights, model.tokenizer).model, 2)

    def broken() -> list[Progress]:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(scheduler, "step", broken)
    engine, told, arrived = Engine(scheduler), [], threading.Event()

    def listen(one: Progress | BaseException) -> None:
        told.append(str(one))
        arrived.set()

    engine.submit(Request((1, 2), 4, frozenset()), listen)
    assert arrived.wait(DEADLINE_SECONDS)
    assert told == ["no memory is left"]
    with pytest.raises(EngineStoppedError, match="no memory is left"):
        engine.submit(Request((1, 2), 4, frozenset()), listen)
    engine.close()


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
