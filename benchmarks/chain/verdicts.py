"""Verdicts on the documents of a corpus, ours and datatrove's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from benchmarks.chain.our_chain import Chain
from benchmarks.chain.pages import FILE_DOCUMENTS
from gristmill.dataprep.documents import (
    combine_annotations,
    read_annotations,
    read_table,
    shard_names,
)
from gristmill.flows.questions.find_documents import committed_inputs


@dataclass(frozen=True)
class Kept:
    """Verdicts of a side on n documents.

    Attributes:
        ruled: bool, (n,): kept by the rules.
        alike: bool, (n,): kept by the rules, with a duplicate among these.
        last: bool, (n,): kept by the whole chain.
        reasons: rule that dropped each document, or None; only of ours.
    """

    ruled: np.ndarray
    alike: np.ndarray
    last: np.ndarray
    reasons: np.ndarray


def no_verdicts(documents: int) -> Kept:
    """Return verdicts that keep nothing."""
    ruled, alike, last = (np.zeros(documents, bool) for _ in range(3))
    return Kept(ruled, alike, last, np.full(documents, None))


def our_verdicts(chain: Chain, documents: int) -> Kept:
    """Read our verdicts from the annotations of a finished run."""
    session = chain.session()
    inputs = committed_inputs(session)
    kept = no_verdicts(documents)
    for shard in shard_names(inputs["ingest"]):
        table = read_table(inputs["ingest"] / shard, ["id", "locator"])
        numbers = np.array(
            [_number(locator) for locator in table["locator"].to_pylist()]
        )
        filtered = read_annotations(inputs, shard, "filter", ["keep", "reason"])
        alike = read_annotations(
            inputs, shard, "dedup", ["cluster_size", "duplicate_of"]
        )
        kept.ruled[numbers] = pc.fill_null(filtered["keep"], False).to_numpy()
        kept.reasons[numbers] = filtered["reason"].to_numpy()
        is_alike = pc.or_(
            pc.is_valid(alike["duplicate_of"]),
            pc.greater(pc.fill_null(alike["cluster_size"], 1), 1),
        )
        kept.alike[numbers] = is_alike.to_numpy()
        kept.last[numbers] = combine_annotations(inputs, shard, table["id"]).keep
    return kept


def _number(locator: str) -> int:
    """Return a page's number; its locator is its file and its line, counted from 1."""
    file, _, place = locator.rpartition("#")
    return int(Path(file).stem) * FILE_DOCUMENTS + int(place) - 1


def datatrove_verdicts(out: Path, documents: int) -> Kept:
    """Read datatrove's verdicts from the ids of its pipeline and the clusters of its
    third step of MinHash.
    """
    kept = no_verdicts(documents)
    for file in sorted((out / "ruled-ids").glob("*.ids")):
        ids = _read_ids(file)
        kept.ruled[ids] = True
        clusters = out / "removed" / f"{int(file.stem):06d}.clusters"
        if clusters.exists():
            kept.alike[ids[np.fromfile(clusters, "<u4").reshape(-1, 2)[:, 0]]] = True
    for file in sorted((out / "kept-ids").glob("*.ids")):
        kept.last[_read_ids(file)] = True
    return kept


def _read_ids(file: Path) -> np.ndarray:
    return np.array(file.read_text(encoding="ascii").split(), np.int64)


@dataclass(frozen=True)
class Agreement:
    """Agreement of two sides, in shares of documents.

    Attributes:
        rules: of all documents, those with the same verdict of the rules.
        alike: of those that both sides' rules kept, those with a duplicate on both
            sides or on neither.
        kept: of all documents, those that both sides keep in the end, or neither;
            members of a cluster are interchangeable.
        kept_by_us, kept_by_peer: numbers of documents kept in the end.
        differences: in words.
    """

    rules: float
    alike: float
    kept: float
    kept_by_us: int
    kept_by_peer: int
    differences: str


def compare(ours: Kept, peer: Kept) -> Agreement:
    """Compare two sides."""
    both_ruled = ours.ruled & peer.ruled
    differing = np.flatnonzero(ours.ruled != peer.ruled)
    by_rule = Counter(str(ours.reasons[row] or "kept by us") for row in differing)
    same_alike = (ours.alike == peer.alike)[both_ruled]
    # Each side keeps one member of a cluster, and not the same one.
    survivors = (ours.last != peer.last) & both_ruled & ours.alike & peer.alike
    same_last = (ours.last == peer.last) | survivors
    rules = f"rules differ on {len(differing)} documents"
    if by_rule:
        rules += f" ({', '.join(f'{rule} {number}' for rule, number in by_rule.most_common(3))})"
    differences = [
        rules,
        f"duplicates on {int((~same_alike).sum())} (hashes of other seeds and shingles)",
        f"{int(survivors.sum())} are a cluster's survivor on one side, for which the "
        "other kept another member",
    ]
    return Agreement(
        rules=1 - len(differing) / len(both_ruled),
        alike=float(same_alike.mean()),
        kept=float(same_last.mean()),
        kept_by_us=int(ours.last.sum()),
        kept_by_peer=int(peer.last.sum()),
        differences="; ".join(differences),
    )
