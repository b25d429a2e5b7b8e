"""Checkpoints of a training, each valid only with a marker that is written last.

    checkpoints/step-00000100/    written by torch.distributed.checkpoint; loads at any
                                  world size
        complete.json             the step, the loop's plain state, size and SHA-256 of
                                  every other file

A save returns when the state is copied. A thread writes while the training continues,
and is joined before the next save, before a load and at the end. If each host has a
separate folder, it uploads the files of its ranks to the store, the first rank writes
the marker after all uploads, and missing files are fetched before a load. A checkpoint
without its marker, or whose files differ from those of the marker, is torn: it is
ignored, and removed when the training resumes. Checksums are compared before a load; if
they differ, the next older checkpoint is taken. The marker is removed first when an old
checkpoint is deleted.

Trainings use no global random generator, so there is no generator state to save:
weights are initialised by name, rows are drawn by (seed, position).
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from gristmill.core.files import file_sizes, read_json, sha256_file, write_json
from gristmill.core.object_stores import Warn
from gristmill.core.stage_context import NOT_MIRRORED, Mirroring
from gristmill.mixtures.schema.engine import TrainingEngine
from gristmill.train.distributed.process_groups import World, agree, exchange_timeout
from gristmill.train.loop.loop_state import CheckpointState, StateTensors
from gristmill.train.optim.optimizer import has_plain_state

CHECKPOINTS = "checkpoints"
"""Folder of all checkpoints in the working folder of a training."""
MARKER = "complete.json"
PREFIX = "step-"
FULL_DISK_BYTES = 1 << 20
"""Free space below which a failed write is reported as a full disk."""


class FileChecksum(TypedDict):
    """Size of a file in bytes, and its SHA-256."""

    bytes: int
    sha256: str


Checksums = dict[str, FileChecksum]
"""Files by name."""


class Marker(TypedDict):
    """Content of `complete.json`.

    Attributes:
        step: optimizer steps done.
        files: all other files, by name.
        state: of the loop.
        elsewhere: files that other hosts wrote to their folders, if any.
    """

    step: int
    files: Checksums
    state: CheckpointState
    elsewhere: NotRequired[list[str]]


class Checkpoints:
    """Checkpoints of one training. Every rank creates one, and each method is a
    collective.

    Args:
        folder: of all checkpoints; it need not exist.
        model, optimizers: sharded; each rank saves its shard, and loads it in place at
            any world size.
        world: the processes.
        keeping: retention policy.
        warn: receives warnings.
        mirroring: mirroring of the folder in a store.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        world: World,
        keeping: TrainingEngine,
        warn: Warn,
        mirroring: Mirroring = NOT_MIRRORED,
    ) -> None:
        self.folder = folder
        self._mirror = mirroring.mirror
        self._per_host = mirroring.per_host
        self._is_first_here = mirroring.is_first_here(world.is_first)
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self._keeping = keeping
        self._warn = warn
        # Collectives of the writing thread must not mix with those of the training.
        self._group = dist.new_group(backend="gloo", timeout=exchange_timeout())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._stager = pinning_stager(world.device)
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: StateTensors, state: CheckpointState) -> None:
        """Copy the state and write it in a thread, which then deletes outdated
        checkpoints.

        Args:
            step: optimizer steps done.
            tensors: of the loop; plain tensors are equal on every rank.
            state: of the loop, equal on every rank.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        self.join()
        target = step_folder(self.folder, step)
        if self._is_first_here:
            remove_checkpoint(target)
            target.mkdir(parents=True)
        _wait_for_all(self._world)
        # Quantised moments cannot be copied to staging buffers and are written
        # synchronously.
        write = (
            partial(async_save, async_stager=self._stager)
            if all(map(has_plain_state, self._optimizers))
            else save
        )
        with own_errors(target):
            written = write(
                self._state(
                    tensors,
                    # PyTorch creates missing moments by taking a real step.
                    [
                        optimizer
                        for optimizer in self._optimizers
                        if any(optimizer.state.values())
                    ],
                ),
                checkpoint_id=target,
                process_group=self._group,
            )
        self._pending = self._thread.submit(self._commit, written, target, step, state)

    def join(self) -> None:
        """Wait until the last save is complete, and raise its error."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.result()

    def close(self) -> None:
        """Wait for the last save and release its thread; idempotent."""
        self.join()
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def load_newest(self, tensors: StateTensors) -> tuple[int, CheckpointState] | None:
        """Load the newest checkpoint with correct checksums, and remove torn ones.

        Args:
            tensors: loaded in place.

        Returns:
            steps done and the loop's plain state, or None without a complete
            checkpoint.
        """
        self.join()
        newest = None
        if self._world.is_first:
            for checkpoint in self.folder.glob(f"{PREFIX}*"):
                if not is_complete(checkpoint):
                    remove_checkpoint(checkpoint)
            for step in reversed(complete_steps(self.folder)):
                checkpoint = step_folder(self.folder, step)
                damaged = damaged_files(checkpoint)
                if not damaged:
                    newest = step
                    break
                self._warn(
                    f"{checkpoint} is damaged: {', '.join(damaged)} differ from the "
                    f"checksums in {MARKER}; it is removed, and the training resumes "
                    "from an older checkpoint, or from the start"
                )
                remove_checkpoint(checkpoint)
        newest = agree(newest, self._world)
        return None if newest is None else (newest, self._load(newest, tensors))

    def _load(self, step: int, tensors: StateTensors) -> CheckpointState:
        """Load the complete checkpoint of a step; returns the loop's plain state."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_state_dict,
        )

        from gristmill.train.safe_loading import SafePlanner, check_index

        target = step_folder(self.folder, step)
        if self._per_host and self._mirror is not None:
            self._mirror.fetch(target)
        _wait_for_all(self._world)
        check_index(target)
        saved = FileSystemReader(target).read_metadata().state_dict_metadata
        optimizers = (
            self._optimizers
            if any(key.startswith("optimizer.") for key in saved)
            else []
        )
        state = self._state(tensors, optimizers)
        with own_errors():
            dcp.load(state, checkpoint_id=target, planner=SafePlanner())  # type: ignore[attr-defined]
        # All tensors were loaded in place.
        set_state_dict(
            self._model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        marker: Marker = agree(
            read_json(target / MARKER) if self._world.is_first else None, self._world
        )
        return marker["state"]

    def _state(
        self, tensors: StateTensors, optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self._model, optimizers)
        return {"model": weights, "optimizer": moments, "loop": tensors}

    def _commit(
        self, written: Any, target: Path, step: int, state: CheckpointState
    ) -> None:
        """Write checksums and the marker after all ranks have written, and delete
        outdated checkpoints.

        Raises:
            OSError: on every rank, if an upload failed on any host.
        """
        if isinstance(written, Future):
            with own_errors(target):
                written.result()
        files: Checksums = {}
        if self._per_host:
            failure = None
            if self._mirror is not None:
                try:
                    files = checksums(target)
                    self._mirror.add(target)
                except Exception as error:  # noqa: BLE001 - raised on every rank
                    failure = f"{socket.gethostname()}: {error}"
            gathered: list[Any] = [None] * self._world.size
            dist.all_gather_object(gathered, (files, failure), group=self._group)
            failures = [failure for _, failure in gathered if failure is not None]
            if failures:
                raise OSError(f"{target.name} is not saved: {failures[0]}")
            if self._is_first_here and not self._world.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
            files = {}
            for files_of_rank, _ in gathered:
                files |= dict(sorted(files_of_rank.items()))
        elif self._world.is_first:
            files = checksums(target)
        if not self._world.is_first:
            return
        elsewhere = sorted(files.keys() - _sizes(target).keys())
        marker: Marker = {"step": step, "files": files, "state": state}
        if elsewhere:
            marker["elsewhere"] = elsewhere
        write_json(target / MARKER, marker)
        for old in outdated(complete_steps(self.folder), self._keeping):
            remove_checkpoint(step_folder(self.folder, old))
        if self._mirror is not None:
            self._mirror.saved(target, elsewhere)


@contextmanager
def own_errors(target: Path | None = None) -> Iterator[None]:
    """Raise the error of a rank, which torch wraps in a CheckpointException (a
    BaseException).

    Args:
        target: checkpoint that is being written. On a full disk torch's writer reports
            file positions instead.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if (
            target is not None
            and isinstance(cause, RuntimeError)
            and shutil.disk_usage(target).free < FULL_DISK_BYTES
        ):
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        raise cause from error


