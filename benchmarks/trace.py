"""`gristmill bench trace`: which documents a training step reads, asked of two million, as a command from its start.

The store is made as if its stages had run: documents without text, tokens that mean nothing, and a real mixture of
them. The peer looks for the same documents by reading the columns of all document shards, in a process that has started
already: what it would cost without tables that are read by row group.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, ID_BYTES, read_table, shard_names, write_table
from gristmill.flows.running.session import Session, open_session
from gristmill.tokenize.document_sampling import word_ids
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.sample import TokenizerSample
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.mixing import mix

DOCUMENTS, SHARDS, MEAN_TOKENS = 2_000_000, 16, 100
VOCAB = 320
LENGTH, BATCH, STEPS = 1024, 32, 1000
"""A step reads about 300 documents, which lie all over the set."""
SOURCES = ("web", "books")
BOUND_SECONDS = 2.0
"""What somebody waits for without turning to something else."""
REPEATS = 3
MANIFEST = """\
name: traced
sources:
  web: {{path: words.txt, weight: 3}}
  books: {{path: words.txt}}
tokenizer: {{vocab_size: {vocab}}}
mix: {{tokens: {tokens}, sequence_length: {length}, packing: stream}}
pretrain: {{steps: {steps}, global_batch_size: {batch}}}
"""


def rows() -> Iterator[dict[str, Any]]:
    """One row, in seconds; the ratio is how many times as long the peer takes."""
    with tempfile.TemporaryDirectory() as folder:
        session = make_store(Path(folder), DOCUMENTS)
        ours = peer = float("inf")
        for step in range(1, STEPS, STEPS // REPEATS):
            begun = time.perf_counter()
            found = trace(session, step)
            middle = time.perf_counter()
            hits = scan(session, [one["id"] for one in found["documents"]])
            ours, peer = min(ours, middle - begun), min(peer, time.perf_counter() - middle)
            if hits != len(found["documents"]):
                raise RuntimeError(f"step {step}: {len(found['documents'])} documents were traced, but {hits} found")
        yield {
            "name": "trace_step_seconds",
            "ours": ours,
            "peer": peer,
            "unit": "s",
            "ratio": peer / ours,
            "note": f"the whole command, {DOCUMENTS} documents; bound: {BOUND_SECONDS} s; peer: a scan of them",
        }


def make_store(folder: Path, documents: int) -> Session:
    """A manifest whose data stages are committed, up to its mixture."""
    (folder / "words.txt").write_text("a few words\n")
    (folder / "traced.yaml").write_text(
        MANIFEST.format(
            vocab=VOCAB, tokens=documents * MEAN_TOKENS // 2 // LENGTH * LENGTH, length=LENGTH, steps=STEPS, batch=BATCH
        )
    )
    session = open_session(str(folder / "traced.yaml"), [], str(folder / "store"))
    folders = {name: session.folder(name) for name in ("ingest", "tokenizer", "tokenize", "mix")}
    for name, one in folders.items():
        one.begin({"stage": name})
    inputs = {name: one.data for name, one in folders.items() if name != "mix"}
    write_tokenizer(train(TokenizerSample({"words": ["a few words"]}, {}), VOCAB), inputs["tokenizer"])
    rng = np.random.default_rng(6)
    for shard in range(SHARDS):
        _write_shard(inputs, f"part-{shard:05d}.parquet", documents // SHARDS, rng)
    mix.run(
        inputs,
        dict(session.plan["mix"].config),
        folders["mix"].data,
        Context(work=folders["mix"].work, stage="mix", emit=lambda event: None),
    )
    for name, one in folders.items():
        one.commit({"stage": name}, {})
    return session


def _write_shard(inputs: dict[str, Path], name: str, number: int, rng: np.random.Generator) -> None:
    """The documents of a shard, and their tokens."""
    ids = word_ids(rng.integers(0, 2**64, (number, 2), dtype=np.uint64))
    sources = pa.array(rng.choice(SOURCES, number, p=[0.75, 0.25])).dictionary_encode()
    locators = pc.binary_join_element_wise("https://example.org", name, pa.array(range(number)).cast(pa.string()), "/")
    write_table(
        inputs["ingest"] / name,
        pa.table(
            {
                "id": ids,
                "source": sources,
                "locator": locators,
                "text": pa.array([""] * number, pa.large_string()),
                "metadata": pa.array(["{}"] * number),
            },
            schema=DOCUMENT_SCHEMA,
        ),
    )
    tokens = rng.geometric(1 / MEAN_TOKENS, number)
    rng.integers(0, VOCAB - 64, int(tokens.sum()), dtype=np.uint16).tofile(inputs["tokenize"] / tokens_name(name))
    write_table(
        inputs["tokenize"] / docs_name(name),
        pa.table(
            {
                "row": np.arange(number),
                "id": ids,
                "source": sources.cast(DOCS_SCHEMA.field("source").type),
                "offset": np.cumsum(tokens) - tokens,
                "tokens": tokens,
                "bytes": tokens * 4,
            },
            schema=DOCS_SCHEMA,
        ),
    )


def trace(session: Session, step: int) -> dict[str, Any]:
    """What the command prints about a step."""
    command = [
        sys.executable,
        "-m",
        "gristmill.flows.cli.main",
        "trace",
        session.manifest_file,
        "--step",
        str(step),
        "--store",
        str(session.store.root),
        "--json",
    ]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def scan(session: Session, ids: list[str]) -> int:
    """How many of some documents are found by reading the columns of all shards."""
    wanted, ingest = pa.array([bytes.fromhex(one) for one in ids], pa.binary(ID_BYTES)), session.folder("ingest").data
    found = 0
    for shard in shard_names(ingest):
        table = read_table(ingest / shard, ["id", "source", "locator", "metadata"])
        found += len(table.filter(pc.is_in(table["id"], value_set=wanted)).to_pylist())
    return found
