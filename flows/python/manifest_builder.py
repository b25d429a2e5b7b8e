"""Manifests as objects: read from a file or built in Python, changed, saved, run."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

import gristmill.flows.stages.registry  # noqa: F401 - registers the steps of `prepare` for manifests
from gristmill.core.files import DEFAULT_STORE, is_local, write_text
from gristmill.core.secrets import remember_secrets
from gristmill.core.store import MANIFESTS, Store
from gristmill.mixtures import manifest as schema
from gristmill.mixtures.base import outside_paths
from gristmill.mixtures.loader import (
    ManifestError,
    Problem,
    Written,
    check_manifest,
    open_manifest,
    written_location,
)
from gristmill.mixtures.user_code import own_functions
from gristmill.mixtures.yaml_text import parse_yaml

MADE = "Manifest"
"""File name in errors of a manifest without a file."""
NEW_LINE = "\n"


class Manifest:
    """A manifest with the same keys as in YAML, validated on construction.

        manifest = Manifest(name="small", sources={"web": {"path": "web/*.jsonl"}},
        prepare=["filter", "dedup"])

    Values are those of YAML (mappings, lists, strings, numbers), paths, and functions
    of modules. Relative paths are relative to `folder`. Manifests are immutable:
    `replace` returns a new one.
    """

    folder: Path
    """Base of relative paths."""
    file: Path | None
    """File that it was read from, or last saved to."""

    def __init__(
        self,
        content: Mapping[str, Any] | None = None,
        /,
        *,
        folder: str | Path = ".",
        **sections: Any,
    ) -> None:
        """Validate a manifest.

        Args:
            content: sections as a mapping, instead of keywords.
            folder: base of relative paths and of files with user code.
            sections: sections by name; docs/manifest/README.md lists them.

        Raises:
            ManifestError: lists every problem.
        """
        try:
            plain = _plain({**(content or {}), **sections})
        except ValueError as error:
            raise ManifestError([Problem(MADE, 0, "(file)", str(error))]) from error
        self.folder = Path(folder).resolve()
        self.file = None
        remember_secrets(plain)
        self._settings, self._written = check_manifest(plain, MADE, self.folder)

    @classmethod
    def load(cls, path: str | Path, set: Mapping[str, Any] | None = None) -> Manifest:
        """Read a YAML file.

        Args:
            path: the file.
            set: overridden settings by key, such as `{"pretrain.steps": 50}`.

        Raises:
            ManifestError: lists every problem with its line.
        """
        manifest = cls.__new__(cls)
        overrides = overrides_of(set)
        remember_secrets(overrides)
        manifest.file = Path(path).resolve()
        manifest.folder = manifest.file.parent
        manifest._settings, manifest._written = open_manifest(path, overrides)
        return manifest

    @property
    def content(self) -> dict[str, Any]:
        """A copy of the manifest as written, without defaults, as plain data."""
        copied: dict[str, Any] = deepcopy(self._written.raw)
        return copied

    @property
    def settings(self) -> schema.Manifest:
        """Every section with every default, such as `settings.pretrain.steps`."""
        return self._settings

    @property
    def name(self) -> str:
        """Name of its runs and their folders."""
        return self._settings.name

    def replace(self, set: Mapping[str, Any]) -> Manifest:
        """Return a new manifest with other values of some settings.

        Args:
            set: settings by key, such as `{"pretrain.steps": 50}`; a whole section is a
                mapping.

        Raises:
            ManifestError: lists every problem.
        """
        manifest = Manifest.__new__(Manifest)
        manifest.folder, manifest.file = self.folder, self.file
        overrides = overrides_of(set)
        remember_secrets(overrides)
        manifest._settings, manifest._written = check_manifest(
            self.content, MADE, self.folder, overrides
        )
        return manifest

    def to_yaml(self) -> str:
        """Return the manifest as written, as YAML."""
        return _yaml(self._written.raw)

    def save(self, path: str | Path) -> Path:
        """Write the manifest to a YAML file that loads as an equal manifest, and return
        the path.

        Relative paths are kept if the file is in `folder`, and become absolute
        otherwise.
        """
        file = Path(path).resolve()
        _save(self._content_in(file.parent), file)
        self.file = file
        return file

    def _content_in(self, folder: Path) -> dict[str, Any]:
        """Return the content, with absolute paths if the target folder differs."""
        content = self.content
        if folder == self.folder:
            return content
        for location, path in outside_paths(self._settings):
            _set_string(content, location, str(path))
        for location, code in own_functions(self._settings):
            file, _, name = code.written.rpartition(":")
            if code.files:
                _set_string(content, location, f"{self.folder / file}:{name}")
        return content

    def __eq__(self, other: object) -> bool:
        """Compare all settings, including the content of user code but not its
        location.
        """
        if not isinstance(other, Manifest):
            return NotImplemented
        return self._settings.model_dump(mode="json") == other._settings.model_dump(
            mode="json"
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return (
            f"Manifest({self.name!r}: "
            f"{', '.join(key for key in self._written.raw if key != 'name')})"
        )


def written_keys(manifest: Manifest) -> Written:
    """Return the locations of the manifest's keys."""
    return manifest._written


