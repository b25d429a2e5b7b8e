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
from gristmill.tokenize.document_sampling import word_ids
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.sample import TokenizerSample
from gristmill.tokenize.encoding.tokenizer import train, write_tokenizer
from gristmill.tokenize.mixing import mix

SHARDS, DOCUMENTS, MEAN_TOKENS = 8, 200_000, 500
"""200 MB of 16-bit tokens in documents of 1 kB: 2 million documents per 2 GB, a tenth of it."""
LENGTH, VOCAB = 2048, 256
SOURCES = {"web": 0.7, "books": 0.2, "code": 0.1}
BOUND_MB_PER_S = 300
"""What a mixture ablation must reach per core on a local disk, so that it costs seconds."""
REPEATS = 3


def rows() -> Iterator[dict[str, Any]]:
    """Two rows: the whole stage on one worker (planning, tables and checksums are in it), by processor time and by the
    clock."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = prepare(Path(folder), DOCUMENTS)
        size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin"))
        ours = peer = (float("inf"), float("inf"))
        for number in range(REPEATS):  # By turns.
            ours = least(ours, mixed(Path(folder), inputs, seed=number))
            peer = least(peer, copied(Path(folder), inputs))
        notes = (f"one worker, by processor time, of all its threads; bound: {BOUND_MB_PER_S} MB/s",
                 "one worker, by the clock: it waits for the disk, and writes tokens beside its tables")
        names = ("remix_mb_per_s_per_core", "remix_mb_per_s")
        for name, own, other, note in zip(names, ours, peer, notes, strict=True):
            yield {"name": name, "ours": size / own / 1e6, "peer": size / other / 1e6, "unit": "MB/s",
                   "ratio": other / own, "note": f"{note}; peer: a copy with SHA-256 and fsync"}


def least(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The smaller one of each."""
    return min(one[0], other[0]), min(one[1], other[1])


def prepare(folder: Path, documents: int) -> dict[str, Path]:
    """Stages that a mixture reads, as if they had been committed: random tokens of three sources."""
    inputs = {name: folder / name for name in ("ingest", "tokenizer", "tokenize")}
    for path in inputs.values():
        path.mkdir()
    write_tokenizer(train(TokenizerSample({"words": ["a few words"]}, {}), VOCAB + 64), inputs["tokenizer"])
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


def mixed(folder: Path, inputs: dict[str, Path], seed: int) -> tuple[float, float]:
    """Seconds of the processor and of the clock of the stage, into new folders.

    It takes as many tokens as the parts hold, less than a row aside.
    """
    for name in ("work", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin")) // 2
    source: dict[str, Any] = {"weight": 1.0, "max_epochs": 4.0,
                              **dict.fromkeys(("where", "epochs", "min_tokens", "max_tokens"))}
    config = {"mix": {"tokens": size // LENGTH * LENGTH, "sequence_length": LENGTH, "weights": {"alpha": 1.0}},
              "sources": dict.fromkeys(SOURCES, source), "seed": seed}
    begun, used = time.perf_counter(), time.process_time()
    mix.run(inputs, config, folder / "out", Context(work=folder / "work", stage="mix", emit=lambda event: None))
    return time.process_time() - used, time.perf_counter() - begun


def copied(folder: Path, inputs: dict[str, Path]) -> tuple[float, float]:
    """Seconds of the processor and of the clock of a copy of the token parts, with checksums and on the disk."""
    begun, used = time.perf_counter(), time.process_time()
    for path in sorted(inputs["tokenize"].glob("*.bin")):
        content = path.read_bytes()
        hashlib.sha256(content).hexdigest()
        with open(folder / "copy.bin", "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
    return time.process_time() - used, time.perf_counter() - begun


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row}\n")
