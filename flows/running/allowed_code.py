"""Permission for users' listing functions: a source's files are part of its fingerprint, so its listing runs when a
manifest is planned, before a run is requested. A user who has read the code allows it first.

`gristmill run` runs all code of a manifest, and so allows its listings; `gristmill plan --allow-code` allows only them.
The store records allowed listings by content, including their options.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from gristmill.core.files import write_json
from gristmill.core.store import Store
from gristmill.mixtures.load import Problem, Written
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.sources import OwnListing

FOLDER = "allowed-code"
"""Folder in the store."""


def refused_listings(manifest: Manifest, written: Written, store: Store, allow: bool) -> list[Problem]:
    """Problems for listings that are not allowed yet; `allow` allows them all."""
    problems = []
    for name, listing in _listings(manifest):
        marker = store.root / FOLDER / f"{_digest(listing)}.json"
        if marker.exists():
            continue
        if allow:
            write_json(marker, {"function": listing.use.reference, "source": name, "manifest": manifest.name})
        else:
            code = ", ".join(f"{file}: {len(source.splitlines())} lines" for file, source in listing.use.files.items())
            problems.append(
                written.problem(
                    ("sources", name, "list"),
                    (
                        f"planning would run {listing.use.reference} ({code or listing.use.distribution}) to list the files; "
                        "read it, then allow it with gristmill plan --allow-code, or with gristmill run, which runs all "
                        "code of a manifest"
                    ),
                )
            )
    return problems


def _listings(manifest: Manifest) -> Iterator[tuple[str, OwnListing]]:
    return ((name, source.list) for name, source in manifest.document_sources.items() if source.list is not None)


def _digest(listing: OwnListing) -> str:
    return hashlib.sha256(listing.model_dump_json().encode()).hexdigest()
