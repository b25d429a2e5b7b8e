"""Streams out of compressed files, which say where they broke instead of ending early.

`zstandard`'s own stream reader ends silently where a file was cut off, and `gzip` loses what it had buffered; both
matter here, since the records before the damage are kept and the damage is counted.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

FEED_BYTES = 4096
"""Compressed bytes per step: what a step decoded before it failed is lost, so steps are small."""
ZSTD_BYTES = 512
"""The same of zstd, whose decoder cannot be told to stop: a block of 4 bytes may hold 128 KiB, so a step 16 MiB."""
GZIP_BYTES = 2 * FEED_BYTES
"""Compressed bytes per step of ISA-L, which expand to 8.5 MB at most: whole steps of zlib's."""
LZ4_BYTES = 256
"""Decoded bytes per step of LZ4."""
READ_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
"""Of lines that are handed on together."""
MAX_RECORD_BYTES = 256 << 20
"""Longest record that is read; a longer one is quarantined, so that no input can fill the memory."""


class CorruptFileError(ValueError):
    """A compressed file is damaged or cut off."""


class RecordTooLongError(ValueError):
    """A record is longer than MAX_RECORD_BYTES."""


class ByteStream(Protocol):
    """What can be read piece by piece."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


class Unended(bytes):
    """A file's last line, where no line end follows: the file may have been cut off in it."""


class Openable(Protocol):
    """A path, local or remote, or a member of an archive."""

    def open(self, mode: Literal["rb"], /) -> AbstractContextManager[Any]:
        """The stored bytes, as a ByteStream."""
        ...


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


def _zstd_decoder() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _xz_decoder() -> Any:
    return lzma.LZMADecompressor(memlimit=MAX_RECORD_BYTES)


_GZIP_WINDOW_BITS = 31  # zlib.decompressobj: 15 bits of window, +16 for the gzip wrapper
_GZIP_HEADERS = (b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x08")
"""The first bytes of members without anything in their header, and with a name alone (RFC 1952, section 2.3)."""
_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(_GZIP_WINDOW_BITS),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": _zstd_decoder,
    ".xz": _xz_decoder,
}
COMPRESSIONS = (*_DECODERS, ".lz4")


_SHORT = {".tgz": (".tar", ".gz"), ".tbz2": (".tar", ".bz2"), ".tzst": (".tar", ".zst"), ".txz": (".tar", ".xz")}


def split_compression(name: str) -> tuple[str, str]:
    """Split a file name's extensions: `a.jsonl.gz` is (`.jsonl`, `.gz`), `a.txt` is (`.txt`, ``); lower case."""
    path = PurePosixPath(name.lower())
    if path.suffix in _SHORT:
        return _SHORT[path.suffix]
    if path.suffix in COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def read_chunks(path: Openable, compression: str) -> Generator[bytes]:
    """Yield a file's decoded content in pieces, none of them empty; concatenated members and frames are one content.

    Args:
        path: what to open.
        compression: one of COMPRESSIONS, or empty.

    Raises:
        CorruptFileError: after everything that could be decoded has been yielded.
        OSError: the file cannot be opened or read.
    """
    done = 0
    if compression == ".gz" and getattr(path, "reopens", True):
        try:
            with path.open("rb") as stream:
                for chunk in filter(None, _decode_gzip(stream)):
                    yield chunk
                    done += len(chunk)
                return
        except _UncertainError:
            pass  # read it once more, with care, from where it was left
    with path.open("rb") as stream:
        for chunk in _decode_carefully(stream, compression):
            if done < len(chunk):
                yield chunk[done:]
            done = max(done - len(chunk), 0)


def _decode_carefully(stream: ByteStream, compression: str) -> Iterator[bytes]:
    if compression:
        yield from _decode_lz4(stream) if compression == ".lz4" else _decode(stream, compression)
        return
    while chunk := stream.read(READ_BYTES):
        yield chunk


class _UncertainError(Exception):
    """A decoder that is fast is not certain of a file."""


def _decode_gzip(stream: ByteStream) -> Iterator[bytes]:
    """Members of gzip by ISA-L, in less than half of zlib's time.

    It passes over what zlib refuses in a member's header, so a header is certain only where it has a name or nothing.
    Of damage it knows less, and sees it some bytes later, so the last step before it is left to zlib too. Codes that
    zlib refuses it may use; then more comes before the damage, or all where the checksum of the member is right.

    Raises:
        _UncertainError: there may be damage, or there is no ISA-L.
    """
    try:
        from isal import isal_zlib
    except ImportError as error:
        raise _UncertainError from error
    decoder: Any = None
    ready = b""
    while data := stream.read(GZIP_BYTES):
        while data:
            if decoder is None:
                data = data.lstrip(b"\0")
                if not data:
                    break
                data += stream.read(GZIP_BYTES) if len(data) < len(_GZIP_HEADERS[0]) else b""
                if not data.startswith(_GZIP_HEADERS):
                    raise _UncertainError
                decoder = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
            try:
                decoded = decoder.decompress(data)
            except Exception as error:  # IsalError, which its type stubs call no exception
                raise _UncertainError from error
            yield ready
            ready = decoded
            if not decoder.eof:
                break
            data, decoder = decoder.unused_data, None
    if decoder is not None:
        raise _UncertainError
    yield ready


