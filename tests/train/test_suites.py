"""Suites: prompts and scores against a plain implementation, centred scores, and their
display.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gristmill.flows.models.evaluate_model import (
    evaluate_folder,
    print_evaluation,
    read_task_file,
)
from gristmill.flows.report.evaluation import suites as report_suites
from gristmill.mixtures.schema.evaluation import Evaluate, Suite
from gristmill.mixtures.schema.model import Model
from gristmill.train.eval.suites import (
    SuiteTask,
    answer_suite,
    centred,
    known_suites,
    read_suite,
    rendered,
    requests_of,
    task_answers,
)
from gristmill.train.eval.task_files import TaskError
from gristmill.train.generation.language_model import LanguageModel, with_tokenizer
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import save_model
from tests.flows.rendered import facts_of
from tests.jsonl import write_jsonl

WORDS = "module class return value text width indent line self import raise error string list yield".split()
Item = Mapping[str, Any]


def make_items(kind: str, number: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    if kind == "multiple_choice":
        return [
            {
                "query": words(4),
                "choices": [f"the {words(2)}" for _ in range(3)],
                "gold": rng.randrange(3),
            }
            for _ in range(number)
        ]
    if kind == "schema":
        return [
            {
                "context_options": [words(3), words(4)],
                "continuation": words(3),
                "gold": rng.randrange(2),
            }
            for _ in range(number)
        ]
    return [
        {"context": f" {words(4)} ", "continuation": words(1)} for _ in range(number)
    ]


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48),
        vocab_size=400,
        sequence_length=128,
    )


@pytest.fixture(scope="module")
def language(
    make_model: Callable[[Shape], Llama], tokenizer_folder: Path, shape: Shape
) -> LanguageModel:
    return with_tokenizer(make_model(shape).eval(), tokenizer_folder)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of CORE, with 14 random items each."""
    folder = tmp_path_factory.mktemp("bundle")
    for number, task in enumerate(known_suites()["core22"].tasks):
        path = folder / task.file
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, make_items(task.kind, 14, number))
    return folder


def plain_answers(
    language: LanguageModel, task: SuiteTask, items: Sequence[Item]
) -> list[float]:
    """Answers by the definition of nanochat, item by item and text by text, with all
    logits.
    """
    answers = []
    for number, item in enumerate(items):
        pool = [k for k in range(len(items)) if k != number]
        shots = ""
        for k in random.Random(1234 + number).sample(pool, task.shots):
            solved = items[k]
            if task.kind == "multiple_choice":
                shots += (
                    solved["query"]
                    + task.delimiter
                    + solved["choices"][solved["gold"]]
                    + "\n\n"
                )
            elif task.kind == "schema":
                shots += (
                    solved["context_options"][solved["gold"]]
                    + task.delimiter
                    + solved["continuation"]
                    + "\n\n"
                )
            else:
                shots += (
                    solved["context"].strip()
                    + task.delimiter
                    + solved["continuation"]
                    + "\n\n"
                )
        if task.kind == "language_modeling":
            prompt = shots + item["context"].strip() + task.delimiter
            texts = [prompt + item["continuation"]]
            starts = [len(language.encode(prompt.strip())) + 1]
        elif task.kind == "schema":
            texts = [
                shots + solved + task.delimiter + item["continuation"]
                for solved in item["context_options"]
            ]
        else:
            texts = [
                shots + item["query"] + task.delimiter + solved
                for solved in item["choices"]
            ]
        rows = [[language.start, *language.encode(text)] for text in texts]
        if task.kind == "schema":
            common = 0
            while len({row[-1 - common] for row in rows}) == 1:
                common += 1
            starts = [len(row) - common for row in rows]
        elif task.kind == "multiple_choice":
            common = 0
            while len({row[common] for row in rows}) == 1:
                common += 1
            starts = [common] * len(rows)
        losses, greedy = [], []
        for ids, start in zip(rows, starts, strict=True):
            row = ids[-(language.length + 1) :]
            first_scored = start - (len(ids) - len(row))
            with torch.no_grad():
                logs = torch.log_softmax(
                    language.model(torch.tensor([row[:-1]]))[0], dim=-1
                )
            targets = torch.tensor(row[1:])
            losses.append(
                float(-logs[range(len(targets)), targets][first_scored - 1 :].mean())
            )
            greedy.append(
                bool((logs.argmax(dim=-1) == targets)[first_scored - 1 :].all())
            )
        answers.append(
            float(greedy[0])
            if task.kind == "language_modeling"
            else float(losses.index(min(losses)) == item["gold"])
        )
    return answers


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling"])
def test_every_kind_is_scored_by_its_plain_definition(
    language: LanguageModel, kind: Any
) -> None:
    shots = 0 if kind == "language_modeling" else 2
    task = SuiteTask(
        name="t", file="", kind=kind, shots=shots, baseline=25, delimiter="\nAnswer: "
    )
    items = make_items(kind, 60, 4)
    if kind == "language_modeling":
        # A random model would get nothing right, so make it prefer words that begin
        # with a space, and let every second item expect its prediction.
        language = replace(language, model=copy.deepcopy(language.model))
        words = [
            token_id
            for token_id in range(400)
            if re.fullmatch(" [a-z]{2,}", language.decode([token_id]))
        ]
        with torch.no_grad():
            language.model.model.embed_tokens.weight[words] *= 4
        for number in range(0, 60, 2):
            prompt = rendered(task, items, number)[0][0]
            logits = language.model(
                torch.tensor([[language.start, *language.encode(prompt)]])
            )[0, -1, :400]
            items[number]["continuation"] = (
                language.decode([int(logits.argmax())]).strip() or "module"
            )
    expected = plain_answers(language, task, items)
    assert 0 < sum(expected) < len(expected)
    np.testing.assert_array_equal(task_answers(language, task, items), expected)


