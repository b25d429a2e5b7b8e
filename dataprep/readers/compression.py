"""Decompressed streams that report damage with its offset and resume at the next sound
member.

`zstandard`'s stream reader ends silently at the end of a truncated file, and `gzip`
loses its buffer. Here, records before the damage are kept and the damage is counted.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from gristmill.dataprep.readers.charsets import utf8_parts

FEED_BYTES = 4096
"""Compressed bytes per step. The output of a failing step is lost, so steps are
small.
"""
ZSTD_BYTES = 512
"""Compressed bytes per step of zstd, whose decoder has no output limit: a block of 4
bytes may expand to 128 KiB, so a step to 16 MiB.
"""
GZIP_BYTES = 2 * FEED_BYTES
"""Compressed bytes per step of ISA-L, which expand to at most 8.5 MB; a multiple of
zlib's steps.
"""
READ_BYTES = 1 << 20
MAX_RECORD_BYTES = 256 << 20
"""Longest record; longer ones are quarantined, so that no input can fill the memory."""


class CorruptFileError(ValueError):
    """A compressed file is damaged or truncated."""


@dataclass(frozen=True)
class Damage:
    """Stored bytes that cannot be decoded.

    Attributes:
        error: description.
        offset: of the damaged member in the file.
        size: bytes up to the next sound member; None if there is none.
        decoded: bytes decoded from the damaged member.
    """

    error: str
    offset: int
    size: int | None = None
    decoded: int = 0

    def __str__(self) -> str:
        if self.size is None:
            return self.error
        return (
            f"{self.error}; the {self.size:,} bytes at offset {self.offset:,} are "
            "passed over"
        )

    def lost(self, records: int) -> int | None:
        """Estimate the records lost with it, besides one; None if the file ends with
        it.

        The rate is that of the records before it.

        Args:
            records: number of records read before it.
        """
        if self.size is None:
            return None
        return (
            max(round(records * self.size / self.offset) - 1, 0) if self.offset else 0
        )


class RecordTooLongError(ValueError):
    """A record is longer than MAX_RECORD_BYTES."""


def one_line(error: BaseException) -> str:
    """Message of an error without line breaks; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class ByteStream(Protocol):
    """A binary stream that can be read in pieces."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; empty at the end."""
        ...


class Unended(bytes):
    """A file's last line without a line end: the file may have been truncated in it."""


class Openable(Protocol):
    """A path, local or remote, or a member of an archive."""

    def open(self, mode: Literal["rb"], /) -> AbstractContextManager[Any]:
        """Open the stored bytes as a ByteStream."""
        ...


def _zstd_decoder() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


# zlib.decompressobj: 15 bits of window, +16 for the gzip wrapper
_GZIP_WINDOW_BITS = 31
HEADER_BYTES = 4
_GZIP_HEADERS = (b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x08")
"""First bytes of members with an empty header, and with a name only (RFC 1952, section
2.3).
"""
DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(_GZIP_WINDOW_BITS),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": _zstd_decoder,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=MAX_RECORD_BYTES),
}
"""Constructors of the decoders of one member, by file extension."""
_MAGICS = {
    ".gz": b"\x1f\x8b\x08",
    ".bz2": b"BZh",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".xz": b"\xfd7zXZ\x00",
}
"""First bytes of a member, stream or frame (RFC 1952, RFC 8878; bzip2 and xz have no
RFC).
"""
_KEPT_BYTES = 16 << 20
"""Bytes of the current member in which the next one is searched after damage: a decoder
may have read past its start.
"""


_SHORT_EXTENSIONS = {
    ".tgz": (".tar", ".gz"),
    ".tbz2": (".tar", ".bz2"),
    ".tzst": (".tar", ".zst"),
    ".txz": (".tar", ".xz"),
}


def split_compression(name: str) -> tuple[str, str]:
    """Split a file name's extensions: `a.jsonl.gz` is (`.jsonl`, `.gz`), `a.txt` is
    (`.txt`, ``); lower case.
    """
    path = PurePosixPath(name.lower())
    if path.suffix in _SHORT_EXTENSIONS:
        return _SHORT_EXTENSIONS[path.suffix]
    if path.suffix in DECODERS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def read_chunks(path: Openable, compression: str) -> Generator[bytes]:
    """Yield a file's decoded content in non-empty pieces; members and frames are
    concatenated.

    Args:
        path: the file.
        compression: one of DECODERS, or empty.

    Raises:
        CorruptFileError: at the first damage, after everything decoded before it.
        OSError: the file cannot be opened or read.
    """
    for part in read_parts(path, compression):
        if isinstance(part, Damage):
            raise CorruptFileError(part.error)
        yield part


