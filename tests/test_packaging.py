"""What an installed gristmill has: all of the product, and neither tests nor benchmarks."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.test_architecture import LAYERS, ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def product_files() -> list[Path]:
    """Relative to the root, without what Python compiled."""
    return [path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*")
            if path.is_file() and path.suffix not in (".pyc", ".nbc", ".nbi")]


def test_every_folder_with_modules_is_a_package_and_nothing_else_is() -> None:
    found = {".".join(("gristmill", *file.parent.parts)) for file in product_files() if file.suffix == ".py"}
    assert SETUPTOOLS["package-dir"] == {"gristmill": "."}
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_files_that_are_no_modules_are_package_data() -> None:
    patterns = [f"{layer}/{pattern}" for layer in LAYERS for pattern in SETUPTOOLS["package-data"]["*"]]
    patterns += [f"{package.removeprefix('gristmill.').replace('.', '/')}/{pattern}"
                 for package, of_one in SETUPTOOLS["package-data"].items() if package != "*" for pattern in of_one]
    others = {file for file in product_files() if file.suffix != ".py"}
    assert others - {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)} == set()


def test_types_and_licence_go_with_the_package() -> None:
    assert [layer for layer in LAYERS if not (ROOT / layer / "py.typed").is_file()] == []
    assert "Apache License" in (ROOT / "LICENSE").read_text()
