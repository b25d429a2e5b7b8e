"""The stage `annotate`: a user's function measures columns, thresholds decide, and
every document is accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.conservation import QuarantineError
from gristmill.dataprep.documents import column_names
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.user_code import OwnCodeError
from tests.dataprep.document_shards import MakeContext, file_contents
from tests.dataprep.own_steps import TEXTS, step, write_documents, written

COUNT = (
    "def step(text: str, word: str) -> dict:\n    return {'magic': text.count(word)}\n"
)
BATCH = """
import pyarrow as pa
import pyarrow.compute as pc

def step(batch: pa.RecordBatch, word: str):
    return {"magic": pc.count_substring(batch["text"], word)}
"""


Run = Callable[..., tuple[dict[str, Any], list[Any]]]


@pytest.fixture
def run_step(tmp_path: Path, make_context: MakeContext) -> Run:
    """Run a step made from source: (source, **settings) -> summary, rows."""
    numbers = iter(range(100))

    def run(
        source: str,
        shards: int = 2,
        copies: int = 1,
        context: dict[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[dict[str, Any], list[Any]]:
        number = next(numbers)
        documents = write_documents(tmp_path / f"ingest{number}", shards, copies)
        config = step(tmp_path / f"code{number}", source, **settings)
        out = tmp_path / f"out{number}"
        stage_context = replace(
            make_context(f"work{number}"), **{"stage": "annotate", **(context or {})}
        )
        summary = annotate.run({"ingest": documents}, config, out, stage_context)
        return summary, written(out)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
@pytest.mark.parametrize("source", [COUNT, BATCH])
def test_measures_and_verdicts_are_the_same_in_all_modes(
    run_step: Run, source: str, mode: str
) -> None:
    settings = {"with": {"word": "xyzzy"}, "max": {"magic": 0}}
    summary, rows = run_step(
        source, context={"beam": BeamEngine(mode=mode, workers=2)}, **settings
    )
    assert [row["magic"] for row in rows] == [2, 0, 1, 0, 0] * 2
    assert [row["reason"] for row in rows] == [
        "annotate/max_magic",
        None,
        "annotate/max_magic",
        None,
        None,
    ] * 2
    assert summary.counts["dropped"] == {"annotate/max_magic": 4}
    assert summary.counts["kept"] == 6
    assert summary.rules == {"annotate/max_magic": {"failing": 4, "only": 4}}
    assert sum(summary.histograms["magic"]["counts"]) == 10
    assert summary.differs is None


@pytest.mark.slow
def test_return_value_may_be_a_typed_dict_named_tuple_dataclass_or_scalar(
    run_step: Run,
) -> None:
    typed_dict = """
from typing import TypedDict
class Found(TypedDict):
    size: int
    share: float
    first: str
    loud: bool
def step(text: str) -> Found:
    return Found(size=len(text), share=0.5, first=text[0], loud=text.isupper())
"""
    row = run_step(typed_dict)[1][0]
    assert {name: row[name] for name in ("size", "share", "first", "loud")} == {
        "size": len(TEXTS[0]),
        "share": 0.5,
        "first": "x",
        "loud": False,
    }
    named_tuple = (
        "from typing import NamedTuple\nclass Found(NamedTuple):\n    size: "
        "int\n\ndef step(text) -> Found:\n"
        "    return Found(len(text))\n"
    )
    sizes = [*map(len, TEXTS)] * 2
    assert [row["size"] for row in run_step(named_tuple)[1]] == sizes
    dataclass = named_tuple.replace("NamedTuple", "Any").replace(
        "class Found(Any)", "import dataclasses\n@dataclasses.dataclass\nclass Found"
    )
    assert [row["size"] for row in run_step(dataclass)[1]] == sizes
    _, rows = run_step("def step(text):\n    return len(text) / 2\n")
    assert [2 * row["step"] for row in rows] == sizes


def test_false_drops_the_document(run_step: Run) -> None:
    summary, rows = run_step(
        "def step(text) -> bool:\n    return 'xyzzy' not in text\n"
    )
    assert [row["reason"] for row in rows] == [
        "annotate/step",
        None,
        "annotate/step",
        None,
        None,
    ] * 2
    assert [row["step"] for row in rows] == [False, True, False, True, True] * 2
    assert summary.counts["dropped"] == {"annotate/step": 4}
    batch = (
        "import pyarrow as pa, pyarrow.compute as pc\ndef step(batch: pa.Table):\n"
        "    return pc.invert(pc.match_substring(batch['text'], 'xyzzy'))\n"
    )
    assert [row["reason"] for row in run_step(batch)[1]] == [
        row["reason"] for row in rows
    ]


def test_parameters_are_columns_of_documents_and_earlier_steps(
    run_step: Run, tmp_path: Path, make_context: MakeContext
) -> None:
    source = """
