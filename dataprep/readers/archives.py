"""Members of tar and zip archives, read like the files of a folder without unpacking to
disk.
"""

from __future__ import annotations

import errno
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, Self, cast

from gristmill.dataprep.licences.folder_licence import (
    MAX_BYTES,
    FolderLicences,
    states_licence,
)
from gristmill.dataprep.readers.compression import (
    READ_BYTES,
    CorruptFileError,
    DecodedStream,
    Metered,
    one_line,
)
from gristmill.dataprep.readers.records import (
    Dropped,
    Input,
    Page,
    Read,
    Rejected,
    Skipped,
    with_end,
)

_MALFORMED_ERRORS = (
    ValueError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,
)
"""Exceptions of `zipfile` for malformed archives, besides its own."""

ReadMember = Callable[[Input], Iterator[Read] | None]
"""Reader of one member by its name; None if its format is unknown or not selected."""
ReadArchive = Callable[[Input, ReadMember], Iterator[Read]]


@dataclass(frozen=True)
class _Member:
    """An archive member with the path interface that readers need.

    Attributes:
        name: in the archive.
        is_file: False for folders and links.
        size: unpacked bytes.
        opened: function that opens it.
        reopens: True if it may be opened more than once; False in a stream.
    """

    name: str
    is_file: bool
    size: int
    opened: Callable[[], Any]
    reopens: bool = False

    @contextmanager
    def open(self, mode: Literal["rb"], /) -> Iterator[Any]:
        with self.opened() as stream:
            yield stream


class _TrackedHeader(tarfile.TarInfo):
    """Tar header that records the last block parsed as a header, and the bytes of
    invalid blocks before a member.

    tarfile skips these silently; only blocks of zeros are the end of an archive.
    """

    last = b""
    passed = 0

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        cls.last = bytes(buf) or cls.last
        if cls.last.strip(b"\0") and len(buf) == tarfile.BLOCKSIZE:
            cls.passed += tarfile.BLOCKSIZE
        header = super().frombuf(buf, encoding, errors)
        cls.passed -= tarfile.BLOCKSIZE
        return header


def read_tar(item: Input, read_member: ReadMember) -> Iterator[Read]:
    """Read the members of a tar archive in order; after damage it resumes at the next
    valid header.
    """
    name_counts: Counter[str] = Counter()

    class Header(_TrackedHeader):
        """State of this archive only, as other threads may read others."""

    with DecodedStream(item.path, item.compression) as stream:
        error = ""
        try:
            with tarfile.open(
                fileobj=cast(Any, stream), mode="r|", tarinfo=Header, ignore_zeros=True
            ) as archive:
                for member in archive:
                    if Header.passed:
                        yield Rejected(
                            name_counts.total() + 1,
                            f"the tar archive is damaged: the {Header.passed:,} bytes "
                            f"before offset {member.offset:,} are passed over",
                        )
                        Header.passed = 0
                    opened = partial(archive.extractfile, member)
                    yield from _member_records(
                        item,
                        read_member,
                        name_counts,
                        _Member(member.name, member.isfile(), member.size, opened),
                    )
                    # otherwise it keeps the headers of all members
                    cast(Any, archive).members.clear()
        except (tarfile.TarError, ValueError, OverflowError) as damage:
            error = f"the tar archive is damaged: {one_line(damage)}"
        while stream.read(READ_BYTES):  # padding after the end, whose damage counts too
            continue
        if not error and (
            len(Header.last) < tarfile.BLOCKSIZE or Header.last.strip(b"\0")
        ):
            error = "the tar archive is damaged or cut off: it has no end mark"
        if not error and Header.passed:
            error = (
                f"the tar archive is damaged: {Header.passed:,} bytes after its last "
                "member"
            )
        if stream.error is not None or error:
            yield Rejected(
                name_counts.total() + 1, str(stream.error or error), lost=None
            )


def member_licences(item: Input, read_archive: ReadArchive) -> FolderLicences:
    """Licences of the folders of an archive, which is read for these alone."""
    texts: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def note(member: Input) -> None:
        folder, _, name = member.name.rpartition("/")
        if states_licence(name):
            with suppress(CorruptFileError), member.path.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
                if len(content) <= MAX_BYTES:
                    texts[folder][name] = content.decode("utf-8", "replace")

    for _ in read_archive(item, note):
        pass
    return FolderLicences(item.name, texts.__getitem__)


def read_zip(item: Input, read_member: ReadMember) -> Iterator[Read]:
    """Read the members of a zip archive in the order of its directory."""
    name_counts: Counter[str] = Counter()
    with item.path.open("rb") as stream:
        try:
            with _damage_of("the zip archive is damaged or cut off"):
                archive = zipfile.ZipFile(stream)
        except CorruptFileError as error:
            yield Rejected(1, str(error), lost=None)
            return
        with archive:
            for member in archive.infolist():
                opened = partial(_ZipMember, archive, member)
                yield from _member_records(
                    item,
                    read_member,
                    name_counts,
                    _Member(
                        member.filename, not member.is_dir(), member.file_size, opened
                    ),
                )


class _ZipMember:
    """Content of a member; any error of it is a CorruptFileError."""

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        with _damage_of("the member cannot be read"):
            self._stream = archive.open(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def read(self, size: int) -> bytes:
        with _damage_of("the member is damaged"):
            content: bytes = self._stream.read(size)
        return content


@contextmanager
def _damage_of(problem: str) -> Iterator[None]:
    """Raise CorruptFileError for errors of the archive, but not of the storage: errors
    of a damaged archive have no errno, or EINVAL from a seek before the start.
    """
    try:
        yield
    except (zipfile.BadZipFile, OSError, *_MALFORMED_ERRORS) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise CorruptFileError(f"{problem}: {one_line(error)}") from error


def _member_records(
    item: Input,
    read_member: ReadMember,
    name_counts: Counter[str],
    member: _Member,
) -> Iterator[Read]:
    name = str(PurePosixPath(member.name))
    if not member.is_file:
        yield Skipped("folder or link in an archive")
        return
    if any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
        yield Skipped("hidden member of an archive")
        return
    if not member.size:
        yield Skipped("empty member of an archive")
        return
    name_counts[name] += 1
    # tar appends a newer version under the same name
    copy = "" if name_counts[name] == 1 else f";{name_counts[name]}"
    meter = Metered(member)
    records = read_member(Input(f"{item.name}{copy}/{name}", meter))
    if records is None:
        extension = PurePosixPath(name).suffix.lower() or "(none)"
        yield Skipped(
            f"member of an archive with extension {extension}", candidate=True
        )
        return
    labelled_records = (
        replace(record, part=name)
        if isinstance(record, Page | Rejected | Dropped)
        else record
        for record in records
    )
    yield from with_end(labelled_records, member.size, meter, name)
