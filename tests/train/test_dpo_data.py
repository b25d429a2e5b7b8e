"""The stage `dpo_data`: rows of preference pairs, rejected records, the audit, and
weights of sets.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.kept_examples import QUARANTINED
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    Chat,
    Conversation,
    NothingToTrainError,
    TemplateMismatchError,
)
from gristmill.train.data.pairs import Pair, write_holdout
from gristmill.train.data.preference_rows import (
    PairRows,
    describe_draws,
    draw_pairs,
    merged,
)
from gristmill.train.objectives.losses import IGNORED
from tests.jsonl import write_jsonl
from tests.packed_sets import verify


def pair(question: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def test_answers_without_an_end_are_rejected_by_their_example(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = shutil.copytree(inputs["tokenizer"], tmp_path / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    data = write_jsonl(tmp_path / "a.jsonl", [pair("why", "because", "?")])
    config = {"data": [{"path": data}], "sequence_length": 40}
    run_stage("dpo_data", inputs, config, tmp_path / "good")
    with pytest.raises(TemplateMismatchError, match=r"a\.jsonl:1"):
        run_stage("dpo_data", {"tokenizer": tokenizer}, config, tmp_path / "bad")


def test_pair_is_two_adjacent_rows_with_a_loss_on_the_answers(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    first = write_jsonl(
        tmp_path / "a.jsonl", [pair(f"q {n}", f"yes {n}", "no") for n in range(3)]
    )
    second = write_jsonl(tmp_path / "b.jsonl", [pair("why", "because", "?")])
    config = {"data": [{"path": first}, {"path": second}], "sequence_length": 40}
    summary = run_stage("dpo_data", inputs, config, tmp_path)
    assert (summary["pairs"], summary["rows_per_set"]) == (4, {"a": 6, "b": 2})
    packed, chat = PackedSet(tmp_path / "data"), Chat(inputs["tokenizer"])
    verify(packed, deep=True)
    assert packed.source_of(np.arange(8)).tolist() == [0] * 6 + [1] * 2
    rows = PairRows(packed)
    assert rows.sets.tolist() == [0, 0, 0, 1]
    for number, record in enumerate(rows.records()):
        assert record["id"] == rows.ids[number]
        for row, name in ((2 * number, "chosen"), (2 * number + 1, "rejected")):
            tokens = chat.encode([*record["prompt"], *record[name]])
            assert (
                packed.read(np.array([row]))[0, : len(tokens.ids)].tolist()
                == tokens.ids.tolist()
            )
            assert (
                packed.pieces(np.array([row]))["id"][0].as_py().hex()
                == rows.ids[number]
            )
    ids, targets = rows.read(np.array([3, 0]))
    assert ids.shape == targets.shape == (4, 40)
    answers = [
        chat.decode(answer_targets[answer_targets != IGNORED].tolist(), special=True)
        for answer_targets in targets
    ]
    assert answers[0] == "because<|end|>"
    assert answers[2:] == ["?<|end|>", "no<|end|>"]
    assert rows.scored_tokens[3].tolist() == [
        (answer_targets != IGNORED).sum() for answer_targets in (targets[0], targets[2])
    ]
    before = (tmp_path / "data" / "train-00000.bin").read_bytes()
    run_stage("dpo_data", inputs, config, tmp_path)
    assert (tmp_path / "data" / "train-00000.bin").read_bytes() == before


def test_stored_record_keeps_the_order_of_keys(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    call = {
        "type": "function",
        "function": {"name": "route", "arguments": {"to": "Bern", "from": "Aarau"}},
    }
    record = {
        "prompt": [{"role": "user", "content": "How?"}],
        "rejected": [{"role": "assistant", "content": "No."}],
        "chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}],
    }
    (tmp_path / "calls.jsonl").write_text(json.dumps(record))
    config = {"data": [{"path": str(tmp_path / "calls.jsonl")}], "sequence_length": 120}
    run_stage("dpo_data", inputs, config, tmp_path)
    rows, chat = PairRows(PackedSet(tmp_path / "data")), Chat(inputs["tokenizer"])
    (kept,) = rows.records()
    row = rows.packed.read(np.array([0]))[0]
    assert '{"to": "Bern", "from": "Aarau"}' in chat.decode(row.tolist(), special=True)
    write_holdout(tmp_path / "holdout.jsonl", [kept], "reference", np.zeros((1, 2)))
    for stored in (kept, json.loads((tmp_path / "holdout.jsonl").read_text())):
        ids = chat.encode([*stored["prompt"], *stored["chosen"]]).ids
        assert row[: len(ids)].tolist() == ids.tolist()


def test_every_record_is_accounted_for_and_audit_findings_are_warned_about(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    rows = [
        pair("q", "long enough", "no"),
        pair("q", "no", "long enough"),
        pair("q ", "long  enough", "No"),
        pair("q " * 60, "a", "b"),
        pair("q", "<|end|>", "b"),
        pair("r", "same", "same"),
        {"text": "no form"},
    ]
    path = write_jsonl(tmp_path / "set.jsonl", rows)
    events: list[dict[str, Any]] = []
    (tmp_path / "work").mkdir()
    summary = importlib.import_module("gristmill.train.stages.dpo_data").run(
        inputs,
        {"data": [{"path": path, "max_quarantined": 0.3}]},
        tmp_path / "data",
        Context(tmp_path / "work", "dpo_data", emit=events.append),
    )
    (counts,) = summary["sets"]
    parts = ("refused", "beyond_limit", "unrenderable", "dropped", "used")
    assert [counts[key] for key in parts] == [2, 0, 1, 1, 3]
    assert counts["records"] == sum(counts[key] for key in parts) == 7
    refused = list(
        map(json.loads, (tmp_path / "data" / QUARANTINED).read_text().splitlines())
    )
    assert [(rejected["place"], rejected["set"]) for rejected in refused] == [
        ("set.jsonl:6", "set"),
        ("set.jsonl:7", "set"),
    ]
    audit = counts["audit"]
    assert {
        key: audit[key]
        for key in ("pairs", "duplicates", "contradictions", "same_answers")
    } == {
        "pairs": 5,
        "duplicates": 1,
        "contradictions": 3,
        "same_answers": 1,
    }
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert [message[: len("set: 1 of 5")] for message in warned] == [
        f"set: {number} of 5" for number in (1, 3, 1, 2)
    ]
    assert re.search(
        r"32 tokens.* 1 too long, 1 not rendered: .*'<\|end\|>'", warned[-1]
    )


def test_leaked_evaluation_items_are_counted_and_warned_about(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    item = "which of the seven rivers carries no boats in winter"
    quiz = write_jsonl(tmp_path / "quiz.jsonl", [{"question": item}])
    path = write_jsonl(
        tmp_path / "set.jsonl",
        [
            pair(item, "a", "b"),
            pair("q", f"{item}?", "b"),
            pair("q", "a", item),
            pair("r", "a", "b"),
        ],
    )
    events: list[dict[str, Any]] = []
    (tmp_path / "work").mkdir()
    summary = importlib.import_module("gristmill.train.stages.dpo_data").run(
        inputs,
        {"data": [{"path": path}], "leaks": {"against": quiz}, "sequence_length": 200},
        tmp_path / "data",
        Context(tmp_path / "work", "dpo_data", emit=events.append),
    )
    (counts,) = summary["sets"]
    assert counts["audit"]["leaks"] == {"quiz": {"items": 1, "leaked": 1, "texts": 2}}
    assert counts["used"] == 4
    assert any(
        re.match("set: 2 of 4 pairs .*quiz", event["message"])
        for event in events
        if event["event"] == "warning"
    )


def test_every_set_without_room_for_answers_is_rejected(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    data = [
        {"path": write_jsonl(tmp_path / name, [pair("word " * 30, "a", "b")])}
        for name in ("first.jsonl", "second.jsonl")
    ]
    every_set = r"(?s)first\.jsonl: .*\b1 pairs .*32 tokens.*second\.jsonl: "
    with pytest.raises(NothingToTrainError, match=every_set):
        run_stage("dpo_data", inputs, {"data": data}, tmp_path)


@pytest.fixture
def two_sets(make_pair_rows: Callable[..., PairRows]) -> PairRows:
    """Sets of 4 and 12 pairs."""

    def make_pair(number: int) -> Pair:
        conversation = Conversation(
            np.array([1, 2, 3 + number]),
            np.array([False, True, True]),
            False,
            f"{number:032x}",
        )
        return Pair(
            {
                "id": conversation.example,
                "prompt": [],
                "chosen": [],
                "rejected": [number],
            },
            conversation,
            conversation,
        )

    return make_pair_rows(
        {
            "small": [make_pair(n) for n in range(4)],
            "large": [make_pair(n) for n in range(4, 16)],
        },
        8,
    )


def weighted(*weights: float | None) -> Dpo:
    return Dpo(
        data=[{"path": str(n), "weight": weight} for n, weight in enumerate(weights)],
        steps=1,
    )  # type: ignore[arg-type]


def test_weight_is_a_share_of_the_trained_pairs(two_sets: PairRows) -> None:
    held_out = np.isin(np.arange(16), [0, 5])
    draws = draw_pairs(two_sets, held_out, weighted(1.0, 1.0), seed=3)
    assert draws[1].tolist() == [4, *range(6, 16)]
    assert sorted(np.bincount(draws[0], minlength=4).tolist()) == [0, 3, 4, 4]
    assert describe_draws(two_sets, ["small", "large"], draws, held_out) == [
        {"name": name, "pairs": pairs, "held_out": 1, "drawn": 11, "drawn_share": 0.5}
        for name, pairs in (("small", 4), ("large", 12))
    ]
    # Every prefix keeps the shares.
    is_small = merged(draws) < 4
    assert all(abs(is_small[:end].sum() - end / 2) <= 1 for end in range(1, 23))
    plain = draw_pairs(two_sets, held_out, weighted(None, None), seed=3)
    assert [len(drawn) for drawn in plain] == [3, 11]


def test_weighted_set_without_training_pairs_is_rejected(two_sets: PairRows) -> None:
    with pytest.raises(NothingToTrainError, match=r"dpo data 0: .*1\.0"):
        draw_pairs(two_sets, np.arange(16) < 4, weighted(1.0, 1.0), seed=3)


def test_all_sets_or_none_have_weights() -> None:
    with pytest.raises(ValueError, match=r"dpo\.data: 1 has no weight"):
        weighted(1.0, None)
