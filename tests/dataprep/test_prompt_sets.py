"""Sets of prompts: every form that is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.examples.read_examples import prompt_example, read_examples, read_set

ASKED = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?"}, {"prompt": ASKED}),
        ({"prompt": "2 + 2?", "answer": "4"}, {"prompt": ASKED, "answer": "4"}),
        ({"question": "2 + 2?", "answer": "It is 4.\n#### 4"}, {"prompt": ASKED, "answer": "It is 4.\n#### 4"}),
        ({"prompt": "2 + 2?", "answer": 4}, {"prompt": ASKED, "answer": "4"}),
        ({"prompt": ASKED, "answer": 4.5}, {"prompt": ASKED, "answer": "4.5"}),
        ({"prompt": "2 + 2?", "completion": "4"}, {"prompt": ASKED, "answer": "4"}),
        ({"prompt": "2 + 2?", "completion": "It is 4.", "answer": "4"}, {"prompt": ASKED, "answer": "4"}),
        ({"instruction": "2 + 2?", "output": "4"}, {"prompt": ASKED, "answer": "4"}),
        ({"messages": ASKED}, {"prompt": ASKED}),
        ({"messages": [*ASKED, {"role": "assistant", "content": "4"}]}, {"prompt": ASKED, "answer": "4"}),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
            {"prompt": ASKED, "answer": "4"},
        ),
        ({"prompt": "2 + 2?", "system": "Be brief."}, {"prompt": [{"role": "system", "content": "Be brief."}, *ASKED]}),
    ],
)
def test_the_forms_of_a_prompt(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert prompt_example(row) == expected


def test_the_key_of_the_answer_may_be_named() -> None:
    assert prompt_example({"prompt": "2 + 2?", "gold": "4"}, answer="gold")["answer"] == "4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no known form: its keys are text; needed are prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x", "answer": ["4"]}, "answer must be a text or a number"),
        ({"prompt": "x", "answer": True}, "answer must be a text or a number"),
        ({"prompt": "x", "answer": " "}, "answer must be a text or a number"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "no message in front of the answer"),
        ({"messages": [*ASKED, {"role": "system", "content": "x"}]}, "a system message only at its beginning"),
    ],
)
def test_what_is_no_prompt_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_example(row)


@pytest.mark.slow
def test_prompts_are_read_counted_and_named_like_other_examples(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "a"}, {"prompt": "b"}, {"other": "c"})))
    found = read_set(str(path), "prompts", max_quarantined=0.5)
    assert {one["prompt"][0]["content"] for one in found.examples} == {"a", "b"}
    assert (found.records, len(found.quarantined)) == (3, 1)
    assert [one["id"] for one in found.examples] == sorted(one["id"] for one in found.examples)
    documented = read_examples("python-docs://", "prompts", limit=3)
    assert all(set(one) == {"id", "prompt", "answer"} for one in documented)
