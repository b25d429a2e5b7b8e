"""Is the environment the one that constraints.txt describes, and may it be used? Needs no network.

`make check` runs it. What it cannot know, today's advisories, `make audit` asks for over the network.

    python .ci/audit.py             print every problem; exit code 1 if there is one
    python .ci/audit.py --files     compare every installed file with its recorded checksum too
    python .ci/audit.py --licences  print the list of licences, docs/dependencies.md
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
UNPINNED = ("pip", "gristmill")
"""What makes the environment, and what it is made for."""
STRONG_COPYLEFT = ("agpl", "affero", "gpl", "general public license")
WEAK_COPYLEFT = ("lgpl", "lesser general public", "library general public")


@dataclass(frozen=True)
class Package:
    """An installed distribution."""

    name: str
    version: str
    licence: str
    requires: tuple[str, ...]
    files: tuple[str, ...]


def read_package(distribution: Distribution) -> Package:
    """What an installed distribution says of itself."""
    files = tuple(str(file) for file in distribution.files or ())
    return Package(canonicalize_name(distribution.metadata["Name"]), distribution.version, licence_of(distribution),
                   tuple(distribution.requires or ()), files)


def licence_of(distribution: Distribution) -> str:
    """The licence in one line: the expression, else the classifiers, else the field's first line, else a guess by the
    text's first line; empty where nothing is said.
    """
    told = distribution.metadata
    if told["License-Expression"]:
        return str(told["License-Expression"])
    classifiers = [one.rpartition(" :: ")[2] for one in told.get_all("Classifier") or []
                   if one.startswith("License :: ") and one != "License :: OSI Approved"]
    if classifiers:
        return " or ".join(classifiers)
    if told["License"] and told["License"].strip():
        return str(told["License"]).strip().splitlines()[0].strip()
    for name in told.get_all("License-File") or []:
        text = distribution.read_text(f"licenses/{name}") or distribution.read_text(name) or ""
        for line in filter(None, map(str.strip, text.splitlines())):
            return line
    return ""


def read_pins(text: str) -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def unpinned(packages: Sequence[Package], pins: Mapping[str, str]) -> Iterator[str]:
    """Packages of other versions than constraints.txt says, or of none that it decides.

    A package that an installed one requires by its exact version is decided by that one (as torch decides its parts).
    """
    exact = {canonicalize_name(wanted.name) for package in packages for wanted in map(Requirement, package.requires)
             if any(one.operator == "==" for one in wanted.specifier)}
    for package in packages:
        if package.name in UNPINNED or (package.name in exact and package.name not in pins):
            continue
        pin = pins.get(package.name)
        if pin is None:
            yield (f"{package.name} {package.version} is installed and not pinned; add "
                   f"{package.name}=={package.version} to constraints.txt, or rebuild the environment")
        elif not Requirement(f"{package.name}=={pin}").specifier.contains(package.version, prereleases=True):
            yield (f"{package.name} {package.version} is installed, constraints.txt says {pin}; "
                   "rebuild the environment")


def unmet(packages: Sequence[Package]) -> Iterator[str]:
    """Requirements between the packages that the installed versions do not meet."""
    versions = {package.name: package.version for package in packages}
    for package in packages:
        for wanted in map(Requirement, package.requires):
            name = canonicalize_name(wanted.name)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            if name not in versions:
                yield f"{package.name} {package.version} requires {wanted}, which is not installed"
            elif not wanted.specifier.contains(versions[name], prereleases=True):
                yield f"{package.name} {package.version} requires {wanted}, installed is {versions[name]}"


def shared_files(packages: Sequence[Package]) -> Iterator[str]:
    """Files that two packages call theirs: whichever was installed last has written them."""
    owners: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        for file in package.files:
            owners[file].append(package.name)
    both: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, names in owners.items():
        if len(set(names)) > 1:
            both[tuple(sorted(set(names)))].append(file)
    for names, files in both.items():
        yield (f"{' and '.join(names)} both own {files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}; "
               "only one of them can be installed")


def known_bad(packages: Sequence[Package], entries: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Packages of versions that are known to be harmful (known_bad.yaml)."""
    versions = {package.name: package.version for package in packages}
    for entry in entries:
        version = versions.get(canonicalize_name(entry["package"]))
        if version is None:
            continue
        if Requirement(f"x{entry['versions']}").specifier.contains(version, prereleases=True):
            yield f"{entry['package']} {version}: {entry['reason']}; use {entry['use']} ({entry['source']})"


