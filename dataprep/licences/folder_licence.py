"""Licence of the files of a folder, by the package metadata and the licence texts in it
or in a folder above it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from email import message_from_string
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from gristmill.dataprep.licences.statements import Statement
from gristmill.dataprep.readers.records import field_of
from gristmill.mixtures.spdx import join, spdx_of
from gristmill.mixtures.yaml_text import front_matter

MAX_BYTES = 200_000
"""Largest file that is looked at; the GNU GPL has 35 kB."""
LEAST_SIMILARITY = 0.9
"""Least overlap of a text and a licence, as Dice's coefficient of their pairs of words
(askalono: 0.9 for a licence that is named without doubt).
"""
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|unlicense)\b", re.IGNORECASE)
_COPYRIGHT = re.compile(r"^\W*(copyright|©|\(c\)).*$", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"\w+")
PACKAGE_FILES = {
    "pyproject.toml": "project.license project.license.text tool.poetry.license",
    "Cargo.toml": "package.license",
    "package.json": "license license.type",
    "PKG-INFO": "License-Expression License classifiers",
    "METADATA": "License-Expression License classifiers",
    "README.md": "license",
}
"""Files that state a licence, the most certain first -> the fields; older package.json
have an object.
"""


class FolderLicences:
    """Licences of the folders below a root, each read once. Nothing above the root
    counts: a folder of data may lie in a checkout with another licence.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root).absolute()
        self._folders: dict[Path, Statement | None] = {}

    def of(self, folder: Path) -> Statement | None:
        """Statement in the folder, or the nearest above it."""
        if folder not in self._folders:
            statement = of_folder(folder)
            if statement is None and self._root in folder.parents:
                statement = self.of(folder.parent)
            self._folders[folder] = statement
        return self._folders[folder]


def of_folder(folder: Path) -> Statement | None:
    """Statement of a folder's own files: package metadata, else the texts of licences,
    which apply together.
    """
    if not os.access(folder, os.R_OK):
        return None
    texts = {
        path.name: path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.iterdir())
        if (path.name in PACKAGE_FILES or _LICENCE_FILE.match(path.name))
        and path.is_file()
        and os.access(path, os.R_OK)
        and path.stat().st_size <= MAX_BYTES
    }
    for name, fields in PACKAGE_FILES.items():
        values = package_fields(name, texts.pop(name, ""))
        for value in (field_of(values, field) for field in fields.split()):
            if isinstance(value, str) and (licence := spdx_of(value)):
                return Statement(licence, "package")
    licences = list(filter(None, map(licence_of_text, texts.values())))
    return Statement(join(licences), "file") if licences else None


def package_fields(name: str, text: str) -> Mapping[str, Any]:
    """Fields of a file in PACKAGE_FILES; empty if it is not a file of its kind."""
    try:
        match name.rpartition(".")[2]:
            case "toml":
                fields: Any = tomllib.loads(text)
            case "json":
                fields = json.loads(text)
            case "md":  # with a header, as data sets of the Hugging Face Hub have it
                fields = front_matter(text)
            case _:
                message = message_from_string(text)
                licences = [
                    value.rpartition(" :: ")[2]
                    for value in message.get_all("Classifier", [])
                    if value.startswith("License :: ")
                ]
                fields = {**dict(message), "classifiers": " AND ".join(licences)}
    except (ValueError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, dict) else {}


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
