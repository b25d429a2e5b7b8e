"""`gristmill bench results`: Gopher's rules in five dialects, and deduplication, judged
by the models that they train.

The manifest has gristmill's defaults (Gopher's rules in DCLM's dialect, exact and near
duplicates dropped); the arms replace the dialect, or leave out deduplication. The pool
is as mixed as a crawl: web pages that people labelled good or bad (DCLM), posts of 18F,
revisions of PEPs, movie reviews, and LaTeX of a textbook. Half of the good web pages are
held out and measured. Arms and rule were committed before the first run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import gristmill
from benchmarks.checkout import data_folder
from benchmarks.measuring import Row, row
from benchmarks.public_data import read_archive, read_records
from benchmarks.train.planted import BUDGET, result_rows
from gristmill.core.files import write_json_lines, write_text
from gristmill.core.processes import ONE_THREAD, in_environment
from gristmill.dataprep.filters.gopher import DIALECTS

OURS = "dclm"
"""Default dialect, that of the manifest."""
RULES = ("gopher_quality", "gopher_repetition")
WEB_PAGES = "quality/dclm_human_quality.jsonl.zst"
REVIEWS = "text/movie_reviews.zip"
OTHERS = {
    "posts": "text/18f_posts.jsonl.zst",
    "peps": "dedup/pep_revisions/docs.jsonl.zst",
    "textbook": "text/openlogic_tex.jsonl.zst",
}
DOCUMENTS = 100
"""Documents of each kind but web pages, the first ones."""
PIECE_CHARACTERS, PIECES_EACH = 1500, 3
"""Characters of a piece, which ends with the line that reaches them, and most pieces of
a document: a proxy reads many documents.
"""


def rows() -> Iterator[Row]:
    """Compare all dialects, and no deduplication."""
    if not (data_folder() / WEB_PAGES).exists():
        yield row("dialects", None, None, "bits/byte", "no public test data here")
        return
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-dialects-") as name,
        in_environment(dict.fromkeys(ONE_THREAD, "1")),
    ):
        folder = Path(name)
        write_texts(folder)
        results = gristmill.ablate(
            write_manifest(folder),
            settings(folder),
            store=folder / "store",
            progress=False,
        )
        yield from result_rows(f"dialects, {OURS} against", results)


def write_texts(folder: Path) -> None:
    """Write the pool, and the held-out pages."""
    held_out, pool = split_texts(data_folder())
    write_json_lines(folder / "held_out.jsonl", ({"text": text} for text in held_out))
    for kind, texts in pool.items():
        pieces = (piece for text in texts for piece in pieces_of(text))
        write_json_lines(
            folder / "pool" / f"{kind}.jsonl", ({"text": piece} for piece in pieces)
        )


def write_manifest(folder: Path) -> Path:
    """Write the manifest, and return its path."""
    manifest = {
        "name": "dialects",
        "seed": 1,
        "sources": {"pool": {"path": str(folder / "pool")}},
        "prepare": [{"filter": {"rules": list(RULES)}}, {"dedup": {}}],
        "tokenizer": {"vocab_size": 2048},
        "mix": {"tokens": 100_000, "sequence_length": 256},
        "engine": {"runner": "local", "workers": 1},
    }
    write_text(folder / "dialects.yaml", yaml.safe_dump(manifest, sort_keys=False))
    return folder / "dialects.yaml"


def split_texts(folder: Path) -> tuple[list[str], dict[str, Iterable[str]]]:
    """Return the first piece of each second good web page, and the pool by kind."""
    pages = list(read_records(folder / WEB_PAGES))
    good = [page["text"] for page in pages if page["label"] == 1]
    bad = [page["text"] for page in pages if page["label"] == 0]
    others = {
        kind: [
            record["text"] for record in islice(read_records(folder / file), DOCUMENTS)
        ]
        for kind, file in OTHERS.items()
    }
    reviews = [*read_archive(folder / REVIEWS, "latin-1").values()][:DOCUMENTS]
    held_out = [next(pieces_of(text)) for text in good[::2]]
    return held_out, {"web": good[1::2] + bad, "reviews": reviews, **others}


def pieces_of(text: str) -> Iterator[str]:
    """Yield the first pieces of a text: whole lines, with all of its characters up to
    there.
    """
    lines, size, number = list[str](), 0, 0
    for line in text.split("\n"):
        lines.append(line)
        size += len(line)
        if size < PIECE_CHARACTERS:
            continue
        yield "\n".join(lines)
        lines, size, number = [], 0, number + 1
        if number == PIECES_EACH:
            return
    if number == 0 or size >= PIECE_CHARACTERS // 2:
        yield "\n".join(lines)


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the ablation."""
    dialects: dict[str, Any] = {
        dialect: {"set": {f"filter.{rule}.dialect": dialect for rule in RULES}}
        for dialect in DIALECTS
        if dialect != OURS
    }
    return {
        **BUDGET,
        "seeds": 5,
        "arms": {**dialects, "no-dedup": {"without": ["dedup"]}},
        "held_out": {"good_pages": str(folder / "held_out.jsonl")},
    }
