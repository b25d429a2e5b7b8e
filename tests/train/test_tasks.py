"""Tasks: files, and scores of a model against plain definitions."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.schema.evaluation import Contamination, Evaluate, Task
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.eval.harness import HarnessModel, Result
from gristmill.train.eval.leaked_items import effect, item_coverage
from gristmill.train.eval.likelihood import Request
from gristmill.train.eval.task_files import TaskError, read_task
from gristmill.train.eval.tasks import open_tasks
from gristmill.train.generation.language_model import LanguageModel, with_tokenizer
from gristmill.train.loop.rows_read import RowsRead, rows_read
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from tests.jsonl import write_jsonl
from tests.packed_sets import piece_table, write_packed_set
from tests.train.data_sets import write_data_set

QUESTIONS = [
    {
        "question": "What is close to one?",
        "options": ["two", "a hundred"],
        "answer": 0,
        "note": "n",
    },
    {
        "question": "Which is a colour?",
        "options": ["socket", "red", "seven"],
        "answer": "B",
        "note": "n",
    },
    {
        "question": "Which one opens?",
        "options": ["open", "close"],
        "answer": "close",
        "note": "n",
    },
]


def task(path: Path, **settings: Any) -> Task:
    return Task.model_validate(
        {
            "name": "t",
            "path": str(path),
            "kind": "multiple_choice",
            "prompt": "question",
            "choices": "options",
            **settings,
        }
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    write_jsonl(path, QUESTIONS)
    return path


@pytest.fixture(scope="module")
def language(
    make_model: Callable[[Shape], Llama], tokenizer_folder: Path
) -> LanguageModel:
    shape = shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48),
        vocab_size=400,
        sequence_length=32,
    )
    return with_tokenizer(make_model(shape).eval(), tokenizer_folder)


@pytest.fixture(scope="module")
def packed_documents(
    tmp_path_factory: pytest.TempPathFactory,
    language: LanguageModel,
    texts: dict[str, str],
) -> PackedSet:
    """Rows of one document with 24 tokens each; two documents appear twice, and two
    more are held out.
    """
    folder = tmp_path_factory.mktemp("documents")
    ids = language.encode(texts["prose"])
    documents = np.array([ids[40 * k : 40 * k + 24] for k in range(10)])
    rows, held_out = np.concatenate([documents[:8], documents[:2]]), documents[8:]
    tokenizer = {"vocab_size": 400, "eos": language.end, "pad": 1, "sha256": ""}
    write_packed_set(
        folder,
        rows,
        {"prose": len(rows)},
        tokenizer,
        {"prose": held_out},
        pieces_of([*range(8), 0, 1], [0] * 8 + [1] * 2),
        validation_pieces={"prose": pieces_of([8, 9], [0, 0])},
    )
    return PackedSet(folder)


def rows_after(packed: PackedSet, steps: int) -> RowsRead:
    """Rows read by a pre-training with one row per step."""
    return rows_read(
        packed,
        Pretrain.model_validate({"steps": steps, "global_batch_size": 1, "seed": 5}),
        None,
    )


def pieces_of(documents: list[int], copies: list[int]) -> pa.Table:
    """A row for each document."""
    return piece_table(
        row=range(len(documents)),
        start=[0] * len(documents),
        length=[24] * len(documents),
        id=[bytes([number]) * 16 for number in documents],
        copy=copies,
    )


def plain_logp(language: LanguageModel, context: list[int], scored: list[int]) -> float:
    """Log-probability of a single sequence, from all logits."""
    row = (context + scored)[-(language.length + 1) :]
    with torch.no_grad():
        logs = torch.log_softmax(language.model(torch.tensor([row[:-1]])), dim=-1)[0]
    return float(
        sum(
            logs[place, row[place + 1]]
            for place in range(len(row) - 1 - len(scored), len(row) - 1)
        )
    )


def answered(language: LanguageModel, section: Task) -> Result:
    (opened,) = open_tasks([section])
    return opened.results(language, 0, 50)["t"]


def test_correct_answers_are_numbers_letters_or_texts(questions: Path) -> None:
    assert [item["target"] for item in read_task(task(questions))["asked"]] == [0, 1, 1]


def test_shots_are_solved_items_that_are_not_asked(questions: Path) -> None:
    section = task(questions, num_fewshot=1, prompt="Q: {{question}}\nA:")
    (opened,) = open_tasks([section])
    harness_task = opened.loaded["tasks"]["t"]
    harness_task.build_all_requests()
    assert {instance.args[0] for instance in harness_task.instances} == {
        f"Q: What is close to one?\nA: two\n\nQ: {question}\nA:"
        for question in ("Which is a colour?", "Which one opens?")
    }
    assert opened.questions() == {
        "t": ["Q: Which is a colour?\nA: red", "Q: Which one opens?\nA: close"]
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "query"}, "task t, item 1.* 'query'.* question, options"),
        ({"prompt": "{{query}}"}, "'query' is undefined"),
        ({"answer": "note"}, "'n' .* 2 choices"),
        ({"choices": "question"}, "two choices"),
        ({"num_fewshot": 3}, r"has 3\b.* 3 "),
        ({"num_fewshot": 4}, "3 items.* 4 shots"),
        ({"prompt": "{{ ''.__class__.__mro__ }}"}, "unsafe"),
        ({"kind": "rolling", "prompt": "{{''}}"}, "item 1: .*empty"),
    ],
)
def test_invalid_item_is_named_with_task(
    questions: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        read_task(task(questions, **settings))


def test_scores_equal_those_of_single_sequences(language: LanguageModel) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(
            tuple(rng.integers(6, 390, c).tolist()),
            tuple(rng.integers(6, 390, s).tolist()),
        )
        for c, s in ((1, 1), (5, 3), (40, 2), (20, 30), (3, 0), (31, 1))
    ]
    scores = language.score(requests)
    for request, score in zip(requests, scores, strict=True):
        scored = list(request.scored)
        assert score.tokens == len(scored)
        assert score.logp == pytest.approx(
            plain_logp(language, list(request.context), scored) if scored else 0.0,
            abs=1e-4,
        )


def test_best_reference_of_an_answer_counts(
    questions: Path, language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = task(questions, kind="generate", answer="options", limit=2)
    monkeypatch.setattr(
        HarnessModel, "generate_until", lambda model, requests: [" a hundred ", "blue"]
    )
    result = answered(language, section)
    assert result.per_item["exact_match"].tolist() == [1.0, 0.0]
    assert [(one["answer"], one["target"]) for one in result.samples] == [
        (" a hundred ", ["two", "a hundred"]),
        ("blue", ["socket", "red", "seven"]),
    ]


def test_answer_ends_before_the_first_stop(
    questions: Path, language: LanguageModel
) -> None:
    repetitive = replace(language, decode=lambda ids: "ab" * len(ids), end=-1)
    settings = {"kind": "generate", "answer": "question", "max_new_tokens": 8}
    for stops, expected in (([], 8 * "ab"), (["x", "abba", "bab"], "a")):
        result = answered(repetitive, task(questions, stop=stops, **settings))
        assert {sample["answer"] for sample in result.samples} == {expected}


@pytest.mark.parametrize("kind", ["multiple_choice", "cloze", "rolling", "generate"])
def test_every_kind_gives_values_with_their_intervals(
    kind: str, questions: Path, language: LanguageModel
) -> None:
    section = task(
        questions,
        kind=kind,
        answer="question" if kind in ("cloze", "generate") else "answer",
        max_new_tokens=8,
    )
    result = answered(language, section)
    names = {
        "multiple_choice": "acc",
        "cloze": "perplexity",
        "rolling": "bits_per_byte",
        "generate": "exact_match",
    }
    measure = result.summary[names[kind]]
    assert measure["low"] <= measure["value"] <= measure["high"]
    assert result.summary["items"] == 3
    json.dumps(result.summary, allow_nan=False)


def test_generation_without_room_for_a_prompt_is_rejected(
    questions: Path, language: LanguageModel
) -> None:
    section = task(questions, kind="generate", answer="question", max_new_tokens=32)
    with pytest.raises(ValueError, match=r"answers of 32 .* 32 tokens"):
        answered(language, section)


@pytest.mark.slow
def test_items_in_unread_rows_are_not_leaks(
    packed_documents: PackedSet, language: LanguageModel
) -> None:
    packed = packed_documents
    order = packed.order(5).rows(np.arange(10))
    texts = [
        " ".join(
            language.decode(packed.read(np.array([row]))[0].tolist()).split()[1:-1]
        )
        for row in range(8)
    ]
    items = {"a": texts}
    section = Contamination(ngram=8, min_coverage=0.9)
    share = item_coverage(
        rows_after(packed, 4),
        lambda rows: [language.decode(row) for row in rows],
        items,
        section,
        0,
    )["a"]
    read = {int(row) % 8 for row in order[:4]}
    assert {number for number in range(8) if share[number] > 0.5} <= read


def test_leaked_items_are_found_in_training_rows(
    packed_documents: PackedSet, language: LanguageModel
) -> None:
    packed = packed_documents
    text = language.decode(packed.read(np.arange(1))[0].tolist())
    words = text.split()
    leaked = " ".join(words[1:-1])
    clean = "none of these words was ever in the training set of this little model"
    items = {"a": [leaked, clean]}
    section = Contamination(ngram=min(8, len(words) - 2), min_coverage=0.9)
    trained = rows_after(packed, 10)
    share = item_coverage(
        trained, lambda rows: [language.decode(row) for row in rows], items, section, 0
    )["a"]
    assert share.tolist() == [1.0, 0.0]
    summary = effect(share, {"acc": np.array([1.0, 0.0])}, section, 0, 10)
    assert (summary["contaminated"], summary["worst"][0]) == (1, 1)
    assert (
        summary["metrics"]["acc"]["contaminated"]["value"],
        summary["metrics"]["acc"]["clean"]["value"],
    ) == (1.0, 0.0)


def test_untrained_perplexities_do_not_overflow(
    questions: Path, language: LanguageModel
) -> None:
    text = {"kind": "rolling", "prompt": "{{ 'x' * 2000 }}", "limit": 1}
    value = answered(language, task(questions, **text)).metrics["word_perplexity"]
    assert value["value"] == pytest.approx(math.exp(700.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "helaswag"}, "'hellaswag'.*kind"),
        ({"name": "humaneval"}, "confirm_run_unsafe_code"),
        ({"name": "sciq"}, "questions.jsonl is not a folder"),
    ],
)
def test_published_task_that_cannot_run_is_rejected(
    questions: Path, settings: dict[str, Any], message: str
) -> None:
    section = Task.model_validate({"path": str(questions), **settings})
    with pytest.raises(TaskError, match=message):
        open_tasks([section])


SCIQ = [
    {
        "question": f"What closes a file {number}?",
        "support": "",
        "distractor1": "it",
        "distractor2": "a line",
        "distractor3": "text",
        "correct_answer": "close",
    }
    for number in range(3)
]


@pytest.fixture(scope="module")
def sciq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = dict.fromkeys(("train", "validation", "test"), SCIQ)
    return write_data_set(tmp_path_factory.mktemp("sciq"), {"default": splits})


def test_published_task_is_asked_of_a_folder(
    sciq: Path, language: LanguageModel
) -> None:
    section = Task(name="sciq", path=OutsidePath(sciq), num_fewshot=1, limit=2)
    (opened,) = open_tasks([section])
    results = opened.results(language, 0, 50)
    assert results["sciq"].items == 2
    assert set(results["sciq"].metrics) == {"acc", "acc_norm"}
    assert opened.questions()["sciq"][1].split("\n")[-1] == "Answer: close"


def test_data_set_without_the_split_or_fields_of_a_task_is_rejected(
    tmp_path: Path,
) -> None:
    folder = write_data_set(tmp_path / "other", {"default": {"test": [{"text": "a"}]}})
    with pytest.raises(TaskError, match=r"task sciq: .*other"):
        open_tasks([Task(name="sciq", path=OutsidePath(folder))])


def test_changed_data_set_is_read_again(sciq: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sciq, tmp_path / "sciq")
    section = Task(name="sciq", path=OutsidePath(folder))
    (before,) = open_tasks([section])
    splits = dict.fromkeys(("train", "validation", "test"), SCIQ[:2])
    shutil.rmtree(folder)
    write_data_set(folder, {"default": splits})
    (after,) = open_tasks([section])
    assert [len(task.questions()["sciq"]) for task in (before, after)] == [3, 2]


def test_code_in_a_data_set_is_rejected_and_does_not_run(
    sciq: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sciq, tmp_path / "sciq")
    ran = tmp_path / "ran"
    (folder / "sciq.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(TaskError, match="scripts"):
        open_tasks([Task(name="sciq", path=OutsidePath(folder))])
    assert not ran.exists()


def test_two_tasks_of_a_name_are_rejected(sciq: Path, questions: Path) -> None:
    own = task(questions).model_copy(update={"name": "sciq"})
    with pytest.raises(TaskError, match="'sciq'"):
        open_tasks([Task(name="sciq", path=OutsidePath(sciq)), own])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("hellaswag", r"\{name: hellaswag, path: FOLDER\}"),
        ({"name": "hellaswag", "path": "a", "stop": ["."]}, "stop: .*kind"),
    ],
)
def test_published_task_needs_its_data_alone(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Evaluate.model_validate({"tasks": [settings]})


def test_published_task_is_read_from_its_dump() -> None:
    section = Task(name="hellaswag", path=OutsidePath("a"), num_fewshot=5)
    assert Task.model_validate(section.model_dump()) == section
