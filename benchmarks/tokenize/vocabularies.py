"""Learning vocabularies: time, memory and merges against gigatoken's trainer, and the models against each other.

Every training is a process of its own with one thread, so that its memory can be told and what it prints is nowhere in
the way. Bytes per token are of other documents of the kind than were learnt from.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import Row, row
from benchmarks.tokenize.texts import books, code, first_texts, languages, text_bytes

TEXTS: dict[str, Callable[[], list[str]]] = {"english": books, "code": code, "multilingual": languages}
LEARNT_BYTES, MEASURED_BYTES = 5_000_000, 1_000_000
HELD_OUT = 5
"""One in so many documents is measured and not learnt from."""
SIZES = (8_000, 32_000)
"""Vocabularies that are compared with another trainer's."""
MODEL_SIZE = 16_000
MODELS = ("unigram", "sentencepiece_bpe", "superbpe")
SEPARATOR = b"\0<|next|>\0"
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Rows of name, ours, peer, unit, ratio (ours / peer); the peer is another trainer, or `bpe` here."""
    for kind, read in TEXTS.items():
        if not read():
            yield row(f"train_bpe_{kind}_vs_gigatoken", None, None, "MB/s", "the public test data is not here")
            continue
        for size in SIZES:
            yield from _against_gigatoken(kind, size)
        yield from _models(kind)


def _against_gigatoken(kind: str, size: int) -> Iterator[Row]:
    name = f"train_bpe_{kind}_{size // 1000}k_vs_gigatoken"
    ours, peer = _in_process(kind, "bpe", size), _in_process(kind, "gigatoken", size)
    if peer is None:
        yield row(name, None, None, "MB/s", "gigatoken is not installed")
        return
    assert ours is not None
    pairs = zip(ours["merges"], peer["merges"], strict=False)
    agree = next((at for at, (one, other) in enumerate(pairs) if one != other),
                 min(len(ours["merges"]), len(peer["merges"])))
    note = (f"merges equal: {'yes' if ours['merges'] == peer['merges'] else 'no'}; the first {agree:,} of "
            f"{len(ours['merges']):,} agree, the peer has {len(peer['merges']):,}")
    yield row(name, ours["rate"], peer["rate"], "MB/s", note)
    yield row(f"{name}: memory", ours["memory"], peer["memory"], "MB")


def _models(kind: str) -> Iterator[Row]:
    bpe = _in_process(kind, "bpe", MODEL_SIZE)
    assert bpe is not None
    for model in MODELS:
        found = _in_process(kind, model, MODEL_SIZE)
        if found is None:
            yield row(f"train_{model}_{kind}_vs_bpe", None, None, "MB/s", "sentencepiece is not installed")
            continue
        for what, key, unit in (("train", "rate", "MB/s"), ("memory", "memory", "MB"),
                                ("compression", "bytes_per_token", "bytes/token")):
            yield row(f"{what}_{model}_{kind}_vs_bpe", found[key], bpe[key], unit)


def _in_process(kind: str, trainer: str, size: int) -> dict[str, Any] | None:
    """What one training took and gave; None where its package is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run([sys.executable, "-m", __name__, kind, trainer, str(size), str(path)], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        found: dict[str, Any] | None = json.loads(path.read_text())
        return found


def _measure(kind: str, trainer: str, size: int) -> dict[str, Any] | None:
    texts = TEXTS[kind]()
    held_out = first_texts(texts[::HELD_OUT], MEASURED_BYTES)
    learnt = first_texts([text for at, text in enumerate(texts) if at % HELD_OUT], LEARNT_BYTES)
    try:
        train = _trainer(trainer, learnt, size)
    except ImportError:
        return None
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    tokenizer = train()
    seconds = time.process_time() - begun
    found = {"rate": text_bytes(learnt) / MEGA / seconds,
             "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}
    if isinstance(tokenizer, list):
        return {**found, "merges": tokenizer}
    tokenizer.encode_special_tokens = True
    tokens = sum(len(one.ids) for one in tokenizer.encode_batch_fast(held_out, add_special_tokens=False))
    merges = json.loads(tokenizer.to_str())["model"].get("merges", [])
    return {**found, "merges": merges, "bytes_per_token": text_bytes(held_out) / tokens}


def _trainer(name: str, texts: Sequence[str], size: int) -> Callable[[], Any]:
    """What trains, with all that it needs imported.

    Raises:
        ImportError: a package is not installed.
    """
    if name != "gigatoken":
        from gristmill.tokenize.encoding.sample import TokenizerSample
        from gristmill.tokenize.encoding.vocabulary import train

        if name == "unigram":
            import sentencepiece  # noqa: F401
        return lambda: train(TokenizerSample({"text": texts}, {}), size, model=name)  # type: ignore[arg-type]
    import gigatoken

    from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
    from gristmill.tokenize.encoding.pretokens import byte_characters

    content, spelt = SEPARATOR.join(text.encode() for text in texts), byte_characters()

    def work() -> list[list[str]]:
        _, merges = gigatoken.train_bpe(content, size, [*SPECIAL_TOKENS], separator=SEPARATOR)
        return [["".join(spelt[byte] for byte in side) for side in merge] for merge in merges]

    return work


if __name__ == "__main__":
    kind, trainer, size, path = sys.argv[1:]
    Path(path).write_text(json.dumps(_measure(kind, trainer, int(size))))
