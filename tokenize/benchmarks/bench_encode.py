"""`gristmill bench tokenize`: encoding documents against `tokenizers` (and tiktoken) with the same merges, one core.

Text: prose, code and many languages from the folder of public test data (`GRISTMILL_BENCH_DATA`, or `../shared/data`
beside the repository); code is this Python's standard library everywhere. Warm: the encoder has seen as much other
text of the kind. Cold: it has seen nothing.
"""

from __future__ import annotations

import io
import json
import os
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.dataprep.benchmarks.public_data import data_folder
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.merges import byte_characters
from gristmill.tokenize.encoding.sample import Sample
from gristmill.tokenize.encoding.vocabulary import train

VOCAB_SIZE = 32_000
DOCUMENT_CHARACTERS = 8000
TEXT_BYTES = 20_000_000
LIBRARY_BYTES = 2_000_000
"""The library gets the first documents only; rates are per byte."""
BATCH_DOCUMENTS = 128
REPEATS = 3
MEGA = 1e6


def rows() -> Iterator[dict[str, Any]]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        english, code, multilingual = _books(), _code(), _languages()
        yield from _measure("english", english, cold=True)
        yield from _measure("code", code)
        yield from _measure("multilingual", multilingual)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _measure(name: str, texts: Sequence[str], cold: bool = False) -> Iterator[dict[str, Any]]:
    if not texts:
        yield _missing(f"encode_{name}_vs_tokenizers", "the public test data is not here")
        return
    tokenizer = train(Sample({name: texts[::7]}, {}), VOCAB_SIZE)
    tokenizer.encode_special_tokens = True
    encoder = FastEncoder.for_tokenizer(tokenizer)
    half = len(texts) // 2
    batches = [pa.array(texts[at : at + BATCH_DOCUMENTS], pa.large_string())
               for at in range(half, len(texts), BATCH_DOCUMENTS)]
    size = _bytes(texts[half:])
    some = _first(texts[half:], LIBRARY_BYTES)
    library = _rate(_bytes(some), lambda: tokenizer.encode_batch_fast(some, add_special_tokens=False), REPEATS)
    if cold:
        fresh = FastEncoder.for_tokenizer(tokenizer)
        yield _row(f"encode_{name}_cold_vs_tokenizers", _rate(size, lambda: [*map(fresh.encode, batches)], 1), library)
    for at in range(0, half, BATCH_DOCUMENTS):
        encoder.encode(pa.array(texts[at : min(at + BATCH_DOCUMENTS, half)], pa.large_string()))
    ours = _rate(size, lambda: [*map(encoder.encode, batches)], 1)
    yield _row(f"encode_{name}_vs_tokenizers", ours, library)
    if cold:
        yield _against_tiktoken(name, tokenizer, some, ours)


def _against_tiktoken(name: str, tokenizer: Any, texts: Sequence[str], ours: float) -> dict[str, Any]:
    try:
        import tiktoken
    except ImportError:
        return _missing(f"encode_{name}_vs_tiktoken", "tiktoken is not installed")
    spelt = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {bytes(spelt[character] for character in token): number
             for token, number in tokenizer.get_vocab(with_added_tokens=False).items()
             if all(character in spelt for character in token) and not token.startswith("<|")}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    peer = _rate(_bytes(texts), lambda: [encoding.encode_ordinary(text) for text in texts], REPEATS)
    return _row(f"encode_{name}_vs_tiktoken", ours, peer)


def _books() -> list[str]:
    folder = _data()
    if folder is None:
        return _pieces([path.read_text(encoding="utf-8", errors="ignore") for path in _modules()])
    import zstandard

    with (folder / "text" / "books.jsonl.zst").open("rb") as stream:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stream), encoding="utf-8")
        return _pieces([json.loads(line)["text"] for line in lines])


def _code() -> list[str]:
    return _pieces([path.read_text(encoding="utf-8", errors="ignore") for path in _modules()])


def _languages() -> list[str]:
    folder = _data()
    if folder is None:
        return []
    with zipfile.ZipFile(folder / "langid" / "udhr2.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        texts = [archive.read(name).decode("utf-8", "ignore") for name in names]
    # Every language is in both halves of what is measured.
    return [text[: len(text) // 2] for text in texts] + [text[len(text) // 2 :] for text in texts]


def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))


def _data() -> Path | None:
    return folder if (folder := data_folder()).exists() else None


def _pieces(texts: Sequence[str]) -> list[str]:
    """Documents of a few kilobytes, in an order that mixes the texts; TEXT_BYTES of them."""
    pieces = [text[at : at + DOCUMENT_CHARACTERS] for text in texts for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    return _first([piece for start in range(7) for piece in pieces[start::7]], 2 * TEXT_BYTES)


def _first(texts: Sequence[str], most_bytes: int) -> list[str]:
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text.encode())
        if size >= most_bytes:
            break
    return found


def _bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _rate(size: int, work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return size / MEGA / min(seconds)


def _row(name: str, ours: float, peer: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "peer": peer, "unit": "MB/s", "ratio": ours / peer}


def _missing(name: str, note: str) -> dict[str, Any]:
    return {"name": name, "ours": None, "peer": None, "unit": "MB/s", "ratio": None, "note": note}
