"""Requests of each step to an object store, by price, and bytes, with 4 to 16 shards
and partitions; and requests of large files by the size of their parts.

Documents drawn by seeds go through `ingest`, `dedup`, `tokenize` and `mix` in an
S3-compatible server of this machine, in both forms of the shuffle (`engine.shuffle`); a
proxy counts all requests. Their number follows from the number of document shards S and
of partitions P alone: a + b S + c P + d S P + e P P, with no negative term, which five
runs determine; four leave the law open, and one of them was off by a third at another
size. REQUESTS has what was counted, the bound of each row.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import numpy as np

from benchmarks.bounds import STEPS, run_step_in, write_texts
from benchmarks.chaos.network import Network, serving
from benchmarks.measuring import Row, row
from benchmarks.store_servers import SCHEMES, object_store
from gristmill.mixtures.schema.engine import ShuffleForm

BUCKET = "counted"
SIZES = ((4, 4), (4, 8), (8, 4), (8, 8), (16, 16))
"""Document shards and partitions."""
SHARD_DOCUMENTS = 1000
FORMS: tuple[ShuffleForm, ...] = get_args(ShuffleForm)
NAMES = ("", " S", " P", " S P", " P P")
KINDS = ("writes", "reads")
"""Prices of stores: PUT, COPY, POST and LIST; GET and HEAD. DELETE is free."""
Law = tuple[float, float, float, float, float]
"""Coefficients of `terms`."""
REQUESTS: Mapping[str, Mapping[str, tuple[Law, Law]]] = {
    "files": {
        "ingest": ((6, 3, 0, 0, 0), (3, 4, 0, 0, 0)),
        "dedup": ((68.79, 15.79, 8.73, 0, 0), (48, 62, 14, 16, 8)),
        "tokenize": ((17, 5, 0, 0, 0), (10, 18, 0, 0, 0)),
        "mix": ((65.51, 7.04, 14.12, 0, 0), (133.67, 46.44, 0, 11.12, 8.54)),
    },
    "engine": {
        "ingest": ((6, 3, 0, 0, 0), (3, 4, 0, 0, 0)),
        "dedup": ((101, 18, 11, 0, 0), (54, 49, 19, 0, 0)),
        "tokenize": ((17, 5, 0, 0, 0), (10, 18, 0, 0, 0)),
        "mix": ((75.75, 5.81, 19.31, 0, 0), (58.5, 22.75, 36.38, 0, 0)),
    },
}
"""Form of the shuffle -> step -> requests that write or list, and that read, as counted
before.
"""


PART_MEBIBYTES = (8, 16, 50, 64)
"""Sizes of a part; 50 MiB is the default of all stores."""
FILE_MEBIBYTES = 200
"""A file of four default parts."""
GB = 1e9


class Counting(Network):
    """Proxy that counts requests.

    Attributes:
        kinds: kind -> number of requests.
    """

    def __init__(self, upstream: int) -> None:
        super().__init__(upstream)
        self.kinds: Counter[str] = Counter()

    def fault(self, method: str, path: str) -> str | None:
        """Count the request, and let it pass."""
        with self.lock:
            self.kinds[kind_of(method, path)] += 1
        return None

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self.lock:
            counts = {
                **{kind: self.kinds[kind] for kind in KINDS},
                "in_bytes": self.received,
                "out_bytes": self.sent,
            }
            self.kinds.clear()
            self.received = self.sent = 0
        return counts


def kind_of(method: str, path: str) -> str:
    """Return the price class of a request to S3."""
    is_listing = method == "GET" and {"list-type", "prefix", "uploads"} & set(
        parse_qs(urlsplit(path).query, True)
    )
    if method in ("PUT", "POST") or is_listing:
        return "writes"
    return "reads" if method in ("GET", "HEAD") else "deletes"


def rows() -> Iterator[Row]:
    """Measure both forms; the laws of REQUESTS are the peers.

    Raises:
        RuntimeError: a step failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-requests-") as temporary,
        object_store(BUCKET) as server,
        serving(Counting(server.port)) as between,
        patch.dict(os.environ, server.environment(between.address)),
    ):
        texts = {shards: Path(temporary) / str(shards) for shards, _ in SIZES}
        for shards, folder in texts.items():
            write_texts(folder, shards * SHARD_DOCUMENTS, SHARD_DOCUMENTS)
        for form in FORMS:
            runs = {
                size: counted(form, size, texts[size[0]], between) for size in SIZES
            }
            for step in STEPS:
                largest = runs[SIZES[-1]][step]
                note = (
                    f"{largest['in_bytes'] / 1e6:.1f} MB to the store, "
                    f"{largest['out_bytes'] / 1e6:.1f} MB from it, "
                    f"{largest['shuffle_bytes'] / 1e6:.2f} MB shuffled"
                )
                for place, kind in enumerate(KINDS):
                    law = law_of({size: run[step][kind] for size, run in runs.items()})
                    planned = float(
                        np.dot(REQUESTS[form][step][place], terms(*SIZES[-1]))
                    )
                    formula = " + ".join(
                        f"{factor:.2f}{name}"
                        for factor, name in zip(law, NAMES)
                        if factor
                    )
                    yield row(
                        f"{step}, {kind}, shuffle by {form}",
                        largest[kind],
                        planned,
                        "requests",
                        f"S = P = {SIZES[-1][0]}; {formula}; {note}",
                    )


