from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.flows.cli.main import app
from gristmill.flows.models.evaluate_model import print_evaluation
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, save_model

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
    """Run `gristmill evaluate` on a model folder; returns its JSON."""
    result = CliRunner().invoke(
        app, ["evaluate", str(folder), "--tasks", str(tasks), "--json", *options]
    )
    assert result.exit_code == 0, result.output
    summaries: dict[str, Any] = json.loads(result.stdout)
    return summaries


def test_tasks_of_a_file_are_evaluated(folder: Path) -> None:
    summaries = evaluate(folder, folder / "tasks.yaml")
    assert summaries["colours"]["items"] == 2
    # An untrained model gives all ids about the same probability: log2(270) bits per
    # token.
    tokens, size = summaries["lines"]["tokens"], len("red blue") + len("sky grass rose")
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
    assert by_option["colours"]["brier"] != plain["colours"]["brier"]
    assert by_option["lines"] == plain["lines"]


def test_the_table_shows_values_with_intervals_in_eighty_columns(folder: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["evaluate", str(folder), "--tasks", str(folder / "tasks.yaml")],
        env={"COLUMNS": "80"},
    )
    assert result.exit_code == 0, result.output
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
            "it asks nothing; give `tasks: [...]` or `suites: [...]`",
        ),
    ],
)
def test_invalid_task_files_are_refused_with_the_reason(
    folder: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "tasks.yaml").write_text(text)
    result = CliRunner().invoke(
        app, ["evaluate", str(folder), "--tasks", str(tmp_path / "tasks.yaml")]
    )
    assert result.exit_code == 2
    assert message in result.output


def test_folder_without_a_model_is_rejected_by_name(
    folder: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        app, ["evaluate", str(tmp_path), "--tasks", str(folder / "tasks.yaml")]
    )
    assert result.exit_code == 2
    assert str(tmp_path / "config.json") in result.output.replace("\n", "")


def test_suite_task_does_not_hide_a_task_of_the_same_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    score = {"value": 0.25, "low": 0.2, "high": 0.3}
    print_evaluation(
        {
            "arc": {"items": 40, "accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}},
            "core": {
                "title": "CORE",
                "limit": None,
                "score": score,
                "tasks": {
                    "arc": {
                        "shots": 0,
                        "accuracy": score,
                        "baseline": 0.25,
                        "centred": score,
                        "items": 9,
                    }
                },
                "references": [],
            },
        }
    )
    lines = capsys.readouterr().out.splitlines()
    items = [line.split()[-1] for line in lines if line.startswith("arc ")]
    assert items == ["40", "9"]


def test_own_metric_named_score_is_a_metric(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    print_evaluation(
        {"own": {"items": 3, "score": {"value": 0.25, "low": 0.125, "high": 0.5}}}
    )
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split() == [
        *("own", "this", "model", "score"),
        *("0.2500", "[0.1250,", "0.5000]", "3"),
    ]


def test_large_metric_has_four_digits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    perplexity = {"value": 123_456_789.0, "low": 987.65, "high": 2.5e9}
    print_evaluation({"lines": {"items": 2, "word_perplexity": perplexity}})
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[4:] == ["1.235e+08", "[987.6,", "2.5e+09]", "2"]