def step(source: str, url: str, id: str, metadata: dict, locator: str, absent: int = 7, *, text) -> dict:
    assert url == locator and len(id) == 32 and source == "web" and absent == 7
    return {"place": metadata["place"], "size": len(text)}
"""
    _, rows = run_step(source)
    assert [row["size"] for row in rows] == [*map(len, TEXTS)] * 2
    assert [row["place"] for row in rows] == [*range(len(TEXTS))] * 2
    documents = write_documents(tmp_path / "documents")
    config = step(tmp_path / "code", COUNT, **{"with": {"word": "xyzzy"}})
    annotate.run(
        {"ingest": documents}, config, tmp_path / "first", make_context("first-work")
    )
    second = step(
        tmp_path / "code",
        "def step(magic: int) -> dict:\n    return {'twice': 2 * magic}\n",
    )
    annotate.run(
        {"ingest": documents, "annotate": tmp_path / "first"},
        second,
        tmp_path / "second",
        make_context("w2"),
    )
    assert [row["twice"] for row in written(tmp_path / "second")] == [4, 0, 2, 0, 0] * 2


def test_batch_has_the_columns_of_the_manifest_and_may_return_more(
    run_step: Run,
) -> None:
    source = """
import pyarrow as pa
def step(batch: pa.RecordBatch):
    assert batch.schema.names == ["text", "url"]
    return batch.append_column("size", pa.array([len(url) for url in batch["url"].to_pylist()]))
"""
    _, rows = run_step(source, columns=["text", "url"])
    assert {row["size"] for row in rows} == {len("https://example.org/0/0/0")}
    assert "text" not in rows[0]


def test_none_and_nan_are_null_and_pass_every_threshold(
    run_step: Run,
) -> None:
    source = (
        "def step(text) -> dict:\n    return {'a': None, 'b': float('nan'), 'c': 1}\n"
    )
    summary, rows = run_step(source, **{"min": {"a": 1, "b": 1, "c": 1}})
    assert summary.counts["kept"] == 10
    assert rows[0]["a"] is rows[0]["b"] is None


def test_column_type_is_the_same_in_all_shards(run_step: Run, tmp_path: Path) -> None:
    source = """
def step(locator: str) -> dict:
    first = locator.startswith("https://example.org/0")
    return {"number": 1 if first else 0.5, "label": None if first else "b", "never": None}
"""
    rows = run_step(source)[1]
    assert [row["number"] for row in rows] == [1.0] * 5 + [0.5] * 5
    assert isinstance(rows[0]["number"], float)
    assert [row["label"] for row in rows] == [None] * 5 + ["b"] * 5
    with pytest.raises(OwnCodeError, match=r"steps.py, line 1: step .* 'number'"):
        run_step(
            "def step(locator) -> dict:\n    return {'number': 1 if "
            "locator.startswith('https://example.org/0') "
            "else 'one'}\n"
        )


def test_numpy_scalars_of_several_types_make_one_column(
    run_step: Run,
) -> None:
    source = """
import numpy as np
def step(text) -> dict:
    size = len(text)
    return {"size": np.uint8(size) if size % 2 else np.int64(size)}
