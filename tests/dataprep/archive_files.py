"""Small tar and zip archives."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence


def make_tar(members: Mapping[str, bytes], names: Sequence[str] = ()) -> bytes:
    """Tar archive of some members, in the order of `names`, in which one may repeat."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names or members:
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            archive.addfile(info, io.BytesIO(members[name]))
    return buffer.getvalue()


def make_zip(members: Mapping[str, str | bytes]) -> bytes:
    """Zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()
