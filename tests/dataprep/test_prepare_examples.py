"""Examples through the document stages: views, survivors, and balanced counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gristmill.dataprep.documents import read_documents, read_table
from gristmill.dataprep.examples.kept_examples import (
    PreparedCounts,
    prepared_inputs,
    survivors,
    usable_sets,
)
from gristmill.dataprep.examples.prepare_examples import run, view_of, view_text
from gristmill.dataprep.examples.read_examples import ExamplesError, read_set
from gristmill.mixtures.schema.posttraining import Dpo, Instructions, Sft
from gristmill.mixtures.schema.prepare import ExampleStep
from tests.dataprep.document_shards import MakeContext
from tests.dataprep.own_steps import step

WORDS = (
    "the quick brown fox jumps over the lazy dog while nine bright birds sing of a "
    "river that no map of this country has ever shown to anyone"
).split()
LEAK = (
    "which of the seven rivers of the old kingdom carries no boats in the winter "
    "months of the year"
)


Write = Callable[[str, list[dict[str, Any]]], str]
Prepare = Callable[..., dict[str, Any]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records to a file: (name, records) -> path."""

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def prepare(tmp_path: Path, make_context: MakeContext) -> Prepare:
    """Prepare files of examples: (paths, *steps) -> summary; `kind` of the examples,
    `out` folder of the output.
    """

    def prepare(
        paths: list[str], *entries: dict[str, Any], kind: str = "sft", out: str = "out"
    ) -> dict[str, Any]:
        config = {
            "kind": kind,
            "data": [{"path": path, "max_quarantined": 0.2} for path in paths],
            "prepare": [
                ExampleStep.model_validate(entry).model_dump(mode="json")
                for entry in entries
            ],
        }
        context = make_context(f"work-{out}", stage=f"{kind}_prepare")
        return run({}, config, tmp_path / out, context)

    return prepare


def chat(question: str, answer: str, **keys: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **keys}


@pytest.fixture
def evaluation(write: Write) -> str:
    return write("quiz", [{"question": LEAK}, {"question": "short"}])


@pytest.fixture
def prepared(
    write: Write, prepare: Prepare, evaluation: str, tmp_path: Path
) -> dict[str, Any]:
    """Summary of two sets; the first has a record of no form, a repeated one, a leaked
    one and a blocked one.
    """
    first = [chat(f"question {n}", " ".join(WORDS[n : n + 12])) for n in range(4)]
    first += [
        chat("question 0", " ".join(WORDS[:12])),
        {"text": "no form"},
        chat(LEAK, "none of them"),
        chat("question 9", "x", url="https://a.example/9"),
        chat("bad", "as before", url="https://www.blocked.example/page"),
    ]
    second = [
        chat("question 0", " ".join(WORDS[:12])),
        chat("question 20", " ".join(WORDS[5:20])),
    ]
    (tmp_path / "domains.txt").write_text("blocked.example\n")
    return prepare(
        [write("first", first), write("second", second)],
        {
            "filter": {
                "rules": {"urls": {"block_domains": str(tmp_path / "domains.txt")}}
            }
        },
        {"dedup": {"minhash": None, "index": False}},
        {"decontaminate": {"against": evaluation}},
    )


def test_every_record_is_rejected_dropped_or_kept(
    prepared: dict[str, Any], tmp_path: Path
) -> None:
    first, second = prepared["sets"]
    assert first["dropped"] == {
        "urls/max_url_blocked_domain": 1,
        "exact_duplicate": 1,
        "decontaminate/max_contamination": 1,
    }
    assert second["dropped"] == {"exact_duplicate": 1}
    for counts in (first, second):
        assert (
            counts["records"]
            == counts["refused"]
            + sum(counts["dropped"].values())
            + counts["quarantined"]
            + counts["kept"]
        )
    assert (first["records"], first["refused"], first["kept"], second["kept"]) == (
        9,
        1,
        5,
        1,
    )
    assert [
        (entry["stage"], entry["judges"], entry["counts"]["read"])
        for entry in prepared["steps"]
    ] == [
        ("filter", "answer", 10),
        ("dedup", "conversation", 9),
        ("decontaminate", "conversation", 7),
    ]
    assert prepared["steps"][2]["sets"]["quiz"]["contaminated"] == 1
    (refused,) = map(
        json.loads, (tmp_path / "out" / "refused.jsonl").read_text().splitlines()
    )
    assert (refused["set"], refused["place"]) == ("first", "first.jsonl:6")


