"""Prompt sets: accepted forms and rejected records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.examples.read_examples import (
    prompt_example,
    read_set,
)

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?"}, {"prompt": QUESTION}),
        ({"prompt": "2 + 2?", "answer": "4"}, {"prompt": QUESTION, "answer": "4"}),
        (
            {"question": "2 + 2?", "answer": "It is 4.\n#### 4"},
            {"prompt": QUESTION, "answer": "It is 4.\n#### 4"},
        ),
        ({"prompt": "2 + 2?", "answer": 4}, {"prompt": QUESTION, "answer": "4"}),
        ({"prompt": QUESTION, "answer": 4.5}, {"prompt": QUESTION, "answer": "4.5"}),
        ({"prompt": "2 + 2?", "completion": "4"}, {"prompt": QUESTION, "answer": "4"}),
        (
            {"prompt": "2 + 2?", "completion": "It is 4.", "answer": "4"},
            {"prompt": QUESTION, "answer": "4"},
        ),
        ({"instruction": "2 + 2?", "output": "4"}, {"prompt": QUESTION, "answer": "4"}),
        ({"messages": QUESTION}, {"prompt": QUESTION}),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": "4"}]},
            {"prompt": QUESTION, "answer": "4"},
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            {"prompt": QUESTION, "answer": "4"},
        ),
        (
            {"prompt": "2 + 2?", "system": "Be brief."},
            {"prompt": [{"role": "system", "content": "Be brief."}, *QUESTION]},
        ),
    ],
)
def test_prompt_forms(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert prompt_example(row) == expected


def test_answer_key_can_be_named() -> None:
    assert (
        prompt_example({"prompt": "2 + 2?", "gold": "4"}, answer="gold")["answer"]
        == "4"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "text.*prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "answer": ["4"]}, "answer "),
        ({"prompt": "x", "answer": True}, "answer "),
        ({"prompt": "x", "answer": " "}, "answer "),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "message .*answer"),
        (
            {"messages": [*QUESTION, {"role": "system", "content": "x"}]},
            "system message",
        ),
    ],
)
def test_invalid_prompt_is_rejected(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_example(row)


@pytest.mark.slow
def test_prompts_are_read_like_other_examples(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in ({"prompt": "a"}, {"prompt": "b"}, {"other": "c"})
        )
    )
    prompt_set = read_set(str(path), "prompts", max_quarantined=0.5)
    assert {example["prompt"][0]["content"] for example in prompt_set.examples} == {
        "a",
        "b",
    }
    assert (prompt_set.records, len(prompt_set.quarantined)) == (3, 1)
    assert [example["id"] for example in prompt_set.examples] == sorted(
        example["id"] for example in prompt_set.examples
    )
    documented = read_set("python-docs://", "prompts", limit=3).examples
    assert all(set(example) == {"id", "prompt", "answer"} for example in documented)
