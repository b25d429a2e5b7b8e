"""Documents that were excluded: their rows are emptied, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.tokenize.mixing.exclude import read_excluded
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import LEDGER

LENGTH = 32
SOURCES = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 4.0}}
SECTION = {"tokens": 4000, "sequence_length": LENGTH, "validation": 0.15, "shard_rows": 50}


@pytest.fixture
def prepared(stages: Any) -> dict[str, Path]:
    inputs = {"ingest": stages.ingest("ingest", [*stages.documents("prose", 120), *stages.documents("code", 10)], 3)}
    stages.tokenizer("tokenizer", inputs, ["prose", "code"])
    inputs["tokenizer"] = stages.root / "tokenizer"
    stages.tokenize("tokenize", inputs)
    return {**inputs, "tokenize": stages.root / "tokenize"}


def test_rows_of_excluded_documents_are_emptied_and_every_other_row_stays(
    stages: Any, prepared: dict[str, Path]
) -> None:
    before_counts = stages.mix("whole", prepared, SOURCES, **SECTION)["counts"]
    whole = PackedSet(stages.root / "whole")
    pieces = whole.pieces(np.arange(whole.rows))
    trained = pieces["id"][40].as_py()
    held_out = whole.validation_pieces("prose")["id"][3].as_py()
    listed = stages.root / "list.ids"
    listed.write_text(f"# taken down\n{trained.hex()}\n\n{held_out.hex().upper()}\n{'00' * 16}\n")
    summary = stages.mix("less", prepared, SOURCES, **SECTION, exclude=str(listed))
    less = PackedSet(stages.root / "less")

    emptied = sorted({piece["row"] for piece in pieces.to_pylist() if piece["id"] == trained})
    assert less.withheld.tolist() == emptied
    assert summary["withheld_rows"] == len(emptied) > 0
    left = np.setdiff1d(np.arange(whole.rows), emptied)
    assert np.array_equal(less.read(left), whole.read(left))
    assert less.pieces(left).equals(whole.pieces(left))
    assert (less.read(np.array(emptied)) == less.manifest["tokenizer"]["pad"]).all()
    assert len(less.rows_of_document(trained)) == 0
    less.verify(deep=True)

    assert less.fingerprint == whole.fingerprint
    order, all_rows = less.order(3), whole.order(3).rows(np.arange(whole.rows)).tolist()
    assert order.rows(np.arange(order.total)).tolist() == [row for row in all_rows if row not in emptied]

    rows_before = whole.validation_pieces("prose").to_pylist()
    gone = {piece["row"] for piece in rows_before if piece["id"] == held_out}
    assert np.array_equal(less.validation("prose"), np.delete(whole.validation("prose"), sorted(gone), axis=0))
    assert len(less.validation_rows_of_documents("prose", [held_out])) == 0
    assert summary["validation"]["prose"]["tokens"] == less.validation("prose").size

    check_conservation(summary["counts"], "mix")
    assert summary["counts"]["read"] == before_counts["read"]
    assert summary["counts"]["dropped"]["excluded"] == 2
    ledger = {entry["id"]: entry["reason"] for entry in pq.read_table(less.folder / LEDGER).to_pylist()}
    assert (ledger[trained], ledger[held_out]) == ("excluded", "excluded")
    still = {
        *less.pieces(left)["id"].to_pylist(),
        *less.validation_pieces("prose")["id"].to_pylist(),
        *less.validation_pieces("code")["id"].to_pylist(),
    }
    assert {one for one, reason in ledger.items() if reason is None} == still
    beside = {one for one in pieces["id"].to_pylist() if one not in still} - {trained}
    assert {one for one, reason in ledger.items() if reason == "withheld"} >= beside


def test_a_line_that_is_no_id_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "list.ids"
    path.write_text(f"{'ab' * 16}\nhttps://example.org\n")
    with pytest.raises(MixError, match=r"list.ids:2: 'https://example.org' is not a document id \(32 hexadecimal"):
        read_excluded(str(path))