"""
    assert [row["size"] for row in run_step(source)[1]] == [*map(len, TEXTS)] * 2


WRONG = {
    "a wrong signature": (
        "def step(text, word): ...",
        {},
        [
            "steps.py, line 1",
            "'word'",
            "text, source, url, metadata, locator, id",
            "`with`",
        ],
    ),
    "an unknown option": (
        "def step(text): ...",
        {"with": {"word": "x"}},
        ["steps.py, line 1", "step(text)", "with: word"],
    ),
    "a wrong column length": (
        "import pyarrow as pa\ndef step(batch: pa.Table): return {'a': [1, 2]}",
        {},
        ["steps.py, line 2", "2 values", "'a'", "5 documents"],
    ),
    "a wrong dtype": (
        "import pyarrow as pa\ndef step(batch: pa.Table): return {'a': [[1]] * "
        "len(batch)}",
        {},
        ["steps.py, line 2", "list<item: int64>", "'a'", "numbers, texts"],
    ),
    "a nested value": (
        "def step(text) -> dict: return {'a': [1]}",
        {},
        ["steps.py, line 1", "list<item: int64>", "'a'", "numbers, texts, True"],
    ),
    "mixed values": (
        "def step(text) -> dict: return {'a': 1 if 'x' in text else 'one'}",
        {},
        ["steps.py, line 1", "'a'", "make no column"],
    ),
    "True among numbers": (
        "import numpy as np\ndef step(text) -> dict: return {'a': np.True_ if 'x' in text else 1}",
        {},
        ["steps.py, line 2", "'a'", "make no column"],
    ),
    "a number that is too large": (
        "def step(text) -> dict: return {'a': 1 << 70}",
        {},
        ["steps.py, line 1", "'a'"],
    ),
    "an error on import": (
        "import json\n1 / 0\ndef step(text): ...",
        {},
        ["ZeroDivisionError: division by zero (steps.py, line 2)"],
    ),
    "an exit on import": (
        "import sys\nsys.exit(3)\ndef step(text): ...",
        {},
        ["SystemExit: 3 (steps.py, line 2)"],
    ),
    "an endless import": (
        "while True: pass\ndef step(text): ...",
        {"time_limit_seconds": 0.2},
        ["TimeLimitError", "0.2 s (steps.py, line 1)"],
    ),
    "nothing": (
        "def step(text): pass",
        {},
        ["steps.py, line 1", "None", "a dictionary, a number, a text, True"],
    ),
    "an unknown parameter": (
        "def step(txet): return 1",
        {},
        ["'txet'", "did you mean 'text'?"],
    ),
    "an async function": (
        "async def step(text): return 1",
        {},
        ["steps.py, line 1", "async function"],
    ),
    "a generator": ("def step(text):\n    yield 1", {}, ["steps.py, line 1", "yields"]),
    "a class": (
        "class step:\n    def __init__(self, text): ...",
        {},
        ["steps.py, line 1", "is a class"],
    ),
    "huge output": (
        "def step(text): return text * 1000_000",
        {},
        ["steps.py, line 1", "'step'", "100,000"],
    ),
    "a column that nothing announces": (
        "def step(text):\n    columns = make()\n    return columns\ndef make(): "
        "return {'magic': 1}",
        {},
        ["steps.py, line 1", "'magic'", "`measures: [magic]`", "return type"],
    ),
    "a threshold on text": (
        "def step(text) -> dict: return {'a': text}",
        {"max": {"a": 1}},
        ["texts", "'a'", "max.a"],
    ),
    "columns for one document": (
        "def step(text): return 1",
        {"columns": ["url"]},
        ["one document at a time"],
    ),
    "an unknown column of a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table): ...",
        {"columns": ["words"]},
        ["'words'", "text, source, url"],
    ),
    "an integer": ("step = 3", {}, ["steps:step", "int"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode"), [*((case, "memory") for case in WRONG), ("nothing", "threads")]
)
def test_invalid_function_ends_the_stage_with_its_line_and_the_fix(
    run_step: Run, case: str, mode: str
) -> None:
    source, settings, facts = WRONG[case]
    with pytest.raises(OwnCodeError) as error:
        run_step(source, context={"beam": BeamEngine(mode=mode, workers=2)}, **settings)
    for fact in facts:
        assert fact in str(error.value)


RAISES = {
    "raises on one document": (
        "def step(text):\n    if 'troll' in text:\n        raise ValueError('no "
        "trolls')\n    return 1\n",
        "ValueError: no trolls (steps.py, line 3)",
    ),
    "exits": (
        "import sys\ndef step(text):\n    if 'troll' in text: sys.exit(2)\n    "
        "return 1\n",
        "SystemExit: 2 (steps.py, line 3)",
    ),
    "never returns": (
        "def step(text):\n    while 'troll' in text:\n        pass\n    return 1\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line ",
    ),
    "never returns and catches all": (
        "def step(text):\n    while 'troll' in text:\n        try:\n            1 / "
        "0\n        except Exception:\n"
        "            pass\n    return 1\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line ",
    ),
    "recurses": (
        "def step(text):\n    return step(text) if 'troll' in text else 1\n",
        "RecursionError: ",
    ),
    "raises in a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table):\n    for text in "
        "batch['text'].to_pylist():\n"
        "        assert 'troll' not in text, 'no trolls'\n    return {'step': [1] * "
        "len(batch)}\n",
        "AssertionError: no trolls (steps.py, line 4)",
    ),
    "never returns in a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table):\n    while 'troll' in "
        "str(batch['text'].to_pylist()): pass\n"
        "    return {'step': [1] * len(batch)}\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line 3)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
@pytest.mark.parametrize("case", RAISES)
def test_exception_quarantines_only_its_document(
    run_step: Run, case: str, mode: str
) -> None:
    source, message = RAISES[case]
    summary, rows = run_step(
        source,
        context={"beam": BeamEngine(mode=mode, workers=2)},
        max_quarantined=0.5,
        time_limit_seconds=0.3,
    )
    assert [row["reason"] for row in rows] == ["quarantine", None, None, None, None] * 2
    assert [row["step"] for row in rows] == [None, 1, 1, 1, 1] * 2
    assert all(row["error"].startswith(message) for row in (rows[0], rows[5])), rows[0][
        "error"
    ]
    assert summary.counts["quarantined"] == 2


def test_quarantine_limit_ends_the_stage_with_the_first_exception(
    run_step: Run,
) -> None:
    source = "from functools import cache\n@cache\ndef step(text, words): return 1\n"
    with pytest.raises(
        QuarantineError,
        match=r"10 of 10 .*100.0%.* 5.0%.*TypeError: unhashable type: 'list'",
    ):
        run_step(source, **{"with": {"words": ["a"]}})


def test_nondeterministic_function_is_warned_about(
    run_step: Run, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    source = (
        "import itertools\ncalls = itertools.count()\ndef step(text): return "
        "next(calls)\n"
    )
    summary, _ = run_step(source, context={"emit": events.append, "stage": "annotate"})
    assert "steps.py, line 3: step is not deterministic" in summary.differs
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert warning.startswith(summary.differs)


def test_dropping_a_column_of_the_batch_changes_nothing(
    run_step: Run,
) -> None:
    source = """
