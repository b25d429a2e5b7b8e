"""The page beside an export that says how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAGES = {
    "llmc": """# Tokens for llm.c and modded-nanogpt

`train_*.bin`, `val_*.bin`: 256 int32 (magic, version, number of tokens, zeros), then {dtype} tokens. 16-bit tokens have
the magic 20240520 and version 1, 32-bit ones 20240801 and version 7, as in `dev/data/data_common.py` of llm.c.

    ./train_gpt2cu -i "train_*.bin" -j "val_*.bin" -t SEQUENCE_LENGTH ...

`train_gpt2cu` reads 16-bit tokens only; 32-bit ones are for `train_llama3.py`. It permutes the files, and the batches
within each file, anew in every epoch (`dataloader_reset` in `llmc/dataloader.h`); no option keeps the order of this
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

nanoGPT reads them as uint16 from `data/<dataset>/`, at random offsets. If {dtype} is not uint16, say so in its
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
    "mds": """# Tokens for MosaicML Streaming

`train/`, `val/`: one sample per row, in the order of this export. `tokens` is an array of {dtype}, without padding;
`starts` has where its document pieces begin. Each document ends with {eos}.

    StreamingDataset(local="train", shuffle=False, batch_size=...)
""",
}
COMMON = """
## In every format

`train.json` says what was exported: order, seed, rows, tokens, the tokenizer's fingerprint. `sha256sum -c train.sha256`
checks the files. `*.docs.parquet` names the document of each stretch of tokens: `start` and `length` in the file, `row`
in the packed set, `id`, `source`, `copy` and `offset` within the document.
"""


def readme(form: str, tokenizer: Mapping[str, Any], dtype: str) -> str:
    """How to read an export: markdown.

    Args:
        form: the format.
        tokenizer: vocab_size, eos and pad.
        dtype: of the tokens, by name.
    """
    values = {name: tokenizer[name] for name in ("vocab_size", "eos", "pad")}
    return PAGES[form].format(dtype=dtype, **values) + COMMON