def read_parts(path: Openable, compression: str) -> Generator[bytes | Damage]:
    """Yield a file's decoded content like `read_chunks`, and resume at the next sound
    member after a Damage.

    Raises:
        OSError: the file cannot be opened or read.
    """
    offset = decoded = 0
    """Member to begin with, and its bytes that were yielded before."""
    is_gzip = compression == ".gz" and getattr(path, "reopens", True)
    new_decoder = _isal_decoders() if is_gzip else None
    if new_decoder is not None:
        # ISA-L takes less than half of zlib's time. It reports damage with less detail
        # and some bytes later, so the step before the damage is left to zlib, too.
        held = b""
        with path.open("rb") as stream:
            stored = _StoredBytes(stream, GZIP_BYTES, 0)
            for part in _decode_members(stored, compression, new_decoder):
                if isinstance(part, Damage):
                    break
                if held:
                    yield held
                held = part
            else:
                if held:
                    yield held
                return
        offset = part.offset
        if part.decoded:
            decoded = part.decoded - len(held)
        elif held:  # of the member before
            yield held
    with path.open("rb") as stream:
        if not compression:
            yield from iter(partial(stream.read, READ_BYTES), b"")
            return
        skip = decoded
        for part in _decode(stream, compression, offset):
            if isinstance(part, Damage):
                if part.offset == offset:
                    part = replace(part, decoded=max(part.decoded, decoded))
                yield part
                skip = 0
                continue
            if skip < len(part):
                yield part[skip:]
            skip = max(skip - len(part), 0)


