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
from gristmill.mixtures.loader import ManifestError, load_manifest
from gristmill.mixtures.steps.filter import Filter
from tests.sessions import open_beside

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


def problems(folder: Path, langid: str, by_language: str) -> list[str]:
    """Return the errors of opening the manifest for a run."""
    (folder / "web.jsonl").write_text('{"text": "a page"}\n')
    (folder / "m.yaml").write_text(
        MANIFEST.format(langid=langid, by_language=by_language)
    )
    try:
        open_beside(folder / "m.yaml")
    except ManifestError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


def test_labels_are_read_from_the_head_of_a_model(tmp_path: Path) -> None:
    labels = ["deu_Latn", "zho_Hans", "ägy_Egyp"]
    write_model(tmp_path / "glotlid.bin", labels)
    assert read_labels(str(tmp_path / "glotlid.bin")) == [
        f"__label__{label}" for label in labels
    ]
    (tmp_path / "other.bin").write_bytes(b"x" * 500)
    assert read_labels(str(tmp_path / "other.bin")) is None
    assert read_labels(str(tmp_path / "nowhere.bin")) is None


@pytest.mark.parametrize(
    ("langid", "by_language", "sentences"),
    [
        ("{keep: [de, en]}", "{de: {gopher_quality: {min_words: 9}}}", []),
        (
            "{keep: [de, en]}",
            "{fr: {}}",
            ["langid keeps only de, en, so no document in fr reaches this step"],
        ),
        ("{keep: [de, xq]}", "{de: {}}", ["'xq' is not a language of lid.176"]),
        (
            '{keep: {"*": 0}}',
            "{deu: {}}",
            ["'deu' is not a language of lid.176, which knows 176; did you mean 'de'"],
        ),
        (
            '{keep: {"*": 0}}',
            "{deu_Latn: {}}",
            ["'de_Latn' is not a language of lid.176, which knows 176; did you mean"],
        ),
        (
            "{keep: {deu_Latn: 0.8, zh: 0.9}, model: glotlid.bin}",
            "{de: {}, zho_Hans: {}, zh: {}}",
            [],
        ),
        (
            "{keep: {zho_Hans: 0.8}, model: glotlid.bin}",
            "{zh: {}, zh_Hant: {}}",
            ["'zh_Hant' is not a language of glotlid.bin"],
        ),
        (
            "{keep: {fra_Latn: 0.8}, model: glotlid.bin}",
            "{}",
            ["'fr_Latn' is not a language of glotlid.bin"],
        ),
        (
            '{keep: {"*": 0}, model: glotlid.bin}',
            "{deu_Latn: {}, de_Latn: {}}",
            ["is the same language as 'deu_Latn'"],
        ),
    ],
)
def test_impossible_language_is_rejected_before_any_work(
    langid: str, by_language: str, sentences: list[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "glotlid.bin", ["deu_Latn", "zho_Hans"])
    messages = problems(tmp_path, langid, by_language)
    assert len(messages) == len(sentences), messages
    for problem, sentence in zip(messages, sentences, strict=True):
        assert sentence in problem
        assert problem.startswith(
            ("prepare[0].langid.keep", "prepare[1].filter.by_language.")
        )


@pytest.mark.parametrize("section", ["sft", "dpo"])
def test_impossible_language_of_examples_is_rejected_before_any_work(
    section: str, tmp_path: Path
) -> None:
    (tmp_path / "examples.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    manifest = f"""
name: tuned
model: {{path: model}}
{section}:
  data: [{{path: examples.jsonl}}]
  steps: 1
  prepare:
    - langid: {{keep: [de, xq]}}
    - filter: {{by_language: {{de: {{}}, fr: {{}}, deu: {{}}}}}}
"""
    (tmp_path / "m.yaml").write_text(manifest)
    with pytest.raises(ManifestError) as error:
        open_beside(tmp_path / "m.yaml")
    messages = {
        problem.key: problem.message
        for problem in error.value.problems
        if "langid" in str(problem.key) or "filter" in str(problem.key)
    }
    assert (
        "'xq' is not a language of lid.176"
        in messages[f"{section}.prepare[0].langid.keep"]
    )
    assert (
        "no document in fr reaches this step"
        in messages[f"{section}.prepare[1].filter.by_language.fr"]
    )
    assert (
        "did you mean 'de'" in messages[f"{section}.prepare[1].filter.by_language.deu"]
    )
    assert len(messages) == 3


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
