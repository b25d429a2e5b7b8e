"""A small corpus with planted defects of every kind, and a manifest that runs it
through all stages.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.jsonl import write_jsonl

WORDS = """
the of and to in that have with be a is was for on as by at from this which are not but it or an
were their river mountain window garden letter machine teacher evening village story winter summer
music history ocean market bridge forest captain doctor signal picture question answer paper kitchen
station journey measure
""".split()
MODIFIED_AT = 1_700_000_000
PLANTED_QUARANTINED = 5
"""Number of unreadable records in the corpus; see `write_corpus`."""


def sentence(random_: random.Random) -> str:
    words = [random_.choice(WORDS) for _ in range(random_.randint(7, 16))]
    return " ".join(words).capitalize() + "."


def prose(random_: random.Random, sentences: int = 30) -> str:
    lines = [
        " ".join(sentence(random_) for _ in range(3)) for _ in range(sentences // 3)
    ]
    return "\n".join(lines)


def jsonl(random_: random.Random, documents: int) -> bytes:
    return b"\n".join(
        json.dumps({"text": prose(random_)}).encode() for _ in range(documents)
    )


def source_code(random_: random.Random) -> str:
    lines = []
    for number in range(12):
        name = random_.choice(WORDS)
        lines.append(
            f"def {name}_{number}(value):\n    total = value * {random_.randint(2, 99)}"
        )
        lines.append(f"    return total + {number}\n")
    return "\n".join(lines)


def write_corpus(folder: Path, reverse: bool = False) -> None:
    """Write the corpus; `reverse` creates the same files in the opposite order, which
    permutes listings.

    Planted: JSONL lines that are not JSON, without text, not UTF-8, and with empty
    text; a truncated gzip file; an empty text file; exact and near duplicates; a
    document too short for the filter.
    """
    random_ = random.Random(11)
    documents = [{"text": prose(random_), "author": f"a{n}"} for n in range(60)]
    documents += [
        {"text": documents[0]["text"]},
        {"text": documents[1]["text"] + " One more sentence at the end."},
    ]
    documents += [{"text": "Too short."}]
    lines = [json.dumps(document).encode() for document in documents]
    lines += [
        b"this is no json",
        b'{"title": "no text here"}',
        b'{"text": "caf\xff"}',
        b'{"text": ""}',
    ]
    packed = gzip.compress(jsonl(random_, 12), mtime=0)
    table = pa.table(
        {"text": [prose(random_) for _ in range(10)], "year": list(range(10))}
    )
    files: dict[str, bytes] = {
        "web/a.jsonl": b"\n".join(lines[:30]),
        "web/b.jsonl": b"\n".join(lines[30:]),
        "web/c.jsonl.zst": zstandard.compress(jsonl(random_, 8)),
        "web/d.jsonl.gz": packed[: len(packed) * 3 // 4],
        "books/empty.txt": b"",
        **{f"books/{n:02d}.txt": prose(random_, 60).encode() for n in range(12)},
        **{f"code/{n:02d}.py": source_code(random_).encode() for n in range(16)},
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    files["web/e.parquet"] = sink.getvalue().to_pybytes()
    for name, content in sorted(files.items(), reverse=reverse):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))


def write_examples(folder: Path) -> None:
    random_ = random.Random(12)
    chats, pairs = [], []
    for number in range(40):
        question, answer = f"What is {WORDS[number % 40]}?", sentence(random_)
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        pairs.append(
            {"prompt": question, "chosen": answer, "rejected": sentence(random_)}
        )
    for name, rows in (("chats.jsonl", chats), ("pairs.jsonl", pairs)):
        write_jsonl(folder / name, rows)
        os.utime(folder / name, (MODIFIED_AT, MODIFIED_AT))


MANIFEST = """\
name: small
seed: 5
sources:
  web: {path: "web/*", weight: 0.6, max_epochs: 4}
  books: {path: "books/*.txt", weight: 0.2, max_epochs: 4}
  code: {path: "code/*.py", weight: 0.2, max_epochs: 8}
ingest: {shard_bytes: 12_000, max_quarantined: 0.2}
prepare:
  - filter: {sources: [web, books], rules: [gopher_quality]}
  - dedup: {minhash: {threshold: 0.7}}
  - quality: {classifier: {positive: [books], negative: [code], holdout: 0.3}}
tokenizer: {vocab_size: 400}
mix: {tokens: 24_000, sequence_length: 64, validation: 0.1, shard_rows: 60}
pretrain:
  model: {layers: 2, width: 32, heads: 2}
  steps: 24
  global_batch_size: 8
  micro_batch_size: 8
  log_every: 1
  validate_every: 12
sft: {data: [{path: chats.jsonl}], steps: 4, global_batch_size: 8, micro_batch_size: 8, sequence_length: 128}
dpo: {data: [{path: pairs.jsonl}], steps: 4, global_batch_size: 4, micro_batch_size: 4, sequence_length: 128}
evaluate: {prompts: ["The river"], max_new_tokens: 8}
export:
engine: {workers: 2, checkpoint_every: 4}
"""


def write_project(folder: Path, reverse: bool = False) -> Path:
    """Write corpus, examples and manifest; returns the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder, reverse)
    write_examples(folder)
    manifest = folder / "small.yaml"
    manifest.write_text(MANIFEST)
    return manifest
