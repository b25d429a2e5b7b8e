"""`gristmill bench tokenize`: exports in training order, with documents and checksums,
against a copy of the tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, fastest, row
from gristmill.core.files import atomic_write, read_json, write_json
from gristmill.dataprep.documents import ID_BYTES
from gristmill.tokenize.exporting.exported_files import FORMATS, export_tokens
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import train_name
from gristmill.tokenize.packed_writing import write_rows
from tests.packed_sets import write_packed_set

ROWS, LENGTH, PIECES_PER_ROW = 16_384, 2048, 2
"""64 MB: a shard of the stage `mix`."""
VOCAB = 32_000
REPEATS = 3
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure every format."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed = _packed_set(folder / "set")
        for form in FORMATS:
            export = partial(export_tokens, packed, folder / "out", form, seed=1)
            copy = partial(_copy, folder / "set" / train_name(0), folder / "copy.bin")
            remove = partial(shutil.rmtree, folder / "out", ignore_errors=True)
            ours, copied = fastest(REPEATS, export, copy, before=remove)
            size = ROWS * LENGTH * 2 / MEGA
            yield row(
                f"export: {form}, shuffled",
                size / ours,
                size / copied,
                "MB/s copy",
                "ours: shuffled, documents, SHA-256; peer: copied, synced",
            )


def _packed_set(folder: Path) -> PackedSet:
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH))
    write_packed_set(
        folder,
        tokens,
        {"all": ROWS},
        {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""},
    )
    number, piece = ROWS * PIECES_PER_ROW, LENGTH // PIECES_PER_ROW
    ids = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(ID_BYTES), number, [None, pa.py_buffer(rng.bytes(number * ID_BYTES))]
    )
    zeros = np.zeros(number, dtype=np.int64)
    pieces = pa.table(
        {
            "row": np.repeat(np.arange(ROWS), PIECES_PER_ROW),
            "start": np.tile(np.arange(0, LENGTH, piece), ROWS),
            "length": np.full(number, piece),
            "id": ids,
            "source": zeros,
            "copy": zeros,
            "offset": zeros,
        }
    )
    manifest = read_json(folder / "packed.json")
    manifest["train"]["shards"] = [
        write_rows(folder / train_name(0), tokens.astype("<u2"), pieces)
    ]
    write_json(folder / "packed.json", manifest)
    return PackedSet(folder)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as stream, atomic_write(target) as sink:
        shutil.copyfileobj(stream, sink, 1 << 20)
