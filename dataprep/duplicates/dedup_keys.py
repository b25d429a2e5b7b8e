"""Keys of candidate pairs: one for a document's text, one for its URL, one per MinHash
band.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.duplicates.sketches import Sketches, binary_numbers
from gristmill.dataprep.jobs.shuffle import Sent
from gristmill.mixtures.steps.dedup import Dedup

BYTES_PER_KEY = 32
KEYS = "keys"
"""Name of the stream of keys that the shards send."""


def keys_per_document(section: Dedup) -> int:
    """Maximum number of keys per document."""
    return (
        int(section.exact)
        + int(section.url)
        + (section.minhash.bands if section.minhash else 0)
    )


def sent_keys(
    documents: np.ndarray,
    ids: pa.Array,
    sketches: Sketches,
    section: Dedup,
    num_partitions: int,
) -> Sent:
    """Keys of some documents, each for the partition that its upper half selects."""
    keys = key_table(documents, ids, sketches, section)
    return Sent(
        KEYS,
        keys,
        (keys["key"].to_numpy() >> np.uint64(32)).astype(np.int64) % num_partitions,
    )


def key_table(
    documents: np.ndarray, ids: pa.Array, sketches: Sketches, section: Dedup
) -> pa.Table:
    """Table with a row (key, document, text, rank) for every key that the section asks
    for.

    `text` is half of the digest that distinguishes documents of one bucket: of the text
    or, for keys of URLs, of the URL. `rank` is the leading half of the id and orders
    documents as ids do: one in 10^19 pairs of copies shares it. A text without shingles
    does not have band keys, and a document without a URL does not have a URL key.
    """
    ranks = (
        np.ascontiguousarray(binary_numbers(ids)).view(">u8")[:, 0].astype(np.uint64)
    )
    all_rows = np.arange(len(documents))
    columns = (
        [(sketches.digests[:, 1], all_rows, sketches.digests[:, 0])]
        if section.exact
        else []
    )
    if section.url:
        rows_with_key = np.flatnonzero(sketches.urls.any(axis=1))
        columns.append(
            (
                sketches.urls[rows_with_key, 1],
                rows_with_key,
                sketches.urls[rows_with_key, 0],
            )
        )
    if section.minhash is not None:
        rows_with_key = np.flatnonzero(np.diff(sketches.sets.offsets))
        texts = sketches.digests[rows_with_key, 0]
        columns += [
            (sketches.bands[rows_with_key, band], rows_with_key, texts)
            for band in range(sketches.bands.shape[1])
        ]
    no_keys = np.empty(0, np.uint64)
    rows = np.concatenate([all_rows[:0], *(rows for _, rows, _ in columns)])
    return pa.table(
        {
            "key": np.concatenate([no_keys, *(keys for keys, _, _ in columns)]),
            "document": documents[rows],
            "text": np.concatenate([no_keys, *(texts for _, _, texts in columns)]),
            "rank": ranks[rows],
        }
    )
