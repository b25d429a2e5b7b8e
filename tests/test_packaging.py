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


def package_of(file: Path) -> str:
    return ".".join(("gristmill", *file.parent.parts))


def test_every_folder_of_the_product_is_a_package_and_nothing_else_is() -> None:
    assert SETUPTOOLS["package-dir"] == {"gristmill": "."}
    assert sorted(SETUPTOOLS["packages"]) == sorted({package_of(file) for file in product_files()})


def test_files_that_are_no_modules_are_package_data() -> None:
    data = SETUPTOOLS["package-data"]
    missing = [str(file) for file in product_files() if file.suffix != ".py" and not any(
        file.match(pattern) for pattern in (*data["*"], *data.get(package_of(file), ())))]
    assert missing == []


def test_types_and_licence_go_with_the_package() -> None:
    assert [layer for layer in LAYERS if not (ROOT / layer / "py.typed").is_file()] == []
    assert "Apache License" in (ROOT / "LICENSE").read_text()
