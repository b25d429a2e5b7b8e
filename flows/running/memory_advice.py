"""Available memory, and advice for stages that run out of it.

A stage keeps some shards, a partition or a batch in memory; a setting can reduce each
of them.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.flows.stages.stage import Stage

FEWER_SHARDS = "fewer engine.workers, or smaller ingest.shard_bytes, need less"
SMALLER_BATCHES = (
    "a smaller micro_batch_size needs less; `gristmill plan MANIFEST --gpus N` lists "
    "the memory of each part"
)
OUT_OF_MEMORY = (
    "MemoryError",
    "_ArrayMemoryError",
    "ArrowMemoryError",
    "OutOfMemoryException",
)
"""Types of errors by which libraries report lack of memory."""


def available_memory() -> int:
    """Bytes of memory available on this machine: its free memory, or the control
    group's limit if lower.
    """
    import psutil

    free_bytes: int = psutil.virtual_memory().available
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    return min(free_bytes, int(limit)) if limit.isdecimal() else free_bytes


def advise(stage: Stage) -> str:
    """Advice for a stage that ran out of memory."""
    return SMALLER_BATCHES if stage.torchrun else FEWER_SHARDS
