"""Learning vocabularies: time, memory and merges against gigatoken's trainer, and the models against each other.

Every training is a process of its own with one thread, so that its memory can be told and what it prints is nowhere in
the way. Bytes per token are of other documents of the kind than were learnt from.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measuring import Row, row
from benchmarks.tokenize.texts import books, code, first_texts, languages, text_bytes
from gristmill.mixtures.tokenizer import CHARACTER_COVERAGE

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
    ours, peer = in_process(kind, "bpe", size), in_process(kind, "gigatoken", size)
    if peer is None:
        yield row(name, None, None, "MB/s", "gigatoken is not installed")
        return
    assert ours is not None
    pairs = zip(ours["merges"], peer["merges"], strict=False)
    agree = next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours["merges"]), len(peer["merges"]))
    )
    note = (
        f"merges equal: {'yes' if ours['merges'] == peer['merges'] else 'no'}; the first {agree:,} of "
        f"{len(ours['merges']):,} agree, the peer has {len(peer['merges']):,}"
    )
    yield row(name, ours["rate"], peer["rate"], "MB/s", note)
    yield row(f"{name}: memory", ours["memory"], peer["memory"], "MB")


def _models(kind: str) -> Iterator[Row]:
    learnt = {model: in_process(kind, model, MODEL_SIZE) for model in ("bpe", *MODELS, "sentencepiece")}
    for model, peer in (*((model, "bpe") for model in MODELS), ("sentencepiece_bpe", "sentencepiece")):
        ours, theirs = learnt[model], learnt[peer]
        if ours is None or theirs is None:
            yield row(f"train_{model}_{kind}_vs_{peer}", None, None, "MB/s", "sentencepiece is not installed")
            continue
        for what, key, unit in (
            ("train", "rate", "MB/s"),
            ("memory", "memory", "MB"),
            ("compression", "bytes_per_token", "bytes/token"),
            ("encode", "encoding", "MB/s"),
        ):
            if key in ours and key in theirs:
                note = f"by {ours['encoder']}, warm" if key == "encoding" else ""
                yield row(f"{what}_{model}_{kind}_vs_{peer}", ours[key], theirs[key], unit, note)


def in_process(kind: str, trainer: str, size: int) -> dict[str, Any] | None:
    """What one training took and gave; None where its package is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", __name__, kind, trainer, str(size), str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
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
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, begun = _peak_mb(), time.process_time()
    tokenizer = train()
    seconds = time.process_time() - begun
    found = {"rate": text_bytes(learnt) / MEGA / seconds, "memory": _peak_mb() - before}
    if isinstance(tokenizer, list):
        return {**found, "merges": tokenizer}
    if trainer == "sentencepiece":
        return {**found, "bytes_per_token": text_bytes(held_out) / sum(map(len, tokenizer.encode(held_out)))}
    tokenizer.encode_special_tokens = True
    encoder, encode = _encoder(tokenizer)
    encode(learnt)
    begun = time.process_time()
    tokens = encode(held_out)
    seconds = time.process_time() - begun
    merges = json.loads(tokenizer.to_str())["model"].get("merges", [])
    return {
        **found,
        "merges": merges,
        "bytes_per_token": text_bytes(held_out) / tokens,
        "encoder": encoder,
        "encoding": text_bytes(held_out) / MEGA / seconds,
    }


def _encoder(tokenizer: Any) -> tuple[str, Callable[[Sequence[str]], int]]:
    """What the stage `tokenize` encodes with, and a function that counts the tokens of texts."""
    from gristmill.tokenize.encoding.fast_encode import FastEncoder
    from gristmill.tokenize.encoding.known_tokenizers import NotKnownError

    try:
        fast = FastEncoder.for_tokenizer(tokenizer)
    except NotKnownError:
        return "the library", lambda texts: sum(
            len(one.ids) for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        )
    return "gigatoken", lambda texts: len(fast.encode(pa.array(texts, pa.large_string()))[0])


def _peak_mb() -> float:
    """The most memory of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / MEGA


def _trainer(name: str, texts: Sequence[str], size: int) -> Callable[[], Any]:
    """What trains, with all that it needs imported.

    Raises:
        ImportError: a package is not installed.
    """
    if name != "gigatoken":
        from gristmill.tokenize.encoding.vocabulary import train
        from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

        if name in ("unigram", "sentencepiece"):
            import sentencepiece  # noqa: F401
        if name == "sentencepiece":
            return lambda: _sentencepiece(texts, size)
        return lambda: train(TokenizerSample({"text": texts}, {}), size, model=name)  # type: ignore[arg-type]
    import gigatoken

    from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
    from gristmill.tokenize.encoding.pretokens import byte_characters

    content, spelt = SEPARATOR.join(text.encode() for text in texts), byte_characters()

    def work() -> list[list[str]]:
        _, merges = gigatoken.train_bpe(content, size, [*SPECIAL_TOKENS], separator=SEPARATOR)
        return [["".join(spelt[byte] for byte in side) for side in merge] for merge in merges]

    return work


def _sentencepiece(texts: Sequence[str], size: int) -> Any:
    """What `sentencepiece` itself learns as `sentencepiece_bpe`; it wants lines."""
    import sentencepiece

    found = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")),
        model_writer=found,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=CHARACTER_COVERAGE,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        max_sentence_length=1 << 20,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=found.getvalue())


if __name__ == "__main__":
    kind, trainer, size, path = sys.argv[1:]
    Path(path).write_text(json.dumps(_measure(kind, trainer, int(size))))
