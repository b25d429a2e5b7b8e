"""Prepared examples in the plan, in an example's history, in the report and in the
terminal.
"""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gristmill.dataprep.examples.kept_examples import survivors
from gristmill.dataprep.whatif_thresholds import NotReplayableError
from gristmill.flows.pages.terminal_pages import print_table
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.whatif import compare
from gristmill.flows.report.facts import Facts, gather_facts
from gristmill.flows.report.finetuning import preferences, preparation, prepared_table
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session
from tests.flows.rendered import html_of
from tests.jsonl import write_jsonl

pytestmark = pytest.mark.slow

LEAK = (
    "which of the seven rivers of the old kingdom carries no boats in the winter "
    "months of the year"
)
MANIFEST = """\
name: prepared
sources: {web: {path: web.jsonl}}
tokenizer: {vocab_size: 400}
mix: {tokens: 1000}
pretrain: {steps: 1, model: {layers: 1, width: 8, heads: 1}}
sft:
  steps: 1
  data: [{path: chats.jsonl, train_on: last}]
  prepare:
    - dedup
    - filter: {rules: {gopher_quality: {min_words: 3, min_stop_words: 0}}}
      judge: answer
    - decontaminate: {against: quiz.jsonl}
dpo: {steps: 1, data: [{path: pairs.jsonl}], leaks: {against: quiz.jsonl}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest whose only committed stage is the preparation of examples."""
    folder = tmp_path_factory.mktemp("prepared")
    answer = "The river runs slowly through old forests."
    chats = [
        ("Where?", answer),
        ("Where?", answer),
        ("Why?", "Because."),
        (LEAK, answer),
        ("When?", f"{answer} Again."),
    ]
    for name, rows in {
        "chats": [
            {"prompt": prompt, "completion": completion} for prompt, completion in chats
        ],
        "pairs": [{"prompt": "q", "chosen": "a", "rejected": "b"}],
        "quiz": [{"question": LEAK}],
        "web": [{"text": "a"}],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "run.yaml").write_text(MANIFEST)
    Runner(opened(folder), lambda event: None).run_stage("sft_prepare")
    return folder


def opened(folder: Path, *overrides: str) -> Session:
    return open_session(
        str(folder / "run.yaml"), list(overrides), str(folder / "store"), None, False
    )


def fingerprints(session: Session) -> dict[str, str]:
    return {name: node.fingerprint for name, node in session.plan.items()}


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (
            "sft.prepare.filter.rules.gopher_quality.min_words=4",
            {"sft_prepare", "sft_data", "sft", "reference", "dpo"},
        ),
        ("sft.data.0.weight=2", {"sft_data", "sft", "reference", "dpo"}),
        ("dpo.leaks=null", {"dpo_data", "reference", "dpo"}),
        ("dpo.prepare=[dedup]", {"dpo_data", "reference", "dpo"}),
        ("dpo.data.0.weight=2", {"dpo"}),
        ("dpo.beta=0.2", {"dpo"}),
        ("dpo.holdout=0.3", {"dpo"}),
    ],
)
def test_changed_example_setting_rebuilds_only_its_readers(
    folder: Path, override: str, changed: set[str]
) -> None:
    before, after = fingerprints(opened(folder)), fingerprints(opened(folder, override))
    assert {name for name in before if before[name] != after[name]} == changed
    assert set(after) - set(before) == (
        {"dpo_prepare"} if "prepare" in override and "dpo" in override else set()
    )


def test_preferences_inherit_evaluation_sets_of_documents_unless_they_set_their_own(
    folder: Path,
) -> None:
    steps = "prepare=[{decontaminate: {against: quiz.jsonl, ngram: 9}}]"
    assert opened(folder).plan["dpo_data"].config["leaks"]["ngram"] == 8
    assert (
        opened(folder, "dpo.leaks=null", steps)
        .plan["dpo_data"]
        .config["leaks"]["ngram"]
        == 9
    )
    assert opened(folder, "dpo.leaks=null").plan["dpo_data"].config["leaks"] is None


