"""Streams out of compressed files, which say where they broke, and continue at the next member that is sound.

`zstandard`'s own stream reader ends silently where a file was cut off, and `gzip` loses what it had buffered; both
matter here, since the records before the damage are kept and the damage is counted.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from gristmill.dataprep.reading.encoding import utf8_parts

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


@dataclass(frozen=True)
class Damage:
    """Stored bytes that cannot be decoded.

    Attributes:
        error: why.
        offset: of the damaged member in the file.
        size: bytes up to the next sound member; None where there is none.
        decoded: bytes that came out of the damaged member.
    """

    error: str
    offset: int
    size: int | None = None
    decoded: int = 0

    def __str__(self) -> str:
        if self.size is None:
            return self.error
        return f"{self.error}; the {self.size:,} bytes at offset {self.offset:,} are passed over"

    def lost(self, records: int) -> int | None:
        """Records lost with it, besides one: as many for its bytes as came before; None where the file ends with it.

        Args:
            records: read before it.
        """
        if self.size is None:
            return None
        return max(round(records * self.size / self.offset) - 1, 0) if self.offset else 0


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
_MAGICS = {".gz": b"\x1f\x8b\x08", ".bz2": b"BZh", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00"}
"""First bytes of a member, stream or frame (RFC 1952, RFC 8878; bzip2 and xz have no RFC)."""
_TRIED_BYTES = {".gz": FEED_BYTES, ".bz2": FEED_BYTES, ".zst": ZSTD_BYTES, ".xz": FEED_BYTES}
"""Stored bytes that must decode behind such bytes, which other data may hold by chance."""
_KEPT_BYTES = 16 << 20
"""Of the current member, in which the next one is looked for after damage: a decoder may have read into that."""


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
        CorruptFileError: at the first damage, after everything before it that could be decoded.
        OSError: the file cannot be opened or read.
    """
    for part in read_parts(path, compression):
        if isinstance(part, Damage):
            raise CorruptFileError(part.error)
        yield part


def read_parts(path: Openable, compression: str) -> Generator[bytes | Damage]:
    """Yield a file's decoded content as `read_chunks` does, and continue at the next sound member behind a Damage.

    Raises:
        OSError: the file cannot be opened or read.
    """
    begun = _Begun()
    if compression == ".gz" and getattr(path, "reopens", True):
        try:
            with path.open("rb") as stream:
                yield from filter(None, _decode_gzip(stream, begun))
                return
        except _UncertainError:
            pass  # read the member once more, with care
    done = begun.decoded
    with path.open("rb") as stream:
        for part in _decode_carefully(stream, compression, begun.offset):
            if isinstance(part, Damage):
                yield replace(part, decoded=max(part.decoded, begun.decoded if part.offset == begun.offset else 0))
                done = 0
                continue
            if done < len(part):
                yield part[done:]
            done = max(done - len(part), 0)


def _decode_carefully(stream: ByteStream, compression: str, begin: int) -> Iterator[bytes | Damage]:
    if compression:
        yield from _decode_lz4(stream) if compression == ".lz4" else _decode(stream, compression, begin)
        return
    while chunk := stream.read(READ_BYTES):
        yield chunk


@dataclass
class _Begun:
    """The member that is being decoded: its offset in the file, and how much of it was yielded."""

    offset: int = 0
    decoded: int = 0


class _UncertainError(Exception):
    """A decoder that is fast is not certain of a file."""


def _decode_gzip(stream: ByteStream, begun: _Begun) -> Iterator[bytes]:
    """Members of gzip by ISA-L, in less than half of zlib's time.

    It passes over what zlib refuses in a member's header, so a header is certain only where it has a name or nothing.
    Of damage it knows less, and sees it some bytes later, so the last step before it is left to zlib too. Codes that
    zlib refuses it may use; then more comes before the damage, or all where the checksum of the member is right.

    Raises:
        _UncertainError: there may be damage, or there is no ISA-L; `begun` is the member that it is in.
    """
    try:
        from isal import isal_zlib
    except ImportError as error:
        raise _UncertainError from error
    decoder: Any = None
    ready = b""
    read = 0
    while data := stream.read(GZIP_BYTES):
        read += len(data)
        while data:
            if decoder is None:
                data = data.lstrip(b"\0")
                if not data:
                    break
                begun.offset, begun.decoded = read - len(data), 0
                more = stream.read(GZIP_BYTES) if len(data) < len(_GZIP_HEADERS[0]) else b""
                data, read = data + more, read + len(more)
                if not data.startswith(_GZIP_HEADERS):
                    raise _UncertainError
                decoder = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
            try:
                decoded = decoder.decompress(data)
            except Exception as error:  # IsalError, which its type stubs call no exception
                raise _UncertainError from error
            yield ready
            begun.decoded += len(ready)
            ready = decoded
            if not decoder.eof:
                break
            yield ready
            data, decoder, ready = decoder.unused_data, None, b""
    if decoder is not None:
        raise _UncertainError


