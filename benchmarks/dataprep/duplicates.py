"""Recall and precision of near-duplicates: labelled revisions of real documents, and
pairs planted at known similarity.

The labelled pairs are revisions of Python Enhancement Proposals with their exact
Jaccard similarities, computed by other code; the peer of the links is datasketch's
`MinHashLSH` with as many permutations, which chooses its own bands. Links are not yet
losses: further rows have the share of dropped documents that are similar enough to the
one kept for them, and the share of labelled pairs that are both kept; the peer is the
rule `clusters: connected`, single linkage, on the same links. The peer of the planted
pairs is the theory: 1 - (1 - J^rows)^bands pairs share a band (Leskovec et al., section
3.4), and the share of equal permutations deviates from J by sqrt(J (1 - J) /
permutations) (Broder 1997).

For speed, each peer computes as many permutations over word 5-grams as its
documentation does, in its fastest exact form. rensa's faster `rho` entry points are not
peers: they read only a few positions of a long document, so that one inserted word
hides a duplicate.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.stage_runs import stage_runs, write_shard
from benchmarks.dataprep.texts import rate
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, cost_row, row
from benchmarks.public_data import read_records
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup.candidate_pairs import candidate_pairs
from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import shingle_sets, similarities
from gristmill.dataprep.documents import read_table
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
    """Measure recall and precision on labelled pairs, and recall and the estimate's
    error on planted ones.
    """
    folder = data_folder() / "dedup" / "pep_revisions"
    if (folder / "docs.jsonl.zst").exists():
        yield from labelled_rows(folder)
    else:
        yield row(
            "near duplicates: labelled revisions",
            None,
            None,
            "",
            f"{folder} has no labelled pairs",
        )
    yield from planted_rows()


def labelled_rows(folder: Path) -> Iterator[Row]:
    """Measure recall and precision of links for pairs above the threshold, and the
    documents that the rules drop.
    """
    documents = {
        record["id"]: record["text"]
        for record in read_records(folder / "docs.jsonl.zst")
    }
    numbers = {identity: number for number, identity in enumerate(documents)}
    truth = {
        _pair(numbers[record["a"]], numbers[record["b"]])
        for record in read_records(folder / "pairs.jsonl.zst")
        if record["jaccard_w5"] >= SECTION.threshold
    }
    texts = list(documents.values())
    ours, peer = linked_pairs(texts), linked_by_datasketch(texts)
    our_hits, peer_hits = len(truth & ours), len(truth & peer)
    name, note = "near duplicates, revisions", "peer: datasketch"
    yield row(
        f"{name}: recall",
        our_hits / len(truth),
        peer_hits / len(truth),
        "of links",
        note,
    )
    yield row(
        f"{name}: precision",
        our_hits / len(ours),
        peer_hits / len(peer),
        "of links",
        note,
    )
    right, both_kept = judge_rule(texts, truth, "survivors")
    peer_right, peer_both_kept = judge_rule(texts, truth, "connected")
    note = "peer: clusters: connected"
    yield row(
        f"{name}: dropped for one that is alike", right, peer_right, "of dropped", note
    )
    yield cost_row(
        f"{name}: alike and both kept", both_kept, peer_both_kept, "of pairs", note
    )


def judge_rule(
    texts: Sequence[str], truth: set[Pair], rule: str
) -> tuple[float, float]:
    """Run the stage on texts with a rule of `clusters`.

    Args:
        texts: documents.
        truth: pairs of similar texts, by number.
        rule: its name.

    Returns:
        the share of dropped texts that are similar to the text kept for them, and the
        share of pairs that are both kept.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shard(folder / "ingest", 0, texts)
        run = stage_runs(
            dedup.run,
            {"ingest": folder / "ingest"},
            {"clusters": rule, "index": False},
            folder,
        )()
        twins = read_table(
            run.out / "clusters.parquet", ["member_locator", "survivor_locator"]
        ).to_pylist()
    pairs = [
        (_row_of(twin["member_locator"]), _row_of(twin["survivor_locator"]))
        for twin in twins
    ]
    dropped = {member for member, _ in pairs}
    right = sum(_pair(*pair) in truth for pair in pairs)
    return right / len(pairs), sum(dropped.isdisjoint(pair) for pair in truth) / len(
        truth
    )


def _row_of(locator: str) -> int:
    return int(locator.partition("/")[2])


