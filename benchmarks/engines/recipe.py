"""The pipeline of all engines: two sources, one of web archives; all steps of
`prepare`; a tokenizer and a mixture.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.public_data import language_model
from gristmill.core.files import TEMPORARY_MARK
from gristmill.core.stage_context import Context
from gristmill.flows.stages.plan import make_plan
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.schema.engine import BeamEngine

WORDS = """
the of and to in that have with be a is was for on as by at from this which are not but it or an were their river
mountain window garden letter machine teacher evening village story winter summer music history ocean market bridge
forest captain doctor signal picture question answer paper kitchen station journey measure
""".split()
MANIFEST = """\
name: engines
seed: 5
sources:
  web: {path: "web/*.warc.gz", weight: 0.5, max_epochs: 50}
  books: {path: "books/*.jsonl", weight: 0.5, max_epochs: 50}
ingest: {shard_bytes: 60_000, max_quarantined: 0.2}
prepare:
  - clean
  - langid: {keep: [en], threshold: 0.3}
  - filter: {rules: [gopher_quality]}
  - dedup: {exact: true, keep: ["length desc"]}
  - dedup_lines
  - dedup_substrings
  - quality: {classifier: {positive: [books], negative: [web], holdout: 0.3}}
  - decontaminate: {against: [held.jsonl]}
  - annotate: {use: ./steps.py:count_word, with: {word: xyzzy}, max: {magic: 0}}
tokenizer: {vocab_size: 400}
mix: {tokens: 24_000, sequence_length: 64, validation: 0.1, shard_rows: 60}
"""
STEPS = """\
import os
import signal


def count_word(text, word):
    try:
        os.unlink({path!r})
        os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        pass
    return {{"magic": text.count(word)}}
"""
"""Step of a user, which kills its worker if a file exists."""


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """Write a corpus with duplicates, a leak and a broken record, and its manifest;
    returns the manifest's path.
    """
    source = random.Random(3)
    texts = [_prose(source) for _ in range(documents)]
    texts += [
        texts[0],
        texts[1] + " One more sentence at the end.",
        texts[2] + " xyzzy",
        "Too short.",
    ]
    half = len(texts) // 2
    for name in ("web", "books"):
        (folder / name).mkdir(parents=True)
    for number in range(2):
        pages = texts[half + number :: 2]
        (folder / "web" / f"{number}.warc.gz").write_bytes(
            b"".join(
                _archived(f"http://a.example/{number}/{index}", text)
                for index, text in enumerate(pages)
            )
        )
        lines = [json.dumps({"text": text}) for text in texts[number:half:2]] + [
            "{broken"
        ] * number
        (folder / "books" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "held.jsonl").write_text(
        json.dumps({"question": " ".join(texts[5].split()[:30])}) + "\n"
    )
    (folder / "steps.py").write_text(STEPS.format(path=str(folder / "kill")))
    text = MANIFEST
    if (model := language_model()) is not None:
        text = text.replace("langid: {", f"langid: {{model: {model}, ")
    (folder / "engines.yaml").write_text(text)
    return folder / "engines.yaml"


def _prose(source: random.Random) -> str:
    return "\n".join(
        " ".join(
            " ".join(source.choices(WORDS, k=source.randint(7, 16))).capitalize() + "."
            for _ in range(3)
        )
        for _ in range(10)
    )


def _archived(url: str, text: str) -> bytes:
    """Return a gzip member of a web archive: a page with the text."""
    paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n"))
    page = f"<html><body><article>{paragraphs}</article></body></html>".encode()
    content = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
    )
    identity = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()
    fields = {
        "WARC-Type": "response",
        "WARC-Record-ID": f"<urn:uuid:{identity}>",
        "WARC-Target-URI": url,
        "WARC-Date": "2024-05-18T01:58:10Z",
        "Content-Type": "application/http; msgtype=response",
        "Content-Length": str(len(content)),
    }
    head = "".join(
        [
            "WARC/1.1\r\n",
            *(f"{name}: {value}\r\n" for name, value in fields.items()),
            "\r\n",
        ]
    ).encode()
    return gzip.compress(head + content + b"\r\n\r\n", mtime=0)


def run_stages(
    manifest: Path,
    folder: Path,
    before: Callable[[str], None] = lambda stage: None,
    **engine: Any,
) -> dict[str, str]:
    """Run all stages of a manifest in this process; returns the SHA-256 of each output
    file.

    Args:
        manifest: its path.
        folder: for outputs and work.
        before: called with each stage's name before it runs.
        engine: settings of BeamEngine.
    """
    inputs: dict[str, Path] = {}
    for name, node in make_plan(load_manifest(manifest)).items():
        before(name)
        context = Context(
            folder / "work" / name,
            name,
            BeamEngine(**{"workers": 1, **engine}),
            emit=lambda event: None,
        )
        stage_inputs = {needed: inputs[needed] for needed in node.inputs}
        imported(node.stage.run)(
            stage_inputs, dict(node.config), folder / "data" / name, context
        )
        inputs[name] = folder / "data" / name
    return sums(folder / "data")


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, except unfinished files of killed
    workers, which the store removes.
    """
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and TEMPORARY_MARK not in path.name
    }
