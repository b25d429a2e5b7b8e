"""`gristmill bench tokenize`: a whole mixture made anew from token parts, against a copy of the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import write_table
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.sample import Sample
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.mixing import mix
from gristmill.tokenize.mixing.draws import word_ids

SHARDS, DOCUMENTS, MEAN_TOKENS = 8, 200_000, 500
"""200 MB of 16-bit tokens in documents of 1 kB: 2 million documents per 2 GB, a tenth of it."""
LENGTH, VOCAB = 2048, 256
SOURCES = {"web": 0.7, "books": 0.2, "code": 0.1}
BOUND_MB_PER_S = 300
"""What a mixture ablation must reach per core on a local disk, so that it costs seconds."""
REPEATS = 3


def rows() -> Iterator[dict[str, Any]]:
    """One row: the rate of the whole stage on one worker (planning, tables and checksums are in it)."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = prepare(Path(folder), DOCUMENTS)
        size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin"))
        ours, peer = float("inf"), float("inf")
        for number in range(REPEATS):  # By turns.
            ours = min(ours, mixed(Path(folder), inputs, seed=number))
            peer = min(peer, copied(Path(folder), inputs))
        rates = (size / ours / 1e6, size / peer / 1e6)
        yield {"name": "remix_mb_per_s_per_core", "ours": rates[0], "peer": rates[1], "unit": "MB/s",
               "ratio": rates[0] / rates[1],
               "note": f"one worker, which writes and hashes tokens beside its tables; peer: a copy with SHA-256 and "
                       f"fsync; bound: {BOUND_MB_PER_S} MB/s"}


def prepare(folder: Path, documents: int) -> dict[str, Path]:
    """Stages that a mixture reads, as if they had been committed: random tokens of three sources."""
    inputs = {name: folder / name for name in ("ingest", "tokenizer", "tokenize")}
    for path in inputs.values():
        path.mkdir()
    write_tokenizer(train(Sample({"words": ["a few words"]}, {}), VOCAB + 64), inputs["tokenizer"])
    rng = np.random.default_rng(8)
    for shard in range(SHARDS):
        name, number = f"part-{shard:05d}.parquet", documents // SHARDS
        (inputs["ingest"] / name).touch()
        tokens = rng.geometric(1 / MEAN_TOKENS, number)
        rng.integers(0, VOCAB, int(tokens.sum()), dtype=np.uint16).tofile(inputs["tokenize"] / tokens_name(name))
        sources = pa.array(rng.choice(list(SOURCES), number, p=list(SOURCES.values()))).dictionary_encode()
        write_table(inputs["tokenize"] / docs_name(name), pa.table({
            "row": np.arange(number), "id": word_ids(rng.integers(0, 2**64, (number, 2), dtype=np.uint64)),
            "source": sources.cast(DOCS_SCHEMA.field("source").type), "offset": np.cumsum(tokens) - tokens,
            "tokens": tokens, "bytes": tokens * 4}, schema=DOCS_SCHEMA))
    return inputs


def mixed(folder: Path, inputs: dict[str, Path], seed: int) -> float:
    """Seconds of the stage, into new folders: as many tokens as the parts hold, less than a row aside."""
    for name in ("work", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin")) // 2
    source: dict[str, Any] = {"weight": 1.0, "max_epochs": 4.0,
                              **dict.fromkeys(("where", "epochs", "min_tokens", "max_tokens"))}
    config = {"mix": {"tokens": size // LENGTH * LENGTH, "sequence_length": LENGTH, "weights": {"alpha": 1.0}},
              "sources": dict.fromkeys(SOURCES, source), "seed": seed}
    begun = time.perf_counter()
    mix.run(inputs, config, folder / "out", Context(work=folder / "work", stage="mix", emit=lambda event: None))
    return time.perf_counter() - begun


def copied(folder: Path, inputs: dict[str, Path]) -> float:
    """Seconds of copying the token parts, each with its checksum and forced to the disk."""
    begun = time.perf_counter()
    for path in sorted(inputs["tokenize"].glob("*.bin")):
        content = path.read_bytes()
        hashlib.sha256(content).hexdigest()
        with open(folder / "copy.bin", "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
    return time.perf_counter() - begun


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row}\n")
