import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import gristmill.dataprep.reading.docquestions as docquestions
from gristmill.dataprep.reading.docquestions import MAX_ANSWER_CHARACTERS
from gristmill.dataprep.reading.examples import ExamplesError, examples_listing, read_examples
from gristmill.dataprep.reading.pythondocs import standard_library_files


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


CHAT = [{"role": "system", "content": "s"}, user("q"), assistant("a"), user("q2"), assistant("a2")]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": CHAT, "extra": 1}, CHAT),
        ({"prompt": "q", "completion": "a"}, [user("q"), assistant("a")]),
        ({"prompt": "q", "response": "a"}, [user("q"), assistant("a")]),
        ({"prompt": [user("q")], "completion": [assistant("a")]}, [user("q"), assistant("a")]),
        ({"instruction": "do", "input": "this", "output": "a"}, [user("do\n\nthis"), assistant("a")]),
        ({"instruction": "do", "input": "", "output": "a"}, [user("do"), assistant("a")]),
        ({"instruction": "do", "output": "a"}, [user("do"), assistant("a")]),
    ],
)
def test_every_form_of_instruction_becomes_messages(tmp_path: Path, row: Any, messages: Any) -> None:
    (example,) = read_examples(write(tmp_path / "a.jsonl", [row]), "sft")
    assert example["messages"] == messages
    assert set(example) == {"id", "messages"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": "q", "chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
    ],
)
def test_every_form_of_preference_becomes_prompt_and_two_answers(tmp_path: Path, row: Any) -> None:
    (example,) = read_examples(write(tmp_path / "a.jsonl", [row]), "dpo")
    assert example == {
        "id": example["id"], "prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")],
    }  # fmt: skip


def test_bad_rows_are_listed_with_file_line_and_reason(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        "{not json",
        {"text": "x"},
        {"messages": []},
        {"messages": [user("q")]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [user("q"), {"role": "assistant"}]},
        {"prompt": "q", "completion": "  "},
        {"messages": [user("q"), {"role": "system", "content": "s"}, assistant("a")]},
        [1],
        '{"prompt": "q", "completion": "\\ud800"}',
    ]
    with pytest.raises(ExamplesError) as raised:
        read_examples(write(tmp_path / "a.jsonl", rows), "sft")
    text = str(raised.value)
    assert "10 lines are no sft examples" in text
    for line, reason in {
        2: "not valid JSON", 3: "no known form: its keys are text", 4: "messages must be a list of messages",
        5: "must end with the assistant, not with the user", 6: "role 'robot' is none of system, user, assistant",
        7: "messages, message 2: content must be a string", 8: "completion is empty",
        9: "a system message only at its beginning", 10: "a JSON object was expected", 11: "lone surrogate",
    }.items():  # fmt: skip
        assert any(f"a.jsonl:{line}: " in found and reason in found for found in text.splitlines()), (line, reason)


def test_at_most_twenty_bad_rows_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError) as raised:
        read_examples(write(tmp_path / "a.jsonl", ["bad"] * 50), "sft")
    assert len(raised.value.args[0].splitlines()) == 1 + 20 + 1
    assert raised.value.args[0].endswith("and 30 more")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a"}, "lacks rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": [user("q")], "chosen": [user("q")], "rejected": "a"}, "chosen holds nothing but the prompt"),
        ({"prompt": "q", "chosen": [user("x")], "rejected": "a"}, "must end with the assistant"),
    ],
)
def test_a_preference_that_is_none_says_why(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(ExamplesError, match=f"a.jsonl:1: .*{reason}"):
        read_examples(write(tmp_path / "a.jsonl", [row]), "dpo")


def test_a_cut_off_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "q", "completion": "a"}\n')[:-8])
    with pytest.raises(ExamplesError, match=r"a\.jsonl\.gz:2: .*cut off"):
        read_examples(str(tmp_path / "a.jsonl.gz"), "sft")


def test_order_and_ids_follow_the_content_not_the_files(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a"} for number in range(50)]
    once = read_examples(write(tmp_path / "a.jsonl", rows), "sft")
    write(tmp_path / "b1.jsonl", rows[30:])
    write(tmp_path / "b2.jsonl", rows[:30])
    again = read_examples(str(tmp_path / "b*.jsonl"), "sft")
    assert once == again
    assert [example["messages"][0]["content"] for example in once] != [row["prompt"] for row in rows]
    assert read_examples(str(tmp_path / "b*.jsonl"), "sft", limit=7) == once[:7]


def test_nothing_and_nowhere_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError, match="holds no examples"):
        read_examples(write(tmp_path / "a.jsonl", [""]), "sft")
    with pytest.raises(ExamplesError, match="does not exist"):
        read_examples(str(tmp_path / "b.jsonl"), "sft")
    with pytest.raises(ExamplesError, match="does not exist"):
        examples_listing(str(tmp_path / "b.jsonl"))


def test_the_listing_of_examples_names_files_relative(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{}])
    (entry,) = examples_listing(path)
    assert (entry["path"], entry["size"]) == ("a.jsonl", 3)
    assert {entry["path"] for entry in examples_listing("python-docs://")} == {"python", "questions"}


def test_docstrings_answer_questions_and_wrong_answers_are_other_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("json/", "email/", "logging/", "argparse")
    files = [item for item in standard_library_files() if item[0].startswith(packages)]
    monkeypatch.setattr(docquestions, "standard_library_files", lambda: files)
    instructions = read_examples("python-docs://", "sft")
    preferences = read_examples("python-docs://", "dpo")
    assert len(instructions) == len(preferences) > 200
    assert len({example["id"] for example in instructions}) == len(instructions)
    answers = {example["messages"][0]["content"]: example["messages"][1]["content"] for example in instructions}
    dumps = next(answer for question, answer in answers.items() if " json.dumps" in question)
    assert dumps == "Serialize ``obj`` to a JSON formatted ``str``."
    assert max(map(len, answers.values())) <= MAX_ANSWER_CHARACTERS
    for example in preferences:
        assert answers[example["prompt"][0]["content"]] == example["chosen"][0]["content"]
        assert example["rejected"] != example["chosen"]
        assert example["rejected"][0]["content"] in answers.values()
    assert read_examples("python-docs://", "dpo") == preferences


def test_a_rejected_answer_is_never_the_chosen_one_though_only_two_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["The first of only two answers.", "The second of only two answers."]
    (tmp_path / "two.py").write_text("".join(f'def f{n}():\n    """{answers[n % 2]}"""\n' for n in range(40)))
    monkeypatch.setattr(docquestions, "standard_library_files", lambda: [("two.py", tmp_path / "two.py")])
    found = read_examples("python-docs://", "dpo")
    assert len(found) == 40
    for example in found:
        assert {example["chosen"][0]["content"], example["rejected"][0]["content"]} == set(answers)


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.mark.skipif(not SHARED.exists(), reason="the real data sets are not here")
def test_a_real_instruction_set_is_read_whole() -> None:
    examples = read_examples(str(SHARED / "sft" / "dolly_hhrlhf_train_small.jsonl.zst"), "sft")
    assert len(examples) == 1000
    assert all(example["messages"][-1]["role"] == "assistant" for example in examples)
