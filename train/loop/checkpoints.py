"""Saving and finding the state of a training: valid only with a marker that is written last.

    checkpoints/step-00000100/    what torch.distributed.checkpoint writes; loads at any world size
        complete.json             the step, the loop's plain state, and every other file's size and SHA-256

A save returns when the state is copied; a thread writes while the training continues, and is joined before the
next save, before a load and at the end. Where each host of a training has a folder of its own, it sends what its ranks
have written to the store, and the first rank writes the marker when all have; what a host lacks is fetched before a
load. A checkpoint without its marker, or whose files are not those that the marker names, is torn: it is ignored, and
removed when the training resumes. Contents are compared with their checksums before
they are loaded; where they differ the next older checkpoint is taken. The marker is removed first when an old
checkpoint is deleted.

Nothing in a training draws from a global random generator, so none has a state to save: weights are drawn by name,
rows by (seed, position).
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gristmill.dataprep.context import Following
from gristmill.dataprep.files import read_json, sha256_file, write_json
from gristmill.train.optim.offload import is_offloaded, wait_for_moments
from gristmill.train.optim.optimizer import has_plain_state
from gristmill.train.parallel.world import World, agree, exchange_timeout

CHECKPOINTS = "checkpoints"
"""The folder of all checkpoints, among a training's working files."""
MARKER = "complete.json"
ELSEWHERE = "elsewhere"
"""Under this name a marker has the files that other hosts have written, in folders of their own."""
PREFIX = "step-"
MEASURING = ("noise_scale",)
"""Parts of the loop's state that only measure: a checkpoint of a training that did not measure lacks them."""
FULL_DISK_BYTES = 1 << 20
"""Free space below which a write that failed is taken to have filled the disk."""
ROLLBACK_POINTS = 2
"""Checkpoints to roll back to that are kept: spikes may begin right after the newest one."""


@dataclass(frozen=True)
class Keeping:
    """Which complete checkpoints stay.

    Attributes:
        newest: so many of the newest ones.
        permanent_every: those of steps that are multiples of this.
        rollback_every: the newest two of steps that are multiples of this.
    """

    newest: int = 2
    permanent_every: int | None = None
    rollback_every: int | None = None


