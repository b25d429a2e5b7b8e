"""A small run for `gristmill browse`, with an attack in texts, file names, metadata and
examples.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session
from tests.flows.corpus import WORDS, sentence
from tests.jsonl import write_jsonl

ATTACK = """<script>document.title = 'taken'</script>"><img src=x onerror="document.title = 'taken'">{{ 7 * 7 }}"""
MANIFEST = """\
name: browsed
seed: 3
sources:
  web: {path: "web/*.jsonl", weight: 0.7, max_epochs: 50}
  notes: {path: "notes/*.txt", weight: 0.3, max_epochs: 50}
ingest: {shard_bytes: 9_000}
prepare:
  - clean: {mask: [email]}
  - filter: {rules: [{gopher_quality: {min_words: 20, min_stop_words: 0, min_alpha_word_ratio: 0.3}}]}
  - dedup: {minhash: {threshold: 0.7}}
  - filter: {rules: [{gopher_quality: {max_words: 150, min_words: 0, min_stop_words: 0, min_alpha_word_ratio: 0}}]}
tokenizer: {vocab_size: 400}
mix: {tokens: 6000, sequence_length: 64, validation: 0.1}
pretrain: {model: {layers: 1, width: 16, heads: 1}, steps: 6, global_batch_size: 4}
sft:
  data: [{path: chats.jsonl}]
  prepare: [dedup, {filter: {rules: [{gopher_quality: {min_words: 3, min_stop_words: 0}}]}}]
  steps: 4
  sequence_length: 256
engine: {workers: 1}
"""
ADDRESSED = "write to somebody@mail.org"


def write_project(folder: Path) -> Path:
    """Write documents of one to fifty sentences, a duplicate, a near-duplicate, and an
    attack in text, name and metadata.
    """
    random_ = random.Random(4)
    texts = [
        " ".join(sentence(random_) for _ in range(1 + number % 17))
        for number in range(60)
    ]
    attack = " ".join([ATTACK, *(sentence(random_) for _ in range(7)), ADDRESSED])
    texts += [texts[8], texts[9] + " One more.", attack]
    (folder / "web").mkdir(parents=True)
    lines = [
        json.dumps({"text": text, "url": "javascript:alert(1)", ATTACK[:20]: ATTACK})
        for text in texts
    ]
    for name, part in (("a", lines[:30]), ("<img src=x onerror=alert(1)>", lines[30:])):
        (folder / "web" / f"{name}.jsonl").write_text("\n".join(part))
    (folder / "notes").mkdir()
    for number in range(6):
        (folder / "notes" / f"{number}.txt").write_text(
            " ".join(sentence(random_) for _ in range(8))
        )
    chats = [
        {"prompt": f"What is {WORDS[n % 40]}{ATTACK}?", "completion": sentence(random_)}
        for n in range(12)
    ]
    write_jsonl(folder / "chats.jsonl", [*chats, chats[0]])
    (folder / "browsed.yaml").write_text(MANIFEST)
    return folder / "browsed.yaml"


def make_run(folder: Path) -> Session:
    """Run all stages except training."""
    session = open_session(str(write_project(folder)), [], str(folder / "store"))
    for name, node in session.plan.items():
        if not node.stage.torchrun:
            Runner(session, lambda event: None).run_stage(name)
    return session
