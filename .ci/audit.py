"""Checks of the environment that no tool has: constraints.txt pins all of it, and no
two packages share files.

`make check` runs it after `pip check` and pip-licenses, whose findings (JSON) it
compares with docs/dependencies.md.

    python .ci/audit.py FINDINGS             print every problem; exit code 1 if there
    is one python .ci/audit.py FINDINGS --licences  print the page of licences,
    docs/dependencies.md
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
UNPINNED = ("pip", "gristmill")
"""The installer of the environment, and the package that it is for."""


@dataclass(frozen=True)
class Package:
    """An installed distribution."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def read_pins(text: str) -> dict[str, str]:
    """Parse the versions of constraints.txt."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def unpinned(packages: Sequence[Package], pins: Mapping[str, str]) -> Iterator[str]:
    """Return a sentence for each package without a pin, or with another version than
    its pin.

    A package that an installed one requires by its exact version needs no pin (as
    torch's parts).
    """
    exact = set()
    for package in packages:
        for requirement in map(Requirement, package.requires):
            if any(clause.operator == "==" for clause in requirement.specifier):
                exact.add(canonicalize_name(requirement.name))
    for package in packages:
        if package.name in UNPINNED or (
            package.name in exact and package.name not in pins
        ):
            continue
        pin = pins.get(package.name)
        if pin is None:
            yield (
                f"{package.name} {package.version} is installed and not pinned; add "
                f"{package.name}=={package.version} to constraints.txt, or rebuild "
                "the environment"
            )
        elif not Requirement(f"{package.name}=={pin}").specifier.contains(
            package.version, prereleases=True
        ):
            yield (
                f"{package.name} {package.version} is installed, constraints.txt "
                f"says {pin}; rebuild the environment"
            )


def stale(packages: Sequence[Package], pins: Mapping[str, str]) -> Iterator[str]:
    """Return a sentence for each pin of a package that is not installed, and that no
    installed one requires.
    """
    names = {package.name for package in packages}
    for package in packages:
        names.update(
            canonicalize_name(Requirement(text).name) for text in package.requires
        )
    yield from (
        f"constraints.txt pins {name}, which nothing asks for; remove it"
        for name in pins
        if name not in names
    )


def shared_files(packages: Sequence[Package]) -> Iterator[str]:
    """Return a sentence for each group of packages that own the same files, which the
    last installed one has written.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for file in package.files:
            owners[file].add(package.name)
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, names in owners.items():
        if len(names) > 1:
            shared[tuple(sorted(names))].append(file)
    for group, files in shared.items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield (
            f"{' and '.join(group)} both own {files[0]}{more}; only one of them "
            "can be installed"
        )


def licence_table(
    findings: Sequence[Mapping[str, str]],
    pins: Mapping[str, str],
    looked_up: Mapping[str, str],
) -> str:
    """Return docs/dependencies.md: the licence of every pinned package.

    Args:
        findings: of pip-licenses: `Name`, and `License`, which may be a whole text.
        pins: names and versions.
        looked_up: licences of packages that do not declare theirs.
    """
    licences = {
        canonicalize_name(entry["Name"]): entry["License"].strip().splitlines()[0]
        for entry in findings
    }
    licences.update(
        {name: licence for name, licence in looked_up.items() if name in licences}
    )
    rows = [
        f"| {name} | {pins[name]} | {licences[name]} |"
        for name in sorted(pins)
        if name in licences
    ]
    return "\n".join(
        [
            "# What gristmill installs, and under which licence",
            "",
            "Made by `make dependencies` from what pip-licenses finds; `make check` "
            "compares.",
            "A run needs about half of them; the rest are the tests' and the "
            "benchmarks' (see pyproject.toml).",
            "",
            "| package | version | licence |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Print all problems, or the page of licences."""
    pins = read_pins((ROOT / "constraints.txt").read_text())
    looked_up = yaml.safe_load((ROOT / ".ci" / "licences.yaml").read_text())
    table = licence_table(json.loads(Path(arguments[0]).read_text()), pins, looked_up)
    if "--licences" in arguments:
        print(table, end="")
        return 0
    packages = []
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        requires, files = (
            tuple(distribution.requires or ()),
            tuple(map(str, distribution.files or ())),
        )
        packages.append(Package(name, distribution.version, requires, files))
    packages.sort(key=lambda package: package.name)
    listed = set((ROOT / "docs" / "dependencies.md").read_text().splitlines())
    problems = [
        *unpinned(packages, pins),
        *stale(packages, pins),
        *shared_files(packages),
        *(
            f"docs/dependencies.md lacks the line {row}; rebuild it: make dependencies"
            for row in table.splitlines()
            if row not in listed
        ),
    ]
    print(
        "\n".join(problems)
        or f"{len(packages)} installed packages are those of constraints.txt"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
