"""A wrong name in `where` is told before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.flows.session import open_session
from gristmill.mixtures.load import ManifestError

MANIFEST = """
name: names
sources:
  web:
    path: web.txt
    where: "{where}"
prepare:
  - filter: {{rules: [gopher_quality]}}
  - quality: {{heuristics: true}}
tokenizer: {{vocab_size: 300}}
mix: {{tokens: 10_000, sequence_length: 32}}
"""


def opened(folder: Path, where: str) -> None:
    (folder / "web.txt").write_text("a text")
    (folder / "m.yaml").write_text(MANIFEST.format(where=where))
    open_session(str(folder / "m.yaml"), [], str(folder / "store"))


def test_a_column_that_nothing_measures_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.yaml:6: sources\.web\.where: 'quality > 0.5'.*heuristic_score"):
        opened(tmp_path, "quality > 0.5")


def test_columns_of_the_configured_stages_pass(tmp_path: Path) -> None:
    opened(tmp_path, "heuristic_score > 0.5 AND words > 10 AND tokens > 3")
