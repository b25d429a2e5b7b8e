"""Wrong names in `where` are rejected before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.mixtures.loader import ManifestError
from tests.sessions import open_beside

MANIFEST = """
name: names
sources:
  web:
    path: web.txt
    where: "{where}"
prepare:
  - filter: {{rules: [gopher_quality]}}
  - quality: {{classifier: {{model: quality.bin}}}}
tokenizer: {{vocab_size: 300}}
mix: {{tokens: 10_000, sequence_length: 32}}
"""


def opened(folder: Path, where: str) -> None:
    (folder / "web.txt").write_text("a text")
    (folder / "quality.bin").write_bytes(b"")
    (folder / "m.yaml").write_text(MANIFEST.format(where=where))
    open_beside(folder / "m.yaml")


def test_unmeasured_column_is_rejected_with_its_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ManifestError,
        match=r"m\.yaml:6: sources\.web\.where: 'perplexity > 0.5'.*quality",
    ):
        opened(tmp_path, "perplexity > 0.5")


def test_columns_of_the_configured_stages_pass(tmp_path: Path) -> None:
    opened(tmp_path, "quality > 0.5 AND words > 10 AND tokens > 3")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("random() < 0.5", "the function random is not allowed"),
        ("row_number() OVER () < 10", "a window function"),
        ("(SELECT 1) = 1", "a sub-query"),
        ("tokens > today()", "the function today"),
    ],
)
def test_nondeterministic_expression_is_rejected_with_its_line(
    tmp_path: Path, where: str, message: str
) -> None:
    with pytest.raises(
        ManifestError, match=rf"m\.yaml:6: sources\.web\.where: .*{message}"
    ):
        opened(tmp_path, where)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("[language_score desc, length desc]", "there is no column 'language_score'"),
        ("[length asc]", "'length asc' is not a column name"),
    ],
)
def test_dedup_keep_accepts_only_columns_measured_by_earlier_steps(
    tmp_path: Path, keep: str, message: str
) -> None:
    (tmp_path / "web.txt").write_text("a text")
    (tmp_path / "quality.bin").write_bytes(b"")
    text = MANIFEST.format(where="tokens > 3").replace(
        "  - quality:", f"  - dedup: {{keep: {keep}}}\n  - quality:"
    )
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(
        ManifestError, match=rf"m\.yaml:9: prepare\S*dedup\S*: {message}"
    ):
        open_beside(tmp_path / "m.yaml")
    (tmp_path / "m.yaml").write_text(text.replace(keep, "[words desc, length desc]"))
    open_beside(tmp_path / "m.yaml")
