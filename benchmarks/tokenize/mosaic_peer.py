"""The peer of `gristmill bench stream`: MosaicML Streaming over the same tokens, as a
program of its own.

`python mosaic_peer.py TOKENS.npy FOLDER BATCH BATCHES STEP` prints a JSON object. It
imports nothing of gristmill, so that it runs in any Python that has `streaming`, with
whatever versions of other packages.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

LOADER_WORKERS = (0, 2)
SEED = 7


def main() -> None:
    """Write the tokens as MDS, and measure reading them in shuffled batches of
    tensors.
    """
    import streaming

    tokens, folder = np.load(sys.argv[1], mmap_mode="r"), Path(sys.argv[2])
    batch, batches, step = (int(value) for value in sys.argv[3:6])
    warnings.filterwarnings("ignore")
    write(tokens, folder)
    streaming.base.util.clean_stale_shared_memory()
    before = anonymous_bytes()
    start = time.perf_counter()
    next(iter(loader(folder, batch, 0)))
    start_seconds = time.perf_counter() - start
    rates = [rate(folder, batch, batches, workers) for workers in LOADER_WORKERS]
    memory_bytes = anonymous_bytes() - before
    start = time.perf_counter()
    resumed = loader(folder, batch, 0)
    epoch, position = divmod(step * batch, len(tokens))
    resumed.dataset.load_state_dict(
        {
            "epoch": epoch,
            "sample_in_epoch": position,
            "num_canonical_nodes": 1,
            "shuffle_seed": SEED,
            "initial_physical_nodes": 1,
        }
    )
    next(iter(resumed))
    print(
        json.dumps(
            {
                "rows_per_second": max(rates),
                "start_seconds": start_seconds,
                "resume_seconds": time.perf_counter() - start,
                "memory_bytes": memory_bytes,
                "version": streaming.__version__,
            }
        )
    )


def write(tokens: np.ndarray, folder: Path) -> None:
    """Write the rows as an MDS data set."""
    from streaming import MDSWriter

    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(
        out=str(folder), columns={"tokens": f"ndarray:{tokens.dtype}:{tokens.shape[1]}"}
    ) as writer:
        for row in tokens:
            writer.write({"tokens": row})


def loader(folder: Path, batch: int, workers: int) -> Any:
    """Return the library's own loader of shuffled batches."""
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        local=str(folder),
        shuffle=True,
        batch_size=batch,
        shuffle_seed=SEED,
        num_canonical_nodes=1,
    )
    return StreamingDataLoader(data, batch_size=batch, num_workers=workers)


def rate(folder: Path, batch: int, batches: int, workers: int) -> float:
    """Return rows per second after the first batch."""
    loaded = iter(loader(folder, batch, workers))
    next(loaded)
    start = time.perf_counter()
    for _ in range(batches):
        next(loaded)
    return batch * batches / (time.perf_counter() - start)


def anonymous_bytes() -> int:
    """Return memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        * 1024
    )


if __name__ == "__main__":
    main()