def _decode(stream: ByteStream, compression: str) -> Iterator[bytes]:
    decoder: _Decoder | None = None
    while data := stream.read(FEED_BYTES if compression != ".zst" else ZSTD_BYTES):
        while data:
            if decoder is None:
                data = data.lstrip(b"\0") if compression == ".gz" else data  # zero padding may follow a gzip member
                if not data:
                    break
                decoder = _DECODERS[compression]()
            yield from _steps(decoder, data, compression)
            if not decoder.eof:
                break
            data, decoder = decoder.unused_data, None
    if decoder is not None:
        raise CorruptFileError(f"{compression} data ends in the middle: the file is cut off")


@dataclass
class _ForArrow:
    """A stream with what Arrow asks of a file."""

    stream: ByteStream
    closed: bool = False

    def read(self, size: int) -> bytes:
        return self.stream.read(size)

    def close(self) -> None:
        self.closed = True


def _decode_lz4(stream: ByteStream) -> Iterator[bytes]:
    """LZ4 frames, by Arrow's codec: Python has none of its own. Of damaged data, less than LZ4_BYTES are lost."""
    import pyarrow as pa

    piece = bytearray()
    with pa.CompressedInputStream(pa.PythonFile(_ForArrow(stream), mode="r"), "lz4") as source:
        while True:
            try:
                decoded = source.read(LZ4_BYTES)
            except OSError as error:
                if error.errno is not None:  # the storage failed; without an errno it is Arrow that cannot decode
                    raise
                yield bytes(piece)
                raise CorruptFileError(f".lz4 data is damaged or ends in the middle: {error}") from error
            piece += decoded
            if len(piece) >= FEED_BYTES or not decoded:
                yield bytes(piece)
                piece.clear()
            if not decoded:
                return


def _steps(decoder: _Decoder, data: bytes, compression: str) -> Iterator[bytes]:
    """What the decoder makes of some compressed bytes, at most READ_BYTES at once where it can stop there.

    gzip expands to at most 1,032 times its bytes; of bz2 and xz a few stand for any number.
    """
    stops = isinstance(decoder, bz2.BZ2Decompressor | lzma.LZMADecompressor)
    while True:
        try:
            decoded = decoder.decompress(data, READ_BYTES) if stops else decoder.decompress(data)
        except Exception as error:  # zlib.error, OSError or ZstdError: each library has its own
            raise CorruptFileError(f"{compression} data is damaged: {error}") from error
        yield decoded
        if not stops or decoder.eof or decoder.needs_input:
            return
        data = b""


def read_blocks(path: Openable, compression: str) -> Iterator[bytes | RecordTooLongError]:
    r"""Yield a file's lines in blocks: whole lines with their ends (`\n`), BLOCK_BYTES together or a little more.

    In place of a line that is too long comes the error. A last line without an end is an `Unended` of its own.

    Raises:
        CorruptFileError: after all whole lines before the damage; a line that the damage cut is not among them.
    """
    yield from blocks_of(read_chunks(path, compression))


def blocks_of(chunks: Iterable[bytes]) -> Iterator[bytes | RecordTooLongError]:
    """Cut pieces of text into blocks of lines; see `read_blocks`."""
    whole: list[bytes] = []
    begun: list[bytes] = []
    ready = held = 0
    try:
        for chunk in chunks:
            for piece in _at_most(chunk, min(BLOCK_BYTES, MAX_RECORD_BYTES)):
                first, last = piece.find(b"\n"), piece.rfind(b"\n") + 1
                if first >= 0 and held + first > MAX_RECORD_BYTES:
                    yield from _joined(whole)
                    yield _too_long("line")
                    whole, begun, ready, held = [piece[first + 1 : last]], [], last - first - 1, 0
                elif last:
                    whole += [*begun, piece[:last]]
                    ready, begun, held = ready + held + last, [], 0
                if ready >= BLOCK_BYTES:
                    yield from _joined(whole)
                    whole, ready = [], 0
                held += len(piece) - last
                begun.append(piece[last:])
                if held > MAX_RECORD_BYTES:
                    begun = []
    except CorruptFileError:
        yield from _joined(whole)
        raise
    yield from _joined(whole)
    if held > MAX_RECORD_BYTES:
        yield _too_long("line")
    elif held:
        yield Unended(b"".join(begun))


