"""A stage is defined in one place: no other file lists stages or compares with a
stage's name.

Names of inputs in a stage's own function (`inputs["mix"]`) belong to that function;
sections of the manifest have the names of the stages that they switch on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from benchmarks.checkout import ROOT
from gristmill.dataprep.runners.worker_bootstrap import SUBPACKAGES
from gristmill.flows.stages.registry import STAGES

NAMES = frozenset(STAGES) - {"documents"}
"""`documents` is a word of almost every module."""
WORDS = frozenset(
    {
        "quality",
        "reward",
        "reference",
        "clean",
        "edit",
        "filter",
        "sft",
        "dpo",
        "model",
        "judge",
        "generate",
        "cluster",
        "examples",
    }
)
"""Names that are words of the field, too: columns, kinds of examples, parts of a table.
Where one stands alone it tells nothing of stages.
"""
ALLOWED = {
    "mixtures/cross_checks.py": "sections that need one another: what a manifest "
    "lacks is said of its keys",
    "mixtures/schema/mix.py": "sections of the manifest that a mixture depends on",
    "mixtures/other_names.py": "sections of the manifest that have a key",
    "train/distributed/compiling.py": "rows of one shape are those of next-token "
    "pre-training",
    "mixtures/manifest.py": "sections of the manifest, and the models that they "
    "make, in their order",
    "mixtures/steps/examples.py": "sections of the manifest that read sets of examples",
    "mixtures/schema/rl.py": "values of the key rl.start_from",
    "train/stages/stage_inputs.py": "models among the inputs of evaluate, export and "
    "rl, the last one first",
    "train/stages/teacher.py": "a value of the key sft.distill.teacher",
    "train/stages/evaluate.py": "accuracy on pairs is measured of the model that "
    "learned from them alone",
    "train/data/row_stream.py": "values of the argument `stage` of gristmill.stream, "
    "and whose settings they have",
    "tokenize/importing/token_sources.py": "gives imported tokens to mix under the "
    "names of its inputs",
    "dataprep/inner_steps.py": "steps that other stages run inside themselves, and "
    "where their functions are",
    "dataprep/examples/prepare_examples.py": "the text that a step judges",
    "dataprep/examples/kept_examples.py": "folders below one stage's own output, "
    "called after its steps",
    "flows/authoring/try_function.py": "what a function may be for, called after the "
    "steps that have one",
    "flows/cli/command_groups.py": "commands, some of which are called like the "
    "stage that does the same in a run",
    "flows/cli/try_command.py": "what a function may be for, called after the steps "
    "that have one",
    "flows/cli/demo.py": "the training that the demo kills, and the tokenizer of its "
    "model",
    "flows/sweeps/ablation_results.py": "the section of an ablation's file",
    "flows/report/llm_sections.py": "each section of the page is about one stage, "
    "whose summary it reads",
    "flows/report/document_sections.py": "each section of the page is about one "
    "stage, whose summary it reads",
    "flows/report/evaluation.py": "each section of the page is about one stage, "
    "whose summary it reads",
    "flows/report/mixture.py": "each section of the page is about one stage, whose "
    "summary it reads",
    "flows/report/terminal_summary.py": "each section of the page is about one "
    "stage, whose summary it reads",
    "flows/report/training.py": "each section of the page is about one stage, whose "
    "summary it reads",
    "flows/report/finetuning.py": "each section of the page is about one stage, "
    "whose summary it reads",
}
"""Files that may name stages, with the reason."""


def files(*layers: str) -> Iterator[tuple[str, ast.Module]]:
    for layer in layers:
        for path in sorted((ROOT / layer).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith("flows/stages/"):
                yield name, ast.parse(path.read_text())


def is_name(node: ast.AST | None, names: frozenset[str] = NAMES) -> bool:
    return isinstance(node, ast.Constant) and node.value in names


def lists_of_stages(tree: ast.Module) -> Iterator[int]:
    """Return lines of tuples, lists, sets, mappings and Literals with two or more
    stages, one of them not a common word.
    """
    for node in ast.walk(tree):
        parts = (
            node.elts
            if isinstance(node, ast.Tuple | ast.List | ast.Set)
            else (node.keys if isinstance(node, ast.Dict) else [])
        )
        if sum(map(is_name, parts)) > 1 and any(
            is_name(part, NAMES - WORDS) for part in parts
        ):
            yield node.lineno


def questions_of_stages(tree: ast.Module) -> Iterator[int]:
    """Return lines that compare something with a stage's name."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Compare)
            and any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
            and any(
                is_name(part, NAMES - WORDS) for part in (node.left, *node.comparators)
            )
        ):
            yield node.lineno


def names_of_stages(tree: ast.Module) -> Iterator[int]:
    """Return lines that name a stage whose name is not a common word."""
    keys = {
        id(key)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
    }
    for node in ast.walk(tree):
        if is_name(node, NAMES - WORDS) and id(node) not in keys:
            yield node.lineno


@pytest.mark.slow
def test_no_module_lists_stages_or_compares_stage_names() -> None:
    places = {
        name
        for name, tree in files(*SUBPACKAGES)
        if [*lists_of_stages(tree), *questions_of_stages(tree)]
    }
    assert places - ALLOWED.keys() == set()


@pytest.mark.slow
def test_generic_modules_name_no_stage() -> None:
    places = {
        name: sorted(set(names_of_stages(tree)))
        for name, tree in files("flows")
        if name not in ALLOWED
    }
    assert {name: lines for name, lines in places.items() if lines} == {}


@pytest.mark.slow
def test_every_exception_is_needed() -> None:
    trees = dict(files(*SUBPACKAGES))
    files_with_names = {
        name
        for name, tree in trees.items()
        if any(is_name(node) for node in ast.walk(tree))
    }
    assert ALLOWED.keys() - files_with_names == set()


@pytest.mark.slow
def test_flows_that_read_a_manifest_know_the_steps_that_may_stand_in_it() -> None:
    """Stages register the models of `prepare`, so modules that validate manifests
    without the stages would know no step.
    """
    from tests.test_architecture import imported, module_name

    imports_by_module = {
        module_name(path): set(imported(path))
        for path in (ROOT / "flows").rglob("*.py")
    }
    registry, reading = (
        "gristmill.flows.stages.registry",
        {
            f"gristmill.mixtures.loader.{name}"
            for name in ("load_manifest", "open_manifest", "parse_manifest")
        },
    )

    def reaches(module: str, visited: set[str]) -> bool:
        visited.add(module)
        below = imports_by_module.get(module, set())
        return registry in below or any(
            reaches(dependency, visited)
            for dependency in below
            if dependency in imports_by_module and dependency not in visited
        )

    assert [
        module
        for module, names in imports_by_module.items()
        if names & reading and not reaches(module, set())
    ] == []
