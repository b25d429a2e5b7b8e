"""The benchmark that runs many short documents through the preparation steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bounds


def test_the_documents_are_the_same_in_every_run_and_a_tenth_of_them_are_copies(
    tmp_path: Path,
) -> None:
    size = bounds.write_texts(tmp_path / "one", 1500, 400)
    assert bounds.write_texts(tmp_path / "other", 1500, 400) == size
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == [f"{number:05d}.jsonl" for number in range(4)]
    texts = []
    for name in files:
        content = (tmp_path / "one" / name).read_text()
        assert (tmp_path / "other" / name).read_text() == content
        texts.append([json.loads(line)["text"] for line in content.splitlines()])
    assert [len(file_texts) for file_texts in texts] == [400, 400, 400, 300]
    assert (
        sum(len(text.encode()) for file_texts in texts for text in file_texts) == size
    )
    beginnings = {text.rpartition(" ")[0] for text in texts[0]}
    copies = sum(
        text.rpartition(" ")[0] in beginnings
        for file_texts in texts[1:]
        for text in file_texts
    )
    assert 0.05 < copies / 1100 < 0.15


@pytest.mark.slow
def test_every_step_is_measured_against_the_limit(tmp_path: Path) -> None:
    rows = {row.name: row for row in bounds.rows(20_000, tmp_path)}
    for step in bounds.STEPS:
        for scope in ("all processes", "largest process"):
            assert 0.01 < rows[f"bounds: {step}, {scope}"].ours < 3
            assert rows[f"bounds: {step}, {scope}"].ratio > 1
        assert rows[f"bounds: {step}, time"].ours > 0
    assert rows["explain: a kept document's id looked up"].ours > 0
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["00000.jsonl"]
