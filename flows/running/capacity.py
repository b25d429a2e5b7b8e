"""Memory that grows with the number of documents: which stages hold something of each in one process, and what helps.

All other steps hold some shards or a partition at a time. What is known beforehand is said before the work: when a
stage starts, and by `gristmill plan --predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.flows.stages.stage import Memory, Stage

OF_ALL = "short records that belong together can be joined to longer documents, or take a machine with more memory"
FEWER_SHARDS = "fewer engine.workers, or smaller ingest.shard_bytes, need less"
SMALLER_BATCHES = "a smaller micro_batch_size needs less; `gristmill plan MANIFEST --gpus N` says what takes how much"
OUT_OF_MEMORY = ("MemoryError", "_ArrayMemoryError", "ArrowMemoryError", "OutOfMemoryException")
"""Types of errors by which libraries say that there is no more."""


def available_memory() -> int:
    """Bytes of memory that a run may use here: what the machine has free, or a control group's limit if less."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(free, int(allowed)) if allowed.isdecimal() else free


def documents_of(summaries: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many documents a stage reads: what the last of its inputs that counts any has kept.

    Args:
        summaries: of its inputs, in their order.
    """
    kept = [summary["counts"]["kept"] for summary in summaries.values() if "kept" in summary.get("counts", {})]
    return kept[-1] if kept else None


def describe_need(memory: Memory | None, documents: float | None) -> str | None:
    """How much a stage holds of every document, in one process; None of a stage whose memory does not grow so."""
    if memory is None:
        return None
    each = memory.bytes_per_document
    whole = "" if documents is None else f", {each * documents / 1e9:,.1f} GB for {documents:,.0f}"
    return f"it holds about {each} bytes of every document in one process{whole}"


def shortage(stage: Stage, documents: float | None, available: int) -> str | None:
    """A sentence where a stage will need more memory than there is, else None."""
    memory = stage.memory
    if memory is None or documents is None or not available or memory.bytes_per_document * documents <= available:
        return None
    return (f"{stage.name}: {describe_need(memory, documents)}, and {available / 1e9:,.1f} GB are free here; "
            f"{memory.advice}; {OF_ALL}")


def advise(stage: Stage, documents: int | None) -> str:
    """What to do where a stage ran out of memory."""
    if stage.trains:
        return SMALLER_BATCHES
    if stage.memory is None:
        return FEWER_SHARDS
    return f"{describe_need(stage.memory, documents)}; {stage.memory.advice}; {OF_ALL}; {FEWER_SHARDS}"
