"""Conversations and preferences: every known form of record is normalised, and bad
records are rejected with their place.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill.dataprep.readers.pythondocs as docquestions
from benchmarks.checkout import data_folder
from gristmill.dataprep.examples.conversations import sft_example
from gristmill.dataprep.examples.preferences import dpo_example
from gristmill.dataprep.examples.read_examples import (
    ExamplesError,
    examples_listing,
    read_set,
)
from gristmill.dataprep.readers.pythondocs import (
    MAX_ANSWER_CHARACTERS,
    standard_library_files,
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        + "\n"
    )
    return str(path)


QA = [user("q"), assistant("a")]
CHAT = [
    system("s"),
    user("q"),
    assistant("a"),
    user("q2"),
    assistant("a2"),
]


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
        {"messages": [user("q"), system("s"), assistant("a")]},
        [1],
        '{"prompt": "q", "completion": "\\ud800"}',
    ]
    with pytest.raises(ExamplesError) as raised:
        read_set(write(tmp_path / "a.jsonl", rows), "sft")
    title, *lines = str(raised.value).splitlines()
    assert "10 of 11" in title
    for number, reason in {
        2: "JSON",
        3: "text",
        4: "messages",
        5: "assistant",
        6: "system, user, assistant, tool",
        7: "message 2: content",
        8: "completion",
        9: "system",
        10: "JSON object",
        11: "surrogate",
    }.items():
        (line,) = [line for line in lines if line.startswith(f"  a.jsonl:{number}: ")]
        assert reason in line


def test_similar_rejections_are_one_line(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": f"robot {number}", "content": "x"}]}
        for number in range(300)
    ]
    with pytest.raises(ExamplesError) as raised:
        read_set(write(tmp_path / "a.jsonl", [{"text": "x"}, *rows, "bad"]), "sft")
    title, first, *other_lines = raised.value.args[0].splitlines()
    assert title.startswith(f"{tmp_path / 'a.jsonl'}: 302 of 302 ")
    assert first.startswith("  a.jsonl:2: ")
    assert "'robot 0'" in first
    assert "299" in first
    assert "a.jsonl:3, a.jsonl:4, a.jsonl:5 ..." in first
    assert [line.partition(": ")[0] for line in other_lines] == [
        "  a.jsonl:1",
        "  a.jsonl:302",
    ]


def test_at_most_ten_reasons_are_listed(tmp_path: Path) -> None:
    rows = [{letter: "x"} for letter in "abcdefghijklm"]
    with pytest.raises(ExamplesError) as raised:
        read_set(write(tmp_path / "a.jsonl", rows), "sft")
    assert len(raised.value.args[0].splitlines()) == 1 + 10 + 1
    assert " 3 " in raised.value.args[0].splitlines()[-1]


def test_truncated_file_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"prompt": "q", "completion": "a"}\n')[:-8]
    )
    with pytest.raises(ExamplesError, match=r"a\.jsonl\.gz:2: .*cut off"):
        read_set(str(tmp_path / "a.jsonl.gz"), "sft")


def test_order_and_ids_follow_from_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a"} for number in range(50)]
    once = read_set(write(tmp_path / "a.jsonl", rows), "sft").examples
    write(tmp_path / "b1.jsonl", rows[30:])
    write(tmp_path / "b2.jsonl", rows[:30])
    again = read_set(str(tmp_path / "b*.jsonl"), "sft").examples
    assert once == again
    assert [example["messages"][0]["content"] for example in once] != [
        row["prompt"] for row in rows
    ]
    assert read_set(str(tmp_path / "b*.jsonl"), "sft", limit=7).examples == once[:7]


def test_empty_and_missing_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError, match=r"a\.jsonl"):
        read_set(write(tmp_path / "a.jsonl", [""]), "sft")
    with pytest.raises(ExamplesError, match=r"b\.jsonl"):
        read_set(str(tmp_path / "b.jsonl"), "sft")
    with pytest.raises(ExamplesError, match=r"b\.jsonl"):
        examples_listing(str(tmp_path / "b.jsonl"))


def test_listing_has_relative_paths(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{}])
    (entry,) = examples_listing(path)
    assert (entry["path"], entry["size"]) == ("a.jsonl", 3)
    assert {entry["path"] for entry in examples_listing("python-docs://")} == {
        "python",
        "questions",
    }


@pytest.mark.slow
def test_python_docs_examples_pair_questions_with_docstrings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = ("json/", "email/", "logging/", "argparse")
    files = [item for item in standard_library_files() if item[0].startswith(packages)]
    monkeypatch.setattr(docquestions, "standard_library_files", lambda: files)
    instructions = read_set("python-docs://", "sft").examples
    preferences = read_set("python-docs://", "dpo").examples
    assert len(instructions) == len(preferences) > 200
    assert len({example["id"] for example in instructions}) == len(instructions)
    answers = {
        example["messages"][0]["content"]: example["messages"][1]["content"]
        for example in instructions
    }
    dumps = next(
        answer for question, answer in answers.items() if " json.dumps" in question
    )
    assert dumps == "Serialize ``obj`` to a JSON formatted ``str``."
    assert max(map(len, answers.values())) <= MAX_ANSWER_CHARACTERS
    for example in preferences:
        assert (
            answers[example["prompt"][0]["content"]] == example["chosen"][0]["content"]
        )
        assert example["rejected"] != example["chosen"]
        assert example["rejected"][0]["content"] in answers.values()
    assert read_set("python-docs://", "dpo").examples == preferences


def test_rejected_docstring_differs_from_the_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["The first of only two answers.", "The second of only two answers."]
    (tmp_path / "two.py").write_text(
        "".join(f'def f{n}():\n    """{answers[n % 2]}"""\n' for n in range(40))
    )
    monkeypatch.setattr(
        docquestions,
        "standard_library_files",
        lambda: [("two.py", tmp_path / "two.py")],
    )
    examples = read_set("python-docs://", "dpo").examples
    assert len(examples) == 40
    for example in examples:
        assert {
            example["chosen"][0]["content"],
            example["rejected"][0]["content"],
        } == set(answers)


def test_parquet_and_json_lists_are_read_like_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a"} for number in range(5)]
    lines = read_set(write(tmp_path / "a.jsonl", rows), "sft").examples
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=2)
    for name in ("b.json", "c.json.gz", "d.parquet"):
        assert read_set(str(tmp_path / name), "sft").examples == lines, name
    chats = [
        {"messages": CHAT, "tools": None},
        {"messages": QA, "tools": '[{"name": "f"}]'},
    ]
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "e.parquet")
    examples = read_set(str(tmp_path / "e.parquet"), "sft").examples
    assert {
        json.dumps(example["messages"]): example.get("tools") for example in examples
    } == {
        json.dumps(CHAT): None,
        json.dumps(chats[1]["messages"]): [{"name": "f"}],
    }


def test_folder_yields_its_json_and_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "a.jsonl", [{"prompt": "q", "completion": "a"}])
    pq.write_table(
        pa.table({"prompt": ["q2"], "completion": ["a2"]}), folder / "b.parquet"
    )
    (folder / "README.md").write_text("about")
    assert len(read_set(str(folder), "sft").examples) == 2
    assert [entry["path"] for entry in examples_listing(str(folder))] == [
        "a.jsonl",
        "b.parquet",
    ]


def test_damaged_parquet_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ExamplesError, match=r"a\.parquet:1: .*damaged"):
        read_set(str(tmp_path / "a.parquet"), "sft")


def test_rejected_records_below_the_limit_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a"} for number in range(8)]
    path = write(tmp_path / "a.jsonl", [*rows, {"text": "x"}, {"text": "y"}])
    example_set = read_set(path, "sft", limit=5, max_quarantined=0.2)
    assert [record.place for record in example_set.quarantined] == [
        "a.jsonl:9",
        "a.jsonl:10",
    ]
    counts = example_set.counts()
    assert (counts.records, counts.refused, counts.beyond_limit) == (10, 2, 3)
    assert (
        counts.records
        == len(example_set.examples) + counts.refused + counts.beyond_limit
    )
    assert list(counts.refused_reasons.values()) == [2]
    with pytest.raises(ExamplesError, match=r"2 of 10 .*max_quarantined .*0\.19"):
        read_set(path, "sft", max_quarantined=0.19)


def human(value: str) -> dict[str, str]:
    return {"from": "human", "value": value}


def gpt(value: str) -> dict[str, str]:
    return {"from": "gpt", "value": value}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_named_form_overrides_the_keys(tmp_path: Path) -> None:
    row = {"messages": [user("m"), assistant("m")], "instruction": "i", "output": "o"}
    path = write(tmp_path / "a.jsonl", [row])
    assert read_set(path, "sft").examples[0]["messages"][0] == user("m")
    assert read_set(path, "sft", "instruction").examples[0]["messages"] == [
        user("i"),
        assistant("o"),
    ]
    with pytest.raises(ExamplesError, match="prompt"):
        read_set(path, "sft", "completion")


def test_unknown_form_is_rejected() -> None:
    with pytest.raises(ValueError, match="'alpaca'"):
        sft_example({"instruction": "Add 1 and 2.", "output": "3"}, "alpaca")
    with pytest.raises(ValueError, match="'alpaca'"):
        dpo_example({"prompt": "q", "chosen": "a", "rejected": "b"}, "alpaca")


def parts(text: str, **keys: Any) -> dict[str, Any]:
    """Content of one part in LLaMA-Factory's newer form."""
    return {"content": [{"type": "text", "value": text}], **keys}


