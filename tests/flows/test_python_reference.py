"""Every public name is documented, typed and listed in docs/api.md; every example of
docs/python.md runs.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import gristmill
from benchmarks.checkout import ROOT
from tests.ci_scripts import load_script
from tests.flows.corpus import write_corpus

API_REFERENCE = load_script("api_reference")
PUBLIC = dict(API_REFERENCE.public_objects())
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_committed_reference_is_up_to_date() -> None:
    assert (
        ROOT / "docs" / "api.md"
    ).read_text() == API_REFERENCE.reference()  # make api


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings_and_types(name: str) -> None:
    value = API_REFERENCE.function_of(PUBLIC[name])
    assert inspect.getdoc(value), name
    if not inspect.isfunction(value):
        return
    signature = inspect.signature(value)
    assert signature.return_annotation is not signature.empty, name
    untyped = [
        parameter_name
        for parameter_name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty
        and parameter_name not in ("self", "cls")
    ]
    assert untyped == [], name


@pytest.mark.slow
def test_every_public_name_has_a_place_on_the_page() -> None:
    page = API_REFERENCE.reference()
    assert [
        name
        for name in gristmill.__all__
        if f"`gristmill.{name}`" not in page and name not in gristmill._GROUPS
    ] == []
    assert all(f"\n## gristmill.{group}\n" in page for group in gristmill._GROUPS)


@pytest.mark.slow
def test_every_example_of_the_tour_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    examples = CODE.findall((ROOT / "docs" / "python.md").read_text())
    assert len(examples) > 5
    names: dict[str, object] = {}
    for example in examples:
        if "import polars" in example or ".to_polars()" in example:
            pytest.importorskip("polars")
        exec(compile(example, "docs/python.md", "exec"), names)
    readme = CODE.findall(
        (ROOT / "README.md")
        .read_text()
        .partition("## From Python")[2]
        .partition("\n## ")[0]
    )
    assert readme != []
    for example in readme:
        exec(compile(example, "README.md", "exec"), names)
