"""Code of the user's is taken by value and runs from that value alone."""

import shutil
from pathlib import Path

import pytest

from gristmill.dataprep.user_functions import blame, load_own
from gristmill.mixtures.user_code import Own, OwnCodeError, OwnFunction, take_code


def own(folder: Path, written: str, **options: object) -> Own:
    return Own(**{"use": take_code(OwnFunction(written), folder), "with": options})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_function_runs_from_its_value_after_its_folder_is_gone(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a",
        steps="from helpers import double\nimport parts.inner\n"
        "def count(text: str, word: str) -> int:\n    return double(text.count(word)) + parts.inner.ONE\n",
        helpers="def double(x):\n    import more\n    return more.TWO * x\n",
        more="TWO = 2\n",
        unused="x = 1\n",
        parts__inner="from .other import ONE\n",
        parts__other="ONE = 1\n",
    )
    (folder / "parts" / "__init__.py").write_text("")
    taken = own(folder, "./steps.py:count", word="a")
    assert sorted(taken.use.files) == [
        "helpers.py",
        "more.py",
        "parts/__init__.py",
        "parts/inner.py",
        "parts/other.py",
        "steps.py",
    ]
    shutil.rmtree(folder)
    again = Own.model_validate_json(taken.model_dump_json())
    assert load_own(again, "text")("banana") == 7
    assert again.use.sha256 == taken.use.sha256


def test_two_files_of_one_name_never_meet(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        write(
            tmp_path / name,
            steps="from shared_name import VALUE\ndef value():\n    return VALUE\n",
            shared_name=f"VALUE = {value}\n",
        )
    found = [load_own(own(tmp_path / name, "./steps.py:value"))() for name in ("a", "b", "a")]
    assert found == [1, 2, 1]


def test_the_value_changes_with_the_function_and_what_it_imports_only(tmp_path: Path) -> None:
    folder = write(tmp_path, steps="import helpers\ndef keep(): return helpers.X\n", helpers="X = 1\n", other="Y = 1\n")
    before = take_code(OwnFunction("./steps.py:keep"), folder).sha256
    write(folder, other="Y = 2\n")
    assert take_code(OwnFunction("./steps.py:keep"), folder).sha256 == before
    write(folder, helpers="X = 2\n")
    assert take_code(OwnFunction("./steps.py:keep"), folder).sha256 != before


@pytest.mark.slow
def test_what_is_installed_is_named_by_its_distribution(tmp_path: Path) -> None:
    taken = own(tmp_path, "pyarrow.compute:count_substring", pattern="a")
    assert taken.use.distribution.startswith("pyarrow ")
    assert not taken.use.files
    assert load_own(taken, "strings")(["banana"])[0].as_py() == 3


@pytest.mark.parametrize(
    ("written", "source", "says"),
    [
        ("./step.py:keep", "", r"no file step.py in .*, did you mean 'steps.py'\?"),
        ("./steps.py:kep", "def keep(): ...", r"steps.py defines no 'kep', did you mean 'keep'\?; it defines keep"),
        ("./steps.py:keep", "\ndef keep(:", "steps.py, line 2: not valid Python"),
        ("acme.filters:keep", "", "there is no module 'acme.filters' in this environment"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_sentence(tmp_path: Path, written: str, source: str, says: str) -> None:
    write(tmp_path, steps=source)
    with pytest.raises(OwnCodeError, match=says):
        take_code(OwnFunction(written), tmp_path)


@pytest.mark.parametrize(
    "written", ["https://example.org/steps.py:keep", "steps.py", "./steps.txt:keep", "./steps.py:a b"]
)
def test_only_files_and_modules_can_be_named(written: str) -> None:
    with pytest.raises(ValueError, match=r"write a function as|code must come from|is neither a file"):
        Own(use=written)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (
            "\ndef keep(text): ...",
            {"word": "x"},
            r"steps.py, line 2: keep\(text\) cannot be called with \(text\) and with: word",
        ),
        ("def keep(text, word): ...", {}, "missing a required argument: 'word'"),
        ("keep = 3", {}, "is int, which cannot be called"),
        (
            "def keep(text): ...\n1 / 0",
            {},
            r"steps.py cannot be loaded: ZeroDivisionError: division by zero \(steps.py, line 2\)",
        ),
        ("import no_such_thing\ndef keep(text): ...", {}, "No module named 'no_such_thing'"),
        ("from json import no_such_thing as keep", {}, "cannot import name 'no_such_thing'"),
    ],
)
def test_what_cannot_be_called_is_said_in_a_sentence(
    tmp_path: Path, source: str, options: dict[str, object], says: str
) -> None:
    folder = write(tmp_path, steps=source)
    with pytest.raises(OwnCodeError, match=says):
        load_own(own(folder, "./steps.py:keep", **options), "text")


def test_an_error_is_blamed_on_the_last_line_of_the_users_code(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        steps="import helpers\ndef keep(text):\n    return helpers.check(text)\n",
        helpers="def check(text):\n    return int(text)\n",
    )
    taken = own(folder, "./steps.py:keep")
    with pytest.raises(ValueError) as caught:
        load_own(taken, "text")("x")
    assert blame(taken.use, caught.value) == (
        "ValueError: invalid literal for int() with base 10: 'x' (helpers.py, line 2)"
    )
