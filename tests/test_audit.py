"""The audit of the environment finds what it is for, and says what to do about it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parent.parent / ".ci"


def load_audit() -> Any:
    specification = importlib.util.spec_from_file_location("audit", FOLDER / "audit.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["audit"] = module
    specification.loader.exec_module(module)
    return module


audit = load_audit()


def package(name: str, version: str = "1.0", licence: str = "MIT", requires: tuple[str, ...] = (),
            files: tuple[str, ...] = ()) -> Any:
    return audit.Package(name, version, licence, requires, files)


def install(folder: Path, metadata: str, files: dict[str, str]) -> Distribution:
    """A distribution as pip leaves it."""
    place = folder / "some-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some\nVersion: 1.0\n{metadata}\n")
    rows = []
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
    (place / "RECORD").write_text("\n".join([*rows, "some-1.0.dist-info/RECORD,,"]))
    return Distribution.at(place)


def test_what_is_installed_is_what_constraints_say() -> None:
    pins = audit.read_pins("# a comment\nTorch==2.13.0\nsome_thing==1.0  # why\n")
    assert pins == {"torch": "2.13.0", "some-thing": "1.0"}
    installed = [package("torch", "2.13.0+cpu", requires=("nvidia-nccl==2.27.5; extra == 'x'",)),
                 package("nvidia-nccl", "2.27.5"), package("some-thing", "1.1"), package("other", "3"), package("pip")]
    assert list(audit.unpinned(installed, pins)) == [
        "some-thing 1.1 is installed, constraints.txt says 1.0; rebuild the environment",
        "other 3 is installed and not pinned; add other==3 to constraints.txt, or rebuild the environment"]


def test_requirements_between_packages_are_met() -> None:
    installed = [package("a", requires=("b>=2", "c; extra == 'x'", "d; python_version < '3'", "e")),
                 package("b", "1.9")]
    assert list(audit.unmet(installed)) == [
        "a 1.0 requires b>=2, installed is 1.9", "a 1.0 requires e, which is not installed"]


def test_no_file_belongs_to_two_packages() -> None:
    installed = [package("fasttext", files=("fasttext_pybind.so", "fasttext/a.py")),
                 package("fasttext-predict", files=("fasttext_pybind.so",)), package("x", files=("x.py",))]
    assert list(audit.shared_files(installed)) == [
        "fasttext and fasttext-predict both own fasttext_pybind.so; only one of them can be installed"]


def test_versions_that_are_known_to_be_bad_are_named_with_what_to_use_and_where_it_is_written() -> None:
    entries = yaml.safe_load((FOLDER / "known_bad.yaml").read_text())
    for entry in entries:
        assert entry.keys() == {"package", "versions", "reason", "use", "source"}
        # What is recommended is not itself among what is refused.
        wanted = Requirement(entry["use"])
        assert wanted.name != entry["package"] or not any(
            Requirement(f"x{entry['versions']}").specifier.contains(one.version)
            for one in wanted.specifier if one.operator == ">=")
    found = list(audit.known_bad([package("torch", "2.5.1"), package("fastapi", "0.150.0")], entries))
    assert found == ["torch 2.5.1: torch.load with weights_only=True can run code; use torch>=2.6.0 "
                     "(CVE-2025-32434, GHSA-53q9-r3pm-6pq6)"]


@pytest.mark.parametrize(("licence", "problem"), [
    ("MIT", ""), ("LGPL-2.1-or-later", ""), ("MPL-1.1 OR GPL-2.0-only OR LGPL-2.1-or-later", ""),
    ("GPL-3.0-only", "under GPL-3.0-only"), ("GNU Affero General Public License v3", "reach out"),
    ("", "names no licence"),
])
def test_every_package_has_a_licence_that_stays_with_it(licence: str, problem: str) -> None:
    found = list(audit.unlicensed([package("some", licence=licence)], {}))
    assert [problem in one for one in found] == ([True] if problem else [])
    assert list(audit.unlicensed([package("some", licence=licence)], {"some": "MIT"})) == []


@pytest.mark.parametrize(("metadata", "licence"), [
    ("License-Expression: Apache-2.0\nLicense: ignored", "Apache-2.0"),
    ("Classifier: License :: OSI Approved :: MIT License", "MIT License"),
    ("License: BSD\n 3 clauses of text", "BSD"),
    ("", ""),
])
def test_a_licence_is_read_from_wherever_a_package_says_it(metadata: str, licence: str, tmp_path: Path) -> None:
    assert audit.licence_of(install(tmp_path, metadata, {})) == licence


def test_a_changed_or_absent_file_is_found(tmp_path: Path) -> None:
    some = install(tmp_path, "", {"some/a.py": "a = 1\n", "some/b.py": "b = 1\n", "some/c.py": "c = 1\n"})
    assert list(audit.changed_files([some])) == []
    (tmp_path / "some" / "a.py").write_text("a = 2\n")
    (tmp_path / "some" / "b.py").unlink()
    assert list(audit.changed_files([some])) == [
        f"some: {tmp_path / 'some/a.py'} is not the file that was installed", f"some: {tmp_path / 'some/b.py'} is gone"]


def test_the_list_of_licences_has_a_row_for_every_pin() -> None:
    table = audit.licence_table([package("some"), package("pip")], {"some": "1.0"}, {"some": "BSD-3-Clause"})
    assert table.splitlines()[-1] == "| some | 1.0 | BSD-3-Clause |"
    assert "pip" not in table
