"""The stage `annotate`: what a user's function returns becomes columns, thresholds decide, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import QuarantineError
from gristmill.dataprep.documents import column_names
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.user_code import OwnCodeError
from tests.dataprep.own_steps import TEXTS, step, write_documents, written

COUNT = "def step(text: str, word: str) -> dict:\n    return {'magic': text.count(word)}\n"
BATCH = """
import pyarrow as pa
import pyarrow.compute as pc

def step(batch: pa.RecordBatch, word: str):
    return {"magic": pc.count_substring(batch["text"], word)}
"""


@pytest.fixture
def ran(tmp_path: Path, make_context: Callable[..., Context]) -> Callable[..., tuple[dict[str, Any], list[Any]]]:
    """Run a step made from source: (source, **settings) -> summary, rows."""
    numbers = iter(range(100))

    def run(
        source: str, shards: int = 2, copies: int = 1, context: dict[str, Any] | None = None, **settings: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        number = next(numbers)
        documents = write_documents(tmp_path / f"ingest{number}", shards, copies)
        config = step(tmp_path / f"code{number}", source, **settings)
        out = tmp_path / f"out{number}"
        where = replace(make_context(f"work{number}"), **{"stage": "annotate", **(context or {})})
        summary = annotate.run({"ingest": documents}, config, out, where)
        return summary, written(out)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
@pytest.mark.parametrize("source", [COUNT, BATCH])
def test_a_function_measures_and_thresholds_decide_the_same_in_all_modes(
    ran: Callable[..., Any], source: str, mode: str
) -> None:
    settings = {"with": {"word": "xyzzy"}, "max": {"magic": 0}}
    summary, rows = ran(source, context={"mode": mode, "workers": 2}, **settings)
    assert [row["magic"] for row in rows] == [2, 0, 1, 0, 0] * 2
    assert [row["reason"] for row in rows] == ["annotate/max_magic", None, "annotate/max_magic", None, None] * 2
    assert summary["counts"]["dropped"] == {"annotate/max_magic": 4}
    assert summary["counts"]["kept"] == 6
    assert summary["rules"] == {"annotate/max_magic": {"failing": 4, "only": 4}}
    assert sum(summary["histograms"]["magic"]["counts"]) == 10
    assert "differs" not in summary


def test_what_a_function_returns_may_be_a_typed_dict_a_tuple_a_dataclass_or_one_value(ran: Callable[..., Any]) -> None:
    typed = """
from typing import TypedDict
class Found(TypedDict):
    size: int
    share: float
    first: str
    loud: bool
def step(text: str) -> Found:
    return Found(size=len(text), share=0.5, first=text[0], loud=text.isupper())
"""
    row = ran(typed)[1][0]
    assert {name: row[name] for name in ("size", "share", "first", "loud")} == {
        "size": len(TEXTS[0]),
        "share": 0.5,
        "first": "x",
        "loud": False,
    }
    named = (
        "from typing import NamedTuple\nclass Found(NamedTuple):\n    size: int\n\ndef step(text) -> Found:\n"
        "    return Found(len(text))\n"
    )
    assert [row["size"] for row in ran(named)[1]] == [*map(len, TEXTS)] * 2
    made = named.replace("NamedTuple", "Any").replace(
        "class Found(Any)", "import dataclasses\n@dataclasses.dataclass\nclass Found"
    )
    assert [row["size"] for row in ran(made)[1]] == [*map(len, TEXTS)] * 2
    assert [row["step"] for row in ran("def step(text):\n    return len(text) / 2\n")[1]] == [
        len(text) / 2 for text in TEXTS
    ] * 2


def test_a_bare_false_drops_and_is_the_reason(ran: Callable[..., Any]) -> None:
    summary, rows = ran("def step(text) -> bool:\n    return 'xyzzy' not in text\n")
    assert [row["reason"] for row in rows] == ["annotate/step", None, "annotate/step", None, None] * 2
    assert [row["step"] for row in rows] == [False, True, False, True, True] * 2
    assert summary["counts"]["dropped"] == {"annotate/step": 4}
    batch = (
        "import pyarrow as pa, pyarrow.compute as pc\ndef step(batch: pa.Table):\n"
        "    return pc.invert(pc.match_substring(batch['text'], 'xyzzy'))\n"
    )
    assert [row["reason"] for row in ran(batch)[1]] == [row["reason"] for row in rows]


def test_parameters_are_columns_of_documents_and_of_steps_before(
    ran: Callable[..., Any], tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    source = """
