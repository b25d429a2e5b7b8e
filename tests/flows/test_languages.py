"""Rules and thresholds by language in a whole manifest: rejections before any work, and
answers of `explain`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.fasttext.fasttext_files import read_labels
from gristmill.flows.questions.explain import find_threshold
from gristmill.mixtures.base import RECIPE
from gristmill.mixtures.load import ManifestError, load_manifest
from gristmill.mixtures.steps.filter import Filter

MANIFEST = """
name: several
sources: {{web: {{path: web.jsonl}}}}
prepare:
  - langid: {langid}
  - filter:
      rules: [gopher_quality]
      by_language: {by_language}
"""


def write_model(path: Path, labels: list[str]) -> None:
    """Write the head of a fastText model: its arguments, words and labels."""
    entries = [
        ("word", 0),
        ("__lab", 0),
        *((f"__label__{label}", 1) for label in labels),
    ]
    settings = (*range(6), 3, 3, *range(8, 12), 0.1)
    head = struct.pack(
        "<2i12id3i2q", 793_712_314, 12, *settings, len(entries), 2, len(labels), 9, -1
    )
    path.write_bytes(
        head
        + b"".join(
            name.encode() + b"\0" + struct.pack("<qb", 7, kind)
            for name, kind in entries
        )
        + b"the matrices"
    )


def test_labels_are_read_from_the_head_of_a_model(tmp_path: Path) -> None:
    labels = ["deu_Latn", "zho_Hans", "ägy_Egyp"]
    write_model(tmp_path / "glotlid.bin", labels)
    assert read_labels(str(tmp_path / "glotlid.bin")) == [
        f"__label__{label}" for label in labels
    ]
    (tmp_path / "other.bin").write_bytes(b"x" * 500)
    assert read_labels(str(tmp_path / "other.bin")) is None
    assert read_labels(str(tmp_path / "nowhere.bin")) is None


@pytest.mark.parametrize("place", ["prepare", "sft"])
def test_rules_by_language_need_a_step_before_that_measures_it(
    place: str, tmp_path: Path
) -> None:
    steps = "[{filter: {by_language: {de: {}}}}, langid]"
    section = (
        f"prepare: {steps}"
        if place == "prepare"
        else (
            f"model: {{path: m}}\nsft: {{data: [{{path: x}}], steps: 1, prepare: {steps}}}"
        )
    )
    text = f"name: a\nsources: {{a: {{path: x}}}}\n{section}\n"
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(
        ManifestError,
        match="which no earlier step measures; put `langid` before this step",
    ):
        load_manifest(tmp_path / "m.yaml")
    (tmp_path / "m.yaml").write_text(
        text.replace("[{filter", "[langid, {filter").replace(", langid]", "]")
    )
    load_manifest(tmp_path / "m.yaml")


def test_a_setting_of_one_language_is_read_from_the_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "m.yaml").write_text(
        MANIFEST.format(langid="{keep: [de]}", by_language="{de: }")
    )
    loaded = load_manifest(
        tmp_path / "m.yaml",
        [
            "filter.by_language.de.gopher_quality.min_words=7",
            "filter.gopher_quality.max_words=900",
        ],
    )
    section = loaded.prepare[1].config
    assert isinstance(section, Filter)
    assert section.by_language["de"].gopher_quality is not None
    assert (
        section.by_language["de"].gopher_quality.min_words,
        section.by_language["de"].gopher_quality.max_words,
    ) == (
        7,
        900,
    )


@pytest.mark.parametrize(
    ("reason", "judged", "threshold"),
    [
        ("gopher_quality/min_words", {}, 50),
        ("de/gopher_quality/min_words", {"rules_language": "de"}, 20),
        ("de/gopher_quality/max_words", {"rules_language": "de"}, 100_000),
    ],
)
def test_explain_shows_the_threshold_of_the_document_language(
    reason: str, judged: dict[str, Any], threshold: float
) -> None:
    recipe = Filter.model_validate(
        {"by_language": {"de": {"gopher_quality": {"min_words": 20}}}}
    ).model_dump(mode="json", context=RECIPE)
    assert find_threshold(recipe, reason, judged) == threshold


@pytest.mark.parametrize(
    ("judged", "threshold"),
    [
        ({"language": "de", "language_score": 0.3}, 0.5),
        ({"language": "sr", "script": "Cyrl"}, 0.8),
        ({"language": "sr", "script": "Latn"}, 0.7),
        ({"language": "fr"}, 0.1),
    ],
)
def test_explain_shows_the_required_score_of_the_document_language(
    judged: dict[str, Any], threshold: float
) -> None:
    recipe = {
        "keep": {"de": 0.5, "srp_Cyrl": 0.8, "sr": 0.7, "*": 0.1},
        "threshold": 0.65,
    }
    assert find_threshold(recipe, "language_score", judged) == threshold
    assert (
        find_threshold({"keep": ["de"], "threshold": 0.65}, "language_score", judged)
        == 0.65
    )
