from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from gristmill.flows.models.evaluate_model import print_evaluation
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, save_model
from tests.commands import call

TASKS = """
tasks:
  - {name: colours, path: colours.jsonl, kind: multiple_choice, prompt: "Q: {{q}} A:", choices: [red, blue, one],
     answer: a}
  - {name: lines, path: lines.txt, kind: rolling, prompt: text}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, and a file of tasks beside it."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(
        train(
            TokenizerSample({"all": ["red blue one two sky grass rose " * 20]}, {}), 270
        ),
        folder,
    )
    shape = shape_of(Model(layers=1, width=16, heads=2), 270, 32)
    with torch.device("meta"):
        parameters = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        folder,
        shape,
        {name: drawn(shape, 0)(name, size) for name, size in parameters.items()},
    )
    (folder / "colours.jsonl").write_text(
        '{"q": "rose", "a": "red"}\n{"q": "sky", "a": "B"}\n'
    )
    (folder / "lines.txt").write_text("red blue\nsky grass rose\n")
    (folder / "tasks.yaml").write_text(TASKS)
    return folder


def evaluate(folder: Path, tasks: Path, *options: str) -> dict[str, Any]:
    """Run `gristmill evaluate` on a model folder; returns its tasks."""
    result = call("evaluate", folder, f"--tasks={tasks}", "--json", *options)
    tasks: dict[str, Any] = json.loads(result.stdout)["tasks"]
    return tasks


def test_tasks_of_a_file_are_evaluated(folder: Path) -> None:
    summaries = evaluate(folder, folder / "tasks.yaml")
    assert summaries["colours"]["items"] == 2
    # An untrained model gives all ids about the same probability: log2(270) bits per
    # token.
    texts = ["red blue", "sky grass rose"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # the end of text before each text is scored too
    tokens = sum(1 + len(tokenizer.encode(text).ids) for text in texts)
    size = sum(map(len, texts))
    assert summaries["lines"]["bits_per_byte"]["value"] == pytest.approx(
        8.077 * tokens / size, rel=0.02
    )


def test_the_chat_template_is_applied_by_option_or_task(folder: Path) -> None:
    chat_tasks = folder / "chat.yaml"
    chat_tasks.write_text(TASKS.replace("answer: a", "answer: a, chat_template: true"))
    plain = evaluate(folder, folder / "tasks.yaml")
    by_option = evaluate(folder, folder / "tasks.yaml", "--apply-chat-template")
    by_task = evaluate(folder, chat_tasks)
    assert by_option == by_task
    assert by_option["colours"]["brier_score"] != plain["colours"]["brier_score"]
    assert by_option["lines"] == plain["lines"]


def test_the_table_shows_values_with_intervals_in_eighty_columns(folder: Path) -> None:
    result = call(
        "evaluate", folder, "--tasks", folder / "tasks.yaml", env={"COLUMNS": "80"}
    )
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "acc_norm" in result.stdout
    assert re.search(r"\d\.\d{4} \[\d\.\d{4}, ", result.stdout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [{name: a, kind: rolling}]", "tasks.0.path: field required"),
        ("tasks: [{name: a, path: absent.jsonl, kind: rolling}]", "absent.jsonl"),
        ("questions: []", "questions: unknown key"),
        (
            "tasks: []",
            "no tasks",
        ),
    ],
)
def test_invalid_task_files_are_refused_with_the_reason(
    folder: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "tasks.yaml").write_text(text)
    result = call("evaluate", folder, "--tasks", tmp_path / "tasks.yaml", code=2)
    assert message in result.output


def test_folder_without_a_model_is_rejected_by_name(
    folder: Path, tmp_path: Path
) -> None:
    result = call("evaluate", tmp_path, "--tasks", folder / "tasks.yaml", code=2)
    assert str(tmp_path / "config.json") in result.output.replace("\n", "")


def test_large_metric_has_four_digits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    perplexity = {"value": 123_456_789.0, "low": 987.65, "high": 2.5e9}
    lines = {"items": 2, "word_perplexity": perplexity}
    print_evaluation({"tasks": {"lines": lines}})
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[4:] == ["1.235e+08", "[987.6,", "2.5e+09]", "2"]