def planted_rows() -> Iterator[Row]:
    """Measure recall of pairs by similarity, and the error of the estimated similarity,
    against the theory.
    """
    errors, variances = [], []
    for step in STEPS:
        sets = shingle_sets(
            pa.array(
                [text for pair in plant(step) for text in pair], pa.large_string()
            ),
            SECTION.ngram,
        )
        left = np.arange(0, 2 * PAIRS_PER_STEP, 2)
        jaccard = similarities(sets, left, left + 1)
        signature = signatures(sets, PERMUTATIONS, SECTION.seed)
        keys = band_keys(signature, SECTION.bands, SECTION.rows)
        recall = float((keys[left] == keys[left + 1]).any(axis=1).mean())
        theory = float((1 - (1 - jaccard**SECTION.rows) ** SECTION.bands).mean())
        errors.append((signature[left] == signature[left + 1]).mean(axis=1) - jaccard)
        variances.append(jaccard * (1 - jaccard) / PERMUTATIONS)
        yield row(
            f"near duplicates, planted: recall at {jaccard.mean():.2f}",
            recall,
            theory,
            "of pairs",
            "peer: theory",
        )
    error = float(np.sqrt(np.square(np.concatenate(errors)).mean()))
    expected = float(np.sqrt(np.concatenate(variances).mean()))
    yield cost_row(
        "near duplicates, planted: estimate's error",
        error,
        expected,
        "RMS",
        "peer: theory",
    )


def plant(jaccard: float) -> Iterator[tuple[str, str]]:
    """Draw pairs of texts of about this similarity: single words of one are replaced,
    each of which costs n shingles.
    """
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


def linked_pairs(texts: Sequence[str]) -> set[Pair]:
    """Return pairs that share a band and reach the threshold; equal texts count one by
    one.
    """
    sets = shingle_sets(pa.array(texts, pa.large_string()), SECTION.ngram)
    keys = band_keys(
        signatures(sets, PERMUTATIONS, SECTION.seed), SECTION.bands, SECTION.rows
    )
    documents = np.repeat(np.arange(len(texts)), SECTION.bands)
    pairs = candidate_pairs(
        keys.ravel(), documents, documents.astype(np.uint64), documents, len(texts)
    )
    return {
        _pair(a, b)
        for a, b in pairs[
            similarities(sets, pairs[:, 0], pairs[:, 1]) >= SECTION.threshold
        ].tolist()
    }


def linked_by_datasketch(texts: Sequence[str]) -> set[Pair]:
    """Return pairs of datasketch's index, built as in its documentation, for the same
    threshold.
    """
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=SECTION.threshold, num_perm=PERMUTATIONS)
    pairs = set()
    for number, text in enumerate(texts):
        sketch = MinHash(PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in shingles_of(text)])
        pairs |= {_pair(earlier, number) for earlier in index.query(sketch)}
        index.insert(number, sketch)
    return pairs


def _pair(first: int, second: int) -> Pair:
    return min(first, second), max(first, second)


def speed_rows(documents: int = DOCUMENTS) -> Iterator[Row]:
    """Measure MB of UTF-8 per second from text to MinHash bands, against each peer."""
    texts = documentation(documents)
    array = pa.array(texts, pa.large_string())
    minhash_bands(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    # 62 and 18, 2026-11-24, 2 busy cores; 43 and 15 on other text, 2026-11-23.
    for peer, work, floor in (
        ("datasketch", with_datasketch, 30),
        ("rensa", with_rensa, 10),
    ):
        ours = rate(lambda: minhash_bands(array), texts)
        if find_spec(peer) is None:
            yield row(
                f"minhash_vs_{peer}", ours, None, "MB/s", f"{peer} is not installed"
            )
        else:
            yield row(
                f"minhash_vs_{peer}",
                ours,
                peer_rate(work, texts[:PEER_DOCUMENTS]),
                "MB/s",
                floor=floor,
            )


def peer_rate(work: Callable[[Sequence[str]], Any], texts: list[str]) -> float:
    """Return MB of UTF-8 per second of a peer."""
    return rate(lambda: work(texts), texts)


def minhash_bands(texts: pa.Array) -> Any:
    """Compute band keys of texts as `dedup` does."""
    sets = shingle_sets(texts, SECTION.ngram)
    return band_keys(
        signatures(sets, PERMUTATIONS, SECTION.seed), SECTION.bands, SECTION.rows
    )


def shingles_of(text: str) -> set[str]:
    """Return the peers' shingles: words in lower case, between spaces."""
    words = text.lower().split()
    return {
        " ".join(words[at : at + SECTION.ngram])
        for at in range(max(1, len(words) - SECTION.ngram + 1))
    }


def with_datasketch(texts: Sequence[str]) -> None:
    """Compute signatures by datasketch, a document's shingles in one batch."""
    from datasketch import MinHash

    for text in texts:
        shingles = [shingle.encode() for shingle in shingles_of(text)]
        MinHash(PERMUTATIONS, seed=SECTION.seed, scheme="affine32").update_batch(
            shingles
        )


def with_rensa(texts: Sequence[str]) -> None:
    """Compute signatures by rensa over all shingles of every document, all documents in
    one call.
    """
    from rensa import RMinHash

    RMinHash.digest_matrix_from_token_sets(
        [shingles_of(text) for text in texts], PERMUTATIONS, SECTION.seed
    )
