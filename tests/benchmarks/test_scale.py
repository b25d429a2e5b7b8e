"""Corpora of `gristmill bench scale`: files of drawn documents and their sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chain import scale
from gristmill.dataprep.readers.compression import read_lines


@pytest.fixture
def few_paragraphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    texts = [f'Paragraph "{number}"\nof œuvres.' for number in range(20)]
    monkeypatch.setattr(scale, "read_paragraphs", lambda: iter(texts))
    scale.escaped_paragraphs.cache_clear()
    yield
    scale.escaped_paragraphs.cache_clear()


@pytest.mark.usefixtures("few_paragraphs")
def test_files_hold_the_documents_and_their_recorded_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "FILE_DOCUMENTS", 30)
    sizes = [scale.write_file(tmp_path, 50, number) for number in range(2)]
    records = [
        json.loads(line)
        for path in sorted(tmp_path.iterdir())
        for line in read_lines(path, ".zst")
        if isinstance(line, bytes) and line
    ]
    assert [record["id"] for record in records] == [str(place) for place in range(50)]
    texts = [record["text"] for record in records]
    assert sum(sizes) == sum(len(text.encode()) for text in texts)
    assert all(len(text.split("\n\n")) == 8 for text in texts)


@pytest.mark.usefixtures("few_paragraphs")
def test_a_tenth_of_the_documents_are_copies() -> None:
    texts = [scale.draw(number)[0] for number in range(2000)]
    assert 0.08 < 1 - len(set(texts)) / len(texts) < 0.12
