"""Evaluation sets are read completely or rejected."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gristmill.dataprep.decontamination.evaluation_sets import (
    EvaluationSetError,
    read_parts,
)
from gristmill.dataprep.readers.sources import SourceError
from gristmill.mixtures.steps.decontaminate import Decontaminate, EvaluationSet

ITEMS = [
    {
        "question": "Who was it?",
        "answer": "Nobody.",
        "options": ["a", "b"],
        "year": 1999,
    },
    {"question": "Where?", "answer": None, "options": ["c"], "year": 2000},
]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ITEMS), path)
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(
            gzip.compress("\n".join(map(json.dumps, ITEMS)).encode() + b"\n\n")
        )
    elif name.endswith("lines.json"):
        path.write_text("\n".join(map(json.dumps, ITEMS)))
    else:
        path.write_text(json.dumps(ITEMS, indent=1))
    return path


@pytest.mark.parametrize(
    "name", ["set.jsonl.gz", "set.parquet", "set.json", "lines.json"]
)
def test_each_string_of_an_item_is_a_part(name: str, tmp_path: Path) -> None:
    set_name = name.split(".")[0]
    parts, items = read_parts([EvaluationSet(path=str(write(tmp_path, name)))])
    assert items == {set_name: 2}
    assert [(part.set, part.item, part.field, part.text) for part in parts] == [
        (set_name, 1, "question", "Who was it?"),
        (set_name, 1, "answer", "Nobody."),
        (set_name, 2, "question", "Where?"),
    ]


def test_named_fields_may_hold_lists(tmp_path: Path) -> None:
    section = EvaluationSet(
        path=str(write(tmp_path, "set.parquet")), text_fields=("question", "options")
    )
    parts, _ = read_parts([section])
    assert [(part.item, part.field, part.text) for part in parts] == [
        (1, "question", "Who was it?"),
        (1, "options[0]", "a"),
        (1, "options[1]", "b"),
        (2, "question", "Where?"),
        (2, "options[0]", "c"),
    ]


def test_tables_and_text_lines_are_items(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text('id,question\n1,"Who, then?"\n2,Where?\n')
    (tmp_path / "tabs.tsv").write_text("question\tid\nWhen?\t3\n")
    lines = "First item.\n\n  \nSecond\u2028item.\r\n"
    (tmp_path / "lines.txt").write_text(lines, "utf-8", newline="")
    parts, items = read_parts(
        [EvaluationSet(path=str(tmp_path / "*.*"), text_fields=None, name="all")]
    )
    assert items == {"all/lines": 2, "all/table": 2, "all/tabs": 1}
    assert [
        (part.set, part.item, part.text) for part in parts if part.field != "id"
    ] == [
        ("all/lines", 1, "First item."),
        ("all/lines", 2, "Second\u2028item."),
        ("all/table", 1, "Who, then?"),
        ("all/table", 2, "Where?"),
        ("all/tabs", 1, "When?"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"a": "b"}\n{"a": \n', r"bad\.jsonl.*line 2"),
        ("bad.json", b"[1, 2]", r"bad\.json.*item 1 .*list"),
        (
            "bad.jsonl.gz",
            gzip.compress(b'{"a": "b"}', mtime=0)[:-9],
            r"bad\.jsonl\.gz.*cut off",
        ),
        ("keyed.json", b'{\n "a": {"b": "c"}\n}', r"keyed\.json.*one object per line"),
        ("bad.txt", b"caf\xe9", r"bad\.txt.*UTF-8"),
        ("empty.txt", b"\n", r"empty\.txt.*empty"),
    ],
)
def test_unreadable_set_is_rejected(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EvaluationSetError, match=message):
        read_parts([EvaluationSet(path=str(tmp_path / name))])


def test_unknown_fields_repeated_names_and_missing_files_are_rejected(
    tmp_path: Path,
) -> None:
    path = str(write(tmp_path, "set.json"))
    with pytest.raises(EvaluationSetError, match=r"'querry'.*question, answer"):
        read_parts([EvaluationSet(path=path, text_fields=("querry",))])
    with pytest.raises(EvaluationSetError, match=r"'set'.*`name`"):
        read_parts([EvaluationSet(path=path), EvaluationSet(path=path)])
    with pytest.raises(
        SourceError, match=r"decontaminate\.against\.0\.path: .*none\.json"
    ):
        read_parts([EvaluationSet(path=str(tmp_path / "none.json"))])


def test_bare_path_is_a_set_with_the_defaults() -> None:
    section = Decontaminate.model_validate(
        {"against": ["a.jsonl", {"path": "b.csv", "name": "b"}]}
    )
    assert section.against == (
        EvaluationSet(path="a.jsonl"),
        EvaluationSet(path="b.csv", name="b"),
    )
    assert Decontaminate.model_validate({"against": "a.jsonl"}).against == (
        EvaluationSet(path="a.jsonl"),
    )
    with pytest.raises(ValidationError, match="at least 1 item"):
        Decontaminate.model_validate({"against": []})


@pytest.mark.parametrize(
    ("text", "looked_for"),
    [
        ("Question: Which planet is it?", ["Which planet is it?"]),
        (
            "Context: A whale sings.\nQuestion: Who sings?\nAnswer:",
            ["A whale sings.\nQuestion: Who sings?", "A whale sings.\nWho sings?"],
        ),
        (
            "Q: Who sings?\n(A) whales (B) birds\nA:",
            ["Who sings?\n(A) whales (B) birds", "Who sings?\nwhales birds"],
        ),
        (
            "Who sings?\nA. whales\nB) birds",
            ["Who sings?\nA. whales\nB) birds", "Who sings?\nwhales\nbirds"],
        ),
        ("### Question 3: Who?", ["Who?"]),
        (
            "def f(A):\n    return (A) + 1",
            ["def f(A):\n    return (A) + 1", "def f(A):\n    return + 1"],
        ),
        (
            "the question: who asks, and what is the answer?",
            ["the question: who asks, and what is the answer?"],
        ),
    ],
)
def test_prompt_labels_are_removed_from_items(
    text: str, looked_for: list[str], tmp_path: Path
) -> None:
    (tmp_path / "set.json").write_text(json.dumps([{"query": text}]))
    parts, _ = read_parts([EvaluationSet(path=str(tmp_path / "set.json"))])
    assert [part.text for part in parts] == looked_for
    assert [part.field for part in parts] == ["query", "query, labels removed"][
        : len(looked_for)
    ]