def part_rows() -> Iterator[Row]:
    """Count the requests for a gigabyte of a large file, by store and size of a part.

    The peer is a file without any request but those for its parts.

    Raises:
        ImportError: the client of a store is not installed.
        MissingEngineError: the emulator of a store was not downloaded.
        RuntimeError: a file was read with another content.
    """
    for scheme in SCHEMES:
        with (
            object_store(BUCKET, scheme) as server,
            serving(Counting(server.port)) as between,
            patch.dict(os.environ, server.environment(between.address)),
        ):
            for part in PART_MEBIBYTES:
                yield from counted_parts(server.url, part << 20, between)


def counted_parts(url: str, part_bytes: int, between: Counting) -> Iterator[Row]:
    """Write and read a file through a store; yields the requests of both."""
    from gristmill.core.files import as_path

    path: Any = as_path(url) / f"parts-{part_bytes}"
    piece = np.random.default_rng(part_bytes).bytes(1 << 20)
    file_bytes = FILE_MEBIBYTES << 20
    for direction in ("written", "read"):
        between.take()
        start = time.monotonic()
        digest = hashlib.sha256()
        mode = "wb" if direction == "written" else "rb"
        with path.fs.open(path.path, mode, block_size=part_bytes) as file:
            for _ in range(FILE_MEBIBYTES):
                if mode == "wb":
                    file.write(piece)
                else:
                    digest.update(file.read(len(piece)))
        seconds = time.monotonic() - start
        expected = hashlib.sha256(piece * FILE_MEBIBYTES).digest()
        if mode == "rb" and digest.digest() != expected:
            raise RuntimeError(f"{path} was read with another content")
        counts = between.take()
        requests = counts["writes"] + counts["reads"]
        scale = GB / file_bytes
        yield row(
            f"{path.protocol}://, {direction}, parts of {part_bytes >> 20} MiB",
            requests * scale,
            -(-file_bytes // part_bytes) * scale,
            "requests/GB",
            f"{file_bytes / 1e6:.0f} MB in {requests} requests and {seconds:.1f} s",
        )


def terms(shards: int, partitions: int) -> tuple[int, int, int, int, int]:
    """Return the terms of a request count: 1, tasks of both kinds, and files between
    each pair of tasks.
    """
    return 1, shards, partitions, shards * partitions, partitions**2


def law_of(counts: Mapping[tuple[int, int], float]) -> np.ndarray:
    """Fit the factors of `terms`, none of them negative, to counts by
    shards and partitions.
    """
    from scipy.optimize import nnls

    factors: np.ndarray = nnls(
        np.array([terms(*size) for size in counts]), np.array([*counts.values()], float)
    )[0]
    return factors


def counted(
    form: ShuffleForm, size: tuple[int, int], texts: Path, between: Counting
) -> dict[str, dict[str, int]]:
    """Run all steps with a number of shards and partitions; returns step -> its
    requests and bytes.
    """
    from gristmill.core.files import as_path
    from gristmill.dataprep import shuffle_format
    from gristmill.dataprep.runners import shuffle
    from gristmill.tokenize.mixing import candidates, mix, streams

    shards, partitions = size
    bits = partitions.bit_length() - 1
    sent, by_partition = [0], shuffle_format.by_partition

    def counting(table: Any, *arguments: Any) -> Any:
        sent[0] += table.nbytes
        return by_partition(table, *arguments)

    text_bytes = sum(path.stat().st_size for path in texts.glob("*.jsonl"))
    counts = {}
    with ExitStack() as patches:
        for module, name, value in (
            (shuffle, "by_partition", counting),
            (shuffle_format, "FEWEST_PARTITIONS", partitions),
            (streams, "partition_bits", lambda *_: bits),
            (candidates, "partition_bits", lambda *_: bits),
            (mix, "SHARD_BYTES", text_bytes // 4 * 2 // partitions),
        ):
            patches.enter_context(patch.object(module, name, value))
        for step in STEPS:
            sent[0] = 0
            between.take()
            run_step_in(
                step,
                as_path(f"s3://{BUCKET}/{form}-{shards}-{partitions}"),
                texts,
                shuffle=form,
            )
            counts[step] = {**between.take(), "shuffle_bytes": sent[0]}
    return counts
