"""The audit of the environment: findings and their remedies."""

from __future__ import annotations

from typing import Any

from tests.ci_scripts import load_script

audit = load_script("audit")


def package(
    name: str,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
    files: tuple[str, ...] = (),
) -> Any:
    return audit.Package(name, version, requires, files)


def test_what_is_installed_is_what_constraints_say() -> None:
    pins = audit.read_pins("# a comment\nTorch==2.13.0\nsome_thing==1.0  # why\n")
    assert pins == {"torch": "2.13.0", "some-thing": "1.0"}
    installed = [
        package("torch", "2.13.0+cpu", requires=("nvidia-nccl==2.27.5; extra == 'x'",)),
        package("nvidia-nccl", "2.27.5"),
        package("some-thing", "1.1"),
        package("other", "3"),
        package("pip"),
    ]
    assert list(audit.unpinned(installed, pins)) == [
        "some-thing 1.1 is installed, constraints.txt says 1.0; rebuild the environment",
        "other 3 is installed and not pinned; add other==3 to constraints.txt, or "
        "rebuild the environment",
    ]


def test_a_pin_is_of_something_that_is_asked_for() -> None:
    installed = [package("numpy", requires=("Tzdata>=1; sys_platform == 'win32'",))]
    pins = {"numpy": "1.0", "tzdata": "2", "optype": "3"}
    assert list(audit.stale(installed, pins)) == [
        "constraints.txt pins optype, which nothing asks for; remove it"
    ]


def test_no_file_belongs_to_two_packages() -> None:
    installed = [
        package("fasttext", files=("fasttext_pybind.so", "fasttext/a.py")),
        package("fasttext-predict", files=("fasttext_pybind.so",)),
        package("x", files=("x.py",)),
    ]
    assert list(audit.shared_files(installed)) == [
        "fasttext and fasttext-predict both own fasttext_pybind.so; only one of them "
        "can be installed"
    ]


def test_the_list_has_the_licence_of_every_pinned_package_in_a_line() -> None:
    packages = [
        {"Name": "Some_Thing", "License": "MIT License\n\nCopyright ..."},
        {"Name": "pip", "License": "MIT"},
        {"Name": "silent", "License": "UNKNOWN"},
    ]
    table = audit.licence_table(
        packages,
        {"some-thing": "1.0", "silent": "2", "elsewhere": "3"},
        {"silent": "ISC"},
    )
    assert table.splitlines()[-2:] == [
        "| silent | 2 | ISC |",
        "| some-thing | 1.0 | MIT License |",
    ]
    assert "pip |" not in table
