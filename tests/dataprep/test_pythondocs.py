"""Documents from the Python installation: code, docstrings, descriptions of
distributions.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gristmill.dataprep.readers import pythondocs
from gristmill.dataprep.readers.pythondocs import (
    DOCS,
    STDLIB,
    python_documents,
    python_listing,
    python_parts,
)

MODULE = '''"""A module about nothing.

{filler}
"""

class Thing:
    """A thing."""

    def act(self, *, hard: bool = False) -> None:
        """Act on it."""

def long():
    """{long}"""

def bare(): pass
'''


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small standard library and site-packages in place of the interpreter's own."""
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    files = {
        "thing/__init__.py": MODULE.format(filler="word " * 60, long="long " * 400),
        "test/test_thing.py": '"""Not part of it."""',
        "latin.py": "# -*- coding: latin-1 -*-\n" + "# caf\u00e9 " * 60,
        "broken.py": "def (:\n" + "# padding\n" * 40,
        "table.py": "# This file is generated from a table\n" + "x = 1\n" * 100,
        "huge.py": "x = 1\n" * 60_000,
        "short.py": "x = 1\n",
        "site-packages/other.py": "x = 1\n" * 100,
    }
    for name, text in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(text, "latin-1")
    for name in ("Some_Thing", "gristmill"):
        info = packages / f"{name}-1.0.dist-info"
        (info / "licenses").mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "about it " * 50
        )
        (info / "licenses" / "LICENSE").write_text("Permission is hereby granted " * 20)
        (info / "licenses" / "NOTICE").write_bytes("caf\u00e9".encode("latin-1"))
        recorded = ("METADATA", "licenses/LICENSE", "licenses/NOTICE", "LICENSE")
        (info / "RECORD").write_text(
            "".join(f"{info.name}/{file},,\n" for file in recorded)
        )
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return library


@pytest.mark.slow
def test_importlib_metadata_backport_does_not_change_distributions(
    installation: Path,
) -> None:
    pytest.importorskip("importlib_metadata")
    code = (
        "import sys; {first_import} from gristmill.dataprep.readers.pythondocs "
        "import DOCS, python_documents; "
        "print(len([d for d in python_documents(DOCS, 'distributions') if "
        "d.locator.endswith('/METADATA')]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code.format(first_import=first_import)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for first_import in ("", "import importlib_metadata;")
    ]
    assert outputs[0] == outputs[1] != "0\n"


def test_code_is_the_standard_library_without_tests_tables_and_packages(
    installation: Path,
) -> None:
    documents = list(python_documents(STDLIB, "code"))
    assert [document.locator for document in documents] == [
        "stdlib/broken.py",
        "stdlib/latin.py",
        "stdlib/thing/__init__.py",
    ]
    assert "caf\u00e9" in documents[1].text


def test_docstrings_are_one_document_per_module_and_long_ones_separate(
    installation: Path,
) -> None:
    documents = list(python_documents(DOCS, "docstrings"))
    assert [document.locator for document in documents] == [
        "stdlib/broken.py",
        "stdlib/thing/__init__.py:long",
        "stdlib/thing/__init__.py",
    ]
    assert "Python" in documents[0].error
    assert documents[1].text == "thing.long()\n\n" + "long " * 400
    assert documents[2].text.endswith(
        "thing.Thing\n\nA thing.\n\n\nthing.Thing.act(self, *, hard: "
        "bool=False)\n\nAct on it."
    )


def test_distributions_yield_descriptions_and_licences_except_gristmills(
    installation: Path,
) -> None:
    documents = list(python_documents(DOCS, "distributions"))
    assert [document.locator for document in documents] == [
        "dist/some-thing/METADATA",
        "dist/some-thing/licenses/LICENSE",
        "dist/some-thing/licenses/NOTICE",
    ]
    assert documents[0].text == "about it " * 50
    assert documents[0].metadata == {"version": "1.0"}
    assert "UTF-8" in documents[2].error


def test_listing_names_interpreter_and_distributions(installation: Path) -> None:
    stamps = {
        entry["path"]: entry["stamp"] for entry in python_listing(DOCS, verify=False)
    }
    assert stamps.pop("python")
    assert stamps == {
        "dist/some-thing": "1.0",
        "documents": str(pythondocs.CONTENT_VERSION),
    }
    assert {entry["path"] for entry in python_listing(STDLIB, verify=False)} == {
        "python",
        "documents",
    }


def test_verified_listing_hashes_the_documents(installation: Path) -> None:
    before = python_listing(STDLIB, verify=True)
    assert python_listing(STDLIB, verify=True) == before
    (installation / "latin.py").write_text("# cafe " * 60)
    assert python_listing(STDLIB, verify=True) != before


@pytest.mark.parametrize("path", [DOCS, STDLIB])
def test_reading_is_deterministic(installation: Path, path: str) -> None:
    for part in python_parts(path):
        assert list(python_documents(path, part)) == list(python_documents(path, part))


def test_real_interpreter_has_megabytes_of_unique_documents() -> None:
    topics = {
        document.locator: document for document in python_documents(DOCS, "topics")
    }
    if topics:
        assert "assert" in topics["topics/assert"].text
    code = list(python_documents(STDLIB, "code"))
    assert sum(len(document.text) for document in code) > 3_000_000
    assert len({document.locator for document in code}) == len(code)
    assert not [document for document in code if document.error]
    assert any(document.locator == "stdlib/json/decoder.py" for document in code)
