"""Available memory, and advice for stages that run out of it.

A stage keeps some shards, a partition or a batch in memory; a setting can reduce each of them.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.flows.stages.stage import Stage

FEWER_SHARDS = "fewer engine.workers, or smaller ingest.shard_bytes, need less"
SMALLER_BATCHES = "a smaller micro_batch_size needs less; `gristmill plan MANIFEST --gpus N` says what takes how much"
OUT_OF_MEMORY = ("MemoryError", "_ArrayMemoryError", "ArrowMemoryError", "OutOfMemoryException")
"""Types of errors by which libraries report lack of memory."""


def available_memory() -> int:
    """Bytes of memory available to a run here: the machine's free memory, or a control group's limit if lower."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(free, int(allowed)) if allowed.isdecimal() else free


def advise(stage: Stage) -> str:
    """Advice for a stage that ran out of memory."""
    return SMALLER_BATCHES if stage.trains else FEWER_SHARDS
