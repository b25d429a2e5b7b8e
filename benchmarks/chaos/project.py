"""Tiny projects for chaos, whose manifests have every stage between them, except those
that ask a model (`asking_kills.py`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gristmill.dataprep.quality import classifier

WORDS = """
the of and to in that have with be a is was for on as by at from this which are not but it or an were their river
mountain window garden letter machine teacher evening village story winter summer music history ocean market bridge
forest captain doctor signal picture question answer paper kitchen station journey measure
""".split()
MODIFIED_AT = 1_700_000_000
"""Time of every file, in seconds since 1970, so that the same files have the same
listing.
"""
MANIFEST = """\
name: chaos
seed: 5
sources:
  web: {path: "web/*.jsonl", weight: 0.6, max_epochs: 8}
  books: {path: "books/*.txt", weight: 0.2, max_epochs: 8}
  code: {path: "code/*.py", weight: 0.2, max_epochs: 16}
ingest: {shard_bytes: 20_000, max_quarantined: 0.2}
prepare:
  - clean: {normalise: NFC}
  - edit: {use: ./steps.py:with_tabs}
  - annotate: {use: ./steps.py:count_marks, max: {marks: 1000}}
  - filter: {sources: [web, books], rules: [gopher_quality]}
  - dedup: {minhash: {threshold: 0.7}}
  - dedup_lines: {min_words: 5}
  - dedup_substrings: {min_words: 50}
  - langid: {model: languages.bin, keep: [en], threshold: 0.5, sources: [web, books]}
  - quality: {classifier: {positive: [books], negative: [code], holdout: 0.3}}
  - decontaminate: {against: [{path: questions.jsonl}]}
  - dedup_semantic: {model: words, threshold: 0.999, clusters: 2}
  - cluster: {model: words, k: 3}
tokenizer: {vocab_size: 400}
mix: {tokens: 12_000, sequence_length: 64, validation: 0.1, shard_rows: 60}
text_index:
pretrain:
  model: {layers: 1, width: 32, heads: 2}
  steps: 12
  global_batch_size: 8
  micro_batch_size: 4
  log_every: 1
  validate_every: 6
merge: {steps: [9, 12]}
sft:
  data: [{path: chats.jsonl}]
  prepare: [dedup, {filter: {rules: [gopher_repetition]}}]
  distill: {teacher: pretrain, top_k: 8}
  steps: 4
  global_batch_size: 8
  micro_batch_size: 4
  sequence_length: 128
dpo:
  data: [{path: pairs.jsonl}]
  prepare: [{decontaminate: {against: [{path: questions.jsonl}]}}]
  steps: 4
  global_batch_size: 4
  micro_batch_size: 2
  sequence_length: 128
reward: {steps: 4, global_batch_size: 4, micro_batch_size: 2, sequence_length: 128}
rl:
  data: [{path: chats.jsonl}]
  rewards: [{kind: length, target_tokens: 4}, {kind: model}]
  steps: 4
  group_size: 2
  global_batch_size: 4
  micro_batch_size: 2
  max_new_tokens: 8
evaluate: {prompts: ["The river"], max_new_tokens: 4}
export:
documents: {format: parquet}
engine: {workers: 2, ranks: 2, checkpoint_every: 3, permanent_every: 3, retries: 0}
"""
STEPS = """\
def with_tabs(text: str) -> str:
    return text.replace("    ", "\\t")


def count_marks(text: str) -> dict:
    return {"marks": text.count("!"), "commas": text.count(",")}
