"""Files of a token source: their formats and fingerprints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from gristmill.core.files import as_path, is_local, sha256_file
from gristmill.dataprep.reading.pythondocs import ListedFile
from gristmill.dataprep.reading.sources import Found, SourceError, find_at
from gristmill.mixtures.sources import TokenSource
from gristmill.tokenize.importing.foreign_formats import (
    MDS_INDEX,
    Kind,
    TokenFile,
    TokenFileError,
    is_llmc,
    mds_shards,
)

INDEX, METADATA = ".idx", ".csv.gz"
BESIDE = {".bin": INDEX, ".npy": METADATA}
"""Ending of a file of tokens -> of what may lie beside it."""
ENDINGS: dict[str, tuple[str, ...]] = {
    "megatron": (".bin",),
    "llmc": (".bin",),
    "memmap": (".bin", ".npy"),
    "olmo": (".npy",),
    "mds": (MDS_INDEX,),
    "auto": (".bin", ".npy", MDS_INDEX),
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
    token_items = [
        item
        for item in sorted(listing, key=lambda item: item.name)
        if (
            item.name.endswith(ENDINGS[source.format])
            if kind == "folder"
            else not item.name.endswith((INDEX, METADATA))
        )
    ]
    files = [
        file
        for item in _without_inner_indices(token_items)
        for file in _files(name, item, by_name, source.format)
    ]
    if not files:
        endings = " ".join(ENDINGS[source.format])
        raise SourceError(
            f"source {name!r}: {source.tokens} holds no tokens of format "
            f"{source.format} ({endings}); correct `tokens:` or `format:`"
        )
    return files


def _found(name: str, tokens: str) -> tuple[str, list[Found]]:
    """Kind of a source's path, and all its files with those beside them."""
    path = tokens
    key = f"source {name!r}"
    if PurePosixPath(path).name == MDS_INDEX:
        path = path.removesuffix(MDS_INDEX).rstrip("/") or "."
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


def _without_inner_indices(items: Sequence[Found]) -> Iterator[Found]:
    """Drop the indices of merged subsets: the outer index already lists their
    shards.
    """
    outer = [
        PurePosixPath(item.name).parent
        for item in items
        if PurePosixPath(item.name).name == MDS_INDEX
    ]
    for item in items:
        folder = PurePosixPath(item.name).parent
        if PurePosixPath(item.name).name != MDS_INDEX or not any(
            parent in folder.parents for parent in outer
        ):
            yield item


def _files(
    name: str, item: Found, by_name: Mapping[str, Found], asked: str
) -> Iterator[TokenFile]:
    kind = _kind(name, item, by_name) if asked == "auto" else asked
    if kind == "mds":
        yield from _mds_files(name, item, by_name)
        return
    stem = item.name.removesuffix(PurePosixPath(item.name).suffix)
    beside = (
        by_name.get(stem + (INDEX if kind == "megatron" else METADATA))
        if kind in ("megatron", "olmo")
        else None
    )
    yield TokenFile(
        item.name,
        item.location,
        item.size,
        kind,  # type: ignore[arg-type]
        None if beside is None else beside.location,
    )


def _kind(name: str, item: Found, by_name: Mapping[str, Found]) -> Kind:
    """Format of a file, from its ending, its companions and its first bytes."""
    if PurePosixPath(item.name).name == MDS_INDEX:
        return "mds"
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
        "megatron, llmc, olmo, memmap (and `dtype:`) or mds"
    )


def _mds_files(
    name: str, index: Found, by_name: Mapping[str, Found]
) -> Iterator[TokenFile]:
    folder = PurePosixPath(index.name).parent
    try:
        shards = mds_shards(as_path(index.location), index.name)
    except TokenFileError as error:
        raise SourceError(f"source {name!r}: {error}") from error
    for shard in shards:
        raw = str(folder / shard["raw_data"]["basename"])
        packed = shard.get("zip_data") if shard.get("compression") else None
        file = raw if packed is None else str(folder / packed["basename"])
        item = by_name.get(file) or by_name.get(raw)
        if item is None:
            raise SourceError(
                f"source {name!r}: {file} is missing, which {index.name} names"
            )
        if packed is None or item.name == raw:
            shard["compression"] = None
        yield TokenFile(raw, item.location, item.size, "mds", shard=shard)