def step(source: str, url: str, id: str, metadata: dict, locator: str, absent: int = 7, *, text) -> dict:
    assert url == locator and len(id) == 32 and source == "web" and absent == 7
    return {"place": metadata["place"], "size": len(text)}
"""
    assert [(row["place"], row["size"]) for row in ran(source)[1]] == [
        (place, len(text)) for place, text in enumerate(TEXTS)
    ] * 2
    documents = write_documents(tmp_path / "documents")
    config = step(tmp_path / "code", COUNT, **{"with": {"word": "xyzzy"}})
    annotate.run({"ingest": documents}, config, tmp_path / "first", make_context("first-work"))
    second = step(tmp_path / "code", "def step(magic: int) -> dict:\n    return {'twice': 2 * magic}\n")
    annotate.run({"ingest": documents, "annotate": tmp_path / "first"}, second, tmp_path / "second", make_context("w2"))
    assert [row["twice"] for row in written(tmp_path / "second")] == [4, 0, 2, 0, 0] * 2


def test_a_batch_has_the_columns_that_the_manifest_names_and_may_come_back_with_more(ran: Callable[..., Any]) -> None:
    source = """
import pyarrow as pa
def step(batch: pa.RecordBatch):
    assert batch.schema.names == ["text", "url"]
    return batch.append_column("size", pa.array([len(one) for one in batch["url"].to_pylist()]))
"""
    _, rows = ran(source, columns=["text", "url"])
    assert {row["size"] for row in rows} == {len("https://example.org/0/0/0")}
    assert "text" not in rows[0]


def test_none_and_nan_are_null_and_pass_every_threshold(ran: Callable[..., Any]) -> None:
    source = "def step(text) -> dict:\n    return {'a': None, 'b': float('nan'), 'c': 1}\n"
    summary, rows = ran(source, **{"min": {"a": 1, "b": 1, "c": 1}})
    assert summary["counts"]["kept"] == 10
    assert rows[0]["a"] is rows[0]["b"] is None


def test_columns_have_one_type_in_all_shards(ran: Callable[..., Any], tmp_path: Path) -> None:
    source = """
def step(locator: str) -> dict:
    first = locator.startswith("https://example.org/0")
    return {"number": 1 if first else 0.5, "label": None if first else "b", "never": None}
