"""Files of an Apache Iceberg table: the Parquet files of its current snapshot (Iceberg
Table Spec, versions 1 and 2), found by pyiceberg without a catalog.

The newest file `metadata/*.metadata.json` describes the table: their names begin with a
number (`00002-<uuid>`, or `v2` in tables without a catalog). Files of older snapshots,
and of writes that were never committed, are not read. Paths in the metadata are those
at which the table was written.
"""

from __future__ import annotations

import re

from gristmill.dataprep.readers.compression import one_line
from gristmill.dataprep.readers.sources import DatasetError, DatasetFolder

_METADATA = re.compile(r"metadata/v?(\d+)(?:-[^/]*)?\.metadata\.json")


def data_files(folder: DatasetFolder, split: str | None) -> list[str]:
    """Files of the current snapshot, sorted; see `sources.DatasetFolder`."""
    try:
        from pyiceberg.table import StaticTable
    except ModuleNotFoundError as error:
        raise DatasetError(
            "needs pyiceberg to be listed, which is not installed; install it with: "
            "pip install 'gristmill[iceberg]'"
        ) from error
    versions = {
        int(match[1]): name
        for name in folder.files
        if (match := _METADATA.fullmatch(name))
    }
    if not versions:
        raise DatasetError(
            "is not an Iceberg table: it has no metadata/*.metadata.json"
        )
    newest = versions[max(versions)]
    try:
        table = StaticTable.from_metadata(folder.files[newest].location)
        tasks = list(table.scan().plan_files())
    except Exception as error:  # each store and file format has its own errors
        raise DatasetError(
            f"cannot be listed by its {newest}: {one_line(error)}; a "
            "table that was moved must be rewritten there"
        ) from error
    root = _without_scheme(table.location())
    names = []
    for task in tasks:
        name = _without_scheme(task.file.file_path).removeprefix(f"{root}/")
        if task.delete_files:
            raise DatasetError(
                f"deletes rows of {name} by further files, which are not applied; "
                "compact the table first"
            )
        if task.file.file_format.name != "PARQUET":
            raise DatasetError(
                f"has a file of {task.file.file_format.name}, {name}; only Parquet is "
                "read"
            )
        if name not in folder.files:
            raise DatasetError(
                f"is incomplete: {newest} names {name}, which is missing"
            )
        names.append(name)
    return sorted(names)


def _without_scheme(location: str) -> str:
    return location.removeprefix("file://").rstrip("/")
