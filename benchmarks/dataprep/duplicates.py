"""How well near-duplicates are found: among labelled revisions of real documents, and planted at known similarities.

The labelled pairs are revisions of Python Enhancement Proposals with their exact Jaccard similarities, computed by
other code; the peer of the links is datasketch's `MinHashLSH` with as many permutations, left to choose its own bands.
Links are not yet what is lost: of the documents that the stage drops it is counted how many are as alike to the one
that is kept for them as the threshold says, and of the labelled pairs how many are both kept; the peer is the rule
`clusters: connected`, single linkage, on the same links. Of the
planted pairs the peer is the theory: 1 - (1 - J^rows)^bands pairs share a band (Leskovec et al., section 3.4), and the
share of equal permutations deviates from J by sqrt(J (1 - J) / permutations) (Broder 1997).

For speed, each peer computes as many permutations over word 5-grams as its documentation has it in its fastest exact
form. rensa's faster `rho` entry points are no peers: of a long document they look at a few positions only, so that one
inserted word hides a duplicate.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.texts import rate
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, read_table, write_table
from gristmill.dataprep.duplicates import dedup
from gristmill.dataprep.duplicates.candidate_pairs import candidate_pairs
from gristmill.dataprep.duplicates.minhash import band_keys, signatures
from gristmill.dataprep.duplicates.shingles import shingle_sets, similarities
from gristmill.mixtures.steps.dedup import MinHash

SECTION = MinHash()
PERMUTATIONS = SECTION.bands * SECTION.rows
STEPS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Similarities of the planted pairs."""
PAIRS_PER_STEP = 1000
WORDS = 400
DOCUMENTS, PEER_DOCUMENTS = 2000, 400
"""The peers are slow: they get the first documents only; rates are per byte."""
Pair = tuple[int, int]


def quality_rows() -> Iterator[Row]:
    """Recall and precision on the labelled pairs, and recall and the estimate's error on the planted ones."""
    folder = data_folder() / "dedup" / "pep_revisions"
    if (folder / "docs.jsonl.zst").exists():
        yield from labelled_rows(folder)
    else:
        yield row("near duplicates: labelled revisions", None, None, "", f"{folder} has no labelled pairs")
    yield from planted_rows()


def labelled_rows(folder: Path) -> Iterator[Row]:
    """Recall and precision of links over the pairs whose similarity reaches the threshold, and what the rules drop."""
    documents = {row["id"]: row["text"] for row in read_lines(folder / "docs.jsonl.zst")}
    names = {identity: number for number, identity in enumerate(documents)}
    truth = {
        _pair(names[row["a"]], names[row["b"]])
        for row in read_lines(folder / "pairs.jsonl.zst")
        if row["jaccard_w5"] >= SECTION.threshold
    }
    texts = list(documents.values())
    ours, peer = found_pairs(texts), found_by_datasketch(texts)
    measures = {"recall": len(truth), "precision": None}
    for name, of in measures.items():
        our_share, peer_share = (len(truth & found) / (of or len(found)) for found in (ours, peer))
        yield row(f"near duplicates, revisions: {name}", our_share, peer_share, "of links", "peer: datasketch")
    (right, left), (right_peer, left_peer) = (judge_rule(texts, truth, rule) for rule in ("survivors", "connected"))
    yield row(
        "near duplicates, revisions: dropped for one that is alike",
        right,
        right_peer,
        "of dropped",
        "peer: clusters: connected",
    )
    yield {
        "name": "near duplicates, revisions: alike and both kept",
        "ours": left,
        "peer": left_peer,
        "unit": "of pairs",
        "ratio": left_peer / left if left else None,
        "note": "peer: clusters: connected",
    }


