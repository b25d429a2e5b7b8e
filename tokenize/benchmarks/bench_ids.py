"""`gristmill bench tokenize`: whether every document of whole corpora gets the ids that `tokenizers` gives it.

For each pre-tokenisation that a manifest can name, with merges learnt from the same texts. No speed is measured: ours
is the number of documents whose ids are equal, the peer's the number of documents, and the ratio must be 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.tokenize.benchmarks.texts import TEXT_BYTES, books, code, first_texts, languages
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.sample import Sample
from gristmill.tokenize.encoding.vocabulary import train

PATTERNS = ("gpt2", "llama3", "digits")
VOCAB_SIZE = 32_000
BATCH_DOCUMENTS = 128


def rows() -> Iterator[dict[str, Any]]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    texts = [text for part in (books(), code(), languages()) for text in first_texts(part, TEXT_BYTES)]
    for pattern in PATTERNS:
        equal = equal_documents(texts, pattern)
        yield {"name": f"ids_equal_{pattern}", "ours": equal, "peer": len(texts), "unit": "documents",
               "ratio": equal / len(texts), "note": f"{sum(map(len, texts))} characters; must be 1"}


def equal_documents(texts: Sequence[str], pattern: str) -> int:
    """How many texts both encode alike, with a vocabulary of a pattern that is learnt from a part of them."""
    tokenizer = train(Sample({"text": texts[::7]}, {}), VOCAB_SIZE, pattern)
    tokenizer.encode_special_tokens = True
    encoder, equal = FastEncoder.for_tokenizer(tokenizer), 0
    for at in range(0, len(texts), BATCH_DOCUMENTS):
        some = list(texts[at : at + BATCH_DOCUMENTS])
        ids, counts = encoder.encode(pa.array(some, pa.large_string()))
        ours = np.split(ids, np.cumsum(counts)[:-1])
        theirs = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        equal += sum(np.array_equal(own, other.ids) for own, other in zip(ours, theirs, strict=True))
    return equal
