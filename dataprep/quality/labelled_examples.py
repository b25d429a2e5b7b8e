"""Selection of the training and held-out examples of quality models, by a hash of their
ids.

Files may be in fastText's training format: leading labels are removed, since the
manifest determines a file's class.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.core.files import as_path
from gristmill.dataprep.documents import (
    Inputs,
    document_id,
    judged_rows,
    read_documents,
    read_shard,
    shard_names,
)
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    RecordTooLongError,
    read_lines,
)
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import Page, Reading, Record, Rejected
from gristmill.dataprep.readers.sources import SourceFile, find_files
from gristmill.mixtures.schema.sources import DocumentFiles
from gristmill.mixtures.steps.quality import Classifier

LABELS = re.compile(r"^(?:__label__\S+\s+)+")


class LabelledFileError(ValueError):
    """A file of labelled texts that cannot be read completely."""


def expand_files(key: str, paths: Sequence[str]) -> list[SourceFile]:
    """Files that paths, globs or folders match, ordered by path and then by name.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: a path matches nothing, or a
            file's format is unknown.
    """
    return [
        file
        for path in paths
        for file in find_files(key, DocumentFiles.model_validate({"path": path})).files
    ]


def read_labelled(file: SourceFile) -> Iterator[str]:
    """Yield the texts of a file, without blank lines.

    Raises:
        LabelledFileError: a record cannot be read; it is not skipped, so that training
            never uses part of a file.
    """
    if file.format == "text":
        line_count = 0
        try:
            for line in read_lines(as_path(file.location), file.compression):
                if isinstance(line, RecordTooLongError):
                    raise line
                text = LABELS.sub("", line.decode("utf-8")).strip()
                line_count += 1
                if text:
                    yield text
        except (CorruptFileError, RecordTooLongError, UnicodeDecodeError) as error:
            raise LabelledFileError(
                f"{file.location}, line {line_count + 1}: {error}; correct or remove it"
            ) from error
        return
    for record in read_records(file, Reading(encoding_errors="strict")):
        if isinstance(record, Record):
            yield record.text
        elif isinstance(record, Rejected | Page):
            problem = (
                f"{record.error}; correct or remove it"
                if isinstance(record, Rejected)
                else "it is HTML; name a file of its text"
            )
            raise LabelledFileError(
                f"{file.location}, record {record.number}: {problem}"
            )


Members = tuple[int, np.ndarray, np.ndarray]
"""Documents of one class: number of a shard or file, int64 rows in it, and their draws
(see `draw`).
"""


class QualityError(ValueError):
    """The classifier has nothing to learn from."""


@dataclass(frozen=True)
class Examples:
    """Texts of one class in the order of their use: row `rows[i]` of part `parts[i]` of
    a pool.
    """

    parts: np.ndarray
    """int64 of shape (n,): indices of a pool's parts."""
    rows: np.ndarray
    """int64 of shape (n,)."""
    order: np.ndarray
    """uint64 of shape (n,), ascending: the hashes that order the examples."""


@dataclass(frozen=True)
class Pool:
    """Parts that examples come from: the document shards, then the labelled files."""

    inputs: Inputs
    shards: Sequence[str]
    files: Mapping[bool, Sequence[SourceFile]]
    """True for positive -> files of the class."""

    def texts(self, part: int, rows: np.ndarray) -> list[str]:
        """Texts of some rows of one part."""
        if part < len(self.shards):
            return (
                read_documents(self.inputs, self.shards[part], ["text"])["text"]
                .take(rows)
                .to_pylist()
            )
        files = [*self.files[True], *self.files[False]]
        texts = list(read_labelled(files[part - len(self.shards)]))
        return [texts[row] for row in rows.tolist()]

    def read(self, examples: Examples) -> Iterator[tuple[np.ndarray, list[str]]]:
        """Read examples part by part: their positions among the examples, and their
        texts.
        """
        for part in np.unique(examples.parts).tolist():
            places = np.flatnonzero(examples.parts == part)
            yield places, self.texts(part, examples.rows[places])


def open_pool(inputs: Inputs, section: Classifier) -> Pool:
    """Pool of a classifier's classes.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: a path matches nothing.
    """
    files = {
        True: expand_files("quality.classifier.positive_files", section.positive_files),
        False: expand_files(
            "quality.classifier.negative_files", section.negative_files
        ),
    }
    return Pool(inputs, shard_names(inputs["ingest"]), files)


def choose_examples(
    pool: Pool, section: Classifier, seed: int
) -> dict[bool, tuple[Examples, Examples]]:
    """Choose training and held-out examples: True for positive -> (training, held out).

    Raises:
        QualityError: a class has fewer than two documents.
    """
    classes = {True: section.positive, False: section.negative}
    members_by_class: dict[bool, list[Members]] = {True: [], False: []}
    for number, shard in enumerate(pool.shards):
        read = read_shard(pool.inputs, shard, ["id", "source"])
        for is_positive, sources in classes.items():
            rows = judged_rows(read.documents, read.rows, sources)
            ids = read.documents["id"].take(rows).to_pylist()
            members_by_class[is_positive].append((number, rows, draw(ids, seed)))
    number = len(pool.shards)
    for is_positive, files in pool.files.items():
        for file in files:
            ids = [document_id("", "", text) for text in read_labelled(file)]
            members = (number, np.arange(len(ids)), draw(ids, seed))
            members_by_class[is_positive].append(members)
            number += 1
    chosen: dict[bool, tuple[Examples, Examples]] = {}
    for is_positive, members_of_class in members_by_class.items():
        sizes = [len(part_rows) for _, part_rows, _ in members_of_class]
        if sum(sizes) < 2:
            name = "positive" if is_positive else "negative"
            sources = getattr(section, name)
            files = getattr(section, f"{name}_files")
            raise QualityError(
                f"quality: the {name} sources ({', '.join((*sources, *files))}) have "
                f"{sum(sizes)} documents left, at least 2 are needed; name other "
                f"sources as `{name}:`, or loosen the stages before"
            )
        parts = np.repeat([number for number, _, _ in members_of_class], sizes)
        rows = np.concatenate([part_rows for _, part_rows, _ in members_of_class])
        draws = np.concatenate([part_draws for _, _, part_draws in members_of_class])
        training, held_out = (
            Examples(parts[positions], rows[positions], draws[positions, 1])
            for positions in split_draws(draws, section.holdout, section.max_documents)
        )
        chosen[is_positive] = training, held_out
    return chosen


def draw(ids: Sequence[bytes], seed: int) -> np.ndarray:
    """Two uniform 64-bit numbers per document that depend only on the seed and its id:
    uint64 of shape (n, 2).
    """
    key = seed.to_bytes(16, "little", signed=True)
    digests = b"".join(
        hashlib.blake2b(identity, digest_size=16, key=key).digest() for identity in ids
    )
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def split_draws(
    draws: np.ndarray, holdout: float, max_documents: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split at least two documents into training and held-out documents, neither of
    them empty.

    Args:
        draws: uint64 of shape (n, 2): the first number decides the part of a document,
            the second its order.
        holdout: share of held-out documents.
        max_documents: largest number in each part; the first by order are kept.

    Returns:
        positions of the training and of the held-out documents, in order.
    """
    order = np.lexsort((draws[:, 0], draws[:, 1]))
    is_held_out = draws[order, 0] < np.uint64(holdout * 2.0**64)
    if is_held_out.all() or not is_held_out.any():
        is_held_out[-1] = not is_held_out[-1]
    return order[~is_held_out][:max_documents], order[is_held_out][:max_documents]
