"""From text to MinHash bands, on one thread: against datasketch and against rensa, on the same prose.

Each peer computes 112 permutations over word 5-grams, as its documentation has it in its fastest exact form. rensa's
faster `rho` entry points are no peers: of a long document they look at a few positions only, so that one inserted word
hides a duplicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from benchmarks.dataprep.timing import rate, synthetic_texts
from gristmill.dataprep.duplicates.minhash import band_keys, signatures
from gristmill.dataprep.duplicates.shingles import shingle_sets

DOCUMENTS = 2000
PEER_DOCUMENTS = 400
"""The peers are slow: they get the first documents only; rates are per byte."""
NGRAM, BANDS, ROWS, SEED = 5, 14, 8, 1


def rows() -> Iterator[dict[str, Any]]:
    """Measure, one row per peer; `ours` and `peer` in MB of UTF-8 per second."""
    texts = synthetic_texts(DOCUMENTS)
    array = pa.array(texts, pa.large_string())
    minhash_bands(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    for peer, work in (("datasketch", with_datasketch), ("rensa", with_rensa)):
        ours = rate(lambda: minhash_bands(array), texts)
        yield against(peer, ours, work, texts[:PEER_DOCUMENTS])


def against(peer: str, ours: float, work: Callable[[Sequence[str]], Any], texts: list[str]) -> dict[str, Any]:
    """The row of one peer, empty where it is not installed."""
    row = {"name": f"minhash_vs_{peer}", "ours": ours, "peer": None, "unit": "MB/s", "ratio": None}
    if find_spec(peer) is None:
        return {**row, "note": f"{peer} is not installed"}
    measured = rate(lambda: work(texts), texts)
    return {**row, "peer": measured, "ratio": ours / measured}


def minhash_bands(texts: pa.Array) -> Any:
    """Band keys from text, as `dedup` makes them."""
    return band_keys(signatures(shingle_sets(texts, NGRAM), BANDS * ROWS, SEED), BANDS, ROWS)


def word_ngrams(text: str) -> set[str]:
    """The peers' shingles: words in lower case, between spaces."""
    words = text.lower().split()
    return {" ".join(words[at : at + NGRAM]) for at in range(max(1, len(words) - NGRAM + 1))}


def with_datasketch(texts: Sequence[str]) -> None:
    """Signatures by datasketch, a document's shingles in one batch."""
    from datasketch import MinHash

    for text in texts:
        shingles = [shingle.encode() for shingle in word_ngrams(text)]
        MinHash(BANDS * ROWS, seed=SEED, scheme="affine32").update_batch(shingles)


def with_rensa(texts: Sequence[str]) -> None:
    """Signatures by rensa over all shingles of every document, all documents in one call."""
    from rensa import RMinHash

    RMinHash.digest_matrix_from_token_sets([word_ngrams(text) for text in texts], BANDS * ROWS, SEED)
