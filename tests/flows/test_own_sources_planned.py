"""User code in sources, as seen by plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.flows.running.session import Session
from gristmill.mixtures.loader import ManifestError
from tests.sessions import open_beside

MANIFEST = """name: own
sources:
  cards:
    list: {use: ./own.py:files, with: {ending: txt}}
    read: {use: ./own.py:read}
"""
CODE = """import beside
def files(path, ending):
    (path / "ran").touch()
    return [f"a.{ending}"]
def read(path, least=0):
    yield {"text": beside.TEXT}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "m.yaml": MANIFEST,
        "own.py": CODE,
        "beside.py": "TEXT = 'x'\n",
        "a.txt": "a",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def opened(folder: Path, *overrides: str, allow: bool = False) -> Session:
    return open_beside(folder / "m.yaml", *overrides, allow_code=allow)


@pytest.mark.slow
def test_listing_code_runs_only_if_allowed(folder: Path) -> None:
    with pytest.raises(
        ManifestError,
        match=r"m.yaml:4: sources.cards.list: planning would run own:files "
        r"\(own.py: 6 lines, beside.py: 1 lines\)",
    ):
        opened(folder)
    assert not (folder / "ran").exists()
    allowed_fingerprint = opened(folder, allow=True).plan["ingest"].fingerprint
    assert (folder / "ran").exists()
    assert opened(folder).plan["ingest"].fingerprint == allowed_fingerprint
    with pytest.raises(ManifestError, match="planning would run own:files"):
        opened(folder, "sources.cards.list.with={ending: md}")
    (folder / "own.py").write_text(CODE.replace("touch()", "unlink()"))
    with pytest.raises(ManifestError, match="planning would run own:files"):
        opened(folder)


@pytest.mark.slow
def test_fingerprint_depends_only_on_code_options_and_listing(
    folder: Path,
) -> None:
    def fingerprint(*overrides: str) -> str:
        return opened(folder, *overrides, allow=True).plan["ingest"].fingerprint

    original = fingerprint()
    (folder / "other.py").write_text("# imported by nothing")
    assert fingerprint("engine.workers=1") == original
    (folder / "b.md").write_text("b")
    distinct_fingerprints = {
        original,
        fingerprint("sources.cards.read.with={least: 1}"),
    }
    (folder / "beside.py").write_text("TEXT = 'y'\n")
    distinct_fingerprints.add(fingerprint())
    (folder / "a.txt").write_text("longer")
    distinct_fingerprints.add(fingerprint())
    assert len(distinct_fingerprints) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "sources.cards.format=jsonl",
            "`read` and `format: jsonl` both determine how files are read",
        ),
        (
            "sources.cards.read.use=./own.py:raed",
            "own.py defines no 'raed', did you mean 'read'?",
        ),
        (
            "sources.cards.read.use=https://example.org/own.py:read",
            "code must come from a file beside the manifest",
        ),
        (
            "sources.cards.read.with={leas: 1}",
            "own.py, line 5: read",
        ),
        (
            "sources.cards.read.use=./own.py:files",
            "missing a required argument: 'ending'",
        ),
    ],
)
def test_invalid_key_is_reported_with_its_line(
    folder: Path, setting: str, message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        opened(folder, setting, allow=True)
    assert message in str(caught.value)


@pytest.mark.slow
def test_error_of_a_listing_is_reported_at_its_key(folder: Path) -> None:
    (folder / "own.py").write_text(
        CODE.replace('(path / "ran").touch()', "raise KeyError(ending)")
    )
    with pytest.raises(
        ManifestError,
        match=r"m.yaml:4: sources.cards.list: KeyError: 'txt' \(own.py, line 3\)",
    ):
        opened(folder, allow=True)
