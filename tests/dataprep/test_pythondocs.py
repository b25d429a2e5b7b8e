"""Documents from the Python installation: code, docstrings, descriptions of
distributions.
"""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from gristmill.dataprep.readers import pythondocs
from gristmill.dataprep.readers.pythondocs import (
    DOCS,
    DOCSTRINGS,
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
        "table.py": "# This file is generated from a table\n" + "x = 1\n" * 100,
        "huge.py": "x = 1\n" * 60_000,
        "short.py": "x = 1\n",
        "site-packages/other.py": "x = 1\n" * 100,
    }
    for name, text in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(text, "latin-1")
    for name in ("Some_Thing", "other"):
        info = packages / f"{name}-1.0.dist-info"
        (info / "licenses").mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "about it " * 50
        )
        (info / "licenses" / "LICENSE").write_text("Permission is hereby granted " * 20)
        (info / "licenses" / "NOTICE").write_bytes(b"caf\xe9" + b"e" * 200)
        recorded = ("METADATA", "licenses/LICENSE", "licenses/NOTICE", "LICENSE")
        (info / "RECORD").write_text(
            "".join(f"{info.name}/{file},,\n" for file in recorded)
        )
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(pythondocs, "PACKAGES", ["some-thing"])
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
        "d[0].endswith('/METADATA')]))"
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
    assert [locator for locator, _, _ in documents] == [
        "stdlib/latin.py",
        "stdlib/thing/__init__.py",
    ]
    assert "caf\u00e9" in documents[0][1]


def test_docstrings_are_one_document_per_module_and_long_ones_separate(
    installation: Path,
) -> None:
    long, module = python_documents(DOCS, "docstrings")
    assert long == (
        "stdlib/thing/__init__.py:long",
        "thing.long()\n\n" + "long " * 400,
        {},
    )
    assert module[0] == "stdlib/thing/__init__.py"
    assert module[1].endswith(
        "thing.Thing\n\nA thing.\n\n\nthing.Thing.act(self, *, hard: "
        "bool=False)\n\nAct on it."
    )


def test_listed_packages_yield_descriptions_and_licences(installation: Path) -> None:
    about = {"version": "1.0"}
    assert list(python_documents(DOCS, "distributions")) == [
        ("dist/some-thing/METADATA", "about it " * 50, about),
        (
            "dist/some-thing/licenses/LICENSE",
            "Permission is hereby granted " * 20,
            about,
        ),
        ("dist/some-thing/licenses/NOTICE", "caf\ufffd" + "e" * 200, about),
    ]


def test_packages_are_requirements_of_gristmill_on_every_platform() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    requirements = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    assert {*pythondocs.PACKAGES} <= {
        re.split(r"[^a-z0-9-]", requirement)[0]
        for requirement in requirements
        if ";" not in requirement
    }


def test_listing_names_the_versions_of_interpreter_and_packages(
    installation: Path,
) -> None:
    stamps = {entry["path"]: entry["stamp"] for entry in python_listing(DOCS)}
    assert stamps == {
        "dist/some-thing": "1.0",
        "documents": f"version {pythondocs.CONTENT_VERSION}",
        "python": sys.version,
    }
    assert {entry["path"] for entry in python_listing(STDLIB)} == {
        "python",
        "documents",
    }


@pytest.mark.parametrize("path", [DOCS, STDLIB])
def test_reading_is_deterministic(installation: Path, path: str) -> None:
    for part in python_parts(path):
        assert list(python_documents(path, part)) == list(python_documents(path, part))


def test_real_interpreter_has_megabytes_of_unique_documents() -> None:
    topics = {locator: text for locator, text, _ in python_documents(DOCS, "topics")}
    if topics:
        assert "assert" in topics["topics/assert"]
    code = {locator: text for locator, text, _ in python_documents(STDLIB, "code")}
    assert sum(map(len, code.values())) > 3_000_000
    assert len(code) == len(list(python_documents(STDLIB, "code")))
    assert "stdlib/json/decoder.py" in code
    docstrings = {
        locator: text for locator, text, _ in python_documents(DOCSTRINGS, "docstrings")
    }
    assert sum(map(len, docstrings.values())) > 4_000_000  # what the demo needs
    assert docstrings["numpy/_core/fromnumeric.py:mean"].startswith("mean(a, ")