class _Stored:
    """A file's stored bytes in steps, of which those since the current member's first are kept.

    Args:
        stream: the file, at its beginning.
        step: bytes at a time; every step but the first ends at a multiple of it.
        begin: offset of the first byte that is wanted.
    """

    def __init__(self, stream: ByteStream, step: int, begin: int) -> None:
        self._stream, self._step = stream, step
        self._waiting = b""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self.end = 0
        """Offset behind what was read."""
        self.member = begin
        """Offset of the current member."""
        while self.end + step <= begin and (passed := stream.read(step)):
            self.end += len(passed)
        self._passed = begin - self.end

    def read(self) -> bytes:
        """The next step; nothing at the end."""
        size = self._step - self.end % self._step
        data = self._waiting[:size] or self._stream.read(size)
        self._waiting = self._waiting[size:]
        self.end += len(data)
        self._keep(data)
        data, self._passed = data[self._passed :], 0
        return data

    def begin(self, left: int) -> None:
        """Begin a member, so many bytes before the end of what was read."""
        self.member = self.end - left
        last = self._kept[-1]
        self._kept.clear()
        self._kept_bytes = 0
        self._keep(last)

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def pass_to_next(self, compression: str) -> bool:
        """Go to the next sound member behind the first byte of the current one; False where there is none."""
        magic, tried = _MAGICS[compression], _TRIED_BYTES[compression]
        window = b"".join(self._kept) + self._waiting
        first = self.end + len(self._waiting) - len(window)
        at, looked_at, is_whole = max(self.member + 1 - first, 0), len(self._waiting), False
        while True:
            at = window.find(magic, at)
            if at >= 0 and (is_whole or len(window) - at >= tried):
                if _decodes(compression, window[at : at + tried]):
                    self.end, self._waiting = first + at, window[at:]
                    self._kept.clear()
                    self._kept_bytes = 0
                    return True
                at += 1
                continue
            if is_whole:
                _take_back(self._stream, looked_at)
                return False
            more = self._stream.read(READ_BYTES)
            is_whole, looked_at = not more, looked_at + len(more)
            passed = at if at >= 0 else max(len(window) - len(magic) + 1, 0)
            window, first = window[passed:] + more, first + passed
            at = max(self.member + 1 - first, 0)


def _take_back(stream: ByteStream, size: int) -> None:
    """Tell whoever counts what is read that so many bytes were only looked at."""
    if isinstance(stream, Metered):
        stream.read_bytes -= size


def _decodes(compression: str, data: bytes) -> bool:
    """Whether a member may begin with these bytes."""
    decoder = _DECODERS[compression]()
    try:
        decoder.decompress(data) if compression == ".zst" else decoder.decompress(data, READ_BYTES)
    except Exception:  # noqa: BLE001 - zlib.error, OSError, LZMAError or ZstdError: each library has its own
        return False
    return True


def _decode(stream: ByteStream, compression: str, begin: int) -> Iterator[bytes | Damage]:
    stored = _Stored(stream, FEED_BYTES if compression != ".zst" else ZSTD_BYTES, begin)
    while (damage := (yield from _decode_members(stored, compression))) is not None:
        if not stored.pass_to_next(compression):
            yield damage
            return
        yield replace(damage, size=stored.end - damage.offset)