def test_an_example_is_explained_by_its_place_or_id_with_the_rule_and_its_threshold(
    folder: Path,
) -> None:
    session = opened(folder)
    short_example = history(session, "chats.jsonl:3")
    assert (
        short_example.outcome
        == "dropped by sft_prepare: filter: gopher_quality/min_words"
    )
    assert (short_example.source, short_example.excerpt) == (
        "chats",
        "Why?\n\nBecause.",
    )
    assert [(verdict.stage, verdict.keep) for verdict in short_example.stages] == [
        ("sft_prepare: dedup", True),
        ("sft_prepare: filter", False),
    ]
    assert short_example.stages[1].threshold == 3
    assert (
        history(session, "chats.jsonl:4").outcome
        == "dropped by sft_prepare: decontaminate: "
        "decontaminate/max_contamination"
    )
    (kept_example,) = (
        entry
        for entry in survivors(session.folder("sft_prepare").data)["chats"]
        if entry["messages"][0]["content"] == "When?"
    )
    assert history(session, kept_example["id"]).kept
    with pytest.raises(DocumentNotFoundError, match="no documents are read yet"):
        history(session, "elsewhere.jsonl:1")


def test_whatif_rejects_thresholds_of_examples_with_the_command_to_run(
    folder: Path,
) -> None:
    before, after = (
        opened(folder),
        opened(folder, "sft.prepare.filter.rules.gopher_quality.min_words=4"),
    )
    with pytest.raises(
        NotReplayableError,
        match=r"sft\.prepare.* concerns examples, .* run it: \S*gristmill run ",
    ):
        compare(before, after)
    with pytest.raises(NotReplayableError, match="`prepare:`"):
        compare(before, before)


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page by row."""
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")]


def test_terminal_and_report_count_every_record(folder: Path) -> None:
    facts = gather_facts(opened(folder))
    examples = prepared_table(facts)
    assert examples.rows == [
        [
            "sft: chats",
            "5",
            "0",
            "3",
            "2",
            "max_contamination 1, exact_duplicate 1, min_words 1",
        ]
    ]
    for width in (60, 80):
        console = Console(file=io.StringIO(), width=width)
        print_table(console, examples)
        assert max(map(len, console.file.getvalue().splitlines())) <= width  # type: ignore[attr-defined]
        assert "sft: chats" in console.file.getvalue()  # type: ignore[attr-defined]
    page = html_of(preparation(facts, "sft_prepare"))
    assert ["quiz", "1", LEAK, "100%", "chats chats.jsonl:4"] in [
        [unescape(cell) for cell in page_row] for page_row in rows_of(page)
    ]
    for cells in (
        ["chats", "5", "0", "0", "3", "2"],
        ["dedup", "conversation", "5", "4"],
        ["filter", "answer", "4", "3"],
        ["quiz", "1", "1", "1"],
    ):
        assert cells in [page_row[: len(cells)] for page_row in rows_of(page)]


def facts_of_pairs(audit: dict[str, Any]) -> Facts:
    set_counts = {
        "name": "pairs",
        "path": "pairs.jsonl",
        "records": 9,
        "refused": 1,
        "beyond_limit": 0,
        "unrenderable": 1,
        "dropped": 1,
        "truncated": 2,
        "used": 4,
        "quarantined": 0,
        "prepared_dropped": {"exact_duplicate": 2},
        "audit": audit,
    }
    drawn_pairs = {
        "name": "pairs",
        "pairs": 4,
        "held_out": 1,
        "drawn": 6,
        "drawn_share": 0.5,
    }
    return Facts(
        summaries={
            "dpo_data": {"sets": [set_counts]},
            "dpo": {"sets": [drawn_pairs]},
        }
    )


def test_the_report_shows_every_number_of_the_audit() -> None:
    audit = {
        "pairs": 6,
        "prompts": 5,
        "duplicates": 11,
        "contradictions": 12,
        "near_identical": 13,
        "same_answers": 14,
        "longer_chosen": 0.615,
        "leaks": {"quiz": {"items": 15, "leaked": 16, "texts": 17}},
    }
    page = html_of(preferences(facts_of_pairs(audit), "dpo_data"))
    for number in (
        "9",
        "6",
        "5",
        "11",
        "12",
        "13",
        "14",
        "61.5%",
        "15",
        "16",
        "17",
        "50.0%",
    ):
        assert f">{number}</td>" in page, number
    page_without_leaks = html_of(
        preferences(
            facts_of_pairs({**audit, "longer_chosen": None, "leaks": None}), "dpo_data"
        )
    )
    assert "evaluation set" not in page_without_leaks