class Checkpoints:
    """The checkpoints of one training. Every rank makes one, and calls each method together with the others.

    Args:
        folder: holds all checkpoints; may not exist.
        model, optimizers: sharded; each rank writes its part, and fills it in place at whatever world size.
        world: the processes.
        keeping: which ones stay.
        warn: gets what a person should know.
        following: the store that follows the folder, on the first of the ranks that write into it.
        apart: whether each host has a folder of its own.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        world: World,
        keeping: Keeping,
        warn: Callable[[str], None],
        following: Following | None = None,
        apart: bool = False,
    ) -> None:
        self.folder, self._following, self._apart = folder, following, apart
        self._is_first_here = following is not None if apart else world.is_first
        self._model, self._optimizers, self._world, self._keeping, self._warn = model, optimizers, world, keeping, warn
        # The thread that writes must not meet the training's own collectives.
        self._group = dist.new_group(backend="gloo", timeout=exchange_timeout())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._stager = pinning_stager(world.device)
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Copy the state now and write it in a thread; delete outdated checkpoints when it is written.

        Args:
            step: optimizer steps done.
            tensors: further tensors, nested; plain ones are the same on every rank.
            state: further JSON, the same on every rank.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        self.join()
        target = step_folder(self.folder, step)
        if self._is_first_here:
            remove_checkpoint(target)
            target.mkdir(parents=True)
        _wait_for_all(self._world)
        # Quantised moments cannot be copied to staging buffers: those are written before this returns.
        write = partial(async_save, async_stager=self._stager) if all(map(has_plain_state, self._optimizers)) else save
        with own_errors(target):
            written = write(self._state(tensors, self._with_moments()), checkpoint_id=target, process_group=self._group)
        self._pending = self._thread.submit(self._commit, written, target, step, state)

    def join(self) -> None:
        """Wait until the last save is complete; raises what it raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for the last save, and let its thread go; nothing the second time."""
        self.join()
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def load_newest(
        self, tensors: dict[str, Any], is_given_up: Callable[[int, dict[str, Any]], bool] = lambda step, state: False
    ) -> tuple[int, dict[str, Any]] | None:
        """Continue from the newest checkpoint whose contents are sound, and remove torn ones.

        Args:
            tensors: filled in place.
            is_given_up: from a step and its plain state to whether that checkpoint is to be removed too.

        Returns:
            steps done and the loop's plain state, or None where there is no complete checkpoint.
        """
        self.join()
        if self._world.is_first:
            self.remove(is_given_up)
        step = agree(self._newest_sound() if self._world.is_first else None, self._world)
        return None if step is None else (step, self.load(step, tensors))

    def load(self, step: int, tensors: dict[str, Any]) -> dict[str, Any]:
        """Go to the complete checkpoint of one step; returns the loop's plain state."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        from gristmill.train.loop.safe_loading import SafePlanner, check_index

        self.join()
        target = step_folder(self.folder, step)
        if self._apart and self._following is not None:
            self._following.fetch(target)
        _wait_for_all(self._world)
        check_index(target)
        saved = FileSystemReader(target).read_metadata().state_dict_metadata
        optimizers = self._optimizers if any(key.startswith("optimizer.") for key in saved) else []
        state = self._state(
            {
                name: part
                for name, part in tensors.items()
                if name not in MEASURING or any(key.startswith(f"loop.{name}.") for key in saved)
            },
            optimizers,
        )
        with own_errors():
            dcp.load(state, checkpoint_id=target, planner=SafePlanner())  # type: ignore[attr-defined]
        # All tensors were filled in place. Moments on the host stay as they are: PyTorch would take them to the device.
        set_state_dict(
            self._model,
            [one for one in optimizers if not is_offloaded(one)],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        if not optimizers:
            for one in self._optimizers:
                one.state.clear()
        marker = agree(read_json(target / MARKER) if self._world.is_first else None, self._world)
        found: dict[str, Any] = marker["state"]
        return found

    def remove(self, unwanted: Callable[[int, dict[str, Any]], bool]) -> None:
        """Delete complete checkpoints by their step and plain state; on the first rank alone."""
        for step in complete_steps(self.folder):
            if unwanted(step, read_json(step_folder(self.folder, step) / MARKER)["state"]):
                remove_checkpoint(step_folder(self.folder, step))

    def _with_moments(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have moments: of one without any PyTorch would make some by a step that counts."""
        return [one for one in self._optimizers if any(one.state.values())]

    def _state(self, tensors: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        wait_for_moments(optimizers)
        weights, moments = get_state_dict(self._model, optimizers)
        return {"model": weights, "optimizer": moments, "loop": tensors}

    def _commit(self, written: Any, target: Path, step: int, state: dict[str, Any]) -> None:
        """Once every rank has written its part: checksums, the marker, and room for the next ones."""
        if isinstance(written, Future):
            with own_errors(target):
                written.result()
        files = self._of_all_hosts(target) if self._apart else checksums(target) if self._world.is_first else {}
        if not self._world.is_first:
            return
        elsewhere = sorted(files.keys() - _sizes(target).keys())
        write_json(
            target / MARKER,
            {"step": step, "files": files, "state": state, **({ELSEWHERE: elsewhere} if elsewhere else {})},
        )
        for old in outdated(complete_steps(self.folder), self._keeping):
            remove_checkpoint(step_folder(self.folder, old))
        if self._following is not None:
            self._following.saved(target, elsewhere)

    def _of_all_hosts(self, target: Path) -> dict[str, dict[str, Any]]:
        """Send what this host has written; returns all hosts' files with their checksums, once the store has them.

        Raises:
            OSError: on every rank, where one host could not send its own.
        """
        own: dict[str, dict[str, Any]] = {}
        trouble = None
        if self._following is not None:
            try:
                own = checksums(target)
                self._following.add(target)
            except Exception as error:  # noqa: BLE001 - it is raised on every rank
                trouble = f"{socket.gethostname()}: {error}"
        told: list[Any] = [None] * self._world.size
        dist.all_gather_object(told, (own, trouble), group=self._group)
        if troubles := [one for _, one in told if one is not None]:
            raise OSError(f"{target.name} is not saved: {troubles[0]}")
        if self._is_first_here and not self._world.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)
        return {name: entry for files, _ in told for name, entry in sorted(files.items())}

    def _newest_sound(self) -> int | None:
        for checkpoint in _all_checkpoints(self.folder):
            if not is_complete(checkpoint):
                remove_checkpoint(checkpoint)
        for step in reversed(complete_steps(self.folder)):
            checkpoint = step_folder(self.folder, step)
            if not (damaged := damaged_files(checkpoint)):
                return step
            self._warn(
                f"{checkpoint} is damaged: {', '.join(damaged)} differ from the checksums in {MARKER}; it is "
                "removed, and the training resumes from an older checkpoint, or from the start"
            )
            remove_checkpoint(checkpoint)
        return None


@contextmanager
def own_errors(target: Path | None = None) -> Iterator[None]:
    """Raise what a rank raised, where torch wraps all ranks' errors in a CheckpointException, which is no Exception.

    Args:
        target: the checkpoint that is being written. torch's writer ends on a full disk with a sentence about positions
            in its file.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if target is not None and isinstance(cause, RuntimeError) and shutil.disk_usage(target).free < FULL_DISK_BYTES:
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        raise cause from error


def pinning_stager(device: torch.device) -> Any:
    """What copies a GPU's state to page-locked memory, at the full speed of the bus; the memory is kept between saves.

    The training waits for the copy, so that no update can change what is being saved. None on a CPU, where
    torch.distributed.checkpoint's own plain copy does.
    """
    if device.type != "cuda":
        return None
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
        )
    )


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{PREFIX}{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of which there is a complete checkpoint, ascending."""
    return sorted(int(path.name.removeprefix(PREFIX)) for path in _all_checkpoints(folder) if is_complete(path))


def outdated(steps: Sequence[int], keeping: Keeping) -> list[int]:
    """Those of the complete checkpoints (ascending) that nothing keeps any longer."""
    kept = set(steps[-keeping.newest :])
    if keeping.permanent_every is not None:
        kept |= {step for step in steps if step % keeping.permanent_every == 0}
    if keeping.rollback_every is not None:
        kept |= set([step for step in steps if step % keeping.rollback_every == 0][-ROLLBACK_POINTS:])
    return [step for step in steps if step not in kept]


def is_complete(checkpoint: Path) -> bool:
    """Whether the marker is there and names exactly the files that are, with their sizes.

    Of a checkpoint of several hosts that have folders of their own, files of other hosts need not be here.
    """
    try:
        marker = read_json(checkpoint / MARKER)
        named, found = {name: entry["bytes"] for name, entry in marker["files"].items()}, _sizes(checkpoint)
        return found.items() <= named.items() and named.keys() - found.keys() <= set(marker.get(ELSEWHERE, ()))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checksums(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of a checkpoint's files by name, the marker left out."""
    return {
        name: {"bytes": size, "sha256": sha256_file(checkpoint / name)}
        for name, size in sorted(_sizes(checkpoint).items())
    }


def damaged_files(checkpoint: Path) -> list[str]:
    """Names of files of a complete checkpoint whose contents are not what was written."""
    named, found = read_json(checkpoint / MARKER)["files"], checksums(checkpoint)
    return [name for name in named if found.get(name) != named[name]]


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interrupted removal leaves none that looks complete."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.name != MARKER}


def _all_checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


def _wait_for_all(world: World) -> None:
    if world.size > 1:
        dist.barrier()
