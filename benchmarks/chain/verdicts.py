"""Whose documents are kept: ours and datatrove's of the same corpus, document by document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from benchmarks.chain.our_chain import Chain
from benchmarks.chain.pages import FILE_DOCUMENTS
from gristmill.dataprep.documents import combine_annotations, read_annotations, read_table, shard_names
from gristmill.flows.questions.find_documents import committed_inputs

STEPS = ("filter", "dedup", "langid", "quality")


@dataclass(frozen=True)
class Kept:
    """What a side kept of n documents.

    Attributes:
        ruled: bool of shape (n,): what the rules kept.
        alike: bool of shape (n,): of these, what has a duplicate among them.
        last: bool of shape (n,): what came through the whole chain.
        reasons: per document the rule that dropped it, or None; only of ours.
    """

    ruled: np.ndarray
    alike: np.ndarray
    last: np.ndarray
    reasons: np.ndarray


def nothing(documents: int) -> Kept:
    """Before anything is known."""
    ruled, alike, last = (np.zeros(documents, bool) for _ in range(3))
    return Kept(ruled, alike, last, np.full(documents, None))


def ours(chain: Chain, documents: int) -> Kept:
    """Ours, from the annotations of a finished run."""
    session = chain.session()
    inputs = committed_inputs(session, session.plan)
    kept = nothing(documents)
    for shard in shard_names(inputs["ingest"]):
        table = read_table(inputs["ingest"] / shard, ["id", "locator"])
        numbers = np.array([_number(locator) for locator in table["locator"].to_pylist()])
        filtered = read_annotations(inputs, shard, "filter", ["keep", "reason"])
        alike = read_annotations(inputs, shard, "dedup", ["cluster_size", "duplicate_of"])
        kept.ruled[numbers] = pc.fill_null(filtered["keep"], False).to_numpy()
        kept.reasons[numbers] = filtered["reason"].to_numpy()
        is_alike = pc.or_(pc.is_valid(alike["duplicate_of"]), pc.greater(pc.fill_null(alike["cluster_size"], 1), 1))
        kept.alike[numbers] = is_alike.to_numpy()
        kept.last[numbers] = combine_annotations(inputs, shard, table["id"]).keep
    return kept


def _number(locator: str) -> int:
    """The page's number: its locator is its file and its line there, counted from 1."""
    file, _, place = locator.rpartition("#")
    return int(Path(file).stem) * FILE_DOCUMENTS + int(place) - 1


def datatroves(out: Path, documents: int) -> Kept:
    """datatrove's, from the ids that its pipeline wrote down and the clusters of its third step of MinHash."""
    kept = nothing(documents)
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
    """How two sides agree, in shares of the documents, and what of the difference is known.

    Attributes:
        rules: of all documents, those with the same verdict of the rules.
        alike: of those that both sides' rules kept, those that have a duplicate on both sides or on neither.
        numbers: kept at the end by us and by them.
        last: of all documents, those that both sides keep in the end, or neither; one member of a cluster is as good
            as another.
        why: in words.
    """

    rules: float
    alike: float
    last: float
    numbers: tuple[int, int]
    why: str


def compare(mine: Kept, theirs: Kept) -> Agreement:
    """Compare two sides."""
    both = mine.ruled & theirs.ruled
    differ = np.flatnonzero(mine.ruled != theirs.ruled)
    by_rule = Counter(str(mine.reasons[row] or "kept by us") for row in differ)
    alike = (mine.alike == theirs.alike)[both]
    # Of a cluster each side keeps one, and not the same one.
    survivors = (mine.last != theirs.last) & both & mine.alike & theirs.alike
    same = (mine.last == theirs.last) | survivors
    why = [
        f"rules differ on {len(differ)} documents"
        + (f" ({', '.join(f'{rule} {number}' for rule, number in by_rule.most_common(3))})" if by_rule else ""),
        f"duplicates on {int((~alike).sum())} (hashes of other seeds and shingles)",
        f"{int(survivors.sum())} are a cluster's survivor on one side, for which the other kept another member",
    ]
    return Agreement(
        1 - len(differ) / len(both),
        float(alike.mean()),
        float(same.mean()),
        (int(mine.last.sum()), int(theirs.last.sum())),
        "; ".join(why),
    )
