"""How well near-duplicates are found: among labelled revisions of real documents, and planted at known similarities.

The labelled pairs are revisions of Python Enhancement Proposals with their exact Jaccard similarities, computed by
other code; the peer of the links is datasketch's `MinHashLSH` with as many permutations, left to choose its own bands.
Links are not yet what is lost: of the documents that the stage drops it is counted how many are as alike to the one
that is kept for them as the threshold says, and of the labelled pairs how many are both kept; the peer is the rule
`clusters: connected`, single linkage, on the same links. Of the
planted pairs the peer is the theory: 1 - (1 - J^rows)^bands pairs share a band (Leskovec et al., section 3.4), and the
share of equal permutations deviates from J by sqrt(J (1 - J) / permutations) (Broder 1997).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.bench_minhash import word_ngrams
from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, read_table, write_table
from gristmill.dataprep.duplicates import dedup
from gristmill.dataprep.duplicates.links import candidate_pairs
from gristmill.dataprep.duplicates.minhash import band_keys, signatures
from gristmill.dataprep.duplicates.shingles import shingle_sets, similarities
from gristmill.mixtures.dedup import MinHash

SECTION = MinHash()
PERMUTATIONS = SECTION.bands * SECTION.rows
STEPS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Similarities of the planted pairs."""
PAIRS_PER_STEP = 1000
WORDS = 400
Pair = tuple[int, int]


def rows() -> Iterator[dict[str, Any]]:
    """Measure recall and precision on the labelled pairs, and recall and the estimate's error on the planted ones."""
    folder = data_folder() / "dedup" / "pep_revisions"
    if (folder / "docs.jsonl.zst").exists():
        yield from labelled_rows(folder)
    else:
        yield {"name": "near duplicates: labelled revisions", "ours": None, "peer": None, "unit": "", "ratio": None,
               "note": f"{folder} has no labelled pairs"}  # fmt: skip
    yield from planted_rows()


def labelled_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Recall and precision of links over the pairs whose similarity reaches the threshold, and what the rules drop."""
    documents = {row["id"]: row["text"] for row in read_lines(folder / "docs.jsonl.zst")}
    names = {identity: number for number, identity in enumerate(documents)}
    truth = {
        _pair(names[row["a"]], names[row["b"]])
        for row in read_lines(folder / "pairs.jsonl.zst") if row["jaccard_w5"] >= SECTION.threshold
    }  # fmt: skip
    texts = list(documents.values())
    ours, peer = found_pairs(texts), found_by_datasketch(texts)
    measures = {"recall": len(truth), "precision": None}
    for name, of in measures.items():
        our_share, peer_share = (len(truth & found) / (of or len(found)) for found in (ours, peer))
        yield {"name": f"near duplicates, revisions: {name}", "ours": our_share, "peer": peer_share,
               "unit": "of links", "ratio": our_share / peer_share, "note": "peer: datasketch"}  # fmt: skip
    (right, left), (right_peer, left_peer) = (judge_rule(texts, truth, rule) for rule in ("survivors", "connected"))
    yield {"name": "near duplicates, revisions: dropped for one that is alike", "ours": right, "peer": right_peer,
           "unit": "of dropped", "ratio": right / right_peer, "note": "peer: clusters: connected"}  # fmt: skip
    yield {"name": "near duplicates, revisions: alike and both kept", "ours": left, "peer": left_peer,
           "unit": "of pairs", "ratio": left_peer / left if left else None,
           "note": "peer: clusters: connected"}  # fmt: skip


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
        table = pa.table({"id": ids, "source": [""] * len(texts), "locator": places, "text": texts,
                          "metadata": ["{}"] * len(texts)})
        write_table(folder / "ingest" / "part-00000.parquet", table.cast(DOCUMENT_SCHEMA))
        (folder / "work").mkdir()
        dedup.run({"ingest": folder / "ingest"}, {"clusters": rule, "index": False}, folder / "out",
                  Context(work=folder / "work", emit=lambda event: None))
        twins = read_table(folder / "out" / "clusters.parquet", ["member_locator", "survivor_locator"]).to_pylist()
    pairs = [(int(twin["member_locator"]), int(twin["survivor_locator"])) for twin in twins]
    gone = {member for member, _ in pairs}
    right = sum(_pair(*pair) in truth for pair in pairs)
    return right / len(pairs), sum(gone.isdisjoint(pair) for pair in truth) / len(truth)


def planted_rows() -> Iterator[dict[str, Any]]:
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
        yield {"name": f"near duplicates, planted: recall at {jaccard.mean():.2f}", "ours": recall, "peer": theory,
               "unit": "of pairs", "ratio": recall / theory, "note": "peer: theory"}  # fmt: skip
    error, expected = (float(np.sqrt(np.concatenate(values).mean())) for values in (np.square(errors), variances))
    yield {"name": "near duplicates, planted: estimate's error", "ours": error, "peer": expected,
           "unit": "RMS", "ratio": expected / error, "note": "peer: theory"}  # fmt: skip


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