TALK = "\n\nHuman: q\n\nAssistant: a\n\nHuman: q2\n\nAssistant: "
TOOL = {"name": "add", "description": "Add numbers", "parameters": {}}
PAIR = {
    "prompt": [user("q")],
    "chosen": [assistant("good")],
    "rejected": [assistant("bad")],
}


@pytest.mark.skipif(
    not data_folder().exists(), reason="the real data sets are not here"
)
@pytest.mark.parametrize(
    ("file", "kind", "records", "refused"),
    [
        ("sft/dolly_hhrlhf_train_small.jsonl.zst", "sft", 1000, 0),
        ("sft/dummy_conversation.json.zst", "sft", 500, 0),
        ("sft/glaive_toolcall_en_demo.json.zst", "sft", 300, 0),
        ("dpo/hh_harmless_base_test.jsonl.gz", "dpo", 2312, 13),
    ],
)
def test_real_sets_are_read_completely(
    file: str, kind: Any, records: int, refused: int
) -> None:
    example_set = read_set(str(data_folder() / file), kind, max_quarantined=0.01)
    assert (example_set.records, len(example_set.quarantined)) == (records, refused)
    assert len(example_set.examples) == records - refused


def test_parquet_row_that_is_not_utf8_is_quarantined(tmp_path: Path) -> None:
    prompts = pa.array([b"Why?", b"Wh\xff", b"Who?"], pa.binary()).view(pa.string())
    rows = pa.table({"prompt": prompts, "completion": ["a", "b", "c"]})
    pq.write_table(rows, tmp_path / "a.parquet")
    example_set = read_set(str(tmp_path / "a.parquet"), "sft", max_quarantined=0.4)
    assert len(example_set.examples) == 2
    (record,) = example_set.quarantined
    assert record.place == "a.parquet:2"
    assert "byte 0xff at position 2" in record.reason


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_truncated_file_is_rejected_despite_the_quarantine_limit(
    tmp_path: Path, name: str
) -> None:
    rows = [
        {"messages": [user(f"question {n}"), assistant(f"answer {n}")]}
        for n in range(500)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        content = (tmp_path / name).read_bytes()
    else:
        content = {
            "a.jsonl": lines,
            "a.jsonl.gz": gzip.compress(lines),
            "a.json": json.dumps(rows).encode(),
        }[name]
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ExamplesError, match=rf"{name}:\d+: "):
        read_set(str(tmp_path / name), "sft", max_quarantined=0.99)


