"""Contents of an installed gristmill: the whole product, without tests and
benchmarks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import gristmill
from tests.test_architecture import LAYERS, ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def product_files() -> list[Path]:
    """Return all files relative to the root, without compiled ones."""
    return [
        path.relative_to(ROOT)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".nbc", ".nbi")
    ]


def package_of(folder: Path) -> str:
    return ".".join(
        folder.parts if folder.parts[0] == "gristmill" else ("gristmill", *folder.parts)
    )


def test_every_folder_with_modules_is_a_package_and_nothing_else_is() -> None:
    packages = {
        package_of(file.parent) for file in product_files() if file.suffix == ".py"
    }
    assert SETUPTOOLS["package-dir"] == {
        package_of(Path(layer)): layer for layer in LAYERS
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)


def test_files_that_are_no_modules_are_package_data() -> None:
    patterns = [
        f"{package.removeprefix('gristmill.').replace('.', '/')}/{pattern}"
        for package, package_patterns in SETUPTOOLS["package-data"].items()
        for pattern in package_patterns
    ]
    data_files = {file for file in product_files() if file.suffix != ".py"}
    assert (
        data_files
        - {
            path.relative_to(ROOT)
            for pattern in patterns
            for path in ROOT.glob(pattern)
        }
        == set()
    )


def test_types_and_licence_go_with_the_package() -> None:
    assert (ROOT / "gristmill" / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_citation_names_the_version_of_the_package() -> None:
    assert (
        f"\nversion: {gristmill.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    )


def test_both_ends_of_the_range_of_torch_are_tested() -> None:
    """constraints.txt installs the newest version, `make test-oldest` the oldest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (
        requirement
        for requirement in map(Requirement, project["optional-dependencies"]["train"])
        if requirement.name == "torch"
    )
    (pinned,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    newest = Version(pinned)
    assert newest in torch.specifier
    assert Version(f"{newest.major}.{newest.minor + 1}") not in torch.specifier
    process = subprocess.run(
        ["make", "--dry-run", "--always-make", "build/oldest/installed"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (script,) = re.findall(r'"torch==\$\((sed .*?)\)"', process.stdout)
    oldest = Version(
        subprocess.run(
            script, shell=True, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
    assert oldest in torch.specifier
    assert Version(f"{oldest.major}.{oldest.minor - 1}.99") not in torch.specifier


def in_a_new_process(code: str, cwd: Path, **variables: str) -> str:
    """Return the output of a Python with only the standard library, without the
    installed gristmill.
    """
    process = subprocess.run(
        [sys.executable, "-S", *code.split(" ", 1)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return process.stdout.strip()


def test_a_checkout_that_is_not_installed_has_the_package_and_what_lies_beside_it(
    tmp_path: Path,
) -> None:
    code = (
        "-c import gristmill, gristmill.core.seeds as seeds; "
        "print(gristmill.__version__, seeds.__file__)"
    )
    version, file = in_a_new_process(code, tmp_path, PYTHONPATH=str(ROOT)).split()
    assert (version, Path(file)) == (gristmill.__version__, ROOT / "core" / "seeds.py")


def test_an_installed_package_looks_only_inside_itself(tmp_path: Path) -> None:
    """Other packages beside it may be called `train` or `flows`."""
    for file in product_files():
        target = tmp_path / Path(*package_of(file.parent).split(".")) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)
    (tmp_path / "flows").mkdir()
    code = (
        "-c import gristmill, gristmill.flows; print(*gristmill.__path__, "
        "*gristmill.flows.__path__)"
    )
    assert in_a_new_process(code, ROOT.parent, PYTHONPATH=str(tmp_path)).split() == [
        str(tmp_path / "gristmill"),
        str(tmp_path / "gristmill" / "flows"),
    ]


def test_python_dash_m_is_the_command_line_and_both_tell_the_version(
    tmp_path: Path,
) -> None:
    for command in (["-m", "gristmill"], ["-m", "gristmill.flows.cli.main"]):
        process = subprocess.run(
            [sys.executable, *command, "--version"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout == f"gristmill {gristmill.__version__}\n"
