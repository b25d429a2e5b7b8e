"""The step `judge_pairs`: pairs are compared in both orders, and position and length
biases are measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.dataprep.examples.kept_examples import usable_sets
from gristmill.dataprep.examples.prepare_examples import run
from gristmill.dataprep.llm import client as llm_client
from gristmill.dataprep.llm.judge_pairs import biases_of, score_of
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.report.finetuning import comparisons
from gristmill.flows.report.stage_summaries import PreparedStep, read_as
from gristmill.flows.running.session import open_session
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema.posttraining import Sft, WeightedPairs
from gristmill.mixtures.schema.prepare import ExampleStep
from tests.chat_endpoint import Drop, Endpoint
from tests.dataprep.document_shards import MakeContext

SHOWN = re.compile(r"<first>\n(.*)\n</first>", re.DOTALL)
PAIRS = [
    # the chosen answer is better and longer
    *(("good " * (2 + at), f"bad {at}") for at in range(6)),
    *((f"bad {at}", "good " * (2 + at)) for at in range(6, 9)),  # swapped
    ("even, yes", "even, no"),
    ("shrug one", "shrug two"),
]


def compare(prompt: str, before: int) -> str:
    """A judge that prefers good answers, the first of even ones, and neither if it
    shrugs.
    """
    match = SHOWN.search(prompt)
    assert match is not None
    first = match[1]
    if "shrug" in first:
        return '{"better": "same"}'
    better = "first" if "even" in first or first.startswith("good") else "second"
    return json.dumps({"better": better, "reason": "it is"})


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(llm_client, "FIRST_WAIT_SECONDS", 0.001)
    with Endpoint(compare) as server:
        yield server


Prepare = Callable[..., dict[str, Any]]


@pytest.fixture
def prepared(endpoint: Endpoint, tmp_path: Path, make_context: MakeContext) -> Prepare:
    rows = [
        {
            "prompt": f"question {at}",
            "chosen": chosen.strip(),
            "rejected": rejected.strip(),
        }
        for at, (chosen, rejected) in enumerate(PAIRS)
    ]
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )

    def prepare(out: str = "out", **settings: Any) -> dict[str, Any]:
        model = {"endpoint": endpoint.url, "model": "one"}
        step = ExampleStep.model_validate({"judge_pairs": {"model": model, **settings}})
        return run(
            {},
            {
                "kind": "dpo",
                "data": [{"path": str(tmp_path / "pairs.jsonl")}],
                "prepare": [step.model_dump(mode="json")],
            },
            tmp_path / out,
            make_context(f"{out}/work"),
        )

    return prepare


def kept_answers(tmp_path: Path, out: str = "out") -> set[str]:
    pairs = WeightedPairs(path=str(tmp_path / "pairs.jsonl"))
    (example_set,) = usable_sets([pairs], "dpo", {"dpo_prepare": tmp_path / out})
    return {example["chosen"][0]["content"] for example in example_set.examples}


def test_pairs_confirmed_in_both_orders_are_kept_and_biases_measured(
    prepared: Prepare, endpoint: Endpoint, tmp_path: Path
) -> None:
    summary = prepared()
    assert kept_answers(tmp_path) == {chosen.strip() for chosen, _ in PAIRS[:6]}
    assert summary["sets"][0]["dropped"] == {
        "judge_pairs/rejected": 3,
        "judge_pairs/undecided": 2,
    }
    (step,) = summary["steps"]
    biases = step["biases"]
    assert endpoint.asked.total() == 22 == step["asked"][0]["asked"]
    assert (biases["pairs"], biases["decided"], biases["confirmed"]) == (
        11,
        9 / 11,
        6 / 9,
    )
    # one of two orders for nine pairs, both for the even one
    assert biases["first_taken"] == 11 / 20
    assert (biases["longer_taken"], biases["longer_chosen"]) == (1.0, 6 / 9)
    _, table, *_ = comparisons(read_as(PreparedStep, step))
    assert isinstance(table, Table)
    assert table.rows == [["one", "11", "81.8%", "66.7%", "55.0%", "100.0%", "66.7%"]]


def test_nothing_is_dropped_without_drop(
    prepared: Prepare, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.behaviour = lambda prompt, before: '{"better": "first"}'
    summary = prepared(drop=[])
    assert len(kept_answers(tmp_path)) == 11
    biases = summary["steps"][0]["biases"]
    assert [biases[key] for key in ("first_taken", "decided", "longer_taken")] == [
        1.0,
        0.0,
        None,
    ]


def test_each_pair_has_one_principle_in_both_orders(
    prepared: Prepare, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "principles.txt").write_text("Do no harm.\n\nBe kind.\n")
    prepared(principles=str(tmp_path / "principles.txt"))
    drawn: dict[str, set[str]] = {}
    for prompt in endpoint.asked:
        question = re.search(r"question \d+", prompt)
        assert question is not None
        drawn.setdefault(question[0], set()).add(
            "Be kind." if "Be kind." in prompt else "Do no harm."
        )
    assert all(len(of_pair) == 1 for of_pair in drawn.values())
    assert set.union(*drawn.values()) == {"Be kind.", "Do no harm."}


def test_answers_before_a_failure_are_reused(
    prepared: Prepare, endpoint: Endpoint
) -> None:
    endpoint.behaviour = lambda prompt, before: (
        compare(prompt, before) if endpoint.answered.total() < 9 else Drop()
    )
    with pytest.raises(llm_client.AskingError):
        prepared(
            model={
                "endpoint": endpoint.url,
                "model": "one",
                "patience_seconds": 0.05,
                "concurrency": 1,
            }
        )
    endpoint.behaviour = compare
    prepared()
    assert set(endpoint.answered.values()) == {1}
    assert len(endpoint.answered) == 22


@pytest.mark.parametrize(
    ("verdicts", "score"),
    [
        (("first", "second"), 1),
        (("second", "first"), -1),
        (("first", "first"), 0),
        (("same", "second"), 0),
    ],
)
def test_answer_must_win_in_both_orders(verdicts: tuple[str, str], score: int) -> None:
    assert score_of(*verdicts) == score


def test_biases_without_pairs_are_zero_or_none() -> None:
    assert set(biases_of("one", {}).values()) == {"one", 0, None}


def test_judge_pairs_rejects_conversations_and_invalid_templates(
    tmp_path: Path,
) -> None:
    step = {
        "judge_pairs": {"model": {"endpoint": "http://127.0.0.1:1/v1", "model": "one"}}
    }
    with pytest.raises(ValidationError, match=r"dpo\.prepare"):
        Sft.model_validate(
            {
                "data": [{"path": "x.jsonl"}],
                "steps": 1,
                "global_batch_size": 1,
                "prepare": [step],
            }
        )
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
    )
    (tmp_path / "web.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "ask.j2").write_text("{{ promt }}")
    step["judge_pairs"]["template"] = "ask.j2"
    manifest = tmp_path / "compared.yaml"
    manifest.write_text(
        json.dumps(
            {
                "name": "compared",
                "sources": {"web": {"path": "web.jsonl"}},
                "tokenizer": {},
                "mix": {"tokens": 1000, "sequence_length": 64},
                "pretrain": {
                    "model": {"layers": 1, "width": 16, "heads": 2},
                    "steps": 1,
                    "global_batch_size": 1,
                },
                "dpo": {
                    "data": [{"path": "pairs.jsonl"}],
                    "prepare": [step],
                    "steps": 1,
                    "global_batch_size": 1,
                },
            }
        )
    )
    with pytest.raises(ManifestError, match=r"'promt', did you mean 'prompt'"):
        open_session(str(manifest), [], str(tmp_path / "store"))
