"""Layers, names and guarantees of the whole source tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from gristmill.dataprep.runners.worker_bootstrap import SUBPACKAGES

LAYERS = (*SUBPACKAGES, "gristmill")
"""Layers from the lowest to the highest; the last one only exports the package's public
names.
"""
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
VERSION = "gristmill.__version__"
"""The only name of the highest layer that every layer may import."""
OFFERED = [ROOT / "gristmill" / name for name in ("losses.py", "training.py")]
"""Modules of the package that group public names by topic."""


HEAVY = {
    "torch",
    "apache_beam",
    "prefect",
    "numba",
    "pyarrow",
    "pydantic",
    "numpy",
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names),
            )


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def module_name(path: Path) -> str:
    parts = (
        path.relative_to(ROOT / "gristmill" if layer_of(path) == "gristmill" else ROOT)
        .with_suffix("")
        .parts
    )
    return ".".join(("gristmill", *parts)).removesuffix(".__init__")


def imported_layer(name: str) -> str | None:
    """Return the layer that a name of the package belongs to; None for other names."""
    first, _, inner_name = name.partition(".")
    if first != "gristmill" or name == VERSION:
        return None
    layer = inner_name.partition(".")[0]
    return layer if layer in LAYERS else "gristmill"


@pytest.mark.slow
def test_imports_never_go_upwards() -> None:
    upwards = []
    for path in MODULES:
        names = set(imported(path))
        # `from gristmill import x` also yields the package itself, whose own names
        # these are.
        names -= (
            {"gristmill"}
            if any(name.startswith("gristmill.") for name in names)
            else set()
        )
        upwards += [
            (str(path.relative_to(ROOT)), name)
            for name in sorted(names)
            if (layer := imported_layer(name))
            and LAYERS.index(layer) > LAYERS.index(layer_of(path))
        ]
    assert upwards == []


@pytest.mark.slow
def test_no_file_imports_itself_through_others_not_even_within_a_function() -> None:
    files = {module_name(path) for path in MODULES}
    imports_by_module = {
        module_name(path): {name for name in imported(path) if name in files}
        for path in MODULES
    }
    while acyclic := [
        name
        for name in imports_by_module
        if not imports_by_module[name] & imports_by_module.keys()
        or not any(name in imports for imports in imports_by_module.values())
    ]:
        for name in acyclic:
            del imports_by_module[name]
    # each of these is part of an import cycle, or lies between two
    assert sorted(imports_by_module) == []


def test_only_the_package_itself_is_a_regular_one_so_that_no_folder_shadows_the_standard_library() -> (
    None
):
    init_files = [
        path.relative_to(ROOT)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
    ]
    assert init_files == [Path("gristmill", "__init__.py")]
    code = "import tokenize; tokenize.open; print(tokenize.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not run.stdout.startswith(str(ROOT / "tokenize"))


def test_the_package_has_no_modules_but_its_names_and_the_command_line() -> None:
    """Modules that group public names only import them and list them in `__all__`."""
    assert sorted(path.name for path in MODULES if layer_of(path) == "gristmill") == [
        "__init__.py",
        "__main__.py",
        *(path.name for path in OFFERED),
    ]
    for path in OFFERED:
        tree = ast.parse(path.read_text())
        names = [
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module != "__future__"
            for alias in node.names
        ]
        (listed,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
        )
        assert (sorted(names), len(tree.body)) == (
            listed,
            2 + sum(isinstance(node, ast.ImportFrom) for node in tree.body),
        )


def modules_loaded_by(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(run.stdout.split())


def test_help_loads_nothing_heavy() -> None:
    assert modules_loaded_by("import gristmill.flows.cli.main") & HEAVY == set()


@pytest.mark.slow
def test_a_manifest_is_opened_without_what_only_stages_need(tmp_path: Path) -> None:
    """The imports of a run's start delay its first stage; numba takes longer than all
    others together.
    """
    (tmp_path / "m.yaml").write_text(
        "name: light\nsources: {docs: {path: 'python-docs://', limit: 80}}\n"
        "prepare: [{filter: {rules: [gopher_quality]}}, dedup, {langid: {keep: "
        "[en]}}]\n"
        "tokenizer: {vocab_size: 512}\nmix: {tokens: 10_000, sequence_length: 64}\n"
    )
    loaded = modules_loaded_by(
        "from gristmill.flows.running.session import open_session\nimport "
        "gristmill.flows.running.launch\n"
        f"session = open_session({str(tmp_path / 'm.yaml')!r}, [], "
        f"{str(tmp_path / 'store')!r})\n"
        "assert list(session.plan) == ['ingest', 'filter', 'dedup', 'langid', "
        "'tokenizer', 'tokenize', 'mix']"
    )
    assert loaded & {"torch", "apache_beam", "prefect", "numba"} == set()


@pytest.mark.slow
def test_a_report_is_written_without_what_only_stages_need() -> None:
    """Thresholds of steps are imported when they are shown."""
    steps = "['filter', 'langid', 'quality', 'dedup']"
    loaded = modules_loaded_by(
        "import gristmill.flows.report.report\n"
        "import gristmill.flows.report.terminal_summary\n"
        "from gristmill.flows.stages.registry import prepare_step\n"
        "from gristmill.flows.stages.stage import imported\n"
        f"for step in {steps}: imported(prepare_step(step).rules)"
    )
    assert loaded & {"torch", "apache_beam", "prefect", "numba"} == set()


def test_the_package_loads_nothing_that_is_not_asked_for() -> None:
    loaded = modules_loaded_by(
        "import gristmill; gristmill.__version__; dir(gristmill)"
    )
    assert {name for name in loaded if name.startswith("gristmill.")} == set()
    assert loaded & HEAVY == set()


@pytest.mark.slow
def test_preparing_modules_do_not_load_torch() -> None:
    names = ", ".join(
        module_name(path) for path in MODULES if layer_of(path) == "dataprep"
    )
    assert "torch" not in modules_loaded_by(f"import {names}")


@pytest.mark.slow
def test_questions_do_not_load_torch() -> None:
    """Importing torch would take longer than the answer."""
    names = ", ".join(
        module_name(path) for path in MODULES if path.parent.name == "questions"
    )
    assert "trace" in names
    assert "torch" not in modules_loaded_by(f"import {names}")
