"""Documents to ids, a batch at a time: by the kernels where they know the tokenizer, else by the library."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.patterns import NotKnownError
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.encoding.vocabulary import TokenizerError
from gristmill.tokenize.packed_files import DTYPES, dtype_name

BATCH_BYTES = 1 << 20
"""Text per call of the tokenizer: enough to keep all threads busy, little enough to hold its results."""
KERNELS = "kernels"
"""Of `describe_encoder`: nothing is left to the library."""


def batches(sizes: np.ndarray) -> Iterator[slice]:
    """Cut documents into runs of about BATCH_BYTES of text; a larger document is a run of its own."""
    start = 0
    while start < len(sizes):
        total = np.cumsum(sizes[start : start + BATCH_BYTES])
        stop = start + max(1, int(np.searchsorted(total, BATCH_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def encode_batch(tokenizer: TextTokenizer, texts: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode some documents; one that fails does not fail the others.

    Returns:
        the ids back to back (the dtype of the vocabulary), the number of tokens of each document (0 where it
        failed; int64), and the error of each that failed, by its number.
    """
    encoder = _encoder(tokenizer)
    if encoder is not None:
        flat, lengths = encoder.encode(texts)
        return flat, lengths, {}
    return encode_with_library(tokenizer, texts.to_pylist())


def encode_with_library(
    tokenizer: TextTokenizer, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode some documents with a tokenizer that only the library knows; like `encode_batch`."""
    errors: dict[int, str] = {}
    try:
        ids = [encoding.ids for encoding in tokenizer.encode(texts)]
    except Exception:  # noqa: BLE001 - the library raises bare Exception; find out which document it was
        ids = [_encode_one(tokenizer, text, number, errors) for number, text in enumerate(texts)]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(map(len, ids)))
    return check_ids(flat, tokenizer), np.array([*map(len, ids)], np.int64), errors


def check_ids(ids: np.ndarray, tokenizer: TextTokenizer) -> np.ndarray:
    """The ids in the dtype of the vocabulary.

    Raises:
        TokenizerError: an id lies outside of it.
    """
    if ids.size and ids.max() >= tokenizer.vocab_size:
        raise TokenizerError(f"the tokenizer gave id {ids.max()}, outside its vocabulary of {tokenizer.vocab_size}; "
                             "run the tokenizer stage again")
    return ids.astype(DTYPES[dtype_name(tokenizer.vocab_size)])


def _encoder(tokenizer: TextTokenizer) -> FastEncoder | None:
    """This thread's fast encoder of a tokenizer; None where only the library can encode with it."""
    known = getattr(_of_thread, "encoders", {})
    if tokenizer.sha256 not in known:
        try:
            known = {tokenizer.sha256: FastEncoder.for_tokenizer(tokenizer.tokenizer)}
        except NotKnownError:
            known = {tokenizer.sha256: None}  # the stage's report has the reason
        _of_thread.encoders = known
    encoder: FastEncoder | None = known[tokenizer.sha256]
    return encoder


_of_thread = threading.local()


def describe_encoder(tokenizer: TextTokenizer) -> str:
    """What encodes with a tokenizer: the kernels here, or the library and why."""
    try:
        FastEncoder.for_tokenizer(tokenizer.tokenizer)
    except NotKnownError as error:
        return f"the tokenizers library, because {error}"
    return KERNELS


def _encode_one(tokenizer: TextTokenizer, text: str, number: int, errors: dict[int, str]) -> list[int]:
    try:
        return tokenizer.encode([text])[0].ids
    except Exception as error:  # noqa: BLE001 - any failure quarantines this document alone
        errors[number] = f"{type(error).__name__}: {error}"
        return []
