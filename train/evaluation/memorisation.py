"""How much of the training set a model has memorised: it gets the beginning of a document and must continue it.

Extractable memorisation of Carlini et al. 2022 ("Quantifying memorization across neural language models"): with a
prefix of p tokens the greedy continuation equals the document's next s tokens. Told apart by how often the document
stands in the training set; held-out documents show what a model continues without having seen it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.mixtures.evaluation import Memorisation
from gristmill.tokenize.packed import PackedSet
from gristmill.train.evaluation.answering import PROMPTS_PER_BATCH, Reader
from gristmill.train.evaluation.intervals import mean_with_interval
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.rows_read import RowsRead

ROWS_PER_DOCUMENT = 8
"""So many rows are looked through for each document that is wanted."""
COPIES = (1, 2, 4, 8, 16, 64, 256)
"""Groups by number of copies begin at these."""
HELD_OUT = "held out"


def probe_memorisation(
    reader: Reader, trained: RowsRead, section: Memorisation, seed: int, bootstrap_samples: int
) -> dict[str, Any]:
    """Probe documents that were trained on, by the copies that were read, and held-out ones.

    Returns:
        group -> documents, the share that was memorised (with its interval) and the mean number of tokens
        that were right from the start. Groups without a long enough document are absent.
    """
    groups = {**_trained(trained, section, seed), HELD_OUT: _held_out(trained.packed, section)}
    found = {}
    for name, texts in groups.items():
        if not len(texts):
            continue
        right = np.array(_right_tokens(reader, texts, section))
        whole = mean_with_interval(right == section.suffix_tokens, seed, bootstrap_samples)
        found[name] = {"documents": len(texts), "memorised": whole, "mean_right_tokens": float(right.mean())}
    return found


def _trained(trained: RowsRead, section: Memorisation, seed: int) -> dict[str, np.ndarray]:
    """Group -> beginnings (n, prefix + suffix) of documents of rows that were read, chosen by hash."""
    packed = trained.packed
    rows = trained.drawn(section.documents * ROWS_PER_DOCUMENT * len(COPIES), seed)
    pieces = _beginnings(packed.pieces(rows), section)
    if not len(pieces):
        return {}
    ids = pieces["id"].to_pylist()
    everywhere = packed.rows_of_documents(set(ids))
    read = everywhere.filter(pa.array(trained.holds(everywhere["row"].to_numpy())))
    copies = Counter(one for one, _ in set(zip(read["id"].to_pylist(), read["copy"].to_pylist(), strict=True)))
    number = np.array([copies[one] for one in ids])
    groups: dict[str, np.ndarray] = {}
    for first, following in zip(COPIES, (*COPIES[1:], np.inf), strict=True):
        chosen = np.flatnonzero((number >= first) & (number < following))[: section.documents]
        if len(chosen):
            groups[_name(first, following)] = _tokens(packed.read, pieces.take(chosen), section)
    return groups


def _held_out(packed: PackedSet, section: Memorisation) -> np.ndarray:
    size = section.prefix_tokens + section.suffix_tokens
    parts = [np.empty((0, size), dtype=np.int64)]
    for source in packed.manifest["validation"]:
        rows = packed.validation(source)
        pieces = _beginnings(packed.validation_pieces(source), section)
        parts.append(_tokens(lambda which, rows=rows: rows[which], pieces, section))
    return np.concatenate(parts)[: section.documents].astype(np.int64)


def _beginnings(pieces: pa.Table, section: Memorisation) -> pa.Table:
    """Pieces that begin a document and are long enough, one per document."""
    size = section.prefix_tokens + section.suffix_tokens
    begins = (pieces["offset"].to_numpy() == 0) & (pieces["length"].to_numpy() > size)
    pieces = pieces.filter(pa.array(begins))
    _, first = np.unique(pieces["id"].to_numpy(zero_copy_only=False), return_index=True)
    return pieces.take(np.sort(first))


def _tokens(read: Any, pieces: pa.Table, section: Memorisation) -> np.ndarray:
    rows, start = pieces["row"].to_numpy(), pieces["start"].to_numpy()
    columns = start[:, None] + np.arange(section.prefix_tokens + section.suffix_tokens)
    found: np.ndarray = np.take_along_axis(np.asarray(read(rows)), columns, axis=1).astype(np.int64)
    return found


def _right_tokens(reader: Reader, texts: np.ndarray, section: Memorisation) -> list[int]:
    """Per document, how many tokens of its continuation are right from the start."""
    found: list[int] = []
    for start in range(0, len(texts), PROMPTS_PER_BATCH):
        batch = texts[start : start + PROMPTS_PER_BATCH]
        # Every document follows an end of text in training.
        prompts: Sequence[list[int]] = [[reader.prefix, *row[: section.prefix_tokens].tolist()] for row in batch]
        continued = generate(reader.model, prompts, section.suffix_tokens, ())
        for row, ids in zip(batch, continued, strict=True):
            wanted = row[section.prefix_tokens :].tolist()
            agree = [one == other for one, other in zip(ids, wanted, strict=False)]
            found.append(agree.index(False) if False in agree else len(agree))
    return found


def _name(first: int, following: float) -> str:
    if following == first + 1:
        return f"{first} cop{'y' if first == 1 else 'ies'}"
    return f"{first} copies or more" if following == np.inf else f"{first} to {int(following) - 1} copies"
