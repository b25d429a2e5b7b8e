"""Permission for users' listing functions: a source's files are part of its
fingerprint, so its listing runs when a manifest is planned, before a run is requested.
A user who has read the code allows it first.

`gristmill run` runs all code of a manifest, and so allows its listings; `gristmill plan
--allow-code` allows only them. The store records allowed listings by content, including
their options.
"""

from __future__ import annotations

import hashlib

from gristmill.core.files import write_json
from gristmill.core.store import Store
from gristmill.mixtures.loader import Problem, Written
from gristmill.mixtures.manifest import Manifest

FOLDER = "allowed-code"
"""Folder in the store."""


def refused_listings(
    manifest: Manifest, written: Written, store: Store, allow: bool
) -> list[Problem]:
    """Problems for listings that are not allowed yet; `allow` allows them all."""
    problems = []
    for name, source in manifest.document_sources.items():
        listing = source.list
        if listing is None:
            continue
        digest = hashlib.sha256(listing.model_dump_json().encode()).hexdigest()
        marker = store.root / FOLDER / f"{digest}.json"
        if marker.exists():
            continue
        function = listing.use.reference
        if allow:
            write_json(
                marker,
                {"function": function, "source": name, "manifest": manifest.name},
            )
            continue
        code = ", ".join(
            f"{file}: {len(text.splitlines())} lines"
            for file, text in listing.use.files.items()
        )
        message = (
            f"planning would run {function} ({code or listing.use.distribution}) to "
            "list the files; read it, then allow it with gristmill plan --allow-code, "
            "or with gristmill run, which runs all code of a manifest"
        )
        problems.append(written.problem(("sources", name, "list"), message))
    return problems