def test_user_function_judges_examples(
    write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    own_step = step(
        tmp_path / "code",
        "def step(text: str) -> dict: return {'words': len(text.split())}",
        min={"words": 2},
    )
    rows = [chat("a long question", "no"), chat("short", "a long answer")]
    summary = prepare([write("set", rows)], {"annotate": own_step})
    assert (summary["sets"][0]["dropped"], summary["sets"][0]["kept"]) == (
        {"annotate/min_words": 1},
        1,
    )
    assert summary["steps"][0]["judges"] == "answer"


def test_examples_are_judged_by_the_rules_of_their_language(
    write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    own_step = step(
        tmp_path / "code",
        "def step(text: str) -> dict: return {'language': 'de' if 'ein' in text else "
        "'en'}",
    )
    rows = [chat("q", "ein Satz von vier Worten"), chat("q", "a text of five words")]
    rules = {
        "rules": [{"gopher_quality": {"min_words": 5, "min_stop_words": 0}}],
        "by_language": {"de": {"gopher_quality": {"min_words": 6}}},
    }
    (set_summary,) = prepare(
        [write("set", rows)], {"annotate": own_step}, {"filter": rules}
    )["sets"]
    assert (set_summary["dropped"], set_summary["kept"]) == (
        {"de/gopher_quality/min_words": 1},
        1,
    )


@pytest.mark.parametrize(
    "disguised",
    [
        " ".join("so" if at == 11 else word for at, word in enumerate(LEAK.split())),
        "\u00ad".join(LEAK),
        f"Context: none\nQuestion: {LEAK}?\nAnswer:",
    ],
)
def test_disguised_evaluation_item_is_dropped(
    write: Write, prepare: Prepare, disguised: str
) -> None:
    evaluation = write("quiz", [{"question": f"Question: {LEAK}\nAnswer:"}])
    path = write("set", [chat(disguised, "none"), chat("question 1", "yes")])
    (set_summary,) = prepare([path], {"decontaminate": {"against": evaluation}})["sets"]
    assert (set_summary["dropped"], set_summary["kept"]) == (
        {"decontaminate/max_contamination": 1},
        1,
    )


@pytest.mark.usefixtures("prepared")
def test_survivors_equal_the_examples_as_read(write: Write, tmp_path: Path) -> None:
    kept = survivors(tmp_path / "out")
    valid = write(
        "valid",
        [
            json.loads(line)
            for line in (tmp_path / "first.jsonl").read_text().splitlines()
            if "no form" not in line
        ],
    )
    read = read_set(valid, "sft").examples
    distinct = [
        example for place, example in enumerate(read) if example not in read[:place]
    ]
    assert kept["first"] == [
        example
        for example in distinct
        if example["messages"][0]["content"] not in (LEAK, "bad")
    ]
    assert [example["messages"][0]["content"] for example in kept["second"]] == [
        "question 20"
    ]
    inputs = prepared_inputs(tmp_path / "out")
    assert list(inputs) == ["ingest", "filter", "dedup", "decontaminate"]
    table = read_documents(inputs, "part-00000.parquet")
    assert len(set(table["id"].to_pylist())) == len(table) == 10
    matches = read_table(
        tmp_path / "out" / "decontaminate" / "matches.parquet"
    ).to_pylist()
    assert [example["locator"] for example in matches] == ["first.jsonl:7"]
    data = [
        Instructions(path=str(tmp_path / name))
        for name in ("first.jsonl", "second.jsonl")
    ]
    first, second = usable_sets(data, "sft", {"sft_prepare": tmp_path / "out"})
    assert (first.examples, second.examples) == (kept["first"], kept["second"])
    assert isinstance(first.counts, PreparedCounts)
    assert first.counts.prepared_dropped["exact_duplicate"] == 1
    assert [example.place for example in first.quarantined] == ["first.jsonl:6"]
    assert second.quarantined == []


def test_all_unusable_sets_are_named(write: Write) -> None:
    paths = [
        write("empty", []),
        write("usable", [chat("q", "a")]),
        write("wrong", [{"messages": 3}]),
    ]
    with pytest.raises(ExamplesError) as error:
        list(usable_sets([Instructions(path=path) for path in paths], "sft", {}))
    assert [path in str(error.value) for path in paths] == [True, False, True]


def test_prepare_without_drops_keeps_the_examples(
    write: Write, prepare: Prepare, evaluation: str, tmp_path: Path
) -> None:
    """Equal records too: each is a document of its own."""
    path = write("twice", [chat("q", "a"), chat("q", "a"), chat("r", "b")])
    prepare([path], {"decontaminate": {"against": evaluation}})
    assert survivors(tmp_path / "out")["twice"] == read_set(path, "sft").examples
    unprepared, prepared = (
        next(usable_sets([Instructions(path=path)], "sft", inputs))
        for inputs in ({}, {"sft_prepare": tmp_path / "out"})
    )
    assert unprepared.examples == prepared.examples


PAIR = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "chosen": [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"of": "x"}},
                }
            ],
        },
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "yes"},
    ],
    "rejected": [{"role": "assistant", "content": "no"}],
}
TALK = {"messages": [*PAIR["prompt"], *PAIR["chosen"]]}


