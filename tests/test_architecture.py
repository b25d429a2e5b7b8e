"""The layers, the names and the promises that hold for the whole tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("mixtures", "dataprep", "tokenize", "train", "flows")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
DESCRIPTIONS = (ROOT / "mixtures", ROOT / "flows" / "stages")
CROWDED = {"mixtures": 21, "flows/stages": 32}
"""Folders that want rooms, and how many files they have: the numbers only fall."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def module_name(path: Path) -> str:
    return ".".join(("gristmill", *path.relative_to(ROOT).with_suffix("").parts))


def test_imports_never_go_upwards() -> None:
    upwards = [(str(path.relative_to(ROOT)), name) for path in MODULES for name in imported(path)
               if name.startswith("gristmill.") and LAYERS.index(name.split(".")[1]) > LAYERS.index(layer_of(path))]
    assert upwards == []


def test_no_file_imports_itself_through_others_not_even_within_a_function() -> None:
    files = {module_name(path) for path in MODULES}
    above = {module_name(path): {name for name in imported(path) if name in files} for path in MODULES}
    while ends := [name for name in above if not above[name] & above.keys() or not any(
            name in below for below in above.values())]:
        for name in ends:
            del above[name]
    assert sorted(above) == []  # each of these is in a circle, or between two


def test_a_folder_with_more_than_twenty_files_has_rooms() -> None:
    loose = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES)
    assert {folder: number for folder, number in loose.items() if number > 20} == CROWDED


def test_no_file_has_more_than_five_hundred_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: number for name, number in lines.items() if number > 500} == {}


def test_a_name_is_that_of_one_file() -> None:
    """Beside the file that does its work, a stage and a section have one in which they are described."""
    names = Counter(path.stem for path in MODULES if path.parent not in DESCRIPTIONS)
    assert {name for name, number in names.items() if number > 1} == set()


def test_no_folder_is_a_regular_package_so_that_none_shadows_the_standard_library() -> None:
    assert [path for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py")] == []
    code = "import tokenize; tokenize.open; print(tokenize.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not run.stdout.startswith(str(ROOT / "tokenize"))


def modules_loaded_by(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )
    return set(run.stdout.split())


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import gristmill.flows.cli.main")
    assert loaded & {"torch", "apache_beam", "prefect", "numba", "pyarrow", "matplotlib", "pydantic", "numpy"} == set()


def test_preparing_modules_do_not_load_torch() -> None:
    names = ", ".join(module_name(path) for path in MODULES if layer_of(path) == "dataprep")
    assert "torch" not in modules_loaded_by(f"import {names}")
