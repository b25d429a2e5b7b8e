"""The stage `decontaminate`: leaked items are dropped or excised, quotations stay, and
every match is recorded.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.decontamination import decontaminate
from gristmill.dataprep.decontamination.evaluation_sets import SetReport
from gristmill.dataprep.documents import document_id, write_table
from gristmill.dataprep.whatif_thresholds import judge_shard, rules_of
from gristmill.mixtures.steps.decontaminate import Decontaminate
from tests.dataprep.document_shards import (
    Document,
    rewrite_texts,
    rows_by_id,
    texts_by_locator,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
LICENCE = (
    "Permission is hereby granted, free of charge, to any person obtaining a "
    "copy of this software and files"
)
QUESTION = (
    "A farmer has seventeen sheep and all but nine of them run away one stormy night "
    "in June; how many sheep does the farmer still have in the morning when the storm "
    "is over and he counts them twice?"
)
CODE = (
    f"{LICENCE}. Write a function that returns the second largest of three given "
    "numbers without sorting any list."
)
SHORT = "Which planet of our system has the most moons?"
TINY = "True or false?"


def prose(seed: int, words: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(3000)}" for _ in range(words))


def evaluation_set(folder: Path) -> Path:
    path = folder / "quiz.jsonl"
    items = [
        {"question": text, "answer": "nine"} for text in (QUESTION, CODE, SHORT, TINY)
    ]
    path.write_text("\n".join(map(json.dumps, items)))
    return path


def corpus() -> dict[str, Document]:
    texts = {f"plain{n}": prose(n) for n in range(6)}
    texts |= {
        f"licensed{n}": f"{prose(50 + n)}\n\n{LICENCE}, and so on." for n in range(12)
    }
    texts |= {
        "verbatim": QUESTION,
        "embedded": f"{prose(20)}\n\n{QUESTION}\nAnswer: nine.\n\n{prose(21)}",
        "shouted": f"{prose(22)} {QUESTION.upper().replace(' ', '  ')} {prose(23)}",
        "partial": f"{prose(24)} {' '.join(QUESTION.split()[:24])} {prose(25)}",
        "mention": f"{prose(26)} A farmer has seventeen sheep and all but nine of "
        "them run away, as they say.",
        "code": f"{prose(27)}\n{CODE}\n{prose(28)}",
        "short": f"{prose(29)} which planet of OUR system has the most moons "
        f"{prose(30)}",
        "tiny": f"{prose(31)} True or false? {prose(32)}",
    }
    return {name: ("web", name, text) for name, text in texts.items()}


@pytest.fixture
def run(run_stage: Callable, tmp_path: Path) -> Callable:
    """Run the stage: (name, shards, settings, **settings of BeamEngine) -> inputs with
    its output, summary.
    """

    def run(
        name: str,
        shards: Sequence[Sequence[Document]],
        config: dict[str, Any] | None = None,
        **engine: Any,
    ) -> tuple[dict[str, Path], decontaminate.DecontaminationSummary]:
        full = {"against": [str(evaluation_set(tmp_path))], **(config or {})}
        return run_stage(decontaminate, "decontaminate", name, shards, full, **engine)

    return run


def rows_by_name(
    inputs: dict[str, Path], documents: dict[str, Document]
) -> dict[str, dict[str, Any]]:
    rows = rows_by_id(inputs["decontaminate"])
    return {name: rows[document_id(*document)] for name, document in documents.items()}


LEAKS = {
    "verbatim": "quiz#1",
    "embedded": "quiz#1",
    "shouted": "quiz#1",
    "partial": "quiz#1",
    "code": "quiz#2",
    "short": "quiz#3",
}


@pytest.mark.slow
def test_leaks_are_dropped_and_quotations_stay(run: Callable) -> None:
    documents = corpus()
    every = list(documents.values())
    inputs, summary = run("all", [every[:9], every[9:]])
    rows = rows_by_name(inputs, documents)
    assert {
        name: row["contaminated_item"] for name, row in rows.items() if not row["keep"]
    } == LEAKS
    assert {row["reason"] for row in rows.values()} == {
        None,
        "decontaminate/max_contamination",
    }
    words = len(QUESTION.split())
    assert (
        rows["embedded"]["contamination"],
        rows["embedded"]["contamination_words"],
    ) == (1.0, words)
    assert (
        rows["partial"]["contamination"],
        rows["partial"]["contamination_words"],
    ) == (24 / words, 24)
    assert 0 < rows["mention"]["contamination"] < 0.5
    assert (rows["plain0"]["contamination"], rows["plain0"]["contaminated_item"]) == (
        0.0,
        None,
    )
    # 13 documents hold the licence, too many to count
    assert rows["licensed3"]["contamination"] == 0.0
    assert rows["code"]["contamination"] == 1.0  # the whole item is there
    assert summary.sets == {
        "quiz": SetReport(items=4, checked=3, contaminated=3, contaminated_share=1.0)
    }
    assert summary.frequent_ngrams == len(LICENCE.split()) - 8 + 1
    assert summary.counts["dropped"] == {"decontaminate/max_contamination": 6}


def replaced(text: str, nth: int) -> str:
    return " ".join(
        "so" if at % nth == nth - 1 else word for at, word in enumerate(text.split())
    )


TWELVE = "Which gas do the green leaves of plants take in during day?"
DISGUISES = {
    "verbatim": lambda text: text,
    "re-cased": lambda text: re.sub(r"\W+", " \t", text).upper(),
    "every 12th word": lambda text: replaced(text, 12),
    "every 10th word": lambda text: replaced(text, 10),
    "first words": lambda text: " ".join(
        text.split()[: -(-len(text.split()) * 3 // 4)]
    ),
    "soft hyphens": lambda text: re.sub(r"(\w\w)(?=\w)", "\\1\u00ad", text),
    "zero-width": lambda text: "\u2060".join(text),
    "other labels": lambda text: f"Problem 4: {text}\n(A) one (B) two\nSolution: B",
}


@pytest.mark.parametrize(
    "item",
    [
        f"Question: {QUESTION}",
        f"Question: {TWELVE}\nAnswer:",
        f"Context: {QUESTION}\nQuestion: {TWELVE}",
        f"Q: {TWELVE}\n(A) the oxygen of the air (B) carbon dioxide which we breathe "
        "out\n(C) helium (D) none of these",
    ],
)
def test_disguised_items_are_found(run: Callable, item: str, tmp_path: Path) -> None:
    (tmp_path / "quiz.json").write_text(json.dumps([{"query": item}]))
    bare = re.sub(r"\(?\b[A-Z]\) |\b\w+:\s*", "", item)
    documents = {
        "clean": ("web", "clean", prose(3)),
        "similar": (
            "web",
            "similar",
            f"{prose(4)} Which gas do the stoves of these kitchens burn? {prose(5)}",
        ),
    }
    for number, (name, disguise) in enumerate(DISGUISES.items()):
        documents[name] = (
            "web",
            name,
            f"{prose(60 + number)}\n\n{disguise(bare)}\n\n{prose(80 + number)}",
        )
    config = {"against": [str(tmp_path / "quiz.json")]}
    inputs, summary = run("all", [list(documents.values())], config)
    rows = rows_by_name(inputs, documents)
    assert {name for name, row in rows.items() if row["keep"]} == {"clean", "similar"}
    assert summary.sets["quiz"].contaminated == 1


@pytest.mark.slow
def test_invisible_characters_are_excised_with_the_item(run: Callable) -> None:
    hidden = "\u200b".join(QUESTION)
    document = ("web", "page", f"{prose(1)}\n{hidden}\n{prose(2)}")
    config = {"action": "excise", "margin_characters": 2}
    inputs, _ = run("all", [[document]], config)
    assert texts_by_locator(inputs) == {"page": f"{prose(1)}\n\n{prose(2)}"}


def test_match_table_names_item_document_and_text(run: Callable) -> None:
    documents = corpus()
    inputs, summary = run("all", [list(documents.values())])
    table = pq.read_table(inputs["decontaminate"] / "matches.parquet").to_pylist()
    matches = {row["locator"]: row for row in table}
    assert set(matches) == {*LEAKS, "mention"}
    assert {name for name, row in matches.items() if row["contaminated"]} == set(LEAKS)
    row = matches["embedded"]
    assert (row["set"], row["item"], row["field"], row["source"]) == (
        "quiz",
        1,
        "question",
        "web",
    )
    assert row["item_text"] == QUESTION[:100]
    assert row["id"] == document_id(*documents["embedded"])
    assert row["text"] == QUESTION.rstrip("?")
    begin = documents["embedded"][2].index(QUESTION)
    assert (row["begin"], row["end"]) == (begin, begin + len(QUESTION) - 1)
    assert [row["locator"] for row in summary.matches][-1] == "mention"
    assert summary.matches[0]["contamination"] == 1.0


def test_excision_cuts_the_item_with_its_margin(run: Callable) -> None:
    documents = corpus()
    config = {"action": "excise", "margin_characters": 30}
    inputs, summary = run("all", [list(documents.values())], config)
    rows, texts = rows_by_name(inputs, documents), texts_by_locator(inputs)
    # the answer's line went with it
    assert texts["embedded"] == f"{prose(20)}\n\n{prose(21)}"
    assert rows["embedded"]["left_words"] == 240
    assert (rows["verbatim"]["keep"], rows["verbatim"]["reason"]) == (
        False,
        "decontaminate/min_left_words",
    )
    assert rows["verbatim"]["left_words"] == 0
    assert {name for name, row in rows.items() if not row["keep"]} == {"verbatim"}
    assert rows["mention"]["edits"] == []
    assert rows["mention"]["left_words"] is None
    assert texts["mention"] == documents["mention"][2]
    assert all("seventeen" not in texts[name].lower() for name in LEAKS)
    cut = sum(
        edit["end"] - edit["begin"] for row in rows.values() for edit in row["edits"]
    )
    assert summary.bytes_cut == cut
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    assert summary.counts["bytes_kept"] == sum(
        size for name, size in sizes.items() if rows[name]["keep"]
    )


def test_shards_workers_and_order_do_not_change_the_result(run: Callable) -> None:
    documents = list(corpus().values())
    shuffled = random.Random(4).sample(documents, len(documents))
    cut = [shuffled[at : at + 4] for at in range(0, len(shuffled), 4)]
    config = {"action": "excise"}
    first, first_summary = run("one", [documents], config)
    second, second_summary = run("cut", cut, config, workers=2)
    assert rows_by_id(first["decontaminate"]) == rows_by_id(second["decontaminate"])
    first_matches, second_matches = (
        pq.read_table(inputs["decontaminate"] / "matches.parquet")
        for inputs in (first, second)
    )
    assert first_matches.equals(second_matches)
    assert first_summary == second_summary


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"max_contamination": 0.7}, {"partial"}),
        ({"max_contamination": 1.0}, set(LEAKS)),
        (
            {"max_contamination": 1.0, "max_contamination_words": 30},
            {"partial", "short"},
        ),
        ({"max_document_frequency": 1, "certain_coverage": 1.0}, {"partial"}),
        ({"min_words": 10}, {"short"}),
    ],
)
def test_each_threshold_decides(
    run: Callable, config: dict[str, Any], kept: set[str]
) -> None:
    documents = corpus()
    inputs, _ = run("all", [list(documents.values())], config)
    rows = rows_by_name(inputs, documents)
    assert {name for name in LEAKS if rows[name]["keep"]} == kept


def test_verdicts_can_be_replayed(run: Callable) -> None:
    documents = list(corpus().values())
    inputs, _ = run("all", [documents])
    before, after = (
        rules_of(
            decontaminate.rules,
            "decontaminate",
            Decontaminate.model_validate({"against": ["x"], **changed}),
            ["contamination", "contamination_words"],
        )
        for changed in ({}, {"max_contamination": 0.7})
    )
    assert [rule.name for rule in before] == [
        "decontaminate/max_contamination",
        "decontaminate/max_contamination_words",
    ]
    old, new = judge_shard(inputs, "part-00000.parquet", "decontaminate", before, after)
    stored = pq.read_table(inputs["decontaminate"] / "part-00000.parquet")[
        "keep"
    ].to_pylist()
    assert old.keep.tolist() == stored
    again, _ = run(
        "again",
        [documents],
        {"max_contamination": 0.7},
    )
    assert (
        new.keep.tolist()
        == pq.read_table(again["decontaminate"] / "part-00000.parquet")[
            "keep"
        ].to_pylist()
    )


def test_only_the_remaining_words_of_excised_documents_can_be_replayed(
    run: Callable,
) -> None:
    config = {"action": "excise", "margin_characters": 0}
    inputs, _ = run("all", [list(corpus().values())], config)
    columns = pq.read_table(inputs["decontaminate"] / "part-00000.parquet").column_names
    before, after = (
        rules_of(
            decontaminate.rules,
            "decontaminate",
            Decontaminate.model_validate({"against": ["x"], **config, **changed}),
            columns,
        )
        for changed in ({}, {"min_left_words": 1000})
    )
    assert [rule.key for rule in before] == ["decontaminate.min_left_words"]
    old, new = judge_shard(inputs, "part-00000.parquet", "decontaminate", before, after)
    assert [int((~verdicts.keep).sum()) for verdicts in (old, new)] == [1, len(LEAKS)]


def test_only_kept_documents_of_the_sources_are_judged(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    documents = [
        ("web", "a", QUESTION),
        ("web", "b", QUESTION + " b"),
        ("books", "c", QUESTION + " c"),
    ]
    ingest = write_ingest("ingest", [documents])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    write_table(
        tmp_path / "langid" / "part-00000.parquet",
        pa.table({"id": ids, "keep": pa.array([False, True, True])}),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    config = {"against": [str(evaluation_set(tmp_path))], "sources": ["web"]}
    decontaminate.run(inputs, config, tmp_path / "out", make_context("work"))
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table["keep"].to_pylist() == [None, False, True]
    assert table["contamination"].to_pylist() == [None, 1.0, None]


def test_text_that_is_not_utf8_is_quarantined(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", "text"), ("web", "b", QUESTION)]])
    rewrite_texts(ingest / "part-00000.parquet", [b"caf\xe9", QUESTION.encode()])
    config = {
        "against": [str(evaluation_set(tmp_path))],
        "max_quarantined": 0.5,
        "action": "excise",
    }
    summary = decontaminate.run(
        {"ingest": ingest}, config, tmp_path / "out", make_context("work")
    )
    check_conservation(summary.counts, "decontaminate")
    assert (summary.counts["quarantined"], summary.counts["dropped"]) == (
        1,
        {"decontaminate/min_left_words": 1},
    )


def test_empty_corpus_and_items_that_are_too_short_are_allowed(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    (tmp_path / "ingest").mkdir()
    (tmp_path / "short.txt").write_text("Yes.\nNo.\n")
    config = {"against": [str(evaluation_set(tmp_path))]}
    summary = decontaminate.run(
        {"ingest": tmp_path / "ingest"}, config, tmp_path / "out", make_context("work")
    )
    assert (summary.counts, summary.matches) == ({}, [])
    inputs = {"ingest": write_ingest("some", [[("web", "a", "Yes. No.")]])}
    config = {"against": [str(tmp_path / "short.txt")]}
    summary = decontaminate.run(
        inputs, config, tmp_path / "other", make_context("other-work")
    )
    assert summary.sets == {
        "short": SetReport(items=2, checked=0, contaminated=0, contaminated_share=0.0)
    }
    assert (summary.counts["kept"], summary.ngrams) == (1, 0)


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
def test_planted_items_of_real_benchmarks_are_found_in_real_prose(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    from gristmill.dataprep.decontamination.evaluation_sets import read_parts

    against = [
        str(DATA / "eval" / name)
        for name in ("gsm8k_test.jsonl.zst", "HumanEval.jsonl.gz")
    ]
    parts, _ = read_parts(Decontaminate.model_validate({"against": against}).against)
    chosen = [
        part
        for part in parts
        if part.field in ("question", "prompt") and part.item % 150 == 7
    ]
    speech = (DATA / "text" / "tinyshakespeare.txt").read_text()
    planted = [
        (
            "web",
            f"{part.set}#{part.item}",
            speech[5000 * n : 5000 * n + 4000] + "\n" + part.text + "\n",
        )
        for n, part in enumerate(chosen)
    ]
    clean = [
        ("web", f"clean{n}", speech[5000 * n : 5000 * n + 5000]) for n in range(40, 60)
    ]
    ingest = write_ingest("ingest", [planted + clean])
    summary = decontaminate.run(
        {"ingest": ingest}, {"against": against}, tmp_path / "out", make_context("work")
    )
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table["contaminated_item"].to_pylist() == [
        name for _, name, _ in planted
    ] + [None] * len(clean)
    assert table["keep"].to_pylist() == [False] * len(planted) + [True] * len(clean)
    assert summary.sets["gsm8k_test"].items == 1319
    assert summary.sets["HumanEval"].contaminated == 2
