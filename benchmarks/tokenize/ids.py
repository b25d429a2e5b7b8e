"""`gristmill bench ids`: whether every document of whole corpora gets the ids that `tokenizers` gives it.

For each pre-tokenisation that a manifest can name, with merges learnt from the same texts. No speed is measured: ours
is the number of documents whose ids are equal, the peer's the number of documents, and the ratio must be 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, row
from benchmarks.tokenize.texts import everything
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.sample import TokenizerSample
from gristmill.tokenize.encoding.vocabulary import train

PATTERNS = ("gpt2", "llama3", "digits")
VOCAB_SIZE = 32_000
BATCH_DOCUMENTS = 128
LEARN_EVERY = 16
"""Of so many documents one is learnt from."""
MOST_SECONDS = 300
"""Of the processor, for each pattern."""


def rows() -> Iterator[Row]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    texts = everything()
    for pattern in PATTERNS:
        equal, compared = equal_documents(texts, pattern)
        note = f"{sum(map(len, texts[:compared]))} of {sum(map(len, texts))} characters; must be 1"
        yield row(f"ids_equal_{pattern}", equal, compared, "documents", note)


def equal_documents(texts: Sequence[str], pattern: str) -> tuple[int, int]:
    """How many texts both encode alike, with a vocabulary of a pattern that is learnt from a part of them.

    Args:
        texts: in any order.
        pattern: a name of `pretokens.make_pre_tokenizer`.

    Returns:
        that number, and how many of the texts, from the first one on, were compared: the library, which takes tens of
        times as long, has MOST_SECONDS.
    """
    tokenizer = train(TokenizerSample({"text": texts[::LEARN_EVERY]}, {}), VOCAB_SIZE, pattern)
    tokenizer.encode_special_tokens = True
    encoder, equal, begun = FastEncoder.for_tokenizer(tokenizer), 0, time.process_time()
    for at in range(0, len(texts), BATCH_DOCUMENTS):
        some = list(texts[at : at + BATCH_DOCUMENTS])
        ids, counts = encoder.encode(pa.array(some, pa.large_string()))
        ours = np.split(ids, np.cumsum(counts)[:-1])
        theirs = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        equal += sum(np.array_equal(own, other.ids) for own, other in zip(ours, theirs, strict=True))
        if time.process_time() - begun > MOST_SECONDS:
            return equal, at + len(some)
    return equal, len(texts)
