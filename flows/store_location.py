"""Which store is meant: by an option, by the environment, or by default; and whether one can be there."""

from __future__ import annotations

import os

from gristmill.dataprep.files import is_local
from gristmill.dataprep.secrets import mask_text, remember_secrets
from gristmill.flows.store import Store

DEFAULT_STORE = "gristmill-store"
"""In the current folder."""


class StoreLocationError(ValueError):
    """There can be no store at a place, with what to give instead."""


def store_at(option: str | None) -> Store:
    """The store that an option names, otherwise GRISTMILL_STORE, otherwise the default; it need not exist yet.

    Raises:
        StoreLocationError: a file is there, only this process would see it, or no library here opens such URLs.
    """
    location = option or os.environ.get("GRISTMILL_STORE") or DEFAULT_STORE
    remember_secrets(location)
    try:
        store = Store.at(location)
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        raise StoreLocationError(mask_text(f"the store {location}: {said}; give a folder, or a URL of a kind that "
                                           "fsspec opens here, such as s3://bucket/folder")) from error
    if location.startswith("memory:"):
        raise StoreLocationError(f"the store {location} would be in the memory of this process alone, and stages run "
                                 "in processes of their own; give a folder, or the URL of an object store")
    if is_local(store.root) and store.root.exists() and not store.root.is_dir():
        raise StoreLocationError(f"the store {store.root} is a file; name a folder with --store or GRISTMILL_STORE")
    return store
