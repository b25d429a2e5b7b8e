"""The stage `filter`: rules, reasons, measured columns, and balanced counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.conservation import QuarantineError, check_conservation
from gristmill.dataprep.documents import spread, write_table
from gristmill.dataprep.filters import filter as filter_stage
from gristmill.dataprep.thresholds import (
    count_failures,
    failures,
    first_failures,
)
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import GopherQuality, GopherRepetition
from tests.dataprep import gopher_reference
from tests.dataprep.document_shards import file_contents, rewrite_texts

QUALITY, REPETITION = (
    [name for name in rules.model_fields if name.startswith(("min_", "max_"))]
    for rules in (GopherQuality, GopherRepetition)
)


def prose(seed: int, words: int = 120) -> str:
    """English-looking text that every rule passes."""
    rng = random.Random(seed)
    stems = [
        "the",
        "river",
        "of",
        "and",
        "stone",
        "table",
        "under",
        "morning",
        "to",
        "letter",
        "garden",
        "with",
    ]
    return " ".join(
        rng.choice(stems)
        + rng.choice(["", "s", "ed"]) * (step % 3)
        + ("." * (step % 9 == 0))
        + str(step) * (step % 2)
        for step in range(words)
    )


def read(out: Path) -> pa.Table:
    return pa.concat_tables(
        [pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]
    )


def reason_of(table: pa.Table) -> dict[str, str | None]:
    return dict(enumerate(table["reason"].cast(pa.string()).to_pylist()))


@pytest.mark.parametrize(
    ("threshold", "text"),
    [
        ("gopher_quality/min_words", "too short to be of use"),
        ("gopher_quality/max_words", "the word of one " * 26_000),
        ("gopher_quality/min_mean_word_length", "to be of a " * 30),
        (
            "gopher_quality/max_mean_word_length",
            "the incomprehensibilities and counterrevolutionaries " * 20,
        ),
        ("gopher_quality/max_symbol_word_ratio", prose(1) + " #tag" * 20),
        (
            "gopher_quality/max_bullet_line_ratio",
            "\n".join(f"- {line}" for line in prose(2).split(". ")),
        ),
        (
            "gopher_quality/max_ellipsis_line_ratio",
            "\n".join(f"{prose(seed, 30)}..." for seed in range(9)),
        ),
        ("gopher_quality/min_alpha_word_ratio", prose(4) + " 12345" * 60),
        (
            "gopher_quality/min_stop_words",
            " ".join(f"word{step}" for step in range(80)),
        ),
        (
            "gopher_repetition/max_duplicate_line_ratio",
            "\n".join(["ab"] * 4 + prose(6).split(". ")[:6] + [prose(7)]),
        ),
        (
            "gopher_repetition/max_top_2gram_char_ratio",
            " ".join(f"{word} some measures" for word in prose(8).split()),
        ),
    ],
)
def test_reason_is_the_rule_that_fails(
    threshold: str,
    text: str,
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", prose(0)), ("web", "b", text)]])
    filter_stage.run({"ingest": ingest}, {}, tmp_path / "out", make_context("work"))
    assert reason_of(read(tmp_path / "out")) == {0: None, 1: threshold}
    assert read(tmp_path / "out")["keep"].to_pylist() == [True, False]


def test_measures_are_columns_of_kept_and_dropped_documents(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    texts = [prose(1), "short", "", prose(2) + "\nthe same\nthe same"]
    ingest = write_ingest(
        "ingest", [[("web", str(row), text) for row, text in enumerate(texts)]]
    )
    filter_stage.run({"ingest": ingest}, {}, tmp_path / "out", make_context("work"))
    for row, text in zip(read(tmp_path / "out").to_pylist(), texts):
        values = {**gopher_reference.quality(text), **gopher_reference.repetition(text)}
        assert {name: row[name] for name in values} == values


def test_only_configured_rule_sets_are_measured_and_applied(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", "short")]])
    for rules, columns, reason in (
        ([], set(), None),
        (
            ["gopher_quality"],
            {name.removeprefix("min_").removeprefix("max_") for name in QUALITY},
            "gopher_quality/min_words",
        ),
        (
            ["gopher_repetition"],
            {name.removeprefix("max_") for name in REPETITION},
            None,
        ),
        (
            [{"gopher_quality": {"min_words": 1, "min_stop_words": 0}}],
            {name.removeprefix("min_").removeprefix("max_") for name in QUALITY},
            None,
        ),
    ):
        out = tmp_path / f"out-{len(columns)}-{reason}"
        config = Filter.model_validate({"rules": rules}).model_dump(mode="json")
        filter_stage.run(
            {"ingest": ingest}, config, out, make_context(out.name + "-work")
        )
        assert (
            set(read(out).column_names) == {"id", "keep", "reason", "error"} | columns
        )
        assert reason_of(read(out)) == {0: reason}


def test_documents_of_other_sources_are_not_judged(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", "short"), ("books", "b", "short")]])
    summary = filter_stage.run(
        {"ingest": ingest}, {"sources": ["web"]}, tmp_path / "out", make_context("work")
    )
    table = read(tmp_path / "out")
    assert table["keep"].to_pylist() == [False, True]
    assert table["words"].to_pylist() == [1, None]
    assert summary.counts["sources"]["books"]["kept"] == 1
    assert summary.counts["sources"]["web"]["dropped"] == {
        "gopher_quality/min_words": 1
    }


def test_documents_dropped_earlier_have_null_columns(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", prose(1)), ("web", "b", prose(2))]])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    write_table(
        tmp_path / "langid" / "part-00000.parquet",
        pa.table({"id": ids, "keep": pa.array([False, True])}),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    summary = filter_stage.run(inputs, {}, tmp_path / "out", make_context("work"))
    assert summary.counts["read"] == 1
    first = read(tmp_path / "out").to_pylist()[0]
    assert {name for name, value in first.items() if value is not None} == {"id"}


def test_document_that_raises_is_quarantined_alone(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest(
        "ingest", [[("web", str(row), prose(row)) for row in range(40)]]
    )
    texts = [prose(row).encode() for row in range(40)]
    texts[7] = b"caf\xe9 au lait"
    rewrite_texts(ingest / "part-00000.parquet", texts)
    summary = filter_stage.run(
        {"ingest": ingest}, {}, tmp_path / "out", make_context("work")
    )
    assert (summary.counts["kept"], summary.counts["quarantined"]) == (39, 1)
    check_conservation(summary.counts, "filter")
    broken = read(tmp_path / "out").to_pylist()[7]
    assert (broken["keep"], broken["reason"], broken["words"]) == (
        False,
        "quarantine",
        None,
    )
    assert "UTF8" in broken["error"]
    with pytest.raises(QuarantineError):
        filter_stage.run(
            {"ingest": ingest},
            {"max_quarantined": 0.01},
            tmp_path / "out",
            make_context("work"),
        )


def test_resumed_run_writes_the_same_bytes(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    shards = [
        [
            ("web", f"{shard}/{row}", prose(12 * shard + row, 20 * row))
            for row in range(12)
        ]
        for shard in range(4)
    ]
    ingest = write_ingest("ingest", shards)
    undisturbed = filter_stage.run(
        {"ingest": ingest}, {}, tmp_path / "whole", make_context("a", workers=2)
    )
    filter_stage.run({"ingest": ingest}, {}, tmp_path / "again", make_context("b"))
    (tmp_path / "again" / "part-00002.parquet").unlink()
    (tmp_path / "b" / "filter" / "part-00001.parquet.json").unlink()
    resumed = filter_stage.run(
        {"ingest": ingest}, {}, tmp_path / "again", make_context("b")
    )
    assert resumed == undisturbed
    assert file_contents(tmp_path / "again") == file_contents(tmp_path / "whole")


def test_summary_does_not_depend_on_shards(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    documents = [("web", str(row), prose(row, 15 * row)) for row in range(20)]
    summaries: list[dict[str, Any]] = []
    for name, shards in (
        ("one", [documents]),
        ("many", [documents[row : row + 3] for row in range(0, 20, 3)]),
    ):
        ingest = write_ingest(name, shards)
        out, context = tmp_path / f"{name}-out", make_context(f"{name}-work")
        summaries.append(filter_stage.run({"ingest": ingest}, {}, out, context))
    assert summaries[0] == summaries[1]
    # of 0, 15, 30 and 45 words
    assert summaries[0].rules["gopher_quality/min_words"]["failing"] == 4
    assert sum(summaries[0].histograms["words"]["counts"]) == 20


def test_histograms_of_sources_add_up(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    shards = [
        [("web", "a", prose(1)), ("books", "b", prose(2))],
        [("web", "c", "short")],
    ]
    ingest = write_ingest("ingest", shards)
    summary = filter_stage.run(
        {"ingest": ingest}, {}, tmp_path / "out", make_context("work")
    )
    by_source = {
        source: histograms["words"]
        for source, histograms in summary.histograms_by_source.items()
    }
    assert {
        source: sum(histogram["counts"]) for source, histogram in by_source.items()
    } == {"books": 1, "web": 2}
    added = [
        sum(pair)
        for pair in zip(
            *(histogram["counts"] for histogram in by_source.values()), strict=True
        )
    ]
    assert summary.histograms["words"] == {
        "edges": by_source["web"]["edges"],
        "counts": added,
    }


def test_rule_sets_apply_in_the_order_of_the_schema(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    code = (
        "def total(items):\n    return sum(item.value for item in items if item is "
        "not None)\n" * 3
    )
    texts = {
        "app/lib.min.js": code,
        "app/lib.py": code,
        "app/x.py": "value = {}\n" * 30,
    }
    ingest = write_ingest(
        "ingest", [[("code", path, text) for path, text in texts.items()]]
    )
    config = {
        "rules": [
            {"code": {"max_encoded_ratio": 1.0}},
            {"c4": {"min_sentences": 0, "max_curly_brackets": 9}},
        ]
    }
    summary = filter_stage.run(
        {"ingest": ingest}, config, tmp_path / "out", make_context("work")
    )
    assert reason_of(read(tmp_path / "out")) == {
        0: "code/max_minified",
        1: None,
        2: "c4/max_curly_brackets",
    }
    assert summary.rules["c4/max_curly_brackets"] == {"failing": 1, "only": 1}
    assert read(tmp_path / "out")["data_lines"].to_pylist() == [None] * 3


def test_rule_set_can_be_limited_to_sources(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    listing = "\n".join(f"item {row}" for row in range(60))
    documents = [
        ("web", "a", listing),
        ("git", "b.py", listing),
        ("web", "c.min.js", f"{prose(1)}."),
    ]
    ingest = write_ingest("ingest", [documents])
    config = {
        "rules": ["fineweb", {"code": {"min_code_tokens": 500}}, "mc4"],
        "rule_sources": {"fineweb": ["web"], "code": ["git"], "mc4": []},
    }
    summary = filter_stage.run(
        {"ingest": ingest}, config, tmp_path / "out", make_context("work")
    )
    table = read(tmp_path / "out")
    assert reason_of(table) == {
        0: "fineweb/min_terminal_line_ratio",
        1: "code/min_code_tokens",
        2: None,
    }
    assert table["filled_lines"].to_pylist() == [60, None, 1]
    assert table["code_lines"].to_pylist() == [None, 60, None]
    assert table["long_paragraphs"].to_pylist() == [None] * 3
    assert summary.rules["fineweb/max_short_line_ratio"] == {"failing": 1, "only": 0}
    assert sum(summary.histograms_by_source["git"]["filled_lines"]["counts"]) == 0


def test_metadata_that_is_not_a_mapping_quarantines_its_document(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest(
        "ingest", [[("code", str(row), f"value = {row}\n" * 20) for row in range(3)]]
    )
    path = ingest / "part-00000.parquet"
    table = pq.read_table(path)
    broken = pa.array(['{"path": "a.py"}', "[1]", "{}"])
    write_table(
        path,
        table.set_column(
            table.column_names.index("metadata"), table.schema.field("metadata"), broken
        ),
    )
    config = {"rules": [{"code": {"path_field": "path"}}], "max_quarantined": 0.5}
    filter_stage.run({"ingest": ingest}, config, tmp_path / "out", make_context("work"))
    assert reason_of(read(tmp_path / "out")) == {0: None, 1: "quarantine", 2: None}
    assert "list" in read(tmp_path / "out")["error"].to_pylist()[1]


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 20)), min_size=1))
def test_document_passes_if_and_only_if_all_values_are_within_the_bounds(
    values: list[tuple[int, float]],
) -> None:
    bounds = GopherQuality(min_words=50, max_words=100)
    statistics = {name.partition("_")[2]: np.full(len(values), 0.5) for name in QUALITY}
    statistics |= {
        "words": np.array([words for words, _ in values]),
        "stop_words": np.full(len(values), 9),
    }
    statistics |= {"mean_word_length": np.array([length for _, length in values])}
    statistics |= {
        "symbol_word_ratio": np.zeros(len(values)),
        "alpha_word_ratio": np.ones(len(values)),
    }
    statistics |= {"ellipsis_line_ratio": np.zeros(len(values))}
    failed = failures(statistics, {"gopher_quality": bounds})
    reasons = first_failures(failed, len(values))
    for (words, length), reason in zip(values, reasons):
        assert (reason is None) == (50 <= words <= 100 and 3.0 <= length <= 10.0)
    counted = count_failures(failed)
    assert sum(reason is not None for reason in reasons) >= max(
        rule["failing"] for rule in counted.values()
    )


def test_text_that_raises_has_null_measures() -> None:
    def lengths(texts: pa.Array) -> dict[str, np.ndarray]:
        if "bad" in texts.to_pylist():
            raise ValueError("bad text")
        return {"length": np.array([len(text) for text in texts.to_pylist()], np.int64)}

    columns, errors = measure_texts(pa.chunked_array([["a", "bad"], ["ccc"]]), lengths)
    assert errors == [None, "ValueError: bad text", None]
    assert spread(columns["length"], errors).to_pylist() == [1, None, 3]