def file_to_run(manifest: Manifest, store: Store) -> str:
    """Return the file of a manifest for commands, saving it in the store if no file
    holds its content.
    """
    file = manifest.file
    if (
        file is not None
        and file.is_file()
        and parse_yaml(file.read_text()) == manifest._content_in(file.parent)
    ):
        return str(file)
    folder = (
        store.root if is_local(store.root) else Path(DEFAULT_STORE).resolve()
    ) / MANIFESTS
    content = manifest._content_in(folder)
    file = (
        folder
        / f"{manifest.name}-{hashlib.sha256(_yaml(content).encode()).hexdigest()[:12]}.yaml"
    )
    _save(content, file)
    return str(file)


def overrides_of(set: Mapping[str, Any] | None) -> list[str]:
    """Format settings as arguments of `--set`: `key=value`, the value as YAML."""
    return [
        f"{key}={_yaml(_plain(value), default_flow_style=True).removesuffix('...' + NEW_LINE).strip()}"
        for key, value in (set or {}).items()
    ]


def _yaml(value: Any, **style: Any) -> str:
    options = {"sort_keys": False, "width": float("inf"), **style}
    text: str = yaml.safe_dump(value, allow_unicode=True, **options)
    if "\x85" in text:  # a next-line character would be read as a line break
        text = yaml.safe_dump(value, **options)
    return text


def _save(content: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, _yaml(content))


def _plain(value: Any) -> Any:
    """Convert a Python value to YAML data; raise ValueError if that is impossible."""
    if value is None or isinstance(value, bool | date):
        return value
    # Instances of subclasses of built-in types become the built-in type.
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(inner) for inner in value]
    if callable(value):
        name = getattr(value, "__qualname__", "")
        module = getattr(value, "__module__", "")
        imported: Any = getattr(sys.modules.get(module), name, None)
        if module == "__main__" or not name.isidentifier() or imported is not value:
            raise ValueError(
                f"the function {name or value!r} cannot be imported by name; write it "
                "at the top level of a file of its own, such as steps.py, and give "
                f'"./steps.py:{name.rpartition(".")[2]}"'
            )
        source = inspect.getsourcefile(value)
        if "." in module or source is None:
            return f"{module}:{name}"
        return f"{Path(source).resolve()}:{name}"
    if hasattr(value, "item"):
        return _plain(value.item())  # a NumPy scalar
    raise ValueError(
        f"{value!r} ({type(value).__name__}) cannot be a value in a manifest, which "
        "holds mappings, lists, texts, numbers, true, false and null"
    )


def _set_string(
    content: dict[str, Any], location: Sequence[str | int], value: str
) -> None:
    """Replace the string at a location; values that are not strings are left alone."""
    container: Any = content
    *parents, key = written_location(location, content)
    for part in parents:
        # a string instead of a list with one entry
        if isinstance(container[part], str):
            container[part] = value
            return
        container = container[part]
    if isinstance(container[key], str):
        container[key] = value
