"""Manifests as objects: created in Python, loaded, changed, saved, and rejected with
the messages of the command line.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import gristmill
from benchmarks.checkout import ROOT
from gristmill import Manifest, ManifestError
from gristmill.core.store import Store
from gristmill.flows.python.manifest_builder import file_to_run, overrides_of
from gristmill.mixtures.loader import load_manifest

PREPARE = [
    {"filter": {"rules": {"gopher_quality": {"min_words": 12, "max_words": 5000}}}},
    "dedup",
]
SECTIONS: dict[str, Any] = {
    "name": "made",
    "seed": 3,
    "sources": {"web": {"path": "web/*.jsonl"}},
    "prepare": PREPARE,
}


def test_python_manifest_equals_the_file_with_the_same_keys(tmp_path: Path) -> None:
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(SECTIONS))
    manifest = Manifest(**SECTIONS, folder=tmp_path)
    assert manifest.settings == load_manifest(tmp_path / "made.yaml")
    assert (
        manifest
        == Manifest(SECTIONS, folder=tmp_path)
        == Manifest.load(tmp_path / "made.yaml")
    )
    assert manifest.settings.sources["web"].path == str(tmp_path / "web" / "*.jsonl")  # type: ignore[union-attr]
    assert (manifest.name, manifest.folder, manifest.file) == ("made", tmp_path, None)


def test_python_values_become_yaml_values(tmp_path: Path) -> None:
    import numpy as np

    manifest = Manifest(
        name="made",
        seed=np.int64(3),
        folder=tmp_path,
        prepare=tuple(PREPARE),
        sources={"web": {"path": Path("web", "*.jsonl")}},
    )
    assert manifest.content == SECTIONS
    assert yaml.safe_load(manifest.to_yaml()) == SECTIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    sorted(
        path
        for folder in ("mixtures", "benchmarks")
        for path in (ROOT / folder).rglob("*.yaml")
    ),
    ids=lambda file: file.name,
)
def test_saved_manifest_loads_as_equal(file: Path, tmp_path: Path) -> None:
    loaded = Manifest.load(file)
    assert Manifest.load(loaded.save(tmp_path / "elsewhere" / "saved.yaml")) == loaded
    # The manifest in a run's record is equal too, with presets expanded.
    recorded = Manifest(
        loaded.settings.model_dump(mode="json", exclude_unset=True)
    ).settings
    assert recorded.model_dump() == loaded.settings.model_dump()


def test_manifest_saved_in_its_folder_is_unchanged(tmp_path: Path) -> None:
    assert (
        yaml.safe_load(
            Manifest(SECTIONS, folder=tmp_path).save(tmp_path / "made.yaml").read_text()
        )
        == SECTIONS
    )


STEPS = (
    "def count_word(text: str, word: str) -> dict:\n    return {'magic': "
    "text.count(word)}\n"
)
ANNOTATED = {
    **SECTIONS,
    "prepare": [
        {
            "annotate": {
                "use": "./steps.py:count_word",
                "with": {"word": "a"},
                "max": {"magic": 0},
            }
        }
    ],
}


def test_user_code_paths_are_kept_in_place_and_absolute_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    manifest = Manifest(ANNOTATED, folder=tmp_path)
    assert yaml.safe_load(manifest.save(tmp_path / "own.yaml").read_text()) == ANNOTATED
    assert Manifest.load(tmp_path / "own.yaml") == manifest
    elsewhere = manifest.save(tmp_path / "elsewhere" / "own.yaml")
    assert f"use: {tmp_path / 'steps.py'}:count_word" in elsewhere.read_text()
    assert Manifest.load(elsewhere) == manifest
    # A run's record contains the code, so the manifest outlives the file.
    recorded = manifest.settings.model_dump(mode="json", exclude_unset=True)
    (tmp_path / "steps.py").unlink()
    assert Manifest(Manifest(recorded).content) == manifest
    with pytest.raises(
        ManifestError,
        match=r"Manifest: prepare\[0\]\.annotate\.use: there is no file steps\.py",
    ):
        Manifest(ANNOTATED, folder=tmp_path)


def test_function_of_a_file_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module("own_steps").count_word
    step = {"use": function, "with": {"word": "a"}, "max": {"magic": 0}}
    manifest = Manifest({**SECTIONS, "prepare": [{"annotate": step}]})
    assert (
        manifest.content["prepare"][0]["annotate"]["use"]
        == f"{tmp_path / 'own_steps.py'}:count_word"
    )


def test_replace_does_not_modify_the_original_manifest(
    tmp_path: Path,
) -> None:
    manifest = Manifest(SECTIONS, folder=tmp_path)
    changed_manifest = manifest.replace(
        {"filter.gopher_quality.min_words": 40, "seed": 4}
    )
    assert (
        changed_manifest.content["prepare"][0]["filter"]["rules"]["gopher_quality"][
            "min_words"
        ]
        == 40
    )
    assert (
        changed_manifest.settings.seed,
        manifest.settings.seed,
        manifest.content,
    ) == (4, 3, SECTIONS)
    assert changed_manifest != manifest
    file = manifest.save(tmp_path / "made.yaml")
    assert (
        Manifest.load(file, set={"seed": 4, "filter.gopher_quality.min_words": 40})
        == changed_manifest
    )


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
@example(value={"\x85": "a\x85b"})
def test_overrides_round_trip_through_the_command_line(value: Any) -> None:
    (override,) = overrides_of({"key": value})
    assert yaml.safe_load(override.removeprefix("key=")) == value


def test_python_manifest_reports_all_problems_like_a_file(
    tmp_path: Path,
) -> None:
    sections = {
        "name": "a b",
        "sources": {"web": {"pth": "x"}},
        "prepare": [{"filter": {"rules": {"gopher_quality": {"min_wrds": 3}}}}],
    }
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(sections))
    with pytest.raises(ManifestError) as file_error:
        load_manifest(tmp_path / "wrong.yaml")
    with pytest.raises(ManifestError) as python_error:
        Manifest(sections)
    assert sorted(
        (problem.key, problem.message) for problem in python_error.value.problems
    ) == sorted((problem.key, problem.message) for problem in file_error.value.problems)
    assert (
        "Manifest: prepare[0].filter.rules.gopher_quality.min_wrds: unknown key, did "
        "you mean 'min_words'?" in str(python_error.value)
    )
    with pytest.raises(
        ManifestError, match=r"--set filter\.gopher_quality\.min_words: "
    ):
        Manifest(SECTIONS).replace({"filter.gopher_quality.min_words": "many"})


def test_unsupported_python_value_is_rejected() -> None:
    with pytest.raises(
        ManifestError, match=r"Manifest: .*\(bytes\) cannot be a value in a manifest"
    ):
        Manifest(name="made", sources={"web": {"path": b"web"}})
    with pytest.raises(
        ManifestError, match="write it at the top level of a file of its own"
    ):
        Manifest(name="made", sources={"web": {"path": lambda: "web"}})


def test_function_of_a_module_becomes_its_name(tmp_path: Path) -> None:
    manifest = Manifest(
        name="made",
        sources={"web": {"path": "web", "licence": shutil.which}},
        folder=tmp_path,
    )
    assert manifest.content["sources"]["web"]["licence"] == f"{shutil.__file__}:which"


def test_manifest_without_a_file_is_saved_in_the_store(
    tmp_path: Path,
) -> None:
    manifest, store = Manifest(SECTIONS, folder=tmp_path), Store.at(tmp_path / "store")
    file = file_to_run(manifest, store)
    assert Path(file).parent == tmp_path / "store" / "manifests"
    assert Manifest.load(file) == manifest
    assert file_to_run(manifest, store) == file
    assert list(store.outputs()) == []
    saved = manifest.save(tmp_path / "made.yaml")
    assert file_to_run(manifest, store) == str(saved)
    assert file_to_run(manifest.replace({"seed": 9}), store) != str(saved)
    saved.write_text(saved.read_text() + "\nseed: 9\n")
    assert file_to_run(manifest, store) == file


def test_every_public_name_is_exported() -> None:
    assert sorted(gristmill.__all__) == sorted(
        [*gristmill._PLACES, *gristmill._GROUPS, "__version__"]
    )
    for name in gristmill.__all__:
        assert getattr(gristmill, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'rum'"):
        gristmill.rum  # noqa: B018
