"""The files behind a path, local or in any store that fsspec knows."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_STAMP_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class LinkOutsideError(ValueError):
    """A folder holds a link to a file outside of it."""


@dataclass(frozen=True)
class Found:
    """A file: name relative to what was looked for, location, size in bytes, and what changes with its content."""

    name: str
    location: str
    size: int
    stamp: str


def find(path: str) -> tuple[str, list[Found]]:
    """What a path is (`file`, `folder`, `glob`, `missing`), and the files that it names, in no certain order."""
    return _find_remote(path) if "://" in path else _find_local(path)


def _find_local(path: str) -> tuple[str, list[Found]]:
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return "file", [_found_local(os.path.dirname(path), os.path.basename(path))]
    if os.path.isdir(path):
        return "folder", [_found_inside(path, name) for name in _walk(path)]
    if not glob.has_magic(path):
        return "missing", []
    root, pattern = _split_glob(path)
    names = glob.glob(pattern, root_dir=root or None, recursive=True)
    return "glob", [_found_inside(root, name) for name in sorted(set(names))
                    if os.path.isfile(os.path.join(root, name))]  # fmt: skip


def _found_inside(root: str, name: str) -> Found:
    """A file of a folder or glob.

    Raises:
        LinkOutsideError: it is a link to a file outside of the folder.
    """
    location, base = os.path.realpath(os.path.join(root, name)), os.path.realpath(root or ".")
    allowed = [base]
    if os.path.basename(os.path.dirname(base)) == "snapshots":  # the hub's cache: a snapshot's files link to its blobs
        allowed.append(os.path.join(os.path.dirname(os.path.dirname(base)), "blobs"))
    if not any(os.path.commonpath([location, folder]) == folder for folder in allowed):
        raise LinkOutsideError(f"{os.path.join(root, name)} links to {location}, which lies outside of {base}")
    return _found_local(root, name)


def _walk(folder: str) -> Iterator[str]:
    """The regular files below a folder, also behind links; pipes, sockets and devices are none."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.isfile(os.path.join(parent, name)):
                yield os.path.relpath(os.path.join(parent, name), folder)


def _split_glob(path: str) -> tuple[str, str]:
    """Split a pattern before its first part with a wildcard: `a/b/**/*.py` is (`a/b`, `**/*.py`)."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:first])
    return root or ("/" if path.startswith("/") else ""), "/".join(parts[first:])


def _found_local(root: str, name: str) -> Found:
    location = os.path.join(root, name)
    status = os.stat(location)
    return Found(Path(name).as_posix(), os.path.abspath(location), status.st_size, str(status.st_mtime_ns))


def _find_remote(path: str) -> tuple[str, list[Found]]:
    import fsspec

    store, inner = fsspec.core.url_to_fs(path)
    if glob.has_magic(inner) and not store.exists(inner):
        root = _split_glob(inner)[0]
        return "glob", _found_remote(store, root, store.glob(inner, detail=True))
    if store.isfile(inner):
        return "file", _found_remote(store, inner.rpartition("/")[0], {inner: store.info(inner)})
    if not store.isdir(inner):
        return "missing", []
    return "folder", _found_remote(store, inner, store.find(inner, detail=True))


def _found_remote(store: Any, root: str, infos: Mapping[str, Mapping[str, Any]]) -> list[Found]:
    found = []
    for location, info in infos.items():
        name = location[len(root):].lstrip("/")  # fmt: skip
        if "://" in location:
            name = unquote(name.partition("?")[0])  # what follows is no name, and a signature at times
        if info["type"] != "file" or any(part.startswith(".") for part in name.split("/")):
            continue
        stamp = next((str(info[key]) for key in _STAMP_KEYS if info.get(key) is not None), "")
        found.append(Found(name, store.unstrip_protocol(location), int(info["size"]), stamp))
    return found