ANSWERED = [
    {"role": "user", "content": "q", "name": "Ann"},
    assistant("a"),
]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_and_names_are_kept(key: str) -> None:
    question, answer = ANSWERED
    example = sft_example({"messages": [question, {**answer, key: "Hm."}]})
    assert example["messages"] == [question, {**answer, "reasoning_content": "Hm."}]


def test_legacy_openai_function_keys_are_read() -> None:
    call = {"name": "add", "arguments": '{"a": 3}'}
    row = {
        "messages": [
            user("q"),
            {"role": "assistant", "content": None, "function_call": call},
        ],
        "functions": [{"name": "add", "parameters": {}}],
    }
    example = sft_example(row)
    assert example["messages"][1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    ]
    assert example["tools"] == [
        {"type": "function", "function": {"name": "add", "parameters": {}}}
    ]


FORMS = [
    ({"messages": CHAT, "extra": 1}, CHAT),
    ({"prompt": "q", "completion": "a"}, QA),
    ({"prompt": "q", "response": "a"}, QA),
    (
        {"prompt": [user("q")], "completion": [assistant("a")]},
        QA,
    ),
    (
        {"instruction": "do", "input": "this", "output": "a"},
        [user("do\n\nthis"), assistant("a")],
    ),
    (
        {"instruction": "do", "input": "", "output": "a"},
        [user("do"), assistant("a")],
    ),
    ({"instruction": "do", "output": "a"}, [user("do"), assistant("a")]),
    (
        {
            "conversations": [human("q"), gpt("a")],
            "system": "",
        },
        QA,
    ),
    (
        {
            "conversations": [human("q"), gpt("a")],
            "system": "s",
        },
        [system("s"), user("q"), assistant("a")],
    ),
    ({"conversations": QA}, QA),
    (
        {
            "conversations": [
                human("q"),
                {
                    "from": "function_call",
                    "value": '{"name": "f", "arguments": {"x": 1}}',
                },
                {"from": "observation", "value": "1"},
                gpt("a"),
            ]
        },
        [
            user("q"),
            {**assistant(""), "tool_calls": [CALL]},
            {"role": "tool", "content": "1"},
            assistant("a"),
        ],
    ),
    (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "q"},
                        {"type": "text", "text": "?"},
                    ],
                },
                assistant("a"),
            ]
        },
        [system("s"), user("q?"), assistant("a")],
    ),
    (
        {
            "messages": [
                user("q"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"x": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                assistant("a"),
            ]
        },
        [
            user("q"),
            {**assistant(""), "tool_calls": [{"id": "c1", **CALL}]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            assistant("a"),
        ],
    ),
    (
        {
            "instruction": "q2",
            "output": "a2",
            "history": [["q", "a"]],
            "system": "s",
        },
        [
            system("s"),
            user("q"),
            assistant("a"),
            user("q2"),
            assistant("a2"),
        ],
    ),
    (
        {
            "messages": [
                {"role": "user", **parts("q", loss_weight=0.0)},
                {"role": "assistant", **parts("a", loss_weight=1.0)},
            ]
        },
        QA,
    ),
    (
        {
            "messages": [
                user("q"),
                {**assistant("no"), "weight": 0},
                user("q2"),
                assistant("a"),
            ]
        },
        [
            user("q"),
            {**assistant("no"), "trained": False},
            user("q2"),
            assistant("a"),
        ],
    ),
    (
        {
            "conversations": [
                human("q"),
                gpt("a"),
                human("thanks"),
            ]
        },
        [*QA, user("thanks")],
    ),
    (
        {
            "prompt": [human("q")],
            "completion": gpt("a"),
        },
        QA,
    ),
]


@pytest.mark.parametrize(("row", "messages"), FORMS)
def test_every_form_becomes_messages(row: Any, messages: Any) -> None:
    assert sft_example(row) == {"messages": messages}


INVALID = [
    (
        {"conversations": [{"from": "bard", "value": "q"}]},
        "message 1: .*'bard' .*system, human",
    ),
    (
        {"conversations": [human("q"), {"from": "function_call", "value": "f(1)"}]},
        "value .*JSON",
    ),
    (
        {
            "messages": [
                user("q"),
                {"role": "user", "content": "x", "tool_calls": [CALL]},
            ]
        },
        "message 2: .*assistant",
    ),
    (
        {"messages": [user("q"), {"role": "tool", "content": "1"}, assistant("a")]},
        "tool.* user.* assistant",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "message 1: .*'image_url'",
    ),
    (
        {"messages": [{"role": "user", "content": ["text"]}]},
        "message 1: .*'str'",
    ),
    (
        {
            "messages": [
                user("q"),
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "["}}],
                },
            ]
        },
        "arguments of f .*JSON",
    ),
    ({"prompt": "q", "completion": "a", "tools": "{}"}, "tools .*list"),
    (
        {
            "messages": [
                user("q"),
                {"role": "assistant", **{"content": [{"type": "text", "body": "a"}]}},
            ]
        },
        "text or value.*body",
    ),
    (
        {
            "messages": [
                user("q"),
                {"role": "assistant", **{"content": [{"type": "image", "value": "a"}]}},
            ]
        },
        "'image'.*text",
    ),
    (
        {
            "messages": [
                user("q"),
                {"role": "assistant", **{"content": "a", "weight": 0.5}},
            ]
        },
        r"weight .*0 or 1.*0\.5",
    ),
    ({"messages": ANSWERED, "images": ["a.png"]}, "only text can be trained on"),
    (
        {"messages": [{**ANSWERED[0], "images": ["a.png"]}, ANSWERED[1]]},
        "only text can be trained on",
    ),
    (
        {
            "conversations": [
                human("<image>q"),
                gpt("a"),
            ],
            "image": "a.png",
        },
        "only text can be trained on",
    ),
]


