"""Which documents and texts a quality model learns from, and which only measure it: drawn by a hash of their ids.

Lines may be in fastText's training format: labels at their beginning are taken off, since the class is known from
where the file is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import document_id, judged_rows, read_documents, read_shard, shard_names
from gristmill.dataprep.files import as_path
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError, read_lines
from gristmill.dataprep.reading.readers import read_records
from gristmill.dataprep.reading.records import Page, Reading, Record, Rejected
from gristmill.dataprep.reading.sources import SourceFile, find_files
from gristmill.mixtures.steps.quality import Classifier, Quality

LABELS = re.compile(r"^(?:__label__\S+\s+)+")


class LabelledFileError(ValueError):
    """A file of labelled texts that cannot be read whole."""


def expand_files(key: str, paths: Sequence[str]) -> list[SourceFile]:
    """The files that paths, globs or folders name, in the order of the paths and then of the names.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a path matches nothing, or a file's format is not known.
    """
    return [file for path in paths for file in find_files(key, {"path": path}).files]


def read_labelled(file: SourceFile) -> Iterator[str]:
    """The texts of a file; blank lines are none.

    Raises:
        LabelledFileError: a record cannot be read; training on part of a file would look like training on it.
    """
    if file.format == "text":
        yield from _read_lines(file)
        return
    for record in read_records(file, Reading(encoding_errors="strict")):
        if isinstance(record, Rejected):
            raise LabelledFileError(f"{file.location}, record {record.number}: {record.error}; correct or remove it")
        if isinstance(record, Page):
            raise LabelledFileError(f"{file.location}, record {record.number}: it is HTML; name a file of its text")
        if isinstance(record, Record):
            yield record.text


def _read_lines(file: SourceFile) -> Iterator[str]:
    read = 0
    try:
        for line in read_lines(as_path(file.location), file.compression):
            if isinstance(line, RecordTooLongError):
                raise line
            text = LABELS.sub("", line.decode("utf-8")).strip()
            read += 1
            if text:
                yield text
    except (CorruptFileError, RecordTooLongError, UnicodeDecodeError) as error:
        raise LabelledFileError(f"{file.location}, line {read + 1}: {error}; correct or remove it") from error


Members = tuple[int, np.ndarray, np.ndarray]
"""Of one class: number of a shard or file, int64 rows in it, and their draws (see `draw`)."""


class QualityError(ValueError):
    """The classifier has nothing to learn from."""


@dataclass(frozen=True)
class Examples:
    """Texts of one class in the order in which they are used: row `rows[i]` of part `parts[i]` of a pool."""

    parts: np.ndarray
    """int64 of shape (n,): numbers of a pool's parts."""
    rows: np.ndarray
    """int64 of shape (n,)."""
    order: np.ndarray
    """uint64 of shape (n,), ascending: the hash that they are ordered by."""


@dataclass(frozen=True)
class Pool:
    """Where examples come from: the document shards, then the files beside the sources."""

    inputs: Mapping[str, Path]
    shards: Sequence[str]
    files: Mapping[bool, Sequence[SourceFile]]
    """Whether good -> its files."""

    def texts(self, part: int, rows: np.ndarray) -> list[str]:
        """The texts of some rows of one part."""
        if part < len(self.shards):
            return read_documents(self.inputs, self.shards[part], ["text"])["text"].take(pa.array(rows)).to_pylist()
        files = [*self.files[True], *self.files[False]]
        texts = list(read_labelled(files[part - len(self.shards)]))
        return [texts[row] for row in rows.tolist()]

    def read(self, examples: Examples) -> Iterator[tuple[np.ndarray, list[str]]]:
        """Read examples part by part: their places among the examples, and their texts."""
        for part in np.unique(examples.parts).tolist():
            places = np.flatnonzero(examples.parts == part)
            yield places, self.texts(part, examples.rows[places])


def open_pool(inputs: Mapping[str, Path], section: Classifier) -> Pool:
    """The pool of a classifier's classes.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a path matches nothing.
    """
    files = {
        True: expand_files("quality.classifier.positive_files", section.positive_files),
        False: expand_files("quality.classifier.negative_files", section.negative_files),
    }
    return Pool(inputs, shard_names(inputs["ingest"]), files)


