"""Files of a token source: their formats and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from gristmill.core.files import as_path, is_local, sha256_file
from gristmill.dataprep.readers.pythondocs import ListedFile
from gristmill.dataprep.readers.sources import SourceError, StoredFile, find_at
from gristmill.mixtures.schema.sources import TokenSource
from gristmill.tokenize.importing.foreign_formats import (
    Kind,
    TokenFile,
    is_llmc,
)

INDEX, METADATA = ".idx", ".csv.gz"
BESIDE = {".bin": INDEX, ".npy": METADATA}
"""Ending of a file of tokens -> ending of the file that may be beside it."""
ENDINGS: dict[str, tuple[str, ...]] = {
    "megatron": (".bin",),
    "llmc": (".bin",),
    "memmap": (".bin", ".npy"),
    "olmo": (".npy",),
    "auto": (".bin", ".npy"),
}
"""Format -> endings of the files that are read of a folder."""
HEAD_BYTES = 16


def token_listing(
    name: str, source: TokenSource, verify: bool = False
) -> list[ListedFile]:
    """Files of a token source sorted by path; `verify` hashes their content.

    Raises:
        SourceError: as in `token_files`.
    """
    return [
        {
            "path": item.name,
            "size": item.size,
            "stamp": f"sha256:{sha256_file(as_path(item.location))}"
            if verify
            else item.stamp,
        }
        for item in sorted(_found(name, source.tokens)[1], key=lambda item: item.name)
    ]


def token_files(name: str, source: TokenSource) -> list[TokenFile]:
    """Files of a token source, sorted by name.

    Args:
        name: the source's name, for messages.
        source: its section of the manifest.

    Raises:
        SourceError: the path matches no token files, or the format cannot be
            determined.
    """
    kind, listing = _found(name, source.tokens)
    by_name = {item.name: item for item in listing}
    endings = ENDINGS[source.format]
    items = [
        item
        for _, item in sorted(by_name.items())
        if (
            item.name.endswith(endings)
            if kind == "folder"
            else not item.name.endswith((INDEX, METADATA))
        )
    ]
    files: list[TokenFile] = []
    for item in items:
        form = source.format
        if form == "auto":
            form = _kind(name, item, by_name)
        ending = {"megatron": INDEX, "olmo": METADATA}.get(form)
        beside = None
        if ending is not None:
            stem = item.name.removesuffix(PurePosixPath(item.name).suffix)
            beside = by_name.get(stem + ending)
        files.append(
            TokenFile(
                item.name,
                item.location,
                item.size,
                form,
                None if beside is None else beside.location,
            )
        )
    if not files:
        raise SourceError(
            f"source {name!r}: {source.tokens} holds no tokens of format "
            f"{source.format} ({' '.join(endings)}); correct `tokens:` or `format:`"
        )
    return files


def _found(name: str, tokens: str) -> tuple[str, list[StoredFile]]:
    """Kind of a source's path, and all its files with those beside them."""
    path = tokens
    key = f"source {name!r}"
    kind, listing = find_at(key, path)
    # Megatron-LM names a set by the common prefix of its two files
    if kind == "missing":
        path = f"{path}.bin"
        kind, listing = find_at(key, path)
    if not listing:
        problem = {
            "missing": "does not exist",
            "glob": "matches no file",
            "folder": "is an empty folder",
        }[kind]
        raise SourceError(f"source {name!r}: {tokens} {problem}; correct its path")
    for ending, beside in BESIDE.items():
        if kind != "folder" and path.endswith(ending):
            listed_names = {item.name for item in listing}
            listing += [
                item
                for item in find_at(key, path.removesuffix(ending) + beside)[1]
                if item.name not in listed_names
            ]
    return kind, listing


def _kind(name: str, item: StoredFile, by_name: Mapping[str, StoredFile]) -> Kind:
    """Format of a file, from its ending, its companions and its first bytes."""
    if item.name.endswith(".npy"):
        return "olmo"
    if item.name.endswith(".bin") and item.name.removesuffix(".bin") + INDEX in by_name:
        return "megatron"
    path = as_path(item.location)
    with open(path, "rb") if is_local(path) else path.open("rb") as stream:
        if is_llmc(stream.read(HEAD_BYTES)):  # type: ignore[arg-type]
            return "llmc"
    raise SourceError(
        f"source {name!r}: cannot tell the format of {item.name}; set `format:` to "
        "megatron, llmc, olmo, or memmap with `dtype:`"
    )