import numpy as np, pyarrow as pa
def step(batch: pa.Table):
    sizes = np.array([len(text) for text in batch["text"].to_pylist()])
    batch = batch.drop_columns(["text"])
    return {"size": sizes}
"""
    assert [row["size"] for row in run_step(source)[1]] == [*map(len, TEXTS)] * 2


def test_resumed_run_writes_the_same_bytes(
    tmp_path: Path, make_context: MakeContext
) -> None:
    documents = write_documents(tmp_path / "ingest", shards=3)
    config = step(
        tmp_path / "code", COUNT, **{"with": {"word": "xyzzy"}, "max": {"magic": 0}}
    )
    for name in ("one", "two"):
        annotate.run(
            {"ingest": documents},
            config,
            tmp_path / name,
            make_context(f"work-{name}", workers=2),
        )
    (tmp_path / "one" / "part-00001.parquet").unlink()
    annotate.run(
        {"ingest": documents}, config, tmp_path / "one", make_context("work-one")
    )
    assert file_contents(tmp_path / "one") == file_contents(tmp_path / "two")
    assert column_names(tmp_path / "one" / "part-00000.parquet") == [
        "id",
        "keep",
        "reason",
        "error",
        "magic",
    ]


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        (COUNT, ["magic"]),
        ("def step(text) -> int: ...", ["step"]),
        ("def step(text): return compute(text)", ["step"]),
        (
            "from typing import TypedDict\nclass A(TypedDict):\n    a: int\nclass "
            "B(A):\n    b: str\ndef step(text) -> B: ...",
            ["a", "b"],
        ),
        (
            "def step(text):\n    if text: return {'a': 1}\n    return dict(b=2)",
            ["a", "b"],
        ),
        (
            "def step(text):\n    columns = {'a': 1}\n    columns['b'] = 2\n    return "
            "columns",
            ["a", "b"],
        ),
        (
            "def step(batch: 'pa.Table'):\n    return pa.table({'a': "
            "[1]}).append_column('b', [2])",
            ["a", "b"],
        ),
        (
            "def step(batch: 'pa.Table'):\n    return pa.table([1], names=['a', 'b'])",
            ["a", "b"],
        ),
        (
            "def step(text):\n    def inner(): return {'x': 1}\n    return {'a': 1} if "
            "text else {'b': 2}",
            ["a", "b"],
        ),
    ],
)
def test_columns_are_derived_without_running_the_function(
    tmp_path: Path, source: str, columns: list[str]
) -> None:
    assert (
        Annotate.model_validate(step(tmp_path / "code", source)).function.measured
        == columns
    )


def test_histogram_edges_fit_the_values() -> None:
    import numpy as np

    from gristmill.dataprep.conservation import (
        ANY_EDGES,
        COUNT_EDGES,
        LENGTH_EDGES,
        SHARE_EDGES,
        fit_histogram,
        histogram,
    )

    for values, edges in (
        ([0.0, 0.31, 1.0], SHARE_EDGES),
        ([0.5, 3.2], LENGTH_EDGES),
        ([0, 5000], COUNT_EDGES),
    ):
        array = np.array(values, np.float64)
        assert fit_histogram(histogram(array, ANY_EDGES)) == histogram(array, edges)
    signed = fit_histogram(histogram(np.array([-3.0, math.inf, math.nan]), ANY_EDGES))
    assert sum(signed["counts"]) == 2
    assert signed["counts"][-1] == 1
