"""File formats of other trainers, byte by byte, and instructions for reading each.

Each function's docstring names the reader that it follows.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.exporting.hashed_files import HashedSink
from gristmill.tokenize.packed_files import TokenizerEntry

LLMC_MAGIC, LLMC_VERSION = 20240520, 1
"""Header of 16-bit tokens: `dataloader_load_shard_` in llm.c's llmc/dataloader.h."""
LLMC_WIDE_MAGIC, LLMC_WIDE_VERSION = 20240801, 7
"""Header of 32-bit tokens: the model `llama-3` of HEADERS_INFO in llm.c's
dev/data/data_common.py.
"""
LLMC_HEADER_INTS = 256
MEGATRON_MAGIC, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
"""`_INDEX_HEADER` and the version after it, in Megatron-LM's
megatron/core/datasets/indexed_dataset.py.
"""
MEGATRON_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
"""`DType` there, which has no uint32: large vocabularies are int32."""
MOST_LLMC_TOKENS = 2**31 - 1
"""The number of tokens is an int32 of the header."""


def llmc_header(tokens: int, dtype: np.dtype) -> bytes:
    """256 int32 before the tokens: magic, version, number of tokens, zeros (llm.c,
    modded-nanogpt's train_gpt.py).
    """
    header = np.zeros(LLMC_HEADER_INTS, "<i4")
    magic = (LLMC_MAGIC, LLMC_VERSION)
    if dtype.itemsize == 4:
        magic = (LLMC_WIDE_MAGIC, LLMC_WIDE_VERSION)
    header[:3] = (*magic, tokens)
    return header.tobytes()


def write_megatron_index(
    sink: HashedSink, lengths: Callable[[], Iterator[np.ndarray]], dtype: np.dtype
) -> None:
    """Write the index beside a Megatron `.bin` file, in which every document piece is a
    document of one sequence.

    Magic, version (uint64), dtype code (uint8), number of sequences and of document
    indices (uint64 each), then of all sequences the lengths (int32), the pointers in
    bytes (int64), and the number of sequences before each document and after the last
    one (int64): `_IndexReader` in Megatron-LM's indexed_dataset.py.

    Args:
        sink: the `.idx` file.
        lengths: gives the lengths of all pieces, some at a time; called again for each
            part of the index.
        dtype: of the tokens in the `.bin` file.
    """
    count = sum(len(part) for part in lengths())
    sink.write(
        MEGATRON_MAGIC
        + np.uint64(MEGATRON_VERSION).tobytes()
        + np.uint8(MEGATRON_CODES[dtype]).tobytes()
    )
    sink.write(np.array([count, count + 1], "<u8").tobytes())
    for part in lengths():
        sink.write(part.astype("<i4").tobytes())
    at = 0
    for part in lengths():
        ends = at + np.cumsum(part) * dtype.itemsize
        sink.write((ends - part * dtype.itemsize).astype("<i8").tobytes())
        at = int(ends[-1]) if len(ends) else at
    document = 0
    for part in lengths():
        sink.write(np.arange(document, document + len(part), dtype="<i8").tobytes())
        document += len(part)
    sink.write(np.array([count], "<i8").tobytes())


def write_olmo_documents(sink: HashedSink, lengths: Iterable[np.ndarray]) -> None:
    """Write begin and end of every document piece, as `iter_document_indices` in
    OLMo-core's data/utils.py reads it.
    """
    at = 0
    with gzip.GzipFile(filename="", mode="wb", fileobj=sink, mtime=0) as packed:
        for part in lengths:
            bounds = at + offsets_of(part)
            lines = (f"{begin},{end}\n" for begin, end in pairwise(bounds.tolist()))
            packed.write("".join(lines).encode())
            at = int(bounds[-1])


PAGES = {
    "llmc": """# Tokens for llm.c and modded-nanogpt

`train_*.bin`, `val_*.bin`: 256 int32 (magic, version, number of tokens, zeros), then {dtype} tokens. 16-bit tokens have
the magic 20240520 and version 1, 32-bit ones 20240801 and version 7, as in `dev/data/data_common.py` of llm.c.

    ./train_gpt2cu -i "train_*.bin" -j "val_*.bin" -t SEQUENCE_LENGTH ...

`train_gpt2cu` reads 16-bit tokens only; 32-bit ones are for `train_llama3.py`. It permutes the files, and the batches
within each file, again in every epoch (`dataloader_reset` in `llmc/dataloader.h`); no option keeps the order of this
export. To read in that order, set `permute_train_loader` in `train_gpt2.cu` to 0: every file begins with a row, so that
with `-t` equal to `sequence_length` (see `train.json`) the rows then follow one another where nothing was padded. What
is too little for a batch, with one token more, at the end of a file is left out.

modded-nanogpt reads 16-bit tokens, too, and looks for documents by the token before them: set its `BOS_ID` to {eos},
which here ends each document; it passes over what is before the first one of a file.
""",
    "megatron": """# Tokens for Megatron-LM

`train_text_document.bin` (tokens, {dtype}) with `train_text_document.idx`; every document piece is a document of one
sequence, its end of text ({eos}) included.

    --data-path train_text_document      (without the ending)

Megatron's own `GPTDataset` shuffles the documents again; `IndexedDataset` reads them in the order of this export.
""",
    "memmap": """# Raw tokens

`train.bin`, `val.bin`: {dtype}, little-endian, no header; each document ends with {eos}.

    tokens = numpy.memmap("train.bin", dtype=numpy.{dtype}, mode="r")

nanoGPT reads them as uint16 from `data/<dataset>/`, at random offsets; for uint32 change the type in its
`get_batch`.
""",
    "olmo": """# Tokens for OLMo-core

`train-*.npy`: {dtype}, little-endian, no header in spite of the ending; documents lie back to back, each with its end
of text ({eos}). `train-*.csv.gz` has begin and end of each document piece.

    NumpyFSLDatasetConfig.glob("train-*.npy", sequence_length=..., dtype=NumpyDatasetDType.{dtype},
        tokenizer=TokenizerConfig(vocab_size={vocab_size}, eos_token_id={eos}, pad_token_id={pad}))

With the sequence length of `train.json` its instances are the rows in the order of this export where nothing was
padded. A piece that a row's end cuts has no end of text: read the `.csv.gz` where exact documents count.
""",
}
COMMON = """
## In every format

`train.json` says what was exported: order, seed, rows, tokens, the tokenizer's fingerprint. `sha256sum -c train.sha256`
checks the files. `*.docs.parquet` names the document of each stretch of tokens: `start` and `length` in the file, `row`
in the packed set, `id`, `source`, `copy` and `offset` within the document.
"""


def readme(form: str, tokenizer: TokenizerEntry, dtype: str) -> str:
    """Instructions for reading an export of tokens of a dtype, in Markdown."""
    return PAGES[form].format(dtype=dtype, **tokenizer) + COMMON
