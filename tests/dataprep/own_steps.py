"""Documents, steps made from source text, and the rows that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    document_id,
    read_table,
    write_table,
)
from gristmill.mixtures.user_code import OwnFunction, take_code

TEXTS = (
    "xyzzy and xyzzy, says the troll",
    "nothing here",
    "one xyzzy more",
    "a longer text without the word",
    "ÄÖÜ €",
)


def write_documents(folder: Path, shards: int = 2, copies: int = 1) -> Path:
    """Write shards of documents, each with `copies` copies of TEXTS."""
    for number in range(shards):
        rows = [
            {
                "id": document_id("web", f"{number}#{copy}#{place}", text),
                "source": "web",
                "locator": f"https://example.org/{number}/{copy}/{place}",
                "text": text,
                "metadata": json.dumps({"place": place}),
            }
            for copy in range(copies)
            for place, text in enumerate(TEXTS)
        ]
        write_table(
            folder / f"part-{number:05d}.parquet",
            pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
        )
    return folder


def step(
    folder: Path, source: str, name: str = "step", **settings: Any
) -> dict[str, Any]:
    """Settings of a step whose function is in `steps.py` of `folder`, with its code by
    value.
    """
    folder.mkdir(exist_ok=True)
    (folder / "steps.py").write_text(source)
    code = take_code(OwnFunction(f"./steps.py:{name}"), folder)
    return {"use": code.by_value(), **settings}


def written(out: Path, pattern: str = "part-*") -> list[dict[str, Any]]:
    """Rows of the tables of a folder, in the order of their names."""
    paths = sorted(out.glob(pattern), key=str)
    return [row for path in paths for row in read_table(path).to_pylist()]