def test_shots_are_drawn_per_item_without_the_item_itself() -> None:
    task = SuiteTask(
        name="t",
        file="",
        kind="multiple_choice",
        shots=3,
        baseline=25,
        delimiter="\nAnswer: ",
    )
    items = [
        {
            "query": f"q{number}",
            "choices": [f"a{number}", f"b{number}"],
            "gold": number % 2,
        }
        for number in range(9)
    ]
    draws = set()
    for number in range(9):
        (first_text, second_text), _ = rendered(task, items, number)
        assert first_text.endswith(f"\n\nq{number}\nAnswer: a{number}")
        assert second_text.removesuffix(f"b{number}") == first_text.removesuffix(
            f"a{number}"
        )
        *shots, _ = first_text.split("\n\n")
        drawn = [int(shot[1]) for shot in shots]
        assert drawn == random.Random(1234 + number).sample(
            [k for k in range(9) if k != number], 3
        )
        assert all(
            shot == f"q{k}\nAnswer: {'ab'[k % 2]}{k}"
            for k, shot in zip(drawn, shots, strict=True)
        )
        draws.add(tuple(drawn))
    assert len(draws) > 5


def test_choice_that_begins_another_keeps_a_scored_token() -> None:
    rows = requests_of(
        lambda text: list(map(ord, text)), 0, "multiple_choice", ["ab", "abc"]
    )
    assert [(request.context, request.scored) for request in rows] == [
        ((0, 97), (98,)),
        ((0, 97), (98, 99)),
    ]
    (request,) = requests_of(
        lambda text: list(map(ord, text)), 0, "language_modeling", ["ab", "ab c"]
    )
    assert request.scored == (32, 99)


def test_long_prompt_loses_its_beginning(language: LanguageModel) -> None:
    task = SuiteTask(name="t", file="", kind="schema", shots=0, baseline=50)
    items = make_items("schema", 6, 5)
    long_items = [
        {
            **item,
            "context_options": [
                f"{'very ' * 300}{option}" for option in item["context_options"]
            ],
        }
        for item in items
    ]
    assert len(language.encode(long_items[0]["context_options"][0])) > language.length
    assert set(task_answers(language, task, long_items)) <= {0.0, 1.0}


def test_centred_score_is_zero_at_chance_and_one_if_all_are_correct() -> None:
    assert centred(0.25, 25) == 0.0
    assert centred(1.0, 62) == pytest.approx(1.0)
    assert centred(0.5, 25) == pytest.approx(1 / 3)
    assert centred(0.3, 62) == pytest.approx(-0.32 / 0.38)


def test_core_has_22_tasks_and_manifest_names_are_known() -> None:
    assert set(known_suites()) == set(get_args(Suite.model_fields["suite"].annotation))
    core = known_suites()["core22"]
    assert len({task.name for task in core.tasks}) == 22
    assert all(
        0 < reference.score < 1 and reference.source.startswith("github.com/")
        for reference in core.references
    )
    assert {task.file for task in known_suites()["small"].tasks} <= {
        task.file for task in core.tasks
    }