def choose_examples(pool: Pool, section: Classifier, seed: int) -> dict[bool, tuple[Examples, Examples]]:
    """Choose the documents to learn from and those to measure with: whether positive -> (training, held out).

    Raises:
        QualityError: a class has fewer than two documents.
    """
    classes = {True: section.positive, False: section.negative}
    found: dict[bool, list[Members]] = {True: [], False: []}
    for number, shard in enumerate(pool.shards):
        read = read_shard(pool.inputs, shard, ["id", "source"])
        for good, sources in classes.items():
            members = judged_rows(read.documents, read.rows, sources)
            found[good].append((number, members, draw(read.documents["id"].take(pa.array(members)).to_pylist(), seed)))
    files = [(good, file) for good, of_class in pool.files.items() for file in of_class]
    for number, (good, file) in enumerate(files):
        ids = [document_id("", "", text) for text in read_labelled(file)]
        found[good].append((len(pool.shards) + number, np.arange(len(ids)), draw(ids, seed)))
    return {good: _split(found[good], section, good) for good in classes}


def read_ngram_texts(inputs: Mapping[str, Path], section: Quality) -> Iterator[str]:
    """The documents that the n-gram model is trained on: the first by hash, up to `max_bytes` of text.

    Those that the classifier holds out are left out here too, so that they measure both.
    """
    assert section.perplexity is not None
    assert section.perplexity.ngram is not None
    settings, labelled = section.perplexity.ngram, section.classifier
    held_out = np.uint64((labelled.holdout if labelled is not None and labelled.has_classes else 0.0) * 2.0**64)
    shards = shard_names(inputs["ingest"])
    found = []
    for number, shard in enumerate(shards):
        read = read_shard(inputs, shard, ["id", "source", "text"])
        documents, rows = read.documents, judged_rows(read.documents, read.rows, settings.sources)
        draws = draw(documents["id"].take(pa.array(rows)).to_pylist(), section.key_seed)
        free = draws[:, 0] >= held_out
        sizes = pc.binary_length(documents["text"].take(pa.array(rows[free]))).to_numpy().astype(np.int64)
        found.append((np.full(len(sizes), number), rows[free], draws[free, 1], sizes))
    parts, rows, order, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
    first = np.argsort(order)
    chosen = first[np.cumsum(sizes[first]) - sizes[first] < settings.max_bytes]
    for number in np.unique(parts[chosen]).tolist():
        own = np.sort(rows[chosen[parts[chosen] == number]])
        yield from read_documents(inputs, shards[number], ["text"])["text"].take(pa.array(own)).to_pylist()


def draw(ids: Sequence[bytes], seed: int) -> np.ndarray:
    """Two uniform 64-bit numbers per document, from the seed and its id alone: uint64 of shape (n, 2)."""
    key = seed.to_bytes(16, "little", signed=True)
    digests = b"".join(hashlib.blake2b(identity, digest_size=16, key=key).digest() for identity in ids)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def split_draws(draws: np.ndarray, holdout: float, max_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Split at least two documents into those to learn from and those held out: neither is empty.

    Args:
        draws: uint64 of shape (n, 2): the first decides which part a document is in, the second the order.
        holdout: share that is held out.
        max_documents: at most so many in each part, the first in the order.

    Returns:
        positions of the training and of the held-out documents, each in the order.
    """
    order = np.lexsort((draws[:, 0], draws[:, 1]))
    held = draws[order, 0] < np.uint64(holdout * 2.0**64)
    if held.all() or not held.any():
        held[-1] = not held[-1]
    return order[~held][:max_documents], order[held][:max_documents]


def _split(found: list[Members], section: Classifier, good: bool) -> tuple[Examples, Examples]:
    draws = np.concatenate([drawn for _, _, drawn in found]) if found else np.empty((0, 2), np.uint64)
    if len(draws) < 2:
        name = "positive" if good else "negative"
        sources, files = getattr(section, name), getattr(section, f"{name}_files")
        raise QualityError(
            f"quality: the {name} sources ({', '.join((*sources, *files))}) have {len(draws)} documents left, at least "
            f"2 are needed; name other sources as `{name}:`, or loosen the stages before"
        )
    parts = np.concatenate([np.full(len(rows), number, np.int64) for number, rows, _ in found])
    rows = np.concatenate([rows for _, rows, _ in found])
    chosen = split_draws(draws, section.holdout, section.max_documents)
    training, held_out = (Examples(parts[part], rows[part], draws[part, 1]) for part in chosen)
    return training, held_out
