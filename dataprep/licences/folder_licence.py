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
from typing import Any

import yaml

from gristmill.dataprep.licences.statements import Statement, join
from gristmill.dataprep.readers.records import field_of
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


def _fields_of_message(text: str) -> dict[str, Any]:
    """Fields of a PKG-INFO; `licence` is the last part of its classifiers."""
    message = message_from_string(text)
    classifiers = [
        value.rpartition(" :: ")[2]
        for value in message.get_all("Classifier", [])
        if value.startswith("License :: ")
    ]
    return {**dict(message.items()), "licence": " AND ".join(classifiers)}


def _fields_of_card(text: str) -> Any:
    """Fields in the header of a README.md, as data sets of the Hugging Face Hub have
    it.
    """
    header = _FRONT_MATTER.match(text)
    return yaml.safe_load(header[1]) if header else {}


PACKAGE_FILES: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "pyproject.toml": (
        tomllib.loads,
        ("project.license", "project.license.text", "tool.poetry.license"),
    ),
    "Cargo.toml": (tomllib.loads, ("package.license",)),
    "package.json": (json.loads, ("license", "license.type")),
    "PKG-INFO": (_fields_of_message, ("License-Expression", "License", "licence")),
    "METADATA": (_fields_of_message, ("License-Expression", "License", "licence")),
    "README.md": (_fields_of_card, ("license",)),
}
"""Files that state a licence, the most certain first -> their parser, and the fields;
older package.json have an object.
"""


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
    names = {
        name
        for name in (os.listdir(folder) if os.access(folder, os.R_OK) else ())
        if (name in PACKAGE_FILES or _LICENCE_FILE.match(name))
        and (folder / name).is_file()
        and os.access(folder / name, os.R_OK)
        and (folder / name).stat().st_size <= MAX_BYTES
    }
    for name, (parse, keys) in PACKAGE_FILES.items():
        if name in names:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            try:
                fields = parse(text)
                stated = [field_of(fields, key) for key in keys]
            except (ValueError, AttributeError, yaml.YAMLError):
                continue  # not a file of that kind
            for value in stated:
                if isinstance(value, str) and (licence := spdx_of(value)):
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