@pytest.mark.slow
def test_suite_score_is_the_mean_of_centred_tasks_with_an_interval(
    language: LanguageModel, bundle: Path
) -> None:
    section = Suite(suite="core22", path=str(bundle), limit=12)
    items_by_task = read_suite(section)
    assert all(len(items) == 12 for items in items_by_task.values())
    summary = answer_suite(language, section, items_by_task, 5, 200)
    for task in known_suites()["core22"].tasks:
        measures = summary.tasks[task.name]
        correct = plain_answers(language, task, items_by_task[task.name])
        assert measures.accuracy["value"] == pytest.approx(sum(correct) / 12)
        assert measures.centred["value"] == pytest.approx(
            centred(sum(correct) / 12, task.baseline)
        )
        assert (
            measures.accuracy["low"]
            <= measures.accuracy["value"]
            <= measures.accuracy["high"]
        )
    score = summary.score
    assert score["value"] == pytest.approx(
        np.mean([measures.centred["value"] for measures in summary.tasks.values()])
    )
    assert score["low"] < score["value"] < score["high"]
    assert score["high"] - score["low"] < max(
        measures.accuracy["high"] - measures.accuracy["low"]
        for measures in summary.tasks.values()
    )
    assert summary == answer_suite(language, section, read_suite(section), 5, 200)


def test_items_of_a_suite_are_shuffled_and_limited_reproducibly(bundle: Path) -> None:
    all_items, limited_items = (
        read_suite(Suite(suite="small", path=str(bundle), limit=limit))
        for limit in (None, 5)
    )
    assert all(limited_items[name] == all_items[name][:5] for name in all_items)
    with (bundle / "commonsense_reasoning/copa.jsonl").open() as lines:
        assert all_items["copa"] != [json.loads(line) for line in lines]
        assert sorted(map(str, all_items["copa"])) == sorted(
            map(
                str,
                map(
                    json.loads,
                    (bundle / "commonsense_reasoning/copa.jsonl")
                    .read_text()
                    .splitlines(),
                ),
            )
        )


def test_missing_files_fields_and_items_are_named(tmp_path: Path, bundle: Path) -> None:
    for task in known_suites()["small"].tasks:
        (tmp_path / task.file).parent.mkdir(exist_ok=True)
        (tmp_path / task.file).write_bytes((bundle / task.file).read_bytes())
    section = Suite(suite="small", path=str(tmp_path))
    read_suite(section)
    (tmp_path / "commonsense_reasoning/copa.jsonl").write_text(
        '{"query": "a", "choices": ["b"]}\n'
    )
    with pytest.raises(TaskError, match=r"copa\.jsonl, item 1.* 'gold'"):
        read_suite(section)
    for name in ("commonsense_reasoning/copa.jsonl", "world_knowledge/arc_easy.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(TaskError, match=r"copa\.jsonl, world_knowledge/arc_easy"):
        read_suite(section)
    with pytest.raises(TaskError, match=r"jeopardy has 10 items.* 10 "):
        read_suite(Suite(suite="core22", path=str(bundle), limit=10))


def test_suite_is_evaluated_and_shown_in_the_report(
    tmp_path: Path,
    bundle: Path,
    make_model: Callable[[Shape], Llama],
    tokenizer_folder: Path,
    shape: Shape,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    save_model(tmp_path / "model", shape, dict(make_model(shape).named_parameters()))
    (tmp_path / "tasks.yaml").write_text(
        f"suites: [{{suite: small, path: {bundle}, limit: 4}}]\n"
    )
    file = read_task_file(tmp_path / "tasks.yaml")
    evaluation = evaluate_folder(
        str(tmp_path / "model"),
        str(tokenizer_folder),
        Evaluate(suites=file.suites, seed=0),
    )
    print_evaluation(evaluation)
    evaluation = evaluation["suites"]
    printed = capsys.readouterr().out
    assert f"{evaluation['small']['score']['value']:.4f}" in printed
    assert "lambada_openai" in printed
    core = {
        **evaluation["small"],
        "references": [
            asdict(reference) for reference in known_suites()["core22"].references
        ],
    }
    section = report_suites(
        facts_of(evaluation={"models": {"pretrain": {"suites": {"core22": core}}}})
    )
    assert section is not None
    html = str(section)
    assert f"{evaluation['small']['score']['value']:.4f}" in html
    assert "GPT-2 (1.6B)" in html
    assert "0.2565" in html
    assert "nanochat, README.md" in html
    assert report_suites(facts_of(evaluation={"models": {"pretrain": {}}})) is None


def test_duplicate_name_is_rejected() -> None:
    with pytest.raises(ValidationError, match="'small'"):
        Evaluate.model_validate(
            {
                "suites": [
                    {"suite": "small", "path": "a"},
                    {"suite": "small", "path": "b"},
                ]
            }
        )
