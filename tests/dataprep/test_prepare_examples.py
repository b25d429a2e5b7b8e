"""Examples through the stages that prepare documents: what each step judges, who survives, and that nobody is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_documents, read_table
from gristmill.dataprep.examples.kept_examples import least_alike, prepared_inputs, survivors, usable_sets
from gristmill.dataprep.examples.prepare_examples import run, view_of, view_text
from gristmill.dataprep.examples.read_examples import ExamplesError, read_examples
from gristmill.mixtures.posttraining import Dpo, Instructions, Sft
from gristmill.mixtures.prepare import ExampleStep
from tests.dataprep.own_steps import step

WORDS = (
    "the quick brown fox jumps over the lazy dog while nine bright birds sing of a river that no map of "
    "this country has ever shown to anyone"
).split()
LEAK = "which of the seven rivers of the old kingdom carries no boats in the winter months of the year"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(question: str, answer: str, **more: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **more}


def steps(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [ExampleStep.model_validate(step).model_dump(mode="json") for step in given]


@pytest.fixture
def evaluation(tmp_path: Path) -> str:
    return write(tmp_path / "quiz.jsonl", [{"question": LEAK}, {"question": "short"}])


@pytest.fixture
def sft_config(tmp_path: Path, evaluation: str) -> dict[str, Any]:
    """Two sets; of the first one record is of no form, one is twice there, one leaks, and one answer is bad."""
    first = [chat(f"question {n}", " ".join(WORDS[n : n + 12])) for n in range(4)]
    first += [
        chat("question 0", " ".join(WORDS[:12])),
        {"text": "no form"},
        chat(LEAK, "none of them"),
        chat("question 9", "x", url="https://a.example/9"),
        chat("bad", "as before", url="https://www.blocked.example/page"),
    ]
    second = [chat("question 0", " ".join(WORDS[:12])), chat("question 20", " ".join(WORDS[5:20]))]
    (tmp_path / "domains.txt").write_text("blocked.example\n")
    return {
        "kind": "sft",
        "data": [
            {"path": write(tmp_path / "first.jsonl", first), "max_quarantined": 0.2},
            {"path": write(tmp_path / "second.jsonl", second)},
        ],
        "prepare": steps(
            {"filter": {"rules": {"urls": {"block_domains": str(tmp_path / "domains.txt")}}}},
            {"dedup": {"minhash": None, "index": False}},
            {"decontaminate": {"against": evaluation}},
        ),
    }


def test_every_record_is_refused_dropped_by_a_rule_or_left(
    sft_config: dict[str, Any], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    summary = run({}, sft_config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    first, second = summary["sets"]
    assert first["dropped"] == {
        "urls/max_url_blocked_domain": 1,
        "exact_duplicate": 1,
        "decontaminate/max_contamination": 1,
    }
    assert second["dropped"] == {"exact_duplicate": 1}
    for one in (first, second):
        assert one["records"] == one["refused"] + sum(one["dropped"].values()) + one["quarantined"] + one["kept"]
    assert (first["records"], first["refused"], first["kept"], second["kept"]) == (9, 1, 5, 1)
    assert [(step["stage"], step["judges"], step["counts"]["read"]) for step in summary["steps"]] == [
        ("filter", "answer", 10),
        ("dedup", "conversation", 9),
        ("decontaminate", "conversation", 7),
    ]
    assert summary["steps"][2]["sets"]["quiz"]["contaminated"] == 1
    (refused,) = map(json.loads, (tmp_path / "out" / "refused.jsonl").read_text().splitlines())
    assert (refused["set"], refused["place"]) == ("first", "first.jsonl:6")


def test_a_function_of_the_users_judges_examples_too(make_context: Callable[..., Context], tmp_path: Path) -> None:
    own = step(tmp_path / "code", "def step(text: str) -> dict: return {'words': len(text.split())}", min={"words": 2})
    data = write(tmp_path / "chats.jsonl", [chat("a long question", "no"), chat("short", "a long answer")])
    config = {"kind": "sft", "data": [{"path": data}], "prepare": steps({"annotate": own})}
    summary = run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    assert (summary["sets"][0]["dropped"], summary["sets"][0]["kept"]) == ({"annotate/min_words": 1}, 1)
    assert summary["steps"][0]["judges"] == "answer"


def test_examples_are_judged_by_the_rules_of_the_language_that_a_step_before_measured(
    make_context: Callable[..., Context], tmp_path: Path
) -> None:
    own = step(tmp_path / "code", "def step(text: str) -> dict: return {'language': 'de' if 'ein' in text else 'en'}")
    data = write(tmp_path / "chats.jsonl", [chat("q", "ein Satz von vier Worten"), chat("q", "a text of five words")])
    rules = {
        "rules": [{"gopher_quality": {"min_words": 5, "min_stop_words": 0}}],
        "by_language": {"de": {"gopher_quality": {"min_words": 6}}},
    }
    config = {"kind": "sft", "data": [{"path": data}], "prepare": steps({"annotate": own}, {"filter": rules})}
    (found,) = run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))["sets"]
    assert (found["dropped"], found["kept"]) == ({"de/gopher_quality/min_words": 1}, 1)


@pytest.mark.parametrize(
    "disguised",
    [
        " ".join("so" if at == 11 else word for at, word in enumerate(LEAK.split())),
        "\u00ad".join(LEAK),
        f"Context: none\nQuestion: {LEAK}?\nAnswer:",
    ],
)
def test_a_disguised_item_of_an_evaluation_set_is_no_example(
    disguised: str, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    evaluation = write(tmp_path / "quiz.jsonl", [{"question": f"Question: {LEAK}\nAnswer:"}])
    data = write(tmp_path / "chats.jsonl", [chat(disguised, "none"), chat("question 1", "yes")])
    config = {"kind": "sft", "data": [{"path": data}], "prepare": steps({"decontaminate": {"against": evaluation}})}
    (found,) = run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))["sets"]
    assert (found["dropped"], found["kept"]) == ({"decontaminate/max_contamination": 1}, 1)


def test_survivors_are_the_examples_as_they_were_read(
    sft_config: dict[str, Any], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    run({}, sft_config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    left = survivors(tmp_path / "out")
    write(
        tmp_path / "valid.jsonl",
        [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines() if "no form" not in line],
    )
    read = read_examples(str(tmp_path / "valid.jsonl"), "sft")
    once = [one for place, one in enumerate(read) if one not in read[:place]]
    assert left["first"] == [one for one in once if one["messages"][0]["content"] not in (LEAK, "bad")]
    assert [one["messages"][0]["content"] for one in left["second"]] == ["question 20"]
    inputs = prepared_inputs(tmp_path / "out")
    assert list(inputs) == ["ingest", "filter", "dedup", "decontaminate"]
    table = read_documents(inputs, "part-00000.parquet")
    assert len(set(table["id"].to_pylist())) == len(table) == 10
    matches = read_table(tmp_path / "out" / "decontaminate" / "matches.parquet").to_pylist()
    assert [one["locator"] for one in matches] == ["first.jsonl:7"]
    data = [Instructions.model_validate(item) for item in sft_config["data"]]
    first, second = usable_sets(data, "sft", {"sft_prepare": tmp_path / "out"})
    assert (first.examples, second.examples) == (left["first"], left["second"])
    assert first.counts["prepared_dropped"]["exact_duplicate"] == 1
    assert [one.place for one in first.quarantined] == ["first.jsonl:6"]
    assert second.quarantined == []


def test_no_step_that_drops_leaves_what_is_read_without_any(
    make_context: Callable[..., Context], tmp_path: Path
) -> None:
    """Equal records too: each is a document of its own."""
    path = write(tmp_path / "twice.jsonl", [chat("q", "a"), chat("q", "a"), chat("r", "b")])
    config = {
        "kind": "sft",
        "data": [{"path": path}],
        "prepare": steps({"decontaminate": {"against": write(tmp_path / "e.jsonl", [{"q": LEAK}])}}),
    }
    run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    assert survivors(tmp_path / "out")["twice"] == read_examples(path, "sft")
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
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"of": "x"}}}],
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
        ({"filter": {}, "judge": "conversation"}, "sft", TALK, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes'),
        ({"dedup": {}}, "sft", TALK, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes'),
        ({"filter": {}}, "dpo", PAIR, '{"of": "x"}\n\nyes'),
        ({"decontaminate": {"against": ["e"]}}, "dpo", PAIR, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes'),
        ({"dedup": {}}, "dpo", PAIR, 's\n\nq\n\n{"of": "x"}\n\nt\n\nyes\n\nno'),
        ({"dedup": {}, "judge": "answer"}, "dpo", PAIR, '{"of": "x"}\n\nyes\n\nno'),
    ],
)
def test_a_step_judges_what_it_is_told(step: Any, kind: Any, example: Any, text: str) -> None:
    assert view_text(view_of(ExampleStep.model_validate(step), kind), example) == text


def test_pairs_are_duplicates_only_with_all_of_prompt_and_answers_and_leak_by_prompt_and_chosen_answer(
    make_context: Callable[..., Context], evaluation: str, tmp_path: Path
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
    config = {
        "kind": "dpo",
        "data": [{"path": write(tmp_path / "pairs.jsonl", rows)}],
        "prepare": steps({"dedup": {"minhash": None}}, {"decontaminate": {"against": evaluation}}),
    }
    (found,) = run({}, config, tmp_path / "out", make_context("work", stage="dpo_prepare"))["sets"]
    assert found["dropped"] == {"exact_duplicate": 1, "decontaminate/max_contamination": 2}
    left = [
        (one["chosen"][0]["content"], one["rejected"][0]["content"]) for one in survivors(tmp_path / "out")["pairs"]
    ]
    assert sorted(left) == [("a", "b"), ("a", "c"), ("b", "a"), ("d", LEAK)]


LABELLED = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize(
    ("step", "label", "text"),
    [
        ({"dedup": {}}, True, "q\n\nyes\n\ndesirable"),
        ({"dedup": {}}, False, "q\n\nyes\n\nundesirable"),
        ({"dedup": {}, "judge": "answer"}, True, "yes\n\ndesirable"),
        ({"filter": {}}, False, "yes"),
        ({"decontaminate": {"against": ["e"]}}, True, "q\n\nyes"),
    ],
)
def test_a_labelled_answer_is_judged_alone_and_is_a_duplicate_only_with_its_label(
    step: Any, label: bool, text: str
) -> None:
    assert view_text(view_of(ExampleStep.model_validate(step), "dpo"), {**LABELLED, "label": label}) == text


def test_labelled_answers_survive_with_their_labels(
    make_context: Callable[..., Context], evaluation: str, tmp_path: Path
) -> None:
    """The same answer is there twice with one label, once with the other; an undesirable answer may hold an item."""
    rows = [
        {"prompt": "q", "completion": said, "label": label}
        for said, label in (("a", True), ("a", True), ("a", False), (LEAK, True), ("c", False))
    ]
    config = {
        "kind": "dpo",
        "data": [{"path": write(tmp_path / "labelled.jsonl", rows)}],
        "prepare": steps({"dedup": {"minhash": None}}, {"decontaminate": {"against": evaluation}}),
    }
    (found,) = run({}, config, tmp_path / "out", make_context("work", stage="dpo_prepare"))["sets"]
    assert found["dropped"] == {"exact_duplicate": 1, "decontaminate/max_contamination": 1}
    left = [(one["completion"][0]["content"], one["label"]) for one in survivors(tmp_path / "out")["labelled"]]
    assert sorted(left) == [("a", False), ("a", True), ("c", False)]


def test_examples_are_read_through_fsspec_from_wherever_they_lie(
    make_context: Callable[..., Context], tmp_path: Path
) -> None:
    rows = [chat(f"question {n}", " ".join(WORDS[n : n + 12])) for n in range(3)] * 2
    local = write(tmp_path / "chats.jsonl", rows)
    fs = fsspec.filesystem("memory")
    fs.pipe("/examples/chats.jsonl", (tmp_path / "chats.jsonl").read_bytes())
    found = []
    for name, path in (
        ("here", local),
        ("away", "memory://examples/chats.jsonl"),
        ("all", "memory://examples/*.jsonl"),
    ):
        config = {"kind": "sft", "data": [{"path": path}], "prepare": steps({"dedup": {"minhash": None}})}
        run({}, config, tmp_path / name, make_context(name, stage="sft_prepare"))
        found.append([one for of_set in survivors(tmp_path / name).values() for one in of_set])
    fs.rm("/examples", recursive=True)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


def test_the_least_alike_of_near_duplicates_come_first(make_context: Callable[..., Context], tmp_path: Path) -> None:
    texts = [" ".join(WORDS), " ".join([*WORDS, "but", "me"]), " ".join([*WORDS, "but"]), "another thing altogether"]
    config = {
        "kind": "sft",
        "data": [{"path": write(tmp_path / "a.jsonl", [chat("q", text) for text in texts])}],
        "prepare": steps({"dedup": {"minhash": {"threshold": 0.5}}}),
    }
    run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    twins = least_alike(tmp_path / "out")
    assert {one["kept"] for one in twins} | {one["dropped"] for one in twins} == {f"a.jsonl:{n}" for n in (1, 2, 3)}
    assert [one["jaccard"] for one in twins] == sorted(one["jaccard"] for one in twins)
    assert all(one["dropped_text"].startswith("q\n\nthe quick") for one in twins)
    config["prepare"] = steps({"decontaminate": {"against": write(tmp_path / "e.jsonl", [{"q": LEAK}])}})
    run({}, config, tmp_path / "none", make_context("none", stage="sft_prepare"))
    assert least_alike(tmp_path / "none") == []


def test_a_set_of_which_nothing_is_left_and_a_set_that_is_not_there_are_errors(
    make_context: Callable[..., Context], tmp_path: Path
) -> None:
    config = {
        "kind": "sft",
        "data": [{"path": write(tmp_path / "a.jsonl", [chat("q", "a")])}],
        "prepare": steps({"filter": {"rules": ["gopher_quality"]}}),
    }
    with pytest.raises(ExamplesError, match=r"sft\.prepare leaves none of its 1 records: gopher_quality/min_w"):
        run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))
    config["prepare"] = steps({"dedup": {"sources": ["b"]}})
    with pytest.raises(ExamplesError, match=r"prepare\[0\]\.dedup: there is no set 'b' \(sets, by their files: a\)"):
        run({}, config, tmp_path / "out", make_context("work", stage="sft_prepare"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"clean": {}}], "clean is for documents only; examples have filter, dedup, langid, decontaminate"),
        ([{"judge": "answer"}], "one step per entry"),
        ([{"filter": {}, "dedup": {}}], "one step per entry"),
        ([{"decontaminate": {"against": "e", "action": "excise"}}], "decontaminate.action cannot be excise"),
        ([{"langid": {"lines": True, "cut_other_lines": True}}], "langid.cut_other_lines is not supported"),
        (["dedup", {"dedup": {}}], "prepare has dedup twice"),
    ],
)
def test_steps_that_examples_cannot_have_are_refused(entries: list[Any], message: str) -> None:
    for section in (Sft, Dpo):
        with pytest.raises(ValueError, match=message):
            section.model_validate({"steps": 1, "data": [{"path": "x"}], "prepare": entries})
