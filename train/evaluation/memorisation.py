"""Memorisation of the training set: the model must continue the beginning of a
document.

Extractable memorisation of Carlini et al. 2022 ("Quantifying memorization across neural
language models"): with a prefix of p tokens the greedy continuation equals the
document's next s tokens. Results are grouped by the document's copies in the training
set; held-out documents are the baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.mixtures.sections.evaluation import Memorisation
from gristmill.train.evaluation.answering import PROMPTS_PER_BATCH, Reader
from gristmill.train.evaluation.intervals import Estimate, mean_with_interval
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.batch_plan import slices
from gristmill.train.loop.rows_read import RowsRead

ROWS_PER_DOCUMENT = 8
"""Rows searched per document to probe."""
COPIES = (1, 2, 4, 8, 16, 64, 256)
"""Lower bounds of the groups by number of copies."""
HELD_OUT = "held out"


@dataclass(frozen=True)
class MemorisedGroup:
    """Memorisation of documents with similarly many copies.

    Attributes:
        documents: number of probed documents.
        memorised: share of these that are memorised.
        mean_right_tokens: leading tokens continued correctly.
    """

    documents: int
    memorised: Estimate
    mean_right_tokens: float


def probe_memorisation(
    reader: Reader,
    trained: RowsRead,
    section: Memorisation,
    seed: int,
    bootstrap_samples: int,
) -> dict[str, MemorisedGroup]:
    """Probe training documents, grouped by number of copies read, and held-out
    documents. Groups without a long enough document are absent.
    """
    size = section.prefix_tokens + section.suffix_tokens
    parts = [np.empty((0, size), dtype=np.int64)]
    for source in trained.packed.manifest["validation"]:
        pieces = _beginnings(trained.packed.validation_pieces(source), section)
        tokens = trained.packed.validation(source)[pieces["row"].to_numpy()]
        parts.append(_tokens(tokens, pieces, section))
    groups = {
        **_trained(trained, section, seed),
        HELD_OUT: np.concatenate(parts)[: section.documents],
    }
    results = {}
    for name, texts in groups.items():
        if not len(texts):
            continue
        num_right = []
        for part in slices(len(texts), PROMPTS_PER_BATCH):
            batch = texts[part]
            # In training, every document follows an end-of-text token.
            prompts: Sequence[list[int]] = [
                [reader.prefix, *row[: section.prefix_tokens].tolist()] for row in batch
            ]
            continued = generate(reader.model, prompts, section.suffix_tokens, ())
            for row, ids in zip(batch, continued, strict=True):
                expected = row[section.prefix_tokens :].tolist()
                agree = [
                    token == expected_token
                    for token, expected_token in zip(ids, expected, strict=False)
                ]
                num_right.append(agree.index(False) if False in agree else len(agree))
        right = np.array(num_right)
        memorised = mean_with_interval(
            right == section.suffix_tokens, seed, bootstrap_samples
        )
        results[name] = MemorisedGroup(len(texts), memorised, float(right.mean()))
    return results


def _trained(
    trained: RowsRead, section: Memorisation, seed: int
) -> dict[str, np.ndarray]:
    """Beginnings (n, prefix + suffix) of documents in rows that were read, by group,
    chosen by hash.
    """
    packed = trained.packed
    rows = trained.drawn(section.documents * ROWS_PER_DOCUMENT * len(COPIES), seed)
    pieces = _beginnings(packed.pieces(rows), section)
    if not len(pieces):
        return {}
    ids = pieces["id"].to_pylist()
    everywhere = packed.rows_of_documents(set(ids))
    read = everywhere.filter(pa.array(trained.holds(everywhere["row"].to_numpy())))
    copies = Counter(
        document
        for document, _ in set(
            zip(read["id"].to_pylist(), read["copy"].to_pylist(), strict=True)
        )
    )
    number = np.array([copies[document] for document in ids])
    groups = {}
    for first, following in zip(COPIES, (*COPIES[1:], np.inf), strict=True):
        chosen = np.flatnonzero((number >= first) & (number < following))[
            : section.documents
        ]
        if len(chosen):
            beginnings = pieces.take(chosen)
            tokens = packed.read(beginnings["row"].to_numpy())
            name = f"{first} to {following - 1:.0f} copies"
            if following == first + 1:
                name = f"{first} cop{'y' if first == 1 else 'ies'}"
            elif following == np.inf:
                name = f"{first} copies or more"
            groups[name] = _tokens(tokens, beginnings, section)
    return groups


def _beginnings(pieces: pa.Table, section: Memorisation) -> pa.Table:
    """Pieces that begin a document and are long enough, one per document."""
    size = section.prefix_tokens + section.suffix_tokens
    begins = (pieces["offset"].to_numpy() == 0) & (pieces["length"].to_numpy() > size)
    pieces = pieces.filter(pa.array(begins))
    _, first = np.unique(pieces["id"].to_numpy(zero_copy_only=False), return_index=True)
    return pieces.take(np.sort(first))


def _tokens(rows: np.ndarray, pieces: pa.Table, section: Memorisation) -> np.ndarray:
    """Beginnings of pieces, (n, prefix + suffix) int64, from the tokens of their rows
    (n, t).
    """
    columns = pieces["start"].to_numpy()[:, None] + np.arange(
        section.prefix_tokens + section.suffix_tokens
    )
    return np.take_along_axis(rows, columns, axis=1).astype(np.int64)
