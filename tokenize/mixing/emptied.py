"""The ledger after rows were emptied: which documents are in a row still, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.row_groups import read_matching
from gristmill.tokenize.mixing.candidates import Candidates
from gristmill.tokenize.mixing.draws import id_words, word_ids
from gristmill.tokenize.mixing.exclusion import among
from gristmill.tokenize.packed_files import ids_name

EXCLUDED, WITHHELD = "excluded", "withheld"
"""Reasons in the ledger: on the list itself; in no row but emptied ones."""


def without_emptied(
    candidates: Candidates, used: np.ndarray, out: Path, entries: Sequence[Mapping[str, Any]], excluded: Sequence[bytes]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Which documents are in a row still, and why the others are not.

    Args:
        candidates: all documents.
        used: bool of shape (n,): laid out.
        out: the packed set's folder, its shards written.
        entries: of all shards, training and held out.
        excluded: document ids.

    Returns:
        bool of shape (n,), and EXCLUDED and WITHHELD, bool of shape (n,).
    """
    on_list = _marked(candidates, excluded)
    touched = [bytes.fromhex(one) for entry in entries for one in entry.get("touched", ())]
    still = [one for entry in entries
             for one in read_matching(out / ids_name(entry["file"]), "id", touched, ["id"])["id"].to_pylist()]
    gone = used & ~on_list & _marked(candidates, touched) & ~_marked(candidates, still)
    return used & ~on_list & ~gone, {EXCLUDED: on_list, WITHHELD: gone}


def _marked(candidates: Candidates, documents: Collection[bytes]) -> np.ndarray:
    """Which candidates (bool) are among some documents."""
    words = candidates.documents.words
    wanted = id_words(pa.array(sorted(set(documents)), pa.binary(ID_BYTES)))
    near = np.isin(words[:, 0], wanted[:, 0])
    marked = np.zeros(len(words), dtype=bool)
    hit = among(word_ids(words[near]), documents).to_numpy(zero_copy_only=False)
    marked[np.flatnonzero(near)[np.asarray(hit, dtype=bool)]] = True
    return marked
