"""Corpora of tokenised documents: those tokenised here, and those imported as tokens.

Both are token parts beside document shards, in separate folders. A corpus has the form
of a stage's inputs with documents of a single kind; readers of all tokenised documents
iterate over the corpora.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.dataprep.documents import Inputs, shard_names
from gristmill.dataprep.row_groups import read_rows
from gristmill.mixtures.schema.sources import IMPORTED
from gristmill.tokenize.packed_files import read_tokens

DOCUMENTS, TOKENS = "documents", "tokens"
"""Folders of the stage's output: documents in the form of `ingest`, tokens in the form
of `tokenize`.
"""


def corpora(inputs: Inputs) -> list[dict[str, Path]]:
    """Inputs of each corpus: stage -> folder, with `ingest` in each."""
    all_corpora = []
    if "ingest" in inputs:
        all_corpora.append({name: inputs[name] for name in inputs if name != IMPORTED})
    if IMPORTED in inputs:
        imported = {
            name: inputs[name] for name in ("tokenizer", "mix") if name in inputs
        }
        imported["ingest"] = inputs[IMPORTED] / DOCUMENTS
        imported["tokenize"] = inputs[IMPORTED] / TOKENS
        all_corpora.append(imported)
    return all_corpora


def decoded_text(corpus: Inputs, shard: str, row: int) -> str:
    """Decoded tokens of an imported document.

    Args:
        corpus: the inputs of the imported corpus, with `tokenizer`.
        shard, row: location of the document.
    """
    from gristmill.tokenize.encoding.encode import docs_name, tokens_name
    from gristmill.tokenize.encoding.tokenizer import load

    tokenizer = load(corpus["tokenizer"])
    folder = corpus["tokenize"]
    columns = ["offset", "tokens"]
    document = read_rows(folder / docs_name(shard), [row], columns).to_pylist()[0]
    ids = read_tokens(folder / tokens_name(shard), tokenizer.dtype)[
        document["offset"] :
    ]
    return tokenizer.decode(ids[: document["tokens"]].tolist())


def corpus_shards(inputs: Inputs) -> list[tuple[dict[str, Path], str]]:
    """All document shards with their corpus; position n is shard n of a packed set's
    ledger.
    """
    return [
        (corpus, shard)
        for corpus in corpora(inputs)
        for shard in shard_names(corpus["ingest"])
    ]