def _at_most(chunk: bytes, size: int) -> Iterator[bytes]:
    """A chunk in pieces of at most this size."""
    return (chunk[begin : begin + size] for begin in range(0, len(chunk), size))


def _joined(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The parts as one, where there is anything in them."""
    content = b"".join(parts)
    if content:
        yield content


def read_lines(path: Openable, compression: str) -> Iterator[bytes | RecordTooLongError]:
    r"""Yield a file's lines, cut at `\n`, without their ends; otherwise as `read_blocks` does."""
    return split_blocks(read_blocks(path, compression))


def split_blocks(blocks: Iterable[bytes | RecordTooLongError]) -> Iterator[bytes | RecordTooLongError]:
    """Yield the lines of blocks one by one, without their ends."""
    for block in blocks:
        if isinstance(block, RecordTooLongError | Unended):
            yield block
        else:
            yield from lines_of(block)


def lines_of(block: bytes) -> Iterator[bytes]:
    """The lines of a block without their ends."""
    return (line.removesuffix(b"\r") for line in block[:-1].split(b"\n"))


def read_whole(path: Openable, compression: str) -> bytes:
    """Read a whole file that is one record.

    Raises:
        CorruptFileError: the file is damaged; nothing of it is returned.
        RecordTooLongError: it is longer than MAX_RECORD_BYTES.
    """
    content = bytearray()
    for chunk in read_chunks(path, compression):
        content += chunk
        if len(content) > MAX_RECORD_BYTES:
            raise _too_long("file")
    return bytes(content)


def _too_long(what: str) -> RecordTooLongError:
    return RecordTooLongError(f"the {what} is longer than {MAX_RECORD_BYTES >> 20} MiB; split it before ingesting")


class Metered:
    """A path, or a member of an archive, that knows how much of it was read.

    Attributes:
        path: what is opened.
        read_bytes: stored bytes that were read since it was opened last.
        reopens: whether it may be opened more than once.
    """

    def __init__(self, path: Openable) -> None:
        self.path = path
        self.read_bytes = 0
        self.reopens: bool = getattr(path, "reopens", True)

    @contextmanager
    def open(self, mode: Literal["rb"], /) -> Iterator[ByteStream]:
        """The stored bytes, whose reading is counted."""
        self.read_bytes = 0
        with self.path.open(mode) as stream:
            self._stream = stream
            yield self

    def read(self, size: int, /) -> bytes:
        """At most so many bytes of what is open."""
        content: bytes = self._stream.read(size)
        self.read_bytes += len(content)
        return content


class DecodedStream:
    """A file's decoded content for whoever wants to `read` it. Damage ends the stream; `error` says what it was.

    So a library that reads from it meets an early end, which all of them can bear, and never a foreign exception.
    """

    def __init__(self, path: Openable, compression: str) -> None:
        self.error: CorruptFileError | None = None
        self._chunks = read_chunks(path, compression)
        self._buffer = b""
        self._start = self._position = 0

    def __enter__(self) -> DecodedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._chunks.close()

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, fewer only at the end; all that is left where it is negative."""
        parts: list[bytes] = []
        wanted = size if size >= 0 else float("inf")
        while wanted > 0:
            if self._start == len(self._buffer) and not self._fill():
                break
            part = self._buffer[self._start : self._start + int(min(wanted, len(self._buffer) - self._start))]
            parts.append(part)
            self._start += len(part)
            wanted -= len(part)
        content = b"".join(parts)
        self._position += len(content)
        return content

    def readline(self, size: int) -> bytes:
        """A line with its end, or its first `size` bytes; nothing at the end."""
        parts: list[bytes] = []
        wanted = size
        while wanted > 0 and (self._start < len(self._buffer) or self._fill()):
            end = self._buffer.find(b"\n", self._start, self._start + wanted) + 1
            part = self._buffer[self._start : end or self._start + wanted]
            parts.append(part)
            self._start += len(part)
            wanted = 0 if end else wanted - len(part)
        line = b"".join(parts)
        self._position += len(line)
        return line

    def push_back(self, content: bytes) -> None:
        """Put back what was read last."""
        self._buffer, self._start = content + self._buffer[self._start :], 0
        self._position -= len(content)

    def tell(self) -> int:
        """Decoded bytes that were read."""
        return self._position

    def _fill(self) -> bool:
        try:
            self._buffer, self._start = next(self._chunks, b""), 0
        except CorruptFileError as error:
            self.error, self._buffer, self._start = error, b"", 0
        return bool(self._buffer)
