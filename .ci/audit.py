"""What no tool checks of the environment: that constraints.txt decides all of it, and that no two packages share files.

`make check` runs it behind `pip check` and pip-licenses, whose findings (JSON) it compares with docs/dependencies.md.

    python .ci/audit.py FINDINGS             print every problem; exit code 1 if there is one
    python .ci/audit.py FINDINGS --licences  print the list of licences, docs/dependencies.md
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
"""What makes the environment, and what it is made for."""


@dataclass(frozen=True)
class Package:
    """An installed distribution."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def read_pins(text: str) -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def unpinned(packages: Sequence[Package], pins: Mapping[str, str]) -> Iterator[str]:
    """Packages of other versions than constraints.txt says, or of none that it decides.

    A package that an installed one requires by its exact version is decided by that one (as torch decides its parts).
    """
    exact = {
        canonicalize_name(wanted.name)
        for package in packages
        for wanted in map(Requirement, package.requires)
        if any(one.operator == "==" for one in wanted.specifier)
    }
    for package in packages:
        if package.name in UNPINNED or (package.name in exact and package.name not in pins):
            continue
        pin = pins.get(package.name)
        if pin is None:
            yield (
                f"{package.name} {package.version} is installed and not pinned; add "
                f"{package.name}=={package.version} to constraints.txt, or rebuild the environment"
            )
        elif not Requirement(f"{package.name}=={pin}").specifier.contains(package.version, prereleases=True):
            yield (
                f"{package.name} {package.version} is installed, constraints.txt says {pin}; rebuild the environment"
            )


def stale(packages: Sequence[Package], pins: Mapping[str, str]) -> Iterator[str]:
    """Pins of what is not installed, and what nothing that is installed asks for on any system."""
    known = {package.name for package in packages} | {
        canonicalize_name(Requirement(one).name) for package in packages for one in package.requires
    }
    yield from (f"constraints.txt pins {name}, which nothing asks for; remove it" for name in pins if name not in known)


def shared_files(packages: Sequence[Package]) -> Iterator[str]:
    """Files that two packages call theirs: whichever was installed last has written them."""
    owners: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for file in package.files:
            owners[file].add(package.name)
    both: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, names in owners.items():
        if len(names) > 1:
            both[tuple(sorted(names))].append(file)
    for together, files in both.items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield f"{' and '.join(together)} both own {files[0]}{more}; only one of them can be installed"


def licence_table(found: Sequence[Mapping[str, str]], pins: Mapping[str, str], looked_up: Mapping[str, str]) -> str:
    """docs/dependencies.md: the licence of every pinned package.

    Args:
        found: what pip-licenses says: `Name`, and `License`, which may be a whole text.
        pins: names and versions.
        looked_up: licences of packages that do not say theirs.
    """
    said = {canonicalize_name(one["Name"]): one["License"].strip().splitlines()[0] for one in found}
    rows = [f"| {name} | {pins[name]} | {looked_up.get(name, said[name])} |" for name in sorted(pins) if name in said]
    return "\n".join(
        [
            "# What gristmill installs, and under which licence",
            "",
            "Made by `make dependencies` from what pip-licenses finds; `make check` compares.",
            "A run needs about half of them; the rest are the tests' and the benchmarks' (see pyproject.toml).",
            "",
            "| package | version | licence |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, or the list of licences."""
    pins = read_pins((ROOT / "constraints.txt").read_text())
    looked_up = yaml.safe_load((ROOT / ".ci" / "licences.yaml").read_text())
    table = licence_table(json.loads(Path(arguments[0]).read_text()), pins, looked_up)
    if "--licences" in arguments:
        print(table, end="")
        return 0
    packages = sorted(
        (
            Package(
                canonicalize_name(one.metadata["Name"]),
                one.version,
                tuple(one.requires or ()),
                tuple(map(str, one.files or ())),
            )
            for one in distributions()
        ),
        key=lambda one: one.name,
    )
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
    print("\n".join(problems) or f"{len(packages)} installed packages are those of constraints.txt")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
