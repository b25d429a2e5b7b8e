"""Licence of the files of a folder, or of an archive's members, by the package metadata
and the licence texts in their folder or in one above it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_string
from functools import cache
from itertools import pairwise
from typing import Any

import yaml

from gristmill.core.files import as_path
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


def folder_texts(folder: str) -> dict[str, str]:
    """Texts of the files of a folder, local or remote, that may state its licence;
    unreadable ones are left out.
    """
    texts = {}
    with suppress(OSError):
        for path in sorted(as_path(folder or "/").iterdir(), key=str):
            with suppress(OSError):
                if (
                    states_licence(path.name)
                    and path.is_file()
                    and path.stat().st_size <= MAX_BYTES
                ):
                    texts[path.name] = path.read_text("utf-8", "replace")
    return texts


def states_licence(name: str) -> bool:
    """True for the name of a file that may state a licence."""
    return name in PACKAGE_FILES or _LICENCE_FILE.match(name) is not None


@dataclass
class FolderLicences:
    """Licences of the folders below a root, each read once. Nothing above the root
    counts: a folder of data may lie in a checkout with another licence.

    Attributes:
        root: the outermost folder, without a slash at its end.
        texts_of: folder -> texts of its files that may state a licence, by name.
    """

    root: str
    texts_of: Callable[[str], Mapping[str, str]] = folder_texts
    _statements: dict[str, Statement | None] = field(default_factory=dict)

    def of(self, folder: str) -> Statement | None:
        """Statement in the folder, or the nearest above it."""
        if folder not in self._statements:
            statement = statement_of(self.texts_of(folder))
            if statement is None and folder.startswith(f"{self.root}/"):
                statement = self.of(folder.rpartition("/")[0])
            self._statements[folder] = statement
        return self._statements[folder]


def statement_of(texts: Mapping[str, str]) -> Statement | None:
    """Statement of the files of a folder, by name: package metadata, else the texts of
    licences, which apply together.
    """
    for name, fields in PACKAGE_FILES.items():
        values = package_fields(name, texts.get(name, ""))
        for value in (field_of(values, key) for key in fields.split()):
            if isinstance(value, str) and (licence := spdx_of(value)):
                return Statement(licence, "package")
    licences = [
        licence
        for name, text in texts.items()
        if name not in PACKAGE_FILES and (licence := licence_of_text(text))
    ]
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