"""
    rows = ran(source)[1]
    assert [row["number"] for row in rows] == [1.0] * 5 + [0.5] * 5
    assert isinstance(rows[0]["number"], float)
    assert [row["label"] for row in rows] == [None] * 5 + ["b"] * 5
    with pytest.raises(OwnCodeError, match=r"steps.py, line 1: step returned .* as 'number'; a column has one kind"):
        ran(
            "def step(locator) -> dict:\n    return {'number': 1 if locator.startswith('https://example.org/0') "
            "else 'one'}\n"
        )


WRONG = {
    "a wrong signature": (
        "def step(text, word): ...",
        {},
        r"steps.py, line 1: step has the parameter 'word', which is no column of documents; there "
        r"are text, source, url, metadata, locator, id; correct it, or give it in `with`",
    ),
    "an unknown option": (
        "def step(text): ...",
        {"with": {"word": "x"}},
        r"steps.py, line 1: step\(text\) cannot be called with \(text\) and with: word",
    ),
    "a wrong column length": (
        "import pyarrow as pa\ndef step(batch: pa.Table): return {'a': [1, 2]}",
        {},
        r"steps.py, line 2: step returned 2 values as 'a' for 5 documents; return one for each",
    ),
    "a wrong dtype": (
        "import pyarrow as pa\ndef step(batch: pa.Table): return {'a': [[1]] * len(batch)}",
        {},
        r"steps.py, line 2: step returned list<item: int64> as 'a'; a column has numbers, texts",
    ),
    "a nested value": (
        "def step(text) -> dict: return {'a': [1]}",
        {},
        r"steps.py, line 1: step returned list \[1\] as 'a'; a column has numbers, texts, True",
    ),
    "mixed values": (
        "def step(text) -> dict: return {'a': 1 if 'x' in text else 'one'}",
        {},
        r"steps.py, line 1: step returned numbers and text as 'a'; a column has one kind of value",
    ),
    "a number that is too large": (
        "def step(text) -> dict: return {'a': 1 << 70}",
        {},
        r"steps.py, line 1: step returned values as 'a' that make no column: ",
    ),
    "an error on import": (
        "import json\n1 / 0\ndef step(text): ...",
        {},
        r"steps.py cannot be loaded: ZeroDivisionError: division by zero \(steps.py, line 2\)",
    ),
    "an exit on import": (
        "import sys\nsys.exit(3)\ndef step(text): ...",
        {},
        r"steps.py cannot be loaded: SystemExit: 3 \(steps.py, line 2\)",
    ),
    "an endless import": (
        "while True: pass\ndef step(text): ...",
        {"time_limit_seconds": 0.2},
        r"steps.py cannot be loaded: TimeLimitError: took longer than 0.2 s \(steps.py, line 1\)",
    ),
    "nothing": (
        "def step(text): pass",
        {},
        r"steps.py, line 1: step returned nothing \(None\); return a dictionary, a number, a text, True",
    ),
    "an unknown parameter": (
        "def step(txet): return 1",
        {},
        r"has the parameter 'txet', which is no column of documents, did you mean 'text'\?",
    ),
    "an async function": (
        "async def step(text): return 1",
        {},
        r"steps.py, line 1: step is an async function, which nobody would wait for; write it with",
    ),
    "a generator": ("def step(text):\n    yield 1", {}, r"steps.py, line 1: step yields values; return one"),
    "a class": (
        "class step:\n    def __init__(self, text): ...",
        {},
        r"steps.py, line 1: step is a class; name a function",
    ),
    "huge output": (
        "def step(text): return text * 1000_000",
        {},
        r"steps.py, line 1: step returned a text of .* bytes as 'step', which may have 100,000",
    ),
    "a column that nothing announces": (
        "def step(text):\n    found = make()\n    return found\ndef make(): return {'magic': 1}",
        {},
        r"steps.py, line 1: step returned a column 'magic' that nothing announces; write `measures: \[magic\]` in the "
        r"step, or give the function a return type",
    ),
    "a threshold on text": (
        "def step(text) -> dict: return {'a': text}",
        {"max": {"a": 1}},
        r"step returns texts as 'a', which max.a cannot bound; remove it, or return a number",
    ),
    "columns for one document": (
        "def step(text): return 1",
        {"columns": ["url"]},
        r"takes one document at a time, and has a parameter for each column",
    ),
    "an unknown column of a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table): ...",
        {"columns": ["words"]},
        r"step is given the column 'words', which is no column of documents; there are",
    ),
    "a function that is none": ("step = 3", {}, r"steps:step is int, which cannot be called; name a function"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads"])
@pytest.mark.parametrize("what", WRONG)
def test_what_a_function_may_not_be_or_return_ends_the_stage_with_a_sentence(
    ran: Callable[..., Any], what: str, mode: str
) -> None:
    source, settings, says = WRONG[what]
    with pytest.raises(OwnCodeError, match=says):
        ran(source, context={"mode": mode, "workers": 2}, **settings)


RAISES = {
    "raises on one document": (
        "def step(text):\n    if 'troll' in text:\n        raise ValueError('no trolls')\n    return 1\n",
        "ValueError: no trolls (steps.py, line 3)",
    ),
    "exits": (
        "import sys\ndef step(text):\n    if 'troll' in text: sys.exit(2)\n    return 1\n",
        "SystemExit: 2 (steps.py, line 3)",
    ),
    "never returns": (
        "def step(text):\n    while 'troll' in text:\n        pass\n    return 1\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line ",
    ),
    "never returns and catches all": (
        "def step(text):\n    while 'troll' in text:\n        try:\n            1 / 0\n        except Exception:\n"
        "            pass\n    return 1\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line ",
    ),
    "recurses": ("def step(text):\n    return step(text) if 'troll' in text else 1\n", "RecursionError: "),
    "raises in a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table):\n    for text in batch['text'].to_pylist():\n"
        "        assert 'troll' not in text, 'no trolls'\n    return {'step': [1] * len(batch)}\n",
        "AssertionError: no trolls (steps.py, line 4)",
    ),
    "never returns in a batch": (
        "import pyarrow as pa\ndef step(batch: pa.Table):\n    while 'troll' in str(batch['text'].to_pylist()): pass\n"
        "    return {'step': [1] * len(batch)}\n",
        "TimeLimitError: took longer than 0.3 s (steps.py, line 3)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
@pytest.mark.parametrize("what", RAISES)
def test_what_raises_on_a_document_quarantines_that_document_alone(
    ran: Callable[..., Any], what: str, mode: str
) -> None:
    source, says = RAISES[what]
    summary, rows = ran(source, context={"mode": mode, "workers": 2}, max_quarantined=0.5, time_limit_seconds=0.3)
    assert [row["reason"] for row in rows] == ["quarantine", None, None, None, None] * 2
    assert [row["step"] for row in rows] == [None, 1, 1, 1, 1] * 2
    assert all(row["error"].startswith(says) for row in (rows[0], rows[5])), rows[0]["error"]
    assert summary["counts"]["quarantined"] == 2


def test_a_function_that_always_raises_ends_the_stage_with_what_it_raised(ran: Callable[..., Any]) -> None:
    source = "from functools import cache\n@cache\ndef step(text, words): return 1\n"
    with pytest.raises(
        QuarantineError,
        match=r"10 of 10 records \(100.0%\) could not be processed, more than the "
        r"allowed 5.0%; the first: TypeError: unhashable type: 'list'",
    ):
        ran(source, **{"with": {"words": ["a"]}})


def test_a_function_whose_calls_differ_is_warned_of(ran: Callable[..., Any], tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    source = "import itertools\ncalls = itertools.count()\ndef step(text): return next(calls)\n"
    summary, _ = ran(source, context={"emit": told.append, "stage": "annotate"})
    assert "steps.py, line 3: step is not deterministic: two calls with document" in summary["differs"]
    (warning,) = [event["message"] for event in told if event["event"] == "warning"]
    assert warning.startswith(f"{summary['differs']}; another run")


def test_what_cannot_change_a_batch_changes_nothing(ran: Callable[..., Any]) -> None:
    source = """