def _decode_members(stored: _Stored, compression: str) -> Generator[bytes, None, Damage | None]:
    """Yield what members hold; returns the first damage, or None at the file's end."""
    decoder: _Decoder | None = None
    decoded = 0
    while data := stored.read():
        while data:
            if decoder is None:
                data = data.lstrip(b"\0") if compression == ".gz" else data  # zero padding may follow a gzip member
                if not data:
                    break
                stored.begin(len(data))
                decoder, decoded = _DECODERS[compression](), 0
            try:
                for piece in _steps(decoder, data, compression):
                    decoded += len(piece)
                    if piece:
                        yield piece
            except CorruptFileError as error:
                return Damage(str(error), stored.member, None, decoded)
            if not decoder.eof:
                break
            data, decoder = decoder.unused_data, None
    if decoder is None:
        return None
    return Damage(f"{compression} data ends in the middle: the file is cut off", stored.member, None, decoded)


@dataclass
class _ForArrow:
    """A stream with what Arrow asks of a file."""

    stream: ByteStream
    closed: bool = False

    def read(self, size: int) -> bytes:
        return self.stream.read(size)

    def close(self) -> None:
        self.closed = True


def _decode_lz4(stream: ByteStream) -> Iterator[bytes | Damage]:
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
                yield Damage(f".lz4 data is damaged or ends in the middle: {error}", 0)
                return
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


def read_blocks(path: Openable, compression: str) -> Iterator[bytes | RecordTooLongError | Damage]:
    r"""Yield a file's lines in blocks: whole lines with their ends (`\n`), BLOCK_BYTES together or a little more.

    In place of a line that is too long comes the error, in place of lines that cannot be decoded a Damage, with the
    line that it cuts. A last line without an end is an `Unended` of its own. What a byte order mark says to be in
    another encoding becomes UTF-8.
    """
    yield from blocks_of(utf8_parts(read_parts(path, compression)))


def blocks_of(parts: Iterable[bytes | Damage]) -> Iterator[bytes | RecordTooLongError | Damage]:
    """Cut pieces of text into blocks of lines; see `read_blocks`."""
    whole: list[bytes] = []
    begun: list[bytes] = []
    ready = held = 0
    for chunk in parts:
        if isinstance(chunk, Damage):
            yield from _joined(whole)
            yield chunk
            whole, begun, ready, held = [], [], 0, 0
            continue
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
    r"""Yield a file's lines, cut at `\n`, without their ends; otherwise as `read_blocks` does.

    Raises:
        CorruptFileError: at the first damage, after the whole lines before it.
    """
    return split_blocks(read_blocks(path, compression))


def split_blocks(blocks: Iterable[bytes | RecordTooLongError | Damage]) -> Iterator[bytes | RecordTooLongError]:
    """Yield the lines of blocks one by one, without their ends.

    Raises:
        CorruptFileError: at the first damage.
    """
    for block in blocks:
        if isinstance(block, Damage):
            raise CorruptFileError(block.error)
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
    `resume` goes on behind the damage.
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

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, fewer only at the end; all that is left where it is negative."""
        end = self._start + size
        if size >= 0 and end <= len(self._buffer):
            content = self._buffer[self._start : end]
            self._start, self._position = end, self._position + size
            return content
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

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, which stay unread; fewer only at the end."""
        ready = len(self._buffer) - self._start
        if ready < size:
            parts = [self._buffer[self._start :]]
            while ready < size and (chunk := self._next()):
                parts.append(chunk)
                ready += len(chunk)
            self._buffer, self._start = b"".join(parts), 0
        return self._buffer[self._start : self._start + size]

    def push_back(self, content: bytes) -> None:
        """Put back what was read last."""
        self._buffer, self._start = content + self._buffer[self._start :], 0
        self._position -= len(content)

    def resume(self) -> bool:
        """Go on behind the damage that ended the stream; False where the file has no more."""
        if self.error is None or self.error.size is None:
            return False
        self.error = None
        return True

    def tell(self) -> int:
        """Decoded bytes that were read."""
        return self._position

    def _fill(self) -> bool:
        self._buffer, self._start = self._next(), 0
        return bool(self._buffer)

    def _next(self) -> bytes:
        """The next part, none of them empty; nothing at the end and at damage."""
        if self.error is not None:
            return b""
        part = next(self._chunks, b"")
        if not isinstance(part, Damage):
            return part
        self.error = part
        return b""
