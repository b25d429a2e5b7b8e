"""The registry of rule sets: columns, bounds, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.documents import read_shard, spread, write_table
from gristmill.dataprep.filters.gopher import DIALECTS
from gristmill.dataprep.filters.rule_sets import column_edges, columns_read, measure
from gristmill.dataprep.thresholds import failures
from gristmill.mixtures.base import Section
from gristmill.mixtures.steps.rules import GopherQuality, Rules, columns_of

TEXTS = ["", "The one and only.\nLine two is here.", "{}", "東京\n\n\n"]


RULE_SETS = list(Rules.model_fields)


def test_every_rule_set_has_a_module_and_histogram_edges_for_its_columns() -> None:
    assert set(columns_read(RULE_SETS)) == {
        "language",
        "script",
        "locator",
        "metadata",
    }
    edges = column_edges(RULE_SETS)
    assert {
        name: edges[name][-1]
        for name in ("eflaw", "toxicity", "newline_word_ratio", "words")
    } == {"eflaw": 20.0, "toxicity": 1.0, "newline_word_ratio": 1.0, "words": 2**20}


def test_rule_sets_have_distinct_columns() -> None:
    names = Counter(column for name in RULE_SETS for column in columns_of(name))
    assert [name for name, number in names.items() if number > 1] == []
    assert (
        set(names)
        & {
            "id",
            "keep",
            "reason",
            "error",
            "edits",
            "source",
            "locator",
            "text",
            "metadata",
        }
        == set()
    )


NEED_A_FILE = {"toxicity"}


@pytest.mark.parametrize(
    "name", [name for name in RULE_SETS if name not in NEED_A_FILE]
)
def test_rule_set_measures_the_columns_that_its_thresholds_bound(
    name: str,
) -> None:
    rules = Rules.model_validate({name: {}})
    rows = pa.table(
        {
            "text": pa.array(TEXTS, pa.large_string()),
            "locator": ["a.py", "b", "c.json", "d"],
            "metadata": ["{}"] * 4,
            "language": pa.nulls(4),
        }
    )
    measured = measure(rows, rules)
    assert set(measured) == set(columns_of(name))
    assert {values.shape for values in measured.values()} == {(4,)}
    assert {values.dtype for values in measured.values()} <= {
        np.dtype(np.int64),
        np.dtype(np.float64),
    }


class Bounds(Section):
    min_size: int = 3
    max_size: int | None = None
    unit: str = "bytes"


def test_bound_and_nan_pass_and_options_bound_nothing() -> None:
    failed = failures({"size": np.array([2, 3, np.nan])}, {"set": Bounds()})
    assert {rule: mask.tolist() for rule, mask in failed.items()} == {
        "set/min_size": [True, False, False]
    }
    failed = failures({"size": np.array([2, 3, np.nan])}, {"set": Bounds(max_size=2)})
    assert failed["set/max_size"].tolist() == [False, True, False]


def test_nan_is_null_in_the_table() -> None:
    assert spread(np.array([1.0, np.nan]), [None, "bad", None]).to_pylist() == [
        1.0,
        None,
        None,
    ]


def test_columns_come_from_documents_or_earlier_stages_or_are_null(
    write_ingest: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", "one"), ("web", "b", "two")]])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    write_table(
        tmp_path / "langid" / "part-00000.parquet",
        pa.table({"id": ids, "keep": [True, True], "language": ["en", "de"]}),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    rows = read_shard(
        inputs, "part-00000.parquet", ["text", "locator", "language", "perplexity"]
    ).documents
    assert rows.to_pylist() == [
        {"text": "one", "locator": "a", "language": "en", "perplexity": None},
        {"text": "two", "locator": "b", "language": "de", "perplexity": None},
    ]


def test_disabled_rule_sets_measure_nothing() -> None:
    rows = pa.table({"text": TEXTS, "language": pa.nulls(len(TEXTS), pa.string())})
    assert measure(rows, Rules()) == {}
    assert list(measure(rows, Rules(gopher_quality=GopherQuality()))) == columns_of(
        "gopher_quality"
    )


SIZE = (2 << 20) + 2
"""Bytes of lines, and half as many words, that need the largest hash tables for their
number.
"""
PEAK = """
import json, sys
from pathlib import Path
import pyarrow as pa
from gristmill.dataprep.filters.rule_sets import measure
from gristmill.core.processes import peak_resident_bytes
from gristmill.mixtures.steps.rules import Rules
rules, size = Rules.model_validate(json.loads(sys.argv[1])), int(sys.argv[2])
pieces = {"words": "a b c e d ", "lines": "a\\n", "empty lines": "\\n", "marks": "a! ", "ideographs": "的一是不了",
        "prose": "The mill by the river grinds what the carts bring.\\n\\n"}
def held():
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over: proc(5)
    return peak_resident_bytes()
peaks = {}
for name, piece in pieces.items():
    rows = [pa.table({"text": pa.array([text], pa.large_string()), "language": ["en"], "locator": ["a.py"],
                      "metadata": ["{}"]})
            for text in ("The wheel turns.\\n" * 9, (piece * (size // len(piece.encode()) + 1))[:size])]
    measure(rows[0], rules)  # compiles
    before = held()
    measure(rows[1], rules)
    peaks[name] = (peak_resident_bytes() - before) / rows[1]["text"].nbytes
print(json.dumps(peaks))
"""
OTHER_SETS = {
    name: {}
    for name in RULE_SETS
    if not name.startswith("gopher") and name not in NEED_A_FILE
}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="only Linux measures the peak memory of a part of a program",
)
@pytest.mark.parametrize(
    "rules",
    [
        *(
            pytest.param(
                {
                    "gopher_quality": {"dialect": dialect},
                    "gopher_repetition": {"dialect": dialect},
                },
                marks=[] if dialect == "datatrove" else [pytest.mark.slow],
            )
            for dialect in DIALECTS
        ),
        pytest.param(
            {
                "gopher_quality": {"words": "unicode"},
                "gopher_repetition": {"words": "unicode"},
            },
            marks=pytest.mark.slow,
        ),
        OTHER_SETS,
    ],
    ids=[*DIALECTS, "unicode", "others"],
)
def test_memory_of_a_long_document_is_bounded(rules: dict[str, object]) -> None:
    command = [sys.executable, "-c", PEAK, json.dumps(rules), str(SIZE)]
    peaks = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    assert len(peaks) == 6
    assert max(peaks.values()) < 64, peaks
