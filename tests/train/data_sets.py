"""Data sets in folders, as the Hugging Face Hub has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml


def write_data_set(
    folder: Path, configs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
) -> Path:
    """Write Parquet files, and a README.md with the configurations.

    Args:
        folder: of the data set.
        configs: configuration -> split -> rows.
    """
    entries = []
    for config, splits in configs.items():
        (folder / config).mkdir(parents=True)
        for split, rows in splits.items():
            table = pa.Table.from_pylist(list(rows))
            pq.write_table(table, folder / config / f"{split}.parquet")
        files = [
            {"split": split, "path": f"{config}/{split}.parquet"} for split in splits
        ]
        entries.append({"config_name": config, "data_files": files})
    front = yaml.safe_dump({"configs": entries})
    (folder / "README.md").write_text(f"---\n{front}---\n")
    return folder
