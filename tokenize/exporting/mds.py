"""Writing a MosaicML Streaming (MDS) dataset through its own library, which the extra `mds` installs.

It needs only numpy beside that library, whose requirements (numpy below 2.2, transformers below 5 in 0.13) may call for
an environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 1 << 26
"""The library's own default."""


class MissingLibraryError(RuntimeError):
    """mosaicml-streaming is not installed."""


def columns(dtype: np.dtype) -> dict[str, str]:
    """The columns of a sample, which is one row: its tokens, and where its document pieces begin."""
    return {"tokens": f"ndarray:{dtype.name}", "starts": "ndarray:int32"}


def write_mds(folder: Path, samples: Iterator[dict[str, Any]], dtype: np.dtype) -> None:
    """Write samples (see `columns`) into a new local folder, in their order.

    Raises:
        MissingLibraryError: the library is not there.
    """
    try:
        from streaming import MDSWriter
    except ImportError as error:
        raise MissingLibraryError("the format mds is written by mosaicml-streaming, which is not installed here "
                                  f"({error}); install it with: pip install 'gristmill[mds]'") from error
    with MDSWriter(out=str(folder), columns=columns(dtype), hashes=["sha1"], size_limit=SHARD_BYTES) as writer:
        for sample in samples:
            writer.write(sample)
