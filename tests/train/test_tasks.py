"""Tasks: files, and scores of a model against plain definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.schema.evaluation import Contamination, Task
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    MANIFEST,
    PIECES_SCHEMA,
    train_name,
    validation_name,
)
from gristmill.tokenize.packed_writing import write_rows
from gristmill.train.eval.answering import Reader, answer_task, open_reader, until
from gristmill.train.eval.leaked_items import effect, item_coverage
from gristmill.train.eval.likelihood import (
    Request,
    Score,
    continuation,
    score_requests,
    windows,
)
from gristmill.train.eval.metrics import choice_metrics, generation_metrics
from gristmill.train.eval.tasks import Item, TaskError, read_task
from gristmill.train.loop.rows_read import RowsRead, rows_read
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from tests.packed_sets import write_packed_set
from tests.train.jsonl import write_jsonl

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
def reader(make_model: Callable[[Shape], Llama], tokenizer_folder: Path) -> Reader:
    shape = shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48),
        vocab_size=400,
        sequence_length=32,
    )
    return open_reader(make_model(shape).eval(), tokenizer_folder)


@pytest.fixture(scope="module")
def packed_documents(
    tmp_path_factory: pytest.TempPathFactory, reader: Reader, texts: dict[str, str]
) -> PackedSet:
    """Rows of one document with 24 tokens each; two documents appear twice, and two
    more are held out.
    """
    folder = tmp_path_factory.mktemp("documents")
    ids = reader.encode(texts["prose"])
    documents = np.array([ids[40 * k : 40 * k + 24] for k in range(10)])
    rows, held_out = np.concatenate([documents[:8], documents[:2]]), documents[8:]
    tokenizer = {"vocab_size": 400, "eos": reader.prefix, "pad": 1, "sha256": ""}
    write_packed_set(folder, rows, {"prose": len(rows)}, tokenizer, {"prose": held_out})
    manifest = read_json(folder / MANIFEST)
    copies = [0] * 8 + [1] * 2
    manifest["train"]["shards"] = [
        write_rows(
            folder / train_name(0),
            rows.astype("<u2"),
            pieces_of([*range(8), 0, 1], copies),
        )
    ]
    manifest["validation"]["prose"] = write_rows(
        folder / validation_name("prose"),
        held_out.astype("<u2"),
        pieces_of([8, 9], [0, 0]),
    )
    write_json(folder / MANIFEST, manifest)
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
    return pa.table(
        {
            "row": np.arange(len(documents)),
            "start": np.zeros(len(documents), np.int32),
            "length": np.full(len(documents), 24, np.int32),
            "id": pa.array([bytes([k]) * 16 for k in documents], pa.binary(16)),
            "source": np.zeros(len(documents), np.int32),
            "copy": np.array(copies, np.int32),
            "offset": np.zeros(len(documents), np.int64),
        },
        schema=PIECES_SCHEMA,
    )


def plain_logp(reader: Reader, context: list[int], scored: list[int]) -> float:
    """Log-probability of a single sequence, from all logits."""
    row = (context + scored)[-(reader.length + 1) :]
    with torch.no_grad():
        logs = torch.log_softmax(reader.model(torch.tensor([row[:-1]])), dim=-1)[0]
    return float(
        sum(
            logs[place, row[place + 1]]
            for place in range(len(row) - 1 - len(scored), len(row) - 1)
        )
    )


def test_correct_answers_are_numbers_letters_or_texts(questions: Path) -> None:
    assert [item.right for item in read_task(task(questions))] == [0, 1, 1]


def test_shots_are_solved_items_that_are_not_scored(questions: Path) -> None:
    items = read_task(task(questions, num_fewshot=1, prompt="Q: {{question}}\nA:"))
    assert [item.number for item in items] == [2, 3]
    assert (
        items[0].context
        == "Q: What is close to one?\nA: two\n\nQ: Which is a colour?\nA:"
    )
    assert items[0].question == "Q: Which is a colour?\nA: red"


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
    ],
)
def test_invalid_item_is_named_with_task(
    questions: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        read_task(task(questions, **settings))


def test_trailing_spaces_of_the_context_belong_to_the_answer(reader: Reader) -> None:
    request = continuation(reader.encode, reader.prefix, "def close ", "it")
    assert list(request.context) == reader.encode("def close")
    assert list(request.context + request.scored) == reader.encode("def close it")
    assert continuation(reader.encode, reader.prefix, "", "it").context == (
        reader.prefix,
    )


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70])
def test_windows_score_every_id_once_and_give_it_context(size: int) -> None:
    ids = list(range(100, 100 + size))
    parts = list(windows(ids, 0, 32))
    assert [scored_id for window in parts for scored_id in window.scored] == ids
    assert parts[0].context == (0,)
    assert all(window.context[-1] == window.scored[0] - 1 for window in parts[1:])
    assert all(len(window.context) + len(window.scored) <= 33 for window in parts)


def test_scores_equal_those_of_single_sequences(reader: Reader) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(
            tuple(rng.integers(6, 390, c).tolist()),
            tuple(rng.integers(6, 390, s).tolist()),
        )
        for c, s in ((1, 1), (5, 3), (40, 2), (20, 30), (3, 0), (31, 1))
    ]
    scores = score_requests(reader.model, requests, reader.length, reader.device)
    for request, score in zip(requests, scores, strict=True):
        scored = list(request.scored)
        assert score.tokens == len(scored)
        assert score.logp == pytest.approx(
            plain_logp(reader, list(request.context), scored) if scored else 0.0,
            abs=1e-4,
        )


def test_choices_by_hand() -> None:
    item = Item(1, "q", ("ab", "abcd"), 1, "q")
    scores = [Score(-2.0, True, 1), Score(-3.0, False, 3)]
    measures = choice_metrics([item], [scores])
    # -2 > -3, but per character -1 < -0.75
    assert measures["acc"].tolist() == [0.0]
    assert (
        measures["acc_norm"].tolist()
        == measures["acc_bytes"].tolist()
        == measures["acc_token"].tolist()
        == [1.0]
    )
    share = 1 / (1 + math.exp(-1.0))
    assert measures["brier"].tolist() == [
        pytest.approx(share**2 + (1 - share - 1) ** 2)
    ]


def test_generated_texts_are_compared_with_the_best_reference() -> None:
    items = [Item(1, "", ("the red fox", "a dog"), 0, ""), Item(2, "", ("42",), 0, "")]
    measures = generation_metrics(
        ("exact_match", "contains", "f1"), items, [" a dog ", "it is 42 or 43"]
    )
    assert measures["exact_match"].tolist() == [1.0, 0.0]
    assert measures["contains"].tolist() == [1.0, 1.0]
    assert measures["f1"].tolist() == [1.0, pytest.approx(2 / 6)]


def test_answer_ends_at_the_first_stop() -> None:
    assert until("one\ntwo. three", (".", "\n")) == "one"
    assert until("one", (".",)) == "one"


@pytest.mark.parametrize("kind", ["multiple_choice", "cloze", "rolling", "generate"])
def test_every_kind_gives_values_with_their_intervals(
    kind: str, questions: Path, reader: Reader
) -> None:
    section = task(
        questions,
        kind=kind,
        answer="question" if kind in ("cloze", "generate") else "answer",
        max_new_tokens=8,
    )
    result = answer_task(reader, section, read_task(section), 0, 50)
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
    questions: Path, reader: Reader
) -> None:
    section = task(questions, kind="generate", answer="question", max_new_tokens=32)
    with pytest.raises(ValueError, match=r"max_new_tokens 32\b.* 32 tokens"):
        answer_task(reader, section, read_task(section), 0, 10)


@pytest.mark.slow
def test_items_in_unread_rows_are_not_leaks(
    packed_documents: PackedSet, reader: Reader
) -> None:
    packed = packed_documents
    order = packed.order(5).rows(np.arange(10))
    texts = [
        " ".join(reader.decode(packed.read(np.array([row]))[0].tolist()).split()[1:-1])
        for row in range(8)
    ]
    items = {"a": [Item(1, text, ("x",), 0, text) for text in texts]}
    section = Contamination(ngram=8, min_coverage=0.9)
    share = item_coverage(
        rows_after(packed, 4),
        lambda rows: [reader.decode(row) for row in rows],
        items,
        section,
        0,
    )["a"]
    read = {int(row) % 8 for row in order[:4]}
    assert {number for number in range(8) if share[number] > 0.5} <= read


def test_leaked_items_are_found_in_training_rows(
    packed_documents: PackedSet, reader: Reader
) -> None:
    packed = packed_documents
    text = reader.decode(packed.read(np.arange(1))[0].tolist())
    words = text.split()
    leaked = " ".join(words[1:-1])
    items = {
        "a": [
            Item(1, leaked, ("x",), 0, leaked),
            Item(
                2,
                "",
                ("x",),
                0,
                "none of these words was ever in the training set of this little model",
            ),
        ]
    }
    section = Contamination(ngram=min(8, len(words) - 2), min_coverage=0.9)
    trained = rows_after(packed, 10)
    share = item_coverage(
        trained, lambda rows: [reader.decode(row) for row in rows], items, section, 0
    )["a"]
    assert share.tolist() == [1.0, 0.0]
    summary = effect(share, {"acc": np.array([1.0, 0.0])}, section, 0, 10)
    assert (summary["contaminated"], summary["worst"][0]) == (1, 1)
    assert (
        summary["acc"]["contaminated"]["value"],
        summary["acc"]["clean"]["value"],
    ) == (1.0, 0.0)


def test_unknown_generation_metric_is_rejected() -> None:
    item = Item(1, "Q", ("Paris",), 0, "Q Paris")
    with pytest.raises(ValueError, match="'meteor'"):
        generation_metrics(["meteor"], [item], ["Paris"])