"""
"""Code of a user, for two steps."""
GIVEN_MANIFEST = """\
name: given
sources: {web: {tokens: tokens.npy, document_tokens: 60}}
model: {path: model}
mix: {tokens: 4000, sequence_length: 64}
export:
"""


def write_given(folder: Path, model: Path) -> Path:
    """Write a project that begins with tokens and a model; returns the manifest's path.

    Args:
        folder: receives it.
        model: folder in the format of Hugging Face, which is copied.
    """
    shutil.copytree(model, folder / "model")
    np.save(
        folder / "tokens.npy",
        np.random.default_rng(11).integers(20, 300, 6_000, dtype=np.uint16),
    )
    for path in folder.rglob("*"):
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))
    manifest = folder / "given.yaml"
    manifest.write_text(GIVEN_MANIFEST)
    return manifest


def write_project(folder: Path) -> Path:
    """Write corpus, examples and manifest; the same files every time. Returns the
    manifest's path.

    There are exact and near duplicates, repeated lines, a short document, unreadable
    records and one with a question of the evaluation, so that every stage has something
    to drop.
    """
    source = random.Random(11)
    files = {
        **_web(source),
        **{f"books/{n}.txt": prose(source, 40) for n in range(6)},
        **{f"code/{n}.py": _code(source) for n in range(8)},
        **_examples(source),
        "steps.py": STEPS,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))
    _write_language_model(folder, source)
    _write_word_vectors(folder / "words")
    manifest = folder / "chaos.yaml"
    manifest.write_text(MANIFEST)  # last, as the mark of a whole project
    return manifest


def _sentence(source: random.Random) -> str:
    return (
        " ".join(
            source.choice(WORDS) for _ in range(source.randint(7, 16))
        ).capitalize()
        + "."
    )


def prose(source: random.Random, sentences: int = 24) -> str:
    """Write lines of three sentences."""
    return "\n".join(
        " ".join(_sentence(source) for _ in range(3)) for _ in range(sentences // 3)
    )


def _code(source: random.Random) -> str:
    names = [(source.choice(WORDS), source.randint(2, 99)) for _ in range(12)]
    return "\n".join(
        f"def {name}_{n}(value):\n    return value * {factor} + {n}\n"
        for n, (name, factor) in enumerate(names)
    )


def _web(source: random.Random) -> dict[str, str]:
    texts = [prose(source) for _ in range(40)]
    texts += [texts[0], texts[1] + " One more sentence at the end.", "Too short."]
    texts += [
        f"{prose(source)}\nAll rights of this site are kept by its owner."
        for _ in range(4)
    ]
    texts.append(f"{prose(source)}\n{QUESTION}")
    lines = [json.dumps({"text": text}) for text in texts] + [
        "this is no json",
        '{"title": "no text here"}',
    ]
    return {f"web/{n}.jsonl": "\n".join(lines[n::4]) for n in range(4)}


QUESTION = (
    "Which river runs below the old bridge near the market of the village where the "
    "captain met the doctor on a winter evening"
)


def _examples(source: random.Random) -> dict[str, str]:
    chats, pairs = [], []
    for number in range(32):
        question, answer = f"What is {WORDS[number % len(WORDS)]}?", _sentence(source)
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        pairs.append(
            {"prompt": question, "chosen": answer, "rejected": _sentence(source)}
        )
    return {
        "chats.jsonl": json_lines(chats),
        "pairs.jsonl": json_lines(pairs),
        "questions.jsonl": json_lines([{"question": QUESTION}]),
    }


def json_lines(rows: Sequence[Mapping[str, object]]) -> str:
    """Return records, one per line."""
    return "\n".join(json.dumps(row) for row in rows)


def _write_word_vectors(folder: Path) -> None:
    """Write a model2vec model of sentence embeddings: a vector for each word."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: place for place, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = (
        np.random.default_rng(13).normal(size=(1 + len(WORDS), 16)).astype(np.float32)
    )
    save_file({"embeddings": vectors}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "model2vec"}')
    for path in folder.iterdir():
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))


def _write_language_model(folder: Path, source: random.Random) -> None:
    """Train a small fastText model that tells the corpus's prose from noise."""
    examples = folder / "languages.txt"
    examples.write_text(
        "".join(
            f"__label__en {_sentence(source)}\n__label__xx "
            f"{''.join(source.choices('qxzjkw ', k=60))}\n"
            for _ in range(200)
        )
    )
    settings = json.dumps(
        {"dim": 4, "epoch": 3, "bucket": 1000, "thread": 1, "verbose": 0}
    )
    command = [
        sys.executable,
        "-m",
        classifier.__name__,
        str(examples),
        str(folder / "languages.bin"),
        settings,
    ]
    subprocess.run(command, check=True, env={**os.environ, **classifier.ZEROED_MEMORY})
    examples.unlink()
    os.utime(folder / "languages.bin", (MODIFIED_AT, MODIFIED_AT))
