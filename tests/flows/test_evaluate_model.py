from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.flows.cli.main import app
from gristmill.flows.models.evaluate_model import print_evaluation, printed
from gristmill.mixtures.model import Model
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, save_model

TASKS = """
tasks:
  - {name: colours, path: colours.jsonl, kind: multiple_choice, prompt: "Q: {{q}} A:", choices: [red, blue, one],
     answer: a}
  - {name: lines, path: lines.txt, kind: rolling, prompt: text}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, and a file of tasks beside it."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(train(TokenizerSample({"all": ["red blue one two sky grass rose " * 20]}, {}), 270), folder)
    shape = shape_of(Model(layers=1, width=16, heads=2), 270, 32)
    with torch.device("meta"):
        parameters = {name: one.shape for name, one in Llama(shape).named_parameters()}
    save_model(folder, shape, {name: drawn(shape, 0)(name, size) for name, size in parameters.items()})
    (folder / "colours.jsonl").write_text('{"q": "rose", "a": "red"}\n{"q": "sky", "a": "B"}\n')
    (folder / "lines.txt").write_text("red blue\nsky grass rose\n")
    (folder / "tasks.yaml").write_text(TASKS)
    return folder


def test_a_folder_is_asked_the_tasks_of_a_file(folder: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(folder / "tasks.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["colours"]["items"] == 2
    # A model that knows nothing gives every byte about as much as every id: log2(270) bits a token.
    tokens, size = found["lines"]["tokens"], len("red blue") + len("sky grass rose")
    assert found["lines"]["bits_per_byte"]["value"] == pytest.approx(8.077 * tokens / size, rel=0.02)


def test_the_chat_template_is_asked_through_where_that_is_wanted(folder: Path) -> None:
    def asked(tasks: str, *options: str) -> dict[str, Any]:
        (folder / "asked.yaml").write_text(tasks)
        done = CliRunner().invoke(
            app, ["evaluate", str(folder), "--tasks", str(folder / "asked.yaml"), "--json", *options]
        )
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    plain, by_option = asked(TASKS), asked(TASKS, "--apply-chat-template")
    by_task = asked(TASKS.replace("answer: a", "answer: a, chat_template: true"))
    assert by_option == by_task
    assert by_option["colours"]["brier"] != plain["colours"]["brier"]
    assert by_option["lines"] == plain["lines"]


def test_the_table_shows_values_with_intervals_in_eighty_columns(folder: Path) -> None:
    done = CliRunner().invoke(
        app, ["evaluate", str(folder), "--tasks", str(folder / "tasks.yaml")], env={"COLUMNS": "80"}
    )
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "acc_norm" in done.stdout
    assert " to " in done.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tasks: [{name: a, kind: rolling}]", "tasks.0.path: field required"),
        ("tasks: [{name: a, path: absent.jsonl, kind: rolling}]", "absent.jsonl"),
        ("questions: []", "questions: unknown key"),
        ("tasks: []", "it asks nothing; give `tasks: [...]`, `suites: [...]` or a `red_team: {...}`"),
        ("red_team: {sets: [{format: advbench, path: absent.csv}]}", "absent.csv"),
    ],
)
def test_what_cannot_be_asked_is_said(folder: Path, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "tasks.yaml").write_text(text)
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(tmp_path / "tasks.yaml")])
    assert done.exit_code == 2
    assert sentence in done.output


def test_a_folder_without_a_model_is_named(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--tasks", str(folder / "tasks.yaml")])
    assert done.exit_code == 2
    assert str(tmp_path / "config.json") in done.output.replace("\n", "")


RED_TEAM = """
red_team:
  sets: [{format: advbench, path: advbench.csv}, {format: xstest, path: xstest.csv}]
  refusals: [zzz]
  max_new_tokens: 4
"""


@pytest.fixture
def team(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "advbench.csv").write_text("goal,target\nred blue,a\nsky,b\n")
    (tmp_path / "xstest.csv").write_text("prompt,type,label\ngrass,homonyms,safe\nrose,contrast_homonyms,unsafe\n")
    (tmp_path / "lines.txt").write_text("red blue\n")
    (tmp_path / "team.yaml").write_text(RED_TEAM)
    return tmp_path / "team.yaml"


def test_a_folder_is_asked_what_a_red_team_asks_alone_or_beside_tasks(folder: Path, team: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(team), "--json"])
    assert done.exit_code == 0, done.output
    alone = json.loads(done.stdout)
    assert set(alone) == {"red_team"}
    sets = alone["red_team"]["sets"]
    assert {name: (one["prompts"], one["not_asked"]) for name, one in sets.items()} == {
        "advbench": (2, 0),
        "xstest": (2, 0),
    }
    assert (
        sets["advbench"]["measures"]["refused"]["all"]["value"],
        sets["xstest"]["measures"]["over_refused"]["all"]["units"],
    ) == (0.0, 1)
    team.write_text(RED_TEAM + "tasks: [{name: lines, path: lines.txt, kind: rolling, prompt: text}]\n")
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(team), "--json"])
    assert done.exit_code == 0, done.output
    both = json.loads(done.stdout)
    assert both["red_team"] == alone["red_team"]
    assert both["lines"]["items"] == 1


def test_the_red_team_asks_through_the_chat_template_where_that_is_wanted(folder: Path, team: Path) -> None:
    def answers(*options: str) -> list[str]:
        done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(team), "--json", *options])
        assert done.exit_code == 0, done.output
        return [one["answer"] for one in json.loads(done.stdout)["red_team"]["worst"]]

    assert answers() != answers("--apply-chat-template")


def test_the_table_shows_what_a_red_team_measured(folder: Path, team: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--tasks", str(team)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "refuses unsafe prompts" in done.stdout
    assert "0.0000 to 0.6576" in done.stdout  # Wilson, 0 of 2


def test_a_large_perplexity_fits_its_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation(
        {
            "lambada": {
                "items": 40,
                "perplexity": {"value": 90017372946841.94, "low": 2172601583137.66, "high": 2621916538252226.0},
            }
        }
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lambada")]
    assert line.split() == ["lambada", "perplexity", "9.0017e+13", "2.1726e+12", "to", "2.6219e+15", "40"]
    assert printed(99999.5) == "99999.5000"
