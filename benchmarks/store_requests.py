"""What each step asks of an object store: requests by price, and bytes, with 4 to 16 shards and partitions.

Documents that seeds make go through `ingest`, `dedup`, `tokenize` and `mix` in an S3-compatible server of this machine,
in both forms of the shuffle (`engine.shuffle`); every request passes a proxy that counts. How many there are follows
from the number of document shards S and of partitions P alone: a + b S + c P + d S P + e P P, none of them negative,
which five runs tell; four leave open which law it is, and one of them was off by a third at another size. `gristmill
plan MANIFEST --tb N` draws these figures on (`flows/planning/cluster_costs.py`).
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import numpy as np

from benchmarks.bounds import STEPS, run_step_in, write_texts
from benchmarks.chaos.network import CREDENTIALS, Network, object_store, serving
from benchmarks.measuring import Row, row
from gristmill.flows.planning.cluster_costs import REQUESTS, terms

BUCKET = "counted"
SIZES = ((4, 4), (4, 8), (8, 4), (8, 8), (16, 16))
"""Document shards and partitions."""
SHARD_DOCUMENTS = 1000
FORMS = ("files", "engine")
NAMES = ("", " S", " P", " S P", " P P")
KINDS = ("writes", "reads")
"""As stores charge for them: PUT, COPY, POST and LIST; GET and HEAD. DELETE is free."""


class Counting(Network):
    """Hands requests on, and counts them.

    Attributes:
        kinds: how many of each kind.
    """

    def __init__(self, upstream: int) -> None:
        super().__init__(upstream)
        self.kinds: Counter[str] = Counter()

    def fault(self, method: str, path: str) -> str | None:
        """Nothing happens to any."""
        with self.lock:
            self.kinds[kind_of(method, path)] += 1
        return None

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        with self.lock:
            found = {**{kind: self.kinds[kind] for kind in KINDS}, "in_bytes": self.received, "out_bytes": self.sent}
            self.kinds.clear()
            self.received = self.sent = 0
        return found


def kind_of(method: str, path: str) -> str:
    """What a request to S3 is charged as."""
    lists = method == "GET" and {"list-type", "prefix", "uploads"} & set(parse_qs(urlsplit(path).query, True))
    if method in ("PUT", "POST") or lists:
        return "writes"
    return "reads" if method in ("GET", "HEAD") else "deletes"


def rows() -> Iterator[Row]:
    """Measure both forms; the figures of `cluster_costs.py` are the peers.

    Raises:
        RuntimeError: a step failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-requests-") as temporary,
        object_store(BUCKET) as port,
        serving(Counting(port)) as between,
        patch.dict(os.environ, {**CREDENTIALS, "AWS_ENDPOINT_URL": between.address}),
    ):
        texts = {shards: Path(temporary) / str(shards) for shards, _ in SIZES}
        for shards, folder in texts.items():
            write_texts(folder, shards * SHARD_DOCUMENTS, SHARD_DOCUMENTS)
        for form in FORMS:
            found = {
                (shards, partitions): counted(form, shards, partitions, texts[shards], between)
                for shards, partitions in SIZES
            }
            for step in STEPS:
                most = found[SIZES[-1]][step]
                note = (
                    f"{most['in_bytes'] / 1e6:.1f} MB to the store, {most['out_bytes'] / 1e6:.1f} MB from it, "
                    f"{most['shuffle_bytes'] / 1e6:.2f} MB shuffled; peer: flows/planning/cluster_costs.py"
                )
                for place, kind in enumerate(KINDS):
                    law = law_of({size: one[step][kind] for size, one in found.items()})
                    said = float(np.dot(REQUESTS[form][step][place], terms(*SIZES[-1])))
                    written = " + ".join(f"{factor:.2f}{name}" for factor, name in zip(law, NAMES) if factor)
                    yield row(
                        f"{step}, {kind}, shuffle by {form}",
                        most[kind],
                        said,
                        "requests",
                        f"S = P = {SIZES[-1][0]}; {written}; {note}",
                    )


def law_of(counts: Mapping[tuple[int, int], float]) -> np.ndarray:
    """Of the counts by shards and partitions, the terms of `on_cluster.terms` that are not negative and fit best."""
    from scipy.optimize import nnls

    found: np.ndarray = nnls(np.array([terms(*size) for size in counts]), np.array([*counts.values()], float))[0]
    return found


def counted(form: str, shards: int, partitions: int, texts: Path, between: Counting) -> dict[str, dict[str, int]]:
    """Step -> what it asked of the store, with so many partitions of whatever it cuts, and the bytes that it shuffled."""
    from gristmill.core.files import as_path
    from gristmill.dataprep import shuffle_format
    from gristmill.dataprep.jobs import shuffle
    from gristmill.tokenize.mixing import candidates, mix, streams

    sent, by_partition, bits = [0], shuffle_format.by_partition, partitions.bit_length() - 1

    def counting(rows_: Any, *arguments: Any) -> Any:
        sent[0] += rows_.nbytes
        return by_partition(rows_, *arguments)

    size = sum(path.stat().st_size for path in texts.glob("*.jsonl"))
    found = {}
    with ExitStack() as changed:
        for module, name, value in (
            (shuffle, "by_partition", counting),
            (shuffle_format, "FEWEST_PARTITIONS", partitions),
            (streams, "partition_bits", lambda *_: bits),
            (candidates, "partition_bits", lambda *_: bits),
            (mix, "SHARD_BYTES", size // 4 * 2 // partitions),
        ):
            changed.enter_context(patch.object(module, name, value))
        for step in STEPS:
            sent[0] = 0
            between.take()
            run_step_in(step, as_path(f"s3://{BUCKET}/{form}-{shards}-{partitions}"), texts, shuffle=form)
            found[step] = {**between.take(), "shuffle_bytes": sent[0]}
    return found