@pytest.mark.parametrize(
    ("step", "kind", "example", "text"),
    [
        ({"filter": {}}, "sft", TALK, '{"of": "x"}\n\nyes'),
        (
            {"filter": {}, "judge": "conversation"},
            "sft",
            TALK,
            's\n\nq\n\n{"of": "x"}\n\nt\n\nyes',
        ),
        ({"dedup": {}}, "sft", TALK, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes'),
        ({"filter": {}}, "dpo", PAIR, '{"of": "x"}\n\nyes'),
        (
            {"decontaminate": {"against": ["e"]}},
            "dpo",
            PAIR,
            's\n\nq\n\n{"of": "x"}\n\nt\n\nyes',
        ),
        ({"dedup": {}}, "dpo", PAIR, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes\n\nno'),
        ({"dedup": {}, "judge": "answer"}, "dpo", PAIR, '{"of": "x"}\n\nyes\n\nno'),
    ],
)
def test_view_of_a_step(step: Any, kind: Any, example: Any, text: str) -> None:
    assert view_text(view_of(ExampleStep.model_validate(step), kind), example) == text


def test_pairs_are_duplicates_in_full_and_leak_by_prompt_or_chosen_answer(
    write: Write, prepare: Prepare, evaluation: str, tmp_path: Path
) -> None:
    def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    rows = [
        pair("q", "a", "b"),
        pair("q", "a", "c"),
        pair("q", "b", "a"),
        pair("q", "a", "b"),
        pair("q", LEAK, "b"),
        pair("q", "d", LEAK),
        pair(LEAK, "a", "b"),
    ]
    (set_summary,) = prepare(
        [write("pairs", rows)],
        {"dedup": {"minhash": None}},
        {"decontaminate": {"against": evaluation}},
        kind="dpo",
    )["sets"]
    assert set_summary["dropped"] == {
        "exact_duplicate": 1,
        "decontaminate/max_contamination": 2,
    }
    kept = [
        (example["chosen"][0]["content"], example["rejected"][0]["content"])
        for example in survivors(tmp_path / "out")["pairs"]
    ]
    assert sorted(kept) == [("a", "b"), ("a", "c"), ("b", "a"), ("d", LEAK)]


def test_examples_are_read_from_any_store(
    write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    rows = [chat(f"question {n}", " ".join(WORDS[n : n + 12])) for n in range(3)] * 2
    local = write("chats", rows)
    fs = fsspec.filesystem("memory")
    fs.pipe("/examples/chats.jsonl", Path(local).read_bytes())
    survivors_by_path = []
    for name, path in (
        ("here", local),
        ("away", "memory://examples/chats.jsonl"),
        ("all", "memory://examples/*.jsonl"),
    ):
        prepare([path], {"dedup": {"minhash": None}}, out=name)
        survivors_by_path.append(
            [
                example
                for example_set in survivors(tmp_path / name).values()
                for example in example_set
            ]
        )
    fs.rm("/examples", recursive=True)
    assert survivors_by_path[0] == survivors_by_path[1] == survivors_by_path[2]
    assert len(survivors_by_path[0]) == 3


def test_emptied_set_and_unknown_set_are_errors(write: Write, prepare: Prepare) -> None:
    path = write("a", [chat("q", "a")])
    with pytest.raises(
        ExamplesError, match=r"sft\.prepare .*1 records: gopher_quality/min_w"
    ):
        prepare([path], {"filter": {"rules": ["gopher_quality"]}})
    with pytest.raises(ExamplesError, match=r"prepare\[0\]\.dedup: .*'b' .*: a\)"):
        prepare([path], {"dedup": {"sources": ["b"]}})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"clean": {}}], "clean .*filter, dedup, langid, decontaminate"),
        ([{"judge": "answer"}], "one step"),
        ([{"filter": {}, "dedup": {}}], "one step"),
        (
            [{"decontaminate": {"against": "e", "action": "excise"}}],
            r"decontaminate\.action .*excise",
        ),
        (["dedup", {"dedup": {}}], "dedup twice"),
    ],
)
def test_steps_for_documents_only_are_rejected(
    entries: list[Any], message: str
) -> None:
    for section in (Sft, Dpo):
        with pytest.raises(ValueError, match=message):
            section.model_validate(
                {"steps": 1, "data": [{"path": "x"}], "prepare": entries}
            )