def judge_rule(texts: Sequence[str], truth: set[Pair], rule: str) -> tuple[float, float]:
    """What the stage makes of texts with one rule of `clusters`.

    Args:
        truth: the pairs of texts, by number, that are alike.

    Returns:
        the share of the dropped texts that are alike to the one that is kept for them, and the share of the pairs of
        which both are kept.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [f"{number}" for number in range(len(texts))]
        ids = [document_id("", place, text) for place, text in zip(places, texts, strict=True)]
        table = pa.table(
            {"id": ids, "source": [""] * len(texts), "locator": places, "text": texts, "metadata": ["{}"] * len(texts)}
        )
        write_table(folder / "ingest" / "part-00000.parquet", table.cast(DOCUMENT_SCHEMA))
        (folder / "work").mkdir()
        dedup.run(
            {"ingest": folder / "ingest"},
            {"clusters": rule, "index": False},
            folder / "out",
            Context(work=folder / "work", emit=lambda event: None),
        )
        twins = read_table(folder / "out" / "clusters.parquet", ["member_locator", "survivor_locator"]).to_pylist()
    pairs = [(int(twin["member_locator"]), int(twin["survivor_locator"])) for twin in twins]
    gone = {member for member, _ in pairs}
    right = sum(_pair(*pair) in truth for pair in pairs)
    return right / len(pairs), sum(gone.isdisjoint(pair) for pair in truth) / len(truth)


def planted_rows() -> Iterator[Row]:
    """Recall of pairs by similarity, and the error of the estimated similarity, each against the theory."""
    errors, variances = [], []
    for step in STEPS:
        sets = shingle_sets(pa.array([text for pair in plant(step) for text in pair], pa.large_string()), SECTION.ngram)
        left = np.arange(0, 2 * PAIRS_PER_STEP, 2)
        jaccard = similarities(sets, left, left + 1)
        signature = signatures(sets, PERMUTATIONS, SECTION.seed)
        keys = band_keys(signature, SECTION.bands, SECTION.rows)
        recall = float((keys[left] == keys[left + 1]).any(axis=1).mean())
        theory = float((1 - (1 - jaccard**SECTION.rows) ** SECTION.bands).mean())
        errors.append((signature[left] == signature[left + 1]).mean(axis=1) - jaccard)
        variances.append(jaccard * (1 - jaccard) / PERMUTATIONS)
        yield row(
            f"near duplicates, planted: recall at {jaccard.mean():.2f}", recall, theory, "of pairs", "peer: theory"
        )
    error, expected = (float(np.sqrt(np.concatenate(values).mean())) for values in (np.square(errors), variances))
    yield {
        "name": "near duplicates, planted: estimate's error",
        "ours": error,
        "peer": expected,
        "unit": "RMS",
        "ratio": expected / error,
        "note": "peer: theory",
    }


def plant(jaccard: float) -> Iterator[tuple[str, str]]:
    """Pairs of texts of about this similarity: words of one are replaced, each by itself, which costs n shingles."""
    source = random.Random(f"pairs at {jaccard}")
    shingles = WORDS - SECTION.ngram + 1
    edits = round(shingles * (1 - jaccard) / (SECTION.ngram * (1 + jaccard)))
    for number in range(PAIRS_PER_STEP):
        words = [f"w{source.randrange(100_000)}" for _ in range(WORDS)]
        changed = list(words)
        gap = (WORDS - 2 * SECTION.ngram) // max(edits, 1)
        for edit in range(edits):
            changed[SECTION.ngram + edit * gap] = f"new{number}x{edit}"
        yield " ".join(words), " ".join(changed)


def found_pairs(texts: Sequence[str]) -> set[Pair]:
    """The pairs that share a band and reach the threshold; of equal texts, each by itself."""
    sets = shingle_sets(pa.array(texts, pa.large_string()), SECTION.ngram)
    keys = band_keys(signatures(sets, PERMUTATIONS, SECTION.seed), SECTION.bands, SECTION.rows)
    documents = np.repeat(np.arange(len(texts)), SECTION.bands)
    pairs = candidate_pairs(keys.ravel(), documents, documents.astype(np.uint64), documents, len(texts)).pairs
    return {_pair(a, b) for a, b in pairs[similarities(sets, pairs[:, 0], pairs[:, 1]) >= SECTION.threshold].tolist()}


def found_by_datasketch(texts: Sequence[str]) -> set[Pair]:
    """The pairs that datasketch's index answers, as its documentation builds it, for the same threshold."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=SECTION.threshold, num_perm=PERMUTATIONS)
    found = set()
    for number, text in enumerate(texts):
        sketch = MinHash(PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in word_ngrams(text)])
        found |= {_pair(other, number) for other in index.query(sketch)}
        index.insert(number, sketch)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a compressed JSONL file."""
    import zstandard

    with zstandard.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def _pair(first: int, second: int) -> Pair:
    return min(first, second), max(first, second)


def speed_rows(documents: int = DOCUMENTS) -> Iterator[Row]:
    """From text to MinHash bands, one row per peer; both sides in MB of UTF-8 per second."""
    texts = documentation(documents)
    array = pa.array(texts, pa.large_string())
    minhash_bands(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    # 62 and 18, 2026-11-24, 2 busy cores; 43 and 15 on other text, 2026-11-23.
    for peer, work, floor in (("datasketch", with_datasketch, 30), ("rensa", with_rensa, 10)):
        ours = rate(lambda: minhash_bands(array), texts)
        yield against(peer, ours, work, texts[:PEER_DOCUMENTS], floor)


def against(peer: str, ours: float, work: Callable[[Sequence[str]], Any], texts: list[str], floor: float) -> Row:
    """The row of one peer, empty where it is not installed."""
    if find_spec(peer) is None:
        return row(f"minhash_vs_{peer}", ours, None, "MB/s", f"{peer} is not installed")
    return row(f"minhash_vs_{peer}", ours, rate(lambda: work(texts), texts), "MB/s", floor=floor)


def minhash_bands(texts: pa.Array) -> Any:
    """Band keys from text, as `dedup` makes them."""
    sets = shingle_sets(texts, SECTION.ngram)
    return band_keys(signatures(sets, PERMUTATIONS, SECTION.seed), SECTION.bands, SECTION.rows)


def word_ngrams(text: str) -> set[str]:
    """The peers' shingles: words in lower case, between spaces."""
    words = text.lower().split()
    return {" ".join(words[at : at + SECTION.ngram]) for at in range(max(1, len(words) - SECTION.ngram + 1))}


def with_datasketch(texts: Sequence[str]) -> None:
    """Signatures by datasketch, a document's shingles in one batch."""
    from datasketch import MinHash

    for text in texts:
        shingles = [shingle.encode() for shingle in word_ngrams(text)]
        MinHash(PERMUTATIONS, seed=SECTION.seed, scheme="affine32").update_batch(shingles)


def with_rensa(texts: Sequence[str]) -> None:
    """Signatures by rensa over all shingles of every document, all documents in one call."""
    from rensa import RMinHash

    RMinHash.digest_matrix_from_token_sets([word_ngrams(text) for text in texts], PERMUTATIONS, SECTION.seed)
