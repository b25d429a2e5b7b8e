"""Exported tokens, read back as other trainers read them."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.files import read_json, write_json
from gristmill.tokenize.exporting import exported_rows
from gristmill.tokenize.exporting.exported_files import (
    FORMATS,
    ExportError,
    export_tokens,
)
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PIECES_SCHEMA
from tests.packed_sets import write_packed_set

from .token_readers import (
    llmc_batches,
    modded_nanogpt_documents,
    olmo_documents,
    olmo_instances,
    read_llmc,
    read_megatron,
    read_nanogpt,
)

EOS, PAD, LENGTH, SEED = 0, 1, 16, 5


def random_rows(
    rng: np.random.Generator, rows: int, vocab: int, padded: bool
) -> tuple[np.ndarray, pa.Table]:
    """Draw rows of documents of 2 to 8 tokens that end in EOS; if `padded`, some rows
    end in padding.
    """
    tokens, pieces = rng.integers(2, vocab, (rows, LENGTH)), []
    for row in range(rows):
        filled = LENGTH - (int(rng.integers(0, 4)) if padded else 0)
        cuts = [0, *sorted({int(cut) for cut in rng.integers(1, filled, 3)}), filled]
        for start, end in pairwise(cuts):
            tokens[row, end - 1] = EOS
            pieces.append(
                {
                    "row": row,
                    "start": start,
                    "length": end - start,
                    "id": rng.bytes(16),
                    "source": row % 2,
                    "copy": row % 3,
                    "offset": 7 * row,
                }
            )
        tokens[row, filled:] = PAD
    return tokens, pa.Table.from_pylist(pieces, PIECES_SCHEMA)


def packed_set(folder: Path, vocab: int, padded: bool) -> PackedSet:
    """Write three shards of two sources, and held-out rows of the second."""
    rng = np.random.default_rng(vocab)
    rows, pieces = random_rows(rng, 25, vocab, padded)
    held_out, held_out_pieces = random_rows(rng, 3, vocab, False)
    write_packed_set(
        folder,
        rows,
        {"a": 15, "b": 10},
        {"vocab_size": vocab, "eos": EOS, "pad": PAD, "sha256": "0" * 64},
        {"a": held_out[:0], "b": held_out},
        pieces,
        shard_rows=10,
        validation_pieces={"b": held_out_pieces},
    )
    manifest = read_json(folder / "packed.json")
    packing = "best_fit" if padded else "stream"
    write_json(folder / "packed.json", {**manifest, "packing": packing})
    return PackedSet(folder)


@pytest.fixture(params=["stream", "padded", "wide"])
def packed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PackedSet:
    """Sets without padding, with it, and of a large vocabulary, exported in blocks of
    four rows.
    """
    monkeypatch.setattr(exported_rows, "BLOCK_TOKENS", 4 * LENGTH)
    vocab = 100_000 if request.param == "wide" else 500
    return packed_set(tmp_path / "set", vocab, request.param != "stream")


def expected(
    packed: PackedSet, seed: int | None
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return the tokens of every document piece in the order, and its entry in the
    table of pieces.
    """
    rows = (
        np.arange(packed.rows)
        if seed is None
        else packed.order(seed).rows(np.arange(packed.rows))
    )
    by_row: dict[int, list[dict[str, Any]]] = {}
    for piece in packed.pieces(np.arange(packed.rows)).to_pylist():
        by_row.setdefault(piece["row"], []).append(piece)
    pieces = [piece for row in rows.tolist() for piece in by_row[row]]
    tokens = packed.read(np.arange(packed.rows)).tolist()
    return [
        tokens[piece["row"]][piece["start"] : piece["start"] + piece["length"]]
        for piece in pieces
    ], pieces


def flat(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


@pytest.mark.parametrize("seed", [None, SEED])
def test_llmc_reads_our_tokens_and_modded_nanogpt_our_documents(
    packed: PackedSet, tmp_path: Path, seed: int | None
) -> None:
    export_tokens(packed, tmp_path / "out", "llmc", seed=seed, shard_tokens=100)
    files = sorted((tmp_path / "out").glob("train_*.bin"))
    documents, _ = expected(packed, seed)
    assert len(files) >= 4
    parts = [read_llmc(path) for path in files]
    assert all(len(part) <= 100 for part in parts)
    assert np.concatenate(parts).tolist() == flat(documents)
    assert {part.dtype.itemsize for part in parts} == {packed.dtype.itemsize}
    read_documents = [
        document for path in files for document in modded_nanogpt_documents(path, EOS)
    ]
    # our end of a document is their begin of the next
    delimited = [[EOS, *document[:-1]] for document in documents]
    assert set(map(tuple, read_documents)) - {(EOS,)} <= set(map(tuple, delimited))
    assert len(read_documents) == len(documents)


def test_llmc_batches_are_our_rows_in_order_unless_permuted(tmp_path: Path) -> None:
    packed = packed_set(tmp_path / "set", 500, padded=False)
    described = export_tokens(
        packed, tmp_path / "out", "llmc", seed=SEED, shard_tokens=9 * LENGTH
    )
    paths = sorted((tmp_path / "out").glob("train_*.bin"))
    numbers = np.split(
        packed.order(SEED).rows(np.arange(25)),
        np.cumsum([file["rows"] for file in described["files"]]),
    )
    # The last row of each file has no token after it.
    ours = packed.read(np.concatenate([part[:-1] for part in numbers if len(part)]))
    plain, permuted = (
        llmc_batches(paths, 1, LENGTH, permuted=is_permuted)
        for is_permuted in (False, True)
    )
    for batches in (plain, permuted):
        assert all(
            np.array_equal(inputs[:, 1:], targets[:, :-1])
            for inputs, targets in batches
        )
    assert np.array_equal(np.concatenate([inputs for inputs, _ in plain]), ours)
    read = np.concatenate([inputs for inputs, _ in permuted])
    assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, ours.tolist()))
    assert (read == ours).all(axis=1).mean() < 0.5
    readme = (tmp_path / "out" / "README.llmc.md").read_text()
    assert "permute_train_loader" in readme
    assert " -r " not in readme  # recomputation, in train_gpt2cu


