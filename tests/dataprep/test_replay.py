"""Replayed verdicts equal a run of the stage with the other thresholds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.decontamination import decontaminate
from gristmill.dataprep.documents import annotate, read_documents, write_table
from gristmill.dataprep.filters import filter as filter_stage
from gristmill.dataprep.filters import replayed_rules as filter_rules
from gristmill.dataprep.langid import replayed_rules
from gristmill.dataprep.whatif_thresholds import (
    Rule,
    Verdicts,
    judge_shard,
    nearest,
    rules_of,
)
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId

SHARD = "part-00000.parquet"
WORDS = "the river of and stone table under morning to letter garden with #tag 17 a-very-long-compound-word".split()


def texts(seed: int, number: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 160))) for _ in range(number)]


def run_filter(
    inputs: dict[str, Path], config: Filter, out: Path, make_context: Callable
) -> pa.Table:
    filter_stage.run(
        inputs, config.model_dump(mode="json"), out, make_context(f"work-{out.name}")
    )
    return pq.read_table(out / SHARD)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_words": 80},
        {"max_mean_word_length": 4.5},
        {"min_stop_words": 30, "min_words": 10},
        {"max_words": 60},
    ],
)
def test_replayed_bounds_equal_a_run(
    changes: dict[str, float],
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
) -> None:
    ingest = write_ingest(
        "ingest", [[("web", str(n), text) for n, text in enumerate(texts(3))]]
    )
    before = Filter.model_validate({"rules": ["gopher_quality", "gopher_repetition"]})
    after = Filter.model_validate(
        {"rules": {"gopher_quality": changes, "gopher_repetition": {}}}
    )
    stored = run_filter({"ingest": ingest}, before, tmp_path / "stored", make_context)
    truth = run_filter({"ingest": ingest}, after, tmp_path / "truth", make_context)
    inputs = {"ingest": ingest, "filter": tmp_path / "stored"}
    columns = stored.column_names
    rules = [
        rules_of(filter_rules.rules, "filter", section, columns)
        for section in (before, after)
    ]
    old, new = judge_shard(inputs, SHARD, "filter", *rules)
    assert old.keep.tolist() == stored["keep"].to_pylist()
    assert new.keep.tolist() == truth["keep"].to_pylist()
    assert old.keep.tolist() != new.keep.tolist()
    reasons = truth["reason"].cast(pa.string()).to_pylist()
    dropped_alone = sum(tally.only for tally in new.tallies.values())
    assert (
        dropped_alone
        <= sum(reason is not None for reason in reasons)
        <= sum(tally.failing for tally in new.tallies.values())
    )


def test_replay_keeps_quarantined_and_otherwise_dropped_documents(
    write_ingest: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", str(row), "text") for row in range(5)]])
    documents = read_documents({"ingest": ingest}, SHARD)
    rows = np.array([0, 1, 2, 3])
    table, _ = annotate(
        documents,
        rows,
        rows,
        [None, "language_score", "by_hand", None],
        {
            "language": pa.array(["en", "en", "en", None]),
            "language_score": pa.array([0.9, 0.4, 0.9, None]),
        },
        [None, None, None, "ValueError: no"],
    )
    write_table(tmp_path / "langid" / SHARD, table)
    before, after = (
        LanguageId.model_validate({"threshold": bound}) for bound in (0.65, 0.3)
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    rules = [
        rules_of(replayed_rules.rules, "langid", section, table.column_names)
        for section in (before, after)
    ]
    old, new = judge_shard(inputs, SHARD, "langid", *rules)
    assert old.rows.tolist() == [0, 1, 2, 3]
    assert old.keep.tolist() == [True, False, False, False]
    assert new.keep.tolist() == [True, True, False, False]
    assert (
        old.tallies["language_score"].failing == old.tallies["language_score"].only == 1
    )


def test_rules_need_a_measured_statistic() -> None:
    section = Filter.model_validate({"rules": ["gopher_quality"]})
    names = [
        rule.name
        for rule in rules_of(
            filter_rules.rules, "filter", section, ["words", "stop_words"]
        )
    ]
    assert names == [
        "gopher_quality/min_words",
        "gopher_quality/max_words",
        "gopher_quality/min_stop_words",
    ]


def test_samples_are_the_documents_next_to_the_cut() -> None:
    values = np.array([1.0, 9.0, 4.0, np.nan, 5.0, 6.0, 4.0])
    rule = Rule(
        "r", "stage.min_x", "x", 5.0, lambda columns: columns["x"] < 5.0, ("x",)
    )
    verdicts = Verdicts(
        np.arange(7), values >= 5.0, {"r": rule.fails({"x": values})}, {"x": values}
    )
    assert nearest(verdicts, rule, 2) == {
        "failing": [(1.0, 2, 4.0), (1.0, 6, 4.0)],
        "passing": [(0.0, 4, 5.0), (1.0, 5, 6.0)],
    }


def test_languages_have_their_own_thresholds() -> None:
    section = LanguageId.model_validate({"keep": {"en": 0.6, "de": 0.9}})
    other_languages, english, german = rules_of(
        replayed_rules.rules, "langid", section, ["language", "language_score"]
    )
    columns = {
        "language": np.array(["en", "de", "fr", "de", None], object),
        "language_score": np.array([0.7, 0.7, 0.99, 0.95, np.nan]),
    }
    assert other_languages.fails(columns).tolist() == [False, False, True, False, False]
    assert english.fails(columns).tolist() == [False] * 5
    assert german.fails(columns).tolist() == [False, True, False, False, False]
    assert [
        (rule.name, rule.label, rule.key, rule.bound)
        for rule in (other_languages, german)
    ] == [
        ("language", "language", "langid.keep", ("en", "de")),
        ("language_score", "language_score (de)", "langid.keep.de", 0.9),
    ]
    assert german.fails({**columns, "language_score": np.zeros(5)}).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_script_threshold_precedes_those_of_its_language_and_of_star() -> None:
    section = LanguageId.model_validate(
        {"keep": {"sr": 0.5, "srp_Cyrl": 0.9, "*": 0.3}}
    )
    rules = rules_of(
        replayed_rules.rules,
        "langid",
        section,
        ["language", "language_score", "script"],
    )
    columns = {
        "language": np.array(["sr", "sr", "fr", None], object),
        "script": np.array(["Latn", "Cyrl", "Latn", None], object),
        "language_score": np.array([0.2, 0.2, 0.2, np.nan]),
    }
    failing = {rule.label: rule.fails(columns).tolist() for rule in rules}
    assert failing == {
        "language": [False] * 4,
        "language_score (sr)": [True, False, False, False],
        "language_score (srp_Cyrl)": [False, True, False, False],
        "language_score (*)": [False, False, True, False],
    }


def test_rules_with_a_shared_reason_count_their_own_drops() -> None:
    section = LanguageId.model_validate({"keep": {"en": 0.6, "de": 0.9}})
    other_languages, english, german = rules_of(
        replayed_rules.rules, "langid", section, ["language", "language_score"]
    )
    summary = {
        "counts": {"dropped": {"language": 3, "language_score": 2}},
        "parts": {"de": {"language_score": 2}},
    }
    assert [rule.dropped(summary) for rule in (other_languages, english, german)] == [
        3,
        0,
        2,
    ]


def test_bounds_of_excised_spans_are_not_replayed() -> None:
    columns = ["contamination", "contamination_words"]
    against = {"against": ["eval.jsonl"]}
    drop, excise = (
        Decontaminate.model_validate({**against, "action": action})
        for action in ("drop", "excise")
    )
    assert [
        rule.name
        for rule in rules_of(decontaminate.rules, "decontaminate", drop, columns)
    ] == [
        "decontaminate/max_contamination",
        "decontaminate/max_contamination_words",
    ]
    assert rules_of(decontaminate.rules, "decontaminate", excise, columns) == []
