"""A manifest as an object: read from a file or made in Python, changed, saved, run."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from gristmill.core.files import DEFAULT_STORE, atomic_write, is_local
from gristmill.core.secrets import remember_secrets
from gristmill.core.store import MANIFESTS, Store
from gristmill.mixtures import manifest as schema
from gristmill.mixtures.base import outside_paths
from gristmill.mixtures.load import (
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
"""What errors call a manifest that has no file."""
NEW_LINE = "\n"


class Manifest:
    """What to run: the same keys as a YAML manifest, validated when it is made.

        manifest = Manifest(name="small", sources={"web": {"path": "web/*.jsonl"}}, prepare=["filter", "dedup"])

    Values are what YAML has (mappings, lists, texts, numbers); paths and functions of modules may be given as such.
    Relative paths are relative to `folder`. It never changes: `replace` makes another one.
    """

    folder: Path
    """What relative paths in it are relative to."""
    file: Path | None
    """Where it was read from, or saved to last."""

    def __init__(
        self, content: Mapping[str, Any] | None = None, /, *, folder: str | Path = ".", **sections: Any
    ) -> None:
        """Validate a manifest.

        Args:
            content: its sections, as an alternative to giving them by name.
            folder: what relative paths and own code in it are relative to.
            sections: by name; docs/manifest/README.md has all of them.

        Raises:
            ManifestError: with everything that is wrong.
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
            set: values that replace some of its settings, by their keys, such as `{"pretrain.steps": 50}`.

        Raises:
            ManifestError: with everything that is wrong, each with its line.
        """
        found = cls.__new__(cls)
        overrides = overrides_of(set)
        remember_secrets(overrides)
        found.file = Path(path).resolve()
        found.folder = found.file.parent
        found._settings, found._written = open_manifest(path, overrides)
        return found

    @property
    def content(self) -> dict[str, Any]:
        """A copy of what was written, without defaults, as plain data."""
        copied: dict[str, Any] = deepcopy(self._written.raw)
        return copied

    @property
    def settings(self) -> schema.Manifest:
        """Every section with every default, such as `settings.pretrain.steps`."""
        return self._settings

    @property
    def name(self) -> str:
        """Names its runs and their folders."""
        return self._settings.name

    def replace(self, set: Mapping[str, Any]) -> Manifest:
        """Another manifest with other values of some settings.

        Args:
            set: by their keys, such as `{"pretrain.steps": 50}`; a whole section is a mapping.

        Raises:
            ManifestError: with everything that is wrong.
        """
        found = Manifest.__new__(Manifest)
        found.folder, found.file = self.folder, self.file
        overrides = overrides_of(set)
        remember_secrets(overrides)
        found._settings, found._written = check_manifest(self.content, MADE, self.folder, overrides)
        return found

    def to_yaml(self) -> str:
        """What was written, as YAML."""
        return _yaml(self._written.raw)

    def save(self, path: str | Path) -> Path:
        """Write it as a YAML file, which gives an equal manifest when it is loaded; returns the file.

        Relative paths stay as they are where the file lies in `folder`, and become absolute ones elsewhere.
        """
        file = Path(path).resolve()
        _save(self._content_in(file.parent), file)
        self.file = file
        return file

    def _content_in(self, folder: Path) -> dict[str, Any]:
        """What was written, with absolute paths where the file lies elsewhere."""
        content = self.content
        if folder == self.folder:
            return content
        for location, path in outside_paths(self._settings):
            _put(content, location, str(path))
        for location, own in own_functions(self._settings):
            file, _, name = own.written.rpartition(":")
            if own.files:
                _put(content, location, f"{self.folder / file}:{name}")
        return content

    def __eq__(self, other: object) -> bool:
        """Whether all settings are equal, own code included, wherever it lies."""
        if not isinstance(other, Manifest):
            return NotImplemented
        return self._settings.model_dump(mode="json") == other._settings.model_dump(mode="json")

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Manifest({self.name!r}: {', '.join(key for key in self._written.raw if key != 'name')})"


def written_keys(manifest: Manifest) -> Written:
    """Where its keys were written."""
    return manifest._written


def file_to_run(manifest: Manifest, store: Store) -> str:
    """The file that commands about a run of it name; it is saved in the store where no file has it as it is."""
    file = manifest.file
    if file is not None and file.is_file() and parse_yaml(file.read_text()) == manifest._content_in(file.parent):
        return str(file)
    folder = (store.root if is_local(store.root) else Path(DEFAULT_STORE).resolve()) / MANIFESTS
    content = manifest._content_in(folder)
    file = folder / f"{manifest.name}-{hashlib.sha256(_yaml(content).encode()).hexdigest()[:12]}.yaml"
    _save(content, file)
    return str(file)


def overrides_of(set: Mapping[str, Any] | None) -> list[str]:
    """Settings as the command line gives them to `--set`: `key=value`, the value as YAML."""
    return [
        f"{key}={_yaml(_plain(value), default_flow_style=True).removesuffix('...' + NEW_LINE).strip()}"
        for key, value in (set or {}).items()
    ]


def _yaml(value: Any, **style: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=float("inf"), **style)
    return text


def _save(content: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as sink:
        sink.write(_yaml(content).encode())


def _plain(value: Any) -> Any:
    """What YAML can hold of a value of Python's.

    Raises:
        ValueError: YAML has nothing for it.
    """
    if value is None or isinstance(value, bool | int | float | str | date):
        # Of a class that is derived from one of Python's own it is that one's value.
        return next(
            (kind(value) for kind in (int, float, str) if isinstance(value, kind) and type(value) is not bool), value
        )
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(inner) for inner in value]
    if callable(value):
        return _reference(value)
    if hasattr(value, "item"):
        return _plain(value.item())  # a number of numpy's
    raise ValueError(
        f"{value!r} ({type(value).__name__}) cannot stand in a manifest, which holds mappings, lists, "
        "texts, numbers, true, false and null"
    )


def _reference(function: Callable[..., Any]) -> str:
    """A function as `use` names it.

    Raises:
        ValueError: it has no place of its own in a module.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if module == "__main__" or not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not function:
        raise ValueError(
            f"the function {name or function!r} cannot be named from elsewhere; write it at the top level "
            'of a file of its own, such as steps.py, and give "./steps.py:'
            f'{name.rpartition(".")[2]}"'
        )
    file = inspect.getsourcefile(function)
    return f"{module}:{name}" if "." in module or file is None else f"{Path(file).resolve()}:{name}"


def _put(content: dict[str, Any], location: Sequence[str | int], value: str) -> None:
    """Replace the text at a place of the model by another one. What is no text is there by value."""
    at: Any = content
    *parents, last = written_location(location, content)
    for part in parents:
        if isinstance(at[part], str):  # one text stands for a list of one
            at[part] = value
            return
        at = at[part]
    if isinstance(at[last], str):
        at[last] = value
