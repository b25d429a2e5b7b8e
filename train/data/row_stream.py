"""Rows of a packed set as a stream for any training loop, with gristmill's order and
resume.

    positions   0 1 2 3 4 5 6 7 ...     the keyed order of `tokenize/shuffle.py`, epoch
                                        after epoch
    batch b     positions [b B, (b+1) B), the same rows for every number of processes
    rank r      of w processes: every w-th row of a batch from its r-th on, as
                `loop.batch_plan.micro_batches` deals them

The state is one integer, the first unread position, so a stream can resume with another
number of processes or another batch size. Worker k of n of a loader reads batches k, k
+ n, ... of its rank, which the loader yields in turn: the output does not depend on the
number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from gristmill.core.files import as_path, find_json, read_json
from gristmill.mixtures.schema.engine import Stream
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.tokenize.loss_masks import LossMasks, mask_name
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.data.batch import (
    document_positions,
    filled_tokens,
    predicted_tokens,
    read_turns,
)
from gristmill.train.data.preference_rows import (
    EXAMPLES,
    Drawn,
    PairRows,
    draw_pairs,
    held_out_mask,
)
from gristmill.train.loop.batch_plan import micro_batches
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.resuming import OtherRowsError

ROWS_AT_A_TIME = 16
"""Rows of one rank that are read together if rows are requested singly."""
NO_END = 1 << 62
PROVENANCE = "provenance"
RUN = "run.json"
"""File in a run's folder with its manifest and its stages' folders."""


Batch = dict[str, Tensor]


class StreamError(ValueError):
    """Settings of a stream that are invalid or contradict each other."""


class Piece(TypedDict):
    """A document, or part of one, in a row.

    Attributes:
        id: of the document.
        start, length: in the row, in tokens.
        offset: in the document, in tokens.
        copy: number of the document's copy in the set.
    """

    id: str
    start: int
    length: int
    offset: int
    copy: int


class RowOrigin(TypedDict):
    """Origin of a row.

    Attributes:
        row: its number.
        source: its source, or set.
        documents: pieces in it.
        example: id of its preference pair, in place of `documents`.
    """

    row: int
    source: str
    documents: NotRequired[list[Piece]]
    example: NotRequired[str]


class StreamState(TypedDict):
    """Progress of a stream, and identity of its data.

    Attributes:
        position: of the first row of the iterator, or after all rows that it read.
        batches, rows: read batches after it, and rows of the next batch.
        worker, workers: of the loader.
        batch_size: positions read together.
        world_size, seed, fingerprint: of the stream.
    """

    position: int
    batches: int
    rows: int
    worker: int
    workers: int
    batch_size: int
    world_size: int
    seed: int
    fingerprint: str


class _Documents:
    """Rows of documents, all of whose tokens have a loss.

    Attributes:
        packed: the rows.
        order: rows by position.
        fingerprint: hash of the data read.
    """

    def __init__(
        self, packed: PackedSet, seed: int, document_mask: bool = False
    ) -> None:
        self.packed = packed
        self.order = packed.order(seed)
        self.fingerprint = packed.fingerprint
        self._document_mask = document_mask

    def batch(self, rows: np.ndarray, trim: bool) -> Batch:
        """The tensors of some rows (int64, shape (n,)); `trim`: drop the padding common
        to all of them.
        """
        filled = filled_tokens(self.packed, rows)
        positions = None
        if self._document_mask:
            positions = document_positions(self.packed, rows)
        return laid_out(
            self.packed.read(rows),
            np.arange(self.packed.sequence_length) < filled[:, None],
            positions,
        )

    def provenance(self, rows: np.ndarray) -> list[RowOrigin]:
        """Origin of each of some rows."""
        pieces: dict[int, list[Piece]] = {row: [] for row in rows.tolist()}
        table = self.packed.pieces(np.unique(rows))
        for piece in table.select(["row", *Piece.__annotations__]).to_pylist():
            piece["id"] = piece["id"].hex()
            pieces[piece.pop("row")].append(piece)
        numbers = zip(rows.tolist(), self.packed.source_of(rows).tolist(), strict=True)
        return [
            {
                "row": row,
                "source": self.packed.sources[source],
                "documents": pieces[row],
            }
            for row, source in numbers
        ]

    def trained(self, rows: np.ndarray) -> int:
        """Number of tokens with a loss in some rows; of pairs, the number of pairs."""
        return predicted_tokens(self.packed, rows)


class _Turns(_Documents):
    """Rows of conversations."""

    def __init__(self, packed: PackedSet, seed: int) -> None:
        super().__init__(packed, seed)
        self._masks = LossMasks(packed)
        self.fingerprint = self._masks.fingerprint

    def batch(self, rows: np.ndarray, trim: bool) -> Batch:
        ids, trained, positions = read_turns(self.packed, self._masks, rows, trim)
        if positions is None:  # every batch has the same keys
            positions = np.broadcast_to(
                np.arange(ids.shape[1], dtype=np.int32), ids.shape
            )
        return laid_out(ids, trained, positions)

    def trained(self, rows: np.ndarray) -> int:
        return int(self._masks.trained_per_row[rows].sum())


class _Pairs(_Documents):
    """Preference pairs, by the rows of their chosen answers."""

    def __init__(self, packed: PackedSet, seed: int, section: Dpo | None) -> None:
        super().__init__(packed, seed)
        self._pairs = PairRows(packed)
        if section is None:
            sets = [
                np.flatnonzero(self._pairs.sets == number)
                for number in range(len(packed.sources))
            ]
        else:
            sets = draw_pairs(
                self._pairs,
                held_out_mask(self._pairs.records(), section, seed),
                section,
                seed,
            )
        self._drawn = Drawn(self._pairs.ids, self._pairs.num_tokens, sets, seed)
        self.order = self._drawn.order
        self.fingerprint = self._drawn.digest(self._pairs.fingerprint)

    def batch(self, rows: np.ndarray, trim: bool) -> Batch:
        ids, targets = self._pairs.read(self._drawn.numbers[rows])
        labels = torch.cat(
            (targets.new_full((len(targets), 1), IGNORED), targets[:, :-1]), dim=1
        )
        chosen, rejected = ids.chunk(2)
        chosen_labels, rejected_labels = labels.chunk(2)
        return {
            "chosen_input_ids": chosen,
            "rejected_input_ids": rejected,
            "chosen_labels": chosen_labels,
            "rejected_labels": rejected_labels,
        }

    def provenance(self, rows: np.ndarray) -> list[RowOrigin]:
        return [
            {
                "row": int(self._pairs.first[pair]),
                "source": self.packed.sources[self._pairs.sets[pair]],
                "example": self._pairs.ids[pair],
            }
            for pair in self._drawn.numbers[rows].tolist()
        ]

    def trained(self, rows: np.ndarray) -> int:
        return len(rows)


def laid_out(
    tokens: np.ndarray, trained: np.ndarray, positions: np.ndarray | None
) -> Batch:
    """Rows in the format of transformers.

    `input_ids`, `labels` (n, t) int64, which the model shifts, IGNORED for untrained
    tokens, and `position_ids` if documents are separated; padding is counted from 0 like
    a document.
    """
    ids = torch.from_numpy(tokens)
    labels = ids.clone()
    if not trained.all():
        labels[torch.from_numpy(~trained)] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if positions is not None:
        is_real = positions >= 0
        padding = np.arange(positions.shape[1]) - is_real.sum(axis=1, keepdims=True)
        position_ids = np.where(is_real, positions, padding).astype(np.int64)
        batch["position_ids"] = torch.from_numpy(position_ids)
    return batch


@dataclass(frozen=True)
class _Place:
    """Progress of one process: its own `batches` after a position, and `rows` of the
    next batch.
    """

    position: int = 0
    batches: int = 0
    rows: int = 0
    worker: int = 0
    workers: int = 1


def stream(
    run_or_folder: Any,
    *,
    stage: Literal["mix", "sft_data", "dpo_data"] = "mix",
    rank: int = 0,
    world_size: int = 1,
    batch_size: int | None = None,
    each: Literal["batch", "row"] | None = None,
    seed: int | None = None,
    epochs: int | None = None,
    document_mask: bool | None = None,
    provenance: bool = False,
    reading: Stream | Mapping[str, object] | None = None,
) -> RowStream:
    """Stream the rows of a gristmill training, in its order, for any other training
    loop.

    A batch is a dict of `input_ids`, `labels` (the model shifts them; -100 without a
    loss) and, if documents are separated, `position_ids`; of preference pairs
    `chosen_input_ids`, `chosen_labels`, and the same of `rejected`.

    Args:
        run_or_folder: a `Run`, the folder of a run (it has `run.json`), or the folder
            or URL of a packed set.
        stage: of a run, the stage whose rows are read: a mixture, or fine-tuning
            conversations or preference pairs.
        rank: share of each batch to read, 0 to world_size - 1.
        world_size: number of shares of a batch. Leave out both for trainers that
            distribute batches themselves, as that of transformers does: they need all
            rows.
        batch_size: rows of a batch on all ranks together (`global_batch_size` of our
            trainings): a rank's share is this over world_size. If absent, rows are
            yielded one by one.
        each: "batch": yields batches, for a loop, or a loader with batch_size=None.
            "row": yields the rows of batches one by one, for a loader that makes
            batches of batch_size / world_size rows.
        seed: of the order; that of the run's training if absent, 0 for a folder.
        epochs: number of epochs, ending with the last whole batch; endless if absent.
            A set with phases is read once.
        document_mask: restart positions at 0 with each document of a mixture, which
            masks attention between documents; if absent, as in the run's model, false
            for a folder. Fine-tuning rows always restart.
        provenance: adds `provenance` to batches (a list) and rows: row, source, and
            documents with their places.
        reading: keys of `engine.stream`, for a set in an object store; the run's if
            absent.

    Raises:
        StreamError: the settings contradict each other or the set, or the run has no
            such stage.
        gristmill.tokenize.packed_files.PackedSetError: the folder holds no packed set.
    """
    folder, manifest = _resolved(run_or_folder, stage)
    sections = {"mix": "pretrain", "sft_data": "sft", "dpo_data": "dpo"}
    section = manifest.get(sections[stage]) or {}
    if seed is None:
        seed = section.get("seed", manifest.get("seed", 0))
    if document_mask is None:
        document_mask = bool(section.get("model", {}).get("document_mask", False))
    if reading is None:
        reading = manifest.get("engine", {}).get("stream", {})
    return RowStream(
        folder,
        rank,
        world_size,
        batch_size,
        each or ("row" if batch_size is None else "batch"),
        seed,
        epochs,
        document_mask,
        provenance,
        Stream.model_validate(reading),
        Dpo.model_validate(section) if stage == "dpo_data" and section else None,
    )


def _resolved(run_or_folder: Any, stage: str) -> tuple[str, dict[str, Any]]:
    """Folder of a packed set, and the manifest of its run; empty if unknown."""
    if hasattr(run_or_folder, "folder") and hasattr(run_or_folder, "path"):
        return str(run_or_folder.folder(stage)), read_json(run_or_folder.path / RUN)[
            "manifest"
        ]
    folder = as_path(run_or_folder)
    record = find_json(folder / RUN)
    if record is None:
        return str(folder), {}
    stage_folders = {
        name: as_path(stage_record["folder"])
        for name, stage_record in record["stages"].items()
        if "folder" in stage_record
    }
    if stage not in stage_folders:
        raise StreamError(
            f"{folder / RUN}: this run has no output of {stage}; it has "
            f"{', '.join(stage_folders) or 'none'}"
        )
    # The store may have been moved or copied.
    stage_folder = folder.parent.parent / stage / stage_folders[stage].name
    if not stage_folder.exists():
        stage_folder = stage_folders[stage]
    return str(stage_folder / "data"), record["manifest"]


@dataclass(eq=False, repr=False)
class RowStream(IterableDataset[Any]):
    """Batches or rows of a packed set; created by `gristmill.stream`, which documents
    the settings.

    One iterator at a time: each starts at the first row, or at the place set by
    `load_state_dict` or `seek`.

    Raises:
        StreamError: the settings contradict each other or the set.
        gristmill.tokenize.packed_files.PackedSetError: the folder holds no packed set.
    """

    folder: str
    rank: int
    world_size: int
    batch_size: int | None
    each: Literal["batch", "row"]
    seed: int
    epochs: int | None
    _document_mask: bool
    _provenance: bool
    _reading: Stream
    _dpo: Dpo | None
    _place: _Place = field(default=_Place(), init=False)
    _has_start: bool = field(default=False, init=False)
    _opened: _Documents | None = field(default=None, init=False)
    _process: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        rank = self.rank
        size = self.world_size
        batch = self.batch_size
        if size < 1 or not 0 <= rank < size:
            raise StreamError(
                f"rank {rank} of world_size {size}: ranks are 0 to world_size - 1"
            )
        if batch is None and self.each == "batch":
            raise StreamError(
                'each="batch" needs batch_size: the rows of a batch on all ranks '
                "together"
            )
        if batch is not None and batch < size:
            raise StreamError(
                f"batch_size {batch} is the rows of all {size} ranks "
                f"together: give {size} or more"
            )
        if batch is not None and self.each == "row" and batch % size:
            raise StreamError(
                f'each="row": batch_size {batch} must be a multiple of world_size '
                f"{size}, so that every "
                "rank's loader makes batches of as many rows"
            )
        if self.epochs is not None and self.epochs < 1:
            raise StreamError(
                f"epochs must be 1 or more, not {self.epochs}; leave it "
                "out to read without end"
            )
        if isinstance(self.kind, _Pairs) and self.each == "row":
            raise StreamError(
                f"{self.folder} holds preference pairs, which come in batches: give "
                'batch_size, and not each="row"'
            )
        self.kind.order.check_reads((self.epochs or 1) * self.kind.order.total)

    @property
    def kind(self) -> _Documents:
        """Packed set, opened in this process."""
        # Threads and connections to a store do not survive a fork.
        if self._opened is None or (
            self._process != os.getpid() and not self._opened.packed.local
        ):
            packed = PackedSet(self.folder, self._reading)
            shards = packed.manifest["train"]["shards"]
            if (packed.folder / EXAMPLES).exists():
                self._opened = _Pairs(packed, self.seed, self._dpo)
            elif shards and mask_name(shards[0]["file"]) in shards[0]["beside"]:
                self._opened = _Turns(packed, self.seed)
            else:
                self._opened = _Documents(packed, self.seed, self._document_mask)
            self._process = os.getpid()
        return self._opened

    @property
    def fingerprint(self) -> str:
        """Hash of the data read: streams with equal fingerprints and seeds are
        equal.
        """
        return self.kind.fingerprint

    @property
    def end(self) -> int:
        """Position after the last full batch; NO_END for endless epochs."""
        order = self.kind.order
        epochs = 1 if order.has_phases and self.epochs is None else self.epochs
        step = self.batch_size or self.world_size
        return NO_END if epochs is None else epochs * order.total // step * step

    def rows(self, batch: int) -> np.ndarray:
        """Numbers of the rows (int64) of a batch, counted from 0, on all ranks, in the
        order of their positions.
        """
        if self.batch_size is None:
            raise StreamError("a stream without batch_size has no batches; give one")
        return self.kind.order.span(batch * self.batch_size, self.batch_size)

    def provenance(self, rows: np.ndarray) -> list[RowOrigin]:
        """Origin of rows by number: `row`, `source`, and `documents` (`id`, `start`,
        `length` in the row, `offset` in the document, `copy`); of pairs `example`
        instead. `gristmill explain MANIFEST ID` prints the rest of a document.
        """
        return self.kind.provenance(np.asarray(rows, np.int64))

    def trained_tokens(self, batch: int) -> int:
        """Number of tokens with a loss in a batch, counted from 0, on all ranks: the
        divisor of gristmill's summed loss.

        Of preference pairs, the number of pairs.
        """
        return self.kind.trained(self.rows(batch))

    def state_dict(self) -> StreamState:
        """Progress of the iterator and identity of its data; JSON."""
        place = self._place
        if place.workers == 1:
            position = (
                place.position
                + place.batches * self._step
                + place.rows * self.world_size
            )
            place = _Place(position)
        return StreamState(
            **vars(place),  # type: ignore[typeddict-item]
            batch_size=self._step,
            world_size=self.world_size,
            seed=self.seed,
            fingerprint=self.fingerprint,
        )

    def load_state_dict(self, state: StreamState) -> None:
        """Set the state from which the next iterator continues.

        Raises:
            OtherRowsError: the state is of another set, another seed, or of a loader's
                worker with other batches.
        """
        for name, expected in (("fingerprint", self.fingerprint), ("seed", self.seed)):
            if (stored := state[name]) != expected:  # type: ignore[literal-required]
                raise OtherRowsError(
                    f"{self.folder}: the state has read rows by {name} {stored}, but "
                    f"this stream has {name} {expected}: resuming would skip some rows "
                    "and repeat others"
                )
        batches = (state["batch_size"], state["world_size"])
        if state["workers"] > 1 and batches != (self._step, self.world_size):
            raise OtherRowsError(
                f"{self.folder}: a loader's worker has read batches of {batches[0]} "
                f"rows on {batches[1]} ranks, but these are of {self._step} on "
                f"{self.world_size}; let a new loader begin with seek(rows read so far)"
            )
        place = {name: state[name] for name in vars(_Place())}  # type: ignore[literal-required]
        self._place = _Place(**place)
        self._has_start = True

    def seek(self, position: int) -> None:
        """Start the next iterator after `position` rows of all ranks: `steps *
        batch_size` after `steps` steps.
        """
        if position < 0:
            raise StreamError(
                f"seek: rows that were read are not {position}, but 0 or more"
            )
        self._place = _Place(position)
        self._has_start = True

    def close(self) -> None:
        """Close connections to a store and the cache's files; a local set has nothing
        to close.
        """
        if self._opened is not None:
            self._opened.packed.close()
            self._opened = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > 1 and self.batch_size is None:
            raise StreamError(
                f"{workers} workers of a loader share the batches of a stream among "
                "them: give the "
                "stream batch_size (rows per batch of the loader, times world_size)"
            )
        before = self._place if self._has_start else _Place()
        if before.workers > 1 and (before.worker, before.workers) != (worker, workers):
            raise OtherRowsError(
                f"the state of worker {before.worker} of {before.workers} cannot be "
                f"taken up by worker {worker} of "
                f"{workers}; use as many workers, or seek(rows read so far)"
            )
        self._place = replace(before, worker=worker, workers=workers)
        self._has_start = False
        return self._batches(self._place)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}

    @staticmethod
    def collate(rows: Sequence[Any]) -> Any:
        """Batch of rows of a stream, with their provenance, which torch's collating
        cannot join, in a list.
        """
        batch = default_collate(
            [
                {name: value for name, value in row.items() if name != PROVENANCE}
                for row in rows
            ]
        )
        if PROVENANCE in rows[0]:
            batch[PROVENANCE] = [row[PROVENANCE] for row in rows]
        return batch

    @property
    def _step(self) -> int:
        """Number of positions read together, on all ranks."""
        return self.batch_size or ROWS_AT_A_TIME * self.world_size

    def _batches(self, place: _Place) -> Iterator[Any]:
        remaining = max(self.end - place.position, 0)
        # the last is short only without a batch size
        batches = -(-remaining // self._step)
        num_batches = max(-(-(batches - place.worker) // place.workers), 0)
        device = torch.device(
            "cuda" if torch.cuda.is_available() and place.workers == 1 else "cpu"
        )
        threads = reading_threads(self.kind.packed.local, device)

        def read(number: int) -> list[Any]:
            """This rank's share of a batch: a batch, or its rows."""
            step = self._step
            first = place.position + (place.worker + number * place.workers) * step
            rows = self.kind.order.span(first, min(step, self.end - first))
            (rank_rows,) = micro_batches(
                rows, self.rank, self.world_size, -(-len(rows) // self.world_size)
            )
            batch: dict[str, Any] = {
                **self.kind.batch(rank_rows, trim=self.each == "batch")
            }
            if self._provenance:
                batch[PROVENANCE] = self.kind.provenance(rank_rows)
            if self.each == "batch":
                return [batch]
            return [
                {name: values[row] for name, values in batch.items()}
                for row in range(len(rank_rows))
            ]

        with closing(
            ReadAhead(read, num_batches, self._reading.read_ahead_steps, threads)
        ) as ahead:
            for number in range(place.batches, num_batches):
                parts = ahead.take(number)
                for done in range(
                    place.rows if number == place.batches else 0, len(parts)
                ):
                    is_last = done + 1 == len(parts)
                    self._place = replace(
                        place,
                        batches=number + is_last,
                        rows=0 if is_last else done + 1,
                    )
                    yield parts[done]