def _isal_decoders() -> Callable[[bytes], Any] | None:
    """Constructor of ISA-L's decoders from the start of a gzip member; None if ISA-L is
    not installed.

    ISA-L ignores header fields that zlib rejects, so only headers that are empty or
    have just a name are accepted. It may accept codes that zlib rejects; then more data
    precedes the damage, or all of it if the member's checksum matches.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return None

    def new_decoder(start: bytes) -> Any:
        if not start.startswith(_GZIP_HEADERS):
            raise CorruptFileError("the header has fields that ISA-L does not check")
        return isal_zlib.decompressobj(_GZIP_WINDOW_BITS)

    return new_decoder


class _StoredBytes:
    """A file's stored bytes in steps; those since the start of the current member are
    kept.

    Args:
        stream: the file, at its start.
        step: bytes per step; every step but the first ends at a multiple of it.
        begin: offset of the first byte to return.
    """

    def __init__(self, stream: ByteStream, step: int, begin: int) -> None:
        self._stream = stream
        self._step = step
        self._waiting = b""
        self._kept = deque[bytes](maxlen=max(_KEPT_BYTES // step, 2))
        self.end = 0
        """Offset after the bytes read."""
        self.member = begin
        """Offset of the current member."""
        while self.end + step <= begin and (passed := stream.read(step)):
            self.end += len(passed)
        self._passed = begin - self.end

    def read(self) -> bytes:
        """Read the next step; empty at the end."""
        size = self._step - self.end % self._step
        data = self._waiting[:size] or self._stream.read(size)
        self._waiting = self._waiting[size:]
        self.end += len(data)
        self._kept.append(data)
        data = data[self._passed :]
        self._passed = 0
        return data

    def begin(self, remaining: int) -> None:
        """Start a member, `remaining` bytes before the end of the bytes read."""
        self.member = self.end - remaining
        for _ in range(len(self._kept) - 2):  # its start is in one of the last two
            self._kept.popleft()

    def pass_to_next(self, compression: str) -> bool:
        """Skip to the next sound member after the start of the current one; False if
        there is none.
        """
        magic = _MAGICS[compression]
        # data may contain a magic number by chance, so some bytes after it must decode
        probe_bytes = _step_bytes(compression)
        window = b"".join(self._kept) + self._waiting
        first = self.end + len(self._waiting) - len(window)
        position = max(self.member + 1 - first, 0)
        peeked = len(self._waiting)
        at_end = False
        while True:
            position = window.find(magic, position)
            if position >= 0 and (at_end or len(window) - position >= probe_bytes):
                probe = window[position : position + probe_bytes]
                try:
                    DECODERS[compression]().decompress(
                        probe, *_most_decoded(compression)
                    )
                except Exception:  # noqa: BLE001 - zlib.error, OSError, LZMAError or ZstdError, depending on the library
                    position += 1
                    continue
                self.end = first + position
                self._waiting = window[position:]
                self._kept.clear()
                return True
            if at_end:
                if isinstance(self._stream, Metered):
                    self._stream.read_bytes -= peeked
                return False
            chunk = self._stream.read(READ_BYTES)
            at_end = not chunk
            peeked = peeked + len(chunk)
            skipped = (
                position if position >= 0 else max(len(window) - len(magic) + 1, 0)
            )
            window = window[skipped:] + chunk
            first = first + skipped
            position = max(self.member + 1 - first, 0)


def _step_bytes(compression: str) -> int:
    return ZSTD_BYTES if compression == ".zst" else FEED_BYTES


def _most_decoded(compression: str) -> tuple[int, ...]:
    """Most bytes decoded at once, for decoders that have such a limit. gzip expands by
    a factor of at most 1,032; a few bytes of bz2 and xz may expand to any size.
    """
    return (READ_BYTES,) if compression in (".bz2", ".xz") else ()


def _decode(
    stream: ByteStream, compression: str, begin: int
) -> Iterator[bytes | Damage]:
    stored = _StoredBytes(stream, _step_bytes(compression), begin)
    is_complete = False
    while not is_complete:
        is_complete = True
        for part in _decode_members(
            stored, compression, lambda _: DECODERS[compression]()
        ):
            if isinstance(part, Damage):
                is_complete = not stored.pass_to_next(compression)
                size = None if is_complete else stored.end - part.offset
                part = replace(part, size=size)
            yield part


def _decode_members(
    stored: _StoredBytes, compression: str, new_decoder: Callable[[bytes], Any]
) -> Iterator[bytes | Damage]:
    """Yield the content of members up to the end of the file, or to the first damage.

    Args:
        new_decoder: constructor from the start of a member.
    """
    most_decoded = _most_decoded(compression)
    decoder: Any = None
    decoded = 0
    while data := stored.read():
        while data:
            if decoder is None:
                # zero padding may follow a gzip member
                data = data.lstrip(b"\0") if compression == ".gz" else data
                if not data:
                    break
                if len(data) < HEADER_BYTES:
                    data += stored.read()
                stored.begin(len(data))
                decoded = 0
            is_complete = False
            while not is_complete:
                try:
                    decoder = decoder or new_decoder(data)
                    piece = decoder.decompress(data, *most_decoded)
                except Exception as error:  # noqa: BLE001 - each library has its own errors
                    message = f"{compression} data is damaged: {error}"
                    yield Damage(message, stored.member, None, decoded)
                    return
                decoded += len(piece)
                if piece:
                    yield piece
                is_complete = not most_decoded or decoder.eof or decoder.needs_input
                data = b""
            if not decoder.eof:
                break
            data = decoder.unused_data
            decoder = None
    if decoder is not None:
        message = f"{compression} data ends in the middle: the file is cut off"
        yield Damage(message, stored.member, None, decoded)


Line = bytes | RecordTooLongError | Damage
"""A line without its end, or what is in its place."""


def split_lines(parts: Iterable[bytes | Damage]) -> Iterator[Line]:
    r"""Split the pieces of a file's text into lines at `\n`.

    A line that is too long is replaced by its error, lines that cannot be decoded by a
    Damage, which also cuts the line before it. A last line without an end is an
    `Unended`.
    """
    begin = bytearray()
    is_too_long = False
    for part in parts:
        if isinstance(part, Damage):
            yield part
            begin.clear()
            is_too_long = False
            continue
        *lines, rest = part.split(b"\n")
        if lines:
            lines[0] = bytes(begin) + lines[0]
            begin.clear()
        for line in lines:
            if is_too_long or len(line) > MAX_RECORD_BYTES:
                yield _too_long("line")
                is_too_long = False
            else:
                yield line.removesuffix(b"\r")
        is_too_long = is_too_long or len(begin) + len(rest) > MAX_RECORD_BYTES
        if is_too_long:
            begin.clear()
        else:
            begin += rest
    if is_too_long:
        yield _too_long("line")
    elif begin:
        yield Unended(begin)


def read_lines(
    path: Openable, compression: str
) -> Iterator[bytes | RecordTooLongError]:
    """Yield a file's lines; see `split_lines`. Files with a byte order mark of another
    encoding are transcoded to UTF-8.

    Raises:
        CorruptFileError: at the first damage, after the complete lines before it.
    """
    return until_damage(split_lines(utf8_parts(read_parts(path, compression))))


def until_damage(lines: Iterable[Line]) -> Iterator[bytes | RecordTooLongError]:
    """Yield lines.

    Raises:
        CorruptFileError: at the first damage.
    """
    for line in lines:
        if isinstance(line, Damage):
            raise CorruptFileError(line.error)
        yield line


def read_whole(path: Openable, compression: str) -> bytes:
    """Read a file that is a single record.

    Raises:
        CorruptFileError: the file is damaged.
        RecordTooLongError: it is longer than MAX_RECORD_BYTES.
    """
    content = bytearray()
    for chunk in read_chunks(path, compression):
        content += chunk
        if len(content) > MAX_RECORD_BYTES:
            raise _too_long("file")
    return bytes(content)


def _too_long(unit: str) -> RecordTooLongError:
    return RecordTooLongError(
        f"the {unit} is longer than {MAX_RECORD_BYTES >> 20} "
        "MiB; split it before ingesting"
    )


class Metered:
    """A path, or a member of an archive, that counts the bytes read.

    Attributes:
        path: the underlying file.
        read_bytes: stored bytes read since it was last opened.
        reopens: True if it may be opened more than once.
    """

    def __init__(self, path: Openable) -> None:
        self.path = path
        self.read_bytes = 0
        self.reopens: bool = getattr(path, "reopens", True)

    @contextmanager
    def open(self, mode: Literal["rb"], /) -> Iterator[ByteStream]:
        """Open the stored bytes and count the bytes read."""
        self.read_bytes = 0
        with self.path.open(mode) as stream:
            self._stream = stream
            yield self

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes of the open file."""
        content: bytes = self._stream.read(size)
        self.read_bytes += len(content)
        return content


