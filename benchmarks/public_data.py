"""Readers of the public test data (`checkout.data_folder`)."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkout import data_folder
from gristmill.dataprep.fasttext.fasttext_models import ModelError, find_model
from gristmill.dataprep.readers.compression import read_lines


def language_model() -> str | None:
    """Return the path of lid.176 on this machine, or None."""
    local = data_folder() / "langid" / "lid176" / "lid.176.ftz"
    try:
        return str(find_model(str(local) if local.exists() else None))
    except ModelError:
        return None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a JSON-lines file, compressed or not."""
    for line in read_lines(path, path.suffix if path.suffix in (".zst", ".gz") else ""):
        if isinstance(line, bytes) and line.strip():
            yield json.loads(line)


def prose() -> Iterator[str]:
    """Read the English prose: books, PEPs, posts, speeches and reviews; nothing where the
    data is absent.
    """
    folder = data_folder() / "text"
    if folder.exists():
        for name in ("books", "peps", "18f_posts"):
            for record in read_records(folder / f"{name}.jsonl.zst"):
                yield record["text"]
        for name in ("state_union", "inaugural", "movie_reviews"):
            yield from read_archive(folder / f"{name}.zip", "latin-1").values()


def read_archive(path: Path, encoding: str = "utf-8") -> dict[str, str]:
    """Read the text files of a zip archive by their names, sorted."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        return {name: archive.read(name).decode(encoding) for name in names}
