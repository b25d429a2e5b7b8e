"""Who holds what: the table of matches between documents and evaluation items, and what a summary says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES, write_table
from gristmill.dataprep.groups import sort_rows
from gristmill.dataprep.judged_texts import JudgedTexts
from gristmill.dataprep.passages.contamination import Matches, Runs
from gristmill.dataprep.passages.evaluation_sets import Part
from gristmill.dataprep.shuffle import concat_mapped, open_batches, write_partitions

MATCHES_FILE = "matches.parquet"
MATCH_SCHEMA = pa.schema(
    [
        ("set", pa.string()),
        ("item", pa.int64()),
        ("field", pa.string()),
        ("item_text", pa.string()),
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.string()),
        ("locator", pa.string()),
        ("contamination", pa.float64()),
        ("words", pa.int64()),
        ("contaminated", pa.bool_()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("text", pa.string()),
    ]
)
"""One row per document and item text. `contaminated`: more than the thresholds allow; `begin`, `end`, `text`: the
longest run that they share, in bytes of the document as the stage read it."""
ITEM_CHARACTERS = 100
MATCH_CHARACTERS = 500
SHOWN_MATCHES = 20


def write_parts_table(path: Path, parts: Sequence[Part]) -> None:
    """Write what tasks must know of the parts, in their order; of each text its beginning."""
    table = pa.table({
        "set": pa.array([part.set for part in parts], pa.string()),
        "item": pa.array([part.item for part in parts], pa.int64()),
        "field": pa.array([part.field for part in parts], pa.string()),
        "text": pa.array([part.text[:ITEM_CHARACTERS] for part in parts], pa.string()),
    })  # fmt: skip
    write_partitions(path, table, np.zeros(len(table), np.int64), 1)


def read_parts_table(path: Path) -> list[Part]:
    """The inverse of `write_parts_table`."""
    return [Part(**row) for row in open_batches(path).read_all().to_pylist()]


def match_table(
    texts: JudgedTexts, matches: Matches, runs: Runs, over: np.ndarray, parts: Sequence[Part]
) -> pa.Table:
    """The rows of one shard (MATCH_SCHEMA)."""
    longest = _longest_runs(runs)
    documents = texts.documents.select(["id", "source", "locator"]).take(pa.array(texts.good[matches.text])).to_pylist()
    rows = []
    for number, document in enumerate(documents):
        part, run = parts[matches.part[number]], longest[number]
        begin, end = int(runs.begin[run]), int(runs.end[run])
        found = texts.texts[int(matches.text[number])].as_py().encode()[begin:end].decode()
        rows.append({
            "set": part.set, "item": part.item, "field": part.field, "item_text": part.text, **document,
            "contamination": float(matches.contamination[number]), "words": int(matches.words[number]),
            "contaminated": bool(over[number]), "begin": begin, "end": end, "text": found[:MATCH_CHARACTERS],
        })  # fmt: skip
    return pa.Table.from_pylist(rows, MATCH_SCHEMA)


def _longest_runs(runs: Runs) -> np.ndarray:
    """For each match, its longest run; the first of equal ones."""
    order = sort_rows(runs.match, -runs.words, runs.begin)
    first = np.searchsorted(runs.match[order], np.unique(runs.match))
    result: np.ndarray = order[first]
    return result


def write_matches(path: Path, files: Sequence[Path]) -> pa.Table:
    """Write the matches of all shards, by set, item, field and document; the table is also returned."""
    found = [concat_mapped(files, lambda file: file.read_all())] if files else []
    table = pa.concat_tables([MATCH_SCHEMA.empty_table(), *found])
    keys = [(name, "ascending") for name in ("set", "item", "field", "id", "begin")]
    table = table.sort_by(keys).combine_chunks()
    write_table(path, table)
    return table


def report_sets(
    parts: Sequence[Part], items: Mapping[str, int], counted_words: np.ndarray, matches: pa.Table
) -> dict[str, dict[str, Any]]:
    """Per evaluation set: its items, how many can be checked, and how many of these some document holds."""
    checked = {(part.set, part.item) for part, words in zip(parts, counted_words, strict=True) if words}
    over = matches.filter(matches["contaminated"]).select(["set", "item"]).to_pylist()
    contaminated = {(row["set"], row["item"]) for row in over}
    report = {}
    for name, total in items.items():
        able = sum(key[0] == name for key in checked)
        found = sum(key[0] == name for key in contaminated)
        report[name] = {
            "items": total, "checked": able, "too_short": total - able, "contaminated": found,
            "contaminated_share": found / able if able else 0.0,
        }  # fmt: skip
    return report


def shown_matches(matches: pa.Table) -> list[dict[str, Any]]:
    """The matches for the summary: contaminated ones first, by their share of the item."""
    order = [("contaminated", "descending"), ("contamination", "descending"), ("words", "descending"),
             ("set", "ascending"), ("item", "ascending"), ("field", "ascending"), ("id", "ascending")]
    rows = matches.sort_by(order).slice(0, SHOWN_MATCHES).to_pylist()
    return [{**row, "id": row["id"].hex()} for row in rows]