def unlicensed(packages: Sequence[Package], accepted: Mapping[str, str]) -> Iterator[str]:
    """Packages without a licence, or with one that reaches out to what uses them.

    Args:
        packages: the installed ones.
        accepted: licences of packages that do not say theirs, or say it badly: name to licence, looked up by a person.
    """
    for package in packages:
        licence = accepted.get(package.name, package.licence)
        alternatives = licence.lower().split(" or ")
        if not licence:
            yield f"{package.name} {package.version} names no licence; look it up, and add it to .ci/licences.yaml"
        elif all(any(word in one for word in STRONG_COPYLEFT) and not any(word in one for word in WEAK_COPYLEFT)
                 for one in alternatives):
            yield f"{package.name} {package.version} is under {licence}, which would reach out to gristmill"


def changed_files(found: Iterable[Distribution]) -> Iterator[str]:
    """Installed files that are absent, or not what the package's own record says."""
    for distribution in found:
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if file.hash is None:
                continue
            if not path.exists():
                yield f"{distribution.metadata['Name']}: {path} is gone"
                continue
            with path.open("rb") as source:
                digest = hashlib.file_digest(source, file.hash.mode).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                yield f"{distribution.metadata['Name']}: {path} is not the file that was installed"


def licence_table(packages: Sequence[Package], pins: Mapping[str, str], accepted: Mapping[str, str]) -> str:
    """docs/dependencies.md: the licence of every pinned package."""
    rows = [f"| {package.name} | {pins[package.name]} | {accepted.get(package.name, package.licence)} |"
            for package in packages if package.name in pins]
    return "\n".join([
        "# What gristmill installs, and under which licence", "",
        "Made by `python .ci/audit.py --licences` from what the packages say of themselves; `make check` compares.",
        "A run needs about half of them; the rest are the tests' and the benchmarks' (see pyproject.toml).", "",
        "| package | version | licence |", "| --- | --- | --- |", *rows, ""])


def find_problems(found: Sequence[Distribution], files: bool) -> Iterator[str]:
    """Everything that is wrong with the environment."""
    packages = sorted(map(read_package, found), key=lambda package: package.name)
    pins = read_pins((ROOT / "constraints.txt").read_text())
    accepted = yaml.safe_load((ROOT / ".ci" / "licences.yaml").read_text())
    yield from unpinned(packages, pins)
    yield from unmet(packages)
    yield from shared_files(packages)
    yield from known_bad(packages, yaml.safe_load((ROOT / ".ci" / "known_bad.yaml").read_text()))
    yield from unlicensed(packages, accepted)
    listed = set((ROOT / "docs" / "dependencies.md").read_text().splitlines())
    for row in licence_table(packages, pins, accepted).splitlines():
        if row not in listed:
            yield f"docs/dependencies.md lacks the line {row}; rebuild it: python .ci/audit.py --licences"
    if files:
        yield from changed_files(found)


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, or the list of licences."""
    found = list(distributions())
    if "--licences" in arguments:
        accepted = yaml.safe_load((ROOT / ".ci" / "licences.yaml").read_text())
        packages = sorted(map(read_package, found), key=lambda package: package.name)
        print(licence_table(packages, read_pins((ROOT / "constraints.txt").read_text()), accepted), end="")
        return 0
    problems = list(find_problems(found, "--files" in arguments))
    print("\n".join(problems) or f"{len(found)} installed packages are those of constraints.txt, and may be used")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
