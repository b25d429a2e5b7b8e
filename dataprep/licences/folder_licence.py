"""Licence of the files of a folder, by the package metadata and the licence texts in it
or in a folder above it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from email import message_from_string
from functools import cache
from itertools import pairwise
from pathlib import Path

import yaml

from gristmill.dataprep.licences.statements import Statement, join
from gristmill.mixtures.spdx import spdx_of

MAX_BYTES = 200_000
"""Largest file that is looked at; the GNU GPL has 35 kB."""
LEAST_SIMILARITY = 0.9
"""Least overlap of a text and a licence, as Dice's coefficient of their pairs of words
(askalono: 0.9 for a licence that is named without doubt).
"""
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|unlicense)\b", re.IGNORECASE)
_COPYRIGHT = re.compile(r"^\W*(copyright|©|\(c\)).*$", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"\w+")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_CLASSIFIER = "License :: "


def pyproject(text: str) -> object:
    """Licence of a pyproject.toml."""
    content = tomllib.loads(text)
    licence = content.get("project", {}).get("license")
    if isinstance(licence, dict):
        licence = licence.get("text")
    return licence or content.get("tool", {}).get("poetry", {}).get("license")


def cargo(text: str) -> object:
    """Licence of a Cargo.toml."""
    return tomllib.loads(text).get("package", {}).get("license")


def package_json(text: str) -> object:
    """Licence of a package.json; older ones have an object with its `type`."""
    licence = json.loads(text).get("license")
    return licence.get("type") if isinstance(licence, dict) else licence


def pkg_info(text: str) -> object:
    """Licence of a PKG-INFO: its expression, its name, or its classifiers."""
    fields = message_from_string(text)
    stated = [fields[key] for key in ("License-Expression", "License") if fields[key]]
    stated += [
        value.rpartition(" :: ")[2]
        for value in fields.get_all("Classifier", [])
        if value.startswith(_CLASSIFIER)
    ]
    return next((value for value in stated if spdx_of(value)), None)


def dataset_card(text: str) -> object:
    """Licence in the header of a README.md, as data sets of the Hugging Face Hub have
    it.
    """
    header = _FRONT_MATTER.match(text)
    content = yaml.safe_load(header[1]) if header else None
    return content.get("license") if isinstance(content, dict) else None


PACKAGE_FILES: dict[str, Callable[[str], object]] = {
    "pyproject.toml": pyproject,
    "Cargo.toml": cargo,
    "package.json": package_json,
    "PKG-INFO": pkg_info,
    "METADATA": pkg_info,
    "README.md": dataset_card,
}
"""Files that state a licence, the most certain first."""


class FolderLicences:
    """Licences of the folders below a root, each read once. Nothing above the root
    counts: a folder of data may lie in a checkout with another licence.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._folders: dict[str, Statement | None] = {}

    def of(self, folder: str) -> Statement | None:
        """Statement in the folder, or the nearest above it."""
        if folder not in self._folders:
            statement = of_folder(Path(folder))
            is_below = folder.startswith(self._root) and folder != self._root
            if statement is None and is_below:
                statement = self.of(os.path.dirname(folder))
            self._folders[folder] = statement
        return self._folders[folder]


def of_folder(folder: Path) -> Statement | None:
    """Statement of a folder's own files: package metadata, else the texts of licences,
    which apply together.
    """
    with os.scandir(folder) as entries:
        names = {
            entry.name
            for entry in entries
            if (entry.name in PACKAGE_FILES or _LICENCE_FILE.match(entry.name))
            and entry.is_file()
            and entry.stat().st_size <= MAX_BYTES
        }
    for name, licence_in in PACKAGE_FILES.items():
        if name in names:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            try:
                stated = licence_in(text)
            except (ValueError, AttributeError, yaml.YAMLError):
                continue  # not a file of that kind
            if isinstance(stated, str) and (licence := spdx_of(stated)):
                return Statement(licence, "package")
    texts = [
        (folder / name).read_text(encoding="utf-8", errors="replace")
        for name in sorted(names - PACKAGE_FILES.keys())
    ]
    licences = [name for name in map(licence_of_text, texts) if name is not None]
    return Statement(join(licences), "file") if licences else None


def licence_of_text(text: str) -> str | None:
    """SPDX expression of the licence with this text, apart from its copyright notice;
    None if it is no text of a common licence.

    The texts are those that `identify` carries: the 35 of choosealicense.com.
    """
    pairs_of_text = _pairs(text)
    best, similarity = "", 0.0
    for name, pairs in _licence_texts().items():
        size = pairs_of_text.total() + pairs.total()
        overlap = 2 * (pairs_of_text & pairs).total() / size
        if overlap > similarity:
            best, similarity = name, overlap
    return spdx_of(best) if similarity >= LEAST_SIMILARITY else None


def _pairs(text: str) -> Counter[tuple[str, str]]:
    words = _WORD.findall(_COPYRIGHT.sub("", text).lower())
    return Counter(pairwise(words))


@cache
def _licence_texts() -> dict[str, Counter[tuple[str, str]]]:
    from identify.vendor.licenses import LICENSES

    return {name: _pairs(text) for name, text in LICENSES}
