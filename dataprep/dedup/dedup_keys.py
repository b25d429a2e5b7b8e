"""Keys of candidate pairs: one for a document's text, one for its URL, one per MinHash
band.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import binary_numbers
from gristmill.dataprep.dedup.sketches import Sketches
from gristmill.mixtures.steps.dedup import Dedup

BYTES_PER_KEY = 32
KEYS = "keys"
"""Name of the stream of keys that the shards send."""


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
    digests = sketches.digests
    all_rows = np.arange(len(documents))
    columns = [(digests[:0, 1], all_rows[:0], digests[:0, 0])]
    if section.exact:
        columns.append((digests[:, 1], all_rows, digests[:, 0]))
    if section.url:
        rows = np.flatnonzero(sketches.urls.any(axis=1))
        columns.append((sketches.urls[rows, 1], rows, sketches.urls[rows, 0]))
    if section.minhash is not None:
        rows = np.flatnonzero(np.diff(sketches.sets.offsets))
        columns += [(keys, rows, digests[rows, 0]) for keys in sketches.bands[rows].T]
    keys, rows, texts = map(np.concatenate, zip(*columns, strict=True))
    return pa.table(
        {"key": keys, "document": documents[rows], "text": texts, "rank": ranks[rows]}
    )