def pinning_stager(device: torch.device) -> Any:
    """Stager that copies the state of a GPU to page-locked memory, which is reused
    between saves.

    The training waits for the copy, so that no update changes the state that is being
    saved. None on a CPU, where torch.distributed.checkpoint copies by itself.
    """
    if device.type != "cuda":
        return None
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=True,
        )
    )


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"{PREFIX}{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    return sorted(
        int(path.name.removeprefix(PREFIX))
        for path in folder.glob(f"{PREFIX}*")
        if is_complete(path)
    )


def outdated(steps: Sequence[int], keeping: TrainingEngine) -> list[int]:
    """Steps of complete checkpoints (ascending) that the retention policy does not
    keep.
    """
    kept = set(steps[-keeping.keep_checkpoints :])
    if keeping.permanent_every is not None:
        kept |= {step for step in steps if step % keeping.permanent_every == 0}
    return [step for step in steps if step not in kept]


def is_complete(checkpoint: Path) -> bool:
    """Return True for the folder of a checkpoint whose marker exists and lists exactly
    the existing files, with their sizes.

    Files that other hosts wrote to their folders may be missing.
    """
    try:
        marker = read_json(checkpoint / MARKER)
        listed_sizes = {name: entry["bytes"] for name, entry in marker["files"].items()}
        sizes = _sizes(checkpoint)
        return (
            checkpoint.name.startswith(PREFIX)
            and sizes.items() <= listed_sizes.items()
            and listed_sizes.keys() - sizes.keys() <= set(marker.get("elsewhere", ()))
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checksums(checkpoint: Path) -> Checksums:
    """Size and SHA-256 of a checkpoint's files by name, without the marker."""
    return {
        name: {"bytes": size, "sha256": sha256_file(checkpoint / name)}
        for name, size in sorted(_sizes(checkpoint).items())
    }


def damaged_files(checkpoint: Path) -> list[str]:
    """Names of files of a complete checkpoint that do not match their checksums."""
    expected = read_json(checkpoint / MARKER)["files"]
    actual = checksums(checkpoint)
    return [name for name in expected if actual.get(name) != expected[name]]


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, marker first, so that an interrupted removal does not leave
    a complete one.
    """
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _sizes(checkpoint: Path) -> dict[str, int]:
    sizes = file_sizes(checkpoint)
    sizes.pop(MARKER, None)
    return sizes


def _wait_for_all(world: World) -> None:
    if world.size > 1:
        dist.barrier()
