"""Licences of pages, files and records, from their reading to the step `licences`."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from upath import UPath

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table
from gristmill.dataprep.licences import licences
from gristmill.dataprep.licences.folder_licence import (
    FolderLicences,
    licence_of_text,
)
from gristmill.dataprep.licences.statements import of_header, of_metadata
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.readers.page_rights import page_rights
from gristmill.mixtures.steps.licences import Licences
from tests.dataprep.source_files import listed

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
WORDS = "Some words that stand in for the text of a page or a file. " * 5
CC = "https://creativecommons.org/licenses"


@pytest.mark.parametrize(
    ("html", "licence", "by"),
    [
        (f'<link href="{CC}/by/4.0/" rel="license">', "CC-BY-4.0", "link"),
        (f"<a class=x rel='nofollow license' href={CC}/by/4.0/>", "CC-BY-4.0", "link"),
        (
            f'<a rel="license" href="{CC}/by/4.0/">text</a> pictures: '
            f'<a href="{CC}/by-nc/2.0/">',
            "CC-BY-4.0",
            "link",
        ),
        (
            f'<a rel=license href="{CC}/by/4.0/"><a rel=license '
            'href="https://opensource.org/licenses/MIT">',
            "CC-BY-4.0 AND MIT",
            "link",
        ),
        (
            f'<script type="application/ld+json">{{"license": "{CC}/by-sa/4.0/"}}'
            "</script>",
            "CC-BY-SA-4.0",
            "address",
        ),
        ('<a rel="license" href="/terms">', "/terms", "link"),
    ],
)
def test_licence_of_a_page(html: str, licence: str, by: str) -> None:
    assert page_rights(html) == {"licence": licence, "licence_by": by}


@pytest.mark.parametrize(
    "html",
    [
        f'<a rel="licensed" href="{CC}/">all licences</a>',
        '<a href="https://example.org/license">our license</a>',
        "<p>creativecommons.org is a site</p>",
    ],
)
def test_page_without_a_licence(html: str) -> None:
    assert page_rights(html) == {}


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("# SPDX-License-Identifier: MIT\nimport os\n", "MIT"),
        ("/* SPDX-License-Identifier: MIT OR Apache-2.0 */\n", "MIT OR Apache-2.0"),
        (
            "<!-- SPDX-License-Identifier: CC0-1.0 -->\n"
            "// SPDX-License-Identifier: MIT OR ISC",
            "CC0-1.0 AND (MIT OR ISC)",
        ),
        ("# A licence: MIT\n", None),
    ],
)
def test_header_of_a_file(text: str, licence: str | None) -> None:
    statement = of_header(text)
    assert (None if statement is None else statement.licence) == licence


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"license": "mit"}, "mit"),
        ({"license": ["MIT", "Apache-2.0"]}, "Apache-2.0 AND MIT"),
        ({"licence": "", "license": None}, None),
        ({"title": "licence"}, None),
    ],
)
def test_licence_of_a_record(metadata: dict[str, object], licence: str | None) -> None:
    statement = of_metadata(json.dumps(metadata))
    assert (None if statement is None else statement.licence) == licence


@pytest.mark.parametrize(
    ("name", "content", "licence"),
    [
        ("pyproject.toml", '[project]\nlicense = "MIT"', "MIT"),
        (
            "pyproject.toml",
            '[project]\nlicense = {text = "BSD 3-Clause"}',
            "BSD-3-Clause",
        ),
        ("pyproject.toml", '[tool.poetry]\nlicense = "MIT"', "MIT"),
        ("Cargo.toml", '[package]\nlicense = "MIT/Apache-2.0"', "MIT OR Apache-2.0"),
        ("package.json", '{"license": {"type": "ISC"}}', "ISC"),
        (
            "PKG-INFO",
            "Name: x\nLicense: see LICENSE\n"
            "Classifier: License :: OSI Approved :: MIT License\n",
            "MIT",
        ),
        ("README.md", "---\nlicense: cc-by-4.0\n---\n# A data set\n", "CC-BY-4.0"),
        ("README.md", "# A project\n", None),
        ("package.json", "{", None),
        ("pyproject.toml", '[project]\nlicense = {file = "LICENSE"}', None),
    ],
)
def test_package_metadata(
    name: str, content: str, licence: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    statement = FolderLicences(str(tmp_path)).of(str(tmp_path))
    assert (None if statement is None else statement.licence) == licence


def licence_text(name: str) -> str:
    from identify.vendor.licenses import LICENSES

    return dict(LICENSES)[name].replace("[year] [fullname]", "2020 A. Person")


def test_licence_text_is_recognised_with_any_copyright_notice() -> None:
    assert licence_of_text(licence_text("MIT")) == "MIT"
    assert licence_of_text(licence_text("GPL-3.0")) == "GPL-3.0-only"
    assert licence_of_text(licence_text("MIT") * 3) is None
    assert licence_of_text(WORDS) is None


def test_nearest_folder_states_the_licence_and_none_above_the_source(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkout" / "data"
    (root / "a" / "b").mkdir(parents=True)
    (tmp_path / "checkout" / "LICENSE").write_text(licence_text("MIT"))
    assert FolderLicences(str(root)).of(f"{root}/a") is None
    (root / "LICENSE-MIT").write_text(licence_text("MIT"))
    (root / "COPYING").write_text(licence_text("ISC"))
    (root / "a" / "package.json").write_text('{"license": "0BSD"}')
    folders = FolderLicences(str(root))
    assert [
        statement and (statement.licence, statement.by)
        for statement in map(folders.of, (str(root), f"{root}/a/b"))
    ] == [("ISC AND MIT", "file"), ("0BSD", "package")]


@pytest.mark.parametrize("place", ["local", "memory"])
def test_listing_changes_with_the_licence_of_a_folder(
    tmp_path: Path, place: str
) -> None:
    folder = tmp_path if place == "local" else UPath(f"memory:/{tmp_path}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(WORDS)
    assert "licence" not in listed(f"{folder}/*.txt")[0]
    (folder / "LICENSE").write_text(licence_text("ISC"))
    assert listed(f"{folder}/*.txt")[0]["licence"] == "ISC"


@pytest.fixture
def inputs(tmp_path: Path, make_context: Callable[..., Context]) -> dict[str, Path]:
    """Documents of a page, of text files with and without a header, and of records."""
    sources = {}
    for name, content in {
        "web/page.html": f'<p>{WORDS}</p><a rel="license" href="{CC}/by-sa/4.0/">',
        "code/LICENSE": licence_text("MIT"),
        "code/a.py": f'"""{WORDS}"""',
        "code/late.py": f"{WORDS * 20}\n# SPDX-License-Identifier: ISC",
        "code/b.py": f'# SPDX-License-Identifier: GPL-2.0-only\n"""{WORDS}"""',
        "rows/rows.jsonl": "\n".join(
            json.dumps({"text": f"{number} {WORDS}", "license": licence})
            for number, licence in enumerate(("cc-by-4.0", "house rules", None))
        ),
        "plain/c.txt": WORDS,
    }.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        source = name.partition("/")[0]
        pattern = "*.py" if source == "code" else f"*{path.suffix}"
        sources[source] = {"path": f"{path.parent}/{pattern}"}
    folder = tmp_path / "ingest"
    ingest.run({}, {"sources": sources}, folder, make_context("ingest-work"))
    return {"ingest": folder}


def judged(inputs: dict[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    """Locator -> row of annotations."""
    return {
        row["locator"]: {**row, **judgement}
        for path in sorted(inputs["ingest"].glob("part-*.parquet"))
        for row, judgement in zip(
            read_table(path).to_pylist(),
            read_table(out / path.name).to_pylist(),
            strict=True,
        )
    }


def test_first_statement_counts_and_unknown_is_a_class(
    inputs: dict[str, Path], tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    config = {"stated": {"plain": "Apache 2.0", "code": "ISC"}}
    summary = licences.run(inputs, config, tmp_path / "out", make_context("work"))
    rows = judged(inputs, tmp_path / "out")
    assert {name: (row["spdx"], row["spdx_by"]) for name, row in rows.items()} == {
        "page.html": ("CC-BY-SA-4.0", "link"),
        "a.py": ("MIT", "file"),
        "late.py": ("MIT", "file"),
        "b.py": ("GPL-2.0-only", "header"),
        "rows.jsonl#1": ("CC-BY-4.0", "record"),
        "rows.jsonl#2": ("unknown", "record"),
        "rows.jsonl#3": ("unknown", ""),
        "c.txt": ("Apache-2.0", "source"),
    }
    assert all(row["keep"] for row in rows.values())
    assert summary.licences["unknown"] == 2


@pytest.mark.parametrize(("more", "kept"), [([], 3), (["unknown"], 6)])
def test_allow_list(
    more: list[str],
    kept: int,
    inputs: dict[str, Path],
    tmp_path: Path,
    make_context: Callable[..., Context],
) -> None:
    config = {"allow": ["mit", "CC-BY-4.0", *more]}
    summary = licences.run(inputs, config, tmp_path / "out", make_context("work"))
    reasons = {
        name: row["reason"] for name, row in judged(inputs, tmp_path / "out").items()
    }
    assert summary.counts["kept"] == kept
    assert {reasons["page.html"], reasons["b.py"]} == {"licence"}
    expected = None if more else "unknown_licence"
    assert reasons["c.txt"] == reasons["rows.jsonl#2"] == expected


def test_allow_list_refuses_what_is_no_identifier() -> None:
    with pytest.raises(ValueError, match="CC-BY"):
        Licences.model_validate({"allow": ["CC-BY"]})


@pytest.mark.skipif(not SHARED.exists(), reason="no test data")
def test_real_pages_and_licence_texts() -> None:
    """Pages with a link whose kind of licence was noted by hand; licences of projects,
    of which two are composed of several texts and one is not among the common ones.
    """
    folder = SHARED / "web" / "trafilatura_cc"
    pages = json.loads((folder / "evaldata.json").read_bytes())
    kinds = {page["file"]: page["page_licence"] for page in pages.values()}
    with (folder / "html.tar.zst").open("rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file).read()
    recognised = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if (stream := archive.extractfile(member)) is not None:
                html = stream.read().decode("utf-8", "replace")
                name = member.name.rpartition("/")[2]
                recognised[name] = page_rights(html)["licence"]
    assert {
        name: licence.lower()
        .removeprefix("cc-")
        .split("-4")[0]
        .split("-3")[0]
        .split("-2")[0]
        for name, licence in recognised.items()
    } == {name: kinds[name] for name in recognised}
    texts = [path.read_text() for path in (SHARED / "LICENSES").glob("*LICENSE*")]
    assert sum(licence_of_text(text) is not None for text in texts) >= 0.85 * len(texts)
