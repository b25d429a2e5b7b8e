"""User functions are taken by value and run from that value alone."""

import shutil
from pathlib import Path

import pytest

from gristmill.dataprep.user_functions import blame, load_own
from gristmill.mixtures.user_code import Own, OwnCodeError, OwnFunction, take_code


def own_function(folder: Path, written: str, **options: object) -> Own:
    return Own(**{"use": take_code(OwnFunction(written), folder), "with": options})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_function_runs_from_its_value_without_its_folder(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a",
        steps="from helpers import double\nimport parts.inner\n"
        "def count(text: str, word: str) -> int:\n    return "
        "double(text.count(word)) + parts.inner.ONE\n",
        helpers="def double(x):\n    import more\n    return more.TWO * x\n",
        more="TWO = 2\n",
        unused="x = 1\n",
        parts__inner="from .other import ONE\n",
        parts__other="ONE = 1\n",
    )
    (folder / "parts" / "__init__.py").write_text("")
    function = own_function(folder, "./steps.py:count", word="a")
    assert sorted(function.use.files) == [
        "helpers.py",
        "more.py",
        "parts/__init__.py",
        "parts/inner.py",
        "parts/other.py",
        "steps.py",
    ]
    shutil.rmtree(folder)
    restored = Own.model_validate_json(function.model_dump_json())
    assert load_own(restored, "text")("banana") == 7
    assert restored.use.sha256 == function.use.sha256


def test_files_with_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        write(
            tmp_path / name,
            steps="from shared_name import VALUE\ndef value():\n    return VALUE\n",
            shared_name=f"VALUE = {value}\n",
        )
    values = [
        load_own(own_function(tmp_path / name, "./steps.py:value"))()
        for name in ("a", "b", "a")
    ]
    assert values == [1, 2, 1]


def test_value_depends_on_the_function_and_its_imports(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        steps="import helpers\ndef keep(): return helpers.X\n",
        helpers="X = 1\n",
        other="Y = 1\n",
    )
    before = take_code(OwnFunction("./steps.py:keep"), folder).sha256
    write(folder, other="Y = 2\n")
    assert take_code(OwnFunction("./steps.py:keep"), folder).sha256 == before
    write(folder, helpers="X = 2\n")
    assert take_code(OwnFunction("./steps.py:keep"), folder).sha256 != before


@pytest.mark.slow
def test_installed_function_is_named_by_its_distribution(tmp_path: Path) -> None:
    function = own_function(tmp_path, "pyarrow.compute:count_substring", pattern="a")
    assert function.use.distribution.startswith("pyarrow ")
    assert not function.use.files
    assert load_own(function, "strings")(["banana"])[0].as_py() == 3


@pytest.mark.parametrize(
    ("reference", "source", "facts"),
    [
        ("./step.py:keep", "", r"step\.py .*did you mean 'steps\.py'\?"),
        (
            "./steps.py:kep",
            "def keep(): ...",
            r"steps\.py .*'kep', did you mean 'keep'\?",
        ),
        ("./steps.py:keep", "\ndef keep(:", r"steps\.py, line 2: .*Python"),
        ("acme.filters:keep", "", "'acme.filters'"),
    ],
)
def test_missing_or_invalid_code_is_rejected(
    tmp_path: Path, reference: str, source: str, facts: str
) -> None:
    write(tmp_path, steps=source)
    with pytest.raises(OwnCodeError, match=facts):
        take_code(OwnFunction(reference), tmp_path)


@pytest.mark.parametrize(
    "written",
    [
        "https://example.org/steps.py:keep",
        "steps.py",
        "./steps.txt:keep",
        "./steps.py:a b",
    ],
)
def test_only_files_and_modules_can_be_named(written: str) -> None:
    with pytest.raises(
        ValueError, match=r"write a function as|code must come from|is neither a file"
    ):
        Own(use=written)


@pytest.mark.parametrize(
    ("source", "options", "facts"),
    [
        (
            "\ndef keep(text): ...",
            {"word": "x"},
            r"steps\.py, line 2: keep\(text\) .*with: word",
        ),
        ("def keep(text, word): ...", {}, "missing a required argument: 'word'"),
        ("keep = 3", {}, "int"),
        (
            "def keep(text): ...\n1 / 0",
            {},
            r"ZeroDivisionError: division by zero \(steps\.py, line 2\)",
        ),
        (
            "import no_such_thing\ndef keep(text): ...",
            {},
            "No module named 'no_such_thing'",
        ),
        (
            "from json import no_such_thing as keep",
            {},
            "cannot import name 'no_such_thing'",
        ),
    ],
)
def test_uncallable_function_is_rejected(
    tmp_path: Path, source: str, options: dict[str, object], facts: str
) -> None:
    folder = write(tmp_path, steps=source)
    with pytest.raises(OwnCodeError, match=facts):
        load_own(own_function(folder, "./steps.py:keep", **options), "text")


def test_error_names_the_last_line_of_user_code(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        steps="import helpers\ndef keep(text):\n    return helpers.check(text)\n",
        helpers="def check(text):\n    return int(text)\n",
    )
    function = own_function(folder, "./steps.py:keep")
    with pytest.raises(ValueError) as caught:
        load_own(function, "text")("x")
    assert blame(function.use, caught.value) == (
        "ValueError: invalid literal for int() with base 10: 'x' (helpers.py, line 2)"
    )