@pytest.mark.parametrize(("row", "reason"), INVALID)
def test_invalid_conversation_is_rejected_with_the_reason(
    row: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        sft_example(row)


PAIRS = [
    ({"prompt": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    (
        {
            "prompt": [user("q")],
            "chosen": [assistant("good")],
            "rejected": [assistant("bad")],
        },
        PAIR,
    ),
    (
        {
            "prompt": "q",
            "chosen": [user("q"), assistant("good")],
            "rejected": [user("q"), assistant("bad")],
        },
        PAIR,
    ),
    (
        {
            "chosen": [user("q"), assistant("good")],
            "rejected": [user("q"), assistant("bad")],
        },
        PAIR,
    ),
    (
        {"chosen": f"{TALK}good", "rejected": f"{TALK}bad"},
        {**PAIR, "prompt": [*QA, user("q2")]},
    ),
    (
        {
            "prompt": "q",
            "responses": ["so", "good", "bad", "good again"],
            "scores": [2, 5, 1, 5],
        },
        PAIR,
    ),
    (
        {
            "instruction": "q",
            "completions": [
                {"response": "bad", "overall_score": 1.5},
                {"response": "good", "overall_score": 4},
            ],
        },
        PAIR,
    ),
    (
        {
            "prompt": "q",
            "answers": [
                {"text": "good", "rating": 2},
                {"text": "bad", "rating": 1},
            ],
        },
        PAIR,
    ),
    (
        {
            "conversations": [human("q")],
            "chosen": gpt("good"),
            "rejected": gpt("bad"),
        },
        PAIR,
    ),
    (
        {
            "messages": [user("q")],
            "chosen": assistant("good"),
            "rejected": assistant("bad"),
        },
        PAIR,
    ),
    ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, PAIR),
    (
        {
            "chosen_messages": [
                {"role": "user", **parts("q")},
                {"role": "assistant", **parts("good")},
            ],
            "rejected_messages": [
                {"role": "user", **parts("q")},
                {"role": "assistant", **parts("bad")},
            ],
        },
        PAIR,
    ),
    (
        {
            "messages": [user("q"), assistant("good")],
            "chosen": [user("q"), assistant("good")],
            "rejected": [user("q"), assistant("bad")],
        },
        PAIR,
    ),
    ({**PAIR, "tools": [TOOL]}, {**PAIR, "tools": [TOOL]}),
    (
        {
            "conversations": [human("q")],
            "chosen": gpt("good"),
            "rejected": gpt("bad"),
            "tools": json.dumps([TOOL]),
            "system": "s",
        },
        {
            **PAIR,
            "prompt": [system("s"), user("q")],
            "tools": [TOOL],
        },
    ),
]


@pytest.mark.parametrize(("row", "pair"), PAIRS)
def test_every_form_becomes_a_pair(row: Any, pair: Any) -> None:
    assert dpo_example(row) == pair


INVALID_PAIRS = [
    ({"prompt": "q", "chosen": "a"}, "rejected"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected"),
    (
        {"prompt": [user("q")], "chosen": [user("q")], "rejected": "a"},
        "chosen .*prompt",
    ),
    ({"prompt": "q", "chosen": [user("x")], "rejected": "a"}, "assistant"),
    ({"chosen": TALK, "rejected": f"{TALK}bad"}, r"chosen, turn 4 \(Assistant\)"),
    (
        {"chosen": f"{TALK}a\n\nAssistant: b", "rejected": f"{TALK}bad"},
        "turns 4 and 5 .*assistant",
    ),
    ({"chosen": "good", "rejected": f"{TALK}bad"}, "chosen .*transcript"),
    (
        {"prompt": "q", "responses": ["a", "b"], "scores": [1, 1]},
        "2 responses .*same score",
    ),
    (
        {"prompt": "q", "responses": ["a", "b"], "scores": [1]},
        "2 responses.* 1 scores",
    ),
    ({"prompt": "q", "responses": ["a", "b"]}, "responses, answer 1 .*score"),
    (
        {"prompt": "q", "completion": "a", "label": True},
        "lacks chosen, rejected; its keys are prompt, completion, label",
    ),
    ({**PAIR, "tools": "none"}, "tools .*JSON"),
]


@pytest.mark.parametrize(("row", "reason"), INVALID_PAIRS)
def test_invalid_pair_is_rejected_with_the_reason(row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dpo_example(row)