import numpy as np, pyarrow as pa
def step(batch: pa.Table):
    sizes = np.array([len(text) for text in batch["text"].to_pylist()])
    batch = batch.drop_columns(["text"])
    return {"size": sizes}
"""
    assert [row["size"] for row in ran(source)[1]] == [*map(len, TEXTS)] * 2


def test_a_finished_shard_is_not_done_again_and_the_bytes_are_the_same(
    tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    documents = write_documents(tmp_path / "ingest", shards=3)
    config = step(tmp_path / "code", COUNT, **{"with": {"word": "xyzzy"}, "max": {"magic": 0}})
    for name in ("one", "two"):
        annotate.run({"ingest": documents}, config, tmp_path / name, make_context(f"work-{name}", workers=2))
    (tmp_path / "one" / "part-00001.parquet").unlink()
    annotate.run({"ingest": documents}, config, tmp_path / "one", make_context("work-one"))
    for shard in range(3):
        name = f"part-{shard:05d}.parquet"
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert column_names(tmp_path / "one" / "part-00000.parquet") == ["id", "keep", "reason", "error", "magic"]


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        (COUNT, ["magic"]),
        ("def step(text) -> int: ...", ["step"]),
        ("def step(text): return compute(text)", ["step"]),
        (
            "from typing import TypedDict\nclass A(TypedDict):\n    a: int\nclass B(A):\n    b: str\ndef step(text) -> B: ...",
            ["a", "b"],
        ),
        ("def step(text):\n    if text: return {'a': 1}\n    return dict(b=2)", ["a", "b"]),
        ("def step(text):\n    found = {'a': 1}\n    found['b'] = 2\n    return found", ["a", "b"]),
        ("def step(batch: 'pa.Table'):\n    return pa.table({'a': [1]}).append_column('b', [2])", ["a", "b"]),
        ("def step(batch: 'pa.Table'):\n    return pa.table([1], names=['a', 'b'])", ["a", "b"]),
        ("def step(text):\n    def inner(): return {'x': 1}\n    return {'a': 1} if text else {'b': 2}", ["a", "b"]),
    ],
)
def test_the_columns_are_known_without_running_the_function(tmp_path: Path, source: str, columns: list[str]) -> None:
    assert Annotate.model_validate(step(tmp_path / "code", source)).function.measured == columns


def test_histograms_have_the_edges_that_suit_their_values() -> None:
    import numpy as np

    from gristmill.dataprep.conservation import (
        ANY_EDGES,
        COUNT_EDGES,
        LENGTH_EDGES,
        SHARE_EDGES,
        fit_histogram,
        histogram,
    )

    for values, edges in (([0.0, 0.31, 1.0], SHARE_EDGES), ([0.5, 3.2], LENGTH_EDGES), ([0, 5000], COUNT_EDGES)):
        array = np.array(values, np.float64)
        assert fit_histogram(histogram(array, ANY_EDGES)) == histogram(array, edges)
    signed = fit_histogram(histogram(np.array([-3.0, math.inf, math.nan]), ANY_EDGES))
    assert sum(signed["counts"]) == 2
    assert signed["counts"][-1] == 1
