"""The keys by which candidates find each other: one for a document's text, one for its URL, one per MinHash band."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.duplicates.sketches import Sketches, binary_numbers
from gristmill.dataprep.jobs.shuffled import Sent
from gristmill.mixtures.steps.dedup import Dedup

BYTES_PER_KEY = 32
KEYS = "keys"
"""What the documents of a shard send."""


def keys_per_document(section: Dedup) -> int:
    """How many keys a document has at the most."""
    return int(section.exact) + int(section.url) + (section.minhash.bands if section.minhash else 0)


def sent_keys(documents: np.ndarray, ids: pa.Array, sketches: Sketches, section: Dedup, num_partitions: int) -> Sent:
    """The keys of some documents, each to the partition that its upper half names."""
    keys = key_table(documents, ids, sketches, section)
    return Sent(KEYS, keys, (keys["key"].to_numpy() >> np.uint64(32)).astype(np.int64) % num_partitions)


def key_table(documents: np.ndarray, ids: pa.Array, sketches: Sketches, section: Dedup) -> pa.Table:
    """Rows (key, document, text, rank) of all keys that the section asks for.

    `text` is half of the digest by which documents of one bucket are distinguished: of the text or, for the keys of
    URLs, of the URL. `rank` is the leading half of the id, which orders documents as ids do: two copies of one text
    that share it are of one in 10^19 pairs. A text without shingles has no band keys, a document without a URL no key
    for it.
    """
    ranks = np.ascontiguousarray(binary_numbers(ids)).view(">u8")[:, 0].astype(np.uint64)
    everything = np.arange(len(documents))
    columns = [(sketches.digests[:, 1], everything, sketches.digests[:, 0])] if section.exact else []
    if section.url:
        found = np.flatnonzero(sketches.urls.any(axis=1))
        columns.append((sketches.urls[found, 1], found, sketches.urls[found, 0]))
    if section.minhash is not None:
        found = np.flatnonzero(np.diff(sketches.sets.offsets))
        texts = sketches.digests[found, 0]
        columns += [(sketches.bands[found, band], found, texts) for band in range(sketches.bands.shape[1])]
    none = np.empty(0, np.uint64)
    which = np.concatenate([everything[:0], *(which for _, which, _ in columns)])
    return pa.table(
        {
            "key": np.concatenate([none, *(keys for keys, _, _ in columns)]),
            "document": documents[which],
            "text": np.concatenate([none, *(texts for _, _, texts in columns)]),
            "rank": ranks[which],
        }
    )
