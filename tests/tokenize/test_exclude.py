"""Excluded documents: their rows are blanked, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.documents import Inputs
from gristmill.tokenize.mixing.exclude import read_excluded
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import LEDGER
from tests.packed_sets import verify

LENGTH = 32
SOURCES = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 4.0}}
SECTION = {
    "tokens": 4000,
    "sequence_length": LENGTH,
    "validation": 0.15,
    "shard_rows": 50,
}


@pytest.fixture
def prepared(stages: Any) -> Inputs:
    inputs = {
        "ingest": stages.ingest(
            "ingest",
            [*stages.documents("prose", 120), *stages.documents("code", 10)],
            3,
        )
    }
    return stages.tokenized(inputs, ["prose", "code"])


def test_rows_of_excluded_documents_are_blanked_and_every_other_row_stays(
    stages: Any, prepared: Inputs
) -> None:
    before_counts = stages.mix("whole", prepared, SOURCES, **SECTION).counts
    full = PackedSet(stages.root / "whole")
    pieces = full.pieces(np.arange(full.rows))
    trained = pieces["id"][40].as_py()
    held_out = full.validation_pieces("prose")["id"][3].as_py()
    id_list = stages.root / "list.ids"
    id_list.write_text(
        f"# taken down\n{trained.hex()}\n\n{held_out.hex().upper()}\n{'00' * 16}\n"
    )
    summary = stages.mix("less", prepared, SOURCES, **SECTION, exclude=str(id_list))
    reduced = PackedSet(stages.root / "less")

    emptied = sorted(
        {piece["row"] for piece in pieces.to_pylist() if piece["id"] == trained}
    )
    assert reduced.withheld.tolist() == emptied
    assert summary.withheld_rows == len(emptied) > 0
    kept_rows = np.setdiff1d(np.arange(full.rows), emptied)
    assert np.array_equal(reduced.read(kept_rows), full.read(kept_rows))
    assert reduced.pieces(kept_rows).equals(full.pieces(kept_rows))
    assert (
        reduced.read(np.array(emptied)) == reduced.manifest["tokenizer"]["pad"]
    ).all()
    assert len(reduced.rows_of_documents([trained])) == 0
    verify(reduced, deep=True)

    assert reduced.fingerprint == full.fingerprint
    order, all_rows = (
        reduced.order(3),
        full.order(3).rows(np.arange(full.rows)).tolist(),
    )
    assert order.rows(np.arange(order.total)).tolist() == [
        row for row in all_rows if row not in emptied
    ]

    rows_before = full.validation_pieces("prose").to_pylist()
    blanked_validation_rows = {
        piece["row"] for piece in rows_before if piece["id"] == held_out
    }
    assert np.array_equal(
        reduced.validation("prose"),
        np.delete(full.validation("prose"), sorted(blanked_validation_rows), axis=0),
    )
    assert len(reduced.validation_rows_of_documents("prose", [held_out])) == 0
    assert summary.validation["prose"]["tokens"] == reduced.validation("prose").size

    check_conservation(summary.counts, "mix")
    assert summary.counts["read"] == before_counts["read"]
    assert summary.counts["dropped"]["excluded"] == 2
    ledger = {
        entry["id"]: entry["reason"]
        for entry in pq.read_table(reduced.folder / LEDGER).to_pylist()
    }
    assert (ledger[trained], ledger[held_out]) == ("excluded", "excluded")
    packed_ids = {
        *reduced.pieces(kept_rows)["id"].to_pylist(),
        *reduced.validation_pieces("prose")["id"].to_pylist(),
        *reduced.validation_pieces("code")["id"].to_pylist(),
    }
    for document, reason in ledger.items():
        assert (reason is None) == (document in packed_ids)
    for document in {*pieces["id"].to_pylist()} - packed_ids - {trained}:
        assert ledger[document] == "withheld"


def test_invalid_document_id_is_rejected_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "list.ids"
    path.write_text(f"{'ab' * 16}\nhttps://example.org\n")
    with pytest.raises(
        MixError, match=r"list.ids:2: 'https://example.org'.*32 hexadecimal"
    ):
        read_excluded(str(path))