class DecodedStream:
    """Readable stream of a file's decoded content. Damage ends the stream and is stored
    in `error`.

    A library that reads from it sees an early end, which all of them handle, and never
    a foreign exception. `resume` continues after the damage.
    """

    def __init__(self, path: Openable, compression: str) -> None:
        self.error: Damage | None = None
        self._chunks = read_parts(path, compression)
        self._buffer = b""
        self._start = self._position = 0

    def __enter__(self) -> DecodedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._chunks.close()

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes, fewer only at the end."""
        content = self.peek(size)
        self._start += len(content)
        self._position += len(content)
        return content

    def peek(self, size: int) -> bytes:
        """Next `size` bytes, without consuming them; fewer only at the end."""
        ready = len(self._buffer) - self._start
        if ready < size:
            parts = [self._buffer[self._start :]]
            while ready < size and self.error is None:
                try:
                    part = next(self._chunks, b"")
                except CorruptFileError as error:  # of an archive's member
                    part = Damage(str(error), 0, decoded=self._position + ready)
                if isinstance(part, Damage):
                    self.error = part
                elif part:
                    parts.append(part)
                    ready += len(part)
                else:
                    break
            self._buffer = b"".join(parts)
            self._start = 0
        return self._buffer[self._start : self._start + size]

    def push_back(self, content: bytes) -> None:
        """Push the bytes read last back."""
        self._buffer = content + self._buffer[self._start :]
        self._start = 0
        self._position -= len(content)

    def skip_line(self) -> None:
        """Skip the rest of a line: of a row that damage truncated, which may have as
        many fields as a complete one.
        """
        while chunk := self.read(READ_BYTES):
            _, line_end, remaining = chunk.partition(b"\n")
            if line_end:
                self.push_back(remaining)
                return

    def resume(self) -> bool:
        """Continue after the damage that ended the stream; False at the end of the
        file.
        """
        if self.error is None or self.error.size is None:
            return False
        self.error = None
        return True

    def tell(self) -> int:
        """Decoded bytes read so far."""
        return self._position


class RawStream(io.RawIOBase):
    """Decompressed bytes as a raw binary stream; damage is an early end.

    Attributes:
        failure: error of the storage, or None.
    """

    def __init__(self, stream: DecodedStream) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        try:
            content = self._stream.read(min(len(buffer), READ_BYTES))
        except OSError as error:
            self.failure = error
            raise
        buffer[: len(content)] = content
        return len(content)
