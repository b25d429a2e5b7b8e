"""The list of thresholds: documents dropped by each, and by its next looser and next
stricter value.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.documents import annotate, read_table, write_table
from gristmill.dataprep.filters import replayed_rules as filter_rules
from gristmill.dataprep.whatif_thresholds import rules_of
from gristmill.flows.questions.whatif import (
    MOST_IDLE,
    Comparison,
    Neighbour,
    Threshold,
    print_thresholds,
    replay,
    thresholds,
)
from gristmill.mixtures.steps.filter import Filter
from tests.dataprep.document_shards import write_shards

COLUMNS = ["words", "mean_word_length"]
SECTION = Filter.model_validate(
    {"rules": [{"gopher_quality": {"min_words": 50, "max_mean_word_length": 10.0}}]}
)


def filtered(folder: Path, shards: list[list[tuple[int, float]]]) -> dict[str, Path]:
    """Write outputs of a filter that measured (words, mean word length) of each
    document.
    """
    names = [
        [f"{number} {row}" for row in range(len(rows))]
        for number, rows in enumerate(shards)
    ]
    documents = [[("web", name, name) for name in shard] for shard in names]
    ingest = write_shards(folder / "ingest", documents)
    for path, rows in zip(sorted(ingest.iterdir()), shards, strict=True):
        reasons = [
            "gopher_quality/min_words"
            if words < 50
            else "gopher_quality/max_mean_word_length"
            if length > 10
            else None
            for words, length in rows
        ]
        measures = {
            "words": pa.array([float(words) for words, _ in rows]),
            "mean_word_length": pa.array([length for _, length in rows]),
        }
        judged = np.arange(len(rows))
        table = annotate(read_table(path), judged, judged, reasons, measures)[0]
        write_table(folder / "filter" / path.name, table)
    return {"ingest": ingest, "filter": folder / "filter"}


def listed(folder: Path, shards: list[list[tuple[int, float]]]) -> dict[str, Threshold]:
    """Return the thresholds of `filtered` documents by key."""
    inputs = filtered(folder, shards)
    rules = rules_of(filter_rules.rules, "filter", SECTION, COLUMNS)
    with (
        patch("gristmill.flows.questions.whatif._measured_inputs", return_value=inputs),
        patch(
            "gristmill.flows.questions.whatif.stored_rules",
            return_value={"filter": rules},
        ),
    ):
        return {threshold.key: threshold for threshold in thresholds(None)}  # type: ignore[arg-type]


ROWS = st.lists(
    st.tuples(st.integers(40, 60), st.sampled_from([5.0, 9.0, 9.5, 10.0, 10.5, 11.5])),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(shards=st.lists(ROWS, min_size=1, max_size=3))
def test_threshold_counts_match_a_naive_count(
    shards: list[list[tuple[int, float]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    thresholds_by_key = listed(tmp_path_factory.mktemp("whatif"), shards)
    rows = [row for shard in shards for row in shard]
    words = thresholds_by_key["filter.gopher_quality.min_words"]
    lengths = thresholds_by_key["filter.gopher_quality.max_mean_word_length"]
    assert (words.bound, lengths.bound) == (50, 10)
    short, long = (
        {bound: sum(number < bound for number, _ in rows) for bound in (45, 50, 55)},
        {bound: sum(length > bound for _, length in rows) for bound in (11, 10, 9)},
    )
    assert (words.failing, lengths.failing) == (short[50], long[10])
    assert (words.looser, words.stricter) == (
        Neighbour(45, short[45]),
        Neighbour(55, short[55]),
    )
    assert (lengths.looser, lengths.stricter) == (
        Neighbour(11, long[11]),
        Neighbour(9, long[9]),
    )
    assert words.only == sum(number < 50 and length <= 10 for number, length in rows)
    assert words.seen == len(rows)


def test_passing_samples_fail_no_other_rule(tmp_path: Path) -> None:
    inputs = filtered(
        tmp_path, [[(45, 5.0), (46, 11.5), (47, 6.0), (30, 5.0)], [(48, 11.0)]]
    )
    looser = Filter.model_validate(
        {"rules": [{"gopher_quality": {"min_words": 40, "max_mean_word_length": 10.0}}]}
    )
    current_rules, looser_rules = (
        {"filter": rules_of(filter_rules.rules, "filter", section, COLUMNS)}
        for section in (SECTION, looser)
    )
    result = replay(Comparison(inputs, current_rules, looser_rules), 10, None)
    (cut,) = result.cuts
    assert [sample.value for sample in cut.passing] == [45.0, 47.0]
    assert [sample.value for sample in cut.failing] == [30.0]
    assert result.then["web"].documents == 2


def test_threshold_list_is_valid_as_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    thresholds_by_key = listed(tmp_path, [[(48, 5.0), (60, 5.0)]])
    print_thresholds(
        list(thresholds_by_key.values()), "gristmill whatif m.yaml --set KEY=VALUE"
    )
    lines = capsys.readouterr().out.splitlines()
    row = "filter.gopher_quality.min_words=50 1 1 45: 0 55: 1"
    assert lines[1].split() == row.split()
    assert "filter.gopher_quality.max_mean_word_length" in "".join(lines[2:])
    assert lines[-1].endswith(" gristmill whatif m.yaml --set KEY=VALUE")


def test_idle_thresholds_are_listed_up_to_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    idle = Threshold("", "", 1, 0, 0, 0, None, None)
    print_thresholds(
        [
            replace(idle, key=f"filter.by_language.x.k{number}")
            for number in range(MOST_IDLE + 5)
        ],
        "whatif",
    )
    output = " ".join(capsys.readouterr().out.split())
    assert f"{MOST_IDLE + 5} more drop nothing" in output
    assert f"k{MOST_IDLE - 1} and 5 more" in output