@pytest.mark.parametrize("seed", [None, SEED])
def test_megatron_reads_our_documents(
    packed: PackedSet, tmp_path: Path, seed: int | None
) -> None:
    export_tokens(packed, tmp_path / "out", "megatron", seed=seed)
    sequences, indices = read_megatron(tmp_path / "out" / "train_text_document")
    documents, _ = expected(packed, seed)
    assert [sequence.tolist() for sequence in sequences] == documents
    assert indices.tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize("seed", [None, SEED])
def test_nanogpt_maps_our_tokens(
    packed: PackedSet, tmp_path: Path, seed: int | None
) -> None:
    described = export_tokens(packed, tmp_path / "out", "memmap", seed=seed)
    tokens = read_nanogpt(tmp_path / "out" / "train.bin", described["dtype"])
    assert tokens.tolist() == flat(expected(packed, seed)[0])
    assert described["dtype"] == packed.dtype.name


@pytest.mark.parametrize("seed", [None, SEED])
def test_olmo_reads_our_rows_and_documents(
    packed: PackedSet, tmp_path: Path, seed: int | None
) -> None:
    export_tokens(packed, tmp_path / "out", "olmo", seed=seed, shard_tokens=7 * LENGTH)
    files = sorted((tmp_path / "out").glob("train-*.npy"))
    documents, _ = expected(packed, seed)
    assert len(files) >= 3
    assert [
        document
        for path in files
        for document in olmo_documents(path, packed.dtype.name)
    ] == documents
    if packed.manifest["packing"] == "stream":
        order = (
            np.arange(packed.rows)
            if seed is None
            else packed.order(seed).rows(np.arange(packed.rows))
        )
        rows = np.concatenate(
            [olmo_instances(path, LENGTH, packed.dtype.name) for path in files]
        )
        assert np.array_equal(rows, packed.read(order))


@pytest.mark.parametrize("form", FORMATS)
def test_every_span_names_its_document_and_every_file_its_checksum(
    packed: PackedSet, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    described = export_tokens(packed, out, form, seed=SEED, shard_tokens=150)
    documents, pieces = expected(packed, SEED)
    tables = [
        pq.read_table(out / f"{entry['name']}.docs.parquet").to_pylist()
        for entry in described["files"]
    ]
    table_rows = [row for table in tables for row in table]
    for field in ("row", "length", "id", "source", "copy", "offset"):
        assert [row[field] for row in table_rows] == [piece[field] for piece in pieces]
    for table, entry in zip(tables, described["files"], strict=True):
        assert [row["start"] for row in table] == [
            sum(row["length"] for row in table[:place]) for place in range(len(table))
        ]
        assert entry["tokens"] == sum(row["length"] for row in table)
    assert described["documents"] == len(documents)
    assert described["tokens"] == len(flat(documents))
    assert described["padding_left_out"] == packed.rows * LENGTH - described["tokens"]
    lines = (out / "train.sha256").read_text().splitlines()
    data = {
        path.name
        for path in out.iterdir()
        if path.name not in ("train.json", "train.sha256", f"README.{form}.md")
    }
    assert {line.split("  ")[1] for line in lines} == data
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert read_json(out / "train.json")["packed_set"] == packed.fingerprint
    assert "sha256sum -c" in (out / f"README.{form}.md").read_text()


def test_validation_rows_are_exported_beside_training_rows(
    packed: PackedSet, tmp_path: Path
) -> None:
    for split in ("train", "validation"):
        export_tokens(packed, tmp_path / "out", "memmap", split)
    tokens = read_nanogpt(tmp_path / "out" / "val.bin", packed.dtype.name)
    assert np.array_equal(tokens, packed.validation("b").reshape(-1))
    assert (tmp_path / "out" / "train.bin").exists()


def test_impossible_export_is_rejected(packed: PackedSet, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_tokens(packed, out, "memmap")
    with pytest.raises(ExportError, match=r"already holds train\.bin"):
        export_tokens(packed, out, "memmap")
    with pytest.raises(ExportError, match=r"'tfrecord'.* llmc, megatron, memmap, olmo"):
        export_tokens(packed, tmp_path / "other", "tfrecord")
    with pytest.raises(ExportError, match=r"row of 16.* 8 "):
        export_tokens(packed, tmp_path / "other", "llmc", shard_tokens=8)
    packed.manifest["validation"]["b"]["rows"] = 0
    with pytest.raises(ExportError, match="no rows of this split"):
        export_tokens(packed, tmp_path / "other", "memmap", "validation")
